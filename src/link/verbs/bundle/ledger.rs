//! What was sent through each cable of a pair and is not known to have arrived, and how far the two sides are in giving up
//! cables that have died.
//!
//! Packets of a class arrive in order or not at all, so one count says which have. When a cable dies, each side freezes its
//! counts and tells them to the other through a cable that lives, and again through another if that one dies as well. Whoever
//! has heard the other's counts sends again what is beyond them.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

/// What the peer has to get, whichever way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) stream: u8,
    /// Where in the stream it begins.
    pub(super) offset: u32,
    /// None at the end of the stream.
    pub(super) bytes: u32,
}

/// Something that lies in a slot of a dead cable and has to be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Again {
    pub(super) cable: usize,
    pub(super) class: usize,
    pub(super) turn: u32,
    pub(super) sent: Sent,
    /// Bytes of it that have been sent again.
    pub(super) done: u32,
}

/// The account of a pair's cables.
pub(super) struct Ledger {
    cables: Vec<Account>,
    again: VecDeque<Again>,
    deaths: u32,
}

struct Account {
    classes: [Log; 2],
    death: Option<Death>,
}

/// Packets of a class that are not known to have arrived: what they carry, unless it is of use only where it was sent.
struct Log {
    /// The turn of the first.
    first: u32,
    packets: VecDeque<Option<Sent>>,
}

struct Death {
    /// Packets that had come from the peer, by class.
    came: [u32; 2],
    /// The cable through which the peer was told.
    told: Option<usize>,
    /// The peer has said what had come there.
    heard: bool,
}

impl Ledger {
    /// All cables are alive; so many packets have been sent through each, and need nobody's attention any more.
    pub(super) fn new(sent: &[[u32; 2]]) -> Ledger {
        let log = |first| Log { first, packets: VecDeque::new() };
        let account = |sent: &[u32; 2]| Account { classes: sent.map(log), death: None };
        Ledger { cables: sent.iter().map(account).collect(), again: VecDeque::new(), deaths: 0 }
    }

    /// Cables that have died.
    pub(super) fn deaths(&self) -> u32 {
        self.deaths
    }

    pub(super) fn is_alive(&self, cable: usize) -> bool {
        self.cables[cable].death.is_none()
    }

    pub(super) fn alive(&self) -> usize {
        self.cables.iter().filter(|account| account.death.is_none()).count()
    }

    /// Nothing new may be sent before what was lost has been.
    pub(super) fn is_recovering(&self) -> bool {
        let waits = |account: &Account| account.death.as_ref().is_some_and(|death| !death.heard);
        self.deaths > 0 && (!self.again.is_empty() || self.cables.iter().any(waits))
    }

    /// The next packet of the class has been sent.
    pub(super) fn sent(&mut self, cable: usize, class: usize, what: Option<Sent>) {
        self.cables[cable].classes[class].packets.push_back(what);
    }

    /// Packets of the class before `turn` have arrived.
    pub(super) fn acknowledge(&mut self, cable: usize, class: usize, turn: u32) {
        let account = &mut self.cables[cable];
        // What the slots of a dead cable hold is not settled by counts that are older than the peer's last.
        if account.death.is_none() {
            account.classes[class].forget(turn);
        }
    }

    /// Packets of the class that are not known to have arrived: each has a slot of its own.
    pub(super) fn open(&self, cable: usize, class: usize) -> usize {
        self.cables[cable].classes[class].packets.len()
    }

    /// A cable has died, and so many packets had come through it. It was alive, and is not the last.
    pub(super) fn die(&mut self, cable: usize, came: [u32; 2]) {
        self.cables[cable].death = Some(Death { came, told: None, heard: false });
        self.deaths += 1;
        // What the peer was told through it may be lost.
        for death in self.cables.iter_mut().filter_map(|account| account.death.as_mut()) {
            if death.told == Some(cable) {
                death.told = None;
            }
        }
    }

    /// A dead cable of which the peer has yet to be told, and what had come through it.
    pub(super) fn untold(&self) -> Option<(usize, [u32; 2])> {
        let untold = |(cable, account): (usize, &Account)| {
            account.death.as_ref().filter(|death| death.told.is_none()).map(|death| (cable, death.came))
        };
        self.cables.iter().enumerate().find_map(untold)
    }

    /// The peer has been told, through a cable that lived.
    pub(super) fn told(&mut self, cable: usize, through: usize) {
        if let Some(death) = &mut self.cables[cable].death {
            death.told = Some(through);
        }
    }

    /// The peer says how many packets had come to it through a dead cable: the rest is to be sent again. The error says why that
    /// cannot be.
    pub(super) fn heard(&mut self, cable: usize, came: [u32; 2]) -> Result<(), String> {
        let account = &mut self.cables[cable];
        let Some(death) = account.death.as_mut().filter(|death| !death.heard) else {
            // It says so again when it does not know whether it was heard.
            return Ok(());
        };
        for (log, came) in account.classes.iter().zip(came) {
            let end = log.first.wrapping_add(log.packets.len() as u32);
            if came.wrapping_sub(end).cast_signed() > 0 {
                return Err(format!("{came} packets have come where {end} were sent"));
            }
        }
        death.heard = true;
        for (class, (log, came)) in account.classes.iter_mut().zip(came).enumerate() {
            log.forget(came);
            for (turn, what) in (log.first..=u32::MAX).chain(0..).zip(log.packets.drain(..)) {
                self.again.extend(what.map(|sent| Again { cable, class, turn, sent, done: 0 }));
            }
        }
        Ok(())
    }

