//! A software driver with the verbs interface that behaves as Apple's RDMA over Thunderbolt does.
//!
//! The shared library of this package (`libraccl_emulator.so`) exports the functions of `librdma.dylib`. Programs
//! that load it, each a machine of its own, are joined by cables that exist in shared memory:
//!
//! ```text
//! RACCL_EMULATOR_SPEC      a JSON file: machines, cables, limits, faults (see Spec)
//! RACCL_EMULATOR_MACHINE   which machine this process is, from 0; or "all"
//! ```
//!
//! The same package as a Rust library sets emulations up ([`Layout`], [`Spec`], [`Emulation`]), disturbs them
//! ([`Fault`]) and reads their books ([`Books`]).
//!
//! # What it holds programs to
//!
//! - Unreliable connected queue pairs only, SEND and RECV only, one piece a message, no immediates, no completion
//!   channels, no remote access.
//! - Ten queue pairs, eleven domains and completion queues, a hundred regions a device, over all processes.
//! - Queue depths counted in frames of 4 KiB. A receive beyond the depth is accepted and stalls the queue pair.
//! - A message is sent when its receive has been posted, not before; they have to have as many frames.
//! - Completions come in order, and a send's does not mean that the message has arrived. Nobody is told when a peer
//!   dies or a cable is cut.
//! - Regions begin at a page of 16 KiB, are writable and lie within 4 GiB of addresses.
//! - Addresses are the IPv4-mapped entries of the GID table, wherever they stand, once they are there; peers are
//!   reached over the cable that joins the two devices and over no other.
//! - Error numbers are Darwin's, some of them negative.
//! - What a killed process had stays taken.
//!
//! Where a real driver corrupts data in silence, this one counts ([`Mistakes`]): buffers changed too early, objects
//! freed in the wrong order, completion queues that are too small.
//!
//! # How it works
//!
//! There are no threads: posting a send copies the message into the queue pair's file, polling copies it out. When
//! that may happen is computed, not waited for: see `wire.rs`. Everything shared is made of atomics that are good at
//! any moment, so a process that dies holds nobody up; the layouts are described in `fabric.rs` and `channel.rs`.

mod cable_state;
mod channel;
mod checksum;
mod device_state;
mod driver;
mod emulation;
mod fabric;
mod layout;
mod mapping;
mod spec;
mod wire;

pub use emulation::{Books, Counts, Emulation, Mistakes, find_library};
pub use layout::{Layout, Shape};
pub use spec::{
    Cable, DeviceSettings, End, Fault, GID_TABLE, Limits, Overrun, Resource, Rules, Spec, SpecError, Verb,
};

/// The environment variable that names the description's file.
pub const SPEC_VARIABLE: &str = "RACCL_EMULATOR_SPEC";

/// The environment variable that says which machine a process is: a number, or `all`.
pub const MACHINE_VARIABLE: &str = "RACCL_EMULATOR_MACHINE";
