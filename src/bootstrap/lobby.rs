//! Rank 0 waits for the others.
#![forbid(unsafe_code)]

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{
    Settings,
    channel::Channel,
    door::{Caller, Door, Farewell},
    failure,
    message::{Hello, MISSING_LIMIT, Member, Message, Waiting, frame_limit},
    report::{List, Ranks, difference},
    wait::Wait,
};
use crate::{Error, Result};

/// After the group has failed, late ranks are told why for this long.
const LINGER: Duration = Duration::from_secs(3);
/// Least time between two reports to those who wait.
const NEWS: Duration = Duration::from_millis(200);

/// Everyone who has arrived, by rank; `None` for rank 0 itself.
pub(super) struct Gathered {
    pub(super) door: Door,
    pub(super) channels: Vec<Option<Channel>>,
    /// Rank 0's own entry is left for its caller.
    pub(super) members: Vec<Member>,
}

/// Lets ranks in through `door` until all of them are there. An error has been told to every rank that could be reached.
pub(super) fn gather(settings: &Settings, door: Door, own: Hello, deadline: Instant) -> Result<Gathered> {
    let size = settings.size;
    let seats = (0..size).map(|_| None).collect();
    let left = vec![None; size];
    let mut lobby = Lobby { settings, own, door, seats, left, deadline, failed: None, news: None };
    loop {
        let now = Instant::now();
        lobby.step(now);
        if lobby.is_over(now) {
            break;
        }
        if let Err(error) = lobby.interest(now).sleep() {
            let reason = "rank 0 cannot wait for its sockets".to_owned();
            lobby.fail(now, 0, reason, Some(error.into()));
            break;
        }
    }
    lobby.finish()
}

struct Lobby<'a> {
    settings: &'a Settings,
    /// What rank 0 would say of itself.
    own: Hello,
    door: Door,
    seats: Vec<Option<Seat>>,
    /// How a rank that had arrived was lost again.
    left: Vec<Option<String>>,
    deadline: Instant,
    failed: Option<Failed>,
    /// When those who wait are told who is missing.
    news: Option<Instant>,
}

struct Seat {
    channel: Channel,
    address: SocketAddr,
    member: Member,
}

struct Failed {
    origin: usize,
    error: Error,
    reason: String,
    until: Instant,
    told: Vec<bool>,
    farewell: Farewell,
}

