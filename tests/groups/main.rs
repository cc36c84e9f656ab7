//! Groups of threads and of processes, through the public interface.

#[path = "../support/mod.rs"]
mod support;

mod bits;
mod calls;
mod flight;
mod leaving;
mod lengths;
mod messages;
mod mismatch;
mod threads;
