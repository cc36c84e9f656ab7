//! One-shot: everyone sends everything to everyone and folds locally.
//!
//! One message time, the fewest rounds there can be, at the price of (p - 1) times the bytes. Best for small messages.
#![forbid(unsafe_code)]

use super::{After, Collective, Cost, Shape, Span, Tuning, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    let Collective::AllReduce { count } = shape.collective else { return None };
    let own = Span::input(0..count);
    let mut steps = Steps::new();
    let sends: Vec<usize> = shape.following().map(|peer| steps.send(peer, own.clone(), vec![])).collect();
    // In place the fold overwrites what is being sent; out of place it touches nothing that a send reads.
    let after = if shape.in_place { sends.into_iter().map(After::Stream).collect() } else { vec![] };
    steps.recv_fold(shape.raw_leaves(own), Span::output(0..count), true, after);
    Some(steps)
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let Collective::AllReduce { count } = shape.collective else { return None };
    let (peers, bytes) = (shape.size - 1, shape.raw_bytes(count));
    Some(Cost {
        latencies: 1,
        messages: peers as u64,
        bytes: tuning.fan(peers, bytes),
        folded: bytes.saturating_mul(peers as u64),
    })
}
