//! Groups of threads and of processes, through the public interface.

#[path = "../support/mod.rs"]
mod support;

mod bits;
mod lengths;
mod messages;
mod mismatch;
