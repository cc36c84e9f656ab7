//! Every kernel against a scalar oracle, bit by bit.

mod oracle;

use std::num::NonZeroU32;

use half::{bf16, f16};
use num_complex::Complex;
use proptest::prelude::*;

use self::oracle::{Value, is, oracle, read};
use super::dispatch::Level;
use super::{
    Avg, BitAnd, BitOr, BitXor, Custom, DType, Max, Min, Number, Operation, Prod, ReduceOp, Reducer, Repr,
    Source, Sum, reduce_local,
};

/// A small generator, so that a case is told by its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // Steele, Lea and Flood's SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// One element: any bits, a number of ordinary size, or one of the values at the edges.
    fn element(&mut self, dtype: DType, repr: Repr, out: &mut Vec<u8>) {
        let bits = self.next();
        match dtype {
            DType::F16 if repr == Repr::Raw => {
                let edges = [
                    0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xfe00,
                    0x3c00,
                ];
                let ordinary = f16::from_f32(self.ordinary() as f32).to_bits();
                out.extend(self.one_of(bits as u16, ordinary, &edges).to_ne_bytes());
            }
            DType::Bf16 if repr == Repr::Raw => {
                let edges = [
                    0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0xffc0, 0x3f80,
                ];
                let ordinary = bf16::from_f32(self.ordinary() as f32).to_bits();
                out.extend(self.one_of(bits as u16, ordinary, &edges).to_ne_bytes());
            }
            DType::F16 | DType::Bf16 | DType::F32 => self.single(bits, out),
            DType::C32 => {
                self.single(bits, out);
                let bits = self.next();
                self.single(bits, out);
            }
            DType::F64 => self.double(bits, out),
            DType::C64 => {
                self.double(bits, out);
                let bits = self.next();
                self.double(bits, out);
            }
            _ => {
                let edges = [
                    0,
                    1,
                    u64::MAX,
                    0x7f,
                    0x80,
                    0x7fff,
                    0x8000,
                    i32::MAX as u64,
                    1 << 31,
                    i64::MAX as u64,
                    1 << 63,
                ];
                let ordinary = self.next() % 100;
                out.extend(&self.one_of(bits, ordinary, &edges).to_le_bytes()[..dtype.size()]);
            }
        }
    }

    fn single(&mut self, bits: u64, out: &mut Vec<u8>) {
        // Among them: signalling and all-ones NaN, halfway cases of bf16 and f16, and f16's smallest and largest.
        let edges = [
            0,
            0x8000_0000,
            1,
            0x807f_ffff,
            0x0080_0000,
            0x7f7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7f80_0001,
            0x7fff_ffff,
            0xffff_ffff,
            0x3f80_8000,
            0x3f81_8000,
            0x3f80_8001,
            0x7f7f_8000,
            0x3f80_1000,
            0x3f80_3000,
            0x3300_0000,
            0x3300_0001,
            0x3380_0000,
            0x387f_f000,
            0x477f_e000,
            0x477f_f000,
            0x477f_efff,
        ];
        let ordinary = (self.ordinary() as f32).to_bits();
        out.extend(self.one_of(bits as u32, ordinary, &edges).to_ne_bytes());
    }

    fn double(&mut self, bits: u64, out: &mut Vec<u8>) {
        let edges = [
            0,
            1 << 63,
            1,
            0x800f_ffff_ffff_ffff,
            0x0010_0000_0000_0000,
            0x7fef_ffff_ffff_ffff,
            0x7ff0_0000_0000_0000,
            0xfff0_0000_0000_0000,
            0x7ff0_0000_0000_0001,
            u64::MAX,
            0x3ff0_0000_0000_0000,
        ];
        let ordinary = self.ordinary().to_bits();
        out.extend(self.one_of(bits, ordinary, &edges).to_ne_bytes());
    }

    /// A number between -4 and 4.
    fn ordinary(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 50) as f64 - 4.0
    }

    fn one_of<T: Copy>(&mut self, any: T, ordinary: T, edges: &[T]) -> T {
        match self.below(4) {
            0 => any,
            1 => edges[self.below(edges.len())],
            _ => ordinary,
        }
    }
}

