//! What a signal must not leave behind: devices that are open, in this process.
//!
//! Apple's driver counts some resources over all processes and does not always get back those of a process that was killed. So
//! while a device is open, SIGTERM and SIGINT first end the calls of all groups that have cables and free their devices.
#![forbid(unsafe_code)]

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::os::termination;

/// How long freeing may take before the signal ends the process all the same.
const PATIENCE: Duration = Duration::from_millis(900);

static OPEN: Mutex<Open> = Mutex::new(Open { holds: 0, watched: 0, ends: Vec::new() });
static CLOSED: Condvar = Condvar::new();
/// A signal has come.
static ENDING: AtomicBool = AtomicBool::new(false);

struct Open {
    holds: usize,
    /// Those that want to be watched over.
    watched: usize,
    ends: Vec<Arc<dyn End>>,
}

/// A group that can be ended.
pub(crate) trait End: Send + Sync {
    /// Ends its calls, and whatever waits for a peer. `signal` is the cause.
    fn stop(&self, signal: &'static str);
    /// Frees the devices of a group that was stopped, if that can be done by then.
    fn free(&self, until: Instant);
    /// The group has ended long ago.
    fn is_over(&self) -> bool;
}

/// To be kept as long as anything of a device is.
pub(super) struct Hold {
    watched: bool,
}

impl Hold {
    /// Fails when the process is about to end. `watched`: signals wait until this was dropped.
    pub(super) fn new(watched: bool) -> io::Result<Arc<Hold>> {
        check()?;
        let mut open = OPEN.lock();
        if watched && open.watched == 0 {
            termination::watch(end_all)?;
        }
        open.watched += usize::from(watched);
        open.holds += 1;
        Ok(Arc::new(Hold { watched }))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut open = OPEN.lock();
        open.holds -= 1;
        open.watched -= usize::from(self.watched);
        // With a signal under way, the thread that ends the process does the rest.
        if self.watched && open.watched == 0 && !ENDING.load(Ordering::Relaxed) {
            termination::unwatch();
        }
        CLOSED.notify_all();
    }
}

/// Ends the group before a signal ends the process.
pub(crate) fn on_signal(group: Arc<dyn End>) {
    let mut open = OPEN.lock();
    open.ends.retain(|other| !other.is_over());
    open.ends.push(Arc::clone(&group));
    drop(open);
    if ENDING.load(Ordering::SeqCst) {
        group.stop("a signal");
        group.free(Instant::now() + PATIENCE);
    }
}

/// An error once the process is about to end.
pub(super) fn check() -> io::Result<()> {
    if ENDING.load(Ordering::Relaxed) {
        return Err(io::Error::new(io::ErrorKind::Interrupted, "this process is being ended by a signal"));
    }
    Ok(())
}

fn end_all(signal: &'static str) {
    let until = Instant::now() + PATIENCE;
    ENDING.store(true, Ordering::SeqCst);
    let mut open = OPEN.lock();
    let ends = open.ends.clone();
    parking_lot::MutexGuard::unlocked(&mut open, || {
        // All of them first: one whose devices cannot be freed uses up the time.
        ends.iter().for_each(|group| group.stop(signal));
        ends.iter().for_each(|group| group.free(until));
    });
    while open.holds > 0 && !CLOSED.wait_until(&mut open, until).timed_out() {}
}
