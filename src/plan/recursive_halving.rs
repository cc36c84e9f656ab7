//! Recursive halving: in each round a pair of partners shares what both still have to fold, so that the bytes halve.
//!
//! The nearest partner comes first, so that every partial result is a node of the canonical tree. Reduce-scatter: lg p rounds
//! and (p - 1)/p of the bytes. All-reduce (Rabenseifner's): then the same backwards, to gather. For many ranks and many bytes.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{
    After, Buffer, Collective, Cost, Leaf, Shape, Span,
    cost::fraction,
    partials::Partials,
    parts::{all_parts, part},
    steps::Steps,
    tree::{Leaves, Role},
};
use crate::reduce::Repr;

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match &shape.collective {
        Collective::AllReduce { count } => Some(all_reduce(shape, *count)),
        Collective::ReduceScatter { counts } => Some(reduce_scatter(shape, counts)),
        _ => None,
    }
}

pub(super) fn cost(shape: &Shape) -> Option<Cost> {
    let (total, gathers, given) = match &shape.collective {
        Collective::AllReduce { count } => (shape.raw_bytes(*count), true, shape.raw_bytes(*count)),
        Collective::ReduceScatter { counts } => {
            let parts = shape.part_bytes(counts);
            (parts.total, false, parts.largest)
        }
        _ => return None,
    };
    let leaves = Leaves::new(shape.size);
    let rounds = u64::from(leaves.count.ilog2());
    let halved = fraction(total, leaves.count - 1, leaves.count);
    // With pairs, every round may carry partial results. A pair's result goes back after the others have theirs; without a
    // gathering, only if there are pairs in both halves of the tree.
    let before = u64::from(leaves.pairs > 0);
    let after = if gathers { before } else { u64::from(leaves.pairs > leaves.count / 2) };
    let as_it_was = if before > 0 { 0 } else { total.div_ceil(2) };
    let mut cost = Cost {
        latencies: before + rounds + after,
        messages: before + rounds + after,
        bytes: as_it_was
            .saturating_add(shape.as_partials(halved.saturating_sub(as_it_was)))
            .saturating_add(total * before)
            .saturating_add(given * after),
        folded: halved.saturating_add(total * before),
    };
    if gathers {
        cost.latencies += rounds;
        cost.messages += rounds;
        cost.bytes = cost.bytes.saturating_add(halved);
    }
    Some(cost)
}

fn all_reduce(shape: &Shape, count: usize) -> Steps {
    let Shape { rank, .. } = *shape;
    let leaves = Leaves::new(shape.size);
    let mut steps = Steps::new();
    let Role::Stands(leaf) = leaves.role(rank) else {
        steps.send(rank + 1, Span::input(0..count), vec![]);
        // In place this overwrites what is sent, but the result can only come when that has arrived.
        steps.recv(rank + 1, Span::output(0..count), vec![]);
        return steps;
    };
    // Bits of the leaf in reverse: so that what is shared in each round lies together.
    let bits = leaves.count.ilog2();
    let place = |leaf: usize| leaf.reverse_bits() >> (usize::BITS - bits);
    let blocks: Vec<Range<usize>> =
        (0..leaves.count).map(|leaf| part(count, leaves.count, place(leaf))).collect();
    let own = Piece { elements: blocks[leaf].clone(), into: Span::output(blocks[leaf].clone()) };
    let folds = halve(shape, &mut steps, leaf, &blocks, vec![own], |leaf| vec![blocks[leaf].clone()]);

    let fold = folds[0];
    let mut have = vec![After::Stream(fold)];
    let mut stride = leaves.count / 2;
    while stride > 0 {
        let part_of =
            |leaf: usize| Span::gathered(Buffer::Output, Repr::Raw, of_class(&blocks, leaf, 2 * stride));
        let peer = leaves.rank(leaf ^ stride);
        steps.send(peer, part_of(leaf), have.clone());
        // Where this lands a half was sent from, but the result that comes contains it.
        let recv = steps.recv(peer, part_of(leaf ^ stride), vec![]);
        have[0] = After::Whole(fold);
        have.push(After::Whole(recv));
        stride /= 2;
    }
    if leaves.is_pair(leaf) {
        steps.send(rank - 1, Span::output(0..count), have);
    }
    steps
}

fn reduce_scatter(shape: &Shape, counts: &[usize]) -> Steps {
    let Shape { rank, .. } = *shape;
    let leaves = Leaves::new(shape.size);
    let parts = all_parts(counts);
    let all = 0..parts.last().map_or(0, |part| part.end);
    let output = Span::output(0..counts[rank]);
    let mut steps = Steps::new();
    let Role::Stands(leaf) = leaves.role(rank) else {
        steps.send(rank + 1, Span::input(all), vec![]);
        steps.recv(rank + 1, output, vec![]);
        return steps;
    };
    // A pair's leaf works for both of its ranks; their two parts travel apart in the last round.
    let pieces = |leaf: usize| {
        let last = leaves.rank(leaf);
        let first = if leaves.is_pair(leaf) { last - 1 } else { last };
        parts[first..=last].to_vec()
    };
    let blocks: Vec<Range<usize>> = (0..leaves.count)
        .map(|leaf| {
            let pieces = pieces(leaf);
            pieces[0].start..pieces[pieces.len() - 1].end
        })
        .collect();
    let mut results = vec![Piece { elements: parts[rank].clone(), into: output }];
    if leaves.is_pair(leaf) {
        let given = parts[rank - 1].clone();
        let into = Span::new(steps.scratch(Repr::Raw, given.len()), Repr::Raw, 0..given.len());
        results.insert(0, Piece { elements: given, into });
    }
    let given = results[0].into.clone();
    let folds = halve(shape, &mut steps, leaf, &blocks, results, pieces);
    if leaves.is_pair(leaf) {
        steps.send(rank - 1, given, vec![After::Stream(folds[0])]);
    }
    steps
}

