//! A new group of those who are left of a failed one.
//!
//! ```text
//! everyone    says Enter to everyone it still reaches, with the addresses where it listens for new data connections
//! the lowest  hears all who are there (or gives up waiting for them), draws a nonce and says Propose to its members
//! the others  say Accept, once they have heard every member's Enter themselves
//! the lowest  says Commit when all have accepted, and Excluded to those whom it has left out; the others say Excluded too
//! everyone    makes the data connections as in a first group (mesh): keys and epoch follow from the nonce
//! ```
//! All of it goes over the control connections, which the new group takes over. Whatever goes wrong, somebody dying included,
//! sends everyone who notices back to Enter, with a new attempt number; nobody is in two groups, because nobody connects
//! for two nonces at the same time, and a rank whose Commit came too late finds its leader gone. Nobody counts
//! majorities: if a network falls apart in two, each part can go on as a group of its own.
#![forbid(unsafe_code)]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Joined, Met, Settings,
    address::listen,
    channel::Channel,
    control::Control,
    council::{Claim, Past, Proposal, Seat, State, Word},
    door::Door,
    draw_nonce,
    event::Event,
    failure,
    keys::JobKeys,
    mesh,
    message::{Member, Roster},
    monitor::Group,
};
use crate::{Error, Result, config::Secret};

/// How long a rank that is there and has entered may take to accept a proposal.
const ACCEPTING: Duration = Duration::from_secs(30);

/// What a rank keeps of its first group for those that come after it.
#[derive(Debug, Clone)]
pub(crate) struct Charter {
    /// Of every rank of the present group.
    pub(super) past: Vec<Past>,
    /// Of this rank, in all groups.
    attempts: Arc<AtomicU32>,
    sockets: usize,
    secret: Option<Secret>,
    loopback_only: bool,
    connect_timeout: Duration,
    blob: Vec<u8>,
    /// Host and cores; where it listens is found anew.
    own: Member,
    /// Where this rank listens, with port 0, and how many of these the user asked for.
    places: Vec<SocketAddr>,
    named: usize,
}

/// What became of the ranks that are left.
pub(crate) enum Reformed {
    Group(Box<Joined>),
    /// There is only this one.
    Alone,
}

impl Charter {
    /// Of a first group.
    pub(super) fn new(settings: &Settings) -> Charter {
        Charter {
            past: (0..settings.size).map(|identity| Past { identity, attempt: 0 }).collect(),
            attempts: Arc::default(),
            sockets: settings.sockets,
            secret: settings.secret.clone(),
            loopback_only: !settings.allows_any_address(),
            connect_timeout: settings.connect_timeout,
            blob: Vec::new(),
            own: Member { host: settings.host, cores: settings.cores.clone(), ..Member::default() },
            places: Vec::new(),
            named: 0,
        }
    }

    /// The ranks of the present group, as they were numbered in the first.
    pub(crate) fn identities(&self) -> Vec<usize> {
        self.past.iter().map(|past| past.identity).collect()
    }

    /// Whether the present group is the first.
    pub(crate) fn is_first(&self) -> bool {
        self.past.iter().all(|past| past.attempt == 0)
    }

    /// Once it is known where this rank listens.
    pub(super) fn settled(mut self, door: &Door, roster: &Roster, rank: usize) -> Charter {
        let addresses = door.listeners().iter().filter_map(|listener| listener.local_addr().ok());
        self.places = addresses
            .map(|mut address| {
                address.set_port(0);
                address
            })
            .collect();
        self.named = roster.members[rank].named.min(self.places.len());
        self.blob.clone_from(&roster.blob);
        self
    }
}

/// Makes a group of those who are left. Nobody may use the present one any more. `late` is how long a rank that is there may
/// take to want the same.
pub(crate) fn reform(
    control: &Control,
    rank: usize,
    charter: &Charter,
    late: Option<Duration>,
) -> Result<Reformed> {
    let Some(group) = control.group() else { return Ok(Reformed::Alone) };
    let mut attempt = Attempt { group, rank, charter, late, connecting: Duration::ZERO };
    attempt.begin()?;
    let result = attempt.run();
    attempt.end(result.is_ok());
    result
}

struct Attempt<'a> {
    group: &'a Arc<Group>,
    rank: usize,
    charter: &'a Charter,
    late: Option<Duration>,
    /// Time spent connecting so far.
    connecting: Duration,
}

