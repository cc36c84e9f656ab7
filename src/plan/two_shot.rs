//! Two-shot: every rank folds one part of all elements, straight from everybody's input, then sends the result to everyone.
//!
//! Two message times and 2(p - 1)/p of the bytes, the fewest there can be; nothing is copied, raw elements are sent both ways.
//! The second half streams behind the first: the beginning of a part is on its way back while its end is still being folded.
#![forbid(unsafe_code)]

use super::{After, Collective, Cost, Shape, Span, Tuning, parts::part, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    let Collective::AllReduce { count } = shape.collective else { return None };
    let part = |rank: usize| part(count, shape.size, rank);
    let own = part(shape.rank);
    let mut steps = Steps::new();
    for peer in shape.following() {
        steps.send(peer, Span::input(part(peer)), vec![]);
    }
    let leaves = shape.raw_leaves(Span::input(own.clone()));
    let fold = steps.recv_fold(leaves, Span::output(own.clone()), true, vec![]);
    for peer in shape.following() {
        steps.send(peer, Span::output(own.clone()), vec![After::Stream(fold)]);
    }
    // In place a peer's result lands where the first sends read from. It contains what was read there, so it comes later.
    for peer in shape.preceding() {
        steps.recv(peer, Span::output(part(peer)), vec![]);
    }
    Some(steps)
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let Collective::AllReduce { count } = shape.collective else { return None };
    let (peers, bytes) = (shape.size - 1, shape.even_part_bytes(count));
    Some(Cost {
        latencies: 2,
        messages: 2 * peers as u64,
        bytes: tuning.fan(peers, bytes).saturating_mul(2),
        folded: bytes.saturating_mul(peers as u64),
    })
}
