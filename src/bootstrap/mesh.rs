//! Every pair of ranks is connected: the higher rank calls the lower one.
//!
//! All connections are made at the same time, and each names its place, so they may arrive in any order. When a rank has all of
//! its own it says so to rank 0; when rank 0 has heard that from everybody it lets everybody go. Whatever goes wrong before that
//! is reported to rank 0, which tells everybody the first cause.
#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{
    Connections, Joined, Met,
    candidates::candidates,
    channel::{Channel, Pass},
    dialer::{Answer, Dialer},
    door::{Caller, Farewell},
    failure,
    keys::Place as Claim,
    message::{Greeting, Member, Message, Purpose, frame_limit},
    report::{List, Ranks},
    wait::Wait,
};
use crate::{Cause, Result};

/// How much longer than the others rank 0 waits, so that it hears what they report.
const HEARING: Duration = Duration::from_secs(1);
/// How much longer than a caller the called rank waits: the caller knows better what went wrong.
const CALLER_FIRST: Duration = Duration::from_millis(300);

/// Connects this rank with all others.
pub(super) fn connect(met: Met) -> Result<Joined> {
    let mut mesh = Mesh::new(met);
    let outcome = mesh.run();
    mesh.finish(outcome)
}

/// The same for ranks whose control connections exist already, and are given back if it fails.
pub(super) fn reconnect(met: Met) -> Result<Joined, Interrupted> {
    let mut mesh = Mesh::new(met);
    let outcome = mesh.run();
    mesh.finish_or_give_back(outcome)
}

/// A group that has failed while it was connected.
pub(super) struct Interrupted {
    pub(super) reason: String,
    /// By rank.
    pub(super) controls: Vec<Option<Channel>>,
    /// Frames of these ranks that are for somebody else.
    pub(super) strays: Vec<(usize, Vec<u8>)>,
}

struct Mesh {
    rank: usize,
    size: usize,
    group: [u8; 16],
    sockets: usize,
    deadline: Instant,
    met: Met,
    dialers: Vec<Calls>,
    /// `places[peer][0]` is the control connection, then come the data sockets.
    places: Vec<Vec<Place>>,
    ready: Vec<bool>,
    said_ready: bool,
    /// What was read on control connections and does not belong here.
    strays: Vec<(usize, Vec<u8>)>,
}

#[derive(Default)]
struct Place {
    channel: Option<Channel>,
    attempt: u32,
}

/// The connections to one lower rank, made one after the other.
struct Calls {
    peer: usize,
    dialer: Dialer,
    purpose: Purpose,
    done: bool,
}

/// Why the group did not form.
struct Failed {
    origin: usize,
    reason: String,
    cause: Option<Cause>,
}

enum Progress {
    Working,
    Formed,
}

impl Mesh {
    fn new(mut met: Met) -> Mesh {
        let size = met.roster.members.len();
        let rank = met.rank;
        let sockets = met.sockets;
        let controls = std::mem::take(&mut met.controls);
        let place = |channel| Place { channel, attempt: 0 };
        let places: Vec<Vec<Place>> = controls
            .into_iter()
            .enumerate()
            .map(|(peer, control)| {
                let data = if peer == rank { 0 } else { sockets };
                std::iter::once(place(control)).chain((0..data).map(|_| Place::default())).collect()
            })
            .collect();
        let mut group = [0; 16];
        group.copy_from_slice(&met.roster.nonce[16..]);
        let deadline = met.deadline;
        let mut mesh = Mesh {
            rank,
            size,
            group,
            sockets,
            deadline,
            met,
            dialers: Vec::new(),
            places,
            ready: vec![false; size],
            said_ready: false,
            strays: Vec::new(),
        };
        for peer in 0..rank {
            let purpose = mesh.next_purpose(peer);
            if let Some(purpose) = purpose {
                let pass = mesh.pass(peer, purpose);
                let dialer = Dialer::new(mesh.candidates(peer, purpose), frame_limit(size), pass);
                mesh.dialers.push(Calls { peer, dialer, purpose, done: false });
            }
        }
        mesh
    }

