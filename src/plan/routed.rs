//! The canonical tree over cables between neighbours, up to 4 ranks.
//!
//! A table says over which cables the nodes of the tree travel to the owner of each block; a node of two ranks is folded by
//! the one of them that is nearer to the owner. On a ring of 4: halves between 0-1 and 2-3, then quarters between 1-2 and 3-0.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{
    After, Cabling, Collective, Cost, Leaf, Shape, Span, Tuning,
    partials::Partials,
    parts::{all_parts, part},
    steps::Steps,
};
use crate::reduce::Repr;

/// One node of the tree over one cable.
#[derive(Debug, Clone, Copy)]
struct Hop {
    from: usize,
    to: usize,
    /// Whose block.
    owner: usize,
    /// The node: one rank's elements, or a partial result over a pair.
    of: Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    Rank(usize),
    /// The ranks 2i and 2i + 1.
    Pair(usize),
}

/// All-reduce and reduce-scatter over a ring of 4.
pub(super) fn ring(shape: &Shape) -> Option<Steps> {
    assert_eq!(shape.size, 4, "a ring of another size has another table");
    // The neighbour in the same pair, and the one in the other.
    let (mate, across) = (|rank: usize| rank ^ 1, |rank: usize| 3 - rank);
    let hops = |stage: usize| -> Vec<Hop> {
        let of_owner = |owner: usize| {
            let near = across(owner);
            match stage {
                // What has another hop before it goes first.
                0 => Hop { from: mate(near), to: near, owner, of: Node::Rank(mate(near)) },
                1 => Hop { from: mate(owner), to: owner, owner, of: Node::Rank(mate(owner)) },
                _ => Hop { from: near, to: owner, owner, of: Node::Pair(near / 2) },
            }
        };
        (0..4).map(of_owner).collect()
    };
    let stages = [hops(0), hops(1), hops(2)];
    match &shape.collective {
        Collective::ReduceScatter { counts } => {
            let mut steps = Steps::new();
            reduce(shape, &mut steps, &stages, &all_parts(counts), Span::output(0..counts[shape.rank]));
            Some(steps)
        }
        Collective::AllReduce { count } => {
            let parts: Vec<Range<usize>> = (0..4).map(|rank| part(*count, 4, rank)).collect();
            let output = |rank: usize| Span::output(parts[rank].clone());
            let (mate, across) = (mate(shape.rank), across(shape.rank));
            let mut steps = Steps::new();
            let fold = reduce(shape, &mut steps, &stages, &parts, output(shape.rank));
            // Halving used the cables within pairs twice as much, so gathering uses those across twice as much.
            steps.send(mate, output(shape.rank), vec![After::Stream(fold)]);
            steps.send(across, output(shape.rank), vec![After::Stream(fold)]);
            let recv = steps.recv(mate, output(mate), vec![]);
            steps.send(across, output(mate), vec![After::Stream(recv)]);
            steps.recv(across, output(across), vec![]);
            steps.recv(across, output(across ^ 1), vec![]);
            Some(steps)
        }
        _ => None,
    }
}

/// The cost of [`ring`].
pub(super) fn ring_cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let (parts, gathers) = match &shape.collective {
        Collective::AllReduce { count } => (shape.even_parts(*count), true),
        Collective::ReduceScatter { counts } => (shape.part_bytes(counts), false),
        _ => return None,
    };
    let (raw, partial) = (parts.largest, shape.as_partials(parts.largest));
    // Within pairs two parts pass and then one is gathered; across, one partial result and then two. The first half ends when
    // both of its parts, and the one behind which the partial result came, are there.
    let within = if gathers { 3 * raw } else { 2 * raw };
    let across = if gathers { partial + 2 * raw } else { partial };
    let bytes = match (tuning.cabling, gathers) {
        (Cabling::Shared, _) => within + across,
        (_, true) => within.max(across) + raw.min(tuning.chunk),
        (_, false) => within.max(raw + partial),
    };
    Some(Cost {
        latencies: if gathers { 4 } else { 2 },
        messages: if gathers { 6 } else { 3 },
        bytes,
        folded: raw.saturating_mul(3),
    })
}