impl Lobby<'_> {
    fn step(&mut self, now: Instant) {
        for caller in self.door.step(now) {
            self.receive(now, caller);
        }
        for rank in 1..self.seats.len() {
            self.look_after(now, rank);
        }
        if self.news.is_some_and(|due| due <= now) {
            self.news = None;
            let news = self.waiting(now).encode();
            self.seats.iter_mut().flatten().for_each(|seat| seat.channel.send(&news));
        }
        if self.failed.is_none() && now >= self.deadline && self.missing().next().is_some() {
            let reason = self.who_is_missing();
            self.fail(now, 0, reason, None);
        }
        if let Some(failed) = &mut self.failed {
            failed.farewell.step(now);
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        match &self.failed {
            Some(failed) => now >= failed.until || failed.told.iter().all(|&told| told),
            None => self.missing().next().is_none(),
        }
    }

    fn interest(&self, now: Instant) -> Wait {
        let mut wait = Wait::until(self.deadline.max(now + LINGER));
        if self.failed.is_none() {
            wait.alarm(self.deadline);
        }
        self.door.interest(&mut wait);
        for seat in self.seats.iter().flatten() {
            wait.readable(seat.channel.stream());
            if seat.channel.unsent() {
                wait.writable(seat.channel.stream());
            }
        }
        if let Some(due) = self.news {
            wait.alarm(due);
        }
        if let Some(failed) = &self.failed {
            wait.alarm(failed.until);
            failed.farewell.interest(&mut wait);
        }
        wait
    }

    fn finish(self) -> Result<Gathered> {
        let Lobby { door, seats, failed, .. } = self;
        if let Some(failed) = failed {
            failed.farewell.finish();
            door.close();
            return Err(failed.error);
        }
        let mut members = Vec::with_capacity(seats.len());
        let mut channels = Vec::with_capacity(seats.len());
        for seat in seats {
            let (channel, member) = seat.map(|seat| (seat.channel, seat.member)).unzip();
            channels.push(channel);
            members.push(member.unwrap_or_default());
        }
        Ok(Gathered { door, channels, members })
    }

    /// Decides about a caller by its first frame.
    fn receive(&mut self, now: Instant, mut caller: Caller) {
        let size = self.settings.size;
        let hello = match Message::decode(&caller.frame, size) {
            Ok(message) if !caller.keeps_to_its_place(&message) => {
                let reason = format!("a {} on a connection that is for something else", message.name());
                return self.door.refuse(now, caller, &reason);
            }
            Ok(Message::Hello(hello)) => hello,
            Ok(other) => {
                let reason = format!("a {} where a hello is expected", other.name());
                return self.door.refuse(now, caller, &reason);
            }
            Err(malformed) => return self.door.refuse(now, caller, &malformed.to_string()),
        };
        let rank = hello.rank;
        if hello.job != self.own.job {
            let reason = format!(
                "rank 0 of job {:?} listens here, this is rank {rank} of job {:?}; give each job its own port",
                self.own.job, hello.job
            );
            return self.door.refuse(now, caller, &reason);
        }
        if hello.size == size && rank == 0 {
            return self.door.refuse(
                now,
                caller,
                "rank 0 is the one that listens here; give each rank its own number",
            );
        }
        if hello.size == size && rank >= size {
            let reason =
                format!("rank {rank} is out of range in a group of {size}; ranks are 0 to {}", size - 1);
            return self.door.refuse(now, caller, &reason);
        }
        if let Some(reason) = difference(&self.own, &hello) {
            self.fail(now, rank, reason, None);
        }
        if let Some(failed) = &mut self.failed {
            failed.tell(now, rank, caller.channel);
            return;
        }
        if let Some(reason) = self.duplicate(now, rank) {
            return self.door.refuse(now, caller, &reason);
        }
        tracing::debug!(rank, address = %caller.address, "a rank has arrived");
        caller.channel.set_limit(frame_limit(size));
        caller.channel.send(&self.waiting_without(now, rank).encode());
        self.seats[rank] =
            Some(Seat { channel: caller.channel, address: caller.address, member: hello.member });
        self.left[rank] = None;
        self.news.get_or_insert(now + NEWS);
    }

    /// The first of two ranks with one number stays, unless it has gone in the meantime.
    fn duplicate(&mut self, now: Instant, rank: usize) -> Option<String> {
        self.look_after(now, rank);
        let seat = self.seats[rank].as_ref()?;
        Some(format!("rank {rank} has already joined from {}; give each rank its own number", seat.address))
    }

    /// A rank that waits has nothing to say; it can only go away.
    fn look_after(&mut self, now: Instant, rank: usize) {
        let Some(seat) = &mut self.seats[rank] else { return };
        seat.channel.flush();
        let how = match seat.channel.receive() {
            Ok(None) => return,
            Ok(Some(_)) => "it spoke out of turn".to_owned(),
            Err(broken) => broken.to_string(),
        };
        tracing::warn!(rank, address = %seat.address, how, "a rank that had arrived is gone; waiting for it again");
        self.left[rank] = Some(format!("it had arrived from {}, then {how}", seat.address));
        self.seats[rank] = None;
        self.news.get_or_insert(now + NEWS);
    }

    fn missing(&self) -> impl Iterator<Item = usize> {
        (1..self.seats.len()).filter(|&rank| self.seats[rank].is_none())
    }

    fn waiting(&self, now: Instant) -> Message {
        self.waiting_without(now, 0)
    }

    fn waiting_without(&self, now: Instant, arriving: usize) -> Message {
        let missing: Vec<usize> = self.missing().filter(|&rank| rank != arriving).collect();
        Message::Waiting(Waiting {
            remaining: self.deadline.saturating_duration_since(now),
            count: missing.len(),
            missing: missing.into_iter().take(MISSING_LIMIT).collect(),
        })
    }

    fn who_is_missing(&self) -> String {
        let missing: Vec<usize> = self.missing().collect();
        let listening: Vec<SocketAddr> =
            self.door.listeners().iter().filter_map(|l| l.local_addr().ok()).collect();
        let mut reason = format!(
            "{} did not arrive at rank 0 within {:?}",
            Ranks { named: &missing, count: missing.len() },
            self.settings.connect_timeout
        );
        let left = missing.iter().filter_map(|&rank| Some((rank, self.left[rank].as_ref()?)));
        for (rank, how) in left.take(MISSING_LIMIT) {
            reason += &format!("; rank {rank}: {how}");
        }
        reason += &format!(
            "; start every rank, and see that all can reach rank 0, which listens on {}",
            List(&listening)
        );
        if listening.iter().all(|address| address.ip().is_loopback()) {
            reason += " (only ranks of the same machine can reach a loopback address)";
        }
        if !self.door.refused().is_empty() {
            reason += &format!("; refused: {}", self.door.refused().join("; "));
        }
        reason
    }

    /// The group will not form: tells everyone who is here, and then those who still come.
    fn fail(&mut self, now: Instant, origin: usize, reason: String, source: Option<crate::Cause>) {
        if self.failed.is_some() {
            return;
        }
        let mut told = vec![false; self.seats.len()];
        told[0] = true;
        let error = failure(0, reason.clone(), source);
        // Those who missed the deadline have no claim to be waited for any longer.
        let until = if now >= self.deadline { now } else { self.deadline.min(now + LINGER) };
        let mut failed = Failed { origin, error, reason, until, told, farewell: Farewell::default() };
        for (rank, seat) in self.seats.iter_mut().enumerate() {
            if let Some(seat) = seat.take() {
                failed.tell(now, rank, seat.channel);
            }
        }
        self.failed = Some(failed);
    }
}

impl Failed {
    fn tell(&mut self, now: Instant, rank: usize, mut channel: Channel) {
        channel.send(&Message::Failed { origin: self.origin, reason: self.reason.clone() }.encode());
        self.farewell.see_off(now, channel);
        if let Some(told) = self.told.get_mut(rank) {
            *told = true;
        }
    }
}
