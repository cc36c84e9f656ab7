//! Letting callers in: nobody holds up anybody else, and nobody who has no business here gets further than one frame.
#![forbid(unsafe_code)]

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    address::prepare,
    channel::{Broken, Channel},
    keys::{GroupKeys, Place},
    message::{Greeting, Message, STRANGER_FRAME_LIMIT},
    wait::Wait,
};

/// Callers that have not said who they are, beyond those that are expected.
const VISITORS: usize = 64;
/// How long a caller may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a caller that was sent away may take to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// Callers that are taken in before those who are in are heard, so that a crowd at the door does not push out whoever speaks.
const AT_ONCE: usize = 16;
/// After the system refused to accept (it may be out of descriptors).
const REST: Duration = Duration::from_millis(50);

/// Accepts connections and reads the first frame of each.
#[derive(Debug)]
pub(super) struct Door {
    listeners: Vec<TcpListener>,
    visitors: Vec<Visitor>,
    room: usize,
    /// What callers have to prove.
    keys: Option<Arc<GroupKeys>>,
    resting: Option<Instant>,
    farewell: Farewell,
    complaints: Complaints,
}

/// A caller that has said who it is.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) channel: Channel,
    pub(super) address: SocketAddr,
    pub(super) frame: Vec<u8>,
}

#[derive(Debug)]
struct Visitor {
    channel: Channel,
    address: SocketAddr,
    until: Instant,
}

impl Door {
    /// `expected` is how many proper callers may come at the same moment.
    pub(super) fn new(
        listeners: Vec<TcpListener>,
        expected: usize,
        keys: Option<Arc<GroupKeys>>,
    ) -> io::Result<Door> {
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        Ok(Door {
            listeners,
            visitors: Vec::new(),
            room: VISITORS + expected,
            keys,
            resting: None,
            farewell: Farewell::default(),
            complaints: Complaints::default(),
        })
    }

    /// What callers have to prove, and this rank where it calls.
    pub(super) fn keys(&self) -> Option<&GroupKeys> {
        self.keys.as_deref()
    }

    pub(super) fn listeners(&self) -> &[TcpListener] {
        &self.listeners
    }

    /// Does what can be done without waiting; the callers whose first frame is complete.
    pub(super) fn step(&mut self, now: Instant) -> Vec<Caller> {
        self.accept(now);
        self.farewell.step(now);
        let mut callers = Vec::new();
        for mut visitor in std::mem::take(&mut self.visitors) {
            match visitor.channel.receive() {
                Ok(Some(frame)) => {
                    let Visitor { channel, address, .. } = visitor;
                    callers.push(Caller { channel, address, frame });
                }
                Ok(None) if now < visitor.until => self.visitors.push(visitor),
                Ok(None) => self.complaints.note(now, visitor.address, "it did not say in time who it is"),
                Err(Broken::Closed) => {
                    self.complaints.note(now, visitor.address, "it hung up before it said who it is")
                }
                Err(broken) => {
                    self.complaints.note(now, visitor.address, &broken.to_string());
                    // Another version is told ours by the preamble.
                    self.see_off(now, visitor.channel);
                }
            }
        }
        callers
    }

    /// Sends a caller away and tells it why.
    pub(super) fn refuse(&mut self, now: Instant, caller: Caller, reason: &str) {
        self.complaints.note(now, caller.address, reason);
        let mut channel = caller.channel;
        channel.send(&Message::Refused { reason: reason.to_owned() }.encode());
        self.see_off(now, channel);
    }

    /// Closes a connection that something was sent on, once that has been read.
    pub(super) fn see_off(&mut self, now: Instant, channel: Channel) {
        if self.farewell.leaving.len() >= self.room {
            self.farewell.leaving.remove(0);
        }
        self.farewell.see_off(now, channel);
    }

    pub(super) fn interest(&self, wait: &mut Wait) {
        match self.resting {
            None => self.listeners.iter().for_each(|listener| wait.readable(listener)),
            Some(until) => wait.alarm(until),
        }
        for visitor in &self.visitors {
            wait.readable(visitor.channel.stream());
            wait.alarm(visitor.until);
        }
        self.farewell.interest(wait);
    }

    /// Why the last few callers were sent away, for the report of who is missing.
    pub(super) fn refused(&self) -> &[String] {
        &self.complaints.recent
    }

    /// Stops listening and gives those who were sent away the time to read why.
    pub(super) fn close(self) {
        let Door { listeners, farewell, .. } = self;
        drop(listeners);
        farewell.finish();
    }

    fn accept(&mut self, now: Instant) {
        if self.resting.is_some_and(|until| now < until) {
            return;
        }
        self.resting = None;
        for listener in &self.listeners {
            for _ in 0..AT_ONCE {
                let error = match listener.accept() {
                    Ok((stream, address)) => match prepare(&stream) {
                        Ok(()) => {
                            if self.visitors.len() >= self.room {
                                // Who has shown no key and been silent longest is the least likely to be one of us.
                                let unknown = |visitor: &Visitor| visitor.channel.place().is_none();
                                let at = self.visitors.iter().position(unknown).unwrap_or(0);
                                let oldest = self.visitors.remove(at);
                                self.complaints.note(now, oldest.address, "too many callers wait at once");
                            }
                            let channel = Channel::called(stream, STRANGER_FRAME_LIMIT, self.keys.as_ref());
                            self.visitors.push(Visitor { channel, address, until: now + PATIENCE });
                            continue;
                        }
                        // It was gone before it was taken in.
                        Err(error) => error,
                    },
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => error,
                };
                if self.complaints.budget.take(now) {
                    tracing::warn!(%error, "a call could not be taken");
                }
                if !is_about_the_caller(&error) {
                    self.resting = Some(now + REST);
                    break;
                }
            }
        }
    }
}

