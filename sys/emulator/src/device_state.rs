//! A device as all processes share it: its books, its port, its address, its failing calls.

#[cfg(not(target_os = "linux"))]
use std::io;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::mapping::Shared;
use crate::spec::{Resource, Verb};

/// A device.
#[repr(C, align(128))]
pub(crate) struct DeviceState {
    /// How many of each resource processes have now.
    pub(crate) live: [AtomicU32; Resource::COUNT],
    /// How many of each are taken by nobody.
    pub(crate) leaked: [AtomicU32; Resource::COUNT],
    /// How many of each there ever were.
    pub(crate) made: [AtomicU64; Resource::COUNT],
    /// What programs did wrong.
    pub(crate) mistakes: [AtomicU64; Mistake::COUNT],
    /// The number of the last queue pair.
    pub(crate) last_number: AtomicU32,
    /// 1 where the port was switched off.
    pub(crate) port_down: AtomicU32,
    /// Where the IPv4-mapped GID stands; [`NO_GID`]: nowhere.
    pub(crate) gid_index: AtomicU32,
    /// How many calls are set to fail, so that the rest of the time nothing is looked up.
    failing: AtomicU32,
    /// When the IPv4-mapped GID appears.
    pub(crate) gid_from: AtomicU64,
    fails: [Failing; Verb::COUNT],
    owners: [Owner; OWNERS],
}

// SAFETY: atomics alone.
unsafe impl Shared for DeviceState {}

/// The value of [`DeviceState::gid_index`] for no entry.
pub(crate) const NO_GID: u32 = u32::MAX;

/// What a program can do wrong without being told at once by a real driver. Tests look at the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Mistake {
    EarlyReuse,
    Overrun,
    FrameMismatch,
    FreedOutOfOrder,
    CompletionQueueTooSmall,
    BadMemory,
}

impl Mistake {
    pub(crate) const COUNT: usize = Mistake::BadMemory as usize + 1;
}

/// A call that is set to fail: `skip` times not yet, then `times` times.
#[repr(C)]
struct Failing {
    skip: AtomicU32,
    times: AtomicU32,
    errno: AtomicI32,
}

const OWNERS: usize = 64;

/// The process number in a place that is being taken back.
const BEING_RECLAIMED: u32 = u32::MAX;

/// What one open context has, so that it can be taken back when its process is killed.
#[repr(C)]
struct Owner {
    /// The process; 0: nobody.
    pid: AtomicU32,
    counts: [AtomicU32; Resource::COUNT],
    /// When the process started, which tells it from a later one of the same number.
    started: AtomicU64,
}

impl DeviceState {
    /// Takes one of a resource that there are `limit` of. `false` when they are used up.
    pub(crate) fn take(&self, resource: Resource, limit: u32, owner: Option<usize>) -> bool {
        let leaked = self.leaked[resource as usize].load(Ordering::Relaxed);
        let live = &self.live[resource as usize];
        let taken = live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
            (live.saturating_add(leaked) < limit).then_some(live + 1)
        });
        if taken.is_ok() {
            self.made[resource as usize].fetch_add(1, Ordering::Relaxed);
            if let Some(owner) = owner {
                self.owners[owner].counts[resource as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
        taken.is_ok()
    }

    /// Gives one back.
    pub(crate) fn give(&self, resource: Resource, owner: Option<usize>) {
        self.live[resource as usize].fetch_sub(1, Ordering::Relaxed);
        if let Some(owner) = owner {
            self.owners[owner].counts[resource as usize].fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A place for what a context of this process will take; `None` when there are too many contexts.
    pub(crate) fn own(&self) -> Option<usize> {
        let pid = std::process::id();
        let place = self.owners.iter().position(|owner| {
            owner.pid.compare_exchange(0, pid, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        self.owners[place].started.store(started(pid).unwrap_or(0), Ordering::Release);
        Some(place)
    }

    /// Gives the place back.
    pub(crate) fn disown(&self, place: usize) {
        let owner = &self.owners[place];
        // First, or the next process to have the place could be taken for one that is gone.
        owner.started.store(0, Ordering::Relaxed);
        owner.pid.store(0, Ordering::Release);
    }

    /// Takes back what processes had that are gone.
    pub(crate) fn reclaim(&self) {
        for owner in &self.owners {
            let pid = owner.pid.load(Ordering::Acquire);
            let start = owner.started.load(Ordering::Acquire);
            // A start of 0 is one that is not known yet, or not on this system.
            let same = started(pid).is_some_and(|now| start == 0 || now == start);
            if pid == 0 || same {
                continue;
            }
            // Whoever takes the dead process's number out does the rest.
            if owner.pid.compare_exchange(pid, BEING_RECLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                for (count, live) in owner.counts.iter().zip(&self.live) {
                    live.fetch_sub(count.swap(0, Ordering::Relaxed), Ordering::Relaxed);
                }
                owner.started.store(0, Ordering::Relaxed);
                owner.pid.store(0, Ordering::Release);
            }
        }
    }

    /// Sets a call to fail.
    pub(crate) fn fail(&self, verb: Verb, errno: i32, skip: u32, times: u32) {
        let fails = &self.fails[verb as usize];
        fails.errno.store(errno, Ordering::Relaxed);
        fails.skip.store(skip, Ordering::Relaxed);
        match (fails.times.swap(times, Ordering::Release), times) {
            (0, 0) => {}
            (0, _) => {
                self.failing.fetch_add(1, Ordering::Release);
            }
            (_, 0) => {
                self.failing.fetch_sub(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// The number with which a call is set to fail this time.
    #[inline]
    pub(crate) fn injected(&self, verb: Verb) -> Option<i32> {
        if self.failing.load(Ordering::Acquire) == 0 { None } else { self.inject(verb) }
    }

    #[cold]
    fn inject(&self, verb: Verb) -> Option<i32> {
        let fails = &self.fails[verb as usize];
        if fails.times.load(Ordering::Acquire) == 0 {
            return None;
        }
        let less = |count: u32| count.checked_sub(1);
        if fails.skip.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return None;
        }
        match fails.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Err(_) => return None,
            Ok(1) => {
                self.failing.fetch_sub(1, Ordering::Relaxed);
            }
            Ok(_) => {}
        }
        Some(fails.errno.load(Ordering::Relaxed))
    }

    pub(crate) fn mistake(&self, mistake: Mistake) {
        self.mistakes[mistake as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// When a process started, in whatever unit; `None` when there is no such process.
pub(crate) fn started(pid: u32) -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may contain anything; the 22nd field is the 20th behind it.
        let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
        // A process that has ended but that its parent has not waited for yet is gone.
        if fields.next()? == "Z" {
            return None;
        }
        fields.nth(18)?.parse().ok()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let pid = libc::pid_t::try_from(pid).ok()?;
        // SAFETY: signal 0 is never delivered; only the process's existence is checked.
        let status = unsafe { libc::kill(pid, 0) };
        (status == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)).then_some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_started_and_no_process_has_not() {
        assert!(started(std::process::id()).is_some());
        assert_eq!(started(u32::MAX), None);
    }
}
