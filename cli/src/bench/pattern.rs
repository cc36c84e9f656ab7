//! Inputs whose reduction is exact in every element type and in every order, and what comes out.
//!
//! All values are small integers, so every partial result is exact: no rounding can hide a wrong element, and
//! none can make a right one look wrong. They repeat with a period that is prime, so that nothing that is
//! shifted by a power of two, or by a multiple of it, looks right.

use raccl::{DType, ReduceOp};

/// Elements after which the values repeat.
const PERIOD: usize = 4099;

/// The values of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pattern {
    pub(super) dtype: DType,
    /// None for operations that only move elements.
    pub(super) reduce: Option<ReduceOp>,
    pub(super) ranks: usize,
}

/// A number with two parts, of which the second is 0 except for complex types.
type Exact = (i64, i64);

/// One period of elements.
pub(super) struct Tile {
    dtype: DType,
    bytes: Vec<u8>,
}

/// Whether an operation can reduce elements of a type.
pub(super) fn is_reduction(dtype: DType, op: ReduceOp) -> bool {
    let complex = matches!(dtype, DType::C32 | DType::C64);
    let fractional = complex || matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64);
    match op {
        ReduceOp::Sum | ReduceOp::Prod => true,
        ReduceOp::Min | ReduceOp::Max => !complex,
        ReduceOp::Avg => fractional,
        _ => !fractional,
    }
}

impl Pattern {
    /// What a rank contributes.
    pub(super) fn input(&self, rank: usize) -> Tile {
        self.tile(|index| self.value(rank, index))
    }

    /// What comes out where the elements of all ranks are combined.
    pub(super) fn reduced(&self) -> Tile {
        self.tile(|index| {
            let mut values = (0..self.ranks).map(|rank| self.value(rank, index));
            // There is at least one rank.
            let first = values.next().unwrap_or_default();
            let (re, im) = values.fold(first, |a, b| self.combine(a, b));
            match self.reduce {
                Some(ReduceOp::Avg) => (re / self.ranks as i64, im / self.ranks as i64),
                _ => (re, im),
            }
        })
    }

    fn tile(&self, value: impl Fn(usize) -> Exact) -> Tile {
        let mut bytes = Vec::with_capacity(PERIOD * self.dtype.size());
        for index in 0..PERIOD {
            encode(self.dtype, value(index), &mut bytes);
        }
        Tile { dtype: self.dtype, bytes }
    }

    fn value(&self, rank: usize, index: usize) -> Exact {
        let mixed = mix(rank, index);
        let real = match self.reduce {
            // Exact in eight bits of significand up to 256 ranks, and rounded only once beyond.
            Some(ReduceOp::Sum) => mixed % (256 / self.ranks as i64).clamp(2, 8),
            // One rank doubles, some change the sign.
            Some(ReduceOp::Prod) if rank == index % self.ranks => 2,
            Some(ReduceOp::Prod) => 1 - 2 * (mixed % 2),
            // The sum is the number of ranks times something.
            // Neighbours differ from the average by one, up or down; the last of an odd number has no neighbour.
            Some(ReduceOp::Avg) if rank + 1 == self.ranks && rank.is_multiple_of(2) => 1 + (index % 5) as i64,
            Some(ReduceOp::Avg) => 2 + (index % 5) as i64 - 2 * (rank % 2) as i64,
            Some(ReduceOp::Min | ReduceOp::Max) | None => mixed % 101,
            Some(_) => mixed,
        };
        let complex = matches!(self.dtype, DType::C32 | DType::C64);
        match self.reduce {
            _ if !complex => (real, 0),
            // A turn by a right angle for some.
            Some(ReduceOp::Prod) if mixed % 3 == 0 => (0, real),
            Some(ReduceOp::Prod) => (real, 0),
            // Something else of the same kind.
            _ => (real, real + 1 - (index % 2) as i64),
        }
    }

    fn combine(&self, (a, b): Exact, (c, d): Exact) -> Exact {
        match self.reduce {
            Some(ReduceOp::Sum | ReduceOp::Avg) => (a + c, b + d),
            Some(ReduceOp::Prod) => (
                a.wrapping_mul(c).wrapping_sub(b.wrapping_mul(d)),
                a.wrapping_mul(d).wrapping_add(b.wrapping_mul(c)),
            ),
            Some(ReduceOp::Min) => (a.min(c), 0),
            Some(ReduceOp::Max) => (a.max(c), 0),
            Some(ReduceOp::BitAnd) => (a & c, 0),
            Some(ReduceOp::BitOr) => (a | c, 0),
            Some(ReduceOp::BitXor) => (a ^ c, 0),
            // Nothing is combined where nothing is reduced.
            _ => (a, b),
        }
    }
}

impl Tile {
    /// Fills a buffer with the elements from `first` on.
    pub(super) fn fill(&self, buffer: &mut [u8], first: usize) {
        for (part, tile) in self.parts(buffer.len(), first) {
            buffer[part].copy_from_slice(tile);
        }
    }

    /// Counts the elements of a buffer that are not those from `first` on.
    pub(super) fn count_wrong(&self, buffer: &[u8], first: usize) -> u64 {
        let size = self.dtype.size();
        let mut wrong = 0;
        for (part, tile) in self.parts(buffer.len(), first) {
            let found = &buffer[part];
            if found != tile {
                let pairs = found.chunks_exact(size).zip(tile.chunks_exact(size));
                wrong +=
                    pairs.filter(|(found, expected)| !is_same(self.dtype, found, expected)).count() as u64;
            }
        }
        wrong
    }

