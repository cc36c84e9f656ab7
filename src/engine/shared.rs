//! What a communicator keeps outside the engine's lock: who is in it, and the budgets for what is sent ahead.
//!
//! Lock-free counters, all by world rank:
//! - `budget`: bytes we may still send ahead to that peer. Taken by whoever sends, given back by the driver when a header
//!   brings credit. Only the sum matters, so every access is relaxed; a thread that finds too little asks again under the
//!   engine's lock, where credit arrives.
//! - `owed`: bytes of that peer's messages that have found their place and are not yet given back. Added by the driver,
//!   swapped to zero by whoever writes the next header to that peer.
//! - `queued`: point-to-point sends of ours that wait in the engine. A sender that sees zero may go past the engine; sends of
//!   one thread see their own earlier ones, and order between threads is nobody's promise.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Bytes (payload plus [`OVERHEAD`] a message) that may be under way or stored ahead of their receiver, per communicator
/// and direction of a pair.
pub(crate) const BUDGET: i64 = 512 << 10;

/// What a message costs beside its payload.
pub(crate) const OVERHEAD: i64 = 64;

/// Announcements of point-to-point messages that may wait for a receive, per communicator and direction of a pair.
pub(crate) const ANNOUNCEMENTS: usize = 16 << 10;

/// Longest point-to-point message that is sent ahead; longer ones are announced and wait for a grant.
pub(crate) const EAGER_LIMIT: usize = 64 << 10;

/// A communicator's members and counters.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Number of the communicator within the group, the same on all members.
    pub(crate) id: u32,
    /// World ranks by rank in the communicator.
    pub(crate) members: Box<[usize]>,
    /// Our rank in the communicator.
    pub(crate) rank: usize,
    /// Rank in the communicator by world rank.
    pub(crate) position: Box<[Option<usize>]>,
    budget: Box<[AtomicI64]>,
    owed: Box<[AtomicU32]>,
    queued: Box<[AtomicU32]>,
    next_message: Box<[AtomicU64]>,
}

impl Shared {
    /// `members` are distinct world ranks below `world`, and `me` is one of them.
    pub(crate) fn new(id: u32, world: usize, members: Box<[usize]>, me: usize) -> Shared {
        let mut position = vec![None; world].into_boxed_slice();
        for (rank, &member) in members.iter().enumerate() {
            position[member] = Some(rank);
        }
        Shared {
            id,
            rank: position[me].unwrap_or(0),
            members,
            position,
            budget: (0..world).map(|_| AtomicI64::new(BUDGET)).collect(),
            owed: (0..world).map(|_| AtomicU32::new(0)).collect(),
            queued: (0..world).map(|_| AtomicU32::new(0)).collect(),
            next_message: (0..world).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Takes the cost of a message of `length` bytes from the budget, if there is enough.
    pub(crate) fn take_budget(&self, peer: usize, length: usize) -> bool {
        let cost = cost(length);
        self.budget[peer].try_update(Relaxed, Relaxed, |left| (left >= cost).then(|| left - cost)).is_ok()
    }

    /// Gives budget back. False if the peer gives more than it ever got.
    pub(crate) fn credit(&self, peer: usize, units: u32) -> bool {
        self.budget[peer].fetch_add(i64::from(units), Relaxed) + i64::from(units) <= BUDGET
    }

    /// A message of `length` bytes, sent ahead by the peer, has found its place. True when so much is owed that a message
    /// of its own should carry it.
    pub(crate) fn owe(&self, peer: usize, length: usize) -> bool {
        let cost = u32::try_from(cost(length)).unwrap_or(u32::MAX);
        i64::from(self.owed[peer].fetch_add(cost, Relaxed)) + i64::from(cost) >= BUDGET / 2
    }

    /// Whether anything is to be given back.
    pub(crate) fn owes(&self, peer: usize) -> bool {
        self.owed[peer].load(Relaxed) > 0
    }

    /// What the next header to the peer gives back.
    pub(crate) fn take_owed(&self, peer: usize) -> u32 {
        match self.owed[peer].load(Relaxed) {
            0 => 0,
            _ => self.owed[peer].swap(0, Relaxed),
        }
    }

    pub(crate) fn queue(&self, peer: usize) {
        self.queued[peer].fetch_add(1, Relaxed);
    }

    pub(crate) fn unqueue(&self, peer: usize) {
        self.queued[peer].fetch_sub(1, Relaxed);
    }

    pub(crate) fn has_queued(&self, peer: usize) -> bool {
        self.queued[peer].load(Relaxed) > 0
    }

    /// The next number for a point-to-point message to the peer.
    pub(crate) fn number(&self, peer: usize) -> u64 {
        self.next_message[peer].fetch_add(1, Relaxed)
    }
}

/// Budget that a message of `length` bytes takes.
pub(crate) fn cost(length: usize) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX).saturating_add(OVERHEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_is_taken_until_it_is_gone_and_comes_back_as_credit() {
        let shared = Shared::new(0, 2, Box::new([0, 1]), 0);
        let mut sent = 0;
        while shared.take_budget(1, 1000) {
            sent += 1;
        }
        assert_eq!(sent, BUDGET / 1064);
        assert!(shared.credit(1, 1064));
        assert!(shared.take_budget(1, 1000));
        assert!(!shared.take_budget(1, 1000));
        assert!(!shared.credit(1, u32::MAX), "more than was ever given");
    }

    #[test]
    fn what_is_owed_is_given_back_once() {
        let shared = Shared::new(0, 3, Box::new([0, 2]), 2);
        assert_eq!(shared.rank, 1);
        assert!(!shared.owe(0, 100));
        assert_eq!(shared.take_owed(0), 164);
        assert_eq!(shared.take_owed(0), 0);
        assert!(shared.owe(0, BUDGET as usize / 2));
    }
}
