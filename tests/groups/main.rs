//! Groups of threads and of processes, through the public interface.

#[path = "../support/mod.rs"]
mod support;

mod bits;
mod buffers;
mod cables;
mod calls;
mod flight;
mod layouts;
mod leaving;
mod lengths;
mod machines;
mod messages;
mod mismatch;
mod reentry;
mod regions;
mod threads;
