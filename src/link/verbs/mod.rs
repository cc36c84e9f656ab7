//! The verbs link: cables between machines, through a library that is loaded at run time.
//!
//! [`wire`] is one cable as it carries packets, and [`lane`] makes an ordered, reliable pipe of bytes of it; striping makes
//! messages of one cable or several as it does of sockets. [`bundle`] makes as many pipes of several cables, which go on while one
//! is left. [`plan`] counts what devices are asked for, [`device`] opens them, and [`bring_up`] connects all cables of a group, by
//! the [`offer`]s that their ends make each other in three [`rounds`].
//! [`keeper`] keeps them alive, and [`hold`] frees them when a signal ends the process.

mod bring_up;
mod bundle;
mod crc32c;
mod device;
mod ends;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod hold;
mod keeper;
mod lane;
mod offer;
mod packet;
mod plan;
mod registry;
mod rounds;
mod source;
mod wire;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::VerbsTransport;
pub(crate) use bring_up::{Cabled, Failure, Request, connect};
pub(crate) use ends::{Cables, Inlet, Outlet};
pub(crate) use hold::{End, on_signal};
pub(crate) use registry::{Entry, Registry};

/// How cables are used; the same on both sides of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Options {
    /// The user's choice.
    pub(crate) transport: Option<VerbsTransport>,
    /// Payloads are summed, not headers alone.
    pub(crate) sums: bool,
    /// Bytes of a packet of the bulk class, a multiple of 4096 from 8192 on.
    pub(crate) bulk_bytes: usize,
    /// How many of them the receiver has room for: a power of two, at least 2. A quarter of them, and two at least, is under way.
    pub(crate) bulk_depth: u32,
    /// How long a queue pair may be silent; `None` is for ever.
    pub(crate) keep_alive: Option<Duration>,
    /// A pair goes on over the cables that are left when one dies.
    pub(crate) degrade: bool,
}

impl Default for Options {
    /// Deep enough for a cable of 80 Gbit/s, and less under way than drivers are reported to have trouble with.
    fn default() -> Options {
        Options {
            transport: None,
            sums: false,
            bulk_bytes: 64 << 10,
            bulk_depth: 8,
            keep_alive: Some(Duration::from_secs(20)),
            degrade: false,
        }
    }
}
