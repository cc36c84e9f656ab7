//! Proves the plans of all ranks of one operation by running them on symbols.
//!
//! What is proved, for one shape and one chunk size:
//!  - *Form*: dependencies point to earlier steps, spans lie inside their buffers, lengths and representations agree.
//!  - *Matching*: every send meets a receive of the same length and representation.
//!  - *No deadlock* on links that hold nothing ([`order`] states the model).
//!  - *No race*: two accesses to the same memory of which one is a write are ordered by dependencies and messages, chunk by
//!    chunk, so that the result cannot depend on timing. With `in_place` the user's two buffers are one memory.
//!  - *Values*: every output element of every rank is exactly the promised expression over all ranks' elements; nothing is
//!    read before it is written; partial results are never rounded; the user's input is left alone.
//!  - *Barrier*: nobody leaves before everybody has entered.
#![forbid(unsafe_code)]

mod expression;
mod form;
mod memory;
mod order;
mod values;

use super::{Plan, Shape};

pub(super) use expression::{Expression, Expressions};

use form::Matching;
use memory::Memory;
use order::Order;

/// What is wrong with the plans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// The property that a fault breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Form,
    Matching,
    Deadlock,
    Race,
    Value,
    Barrier,
}

/// Proves `plans`, one for each of `shapes`, which differ only in `rank` and `in_place`. `promise` builds the expression that
/// output element `element` (counted over all parts) must have.
pub(super) fn verify(
    shapes: &[Shape],
    plans: &[Plan],
    promise: impl Fn(&mut Expressions, usize) -> Expression,
) -> Result<(), Fault> {
    let memories: Vec<Memory> =
        shapes.iter().zip(plans).map(|(shape, plan)| Memory::new(shape, plan)).collect();
    form::check(plans, &memories)?;
    let matching = Matching::new(plans)?;
    let order = Order::new(plans, &matching, shapes[0].raw_size)?;
    order.check_deadlock(plans, &matching)?;
    order.check_races(plans, &memories, &matching)?;
    order.check_barrier(&shapes[0])?;
    values::check(plans, &memories, &matching, &order, promise)
}

impl Fault {
    fn new<T>(kind: Kind, text: impl Into<String>) -> Result<T, Fault> {
        Err(Fault { kind, text: text.into() })
    }
}
