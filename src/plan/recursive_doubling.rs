//! Recursive doubling: exchange everything with partners at doubling distance.
//!
//! All-reduce: lg p rounds in which partners exchange partial results over all elements; nodes of the canonical tree, as the
//! nearest partner comes first. Ranks beyond a power of two give their elements away before and get the result after, which
//! takes up to two more message times. All-gather (Bruck's way, for any number of ranks): in round k everyone has 2^k parts and
//! fetches as many from the rank 2^k further on. Few messages, for many ranks and few bytes.
#![forbid(unsafe_code)]

use super::{
    After, Buffer, Collective, Cost, Leaf, Shape, Span,
    direct::own_part,
    partials::Partials,
    parts::all_parts,
    steps::Steps,
    tree::{Leaves, Role},
};
use crate::reduce::Repr;

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match &shape.collective {
        Collective::AllReduce { count } => Some(all_reduce(shape, *count)),
        Collective::AllGather { counts } => Some(all_gather(shape, counts)),
        _ => None,
    }
}

pub(super) fn cost(shape: &Shape) -> Option<Cost> {
    match &shape.collective {
        Collective::AllReduce { count } => {
            let leaves = Leaves::new(shape.size);
            let rounds = u64::from(leaves.count.ilog2());
            let raw = shape.raw_bytes(*count);
            let partial = shape.as_partials(raw);
            // With pairs, every round may carry partial results. A pair's result goes back after the others have theirs only
            // if there are pairs in both halves of the tree.
            let before = u64::from(leaves.pairs > 0);
            let after = u64::from(leaves.pairs > leaves.count / 2);
            Some(Cost {
                latencies: before + rounds + after,
                messages: before + rounds + after,
                bytes: raw
                    .saturating_mul(1 + before)
                    .saturating_add(partial.saturating_mul(rounds - 1 + before)),
                folded: raw.saturating_mul(rounds + before),
            })
        }
        Collective::AllGather { counts } => {
            let (depth, rounds) = (shape.doubling_depth(), shape.doublings());
            let bytes = shape.part_bytes(counts).others();
            Some(Cost { latencies: u64::from(depth), messages: u64::from(rounds), bytes, folded: 0 })
        }
        _ => None,
    }
}

fn all_reduce(shape: &Shape, count: usize) -> Steps {
    let Shape { rank, in_place, .. } = *shape;
    let leaves = Leaves::new(shape.size);
    let input = Span::input(0..count);
    let output = Span::output(0..count);
    let mut steps = Steps::new();
    let Role::Stands(leaf) = leaves.role(rank) else {
        steps.send(rank + 1, input, vec![]);
        // In place this overwrites what is sent, but the result can only come when that has arrived.
        steps.recv(rank + 1, output, vec![]);
        return steps;
    };

    let partial = match Partials::home(shape) {
        Some(buffer) => Span::new(buffer, Repr::Raw, 0..count),
        None if leaves.is_pair(leaf) || leaves.count > 2 => {
            Span::new(steps.scratch(Repr::Acc, count), Repr::Acc, 0..count)
        }
        None => output.clone(),
    };
    // What this rank has so far, and the fold that made it.
    let mut held = input.clone();
    let mut made = None;
    // Sends of the input that the result must not overwrite.
    let mut reading = Vec::new();
    if leaves.is_pair(leaf) {
        let pair = vec![Leaf::Peer { rank: rank - 1, repr: Repr::Raw }, Leaf::Local(input)];
        made = Some(steps.recv_fold(pair, partial.clone(), false, vec![]));
        held = partial.clone();
    }
    let mut stride = 1;
    while stride < leaves.count {
        let partner = leaf ^ stride;
        let last = stride * 2 == leaves.count;
        let repr = if stride == 1 && !leaves.is_pair(partner) { Repr::Raw } else { shape.partial_repr() };
        let send =
            steps.send(leaves.rank(partner), held.clone(), made.map(After::Stream).into_iter().collect());
        let mut operands = vec![Leaf::Local(held.clone()), Leaf::Peer { rank: leaves.rank(partner), repr }];
        if partner < leaf {
            operands.reverse();
        }
        let into = if last { &output } else { &partial };
        if in_place && held.buffer == Buffer::Input {
            reading.push(After::Stream(send));
        }
        // The send has waited for what made its elements, so waiting for the send is enough where it must not be overtaken.
        let mut after: Vec<After> = match made {
            Some(_) if held.buffer == into.buffer => vec![After::Stream(send)],
            Some(made) => vec![After::Stream(made)],
            None => vec![],
        };
        if into.buffer == Buffer::Output {
            after.append(&mut reading);
        }
        made = Some(steps.recv_fold(operands, into.clone(), last, after));
        held = into.clone();
        stride *= 2;
    }
    if leaves.is_pair(leaf) {
        steps.send(rank - 1, output, made.map(After::Stream).into_iter().collect());
    }
    steps
}

fn all_gather(shape: &Shape, counts: &[usize]) -> Steps {
    let size = shape.size;
    let parts = all_parts(counts);
    let parts_from = |first: usize, parts_wanted: usize| {
        let ranges = (first..first + parts_wanted).map(|index| parts[index % size].clone()).collect();
        Span::gathered(Buffer::Output, Repr::Raw, ranges)
    };
    let mut steps = Steps::new();
    // The steps that brought parts, each with the distance of the first; a message waits for those that it passes on.
    let mut have = Vec::new();
    let mut distance = 1;
    while distance < size {
        // Fetch from the rank `distance` above the parts that it has and this rank lacks; give the same below.
        let fetched = distance.min(size - distance);
        if distance == 1 {
            steps.send(shape.below(1), Span::input(0..counts[shape.rank]), vec![]);
            if let Some((from, into)) = own_part(shape, counts) {
                have.push((0, After::Whole(steps.copy(from, into, vec![]))));
            }
        } else {
            let passed_on =
                have.iter().filter(|(first, _)| *first < fetched).map(|&(_, step)| step).collect();
            steps.send(shape.below(distance), parts_from(shape.rank, fetched), passed_on);
        }
        let recv = steps.recv(shape.above(distance), parts_from(shape.rank + distance, fetched), vec![]);
        have.push((distance, After::Whole(recv)));
        distance *= 2;
    }
    steps
}
