//! RDMA verbs, loaded at run time: the C interface and a thin safe layer over it.
//!
//! Verbs are how a program tells a network card to move messages from its own registered memory into that of
//! another machine without a copy and without the kernel. macOS 26.2 has them for Thunderbolt 5 cables
//! (`librdma.dylib`), Linux for InfiniBand and RoCE cards and for the software card rxe (`libibverbs.so.1`).
//! Neither is linked: [`Library::load`] opens one when asked and says what it tried when there is none.
//!
//! # A queue pair in ten steps
//!
//! ```no_run
//! use raccl_sys::{Completion, Depths, Library, Route, Peer, QueuePairOptions, Transport};
//!
//! # fn exchange(local: Peer) -> Peer { local }
//! # fn main() -> Result<(), raccl_sys::Error> {
//! let library = Library::load(None)?;
//! let context = library.devices()?.find("rdma_en5")?.open()?;
//! let port = context.active_port(1)?;
//! let gid = context.ipv4_gid(1)?;
//! let domain = context.protection_domain()?;
//! let queue = domain.completion_queue(64)?;
//! let memory = domain.allocate(1 << 20)?;
//! let depth = Depths { send: 16, recv: 16 };
//! let pair = domain.queue_pair(&QueuePairOptions { transport: Transport::Uc, depth }, &queue, &queue)?;
//! pair.keep(&memory);
//! let local = Peer { lid: port.lid(), queue_pair: pair.number(), psn: 7, gid: gid.gid };
//! let remote = exchange(local); // over any other connection
//! let route = Route { port: 1, gid_index: gid.index, mtu: 1024 };
//! let pair = pair.init(1)?.ready_to_receive(&route, &remote)?.ready_to_send(local.psn)?;
//!
//! // SAFETY: `memory` is kept by the queue pair, and its first 4 KiB are left alone until the completion.
//! unsafe { pair.post_recv(1, memory.span(0, 4096)?)? };
//! let mut done = [Completion::default(); 8];
//! let count = queue.poll(&mut done)?;
//! for completion in &done[..count] {
//!     completion.check(&context)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Order of freeing
//!
//! Apple's driver wants queue pairs destroyed first, then regions deregistered, then completion queues, domains and
//! the device; what is freed in another order, or not at all, can stay lost until the machine restarts. So every
//! object here keeps alive what must outlive it, and dropping them in any order, on any path, frees them in that
//! one. What the driver refuses to free is not forgotten either: see [`Context::failures`].
//!
//! # Threads
//!
//! Verbs are thread safe by their specification, and the types here are `Send` and `Sync`. Two threads that post to
//! one queue pair are served in either order.

pub mod abi;
#[allow(missing_docs, non_camel_case_types, clippy::all)]
mod bindings;
mod completion;
mod device;
mod domain;
mod errno;
mod error;
mod loader;
mod memory;
mod port;
mod queue_pair;
mod region;

pub use completion::{Completion, CompletionQueue};
pub use device::{Context, Device, DeviceLimits, DeviceList, Failures};
pub use domain::ProtectionDomain;
pub use errno::Errno;
pub use error::{Attempt, Error};
pub use loader::{Library, Provider};
pub use port::{Gid, GidEntry, Port, PortState};
pub use queue_pair::{
    Depths, Init, Peer, QueuePair, QueuePairOptions, ReadyToReceive, ReadyToSend, Reset, Route, Transport,
};
pub use region::{MemoryRegion, Span};
