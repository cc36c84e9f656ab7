//! What an algorithm costs: each one counts its messages and bytes on the longest path, the tuning says what they take.
#![forbid(unsafe_code)]

use super::{
    Algorithm, Collective, Shape, Tuning, bidirectional_ring, binomial, chain, direct, dissemination, line,
    one_shot, recursive_doubling, recursive_halving, relay, ring, two_shot,
};

/// No buffer is larger, and a few times as much does not overflow.
const MOST_BYTES: u64 = 1 << 56;

/// What lies on the longest path of an operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Messages one behind the other, each of which waits for the one before to arrive.
    pub(crate) latencies: u64,
    /// Messages that the busiest rank on the path sends.
    pub(crate) messages: u64,
    /// Bytes over the busiest link or port.
    pub(crate) bytes: u64,
    /// Bytes of operands folded into others, as the user has them.
    pub(crate) folded: u64,
}

/// The cost of an algorithm; `None` when it cannot do what is asked for, exactly as with [`super::make`].
pub(crate) fn cost(shape: &Shape, algorithm: Algorithm, tuning: &Tuning) -> Option<Cost> {
    match algorithm {
        Algorithm::Local => (shape.size == 1).then(Cost::default),
        _ if shape.size == 1 => None,
        Algorithm::OneShot => one_shot::cost(shape, tuning),
        Algorithm::TwoShot => two_shot::cost(shape, tuning),
        Algorithm::Direct => direct::cost(shape, tuning),
        Algorithm::Dissemination => dissemination::cost(shape),
        Algorithm::RecursiveDoubling => recursive_doubling::cost(shape),
        Algorithm::RecursiveHalving => recursive_halving::cost(shape),
        Algorithm::Binomial => binomial::cost(shape, tuning),
        Algorithm::Chain => chain::cost(shape, tuning),
        Algorithm::Relay => relay::cost(shape, tuning),
        Algorithm::BidirectionalRing => bidirectional_ring::cost(shape, tuning),
        Algorithm::Line => line::cost(shape, tuning),
        Algorithm::Ring => ring::cost(shape, tuning),
    }
}

impl Cost {
    /// The time it takes, in picoseconds.
    pub(crate) fn picoseconds(&self, tuning: &Tuning) -> u64 {
        let Tuning { latency_ns, message_ns, byte_ps, fold_ps, .. } = *tuning;
        [
            self.latencies.saturating_mul(latency_ns).saturating_mul(1000),
            self.messages.saturating_mul(message_ns).saturating_mul(1000),
            self.bytes.saturating_mul(byte_ps),
            self.folded.saturating_mul(fold_ps),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

impl Shape {
    /// The size of the operation as reports and overrides count it: the buffer of one rank for all-reduce and broadcast, all
    /// parts for all-gather and reduce-scatter.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.collective {
            Collective::Barrier => 0,
            Collective::AllReduce { count } | Collective::Broadcast { count, .. } => self.raw_bytes(*count),
            Collective::AllGather { counts } | Collective::ReduceScatter { counts } => {
                self.part_bytes(counts).total
            }
        }
    }

    pub(super) fn raw_bytes(&self, elements: usize) -> u64 {
        (elements as u64).saturating_mul(self.raw_size as u64).min(MOST_BYTES)
    }

    /// The bytes of elements that are `bytes` as the user has them when they travel as partial results.
    pub(super) fn as_partials(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.acc_size as u64) / (self.raw_size as u64).max(1)
    }

    pub(super) fn part_bytes(&self, counts: &[usize]) -> PartBytes {
        let bytes = || counts.iter().map(|&count| self.raw_bytes(count));
        PartBytes {
            total: bytes().fold(0, u64::saturating_add),
            largest: bytes().max().unwrap_or(0),
            smallest: bytes().min().unwrap_or(0),
        }
    }

    /// Equal parts, one for each rank.
    pub(super) fn even_parts(&self, count: usize) -> PartBytes {
        let total = self.raw_bytes(count);
        PartBytes { total, largest: self.even_part_bytes(count), smallest: self.raw_bytes(count / self.size) }
    }

    /// The bytes of the largest of equal parts, one for each rank.
    pub(super) fn even_part_bytes(&self, count: usize) -> u64 {
        self.raw_bytes(count.div_ceil(self.size))
    }
}

/// The parts of an operation, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartBytes {
    pub(super) total: u64,
    pub(super) largest: u64,
    pub(super) smallest: u64,
}

impl PartBytes {
    /// The bytes of all parts but the smallest: what the unluckiest rank has to get from others.
    pub(super) fn others(&self) -> u64 {
        self.total - self.smallest
    }

    /// `numerator / denominator` of all bytes, without overflow.
    pub(super) fn fraction(&self, numerator: usize, denominator: usize) -> u64 {
        fraction(self.total, numerator, denominator)
    }
}

/// `numerator / denominator` of a number, rounded up, without overflow. The fraction must not be above 2^32.
pub(super) fn fraction(whole: u64, numerator: usize, denominator: usize) -> u64 {
    let part = (u128::from(whole) * numerator as u128).div_ceil(denominator as u128);
    u64::try_from(part).unwrap_or(u64::MAX)
}
