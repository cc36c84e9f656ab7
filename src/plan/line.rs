//! Line: along a line of neighbours, both directions at once.
//!
//! All-reduce: partial results run from both ends to the middle and the result back; p - 1 message times, and every direction
//! of every cable carries the bytes once. Reduce-scatter and all-gather: parts run from and to their owners on both sides. The
//! order of the fold is the order of the ranks; up to 4 ranks it is the canonical tree.
#![forbid(unsafe_code)]

use super::{
    After, Collective, Cost, Leaf, Shape, Span, Tuning,
    bidirectional_ring::{all_gather, reduce_scatter},
    partials::Partials,
    routed,
    steps::Steps,
    two_sided::Cables,
};
use crate::reduce::Repr;

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match &shape.collective {
        Collective::Barrier => Some(barrier(shape)),
        Collective::Broadcast { root, count } => Some(broadcast(shape, *root, *count)),
        Collective::AllReduce { count } => Some(all_reduce(shape, *count)),
        Collective::AllGather { counts } => Some(all_gather(shape, counts, Cables::Line)),
        Collective::ReduceScatter { .. } if matches!(shape.size, 3 | 4) => routed::line(shape),
        Collective::ReduceScatter { counts } => Some(reduce_scatter(shape, counts, Cables::Line)),
    }
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let size = shape.size;
    let hops = size as u64 - 1;
    // A rank between two others serves two cables.
    let sides = (size - 1).min(2);
    let cost = match &shape.collective {
        Collective::Barrier => Cost { latencies: hops, messages: hops, bytes: 0, folded: 0 },
        Collective::Broadcast { root, count } => {
            let hops = (*root).max(size - 1 - root);
            let sides = if *root == 0 || *root == size - 1 { 1 } else { 2 };
            let bytes = shape.raw_bytes(*count);
            let bytes = tuning.fan(sides, bytes).saturating_add(tuning.filling(hops, bytes));
            Cost { latencies: hops as u64, messages: (hops + sides - 1) as u64, bytes, folded: 0 }
        }
        Collective::AllReduce { count } => {
            let raw = shape.raw_bytes(*count);
            // What comes from the ends and all results travel as they are, the rest as partial results: to the middle, and
            // between the two ranks there if there are two.
            let partials = (size / 2).saturating_sub(1);
            let widest = if partials > 0 { shape.as_partials(raw) } else { raw };
            let first_chunk = raw.min(tuning.chunk);
            let filling = first_chunk
                .saturating_mul((size - 1 - partials) as u64)
                .saturating_add(shape.as_partials(first_chunk).saturating_mul(partials as u64))
                .saturating_sub(widest.min(shape.as_partials(first_chunk)));
            // The ranks in the middle fold two operands, the others on the way one.
            let folded = if size == 2 { raw } else { raw.saturating_mul(2) };
            let before_middle = size.saturating_sub(3) as u64 / 2;
            Cost {
                latencies: hops,
                messages: hops,
                bytes: tuning.fan(sides, widest).saturating_add(filling),
                folded: folded.saturating_add(first_chunk.saturating_mul(before_middle)),
            }
        }
        Collective::AllGather { counts } => {
            let bytes = tuning.fan(sides, shape.part_bytes(counts).others());
            Cost { latencies: hops, messages: 2 * hops, bytes, folded: 0 }
        }
        Collective::ReduceScatter { counts } => {
            let parts = shape.part_bytes(counts);
            let partials = shape.as_partials(parts.fraction(size - 2, size));
            Cost {
                latencies: hops,
                messages: hops,
                bytes: tuning.fan(sides, parts.largest.saturating_add(partials)),
                folded: parts.fraction(size - 1, size),
            }
        }
    };
    Some(cost)
}