impl Caller {
    /// Whether its first frame belongs to the place for which it has proved the key. Without keys there is none.
    pub(super) fn keeps_to_its_place(&self, message: &Message) -> bool {
        match (self.channel.place(), message) {
            (None, _) | (Some(Place::Lobby), Message::Hello(_)) => true,
            (Some(Place::Pair { from, to, purpose }), Message::Greeting(greeting)) => {
                let Greeting { from: f, to: t, purpose: p, .. } = *greeting;
                (from, to, purpose) == (f, t, p)
            }
            _ => false,
        }
    }
}

/// The next call may well succeed.
fn is_about_the_caller(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, InvalidInput, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | InvalidInput | NotConnected)
}

/// Connections that get the time to read what was said last. Closing at once would, where bytes of the other end lie unread,
/// reset the connection and lose the last words.
#[derive(Debug, Default)]
pub(super) struct Farewell {
    leaving: Vec<Leaving>,
}

#[derive(Debug)]
struct Leaving {
    channel: Channel,
    until: Instant,
    shut: bool,
}

impl Farewell {
    pub(super) fn see_off(&mut self, now: Instant, channel: Channel) {
        self.leaving.push(Leaving { channel, until: now + FAREWELL, shut: false });
        self.step(now);
    }

    pub(super) fn step(&mut self, now: Instant) {
        self.leaving.retain_mut(|leaving| now < leaving.until && leaving.is_there());
    }

    pub(super) fn interest(&self, wait: &mut Wait) {
        for leaving in &self.leaving {
            wait.readable(leaving.channel.stream());
            if leaving.channel.unsent() {
                wait.writable(leaving.channel.stream());
            }
            wait.alarm(leaving.until);
        }
    }

    /// Waits until all have gone.
    pub(super) fn finish(mut self) {
        loop {
            let now = Instant::now();
            self.step(now);
            if self.leaving.is_empty() {
                return;
            }
            let mut wait = Wait::until(now + FAREWELL);
            self.interest(&mut wait);
            if wait.sleep().is_err() {
                // Then the last words may be lost; there is nobody to tell.
                return;
            }
        }
    }
}

impl Leaving {
    fn is_there(&mut self) -> bool {
        use std::io::Read;
        if self.channel.flush() && !self.shut {
            // It fails when the other end is gone, which the read below finds out too.
            let _ = self.channel.stream().shutdown(Shutdown::Write);
            self.shut = true;
        }
        let mut unread = [0; 4096];
        for _ in 0..64 {
            match self.channel.stream().read(&mut unread) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// Remembers and logs who was sent away, without letting anybody fill the log.
#[derive(Debug, Default)]
struct Complaints {
    recent: Vec<String>,
    suppressed: u64,
    budget: Budget,
}

impl Complaints {
    const RECENT: usize = 4;

    fn note(&mut self, now: Instant, address: SocketAddr, reason: &str) {
        let text = format!("{}: {reason}", address.ip());
        if !self.recent.contains(&text) {
            if self.recent.len() == Complaints::RECENT {
                self.recent.remove(0);
            }
            self.recent.push(text);
        }
        if self.budget.take(now) {
            tracing::warn!(caller = %address, reason, suppressed = self.suppressed, "refused a connection");
            self.suppressed = 0;
        } else {
            self.suppressed += 1;
        }
    }
}

/// A few at once, then one a second.
#[derive(Debug, Default)]
struct Budget {
    spent: u32,
    since: Option<Instant>,
}

impl Budget {
    const BURST: u32 = 10;

    fn take(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let earned = now.saturating_duration_since(since).as_secs();
        if earned > 0 {
            self.spent = self.spent.saturating_sub(u32::try_from(earned).unwrap_or(u32::MAX));
            self.since = Some(now);
        }
        let allowed = self.spent < Budget::BURST;
        self.spent += u32::from(allowed);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_complaints_is_logged_at_a_limited_rate() {
        let start = Instant::now();
        let mut budget = Budget::default();
        let mut logged = 0;
        for i in 0..10_000u32 {
            logged += u32::from(budget.take(start + Duration::from_millis(i.into())));
        }
        assert!((Budget::BURST..Budget::BURST + 12).contains(&logged), "{logged}");
    }

    #[test]
    fn the_same_complaint_is_remembered_once() {
        let mut complaints = Complaints::default();
        let address = "10.0.0.1:5".parse().unwrap();
        for reason in ["a", "a", "b", "c", "d", "e"] {
            complaints.note(Instant::now(), address, reason);
        }
        assert_eq!(complaints.recent.len(), Complaints::RECENT);
        assert!(complaints.recent.last().unwrap().ends_with("e"));
    }
}
