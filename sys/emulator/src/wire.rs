//! Time on a cable.
//!
//! Nothing waits for real: when message and receive have met, the time at which the message will have been sent is
//! computed from the times at which they were posted and from what the cable has to carry before. Both sides then
//! look at the clock. Late looking costs nothing, so a cable is as fast as its description even where processes
//! share a processor.

use std::sync::atomic::Ordering;

use crate::cable_state::{CableState, FOR_EVER};
use crate::channel::{CLAIMING, Entry};
use crate::fabric::Fabric;

/// A queue pair's cable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wire {
    pub(crate) cable: usize,
    /// Which end of it is here.
    pub(crate) end: usize,
    pub(crate) latency: u64,
    pub(crate) bandwidth: Option<u64>,
}

impl Wire {
    /// Finds out when the message `entry`, going from `end` and ready to be sent since `ready`, is sent; `None` as
    /// long as it cannot be, or while the other side is finding it out.
    pub(crate) fn claim(
        &self,
        fabric: &Fabric,
        end: usize,
        entry: &Entry,
        ready: u64,
        now: u64,
    ) -> Option<u64> {
        let cable = fabric.cable(self.cable);
        if waits(cable, ready, now) {
            return None;
        }
        if let Err(known) = entry.end.compare_exchange(0, CLAIMING, Ordering::AcqRel, Ordering::Acquire) {
            return (known != CLAIMING).then_some(known);
        }
        let sent = self.send(cable, end, entry.len.load(Ordering::Relaxed), ready, now);
        entry.end.store(sent.unwrap_or(0), Ordering::Release);
        sent
    }

    /// The same for a message that nobody else knows of yet.
    pub(crate) fn claim_unseen(
        &self,
        fabric: &Fabric,
        end: usize,
        len: usize,
        ready: u64,
        now: u64,
    ) -> Option<u64> {
        let cable = fabric.cable(self.cable);
        // Messages are shorter than 4 GiB.
        if waits(cable, ready, now) { None } else { self.send(cable, end, len as u32, ready, now) }
    }

    /// Occupies the cable, and returns until when.
    fn send(&self, cable: &CableState, end: usize, len: u32, ready: u64, now: u64) -> Option<u64> {
        let Some(bandwidth) = self.bandwidth else {
            return begin(cable, ready, now).map(|start| start.max(CLAIMING + 1));
        };
        let duration = u64::from(len) * 1_000_000_000 / bandwidth;
        let busy = &cable.directions[end].free_at;
        let mut free = busy.load(Ordering::Relaxed);
        loop {
            let sent = begin(cable, ready.max(free), now)?.saturating_add(duration).max(CLAIMING + 1);
            match busy.compare_exchange_weak(free, sent, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(sent),
                Err(current) => free = current,
            }
        }
    }

    /// Whether a message sent at `sent` was under way when the cable failed.
    pub(crate) fn lost(&self, fabric: &Fabric, len: usize, sent: u64) -> bool {
        let (from, until) = fabric.cable(self.cable).outage();
        let began = sent.saturating_sub(self.duration(len));
        from < sent.saturating_add(self.latency) && began < until
    }

    /// Whether the cable was cut before a message was sent, so that its sender never hears of it.
    pub(crate) fn unsent(&self, fabric: &Fabric, sent: u64) -> bool {
        let (from, until) = fabric.cable(self.cable).outage();
        until == FOR_EVER && from < sent
    }

    fn duration(&self, len: usize) -> u64 {
        self.bandwidth.map_or(0, |bandwidth| len as u64 * 1_000_000_000 / bandwidth)
    }
}

/// When something that could begin at `time` does; `None` while the cable is down.
fn begin(cable: &CableState, time: u64, now: u64) -> Option<u64> {
    let (from, until) = cable.outage();
    if time < from || until <= time {
        Some(time)
    } else if now < until {
        None
    } else {
        Some(until)
    }
}

fn waits(cable: &CableState, ready: u64, now: u64) -> bool {
    begin(cable, ready, now).is_none()
}
