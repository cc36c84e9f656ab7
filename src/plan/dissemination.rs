//! Dissemination barrier: in round k everyone tells the rank 2^k further on that it, and everyone it has heard of, is here.
//!
//! After ceil(lg p) rounds of one empty message each, everybody has heard of everybody.
#![forbid(unsafe_code)]

use super::{After, Collective, Shape, Span, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    let Collective::Barrier = shape.collective else { return None };
    let mut steps = Steps::new();
    let mut heard = Vec::new();
    let mut distance = 1;
    while distance < shape.size {
        steps.send(shape.above(distance), Span::empty(), heard.clone());
        heard.push(After::Whole(steps.recv(shape.below(distance), Span::empty(), vec![])));
        distance *= 2;
    }
    Some(steps)
}