    fn run(&mut self) -> Result<(), Failed> {
        loop {
            let now = Instant::now();
            if let Progress::Formed = self.step(now)? {
                return Ok(());
            }
            self.check_deadline(now)?;
            let wait = self.interest();
            wait.sleep().map_err(|error| self.failed("cannot wait for its sockets", Some(error.into())))?;
        }
    }

    fn step(&mut self, now: Instant) -> Result<Progress, Failed> {
        for caller in self.met.door.step(now) {
            self.receive(now, caller);
        }
        for i in 0..self.dialers.len() {
            self.call(now, i)?;
        }
        for channel in self.places.iter_mut().flatten().filter_map(|place| place.channel.as_mut()) {
            channel.flush();
        }
        if self.rank == 0 { self.hear_everyone() } else { self.hear_rank_0() }
    }

    /// Advances the calls to one lower rank.
    fn call(&mut self, now: Instant, i: usize) -> Result<(), Failed> {
        let Calls { peer, purpose, done, .. } = self.dialers[i];
        if done {
            return Ok(());
        }
        let (group, from) = (self.group, self.rank);
        let mut greeting = |_: &_, attempt: u32| {
            Ok(Message::Greeting(Greeting { group, from, to: peer, purpose, attempt }).encode())
        };
        let answer = match self.dialers[i].dialer.step(now, &mut greeting) {
            Ok(Some(answer)) => answer,
            Ok(None) => return Ok(()),
            Err(broken) => {
                let reason = format!("rank {peer} answered rank {from}, but {broken}");
                return Err(self.failed(reason, broken.into_io().map(Into::into)));
            }
        };
        let Answer { channel, address, frame } = answer;
        match Message::decode(&frame, self.size) {
            Ok(Message::Welcome) => {
                self.places[peer][slot(purpose)].channel = Some(channel);
                match self.next_purpose(peer) {
                    Some(purpose) => {
                        // What has just worked comes first, unless the sockets are to be spread.
                        let mut candidates = self.candidates(peer, purpose);
                        if self.met.roster.members[peer].named < 2 {
                            candidates.retain(|&candidate| candidate != address);
                            candidates.insert(0, address);
                        }
                        let pass = self.pass(peer, purpose);
                        self.dialers[i].purpose = purpose;
                        self.dialers[i].dialer.again(candidates, pass);
                    }
                    None => self.dialers[i].done = true,
                }
            }
            Ok(Message::Refused { reason }) => {
                self.dialers[i].dialer.reject(now, address, format!("refused: {reason}"))
            }
            Ok(other) => {
                let reason = format!("it answered with a {} instead of a welcome", other.name());
                self.dialers[i].dialer.reject(now, address, reason);
            }
            Err(malformed) => self.dialers[i].dialer.reject(now, address, malformed.to_string()),
        }
        Ok(())
    }

    /// Finds the place of a connection by its greeting.
    fn receive(&mut self, now: Instant, mut caller: Caller) {
        let greeting = match Message::decode(&caller.frame, self.size) {
            Ok(message) if !caller.keeps_to_its_place(&message) => {
                let reason = format!("a {} on a connection that is for something else", message.name());
                return self.met.door.refuse(now, caller, &reason);
            }
            Ok(Message::Greeting(greeting)) => greeting,
            Ok(Message::Hello(hello)) => {
                let reason = format!("the group is complete already, without this rank {}", hello.rank);
                return self.met.door.refuse(now, caller, &reason);
            }
            Ok(other) => {
                let reason = format!("a {} where a greeting is expected", other.name());
                return self.met.door.refuse(now, caller, &reason);
            }
            Err(malformed) => return self.met.door.refuse(now, caller, &malformed.to_string()),
        };
        let Greeting { group, from, to, purpose, attempt } = greeting;
        let reason = if group != self.group {
            "this is another group".to_owned()
        } else if to != self.rank {
            format!("this is rank {}, not rank {to}", self.rank)
        } else if from <= self.rank || from >= self.size {
            format!("rank {from} does not call rank {to} in a group of {}", self.size)
        } else if matches!(purpose, Purpose::Data(index) if index >= self.sockets) {
            format!("pairs of this group have {} data sockets", self.sockets)
        } else if attempt <= self.places[from][slot(purpose)].attempt || self.is_met(from, purpose) {
            "this place is taken already".to_owned()
        } else {
            caller.channel.set_limit(frame_limit(self.size));
            caller.channel.send(&Message::Welcome.encode());
            self.places[from][slot(purpose)] = Place { channel: Some(caller.channel), attempt };
            return;
        };
        self.met.door.refuse(now, caller, &reason);
    }

