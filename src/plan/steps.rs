//! What the algorithms write their plans with.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{Action, After, Algorithm, Buffer, DEFAULT_CHUNK, Leaf, Plan, Scratch, Shape, Span, Step};
use crate::reduce::Repr;

/// The steps of one rank while an algorithm writes them down. Each method returns the index of the step for `After`.
#[derive(Debug, Default)]
pub(super) struct Steps {
    list: Vec<Step>,
    scratch: Vec<Scratch>,
}

impl Steps {
    pub(super) fn new() -> Steps {
        Steps::default()
    }

    pub(super) fn send(&mut self, to: usize, from: Span, after: Vec<After>) -> usize {
        self.push(Action::Send { to, from }, after)
    }

    pub(super) fn recv(&mut self, from: usize, into: Span, after: Vec<After>) -> usize {
        self.push(Action::Recv { from, into }, after)
    }

    pub(super) fn recv_fold(
        &mut self,
        leaves: Vec<Leaf>,
        into: Span,
        finish: bool,
        after: Vec<After>,
    ) -> usize {
        self.push(Action::RecvFold { leaves, into, finish }, after)
    }

    pub(super) fn copy(&mut self, from: Span, into: Span, after: Vec<After>) -> usize {
        self.push(Action::Copy { from, into }, after)
    }

    /// Asks for a scratch buffer of `len` elements.
    pub(super) fn scratch(&mut self, repr: Repr, len: usize) -> Buffer {
        self.scratch.push(Scratch { repr, len });
        Buffer::Scratch(self.scratch.len() - 1)
    }

    pub(super) fn into_plan(self, algorithm: Algorithm) -> Plan {
        Plan { algorithm, steps: self.list, scratch: self.scratch, chunk: DEFAULT_CHUNK }
    }

    fn push(&mut self, action: Action, after: Vec<After>) -> usize {
        self.list.push(Step { action, after });
        self.list.len() - 1
    }
}

impl Span {
    pub(super) fn new(buffer: Buffer, repr: Repr, range: Range<usize>) -> Span {
        Span { buffer, repr, ranges: if range.is_empty() { Vec::new() } else { vec![range] } }
    }

    /// The elements of all ranges, in increasing order, whatever order they come in.
    pub(super) fn gathered(buffer: Buffer, repr: Repr, mut ranges: Vec<Range<usize>>) -> Span {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let adjacent = next.start == range.end;
            if adjacent {
                range.end = next.end;
            }
            adjacent
        });
        Span { buffer, repr, ranges }
    }

    pub(super) fn input(range: Range<usize>) -> Span {
        Span::new(Buffer::Input, Repr::Raw, range)
    }

    pub(super) fn output(range: Range<usize>) -> Span {
        Span::new(Buffer::Output, Repr::Raw, range)
    }

    /// No elements at all: what a message without a payload carries.
    pub(super) fn empty() -> Span {
        Span::new(Buffer::Output, Repr::Raw, 0..0)
    }

    /// The number of elements.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }
}

#[cfg(test)]
impl Plan {
    /// The elements that a step moves at a time.
    pub(crate) fn chunk_elements(&self, raw_size: usize) -> usize {
        (self.chunk / raw_size).max(1)
    }
}

impl Shape {
    /// The other ranks, the next one first: when everybody starts with another peer, nobody is everybody's first.
    pub(super) fn following(&self) -> impl Iterator<Item = usize> {
        (1..self.size).map(|distance| self.above(distance))
    }

    /// The other ranks, the previous one first: the order in which their staggered sends come here.
    pub(super) fn preceding(&self) -> impl Iterator<Item = usize> {
        (1..self.size).map(|distance| self.below(distance))
    }

    /// The rank `distance` ranks further on, counted around.
    pub(super) fn above(&self, distance: usize) -> usize {
        (self.rank + distance) % self.size
    }

    /// The rank `distance` (at most `size`) ranks before, counted around.
    pub(super) fn below(&self, distance: usize) -> usize {
        (self.rank + self.size - distance) % self.size
    }

    /// Rounds in which a number that doubles in each reaches all ranks.
    pub(super) fn doublings(&self) -> u32 {
        self.size.next_power_of_two().ilog2()
    }

    /// How many of these rounds lie behind each other when a round passes on only what is lacking: the last one may be about
    /// few ranks.
    pub(super) fn doubling_depth(&self) -> u32 {
        let before_last = self.doublings() - 1;
        let lacking = self.size - (1 << before_last);
        before_last.max(lacking.next_power_of_two().ilog2() + 1)
    }

    /// The leaves of a fold over all ranks in which this rank has `own` and all others send raw elements.
    pub(super) fn raw_leaves(&self, own: Span) -> Vec<Leaf> {
        let mut leaves: Vec<Leaf> = (0..self.size).map(|rank| Leaf::Peer { rank, repr: Repr::Raw }).collect();
        leaves[self.rank] = Leaf::Local(own);
        leaves
    }
}
