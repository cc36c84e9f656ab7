//! Ring: around a ring of neighbours in one direction.
//!
//! Reduce-scatter: each part starts behind its owner and is folded by every rank on its way around. All-gather: each part goes
//! once around. 2(p - 1) message times and the fewest bytes; for cables that are fast one way at a time, and as a yardstick.
//! Beyond 4 ranks the order of the fold is `x[j+1] + x[j+2] + ... + x[j]` around the ring for the part of rank j, from the left.
//! Up to 4 ranks the canonical tree is kept: up to 3 everyone is a neighbour, for 4 see [`routed`]. Beyond, the order is not
//! that of the ranks, so operations that need it take another algorithm.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{
    After, Collective, Cost, Leaf, Shape, Span, Tuning, direct,
    direct::own_part,
    partials::Partials,
    parts::{all_parts, part},
    routed,
    steps::Steps,
    two_shot,
};
use crate::reduce::Repr;

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match &shape.collective {
        Collective::AllGather { counts } => {
            let mut steps = Steps::new();
            let parts = all_parts(counts);
            gather(shape, &mut steps, &parts, Span::input(0..counts[shape.rank]), vec![]);
            if let Some((from, into)) = own_part(shape, counts) {
                steps.copy(from, into, vec![]);
            }
            Some(steps)
        }
        Collective::AllReduce { .. } if shape.size <= 3 => two_shot::make(shape),
        Collective::ReduceScatter { .. } if shape.size <= 3 => direct::make(shape),
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.size == 4 => {
            routed::ring(shape)
        }
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.ordered => None,
        Collective::AllReduce { count } => {
            let parts: Vec<Range<usize>> =
                (0..shape.size).map(|rank| part(*count, shape.size, rank)).collect();
            let own = Span::output(parts[shape.rank].clone());
            let mut steps = Steps::new();
            let fold = reduce(shape, &mut steps, &parts, own.clone());
            gather(shape, &mut steps, &parts, own, vec![After::Stream(fold)]);
            Some(steps)
        }
        Collective::ReduceScatter { counts } => {
            let mut steps = Steps::new();
            reduce(shape, &mut steps, &all_parts(counts), Span::output(0..counts[shape.rank]));
            Some(steps)
        }
        Collective::Barrier | Collective::Broadcast { .. } => None,
    }
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let (parts, folds, gathers) = match &shape.collective {
        Collective::AllReduce { .. } if shape.size <= 3 => return two_shot::cost(shape, tuning),
        Collective::ReduceScatter { .. } if shape.size <= 3 => return direct::cost(shape, tuning),
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.size == 4 => {
            return routed::ring_cost(shape, tuning);
        }
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.ordered => return None,
        Collective::AllReduce { count } => (shape.even_parts(*count), true, true),
        Collective::ReduceScatter { counts } => (shape.part_bytes(counts), true, false),
        Collective::AllGather { counts } => (shape.part_bytes(counts), false, true),
        Collective::Barrier | Collective::Broadcast { .. } => return None,
    };
    let rounds = shape.size as u64 - 1;
    let mut cost = Cost::default();
    if folds {
        let partials = parts.fraction(shape.size - 2, shape.size);
        cost.latencies += rounds;
        cost.bytes = parts.largest.saturating_add(shape.as_partials(partials));
        cost.folded = parts.fraction(shape.size - 1, shape.size);
    }
    if gathers {
        cost.latencies += rounds;
        cost.bytes = cost.bytes.saturating_add(parts.others());
    }
    cost.messages = cost.latencies;
    Some(cost)
}

/// Folds every part on its way to its owner; returns the step that folds this rank's own part into `result`.
fn reduce(shape: &Shape, steps: &mut Steps, parts: &[Range<usize>], result: Span) -> usize {
    let (next, previous) = (shape.above(1), shape.below(1));
    let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    let mut partials = Partials::new(shape, steps, longest);
    steps.send(next, Span::input(parts[previous].clone()), vec![]);
    for distance in 2..=shape.size {
        // The part of the rank `distance` before this one; in the end this rank's own.
        let elements = parts[shape.below(distance)].clone();
        let repr = if distance == 2 { Repr::Raw } else { shape.partial_repr() };
        let leaves = vec![Leaf::Peer { rank: previous, repr }, Leaf::Local(Span::input(elements.clone()))];
        if distance == shape.size {
            return steps.recv_fold(leaves, result, true, vec![]);
        }
        let (place, after) = partials.next(elements);
        let fold = steps.recv_fold(leaves, place.clone(), false, after);
        partials.read_by(steps.send(next, place, vec![After::Stream(fold)]));
    }
    unreachable!("a ring has at least two ranks")
}

/// Sends every part once around. `own` is this rank's.
fn gather(shape: &Shape, steps: &mut Steps, parts: &[Range<usize>], own: Span, after: Vec<After>) {
    let (next, previous) = (shape.above(1), shape.below(1));
    steps.send(next, own, after);
    for distance in 1..shape.size {
        let place = Span::output(parts[shape.below(distance)].clone());
        // In place, what was sent from here is part of the result that comes.
        let recv = steps.recv(previous, place.clone(), vec![]);
        if distance + 1 < shape.size {
            steps.send(next, place, vec![After::Stream(recv)]);
        }
    }
}
