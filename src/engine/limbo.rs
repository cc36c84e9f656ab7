//! Messages for communicators that this rank has not made yet.
//!
//! Whoever has finished a split may use what came out of it before this rank has finished it too. What comes for a number that
//! is not known here waits until it is, within bounds for each peer. Keeping a message and taking one out costs the same
//! however many there are (but for the depth of a tree), so that a peer that sends many keeps nobody busy.
#![forbid(unsafe_code)]

use std::{collections::BTreeMap, ops::RangeInclusive};

use super::{core::Stored, shared::BUDGET};

/// What is kept of one peer at most, payloads and [`EACH`] together.
const BYTES: usize = 16 << 20;

/// What a message costs beside its payload.
const EACH: usize = 64;

/// See the [module](self).
pub(crate) struct Limbo {
    /// By the communicator's number and the order in which they came.
    messages: BTreeMap<(u32, u64), Stored>,
    /// Messages that ever came; the next one's place in that order.
    count: u64,
    /// What the messages of each peer cost.
    held: Vec<usize>,
}

impl Limbo {
    pub(crate) fn new(world: usize) -> Limbo {
        Limbo { messages: BTreeMap::new(), count: 0, held: vec![0; world] }
    }

    /// Whether a message of so many bytes may be kept of a peer.
    pub(crate) fn has_room(&self, peer: usize, length: u64) -> bool {
        length <= BUDGET as u64 && self.held[peer] + EACH + length as usize <= BYTES
    }

    /// Keeps a message for which there [was room](Limbo::has_room).
    pub(crate) fn keep(&mut self, stored: Stored) {
        self.held[stored.peer] += cost(&stored);
        self.messages.insert((stored.header.comm, self.count), stored);
        self.count += 1;
    }

    /// Takes out what came for communicators with these numbers; for each, in the order in which it came.
    pub(crate) fn take(&mut self, numbers: RangeInclusive<u32>) -> Vec<Stored> {
        let places = (*numbers.start(), 0)..=(*numbers.end(), u64::MAX);
        let taken: Vec<Stored> =
            self.messages.extract_if(places, |_, _| true).map(|(_, stored)| stored).collect();
        taken.iter().for_each(|stored| self.held[stored.peer] -= cost(stored));
        taken
    }
}

fn cost(stored: &Stored) -> usize {
    stored.payload.len() + EACH
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Header, MessageKind};

    fn message(peer: usize, comm: u32, sequence: u64, length: usize) -> Stored {
        let header = Header {
            kind: MessageKind::Eager,
            epoch: 1,
            comm,
            credit: 0,
            sequence,
            stream: 0,
            flags: 0,
            signature: [0; 24],
            length: length as u64,
        };
        Stored { peer, header, payload: vec![0; length] }
    }

    #[test]
    fn what_came_for_a_communicator_leaves_in_order_and_alone() {
        let mut limbo = Limbo::new(2);
        for sequence in 0..100 {
            limbo.keep(message(
                sequence as usize % 2,
                [7, 0, u32::MAX, 8][sequence as usize % 4],
                sequence,
                10,
            ));
        }
        let taken = |limbo: &mut Limbo, numbers| -> Vec<u64> {
            limbo.take(numbers).iter().map(|stored| stored.header.sequence).collect()
        };
        assert_eq!(taken(&mut limbo, 7..=7), (0..100).step_by(4).collect::<Vec<_>>());
        assert!(taken(&mut limbo, 7..=7).is_empty());
        assert_eq!(taken(&mut limbo, 0..=0), (1..100).step_by(4).collect::<Vec<_>>());
        assert_eq!(limbo.held, [25 * 74, 25 * 74]);
        assert_eq!(taken(&mut limbo, 1..=u32::MAX).len(), 50);
        assert_eq!(limbo.held, [0, 0]);
        assert!(limbo.messages.is_empty());
    }

    #[test]
    fn each_peer_has_room_of_its_own_and_gets_it_back() {
        let mut limbo = Limbo::new(2);
        assert!(!limbo.has_room(0, BUDGET as u64 + 1));
        assert!(!limbo.has_room(0, u64::MAX));
        let mut kept = 0;
        while limbo.has_room(0, 100_000) {
            limbo.keep(message(0, kept % 3, 0, 100_000));
            kept += 1;
        }
        assert_eq!(kept as usize, BYTES / 100_064);
        assert!(limbo.has_room(1, 100_000), "the other peer has sent nothing");
        limbo.take(1..=1);
        assert!(limbo.has_room(0, 100_000));
    }
}
