//! Which algorithm runs: a pure function of inputs that all ranks agreed on, so that all ranks choose alike.
#![forbid(unsafe_code)]

use super::{Algorithm, Collective, DEFAULT_CHUNK, Shape};

/// What the choice depends on besides the shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// Bytes that a step moves at a time (see [`super::Plan::chunk`]).
    pub(crate) chunk: usize,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { chunk: DEFAULT_CHUNK }
    }
}

/// What was chosen and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) algorithm: Algorithm,
    pub(crate) reason: Reason,
    /// For [`super::Plan::chunk`].
    pub(crate) chunk: usize,
}

/// Why an algorithm was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// No other algorithm can do it.
    OnlyOne,
    /// The cost model says so.
    Cheapest,
}

/// Chooses the algorithm for a shape. Does not look at `rank` or `in_place`.
pub(crate) fn choose(shape: &Shape, tuning: &Tuning) -> Choice {
    let (algorithm, reason) = if shape.size == 1 {
        (Algorithm::Local, Reason::OnlyOne)
    } else {
        match &shape.collective {
            Collective::Barrier => (Algorithm::Dissemination, Reason::OnlyOne),
            Collective::AllReduce { count } => {
                let limit = if shape.size == 2 { 64 << 10 } else { 12 << 10 };
                let bytes = count.saturating_mul(shape.raw_size);
                (if bytes <= limit { Algorithm::OneShot } else { Algorithm::TwoShot }, Reason::Cheapest)
            }
            Collective::AllGather { .. } | Collective::ReduceScatter { .. } => {
                (Algorithm::Direct, Reason::OnlyOne)
            }
            Collective::Broadcast { .. } if shape.size <= 3 => (Algorithm::Direct, Reason::Cheapest),
            Collective::Broadcast { .. } => (Algorithm::Binomial, Reason::Cheapest),
        }
    };
    Choice { algorithm, reason, chunk: tuning.chunk }
}