/// Reduce-scatter over a line of 3 or 4.
pub(super) fn line(shape: &Shape) -> Option<Steps> {
    let Collective::ReduceScatter { counts } = &shape.collective else { return None };
    let hop = |from, to, owner, of| Hop { from, to, owner, of };
    let rank = |from, to, owner| hop(from, to, owner, Node::Rank(from));
    let pair = |from, to, owner, pair| hop(from, to, owner, Node::Pair(pair));
    let stages = match shape.size {
        3 => vec![
            vec![rank(2, 1, 0), rank(0, 1, 2), rank(1, 0, 0), rank(0, 1, 1)],
            vec![rank(2, 1, 1), hop(1, 0, 0, Node::Rank(2)), pair(1, 2, 2, 0)],
        ],
        4 => vec![
            vec![rank(3, 2, 0), rank(3, 2, 1), rank(0, 1, 3), rank(0, 1, 2)],
            vec![rank(1, 0, 0), rank(0, 1, 1), rank(3, 2, 2), rank(2, 3, 3)],
            vec![pair(2, 1, 0, 1), pair(2, 1, 1, 1), pair(1, 2, 3, 0), pair(1, 2, 2, 0)],
            vec![pair(1, 0, 0, 1), pair(2, 3, 3, 0)],
        ],
        _ => return None,
    };
    let mut steps = Steps::new();
    reduce(shape, &mut steps, &stages, &all_parts(counts), Span::output(0..counts[shape.rank]));
    Some(steps)
}

/// Carries out the table; returns the step that folds this rank's block into `result`.
fn reduce(
    shape: &Shape,
    steps: &mut Steps,
    stages: &[Vec<Hop>],
    blocks: &[Range<usize>],
    result: Span,
) -> usize {
    let rank = shape.rank;
    let input = |owner: usize| Span::input(blocks[owner].clone());
    let repr = |of: Node| if matches!(of, Node::Rank(_)) { Repr::Raw } else { shape.partial_repr() };
    // What this rank has beside its input, by owner: the span and the step that made it.
    let mut held: Vec<Option<(Span, usize)>> = vec![None; blocks.len()];
    let mut last = None;
    for stage in stages {
        for hop in stage.iter().filter(|hop| hop.from == rank) {
            let (span, after) = if hop.of == Node::Rank(rank) {
                (input(hop.owner), vec![])
            } else {
                let (span, made) = held[hop.owner].take().expect("what a table passes on has come before");
                (span, vec![After::Stream(made)])
            };
            steps.send(hop.to, span, after);
        }
        for hop in stage.iter().filter(|hop| hop.to == rank) {
            let peer = Leaf::Peer { rank: hop.from, repr: repr(hop.of) };
            let in_order = |own: Span| {
                let before = match hop.of {
                    Node::Rank(other) => other < rank,
                    Node::Pair(pair) => 2 * pair < rank,
                };
                if before {
                    vec![peer.clone(), Leaf::Local(own)]
                } else {
                    vec![Leaf::Local(own), peer.clone()]
                }
            };
            let is_mate = hop.of == Node::Rank(rank ^ 1);
            if hop.owner == rank && !is_mate {
                let (own, made) =
                    held[rank].take().map_or((input(rank), None), |(span, made)| (span, Some(made)));
                let after = made.map(After::Stream).into_iter().collect();
                last = Some(steps.recv_fold(in_order(own), result.clone(), true, after));
            } else if is_mate {
                let place = place(shape, steps, blocks[hop.owner].clone());
                let fold = steps.recv_fold(in_order(input(hop.owner)), place.clone(), false, vec![]);
                held[hop.owner] = Some((place, fold));
            } else {
                // Only passes through.
                let len = blocks[hop.owner].len();
                let place = Span::new(steps.scratch(repr(hop.of), len), repr(hop.of), 0..len);
                let recv = steps.recv(hop.from, place.clone(), vec![]);
                held[hop.owner] = Some((place, recv));
            }
        }
    }
    last.expect("every table ends with the fold of each owner's block")
}

/// Room for one partial result of these elements.
fn place(shape: &Shape, steps: &mut Steps, elements: Range<usize>) -> Span {
    match Partials::home(shape) {
        Some(buffer) => Span::new(buffer, Repr::Raw, elements),
        None => {
            let repr = shape.partial_repr();
            Span::new(steps.scratch(repr, elements.len()), repr, 0..elements.len())
        }
    }
}
