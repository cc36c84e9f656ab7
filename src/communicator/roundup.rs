//! Shrinking a group of threads: they meet in memory, and the last to come makes the new group for all.
#![forbid(unsafe_code)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{Communicator, local_group};
use crate::error::{Error, Result};

/// Where the ranks of one group of threads meet.
pub(super) struct Roundup {
    ranks: Mutex<Vec<Presence>>,
    news: Condvar,
}

/// Where a rank is.
enum Presence {
    /// It has its communicator and may come.
    Away,
    /// It waits for the others.
    Here,
    /// What has been made for it, which it fetches.
    Served(Box<Communicator>),
    /// The others went on without it.
    LeftOut { by: usize },
    /// It has dropped its communicator, or has a new one.
    Gone,
}

/// A rank's place in the roundup; it is gone when this is dropped.
pub(super) struct Seat {
    rank: usize,
    roundup: Arc<Roundup>,
}

impl Roundup {
    pub(super) fn new(size: usize) -> Arc<Roundup> {
        Arc::new(Roundup {
            ranks: Mutex::new((0..size).map(|_| Presence::Away).collect()),
            news: Condvar::new(),
        })
    }

    pub(super) fn seat(self: &Arc<Self>, rank: usize) -> Seat {
        Seat { rank, roundup: Arc::clone(self) }
    }
}

impl Seat {
    /// Waits for all ranks that still have their communicator, `late` at most, and returns the new one.
    pub(super) fn shrink(&self, late: Option<Duration>) -> Result<Communicator> {
        let rank = self.rank;
        let until = late.map(|late| Instant::now() + late);
        let mut ranks = self.roundup.ranks.lock();
        let reason = match ranks[rank] {
            Presence::Away => None,
            Presence::LeftOut { by } => return Err(Error::Excluded { rank, by }),
            Presence::Here | Presence::Served(_) => Some("another thread shrinks this group"),
            Presence::Gone => Some("the group was shrunk already; go on with what came out of that"),
        };
        if let Some(reason) = reason {
            return Err(Error::InvalidArgument { operation: "shrink", rank, reason: reason.to_owned() });
        }
        ranks[rank] = Presence::Here;
        loop {
            if matches!(ranks[rank], Presence::Served(_))
                && let Presence::Served(comm) = std::mem::replace(&mut ranks[rank], Presence::Gone)
            {
                return Ok(*comm);
            }
            let late = until.is_some_and(|until| Instant::now() >= until);
            if late || !ranks.iter().any(|presence| matches!(presence, Presence::Away)) {
                if let Err(error) = serve(&mut ranks, rank) {
                    ranks[rank] = Presence::Away;
                    return Err(error);
                }
                self.roundup.news.notify_all();
                continue;
            }
            match until {
                Some(until) => drop(self.roundup.news.wait_until(&mut ranks, until)),
                None => self.roundup.news.wait(&mut ranks),
            }
        }
    }
}

/// Makes a group of those who are here.
fn serve(ranks: &mut [Presence], by: usize) -> Result<()> {
    let here = ranks.iter().filter(|presence| matches!(presence, Presence::Here)).count();
    let mut comms = local_group(here)?.into_iter();
    for presence in ranks {
        match presence {
            // There are as many as were counted.
            Presence::Here => {
                if let Some(comm) = comms.next() {
                    *presence = Presence::Served(Box::new(comm));
                }
            }
            Presence::Away => *presence = Presence::LeftOut { by },
            _ => {}
        }
    }
    Ok(())
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.roundup.ranks.lock()[self.rank] = Presence::Gone;
        self.roundup.news.notify_all();
    }
}