/// A group that all its members have accepted.
struct Decision {
    proposal: Proposal,
    /// Present ranks of the members, in their new order.
    ranks: Vec<usize>,
    /// Our own rank among them.
    place: usize,
    leads: bool,
}

impl Attempt<'_> {
    /// One call at a time, and only as long as there is no new group.
    fn begin(&self) -> Result<()> {
        let mut state = self.group.council().lock();
        let reason = if state.over {
            "the group was shrunk already; go on with what came out of that"
        } else if state.own.is_some() {
            "another thread shrinks this group"
        } else {
            state.own = Some(Claim { attempt: 0, member: Member::default() });
            return Ok(());
        };
        Err(Error::InvalidArgument { operation: "shrink", rank: self.rank, reason: reason.to_owned() })
    }

    fn end(&self, formed: bool) {
        let mut state = self.group.council().lock();
        state.own = None;
        state.accepted = None;
        state.over |= formed;
        drop(state);
        self.group.release();
    }

    fn run(&mut self) -> Result<Reformed> {
        loop {
            let door = self.enter()?;
            let Some(decision) = self.agree()? else {
                self.group.release();
                continue;
            };
            if decision.ranks.len() == 1 {
                return Ok(Reformed::Alone);
            }
            let Some(channels) = self.take_over(&decision)? else { continue };
            let members = decision.ranks.clone();
            let begin = Instant::now();
            match mesh::reconnect(self.met(decision, door, channels)?) {
                Ok(joined) => return Ok(Reformed::Group(Box::new(joined))),
                Err(mesh::Interrupted { reason, controls, strays }) => {
                    tracing::debug!(
                        rank = self.rank,
                        reason,
                        "the group of those who are left did not form yet"
                    );
                    self.connecting += begin.elapsed();
                    self.give_back(&members, controls, strays);
                    if self.connecting >= self.charter.connect_timeout {
                        return Err(failure(
                            self.rank,
                            format!("the survivors cannot connect: {reason}"),
                            None,
                        ));
                    }
                }
            }
        }
    }

    /// Listens anew and tells everybody.
    fn enter(&self) -> Result<Vec<std::net::TcpListener>> {
        let rank = self.rank;
        let mut listeners = Vec::new();
        let (mut named, mut trouble) = (0, None);
        for (index, &place) in self.charter.places.iter().enumerate() {
            match listen(place) {
                Ok(listener) => {
                    named += usize::from(index < self.charter.named);
                    listeners.push(listener);
                }
                // An interface may be what has failed.
                Err(error) => trouble = Some(error),
            }
        }
        let address = |listener: &std::net::TcpListener| listener.local_addr().ok();
        let addresses: Vec<SocketAddr> = listeners.iter().filter_map(address).collect();
        if addresses.is_empty() && !self.charter.places.is_empty() {
            let reason = "none of this rank's addresses can be listened on any more";
            return Err(failure(rank, reason, trouble.map(Into::into)));
        }
        let attempt = self.charter.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let claim = Claim { attempt, member: Member { addresses, named, ..self.charter.own.clone() } };
        let mut state = self.group.council().lock();
        state.own = Some(claim.clone());
        state.accepted = None;
        state.committed = false;
        let told: Vec<usize> =
            (0..state.past.len()).filter(|&peer| peer != rank && !state.left_out[peer]).collect();
        drop(state);
        told.into_iter().for_each(|peer| self.group.tell(peer, Word::Enter(claim.clone())));
        Ok(listeners)
    }

    /// Leads or follows until a group has been decided; `None` if everything has to begin anew.
    fn agree(&self) -> Result<Option<Decision>> {
        let (group, rank) = (self.group, self.rank);
        let begin = Instant::now();
        let patience = self.late.map(|late| begin + late);
        let mut proposed: Option<(Proposal, Instant)> = None;
        let mut state = group.council().lock();
        loop {
            let now = Instant::now();
            if let Some(by) = state.excluded_by {
                return Err(Error::Excluded { rank, by });
            }
            if state.committed {
                return Ok(self.decided(&state));
            }
            let impatient = patience.is_some_and(|until| now >= until);
            let present: Vec<usize> = (0..state.past.len())
                .filter(|&peer| peer != rank && !state.left_out[peer] && group.is_present(peer))
                .collect();
            let entered = |state: &State, peer: usize| state.claims[peer].is_some();
            // Whoever has entered leads in time, unless its process stands still.
            let stalled = self.late.is_some_and(|late| now >= begin + late.saturating_mul(2) + ACCEPTING);
            let leads =
                |&&peer: &&usize| peer < rank && if entered(&state, peer) { !stalled } else { !impatient };
            let lower = present.iter().find(leads);
            if let Some(&leader) = lower {
                proposed = None;
                self.follow(&mut state, leader, &present);
            } else {
                let members: Vec<usize> =
                    present.iter().copied().filter(|&peer| entered(&state, peer)).collect();
                let late = proposed.take_if(|(_, since)| now >= *since + ACCEPTING);
                if let Some((proposal, _)) = late {
                    // Somebody sees another member differently than we do, or has come to a halt.
                    let missing = |&peer: &usize| state.accepts[peer] != Some(proposal.nonce);
                    let missing = members.into_iter().filter(missing).collect();
                    self.leave_out(&mut state, missing);
                    continue;
                }
                let everybody = members.len() == present.len() || impatient;
                if everybody && let Some(decision) = self.lead(&mut state, members, &mut proposed)? {
                    let left = present.into_iter().filter(|peer| !decision.ranks.contains(peer));
                    self.leave_out(&mut state, left.collect());
                    return Ok(Some(decision));
                }
            }
            let mut until = now + Duration::from_secs(1);
            if let Some(patience) = patience.filter(|&patience| patience > now) {
                until = until.min(patience);
            }
            group.council().wait(&mut state, until);
        }
    }

    /// Accepts what the leader proposes, if we see its members too.
    fn follow(&self, state: &mut State, leader: usize, present: &[usize]) {
        if state.accepted.is_some_and(|(by, _)| by != leader && !present.contains(&by)) {
            state.accepted = None;
        }
        let Some(proposal) = &state.proposals[leader] else { return };
        let nonce = proposal.nonce;
        if state.accepted == Some((leader, nonce)) {
            return;
        }
        let attempt = |claim: &Option<Claim>| claim.as_ref().map(|claim| claim.attempt);
        let agrees = |seat: &Seat| match state.rank_of(seat.identity) {
            // Attempts only: addresses lose their scopes on the way.
            Some(peer) if peer == self.rank => attempt(&state.own) == Some(seat.claim.attempt),
            Some(peer) => present.contains(&peer) && attempt(&state.claims[peer]) == Some(seat.claim.attempt),
            None => false,
        };
        let named =
            |rank: usize| proposal.seats.iter().any(|seat| state.rank_of(seat.identity) == Some(rank));
        let in_order = proposal.seats.is_sorted_by(|one, next| one.identity < next.identity);
        if in_order && named(self.rank) && named(leader) && proposal.seats.iter().all(agrees) {
            state.accepted = Some((leader, nonce));
            self.group.tell(leader, Word::Accept { nonce });
        }
    }

    /// Proposes a group of these members and this rank; the decision when all of them have accepted.
    fn lead(
        &self,
        state: &mut State,
        mut members: Vec<usize>,
        proposed: &mut Option<(Proposal, Instant)>,
    ) -> Result<Option<Decision>> {
        members.push(self.rank);
        members.sort_unstable();
        let claim = |rank: usize| if rank == self.rank { &state.own } else { &state.claims[rank] };
        let seat = |&rank: &usize| {
            let identity = state.past[rank].identity;
            claim(rank).clone().map(|claim| Seat { identity, claim })
        };
        let seats: Vec<Seat> = members.iter().filter_map(seat).collect();
        let others = || members.iter().copied().filter(|&peer| peer != self.rank);
        let proposal = match proposed {
            Some((proposal, _)) if proposal.seats == seats => proposal.clone(),
            _ => {
                let nonce = draw_nonce().map_err(|error| {
                    failure(self.rank, "no random numbers from the system", Some(error.into()))
                })?;
                let proposal = Proposal { nonce, seats };
                *proposed = Some((proposal.clone(), Instant::now()));
                others().for_each(|peer| self.group.tell(peer, Word::Propose(proposal.clone())));
                proposal
            }
        };
        if !others().all(|peer| state.accepts[peer] == Some(proposal.nonce)) {
            return Ok(None);
        }
        let place = members.iter().position(|&peer| peer == self.rank).unwrap_or(0);
        Ok(Some(Decision { proposal, ranks: members, place, leads: true }))
    }

    /// What we have accepted, once it was committed.
    fn decided(&self, state: &State) -> Option<Decision> {
        let (leader, nonce) = state.accepted?;
        let proposal = state.proposals[leader].clone().filter(|proposal| proposal.nonce == nonce)?;
        let ranks: Vec<usize> =
            proposal.seats.iter().filter_map(|seat| state.rank_of(seat.identity)).collect();
        let place = ranks.iter().position(|&rank| rank == self.rank)?;
        Some(Decision { proposal, ranks, place, leads: false })
    }

    /// Tells ranks that they are not in the group, for ever.
    fn leave_out(&self, state: &mut State, ranks: Vec<usize>) {
        for rank in ranks {
            state.left_out[rank] = true;
            self.group.tell(rank, Word::Excluded);
        }
    }

    /// Takes the members' connections from the monitor; `None` if somebody was lost meanwhile.
    fn take_over(&self, decision: &Decision) -> Result<Option<Vec<Option<Channel>>>> {
        let Decision { proposal, ranks, leads, .. } = decision;
        if !leads {
            let mut state = self.group.council().lock();
            let left = (0..state.past.len())
                .filter(|peer| *peer != self.rank && !ranks.contains(peer) && !state.left_out[*peer]);
            let left = left.filter(|&peer| self.group.is_present(peer)).collect();
            self.leave_out(&mut state, left);
        }
        let mut channels = Vec::new();
        for &rank in ranks {
            let lent = if rank == self.rank { Ok(None) } else { self.group.lend(rank) };
            match lent {
                Ok(Some(channel)) => channels.push(Some(channel)),
                Ok(None) if rank == self.rank => channels.push(None),
                Ok(None) => {
                    self.give_back(ranks, channels, Vec::new());
                    return Ok(None);
                }
                Err(error) => {
                    self.give_back(ranks, channels, Vec::new());
                    return Err(failure(self.rank, "a connection cannot be handed on", Some(error.into())));
                }
            }
        }
        if *leads {
            let commit = Event::Council(Word::Commit { nonce: proposal.nonce }).encode();
            channels.iter_mut().flatten().for_each(|channel| channel.send(&commit));
        }
        Ok(Some(channels))
    }

    /// Hands connections back to the monitor. Claims are kept: whoever has begun anew says so by a later one.
    fn give_back(&self, ranks: &[usize], channels: Vec<Option<Channel>>, strays: Vec<(usize, Vec<u8>)>) {
        let mut state = self.group.council().lock();
        state.accepted = None;
        state.committed = false;
        drop(state);
        for (place, (&rank, channel)) in ranks.iter().zip(channels).enumerate() {
            let Some(channel) = channel else { continue };
            let frames = strays.iter().filter(|(from, _)| *from == place).map(|(_, frame)| frame.clone());
            self.group.give_back(rank, channel, frames.collect());
        }
    }

    /// What the connecting of the new group begins with.
    fn met(
        &self,
        decision: Decision,
        listeners: Vec<std::net::TcpListener>,
        controls: Vec<Option<Channel>>,
    ) -> Result<Met> {
        let Decision { proposal, place, .. } = decision;
        let (charter, size) = (self.charter, proposal.seats.len());
        let keys = charter.secret.clone().map(|secret| Arc::new(JobKeys::new(secret).group(&proposal.nonce)));
        let door = Door::new(listeners, size * (1 + charter.sockets), keys)
            .map_err(|error| failure(self.rank, "the listener cannot be used", Some(error.into())))?;
        let past = proposal
            .seats
            .iter()
            .map(|seat| Past { identity: seat.identity, attempt: seat.claim.attempt })
            .collect();
        let mut members: Vec<Member> = proposal.seats.into_iter().map(|seat| seat.claim.member).collect();
        for (member, control) in members.iter_mut().zip(&controls).take(place) {
            if let Some(control) = control {
                point(member, control);
            }
        }
        let deadline = Instant::now() + charter.connect_timeout;
        let roster =
            Roster { nonce: proposal.nonce, remaining: Duration::ZERO, blob: charter.blob.clone(), members };
        Ok(Met {
            rank: place,
            sockets: charter.sockets,
            roster,
            deadline,
            door,
            controls,
            reached: None,
            loopback_only: charter.loopback_only,
            charter: Charter { past, ..charter.clone() },
        })
    }
}

/// A rank that listens everywhere is reached where it was reached before.
fn point(member: &mut Member, control: &Channel) {
    let everywhere = member.addresses.iter().find(|address| address.ip().is_unspecified());
    if let (Some(port), Ok(mut address)) = (everywhere.map(SocketAddr::port), control.stream().peer_addr()) {
        address.set_port(port);
        member.addresses.insert(member.named, address);
    }
}

#[cfg(test)]
mod tests;
