//! What joins the ranks: devices, cables, and what they make possible.
//!
//! [`wiring`] says which links and cables join which ranks and how plans are chosen for them. [`survey`] asks the verbs library and the system, [`report`] is what came of it as plain data, and [`diagnosis`] says what
//! is in the way of RDMA and how to remove it.
#![forbid(unsafe_code)]

mod diagnosis;
mod layout;
mod report;
mod survey;
mod wiring;

pub use layout::CableLayout;
pub use report::{
    DeviceInfo, DeviceLimits, DeviceReport, GidInfo, MatrixCable, PortInfo, Problem, ProblemKind, Remedy,
};
pub(crate) use wiring::{Topology, without_cable};
