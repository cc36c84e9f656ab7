//! What control connections report, and to whom.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::alarm::Alarm;
use crate::link::Signature;

/// Receives what the monitor learns about the peers. Implemented by the engine; methods are called from the monitor's thread,
/// must not block, and must not call back into [`Control`](super::control::Control).
pub(crate) trait Watcher: Send + Sync {
    /// The peer says goodbye: it will make no further call. From now on nothing is sent to it; the answer is the number of
    /// bytes that were sent to it on each of its data sockets, so that it can read them all before it closes.
    fn goodbye(&self, peer: usize) -> Vec<u64>;

    /// The peer's answer to our goodbye.
    fn goodbye_answered(&self, peer: usize, sent: Vec<u64>);

    /// The peer failed and says why (a chain of causes is passed on as it came: `cause.origin` failed first).
    fn failed(&self, peer: usize, cause: RemoteCause);

    /// The control connection closed without a goodbye, or broke. `reason` says how ("its connection closed").
    fn lost(&self, peer: usize, reason: String);

    /// The peer has been waiting for a while and tells where it is.
    fn status(&self, peer: usize, status: Status);

    /// What a signal handler may ring.
    fn alarm(&self) -> Arc<Alarm>;

    /// What the other ranks shall be told after the alarm was rung by this rank. They may be told the same by others.
    fn aborted(&self) -> Option<RemoteCause>;

    /// The peer is leaving and wants to know how many packets have arrived through each of the cables to it. None where there
    /// are no cables.
    fn count_arrived(&self, _peer: usize) -> Vec<u64> {
        Vec::new()
    }

    /// The peer's answer to that question of ours.
    fn arrived(&self, _peer: usize, _packets: Vec<u64>) {}

    /// The control connection has ended, in whatever way: the peer needs nothing any more.
    fn ended(&self, _peer: usize) {}
}

/// Why a rank failed, as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteCause {
    /// The rank that failed first.
    pub(crate) origin: usize,
    pub(crate) kind: CauseKind,
    /// The error in words, at most [`MESSAGE_LIMIT`] bytes.
    pub(crate) message: String,
}

/// Longest text in a [`RemoteCause`].
pub(crate) const MESSAGE_LIMIT: usize = 2048;

/// The kinds of failure that every rank reports as its own error variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CauseKind {
    /// `peer` was lost.
    PeerLost { peer: usize },
    /// The origin and `peer` made different calls.
    Mismatch { peer: usize, sequence: u64, mine: String, theirs: String },
    /// The origin called `abort`.
    Aborted,
    /// Anything else.
    Other,
}

/// Where a waiting rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) comm: u32,
    /// The collective it is in.
    pub(crate) sequence: u64,
    pub(crate) signature: Signature,
}