/// One fold: its shape, and a seed for everything else.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    sources: usize,
    count: usize,
    seed: u64,
}

impl Case {
    /// Runs the case on every level.
    fn check(&self) {
        let Case { dtype, op, sources: n, count, .. } = *self;
        let mut random = Random(self.seed);
        let reducer = Reducer::builtin(dtype, op).expect("the case has a meaning");
        let size = |repr| reducer.size(repr);

        let some_acc = random.below(2) == 0;
        let reprs: Vec<Repr> =
            (0..n).map(|_| if some_acc && random.below(2) == 0 { Repr::Acc } else { Repr::Raw }).collect();
        let to = if random.below(3) == 0 { Repr::Acc } else { Repr::Raw };
        let finish = (random.below(3) > 0).then(|| NonZeroU32::new(1 + random.below(40) as u32).unwrap());
        let stream = random.below(3) == 0;
        let inputs: Vec<Vec<u8>> = reprs
            .iter()
            .map(|&repr| {
                let mut bytes = Vec::new();
                (0..count).for_each(|_| random.element(dtype, repr, &mut bytes));
                bytes
            })
            .collect();
        // The destination is one of the sources, where that is allowed, or memory of its own.
        let aliases: Vec<bool> =
            reprs.iter().map(|&repr| size(repr) == size(to) && random.below(4) == 0).collect();
        let alias = aliases.iter().position(|alias| *alias);

        let element = |source: usize, index: usize| {
            let size = size(reprs[source]);
            &inputs[source][index * size..][..size]
        };
        let expected: Vec<Value> = (0..count)
            .map(|index| {
                let values: Vec<Value> = (0..n)
                    .map(|i| {
                        // Several sources that are the destination are one and the same.
                        let source = if aliases[i] { alias.unwrap() } else { i };
                        read(dtype, reprs[i], element(source, index))
                    })
                    .collect();
                oracle(dtype, op, &values, finish)
            })
            .collect();

        for level in Level::available() {
            const GUARD: usize = 96;
            let mut misaligned: Vec<(Vec<u8>, usize)> = Vec::new();
            for input in &inputs {
                let offset = random.below(2) * random.below(GUARD);
                let mut memory = vec![0xa5; offset];
                memory.extend(input);
                misaligned.push((memory, offset));
            }
            let bytes = count * size(to);
            let offset = if stream { GUARD / size(to) * size(to) } else { random.below(GUARD) };
            let mut dst = vec![0x5a; offset + bytes + GUARD];
            if let Some(alias) = alias {
                dst[offset..offset + bytes].copy_from_slice(&inputs[alias]);
            }
            let into = dst[offset..].as_mut_ptr();
            let sources: Vec<Source> = (0..n)
                .map(|i| {
                    let (memory, offset) = &misaligned[i];
                    let own = memory[*offset..].as_ptr();
                    Source { ptr: if aliases[i] { into.cast_const() } else { own }, repr: reprs[i] }
                })
                .collect();

            let reducer = Reducer::builtin_at(level, dtype, op).unwrap();
            let reducer = if stream { reducer.for_output_of(usize::MAX) } else { reducer };
            // SAFETY: every source holds `count` elements of its representation, the destination too; only
            // sources that are the destination exactly overlap it.
            unsafe { reducer.fold(&sources, into, to, finish, count) };

            for (index, expected) in expected.iter().enumerate() {
                let got = &dst[offset + index * size(to)..][..size(to)];
                assert!(
                    is(dtype, to, got, *expected),
                    "{level:?}: element {index} is {:?} instead of {expected:?} in {self:?} ({reprs:?} to {to:?}, \
                     finish {finish:?}, alias {alias:?}, stream {stream})",
                    read(dtype, to, got),
                );
            }
            assert!(dst[..offset].iter().all(|byte| *byte == 0x5a), "{level:?} wrote before {self:?}");
            assert!(
                dst[offset + bytes..].iter().all(|byte| *byte == 0x5a),
                "{level:?} wrote behind {self:?}"
            );
        }
    }
}

