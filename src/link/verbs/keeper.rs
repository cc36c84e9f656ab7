//! A word now and then through cables on which nothing is said, since queue pairs are reported to die after long silence.
//!
//! One thread of the process does it for all cables, as long as there are some. It also takes what has come meanwhile off the
//! completion queues, so that the peer's words always meet a posted receive although nobody calls the library for hours.
#![forbid(unsafe_code)]

use std::{
    io,
    sync::Weak,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::link::LinkError;

/// The cables, and whether the thread runs.
static KEEPER: Mutex<Keeper> = Mutex::new(Keeper { cables: Vec::new(), running: false });
static ARRIVED: Condvar = Condvar::new();

struct Keeper {
    cables: Vec<Visit>,
    running: bool,
}

struct Visit {
    whom: Weak<dyn Kept>,
    every: Duration,
    next: Instant,
}

/// What is to be kept alive.
pub(super) trait Kept: Send + Sync {
    /// Names it.
    fn name(&self) -> &str;
    /// Says a word where nothing has been said since the last call, or for long enough.
    fn keep(&self) -> Result<(), LinkError>;
}

/// Keeps it alive by a call in each `every`, as long as it exists.
pub(super) fn keep(whom: Weak<dyn Kept>, every: Duration) -> io::Result<()> {
    let mut keeper = KEEPER.lock();
    keeper.cables.push(Visit { whom, every, next: Instant::now() + every });
    if !keeper.running {
        thread::Builder::new().name("raccl-cables".to_owned()).spawn(run)?;
        keeper.running = true;
    }
    ARRIVED.notify_one();
    Ok(())
}

/// Returns when the thread holds on to no cable.
pub(super) fn settle() {
    // It does so only under this lock.
    drop(KEEPER.lock());
}

fn run() {
    let mut keeper = KEEPER.lock();
    loop {
        keeper.cables.retain(|kept| kept.whom.strong_count() > 0);
        let Some(next) = keeper.cables.iter().map(|kept| kept.next).min() else {
            keeper.running = false;
            return;
        };
        let now = Instant::now();
        if now < next {
            ARRIVED.wait_until(&mut keeper, next);
            continue;
        }
        for kept in keeper.cables.iter_mut().filter(|kept| kept.next <= now) {
            kept.next = now + kept.every;
            if let Some(whom) = kept.whom.upgrade()
                && let Err(error) = whom.keep()
            {
                // Whoever uses the link next is told.
                tracing::debug!(cable = whom.name(), %error, "keeping a cable alive failed");
            }
        }
    }
}
