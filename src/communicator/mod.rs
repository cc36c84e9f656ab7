//! Communicators: the public face of the library.

mod abort;
mod buffer;
mod bytes;
mod collectives;
mod connect;
mod explain;
mod flight;
mod group;
mod local;
mod messages;
mod planner;
mod roundup;
mod scope;
mod shrink;
mod split;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

pub use self::{
    abort::AbortHandle,
    buffer::{Buffer, Registration, Uncopied},
    bytes::ByteCommunicator,
    explain::{Collective, Explanation},
    local::local_group,
    scope::{Pending, Scope},
};
use self::{planner::Planner, shrink::Lineage};
use crate::{
    engine::{Engine, Shared, Timeouts, refuse_inside},
    error::{Error, Result},
    link::LinkKind,
};

/// A group of ranks that make the same collective calls in the same order, and send messages to each other.
///
/// A communicator can be cloned and shared between threads; all operations take `&self`. Collectives of one communicator run
/// in the order in which they are called, which must be the same on all ranks: threads that call collectives of one
/// communicator at the same time must agree on an order themselves, or use a [`duplicate`](Communicator::duplicate) each.
/// Point-to-point messages match by source and tag, in the order in which they were sent.
///
/// After an error that makes the group unusable (every error but [`Error::InvalidArgument`], [`Error::Truncated`] and
/// [`Error::Registration`]) all later calls fail at once with the same first cause, on all communicators of the group.
///
/// When the last communicator of a group is dropped it says goodbye to the others, which need not be leaving at the same
/// time. [`close`](Communicator::close) does the same and returns what went wrong.
///
/// ```
/// use raccl::{Sum, local_group};
///
/// let ranks = local_group(4)?.into_iter().map(|comm| {
///     std::thread::spawn(move || {
///         let mut values = [comm.rank() as f32, 1.0];
///         comm.all_reduce(&mut values, Sum)?;
///         assert_eq!(values, [6.0, 4.0]);
///         Ok::<(), raccl::Error>(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), raccl::Error>(())
/// ```
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
    timeouts: Timeouts,
}

struct Inner {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    planner: Planner,
    /// Of the group, for the one that comes after it.
    lineage: Arc<Lineage>,
}

impl Communicator {
    /// This process's (or thread's) rank in the communicator, from 0 to `size() - 1`.
    pub fn rank(&self) -> usize {
        self.inner.shared.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.inner.shared.members.len()
    }

    /// The kind of link that joins this rank with `peer`, `None` for the rank itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `peer` is not a rank of the communicator.
    ///
    /// ```
    /// # let comm = raccl::local_group(2)?.remove(0);
    /// assert_eq!(comm.link(1)?, Some(raccl::LinkKind::Local));
    /// assert_eq!(comm.link(0)?, None);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn link(&self, peer: usize) -> Result<Option<LinkKind>> {
        let peer = self.world(peer, "link")?;
        Ok(self.inner.engine.link(peer))
    }

    /// The same communicator with another progress deadline: an operation fails with [`Error::Timeout`] when no byte of it has
    /// moved for `timeout` although the peer has entered it. Zero means no deadline.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.with_timeout(std::time::Duration::from_secs(5)).barrier()?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Communicator {
        let progress = Some(timeout).filter(|timeout| !timeout.is_zero());
        Communicator { inner: Arc::clone(&self.inner), timeouts: Timeouts { progress, ..self.timeouts } }
    }

    /// The same communicator with another deadline for peers that have not entered the operation yet. Zero means no deadline.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.with_late_timeout(std::time::Duration::from_secs(3600)).barrier()?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    #[must_use]
    pub fn with_late_timeout(&self, timeout: Duration) -> Communicator {
        let late = Some(timeout).filter(|timeout| !timeout.is_zero());
        Communicator { inner: Arc::clone(&self.inner), timeouts: Timeouts { late, ..self.timeouts } }
    }

    /// Ends every call on every rank of the group with [`Error::Aborted`], now and in the future. From any thread.
    ///
    /// ```
    /// let mut group = raccl::local_group(2)?;
    /// let (one, zero) = (group.pop().unwrap(), group.pop().unwrap());
    /// let waiting = std::thread::spawn(move || one.barrier());
    /// zero.abort();
    /// assert!(matches!(waiting.join().unwrap(), Err(raccl::Error::Aborted { by: 0, .. })));
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn abort(&self) {
        self.inner.engine.abort();
    }

    /// A handle that does what [`abort`](Communicator::abort) does and may be used in a signal handler.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let handle = comm.abort_handle();
    /// handle.abort();
    /// assert!(matches!(comm.barrier(), Err(raccl::Error::Aborted { by: 0, .. })));
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle::new(self.inner.engine.abort_handle())
    }

    /// Leaves the group, as dropping the last communicator does, and returns the error that the group had failed with, if it
    /// had. Nothing happens while other communicators of the group (clones, splits, duplicates) live.
    ///
    /// # Errors
    /// The first cause of the group's failure; [`Error::InvalidArgument`] inside a user-defined operation
    /// ([`Custom`](crate::Custom)), where this does no more than dropping the communicator.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.close()?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn close(self) -> Result<()> {
        refuse_inside("close", self.rank())?;
        let Communicator { inner, .. } = self;
        let Some(inner) = Arc::into_inner(inner) else { return Ok(()) };
        let engine = Arc::clone(&inner.engine);
        drop(inner);
        match Arc::into_inner(engine) {
            Some(engine) => engine.leave(),
            None => Ok(()),
        }
    }

    fn new(
        engine: Arc<Engine>,
        shared: Arc<Shared>,
        planner: Planner,
        lineage: Arc<Lineage>,
        timeouts: Timeouts,
    ) -> Communicator {
        Communicator { inner: Arc::new(Inner { engine, shared, planner, lineage }), timeouts }
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.inner.engine
    }

    /// The world rank of a rank of this communicator.
    fn world(&self, rank: usize, operation: &'static str) -> Result<usize> {
        self.inner.shared.members.get(rank).copied().ok_or_else(|| {
            self.invalid(
                operation,
                format!("there is no rank {rank}; the communicator has ranks 0 to {}", self.size() - 1),
            )
        })
    }

    fn invalid(&self, operation: &'static str, reason: String) -> Error {
        Error::InvalidArgument { operation, rank: self.rank(), reason }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("id", &self.inner.shared.id)
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.engine.unregister(self.shared.id);
    }
}