fn every_pair() -> impl Iterator<Item = (DType, ReduceOp)> {
    DType::ALL
        .into_iter()
        .flat_map(|dtype| ReduceOp::BUILTIN.map(|op| (dtype, op)))
        .filter(|(dtype, op)| Reducer::builtin(*dtype, *op).is_some())
}

#[test]
fn every_type_and_operation_agrees_with_the_oracle_on_every_level() {
    let mut seed = 0;
    for (dtype, op) in every_pair() {
        for sources in (1..=17).chain([31, 64, 70]) {
            for count in [1, 2 + sources % 31, 131 + 17 * (sources % 5)] {
                seed += 1;
                Case { dtype, op, sources, count, seed }.check();
            }
        }
    }
}

#[test]
fn nothing_is_touched_where_there_is_nothing_to_fold() {
    for (dtype, op) in every_pair() {
        for sources in [1, 2, 3, 17] {
            Case { dtype, op, sources, count: 0, seed: 1 }.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_fold_agrees_with_the_oracle(
        pair in proptest::sample::select(every_pair().collect::<Vec<_>>()),
        sources in 1..40_usize,
        count in 0..700_usize,
        seed: u64,
    ) {
        Case { dtype: pair.0, op: pair.1, sources, count, seed }.check();
    }
}

#[test]
fn pairs_without_meaning_have_no_kernel() {
    for dtype in DType::ALL {
        let complex = matches!(dtype, DType::C32 | DType::C64);
        let float = matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64);
        for op in ReduceOp::BUILTIN {
            let meaningful = match op {
                ReduceOp::Sum | ReduceOp::Prod => true,
                ReduceOp::Min | ReduceOp::Max => !complex,
                ReduceOp::Avg => float || complex,
                _ => !float && !complex,
            };
            for level in Level::available() {
                let kernel = Reducer::builtin_at(level, dtype, op);
                assert_eq!(kernel.is_some(), meaningful, "{op} of {dtype} on {level:?}");
            }
        }
        assert!(Reducer::builtin(dtype, ReduceOp::Custom).is_none());
    }
}

/// Runs a fold of one source on one level.
fn converted(level: Level, dtype: DType, from: Repr, to: Repr, input: &[u8], count: usize) -> Vec<u8> {
    // Only a product is never divided, so that a fold of one is nothing but its conversions.
    let reducer = Reducer::builtin_at(level, dtype, ReduceOp::Prod).unwrap();
    let mut output = vec![0; count * reducer.size(to)];
    assert_eq!(input.len(), count * reducer.size(from));
    let source = Source { ptr: input.as_ptr(), repr: from };
    // SAFETY: input and output hold `count` elements of their representation.
    unsafe { reducer.fold(&[source], output.as_mut_ptr(), to, None, count) };
    output
}

#[test]
fn every_half_is_widened_exactly() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for level in Level::available() {
        for dtype in [DType::F16, DType::Bf16] {
            let input = bytemuck::cast_slice(&halves);
            let output = converted(level, dtype, Repr::Raw, Repr::Acc, input, halves.len());
            for (half, wide) in halves.iter().zip(output.chunks(4)) {
                let expected = read(dtype, Repr::Raw, &half.to_ne_bytes());
                assert!(
                    is(dtype, Repr::Acc, wide, expected),
                    "{half:#06x} of {dtype} on {level:?}: {wide:x?}"
                );
            }
        }
    }
}

#[test]
fn every_half_and_what_lies_around_it_is_rounded_to_nearest_even() {
    // Below, at and above each half and each middle between two, for the 16 bits that bf16 cuts off and the 13 that
    // f16 does; among them every quiet NaN and signalling ones whose tail alone makes them NaN.
    let tails =
        [0_u32, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xf000, 0xffff];
    for tail in tails {
        let wide: Vec<f32> =
            (0..=u32::from(u16::MAX)).map(|head| f32::from_bits(head << 16 | tail)).collect();
        for level in Level::available() {
            for dtype in [DType::F16, DType::Bf16] {
                let input = bytemuck::cast_slice(&wide);
                let output = converted(level, dtype, Repr::Acc, Repr::Raw, input, wide.len());
                for (wide, half) in wide.iter().zip(output.chunks(2)) {
                    let right = is(dtype, Repr::Raw, half, Value::Single(*wide));
                    assert!(right, "{:#010x} to {dtype} on {level:?}: {half:x?}", wide.to_bits());
                }
            }
        }
    }
}

