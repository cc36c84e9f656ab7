//! The names of the link kinds.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};

/// What joins a pair of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LinkKind {
    /// Queues between threads of one process.
    Local,
    /// Shared memory between processes of one machine.
    Shm,
    /// RDMA verbs: Thunderbolt on macOS, any RDMA card on Linux.
    Verbs,
    /// TCP sockets.
    Tcp,
}

impl LinkKind {
    /// The name that settings and reports use.
    ///
    /// ```
    /// assert_eq!(raccl::LinkKind::Tcp.name(), "tcp");
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Local => "local",
            LinkKind::Shm => "shm",
            LinkKind::Verbs => "verbs",
            LinkKind::Tcp => "tcp",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for LinkKind {
    type Err = String;

    fn from_str(text: &str) -> Result<LinkKind, String> {
        [LinkKind::Local, LinkKind::Shm, LinkKind::Verbs, LinkKind::Tcp]
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("{text:?} is no link kind; known are local, shm, verbs, tcp"))
    }
}
