//! The one error type of the library.
#![forbid(unsafe_code)]

use std::{fmt, io, sync::Arc, time::Duration};

use crate::link::LinkKind;

/// The result of every fallible call of the library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, with the operation, rank and link it went wrong on and what to do next.
///
/// Errors can be cloned, because the first cause of a failure is kept and returned by every later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments of a call are wrong. Nothing was sent; the communicator is still usable.
    #[error("{operation} on rank {rank}: {reason}")]
    InvalidArgument {
        /// The call that was refused.
        operation: &'static str,
        /// The rank that made it.
        rank: usize,
        /// What is wrong and what would be right.
        reason: String,
    },

    /// A setting, variable or file is malformed or contradicts another.
    #[error("configuration: {what} is {value:?}: {reason}")]
    Config {
        /// The setting, as the user knows it (`RACCL_SIZE`, `--hostfile hosts.json`).
        what: String,
        /// Its value, shortened if long.
        value: String,
        /// Why it is refused and what is expected.
        reason: String,
        /// The error below, if there is one.
        #[source]
        source: Option<Cause>,
    },

    /// The group could not be formed.
    #[error("forming the group on rank {rank} failed: {reason}")]
    Bootstrap {
        /// The rank that reports it.
        rank: usize,
        /// Who is missing, what differs, and what to do.
        reason: String,
        /// The error below, if there is one.
        #[source]
        source: Option<Cause>,
    },

    /// A rank died, left while it was needed, or can no longer be reached. The group is unusable.
    #[error(
        "{operation} on rank {rank}: lost rank {peer} ({reason}); shrink the group or start it again{}",
        more(detail)
    )]
    PeerLost {
        /// The call that noticed.
        operation: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// The rank that was lost.
        peer: usize,
        /// How it was noticed.
        reason: String,
        /// The last calls of this rank, if they are known.
        detail: String,
        /// The error below, if there is one.
        #[source]
        source: Option<Cause>,
    },

    /// No byte moved for the deadline of the operation. The group is unusable.
    #[error(
        "{operation} on rank {rank}: nothing from rank {peer} over {link} for {waited:?} after {bytes} bytes; \
         is that rank still running, and did it make the same call? {detail}"
    )]
    Timeout {
        /// The call that waited.
        operation: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// The rank waited for.
        peer: usize,
        /// The kind of link to it.
        link: LinkKind,
        /// How long nothing moved.
        waited: Duration,
        /// Bytes of this operation that had been received from or sent to the peer.
        bytes: u64,
        /// What else is known about the peer's whereabouts, how far the call is, and the last calls of this rank.
        detail: String,
    },

    /// Two ranks made different calls at the same place of their sequence. The group is unusable.
    #[error(
        "ranks {rank} and {peer} disagree at call {sequence}: rank {rank} called {mine}, rank {peer} called {theirs}; \
         every rank must make the same calls in the same order{}",
        more(detail)
    )]
    Mismatch {
        /// One of the two ranks.
        rank: usize,
        /// The other.
        peer: usize,
        /// The place in the communicator's sequence of collective calls.
        sequence: u64,
        /// What `rank` called.
        mine: String,
        /// What `peer` called.
        theirs: String,
        /// The last calls of the rank that got this error, if they are known.
        detail: String,
    },

    /// A message was longer than the buffer it was received into. Only the receiver is told; the message is gone
    /// and the communicator is still usable.
    #[error(
        "recv on rank {rank}: the message of rank {peer} with tag {tag} has {sent} bytes, the buffer {room}; \
         its first {room} bytes were stored and the rest dropped"
    )]
    Truncated {
        /// The rank that received.
        rank: usize,
        /// The rank that sent.
        peer: usize,
        /// The tag of the message.
        tag: u64,
        /// The length of the message in bytes.
        sent: u64,
        /// The length of the buffer in bytes.
        room: u64,
    },

    /// There is no memory for a buffer, or a device cannot take more of it. The communicator is still usable.
    #[error(
        "registering {bytes} bytes on rank {rank}: {reason}; devices have few regions and the system may limit what a process locks \
         (ulimit -l): register less, in fewer pieces, or use ordinary memory"
    )]
    Registration {
        /// The rank that reports it.
        rank: usize,
        /// How much it was.
        bytes: usize,
        /// What the device or the system says.
        reason: String,
        /// The error below, if there is one.
        #[source]
        source: Option<Cause>,
    },

    /// Somebody called `abort`. The group is unusable.
    #[error("{operation} on rank {rank}: aborted by rank {by}")]
    Aborted {
        /// The call that was ended.
        operation: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// The rank that aborted.
        by: usize,
    },

    /// A peer sent something that the protocol does not allow. The group is unusable.
    #[error(
        "rank {peer} broke the protocol on {link} (seen by rank {rank}): {reason}; do all ranks run the same version?"
    )]
    Protocol {
        /// The rank that reports it.
        rank: usize,
        /// The rank that sent it.
        peer: usize,
        /// The kind of link it came over.
        link: LinkKind,
        /// What is wrong.
        reason: String,
    },

    /// A link kind was asked for by name and is not available.
    #[error("link kind {link} is not available on rank {rank}: {reason}")]
    Unavailable {
        /// The rank that reports it.
        rank: usize,
        /// The kind that was asked for.
        link: LinkKind,
        /// Why it is not there and what to do.
        reason: String,
        /// The error below, if there is one.
        #[source]
        source: Option<Cause>,
    },

    /// A user-supplied reduction panicked. The group is unusable.
    #[error("{operation} on rank {rank}: the user-defined operation panicked: {message}")]
    OperationPanicked {
        /// The call that ran it.
        operation: &'static str,
        /// The rank it panicked on.
        rank: usize,
        /// The panic's message.
        message: String,
    },

    /// The operating system refused something that has nothing to do with a peer.
    #[error("{what} failed on rank {rank}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// The operating system's error.
        #[source]
        source: Cause,
    },

    /// The others have formed a new group without this rank.
    #[error(
        "shrink on rank {rank}: rank {by} is in a new group without this rank, which came too late or could not be \
         reached; start it again as a member of a new group"
    )]
    Excluded {
        /// The rank that was left out.
        rank: usize,
        /// The rank that said so.
        by: usize,
    },

    /// Another rank failed first and said why. The group is unusable.
    #[error("{operation} on rank {rank}: rank {by} failed first: {message}")]
    Remote {
        /// The call that was ended here.
        operation: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// The rank that failed first.
        by: usize,
        /// Its error, in its words.
        message: String,
    },
}

/// What is known besides, after the text.
fn more(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" [{detail}]") }
}

/// An error below an [`Error`], shared so that the whole can be cloned.
#[derive(Clone)]
pub struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl Cause {
    /// Wraps any error.
    pub fn new(error: impl std::error::Error + Send + Sync + 'static) -> Cause {
        Cause(Arc::new(error))
    }
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Cause {
        Cause::new(error)
    }
}

impl From<Box<dyn std::error::Error + Send + Sync>> for Cause {
    fn from(error: Box<dyn std::error::Error + Send + Sync>) -> Cause {
        Cause(Arc::from(error))
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Cause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
