//! Ending a group from where hardly anything may be called.
#![forbid(unsafe_code)]

use std::{fmt, sync::Arc};

use crate::bootstrap::control::Trigger;

/// Ends a group of ranks like [`Communicator::abort`](crate::Communicator::abort), from any thread or from a signal handler.
///
/// [`abort`](AbortHandle::abort) stores to atomics and writes to descriptors that exist already. It takes no lock and no memory,
/// waits for nobody and leaves `errno` as it was, so it may interrupt anything, this library included. The handler must not
/// drop the last clone of a handle; one in a `static` is never dropped.
///
/// A handle does not keep a group alive: once that is closed, the handle does nothing. While the handle exists it holds a
/// descriptor or two.
///
/// ```
/// use std::sync::OnceLock;
///
/// static HANDLE: OnceLock<raccl::AbortHandle> = OnceLock::new();
///
/// extern "C" fn on_signal(_signal: libc::c_int) {
///     // Reading a cell that was set before is an atomic load.
///     if let Some(handle) = HANDLE.get() {
///         handle.abort();
///     }
/// }
///
/// let mut group = raccl::local_group(2)?;
/// let comm = group.remove(0);
/// let _ = HANDLE.set(comm.abort_handle());
/// let handler: extern "C" fn(libc::c_int) = on_signal;
/// // SAFETY: the handler does nothing that a signal handler may not do.
/// unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
///
/// // Rank 0 waits for a message that nobody sends, until the signal comes.
/// let waiting = std::thread::spawn(move || comm.recv(&mut [0u8; 8], 1, 0));
/// // SAFETY: raise takes no pointer.
/// unsafe { libc::raise(libc::SIGUSR1) };
/// assert!(matches!(waiting.join().unwrap(), Err(raccl::Error::Aborted { by: 0, .. })));
/// // So does every other call, here and on the other ranks.
/// assert!(matches!(group[0].barrier(), Err(raccl::Error::Aborted { by: 0, .. })));
/// # Ok::<(), raccl::Error>(())
/// ```
#[derive(Clone)]
pub struct AbortHandle(Arc<Trigger>);

impl AbortHandle {
    pub(super) fn new(trigger: Trigger) -> AbortHandle {
        AbortHandle(Arc::new(trigger))
    }

    /// Ends every call on every rank of the group with [`Error::Aborted`](crate::Error::Aborted), now and in the future. Safe in
    /// a signal handler.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.abort_handle().abort();
    /// assert!(comm.barrier().is_err());
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn abort(&self) {
        self.0.pull();
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortHandle").finish_non_exhaustive()
    }
}
