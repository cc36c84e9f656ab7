//! Dissemination barrier: in round k everyone tells the rank 2^k further on that it, and everyone it has heard of, is here.
//!
//! After ceil(lg p) rounds of one empty message each, everybody has heard of everybody.
#![forbid(unsafe_code)]

use super::{After, Collective, Cost, Shape, Span, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    let Collective::Barrier = shape.collective else { return None };
    let mut steps = Steps::new();
    let mut heard = Vec::new();
    let mut distance = 1;
    while distance < shape.size {
        // The receiver lacks so many ranks' flags; in the last round that may be fewer than this rank has heard of.
        let lacking = distance.min(shape.size - distance);
        let passed_on =
            heard.iter().filter(|(nearest, _)| *nearest < lacking).map(|&(_, recv)| recv).collect();
        steps.send(shape.above(distance), Span::empty(), passed_on);
        let recv = steps.recv(shape.below(distance), Span::empty(), vec![]);
        heard.push((distance, After::Whole(recv)));
        distance *= 2;
    }
    Some(steps)
}

pub(super) fn cost(shape: &Shape) -> Option<Cost> {
    let Collective::Barrier = shape.collective else { return None };
    let (depth, rounds) = (shape.doubling_depth(), shape.doublings());
    Some(Cost { latencies: u64::from(depth), messages: u64::from(rounds), bytes: 0, folded: 0 })
}