#[test]
fn the_classes_of_numbers_are_those_that_have_kernels() {
    fn has<T: Number>(operations: &[&dyn Operation<T>]) {
        let typed: Vec<ReduceOp> = operations.iter().map(|operation| operation.reducer().op()).collect();
        for op in ReduceOp::BUILTIN {
            let builtin = Reducer::builtin(T::DTYPE, op).is_some();
            assert_eq!(typed.contains(&op), builtin, "{op} of {}", T::DTYPE);
        }
        for operation in operations {
            assert_eq!(operation.reducer().dtype_code(), T::DTYPE.code());
            assert_eq!(operation.reducer().raw_size(), size_of::<T>());
        }
    }
    macro_rules! integers {
        ($($type:ty),*) => { $(has::<$type>(&[&Sum, &Prod, &Min, &Max, &BitAnd, &BitOr, &BitXor]);)* };
    }
    integers!(i8, i16, i32, i64, u8, u16, u32, u64);
    has::<f16>(&[&Sum, &Prod, &Min, &Max, &Avg]);
    has::<bf16>(&[&Sum, &Prod, &Min, &Max, &Avg]);
    has::<f32>(&[&Sum, &Prod, &Min, &Max, &Avg]);
    has::<f64>(&[&Sum, &Prod, &Min, &Max, &Avg]);
    has::<Complex<f32>>(&[&Sum, &Prod, &Avg]);
    has::<Complex<f64>>(&[&Sum, &Prod, &Avg]);
}

#[test]
fn functions_are_applied_in_rank_order_at_any_alignment_and_in_place() {
    // Joins two runs of numbered ranks; anything but neighbours in order makes a run that is no run.
    type Run = [u8; 3];
    const BROKEN: Run = [255; 3];
    let join = Custom::new(|left: &Run, right: &Run| {
        if left[2] + 1 == right[1] && left[0] == right[0] { [left[0], left[1], right[2]] } else { BROKEN }
    });
    for n in 1..=20_u8 {
        let count = 5;
        let inputs: Vec<Vec<u8>> =
            (0..n).map(|rank| (0..count).flat_map(|element| [element, rank, rank]).collect()).collect();
        for in_place in 0..n {
            let mut output = [&[0], inputs[usize::from(in_place)].as_slice()].concat();
            let into = output[1..].as_mut_ptr();
            let sources: Vec<Source> = (0..n)
                .map(|rank| {
                    Source::raw(if rank == in_place { into } else { inputs[usize::from(rank)].as_ptr() })
                })
                .collect();
            let reducer = Operation::<Run>::reducer(&join);
            // SAFETY: every source holds `count` elements; the one that overlaps the destination is the destination.
            unsafe { reducer.fold(&sources, into, Repr::Raw, None, count.into()) };
            let expected: Vec<u8> = (0..count).flat_map(|element| [element, 0, n - 1]).collect();
            assert_eq!(output[1..], expected, "{n} sources, in place of {in_place}");
        }
    }
}

#[test]
fn a_panic_in_a_function_reaches_the_caller() {
    let fussy = Custom::new(|left: &u32, right: &u32| {
        if left != right {
            panic!("they differ");
        }
        *left
    });
    let caught = std::panic::catch_unwind(|| reduce_local(fussy, &[&[1, 2], &[1, 3]], &mut [0; 2]));
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"they differ"));
}

#[test]
#[should_panic(expected = "input 1 of reduce_local has 3 elements, the output 2")]
fn inputs_of_another_length_are_refused() {
    reduce_local(Sum, &[&[1, 2], &[1, 2, 3]], &mut [0; 2]);
}

#[test]
fn the_average_of_one_rank_is_its_value() {
    let mut output = [0.0; 3];
    reduce_local(Avg, &[&[0.1, -0.0, f64::MAX]], &mut output);
    assert_eq!(output.map(f64::to_bits), [0.1, -0.0, f64::MAX].map(f64::to_bits));
}