    /// The control connection that a pair with rank 0 has met on is not made again.
    fn is_met(&self, peer: usize, purpose: Purpose) -> bool {
        let place = &self.places[peer][slot(purpose)];
        place.channel.is_some() && place.attempt == 0
    }

    /// Rank 0 counts who is ready.
    fn hear_everyone(&mut self) -> Result<Progress, Failed> {
        if self.said_ready {
            // Whoever has read that may already talk as the member of a formed group.
            return Ok(if self.unsent() { Progress::Working } else { Progress::Formed });
        }
        for peer in 1..self.size {
            let Some(channel) = &mut self.places[peer][0].channel else { continue };
            let reason = match channel.receive() {
                Ok(None) => continue,
                Ok(Some(frame)) => match Message::decode(&frame, self.size) {
                    Ok(Message::Ready) => {
                        self.ready[peer] = true;
                        continue;
                    }
                    // The origin is whoever says so: rank 0 is told by each for itself.
                    Ok(Message::Failed { reason, .. }) => {
                        return Err(Failed { origin: peer, reason, cause: None });
                    }
                    Ok(other) => format!("rank {peer} sent a {} while the group was connected", other.name()),
                    Err(malformed) => {
                        self.strays.push((peer, frame));
                        format!("rank {peer} sent a {malformed}")
                    }
                },
                Err(broken) => {
                    let reason =
                        format!("lost rank {peer} while the group was connected: {broken}; see its output");
                    let cause = broken.into_io().map(Into::into);
                    return Err(Failed { origin: peer, reason, cause });
                }
            };
            return Err(Failed { origin: peer, reason, cause: None });
        }
        self.ready[0] = self.is_complete();
        if !self.ready.iter().all(|&ready| ready) {
            return Ok(Progress::Working);
        }
        self.said_ready = true;
        for channel in self.places[1..].iter_mut().filter_map(|place| place[0].channel.as_mut()) {
            channel.send(&Message::Go.encode());
        }
        Ok(if self.unsent() { Progress::Working } else { Progress::Formed })
    }

    /// All others report to rank 0 and wait for its word.
    fn hear_rank_0(&mut self) -> Result<Progress, Failed> {
        let complete = self.is_complete();
        let Some(channel) = &mut self.places[0][0].channel else { return Ok(Progress::Working) };
        if complete && !self.said_ready {
            self.said_ready = true;
            channel.send(&Message::Ready.encode());
        }
        let reason = match channel.receive() {
            Ok(None) => return Ok(Progress::Working),
            Ok(Some(frame)) => match Message::decode(&frame, self.size) {
                Ok(Message::Go) if self.said_ready => return Ok(Progress::Formed),
                // Sent before the roster was.
                Ok(Message::Waiting(_)) => return Ok(Progress::Working),
                Ok(Message::Failed { origin, reason }) => return Err(Failed { origin, reason, cause: None }),
                Ok(other) => format!("rank 0 sent a {} while the group was connected", other.name()),
                Err(malformed) => {
                    self.strays.push((0, frame));
                    format!("rank 0 sent a {malformed}")
                }
            },
            Err(broken) => {
                let reason = format!("lost rank 0 while the group was connected: {broken}; see its output");
                return Err(Failed { origin: 0, reason, cause: broken.into_io().map(Into::into) });
            }
        };
        Err(Failed { origin: 0, reason, cause: None })
    }

