//! A cable as all processes share it: whether it is up, until when it is busy, and the faults that wait for a message.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::mapping::Shared;
use crate::spec::SpecError;

/// A cable.
#[repr(C, align(128))]
pub(crate) struct CableState {
    /// It carries nothing from here.
    pub(crate) down_from: AtomicU64,
    /// Until here; [`FOR_EVER`]: it is cut.
    pub(crate) down_until: AtomicU64,
    /// What each end sends.
    pub(crate) directions: [Direction; 2],
}

// SAFETY: atomics alone.
unsafe impl Shared for CableState {}

/// A time that does not come.
pub(crate) const FOR_EVER: u64 = u64::MAX;

/// One direction of a cable.
#[repr(C, align(128))]
pub(crate) struct Direction {
    /// Until when it is busy with what has been sent.
    pub(crate) free_at: AtomicU64,
    /// How many messages have been posted.
    pub(crate) posted: AtomicU64,
    /// How many faults are set.
    pub(crate) armed: AtomicU32,
    pub(crate) traps: [Trap; TRAPS],
}

const TRAPS: usize = 16;

/// A fault that waits for a message.
///
/// `kind` is stored last by whoever sets it, and taken by a compare-and-swap by whoever posts the message, so that it
/// goes off once.
#[repr(C)]
pub(crate) struct Trap {
    kind: AtomicU32,
    message: AtomicU64,
    /// For how long, or how often.
    argument: AtomicU64,
}

/// The value of [`Trap::kind`] for one that is free.
const FREE: u32 = 0;
/// The value while it is being set.
const BEING_SET: u32 = u32::MAX;

/// What happens to a message that is being posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Harm {
    Lose = 1,
    Corrupt = 2,
    Stall = 3,
    Cut = 4,
    Flap = 5,
}

impl Harm {
    const ALL: [Harm; 5] = [Harm::Lose, Harm::Corrupt, Harm::Stall, Harm::Cut, Harm::Flap];
}

impl CableState {
    /// Whether it carries nothing at that time.
    #[inline]
    pub(crate) fn is_down(&self, time: u64) -> bool {
        let from = self.down_from.load(Ordering::Acquire);
        from <= time && time < self.down_until.load(Ordering::Relaxed)
    }

    /// The outage that a time is in or before: from when until when.
    #[inline]
    pub(crate) fn outage(&self) -> (u64, u64) {
        let from = self.down_from.load(Ordering::Acquire);
        (from, self.down_until.load(Ordering::Relaxed))
    }

    /// Stops carrying anything.
    pub(crate) fn go_down(&self, harm: Harm, length: u64, now: u64) {
        if harm == Harm::Flap && self.down_until.load(Ordering::Relaxed) == FOR_EVER && self.is_down(now) {
            // Cut already.
            return;
        }
        let until = if harm == Harm::Flap { now.saturating_add(length) } else { FOR_EVER };
        self.down_until.store(until, Ordering::Relaxed);
        self.down_from.store(now, Ordering::Release);
    }
}

impl Direction {
    /// Sets a fault for a message to come.
    pub(crate) fn arm(&self, message: u64, harm: Harm, argument: u64) -> Result<(), SpecError> {
        let message = self.posted.load(Ordering::Relaxed).saturating_add(message);
        let free = self.traps.iter().find(|trap| {
            trap.kind.compare_exchange(FREE, BEING_SET, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let trap =
            free.ok_or_else(|| SpecError(format!("a cable takes {TRAPS} faults in wait, and has them")))?;
        trap.message.store(message, Ordering::Relaxed);
        trap.argument.store(argument, Ordering::Relaxed);
        trap.kind.store(harm as u32, Ordering::Release);
        self.armed.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Counts a message that is being posted; returns the first fault that it sets off, with its argument.
    #[inline]
    pub(crate) fn count(&self) -> Option<(Harm, u64)> {
        let number = self.posted.fetch_add(1, Ordering::Relaxed);
        if self.armed.load(Ordering::Acquire) == 0 { None } else { self.spring(number) }
    }

    #[cold]
    fn spring(&self, number: u64) -> Option<(Harm, u64)> {
        for trap in &self.traps {
            let kind = trap.kind.load(Ordering::Acquire);
            let Some(harm) = Harm::ALL.into_iter().find(|harm| *harm as u32 == kind) else { continue };
            let message = trap.message.load(Ordering::Relaxed);
            if message > number {
                continue;
            }
            let argument = trap.argument.load(Ordering::Relaxed);
            if matches!(harm, Harm::Lose | Harm::Corrupt) && argument > 0 {
                // It stays; whoever moves it on has it.
                let next = number.saturating_add(argument);
                if trap.message.compare_exchange(message, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
                {
                    return Some((harm, argument));
                }
            } else if trap.kind.compare_exchange(kind, FREE, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                self.armed.fetch_sub(1, Ordering::Release);
                return Some((harm, argument));
            }
        }
        None
    }
}
