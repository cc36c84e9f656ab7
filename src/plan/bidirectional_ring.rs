//! Bidirectional ring: around a ring of neighbours in both directions at once.
//!
//! Every part travels half the ring on either side of its owner, so both directions of each cable carry half the bytes, and
//! there are half as many message times as in a ring of one direction. Up to 4 ranks the canonical tree is kept; beyond, the order
//! of the fold is not that of the ranks, so operations that need it take another algorithm.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{
    After, Collective, Cost, Shape, Span, Tuning, direct,
    direct::own_part,
    parts::{all_parts, part},
    routed,
    steps::Steps,
    two_shot,
    two_sided::{Blocks, Cables},
};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match &shape.collective {
        Collective::Barrier => Some(barrier(shape)),
        Collective::Broadcast { root, count } => Some(broadcast(shape, *root, *count)),
        Collective::AllGather { counts } => Some(all_gather(shape, counts, Cables::Ring)),
        Collective::AllReduce { .. } if shape.size <= 3 => two_shot::make(shape),
        Collective::ReduceScatter { .. } if shape.size <= 3 => direct::make(shape),
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.size == 4 => {
            routed::ring(shape)
        }
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.ordered => None,
        Collective::AllReduce { count } => Some(all_reduce(shape, *count)),
        Collective::ReduceScatter { counts } => Some(reduce_scatter(shape, counts, Cables::Ring)),
    }
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let size = shape.size;
    let (parts, folds, gathers) = match &shape.collective {
        Collective::Barrier => {
            let rounds = size as u64 / 2;
            return Some(Cost { latencies: rounds, messages: size as u64 - 1, bytes: 0, folded: 0 });
        }
        Collective::Broadcast { count, .. } => {
            // The two halves have links of their own unless both neighbours are one.
            let half = shape.raw_bytes(count.div_ceil(2));
            let both = if size == 2 { half.saturating_mul(2) } else { tuning.fan(2, half) };
            let bytes = both.saturating_add(tuning.filling(size - 1, half));
            return Some(Cost { latencies: size as u64 - 1, messages: size as u64, bytes, folded: 0 });
        }
        Collective::AllReduce { .. } if size <= 3 => return two_shot::cost(shape, tuning),
        Collective::ReduceScatter { .. } if size <= 3 => return direct::cost(shape, tuning),
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if size == 4 => {
            return routed::ring_cost(shape, tuning);
        }
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } if shape.ordered => return None,
        Collective::AllReduce { count } => (shape.even_parts(*count), true, true),
        Collective::ReduceScatter { counts } => (shape.part_bytes(counts), true, false),
        Collective::AllGather { counts } => (shape.part_bytes(counts), false, true),
    };
    let (rounds, messages) = (size as u64 / 2, size as u64 - 1);
    let mut cost = Cost::default();
    if folds {
        // Half of the parts pass in either direction: one of them as it was, the others as partial results.
        let partials = parts.fraction(size - 3, 2 * size);
        cost.latencies += rounds;
        cost.messages += messages;
        cost.bytes = parts.largest.saturating_add(shape.as_partials(partials));
        cost.folded = parts.fraction(size - 1, size);
    }
    if gathers {
        cost.latencies += rounds;
        cost.messages += messages;
        cost.bytes = cost.bytes.saturating_add(parts.others().div_ceil(2));
    }
    cost.bytes = if size == 2 { parts.others() } else { tuning.fan(2, cost.bytes) };
    Some(cost)
}

pub(super) fn all_gather(shape: &Shape, counts: &[usize], cables: Cables) -> Steps {
    let blocks = Blocks { shape, cables, blocks: all_parts(counts) };
    let start = blocks.blocks[shape.rank].start;
    let own = blocks.pieces(shape.rank).into_iter().map(|piece| {
        let elements = piece.elements.start - start..piece.elements.end - start;
        (Span::input(elements), vec![])
    });
    let mut steps = Steps::new();
    blocks.gather(&mut steps, own.collect());
    if let Some((from, into)) = own_part(shape, counts) {
        steps.copy(from, into, vec![]);
    }
    steps
}

pub(super) fn reduce_scatter(shape: &Shape, counts: &[usize], cables: Cables) -> Steps {
    let blocks = Blocks { shape, cables, blocks: all_parts(counts) };
    let start = blocks.blocks[shape.rank].start;
    let mut steps = Steps::new();
    blocks.reduce(&mut steps, |elements| Span::output(elements.start - start..elements.end - start));
    steps
}

fn all_reduce(shape: &Shape, count: usize) -> Steps {
    let parts: Vec<Range<usize>> = (0..shape.size).map(|rank| part(count, shape.size, rank)).collect();
    let blocks = Blocks { shape, cables: Cables::Ring, blocks: parts };
    let mut steps = Steps::new();
    let folds = blocks.reduce(&mut steps, |elements| Span::output(elements.clone()));
    let own = blocks.pieces(shape.rank).into_iter().zip(folds);
    let own = own.map(|(piece, fold)| (Span::output(piece.elements), vec![After::Stream(fold)]));
    blocks.gather(&mut steps, own.collect());
    steps
}

/// The first half of the data goes all around in one direction, the second half in the other.
fn broadcast(shape: &Shape, root: usize, count: usize) -> Steps {
    let (above, below) = (shape.above(1), shape.below(1));
    let mut steps = Steps::new();
    for (index, from, to) in [(0, below, above), (1, above, below)] {
        let half = || Span::output(part(count, 2, index));
        let mut after = Vec::new();
        if shape.rank != root {
            after.push(After::Stream(steps.recv(from, half(), vec![])));
        }
        if to != root {
            steps.send(to, half(), after);
        }
    }
    steps
}

/// In each round everyone tells both neighbours that it, and everyone it has heard of from the other side, is here.
fn barrier(shape: &Shape) -> Steps {
    let (above, below) = (shape.above(1), shape.below(1));
    let mut steps = Steps::new();
    // What was heard from below and from above. The rank opposite is heard from below alone.
    let mut heard = [vec![], vec![]];
    for round in 0..shape.size / 2 {
        for (index, from, to, reach) in
            [(0, below, above, shape.size / 2), (1, above, below, (shape.size - 1) / 2)]
        {
            if round < reach {
                steps.send(to, Span::empty(), heard[index].clone());
                heard[index] = vec![After::Whole(steps.recv(from, Span::empty(), vec![]))];
            }
        }
    }
    steps
}
