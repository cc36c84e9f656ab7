//! Collective communications for small clusters of strong machines.
#![allow(dead_code, unused_imports)]

mod bootstrap;
mod communicator;
mod config;
mod engine;
mod error;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod link;
mod os;
mod plan;
mod reduce;

pub use communicator::{
    ByteCommunicator, Collective, Communicator, Explanation, Pending, Scope, local_group,
};
pub use config::{Config, DeviceMatrix, LinkChoice, Origin, hostfile, parse};
pub use error::{Cause, Error, Result};
pub use link::LinkKind;
pub use plan::Algorithm;
pub use reduce::{
    Avg, BitAnd, BitOr, BitXor, Custom, DType, Element, Fractional, Integer, Max, Min, Number, Operation,
    Ordered, ParseDTypeError, ParseReduceOpError, Prod, ReduceOp, Reducer, Sum, reduce_local,
};