    fn check_deadline(&mut self, now: Instant) -> Result<(), Failed> {
        let rank = self.rank;
        if now >= self.deadline
            && let Some(calls) = self.dialers.iter_mut().find(|calls| !calls.done)
        {
            let peer = calls.peer;
            let mut reason = format!(
                "rank {rank} cannot connect to rank {peer} at {}",
                List(&self.met.roster.members[peer].addresses)
            );
            let mut cause = None;
            if let Some(trouble) = calls.dialer.last_trouble() {
                reason += &format!(" (last attempt: {})", trouble.text);
                cause = trouble.source.map(Into::into);
            }
            reason += "; every rank must be able to reach every other: check firewalls, and name the addresses to use";
            return Err(Failed { origin: rank, reason, cause });
        }
        let patience = if rank == 0 { HEARING } else { CALLER_FIRST };
        if now < self.deadline + patience {
            return Ok(());
        }
        let incomplete: Vec<usize> = (rank + 1..self.size).filter(|&peer| !self.is_connected(peer)).collect();
        let reason = if !incomplete.is_empty() {
            let ranks = Ranks { named: &incomplete, count: incomplete.len() };
            let own = &self.met.roster.members[rank].addresses;
            format!("{ranks} did not connect to rank {rank}, which listens on {}", List(own))
        } else if rank == 0 {
            let slow: Vec<usize> = (1..self.size).filter(|&peer| !self.ready[peer]).collect();
            let ranks = Ranks { named: &slow, count: slow.len() };
            format!("{ranks} could not connect to every other rank in time")
        } else if now < self.deadline + 3 * HEARING {
            // Rank 0 knows who keeps the others waiting, and will say so.
            return Ok(());
        } else {
            "rank 0 did not say that every rank is connected".to_owned()
        };
        Err(self.failed(reason, None))
    }

    fn interest(&self) -> Wait {
        let now = Instant::now();
        let mut wait = Wait::until(now + HEARING);
        let due = [self.deadline, self.deadline + CALLER_FIRST, self.deadline + HEARING];
        due.into_iter().filter(|&time| time > now).for_each(|time| wait.alarm(time));
        self.met.door.interest(&mut wait);
        self.dialers.iter().filter(|calls| !calls.done).for_each(|calls| calls.dialer.interest(&mut wait));
        let heard = if self.rank == 0 { 1..self.size } else { 0..1 };
        for peer in heard {
            if let Some(channel) = &self.places[peer][0].channel {
                wait.readable(channel.stream());
            }
        }
        for channel in self.places.iter().flatten().filter_map(|place| place.channel.as_ref()) {
            if channel.unsent() {
                wait.writable(channel.stream());
            }
        }
        wait
    }

    fn finish(self, outcome: Result<(), Failed>) -> Result<Joined> {
        let Mesh { rank, size, met, mut places, .. } = self;
        let failed = match outcome {
            Ok(()) => return Ok(joined(rank, size, met, places)),
            Err(failed) => failed,
        };
        let message = Message::Failed { origin: failed.origin, reason: failed.reason.clone() }.encode();
        let mut farewell = Farewell::default();
        let told = if rank == 0 { 1..size } else { 0..1 };
        for peer in told.filter(|&peer| peer != failed.origin || rank != 0) {
            if let Some(mut channel) = places[peer][0].channel.take() {
                channel.send(&message);
                farewell.see_off(Instant::now(), channel);
            }
        }
        drop(places);
        farewell.finish();
        met.door.close();
        Err(failure(rank, failed.reason, failed.cause))
    }

    fn finish_or_give_back(self, outcome: Result<(), Failed>) -> Result<Joined, Interrupted> {
        let Mesh { rank, size, met, mut places, strays, .. } = self;
        let Failed { origin, reason, .. } = match outcome {
            Ok(()) => return Ok(joined(rank, size, met, places)),
            Err(failed) => failed,
        };
        let message = Message::Failed { origin, reason: reason.clone() }.encode();
        let told = if rank == 0 { 1..size } else { 0..1 };
        for peer in told.filter(|&peer| peer != origin || rank != 0) {
            if let Some(channel) = &mut places[peer][0].channel {
                channel.send(&message);
            }
        }
        let controls = places.iter_mut().map(|place| place[0].channel.take()).collect();
        drop(places);
        met.door.close();
        Err(Interrupted { reason, controls, strays })
    }

    fn failed(&self, reason: impl Into<String>, cause: Option<Cause>) -> Failed {
        Failed { origin: self.rank, reason: reason.into(), cause }
    }

    fn is_complete(&self) -> bool {
        (0..self.size).filter(|&peer| peer != self.rank).all(|peer| self.is_connected(peer))
    }

    fn is_connected(&self, peer: usize) -> bool {
        self.places[peer].iter().all(|place| place.channel.as_ref().is_some_and(|channel| !channel.unsent()))
    }

