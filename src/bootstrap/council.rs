//! What the members of a failed group say to each other about a new one, and what has been heard of it.
//!
//! The monitor writes down what arrives; the thread that calls `shrink` reads, decides and speaks (see
//! [`reform`](super::reform)). Ranks are named by the number that they had in the very first group, their *identity*, because
//! two ranks may have been through different numbers of groups since.
#![forbid(unsafe_code)]

use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    message::{Member, SIZE_LIMIT},
    wire::{Malformed, Reader, Writer},
};

/// One thing that a member says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Word {
    /// The sender wants a new group, and listens for its data connections there. The later of two words counts.
    Enter(Claim),
    /// The sender would lead this group.
    Propose(Proposal),
    /// The sender would be in the group that was proposed with this nonce.
    Accept { nonce: [u8; 32] },
    /// All have accepted: go and connect.
    Commit { nonce: [u8; 32] },
    /// The receiver is not in the group that the sender is in.
    Excluded,
}

/// A wish to be in a new group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Counts all attempts that this rank has ever made.
    pub(crate) attempt: u32,
    pub(crate) member: Member,
}

/// A group that may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proposal {
    pub(crate) nonce: [u8; 32],
    /// In the order of the new ranks, which is that of identities.
    pub(crate) seats: Vec<Seat>,
}

/// One rank of a group that may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) identity: usize,
    pub(crate) claim: Claim,
}

/// Which rank this was, and which of its attempts led to the present group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Past {
    pub(crate) identity: usize,
    pub(crate) attempt: u32,
}

/// What has been heard in one group.
pub(super) struct Council {
    state: Mutex<State>,
    news: Condvar,
}

/// All lists are by the rank in the present group.
pub(super) struct State {
    pub(super) past: Vec<Past>,
    /// Ours, while a call of `shrink` is under way.
    pub(super) own: Option<Claim>,
    pub(super) claims: Vec<Option<Claim>>,
    pub(super) proposals: Vec<Option<Proposal>>,
    pub(super) accepts: Vec<Option<[u8; 32]>>,
    /// Who was told that we would be in its group, and which.
    pub(super) accepted: Option<(usize, [u8; 32])>,
    /// What we have accepted was committed.
    pub(super) committed: bool,
    /// Ranks that were told that they are left out.
    pub(super) left_out: Vec<bool>,
    pub(super) excluded_by: Option<usize>,
    /// A new group has been made of this one.
    pub(super) over: bool,
}

/// What the monitor has to do about a word.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reaction {
    Nothing,
    /// The peer has given up the group.
    GivesUp,
    Say(Word),
}

impl Council {
    pub(super) fn new(past: Vec<Past>) -> Council {
        let size = past.len();
        let state = State {
            past,
            own: None,
            claims: vec![None; size],
            proposals: vec![None; size],
            accepts: vec![None; size],
            accepted: None,
            committed: false,
            left_out: vec![false; size],
            excluded_by: None,
            over: false,
        };
        Council { state: Mutex::new(state), news: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits for something to be heard, or somebody to be lost.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, until: Instant) {
        self.news.wait_until(state, until);
    }

    /// Makes whoever waits look again.
    pub(super) fn notify(&self) {
        // Taking the lock makes sure that nobody is between looking and waiting.
        drop(self.state.lock());
        self.news.notify_all();
    }

    /// Writes down what a peer has said. If what comes next is for whoever reads this, `hold` is called before that one can
    /// read it.
    pub(super) fn hear(&self, from: usize, word: Word, hold: impl FnOnce()) -> Reaction {
        let mut state = self.state.lock();
        let committed = state.committed;
        let reaction = state.hear(from, word);
        if state.committed && !committed {
            hold();
        }
        drop(state);
        self.news.notify_all();
        reaction
    }
}

impl State {
    fn hear(&mut self, from: usize, word: Word) -> Reaction {
        match word {
            // What led to this group may be said twice.
            Word::Enter(claim) if claim.attempt <= self.past[from].attempt => Reaction::Nothing,
            Word::Enter(_) if self.left_out[from] => Reaction::Say(Word::Excluded),
            Word::Enter(claim) => {
                self.claims[from] = Some(claim);
                Reaction::GivesUp
            }
            Word::Propose(proposal) => {
                self.proposals[from] = Some(proposal);
                Reaction::Nothing
            }
            Word::Accept { nonce } => {
                self.accepts[from] = Some(nonce);
                Reaction::Nothing
            }
            Word::Commit { nonce } if self.accepted == Some((from, nonce)) && self.own.is_some() => {
                self.committed = true;
                Reaction::Nothing
            }
            // Meanwhile we have accepted somebody else's; it must not wait for us.
            Word::Commit { .. } => match &self.own {
                Some(claim) => Reaction::Say(Word::Enter(claim.clone())),
                None => Reaction::Nothing,
            },
            Word::Excluded => {
                self.excluded_by.get_or_insert(from);
                Reaction::Nothing
            }
        }
    }

