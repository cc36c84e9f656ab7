//! The bits that every call looks at, and the bell that makes callers look.
//!
//! | field | written by | read by |
//! | --- | --- | --- |
//! | `flag` | the monitor, callers, signal handlers; bits are set with release and `NEWS` is cleared by whoever reads it | a healthy call, relaxed; what a bit stands for is found behind a mutex, or in `by` |
//! | `by` | whoever sets `ABORT`, before that | whoever has seen `ABORT`, after an acquire fence |
//!
//! Nothing here takes a lock or memory, so that [`Alarm::abort`] may be called where hardly anything may: in a signal handler.
#![forbid(unsafe_code)]

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicUsize, Ordering, fence},
};

use crate::os::Waker;

/// The group has failed; every call returns the first cause.
pub(crate) const FAILED: u32 = 1;
/// A peer has left or has told where it is: the driver should look.
pub(crate) const NEWS: u32 = 2;
/// Somebody wants the group to end.
pub(crate) const ABORT: u32 = 4;

/// See the [module](self).
pub(crate) struct Alarm {
    pub(crate) flag: AtomicU32,
    by: AtomicUsize,
    pub(crate) waker: Arc<Waker>,
}

impl Alarm {
    pub(crate) fn new(waker: Arc<Waker>) -> Alarm {
        Alarm { flag: AtomicU32::new(0), by: AtomicUsize::new(usize::MAX), waker }
    }

    /// Ends every call of this rank, because rank `by` wants it. Safe in a signal handler.
    pub(crate) fn abort(&self, by: usize) {
        // Whoever comes first is named; nothing is lost if two come at once.
        let _ = self.by.compare_exchange(usize::MAX, by, Ordering::Relaxed, Ordering::Relaxed);
        self.flag.fetch_or(ABORT, Ordering::Release);
        self.waker.wake();
    }

    /// Who wanted the end. Only asked when `ABORT` has been seen.
    pub(crate) fn aborted_by(&self) -> usize {
        fence(Ordering::Acquire);
        self.by.load(Ordering::Relaxed)
    }
}
