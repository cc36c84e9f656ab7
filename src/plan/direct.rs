//! Directly from or to every rank, in one message time.
//!
//! All-gather and reduce-scatter this way move the fewest bytes there can be and copy nothing but this rank's own part. For
//! broadcast the root sends everything p - 1 times, which pays for few ranks or small messages.
#![forbid(unsafe_code)]

use super::{Cabling, Collective, Cost, Shape, Span, Tuning, parts::part_of, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match &shape.collective {
        Collective::AllGather { counts } => Some(all_gather(shape, counts)),
        Collective::ReduceScatter { counts } => Some(reduce_scatter(shape, counts)),
        Collective::Broadcast { root, count } => Some(broadcast(shape, *root, *count)),
        Collective::Barrier | Collective::AllReduce { .. } => None,
    }
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let peers = shape.size - 1;
    let (bytes, folded) = match &shape.collective {
        Collective::AllGather { counts } | Collective::ReduceScatter { counts } => {
            // The owner of the largest part exchanges that with everyone, the owner of the smallest all others.
            let parts = shape.part_bytes(counts);
            let all = parts.largest.saturating_mul(peers as u64);
            let folds = matches!(shape.collective, Collective::ReduceScatter { .. });
            let bytes =
                if tuning.cabling == Cabling::Shared { all.max(parts.others()) } else { parts.largest };
            (bytes, if folds { all } else { 0 })
        }
        Collective::Broadcast { count, .. } => (tuning.fan(peers, shape.raw_bytes(*count)), 0),
        Collective::Barrier | Collective::AllReduce { .. } => return None,
    };
    Some(Cost { latencies: 1, messages: peers as u64, bytes, folded })
}

/// A group of one: the result is the input.
pub(super) fn local(shape: &Shape) -> Option<Steps> {
    if shape.size > 1 {
        return None;
    }
    let count = match &shape.collective {
        Collective::Barrier | Collective::Broadcast { .. } => 0,
        Collective::AllReduce { count } => *count,
        Collective::AllGather { counts } | Collective::ReduceScatter { counts } => counts[0],
    };
    let mut steps = Steps::new();
    if count > 0 && !shape.in_place {
        steps.copy(Span::input(0..count), Span::output(0..count), vec![]);
    }
    Some(steps)
}

fn all_gather(shape: &Shape, counts: &[usize]) -> Steps {
    let own = Span::input(0..counts[shape.rank]);
    let mut steps = Steps::new();
    for peer in shape.following() {
        steps.send(peer, own.clone(), vec![]);
    }
    for peer in shape.preceding() {
        steps.recv(peer, Span::output(part_of(counts, peer)), vec![]);
    }
    if let Some((from, into)) = own_part(shape, counts) {
        steps.copy(from, into, vec![]);
    }
    steps
}

/// This rank's own part of an all-gather: where it is and where it goes, unless that is the same.
pub(super) fn own_part(shape: &Shape, counts: &[usize]) -> Option<(Span, Span)> {
    let len = counts[shape.rank];
    (!shape.in_place && len > 0).then(|| (Span::input(0..len), Span::output(part_of(counts, shape.rank))))
}

fn reduce_scatter(shape: &Shape, counts: &[usize]) -> Steps {
    let own = Span::input(part_of(counts, shape.rank));
    let mut steps = Steps::new();
    for peer in shape.following() {
        steps.send(peer, Span::input(part_of(counts, peer)), vec![]);
    }
    steps.recv_fold(shape.raw_leaves(own), Span::output(0..counts[shape.rank]), true, vec![]);
    steps
}

fn broadcast(shape: &Shape, root: usize, count: usize) -> Steps {
    let mut steps = Steps::new();
    if shape.rank == root {
        for peer in shape.following() {
            steps.send(peer, Span::output(0..count), vec![]);
        }
    } else {
        steps.recv(root, Span::output(0..count), vec![]);
    }
    steps
}