    /// What is to be sent again next.
    pub(super) fn next_again(&self) -> Option<Again> {
        self.again.front().copied()
    }

    /// So many bytes of it have been, which may be none at the end of a stream.
    pub(super) fn sent_again(&mut self, bytes: u32) {
        if let Some(again) = self.again.front_mut() {
            again.done += bytes;
            if again.done == again.sent.bytes {
                self.again.pop_front();
            }
        }
    }
}

impl Log {
    /// Forgets what is before `turn`.
    fn forget(&mut self, turn: u32) {
        while turn.wrapping_sub(self.first).cast_signed() > 0 && self.packets.pop_front().is_some() {
            self.first = self.first.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(offset: u32) -> Option<Sent> {
        Some(Sent { stream: 0, offset, bytes: 10 })
    }

    fn all_again(ledger: &mut Ledger) -> Vec<(usize, usize, u32, u32)> {
        let mut all = Vec::new();
        while let Some(Again { cable, class, turn, sent, .. }) = ledger.next_again() {
            all.push((cable, class, turn, sent.offset));
            ledger.sent_again(sent.bytes);
        }
        all
    }

    #[test]
    fn what_has_not_come_is_sent_again_and_nothing_else() {
        let mut ledger = Ledger::new(&[[u32::MAX - 1, 5], [0, 0]]);
        for offset in 0..4 {
            ledger.sent(0, 0, data(offset));
        }
        ledger.sent(0, 0, None);
        ledger.sent(0, 1, data(100));
        ledger.sent(1, 0, data(200));
        ledger.acknowledge(0, 0, u32::MAX);
        assert_eq!((ledger.open(0, 0), ledger.open(0, 1), ledger.open(1, 0)), (4, 1, 1));
        assert!(!ledger.is_recovering());

        ledger.die(0, [7, 8]);
        assert_eq!((ledger.alive(), ledger.deaths(), ledger.is_alive(0)), (1, 1, false));
        assert_eq!(ledger.untold(), Some((0, [7, 8])));
        ledger.told(0, 1);
        assert_eq!(ledger.untold(), None);
        assert!(ledger.is_recovering(), "the peer has not answered");
        // The counts in packets that come late mean nothing.
        ledger.acknowledge(0, 0, 2);
        // Turns go on from 0 behind the largest.
        ledger.heard(0, [0, 5]).unwrap();
        assert_eq!(all_again(&mut ledger), [(0, 0, 0, 2), (0, 0, 1, 3), (0, 1, 5, 100)]);
        assert!(!ledger.is_recovering());
        ledger.heard(0, [0, 5]).unwrap();
        assert_eq!(ledger.next_again(), None);
    }

    #[test]
    fn what_was_told_through_a_cable_that_died_is_told_again() {
        let mut ledger = Ledger::new(&[[0, 0]; 3]);
        ledger.die(2, [1, 1]);
        ledger.told(2, 0);
        ledger.die(0, [2, 2]);
        assert_eq!(ledger.untold(), Some((0, [2, 2])));
        ledger.told(0, 1);
        assert_eq!(ledger.untold(), Some((2, [1, 1])));
        ledger.told(2, 1);
        assert_eq!(ledger.untold(), None);
        ledger.heard(0, [0, 0]).unwrap();
        assert!(ledger.is_recovering());
        ledger.heard(2, [0, 0]).unwrap();
        assert!(!ledger.is_recovering());
    }

    #[test]
    fn a_packet_may_be_sent_again_in_pieces_and_an_end_has_no_bytes() {
        let mut ledger = Ledger::new(&[[0, 0]; 2]);
        ledger.sent(0, 0, data(7));
        ledger.sent(0, 0, Some(Sent { stream: 1, offset: 9, bytes: 0 }));
        ledger.die(0, [0, 0]);
        ledger.heard(0, [0, 0]).unwrap();
        ledger.sent_again(4);
        assert_eq!(ledger.next_again().map(|again| (again.turn, again.done)), Some((0, 4)));
        ledger.sent_again(6);
        assert_eq!(ledger.next_again().map(|again| (again.turn, again.sent.stream)), Some((1, 1)));
        ledger.sent_again(0);
        assert!(!ledger.is_recovering());
    }

    #[test]
    fn no_counts_of_a_peer_do_harm() {
        let fresh = || {
            let mut ledger = Ledger::new(&[[10, 10]; 2]);
            (0..3).for_each(|offset| ledger.sent(0, 0, data(offset)));
            ledger
        };
        let mut ledger = fresh();
        ledger.acknowledge(0, 0, 10 + (1 << 30));
        assert_eq!(ledger.open(0, 0), 0);
        let mut ledger = fresh();
        ledger.acknowledge(0, 0, 3);
        assert_eq!(ledger.open(0, 0), 3);
        // Before it has died here, too.
        ledger.heard(0, [10, 10]).unwrap();
        ledger.die(0, [0, 0]);
        assert!(ledger.heard(0, [14, 10]).unwrap_err().contains("14 packets have come where 13 were sent"));
        assert!(ledger.heard(0, [13, 11]).is_err());
        assert!(ledger.is_recovering());
        // Less than it had said before: what it had is gone.
        ledger.heard(0, [1, 1]).unwrap();
        assert_eq!(all_again(&mut ledger).len(), 3);
    }
}