    /// The present rank of whoever has this identity.
    pub(super) fn rank_of(&self, identity: usize) -> Option<usize> {
        self.past.binary_search_by_key(&identity, |past| past.identity).ok()
    }
}

const ENTER: u8 = 1;
const PROPOSE: u8 = 2;
const ACCEPT: u8 = 3;
const COMMIT: u8 = 4;
const EXCLUDED: u8 = 5;

impl Word {
    pub(super) fn write(&self, writer: &mut Writer) {
        match self {
            Word::Enter(claim) => {
                writer.u8(ENTER);
                claim.write(writer);
            }
            Word::Propose(proposal) => {
                writer.u8(PROPOSE).raw(&proposal.nonce).number(proposal.seats.len());
                for seat in &proposal.seats {
                    writer.number(seat.identity);
                    seat.claim.write(writer);
                }
            }
            Word::Accept { nonce } => {
                writer.u8(ACCEPT).raw(nonce);
            }
            Word::Commit { nonce } => {
                writer.u8(COMMIT).raw(nonce);
            }
            Word::Excluded => {
                writer.u8(EXCLUDED);
            }
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Word, Malformed> {
        Ok(match reader.u8("word")? {
            ENTER => Word::Enter(Claim::read(reader)?),
            PROPOSE => {
                let nonce = reader.array("nonce")?;
                let seats = reader.list("seats", SIZE_LIMIT, |reader| {
                    Ok(Seat { identity: reader.number("identity", SIZE_LIMIT)?, claim: Claim::read(reader)? })
                })?;
                if !seats.is_sorted_by(|one, next| one.identity < next.identity) {
                    return Err(reader.wrong("seats out of order"));
                }
                Word::Propose(Proposal { nonce, seats })
            }
            ACCEPT => Word::Accept { nonce: reader.array("nonce")? },
            COMMIT => Word::Commit { nonce: reader.array("nonce")? },
            EXCLUDED => Word::Excluded,
            other => return Err(reader.wrong(format!("unknown word {other}"))),
        })
    }
}

impl Claim {
    fn write(&self, writer: &mut Writer) {
        writer.u32(self.attempt);
        self.member.write(writer);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Claim, Malformed> {
        Ok(Claim { attempt: reader.u32("attempt")?, member: Member::read(reader)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(attempt: u32) -> Claim {
        Claim { attempt, member: Member::default() }
    }

    fn never() {
        panic!("nothing was committed");
    }

    fn council() -> Council {
        Council::new((0..3).map(|rank| Past { identity: 2 * rank, attempt: 5 }).collect())
    }

    #[test]
    fn a_claim_that_led_to_this_group_ends_nothing() {
        let council = council();
        assert_eq!(council.hear(1, Word::Enter(claim(5)), never), Reaction::Nothing);
        assert_eq!(council.hear(1, Word::Enter(claim(6)), never), Reaction::GivesUp);
        assert_eq!(council.lock().claims[1], Some(claim(6)));
    }

    #[test]
    fn only_what_was_accepted_can_be_committed() {
        let council = council();
        let (mine, other) = ([1; 32], [2; 32]);
        assert_eq!(council.hear(0, Word::Commit { nonce: mine }, never), Reaction::Nothing);
        council.lock().own = Some(claim(9));
        council.lock().accepted = Some((0, mine));
        let answer = Reaction::Say(Word::Enter(claim(9)));
        assert_eq!(council.hear(0, Word::Commit { nonce: other }, never), answer);
        assert_eq!(council.hear(1, Word::Commit { nonce: mine }, never), answer);
        assert!(!council.lock().committed);
        let mut held = false;
        assert_eq!(council.hear(0, Word::Commit { nonce: mine }, || held = true), Reaction::Nothing);
        assert!(council.lock().committed && held);
    }

    #[test]
    fn whoever_was_left_out_is_told_so_whenever_it_comes() {
        let council = council();
        council.lock().left_out[2] = true;
        assert_eq!(council.hear(2, Word::Enter(claim(6)), never), Reaction::Say(Word::Excluded));
        assert_eq!(council.lock().claims[2], None);
    }

    #[test]
    fn identities_are_found_at_their_present_ranks() {
        let state = council();
        let state = state.lock();
        assert_eq!([0, 1, 2, 4].map(|identity| state.rank_of(identity)), [Some(0), None, Some(1), Some(2)]);
    }
}