/// Elements whose final value this rank makes, and where it goes.
struct Piece {
    elements: Range<usize>,
    into: Span,
}

/// The rounds of halving for the rank that stands for `leaf`. `blocks` are the elements that each leaf ends with, `results`
/// those of this leaf in pieces, `pieces` the pieces of any leaf. Returns the steps that fold the results.
fn halve(
    shape: &Shape,
    steps: &mut Steps,
    leaf: usize,
    blocks: &[Range<usize>],
    results: Vec<Piece>,
    pieces: impl Fn(usize) -> Vec<Range<usize>>,
) -> Vec<usize> {
    let leaves = Leaves::new(shape.size);
    let is_pair = leaves.is_pair(leaf);
    let all = 0..blocks.iter().map(|block| block.end).max().unwrap_or(0);
    // The first fold leaves partial results of all elements in a pair, of every second leaf's otherwise.
    let partials = (is_pair || leaves.count > 2)
        .then(|| Packed::new(shape, steps, of_class(blocks, leaf, if is_pair { 1 } else { 2 })));

    let mut made: Option<usize> = None;
    if let (true, Some(partials)) = (is_pair, &partials) {
        let pair =
            vec![Leaf::Peer { rank: shape.rank - 1, repr: Repr::Raw }, Leaf::Local(Span::input(all.clone()))];
        made = Some(steps.recv_fold(pair, partials.span(vec![all]), false, vec![]));
    }
    let mut stride = 1;
    loop {
        let partner = leaf ^ stride;
        let peer = leaves.rank(partner);
        let repr = if stride == 1 && !leaves.is_pair(partner) { Repr::Raw } else { shape.partial_repr() };
        // What this rank has: its input, until something was folded.
        let held = |ranges: Vec<Range<usize>>| match (&partials, made) {
            (Some(partials), Some(_)) => partials.span(ranges),
            _ => Span::gathered(Buffer::Input, Repr::Raw, ranges),
        };
        let after: Vec<After> = made.map(After::Whole).into_iter().collect();
        let operands = |own: Span| {
            let own = Leaf::Local(own);
            let peer = Leaf::Peer { rank: peer, repr };
            if leaf < partner { vec![own, peer] } else { vec![peer, own] }
        };
        if stride * 2 == leaves.count {
            for piece in pieces(partner) {
                steps.send(peer, held(vec![piece]), after.clone());
            }
            let fold = |piece: Piece| {
                steps.recv_fold(operands(held(vec![piece.elements])), piece.into, true, after.clone())
            };
            return results.into_iter().map(fold).collect();
        }
        steps.send(peer, held(of_class(blocks, partner, 2 * stride)), after.clone());
        let kept = of_class(blocks, leaf, 2 * stride);
        let partials = partials.as_ref().expect("more than one round needs partial results");
        made = Some(steps.recv_fold(operands(held(kept.clone())), partials.span(kept), false, after));
        stride *= 2;
    }
}

/// The blocks of all leaves that equal `leaf` modulo `modulus`.
fn of_class(blocks: &[Range<usize>], leaf: usize, modulus: usize) -> Vec<Range<usize>> {
    blocks.iter().skip(leaf % modulus).step_by(modulus).cloned().collect()
}

/// Partial results of some elements: in the user's buffer where that is possible, else packed into scratch.
struct Packed {
    buffer: Buffer,
    repr: Repr,
    /// Where packed elements come from, in order; `None` when all elements are at home.
    packed: Option<Vec<Range<usize>>>,
}

impl Packed {
    fn new(shape: &Shape, steps: &mut Steps, elements: Vec<Range<usize>>) -> Packed {
        if let Some(buffer) = Partials::home(shape) {
            return Packed { buffer, repr: Repr::Raw, packed: None };
        }
        let repr = shape.partial_repr();
        let sources = Span::gathered(Buffer::Input, Repr::Raw, elements).ranges;
        let buffer = steps.scratch(repr, sources.iter().map(ExactSizeIterator::len).sum());
        Packed { buffer, repr, packed: Some(sources) }
    }

    /// The partial results of these elements, all of which are kept here.
    fn span(&self, elements: Vec<Range<usize>>) -> Span {
        let home = Span::gathered(self.buffer, self.repr, elements);
        let Some(sources) = &self.packed else { return home };
        let mut packed = Vec::new();
        let mut before = 0;
        let mut wanted = home.ranges.iter().peekable();
        for source in sources {
            while let Some(range) = wanted.next_if(|range| range.start < source.end) {
                packed.push(before + range.start - source.start..before + range.end - source.start);
            }
            before += source.len();
        }
        Span::gathered(self.buffer, self.repr, packed)
    }
}
