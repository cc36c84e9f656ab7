//! What joins the ranks: devices, cables, and what they make possible.
//!
//! [`wiring`] says which links and cables join which ranks and how plans are chosen for them.
#![forbid(unsafe_code)]

mod layout;
mod wiring;

pub use layout::CableLayout;
pub(crate) use wiring::{Topology, without_cable};