    fn unsent(&self) -> bool {
        self.places.iter().flatten().filter_map(|place| place.channel.as_ref()).any(Channel::unsent)
    }

    /// The next connection to make to a lower rank.
    fn next_purpose(&self, peer: usize) -> Option<Purpose> {
        let free = self.places[peer].iter().position(|place| place.channel.is_none())?;
        Some(if free == 0 { Purpose::Control } else { Purpose::Data(free - 1) })
    }

    /// What a connection to a lower rank has to prove.
    fn pass(&self, peer: usize, purpose: Purpose) -> Option<Pass> {
        let place = Claim::Pair { from: self.rank, to: peer, purpose };
        self.met.door.keys().map(|keys| Pass { place, key: keys.place(place) })
    }

    fn candidates(&self, peer: usize, purpose: Purpose) -> Vec<SocketAddr> {
        let members = &self.met.roster.members;
        let reached = self.met.reached.filter(|_| peer == 0);
        let mut candidates =
            candidates(&members[self.rank], &members[peer], reached, &self.scopes(), purpose);
        candidates.retain(|address| !self.met.loopback_only || address.ip().is_loopback());
        candidates
    }

    /// The interfaces on which a link-local address may be meant: those of this rank's own link-local addresses.
    fn scopes(&self) -> Vec<u32> {
        let listening = self.met.door.listeners().iter().filter_map(|listener| listener.local_addr().ok());
        let calling =
            self.places[0][0].channel.iter().filter_map(|channel| channel.stream().local_addr().ok());
        let mut scopes: Vec<u32> = listening
            .chain(calling)
            .filter_map(|address| match address {
                SocketAddr::V6(address) if address.ip().is_unicast_link_local() => Some(address.scope_id()),
                _ => None,
            })
            .collect();
        scopes.sort_unstable();
        scopes.dedup();
        scopes
    }
}

fn slot(purpose: Purpose) -> usize {
    match purpose {
        Purpose::Control => 0,
        Purpose::Data(index) => 1 + index,
    }
}

fn joined(rank: usize, size: usize, met: Met, places: Vec<Vec<Place>>) -> Joined {
    let mut control = Vec::with_capacity(size);
    let (mut data, mut sessions) = (Vec::with_capacity(size), Vec::with_capacity(size));
    for place in places {
        let mut channels = place.into_iter().map(|place| place.channel);
        control.push(channels.next().flatten());
        let (streams, agreed): (Vec<_>, Vec<_>) = channels.flatten().map(Channel::into_stream).unzip();
        data.push(streams);
        sessions.push(agreed.into_iter().flatten().collect());
    }
    let [a, b, c, d, ..] = met.roster.nonce;
    let charter = met.charter.settled(&met.door, &met.roster, rank);
    let past = charter.past.clone();
    Joined {
        rank,
        #[cfg(test)]
        size,
        epoch: u32::from_le_bytes([a, b, c, d]).max(1),
        #[cfg(test)]
        nonce: met.roster.nonce,
        blob: met.roster.blob,
        hosts: met.roster.members.iter().map(|member| member.host).collect(),
        cores: cores(&met.roster.members),
        data,
        sessions,
        control: Connections { channels: control, past },
        charter,
    }
}

/// For each rank, how many cores the ranks of its machine have together: a launcher may have given each its own.
fn cores(members: &[Member]) -> Vec<usize> {
    let mut machines: HashMap<u128, Vec<u64>> = HashMap::new();
    for member in members {
        let all = machines.entry(member.host).or_default();
        all.resize(all.len().max(member.cores.len()), 0);
        all.iter_mut().zip(&member.cores).for_each(|(all, own)| *all |= own);
    }
    let count = |words: &Vec<u64>| words.iter().map(|word| word.count_ones() as usize).sum::<usize>().max(1);
    members.iter().map(|member| count(&machines[&member.host])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_counted_once_for_all_ranks_of_a_machine() {
        let member = |host, cores: &[u64]| Member { host, cores: cores.to_vec(), ..Member::default() };
        let members = [member(7, &[1]), member(7, &[0b110, 1]), member(8, &[1]), member(9, &[])];
        assert_eq!(cores(&members), [4, 4, 1, 1]);
    }
}
