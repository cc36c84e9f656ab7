//! Collective communications for small clusters of strong machines.
//!
//! Ranks (threads, processes, machines) form a group and make the same calls in the same order: all-reduce, all-gather,
//! reduce-scatter, broadcast, barrier; any two may send messages to each other. Every rank gets the same bits, whatever the
//! message size, the algorithm or the link. A rank that dies or makes another call is an error on every rank, not a hang.
//!
//! # Quick start
//!
//! A program that any launcher can start (`raccl launch -n 4 -- program`, `mpirun -n 4 program`, or nothing at all):
//!
//! ```
//! use raccl::{Config, Sum};
//!
//! let comm = Config::from_env()?.connect()?;
//! let mut values = vec![comm.rank() as f32; 1000];
//! comm.all_reduce(&mut values, Sum)?;
//! comm.close()?;
//! # Ok::<(), raccl::Error>(())
//! ```
//!
//! # Where to find what
//!
//! - [`Config`]: how a group is formed, from the environment or from memory.
//! - [`Communicator`]: all operations; [`local_group`] makes one for each thread of a process.
//! - [`Sum`], [`Prod`], [`Min`], [`Max`], [`Avg`], [`BitAnd`], [`BitOr`], [`BitXor`], [`Custom`]: what a reduction does.
//! - [`Communicator::allocate`], [`Communicator::with_registered`]: memory that RDMA devices read and write themselves.
//! - [`Communicator::scope`]: operations that do not block, on borrowed buffers.
//! - [`ByteCommunicator`]: the same for those who learn the element type at run time.
//! - [`Communicator::explain`]: which algorithm would run, and why.
//! - [`Config::device_report`]: which RDMA devices there are, and what is in the way when there are none.
//! - [`Communicator::flight_record`]: the last calls of this rank, and who waits for whom.
//! - [`Error`]: what can go wrong, and what to do about it.
//!
//! # What is promised about bits
//!
//! All ranks get equal results. Sums and products are folded in one tree that depends on the number of ranks alone, so results
//! do not change with message size, algorithm, chunking, link or arrival order (rings of more than four neighbours-only ranks
//! have an order of their own). f16 and bf16 are accumulated in f32 and rounded once. Integers wrap. `Min` and `Max` propagate
//! NaN and order -0 below +0. User-defined operations are applied in rank order and are taken to be associative.

mod bootstrap;
mod communicator;
mod config;
mod engine;
mod error;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod link;
mod noise;
mod os;
mod plan;
mod reduce;
mod topology;

pub use communicator::{
    AbortHandle, Buffer, ByteCommunicator, Collective, Communicator, Explanation, Pending, Registration,
    Scope, Uncopied, local_group,
};
pub use config::{Config, DeviceMatrix, LinkChoice, Origin, VerbsTransport, hostfile, parse};
pub use engine::{FlightCall, FlightPeer, FlightRecord, FlightState};
pub use error::{Cause, Error, Result};
pub use link::LinkKind;
pub use plan::Algorithm;
pub use reduce::{
    Avg, BitAnd, BitOr, BitXor, Custom, DType, Element, Fractional, Integer, Max, Min, Number, Operation,
    Ordered, ParseDTypeError, ParseReduceOpError, Prod, ReduceOp, Reducer, Sum, reduce_local,
};
pub use topology::{
    CableLayout, DeviceInfo, DeviceLimits, DeviceReport, GidInfo, MatrixCable, PortInfo, Problem,
    ProblemKind, Remedy,
};

/// The examples of the README are compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
