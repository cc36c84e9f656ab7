//! Algorithms as data: what each rank sends, receives and folds, and in which order.
//!
//! A plan is made by a pure function of [`Shape`] and knows nothing of memory, I/O or time. The engine runs it over any
//! link; the verifier proves it; the simulator, which runs plans on a model of the machine, checks what is predicted of it.
//!
//! One file per algorithm turns a shape into [`steps::Steps`]; [`make`] is the door to them all, [`choose`] picks one.
#![forbid(unsafe_code)]

mod algorithm;
mod bidirectional_ring;
mod binomial;
mod chain;
mod cost;
mod direct;
mod dissemination;
mod line;
mod one_shot;
mod overrides;
mod partials;
mod parts;
mod recursive_doubling;
mod recursive_halving;
mod relay;
mod ring;
mod routed;
mod select;
#[cfg(test)]
mod simulate;
mod steps;
#[cfg(test)]
mod tests;
mod tree;
mod tuning;
mod two_shot;
mod two_sided;
#[cfg(test)]
mod verify;

use std::ops::Range;

use crate::reduce::Repr;

pub use algorithm::Algorithm;
pub(crate) use cost::{Cost, cost};
pub(crate) use overrides::{OverrideError, Overrides};
pub(crate) use select::{choose, explain};
pub(crate) use tuning::{Cabling, Tuning};

/// Bytes that a step moves at a time when the tuning says nothing else.
pub(crate) const DEFAULT_CHUNK: usize = 128 << 10;

/// The plan of `shape.rank` by the given algorithm; `None` when the algorithm cannot do what is asked for.
pub(crate) fn make(shape: &Shape, algorithm: Algorithm) -> Option<Plan> {
    assert!(shape.rank < shape.size, "rank {} of {}", shape.rank, shape.size);
    let steps = match algorithm {
        Algorithm::Local => direct::local(shape),
        _ if shape.size == 1 => None,
        Algorithm::OneShot => one_shot::make(shape),
        Algorithm::TwoShot => two_shot::make(shape),
        Algorithm::Direct => direct::make(shape),
        Algorithm::Dissemination => dissemination::make(shape),
        Algorithm::RecursiveDoubling => recursive_doubling::make(shape),
        Algorithm::RecursiveHalving => recursive_halving::make(shape),
        Algorithm::Binomial => binomial::make(shape),
        Algorithm::Chain => chain::make(shape),
        Algorithm::Relay => relay::make(shape),
        Algorithm::BidirectionalRing => bidirectional_ring::make(shape),
        Algorithm::Line => line::make(shape),
        Algorithm::Ring => ring::make(shape),
    }?;
    Some(steps.into_plan(algorithm))
}

/// What a plan is made for. Two ranks of one group differ only in `rank`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// The operation, with its root and lengths.
    pub(crate) collective: Collective,
    /// This rank within the communicator.
    pub(crate) rank: usize,
    /// Number of ranks, at least 1.
    pub(crate) size: usize,
    /// True when `Output` and `Input` are the same memory (see [`Buffer`]).
    pub(crate) in_place: bool,
    /// Bytes of an element as the user has it.
    pub(crate) raw_size: usize,
    /// Bytes of an element as partial results have it (f16 and bf16: 4; all others: `raw_size`).
    pub(crate) acc_size: usize,
    /// True when operands must be folded in the order of their ranks (user-defined operations need not commute).
    pub(crate) ordered: bool,
}

/// The collective operations, with lengths in elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Collective {
    /// Nobody leaves before everybody has entered.
    Barrier,
    /// Input and Output hold `count` elements on every rank.
    AllReduce { count: usize },
    /// Input holds `counts[rank]`, Output all parts one after the other.
    AllGather { counts: Vec<usize> },
    /// Input holds all parts one after the other, Output `counts[rank]`.
    ReduceScatter { counts: Vec<usize> },
    /// Always in place: Output holds `count` elements; the root's are the source.
    Broadcast { root: usize, count: usize },
}

/// What one rank does in one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Which algorithm made it.
    pub(crate) algorithm: Algorithm,
    /// The steps. Dependencies point to earlier steps only. Messages from one rank to another are matched by the order of
    /// the send steps on one side and of the receiving steps on the other.
    pub(crate) steps: Vec<Step>,
    /// Scratch buffers that the engine provides, uninitialised.
    pub(crate) scratch: Vec<Scratch>,
    /// Bytes (of the raw representation) that a step moves at a time: a message carries at most this much, a fold waits for
    /// this much. Affects speed only, never the result.
    pub(crate) chunk: usize,
}

impl Plan {
    /// Whether no rank passes on what it receives of an operation that only moves elements, so that nobody gains by getting a
    /// part of it early.
    pub(crate) fn passes_nothing_on(&self) -> bool {
        self.algorithm == Algorithm::Direct
    }
}

/// One step and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) after: Vec<After>,
}

/// A dependency on an earlier step of the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Starts when that step is complete.
    Whole(usize),
    /// Element k (counted through the ranges of the span) may be touched when that step is done with element k. Both steps
    /// have the same number of elements.
    Stream(usize),
}

/// What a step does. A fold's leaves and `into`, and a copy's two spans, have the same number of elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Push a span to a peer. Done with an element when the link no longer needs the memory. An empty span still sends one
    /// (empty) message.
    Send { to: usize, from: Span },
    /// Place the peer's next stream of messages. It can only arrive after the peer's matching send, so a plan need not order
    /// a receive after a local read of the same memory when the peer's send depends on what was read.
    Recv { from: usize, into: Span },
    /// Fold one stream of messages of each `Leaf::Peer` with the local spans, in the canonical tree over the leaves in the
    /// order given, into a span. `finish`: this is the final value (Avg divides by the communicator's size, then rounds).
    /// Received elements are kept by the engine until folded, they need no scratch. `into` may be exactly one of the local
    /// spans. If it is none of them and the step waits for no other, the engine may receive the first peer's elements there.
    RecvFold { leaves: Vec<Leaf>, into: Span, finish: bool },
    /// Copy between spans of equal representation that do not overlap.
    Copy { from: Span, into: Span },
}

/// One operand of a fold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Leaf {
    /// What the peer sends, in the representation it sends.
    Peer { rank: usize, repr: Repr },
    /// Local memory.
    Local(Span),
}

/// Elements of a buffer. All ranges are in elements of `repr`, non-empty unless the span is empty, in increasing order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) buffer: Buffer,
    pub(crate) repr: Repr,
    pub(crate) ranges: Vec<Range<usize>>,
}

/// The buffers that a span may name.
///
/// With `in_place` the two user buffers are one: all-reduce: `Output` is `Input`; all-gather: `Input` is this rank's part of
/// `Output`; reduce-scatter: `Output` is this rank's part of `Input` (the rest of `Input` may be overwritten);
/// broadcast has only `Output`. Both are always `Repr::Raw`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Buffer {
    Input,
    Output,
    /// Index into [`Plan::scratch`].
    Scratch(usize),
}

/// A scratch buffer: `len` elements of `repr`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scratch {
    pub(crate) repr: Repr,
    pub(crate) len: usize,
}
