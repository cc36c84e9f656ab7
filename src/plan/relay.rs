//! Relay: neighbours pass everything on, in both directions, until all have it.
//!
//! The fewest message times that cables between neighbours allow. All-reduce, up to 4 ranks on a ring: raw elements go to both
//! neighbours and from there to the rank opposite, and everyone folds the canonical tree. Broadcast: the whole data both ways,
//! halfway around.
#![forbid(unsafe_code)]

use super::{After, Collective, Cost, Leaf, Shape, Span, Tuning, one_shot, parts::part, steps::Steps};
use crate::reduce::Repr;

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    match shape.collective {
        Collective::Broadcast { root, count } => Some(broadcast(shape, root, count)),
        Collective::AllReduce { .. } if shape.size <= 3 => one_shot::make(shape),
        Collective::AllReduce { count } if shape.size == 4 => Some(all_reduce(shape, count)),
        _ => None,
    }
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    match shape.collective {
        Collective::Broadcast { count, .. } => {
            let (hops, bytes) = (shape.size / 2, shape.raw_bytes(count));
            // The root serves both sides.
            let sides = (shape.size - 1).min(2);
            Some(Cost {
                latencies: hops as u64,
                messages: hops as u64 + 1,
                bytes: tuning.fan(sides, bytes).saturating_add(tuning.filling(hops, bytes)),
                folded: 0,
            })
        }
        Collective::AllReduce { .. } if shape.size <= 3 => one_shot::cost(shape, tuning),
        Collective::AllReduce { count } if shape.size == 4 => {
            let bytes = shape.raw_bytes(count);
            Some(Cost {
                latencies: 2,
                messages: 6,
                bytes: tuning.fan(2, bytes.saturating_add(bytes / 2)),
                folded: bytes.saturating_mul(3),
            })
        }
        _ => None,
    }
}

fn broadcast(shape: &Shape, root: usize, count: usize) -> Steps {
    let size = shape.size;
    let data = || Span::output(0..count);
    // The first half of the ranks after the root is served upwards, the others downwards.
    let upwards = size / 2;
    let distance = (shape.rank + size - root) % size;
    let mut steps = Steps::new();
    let mut after = Vec::new();
    if distance > 0 {
        let from = if distance <= upwards { shape.below(1) } else { shape.above(1) };
        after.push(After::Stream(steps.recv(from, data(), vec![])));
    }
    if distance < upwards {
        steps.send(shape.above(1), data(), after.clone());
    }
    let downwards = (size - distance) % size;
    if (distance == 0 || distance > upwards) && downwards + 1 < size - upwards {
        steps.send(shape.below(1), data(), after);
    }
    steps
}

/// A ring of 4. The rank opposite comes with one half of the elements over either neighbour.
fn all_reduce(shape: &Shape, count: usize) -> Steps {
    let (above, below) = (shape.above(1), shape.below(1));
    let halves = [part(count, 2, 0), part(count, 2, 1)];
    let mut steps = Steps::new();
    let buffers = [steps.scratch(Repr::Raw, count), steps.scratch(Repr::Raw, count)];
    let mut sends = Vec::new();
    for half in &halves {
        sends.push([above, below].map(|peer| steps.send(peer, Span::input(half.clone()), vec![])));
    }
    let mut recvs = Vec::new();
    for half in &halves {
        let from = [(below, buffers[0]), (above, buffers[1])];
        recvs.push(
            from.map(|(peer, buffer)| steps.recv(peer, Span::new(buffer, Repr::Raw, half.clone()), vec![])),
        );
    }
    let passed = [(above, buffers[0]), (below, buffers[1])];
    for (index, (to, buffer)) in passed.into_iter().enumerate() {
        steps.send(
            to,
            Span::new(buffer, Repr::Raw, halves[index].clone()),
            vec![After::Stream(recvs[index][index])],
        );
    }
    for (index, half) in halves.into_iter().enumerate() {
        let local = |buffer| Leaf::Local(Span::new(buffer, Repr::Raw, half.clone()));
        let mut leaves = vec![Leaf::Local(Span::input(half.clone())); 4];
        leaves[below] = local(buffers[0]);
        leaves[above] = local(buffers[1]);
        leaves[shape.above(2)] = Leaf::Peer { rank: [below, above][index], repr: Repr::Raw };
        let mut after: Vec<After> = recvs[index].map(After::Stream).to_vec();
        if shape.in_place {
            after.extend(sends[index].map(After::Stream));
        }
        steps.recv_fold(leaves, Span::output(half), true, after);
    }
    steps
}