    /// Where in a buffer of that length which part of the tile belongs.
    fn parts(&self, length: usize, first: usize) -> impl Iterator<Item = (std::ops::Range<usize>, &[u8])> {
        let mut from = 0;
        let mut at = first % PERIOD * self.dtype.size();
        std::iter::from_fn(move || {
            let step = (length - from).min(self.bytes.len() - at);
            let part = (from..from + step, &self.bytes[at..at + step]);
            from += step;
            at = 0;
            (step > 0).then_some(part)
        })
    }
}

/// A number of 62 bits, without any likeness between neighbours: the last steps of splitmix64.
fn mix(rank: usize, index: usize) -> i64 {
    let mut x = (((rank as u64) << 32) + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 2) as i64
}

/// Makes every element of a buffer wrong.
pub(super) fn poison(buffer: &mut [u8]) {
    // In every float type a NaN, and in the integers nothing that a pattern has in most places.
    buffer.fill(0xff);
}

fn encode(dtype: DType, (re, im): Exact, bytes: &mut Vec<u8>) {
    // Casts to narrower integers keep the low bits, which is what wrapping sums and bits do as well.
    match dtype {
        DType::I8 | DType::U8 => bytes.push(re as u8),
        DType::I16 | DType::U16 => bytes.extend((re as u16).to_ne_bytes()),
        DType::I32 | DType::U32 => bytes.extend((re as u32).to_ne_bytes()),
        DType::I64 | DType::U64 => bytes.extend((re as u64).to_ne_bytes()),
        DType::F16 => bytes.extend(half::f16::from_f32(re as f32).to_ne_bytes()),
        DType::Bf16 => bytes.extend(half::bf16::from_f32(re as f32).to_ne_bytes()),
        DType::F32 => bytes.extend((re as f32).to_ne_bytes()),
        DType::F64 => bytes.extend((re as f64).to_ne_bytes()),
        DType::C32 => [re, im].into_iter().for_each(|part| bytes.extend((part as f32).to_ne_bytes())),
        DType::C64 => [re, im].into_iter().for_each(|part| bytes.extend((part as f64).to_ne_bytes())),
        // A type of a later version: no bytes, which no buffer equals.
        _ => {}
    }
}

/// Whether two elements are equal: in their bits, or because they are zeros of either sign, which products of
/// complex numbers give.
fn is_same(dtype: DType, found: &[u8], expected: &[u8]) -> bool {
    let part = match dtype {
        DType::C32 => 4,
        DType::C64 => 8,
        _ => return found == expected,
    };
    // The sign is in the last byte, or in the first.
    let zero = |part: &[u8]| {
        let sign = if cfg!(target_endian = "little") { part.len() - 1 } else { 0 };
        part.iter().enumerate().all(|(index, &byte)| byte == 0 || index == sign && byte == 0x80)
    };
    found.chunks_exact(part).zip(expected.chunks_exact(part)).all(|(a, b)| a == b || zero(a) && zero(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// The library's own fold over the ranks' inputs is the second opinion.
    #[test]
    fn what_is_expected_is_what_the_library_computes() {
        let pairs = DType::ALL.into_iter().flat_map(|dtype| OPS.into_iter().map(move |op| (dtype, op)));
        let pairs: Vec<_> = pairs.filter(|&(dtype, op)| is_reduction(dtype, op)).collect();
        for ranks in [1, 2, 3, 4, 7] {
            let group = raccl::local_group(ranks).expect("a group");
            std::thread::scope(|scope| {
                for comm in &group {
                    scope.spawn(|| {
                        for &(dtype, op) in &pairs {
                            let pattern = Pattern { dtype, reduce: Some(op), ranks };
                            let mut buffer = vec![0; (PERIOD + 5) * dtype.size()];
                            pattern.input(comm.rank()).fill(&mut buffer, 3);
                            raccl::ByteCommunicator::all_reduce(comm, &mut buffer, dtype, op).expect("works");
                            let wrong = pattern.reduced().count_wrong(&buffer, 3);
                            assert_eq!(wrong, 0, "{op} of {dtype} on {ranks} ranks");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn every_kind_of_damage_is_counted() {
        let pattern = Pattern { dtype: DType::F32, reduce: Some(ReduceOp::Sum), ranks: 4 };
        let (input, reduced) = (pattern.input(1), pattern.reduced());
        let count = 3 * PERIOD;
        let mut buffer = vec![0; 4 * count];
        reduced.fill(&mut buffer, 0);
        assert_eq!(reduced.count_wrong(&buffer, 0), 0);
        // One bit, anywhere.
        for at in [0, 4 * PERIOD + 1, 4 * count - 1] {
            buffer[at] ^= 4;
            assert_eq!(reduced.count_wrong(&buffer, 0), 1);
            buffer[at] ^= 4;
        }
        // Shifted by a power of two, not reduced at all, nothing written.
        for shift in [1, 16, 1024, 4096] {
            assert!(reduced.count_wrong(&buffer, shift) > count as u64 / 2);
        }
        assert!(input.count_wrong(&buffer, 0) > count as u64 / 2);
        poison(&mut buffer);
        assert_eq!(reduced.count_wrong(&buffer, 0), count as u64);
    }

    #[test]
    fn poison_is_wrong_for_every_type() {
        for dtype in DType::ALL {
            for reduce in OPS.into_iter().filter(|&op| is_reduction(dtype, op)).map(Some).chain([None]) {
                let pattern = Pattern { dtype, reduce, ranks: 3 };
                let mut buffer = vec![0; PERIOD * dtype.size()];
                poison(&mut buffer);
                let wrong = pattern.reduced().count_wrong(&buffer, 0);
                assert!(wrong > PERIOD as u64 / 4, "{wrong} of {dtype} {reduce:?}");
            }
        }
    }
}