fn all_reduce(shape: &Shape, count: usize) -> Steps {
    let Shape { rank, size, .. } = *shape;
    // The ranks in the middle: one, or two that exchange what either side has.
    let (low, high) = ((size - 1) / 2, size / 2);
    let input = Span::input(0..count);
    let output = Span::output(0..count);
    let peer = |rank: usize, raw: bool| Leaf::Peer {
        rank,
        repr: if raw { Repr::Raw } else { shape.partial_repr() },
    };
    // From which sides this rank folds, in the order of the ranks; the last rank on a side has nobody behind it.
    let below = (rank <= low && rank > 0).then(|| peer(rank.wrapping_sub(1), rank == 1));
    let above = (rank >= high && rank + 1 < size).then(|| peer(rank + 1, rank + 2 == size));
    let is_middle = rank == low || rank == high;

    let mut steps = Steps::new();
    let mut result = None;
    // What this rank has of its side, and the step that made it.
    let (mut held, mut made) = (input.clone(), None);
    if below.is_some() || above.is_some() {
        let finish = low == high && is_middle;
        let leaves: Vec<Leaf> = below.into_iter().chain([Leaf::Local(input)]).chain(above).collect();
        held = if finish { output.clone() } else { whole(shape, &mut steps, count) };
        made = Some(steps.recv_fold(leaves, held.clone(), finish, vec![]));
        result = made.filter(|_| finish);
    }
    let after = |step: Option<usize>| step.map(After::Stream).into_iter().collect::<Vec<_>>();
    if low < high && is_middle {
        let other = if rank == low { high } else { low };
        let send = steps.send(other, held.clone(), after(made));
        let mut leaves = vec![Leaf::Local(held.clone()), peer(other, size == 2)];
        if other < rank {
            leaves.reverse();
        }
        // The result may go where the partial result is being sent from.
        let overwrites = held.buffer == output.buffer || (made.is_none() && shape.in_place);
        result = Some(steps.recv_fold(
            leaves,
            output.clone(),
            true,
            after(if overwrites { Some(send) } else { made }),
        ));
    }
    if !is_middle {
        let inwards = if rank < low { rank + 1 } else { rank - 1 };
        steps.send(inwards, held, after(made));
        // The result contains what was sent, so it comes later.
        result = Some(steps.recv(inwards, output.clone(), vec![]));
    }
    if rank <= low && rank > 0 {
        steps.send(rank - 1, output.clone(), after(result));
    }
    if rank >= high && rank + 1 < size {
        steps.send(rank + 1, output, after(result));
    }
    steps
}

/// Room for a partial result of all elements.
fn whole(shape: &Shape, steps: &mut Steps, count: usize) -> Span {
    match Partials::home(shape) {
        Some(buffer) => Span::new(buffer, Repr::Raw, 0..count),
        None => Span::new(steps.scratch(Repr::Acc, count), Repr::Acc, 0..count),
    }
}

fn broadcast(shape: &Shape, root: usize, count: usize) -> Steps {
    let Shape { rank, size, .. } = *shape;
    let data = || Span::output(0..count);
    let mut steps = Steps::new();
    let mut after = Vec::new();
    if rank != root {
        let from = if rank > root { rank - 1 } else { rank + 1 };
        after.push(After::Stream(steps.recv(from, data(), vec![])));
    }
    if rank >= root && rank + 1 < size {
        steps.send(rank + 1, data(), after.clone());
    }
    if rank <= root && rank > 0 {
        steps.send(rank - 1, data(), after);
    }
    steps
}

/// Everyone tells the next in either direction that it, and everyone behind it, is here.
fn barrier(shape: &Shape) -> Steps {
    let below = shape.rank.checked_sub(1);
    let above = Some(shape.rank + 1).filter(|&rank| rank < shape.size);
    let mut steps = Steps::new();
    for (from, to) in [(below, above), (above, below)] {
        let heard = from.map(|from| After::Whole(steps.recv(from, Span::empty(), vec![])));
        if let Some(to) = to {
            steps.send(to, Span::empty(), heard.into_iter().collect());
        }
    }
    steps
}
