//! Chain broadcast: every rank passes the data on to the next while it is still coming in.
//!
//! One link's time for the bytes plus p - 1 message times for the first chunk, over cables between neighbours only.
#![forbid(unsafe_code)]

use super::{After, Collective, Cost, Shape, Span, Tuning, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    let Collective::Broadcast { root, count } = shape.collective else { return None };
    let data = || Span::output(0..count);
    let mut steps = Steps::new();
    let mut after = Vec::new();
    if shape.rank != root {
        after.push(After::Stream(steps.recv(shape.below(1), data(), vec![])));
    }
    if shape.above(1) != root {
        steps.send(shape.above(1), data(), after);
    }
    Some(steps)
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let Collective::Broadcast { count, .. } = shape.collective else { return None };
    let hops = shape.size - 1;
    let bytes = tuning.pipelined(hops, shape.raw_bytes(count));
    Some(Cost { latencies: hops as u64, messages: hops as u64, bytes, folded: 0 })
}
