//! The one thread of a process that watches the control connections of all its groups.
//!
//! It starts with the first group and ends with the last. Who does what with a [`Peer`]:
//!
//! | field | written by | |
//! | --- | --- | --- |
//! | `out` | any thread, under its lock | frames are sent at once by the caller as far as the socket takes them, the rest by the monitor |
//! | `inbox` | the monitor alone | its lock is contended only while a new group takes over the connection |
//!
//! A watcher is called without any lock held.
#![forbid(unsafe_code)]

mod peer;

use std::{
    io,
    os::fd::AsRawFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use self::peer::{Out, PROBE, Peer};
use super::{
    alarm::Alarm,
    channel::{Broken, Channel},
    council::{Council, Past, Reaction, Word},
    event::{EVENT_LIMIT, Event},
    message::{Message, frame_limit},
    watcher::{CauseKind, RemoteCause, Status, Watcher},
};
use crate::os::{PollFd, Waker, poll};

/// How long last words may take to be sent, and then to be read by the peer.
const FAREWELL: Duration = Duration::from_secs(1);
/// How often whoever sends last words is asked whether it may wait for that.
const PAUSE: Duration = Duration::from_millis(50);
/// A peer that does not read is told no more than this about where we are.
const BACKLOG: usize = 64 << 10;
/// Frames of one peer before the others have their turn.
const FRAMES: usize = 64;
/// How often the kernel is asked, where machines can vanish.
const LOOK: Duration = Duration::from_millis(250);

static MONITOR: Mutex<Option<Arc<Monitor>>> = Mutex::new(None);

/// Watches the group until it has been closed.
pub(super) fn watch(group: Arc<Group>) -> io::Result<()> {
    let mut current = MONITOR.lock();
    let monitor = match &*current {
        Some(monitor) => Arc::clone(monitor),
        None => {
            let monitor = Arc::new(Monitor { waker: Waker::new()?, arrivals: Mutex::new(Vec::new()) });
            let running = Arc::clone(&monitor);
            thread::Builder::new().name("raccl-monitor".into()).spawn(move || running.run())?;
            *current = Some(Arc::clone(&monitor));
            monitor
        }
    };
    *group.monitor.lock() = Some(Arc::clone(&monitor));
    monitor.arrivals.lock().push(group);
    monitor.waker.wake();
    Ok(())
}

struct Monitor {
    waker: Waker,
    arrivals: Mutex<Vec<Arc<Group>>>,
}

/// Makes the monitor look after its groups. Safe in a signal handler.
pub(super) struct Bell(Arc<Monitor>);

impl Bell {
    pub(super) fn ring(&self) {
        self.0.waker.wake();
    }
}

/// The connections of one group.
pub(super) struct Group {
    watcher: Weak<dyn Watcher>,
    peers: Vec<Option<Peer>>,
    /// Set once; from then on nothing is reported.
    closed: AtomicBool,
    /// When what is left is cut off.
    until: Mutex<Option<Instant>>,
    /// What is said about a group of those who are left.
    council: Council,
    monitor: Mutex<Option<Arc<Monitor>>>,
}

impl Group {
    pub(super) fn new(
        channels: Vec<Option<Channel>>,
        past: Vec<Past>,
        watcher: Weak<dyn Watcher>,
    ) -> io::Result<Group> {
        // The longest frame is a proposal for all.
        let limit = EVENT_LIMIT.max(frame_limit(channels.len()));
        let peer = |channel: Option<Channel>| channel.map(|channel| Peer::new(channel, limit)).transpose();
        Ok(Group {
            watcher,
            peers: channels.into_iter().map(peer).collect::<io::Result<_>>()?,
            closed: AtomicBool::new(false),
            until: Mutex::new(None),
            council: Council::new(past),
            monitor: Mutex::new(None),
        })
    }

    pub(super) fn goodbye(&self, peer: usize) {
        self.say(peer, Event::Goodbye, |out| !std::mem::replace(&mut out.said_goodbye, true));
        // If the peer is gone already, the monitor answers in its place.
        self.wake();
    }

    pub(super) fn failed(&self, peer: usize, cause: &RemoteCause) {
        self.say(peer, Event::Failed(cause.clone()), |out| !std::mem::replace(&mut out.said_failed, true));
    }

    pub(super) fn status(&self, peer: usize, status: Status) {
        self.say(peer, Event::Status(status), |out| out.backlog() < BACKLOG);
    }

    /// What is said about a new group.
    pub(super) fn council(&self) -> &Council {
        &self.council
    }

    /// Says something about a new group.
    pub(super) fn tell(&self, peer: usize, word: Word) {
        self.say(peer, Event::Council(word), |_| true);
    }

    /// True as long as the peer's connection is there.
    pub(super) fn is_present(&self, peer: usize) -> bool {
        self.peers.get(peer).and_then(Option::as_ref).is_some_and(|peer| {
            let inbox = peer.inbox.lock();
            !inbox.ended && inbox.inbox.is_some()
        })
    }

    /// Takes a connection out of the monitor's hands. `None` if it has ended.
    pub(super) fn lend(&self, peer: usize) -> io::Result<Option<Channel>> {
        let Some(Some(peer)) = self.peers.get(peer) else { return Ok(None) };
        let stream = peer.stream.try_clone()?;
        let mut out = peer.out.lock();
        let mut inbox = peer.inbox.lock();
        if out.shut || inbox.ended {
            return Ok(None);
        }
        match (inbox.inbox.take(), out.outbox.take()) {
            (Some(inbox), Some(outbox)) => Ok(Some(Channel::from_parts(stream, inbox, outbox))),
            _ => Ok(None),
        }
    }

    /// Gives a connection back to the monitor, with frames that were read and not used.
    pub(super) fn give_back(&self, rank: usize, channel: Channel, strays: Vec<Vec<u8>>) {
        let Some(Some(peer)) = self.peers.get(rank) else { return };
        // The stream is another descriptor of ours.
        let (_, inbox, outbox) = channel.into_parts();
        peer.out.lock().outbox = Some(outbox);
        // One after the other: nobody else reads before the inbox is back.
        let understood = strays.iter().all(|frame| self.heard(rank, peer, frame));
        let mut kept = peer.inbox.lock();
        kept.held = false;
        if understood {
            kept.inbox = Some(inbox);
        }
        drop(kept);
        self.wake();
    }

    /// Lets the monitor read on where it has been told to wait.
    pub(super) fn release(&self) {
        for peer in self.peers.iter().flatten() {
            peer.inbox.lock().held = false;
        }
        self.wake();
    }

    pub(super) fn ask(&self, peer: usize) {
        self.say(peer, Event::Ask, |out| out.backlog() < BACKLOG);
    }

    pub(super) fn close(&self, may_wait: impl Fn() -> bool) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let until = Instant::now() + FAREWELL;
        while self.is_sending() && may_wait() && Instant::now() < until && !on_the_monitor() {
            let unsent = |peer: &&Peer| peer.out.lock().unsent();
            let mut fds: Vec<PollFd> = self
                .peers
                .iter()
                .flatten()
                .filter(unsent)
                .map(|peer| PollFd::writable(peer.stream.as_raw_fd()))
                .collect();
            let rest = until.saturating_duration_since(Instant::now());
            if let Err(error) = poll(&mut fds, Some(rest.min(PAUSE))) {
                tracing::warn!(%error, "last words of a group may be lost");
                break;
            }
        }
        // The peers get as long again to read it; that is for the monitor to wait for.
        *self.until.lock() = Some(Instant::now() + FAREWELL);
        self.wake();
    }

    /// Queues an event for a peer, if it shall be said, and sends what can be sent.
    fn say(&self, peer: usize, event: Event, shall: impl FnOnce(&mut Out) -> bool) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        let Some(Some(peer)) = self.peers.get(peer) else { return };
        let mut out = peer.out.lock();
        if shall(&mut out) && !out.shut {
            out.queue(&event);
            out.flush(&peer.stream);
            if out.unsent() {
                drop(out);
                self.wake();
            }
        }
    }

    /// Sends what can be sent; true if something is left.
    fn is_sending(&self) -> bool {
        let mut sending = false;
        for peer in self.peers.iter().flatten() {
            let mut out = peer.out.lock();
            out.flush(&peer.stream);
            sending |= out.unsent();
        }
        sending
    }

    pub(super) fn alarm(&self) -> Option<Arc<Alarm>> {
        self.watcher.upgrade().map(|watcher| watcher.alarm())
    }

    pub(super) fn bell(&self) -> Option<Bell> {
        self.monitor.lock().clone().map(Bell)
    }

    /// Tells the peers if somebody has rung the alarm.
    fn pass_on_alarm(&self) {
        self.report(|watcher| {
            if let Some(cause) = watcher.aborted() {
                (0..self.peers.len()).for_each(|peer| self.failed(peer, &cause));
            }
        });
    }

    fn wake(&self) {
        if let Some(monitor) = &*self.monitor.lock() {
            monitor.waker.wake();
        }
    }

    /// The watcher, unless the group is closed.
    fn report(&self, call: impl FnOnce(&dyn Watcher)) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        if let Some(watcher) = self.watcher.upgrade() {
            call(&*watcher);
        }
    }

    /// Handles what a peer has said, a limited number of frames at a time so that no peer keeps the monitor to itself.
    fn hear(&self, rank: usize, peer: &Peer) {
        for _ in 0..FRAMES {
            // The lock is held for this statement only: the watcher is called without it.
            let heard = {
                let mut inbox = peer.inbox.lock();
                let held = inbox.held;
                match &mut inbox.inbox {
                    Some(inbox) if !held => inbox.receive(&peer.stream),
                    _ => return,
                }
            };
            let frame = match heard {
                Ok(Some(frame)) => frame,
                Ok(None) => return,
                Err(broken) => return self.ended(rank, peer, &reason(&broken)),
            };
            if self.closed.load(Ordering::Acquire) {
                continue;
            }
            if !self.heard(rank, peer, &frame) {
                return;
            }
        }
    }

    /// Handles one frame; false if the connection is not worth reading any further.
    fn heard(&self, rank: usize, peer: &Peer, frame: &[u8]) -> bool {
        if Message::is_of_a_group_given_up(frame) {
            return true;
        }
        match Event::decode(frame) {
            Ok(event) if event.ranks().any(|named| named >= self.peers.len()) => {
                self.ended(rank, peer, "it sent a control message that names a rank out of range");
                false
            }
            Ok(event) => {
                self.handle(rank, peer, event);
                true
            }
            Err(malformed) => {
                self.ended(rank, peer, &format!("it sent a {malformed}"));
                false
            }
        }
    }

    fn handle(&self, rank: usize, peer: &Peer, event: Event) {
        match event {
            Event::Goodbye => {
                if std::mem::replace(&mut peer.inbox.lock().they_left, true) {
                    return;
                }
                self.report(|watcher| {
                    let sent = watcher.goodbye(rank);
                    let mut out = peer.out.lock();
                    out.queue(&Event::GoodbyeAnswer { sent });
                    out.flush(&peer.stream);
                });
            }
            Event::GoodbyeAnswer { sent } => {
                if peer.out.lock().said_goodbye
                    && !std::mem::replace(&mut peer.inbox.lock().we_are_answered, true)
                {
                    self.report(|watcher| watcher.goodbye_answered(rank, sent));
                }
            }
            Event::Failed(cause) => {
                peer.inbox.lock().they_failed = true;
                self.report(|watcher| watcher.failed(rank, cause));
            }
            Event::Status(status) => self.report(|watcher| watcher.status(rank, status)),
            Event::Ask => self.report(|watcher| {
                let packets = watcher.count_arrived(rank);
                let mut out = peer.out.lock();
                // A peer that asks without reading the answers gets no more of them.
                if out.backlog() < BACKLOG {
                    out.queue(&Event::Arrived { packets });
                    out.flush(&peer.stream);
                }
            }),
            Event::Arrived { packets } => self.report(|watcher| watcher.arrived(rank, packets)),
            Event::Council(word) => match self.council.hear(rank, word, || peer.inbox.lock().held = true) {
                Reaction::Nothing => {}
                Reaction::Say(word) => self.tell(rank, word),
                Reaction::GivesUp => {
                    // Whoever shrinks a group that has not failed ends it.
                    let message = format!("rank {rank} shrinks the group");
                    let cause = RemoteCause { origin: rank, kind: CauseKind::Aborted, message };
                    self.report(|watcher| watcher.failed(rank, cause));
                }
            },
        }
    }

    /// The connection has ended, or is not worth reading any further.
    fn ended(&self, rank: usize, peer: &Peer, reason: &str) {
        let expected = {
            let mut inbox = peer.inbox.lock();
            inbox.ended = true;
            inbox.they_left || inbox.they_failed || inbox.we_are_answered
        };
        peer.out.lock().shut(&peer.stream);
        self.report(|watcher| watcher.ended(rank));
        if !expected {
            self.report(|watcher| watcher.lost(rank, reason.to_owned()));
        }
        self.council.notify();
    }

    /// A goodbye that nobody is left to answer.
    fn answer_for(&self, rank: usize, peer: &Peer) {
        let said_goodbye = peer.out.lock().said_goodbye;
        let unanswered = {
            let mut inbox = peer.inbox.lock();
            inbox.ended && said_goodbye && !std::mem::replace(&mut inbox.we_are_answered, true)
        };
        if unanswered {
            self.report(|watcher| watcher.goodbye_answered(rank, Vec::new()));
        }
    }

    /// True when a closed group has nothing left to send and nobody left to read it.
    fn is_over(&self, now: Instant) -> bool {
        let Some(until) = *self.until.lock() else { return false };
        let mut over = true;
        for peer in self.peers.iter().flatten() {
            let mut out = peer.out.lock();
            if out.outbox.is_none() {
                // It belongs to another group now.
                continue;
            }
            if !out.unsent() {
                out.shut(&peer.stream);
            }
            over &= out.shut && peer.inbox.lock().ended;
        }
        over || now >= until
    }
}

impl Monitor {
    fn run(&self) {
        let mut groups: Vec<Arc<Group>> = Vec::new();
        loop {
            self.waker.prepare();
            groups.append(&mut self.arrivals.lock());
            let now = Instant::now();
            for group in &groups {
                group.pass_on_alarm();
                for (rank, peer) in group.peers.iter().enumerate() {
                    if let Some(peer) = peer {
                        group.answer_for(rank, peer);
                    }
                }
            }
            groups.retain(|group| !group.is_over(now));
            if groups.is_empty() {
                let mut current = MONITOR.lock();
                if self.arrivals.lock().is_empty() {
                    *current = None;
                    return;
                }
                drop(current);
                self.waker.finish();
                continue;
            }
            self.sleep(&groups, now);
        }
    }

    /// Sleeps until there is something to do, and does it.
    fn sleep(&self, groups: &[Arc<Group>], now: Instant) {
        let mut fds = vec![PollFd::readable(self.waker.fd())];
        let mut readers = Vec::new();
        let mut writers = Vec::new();
        let mut timeout: Option<Duration> = None;
        for group in groups {
            if let Some(until) = *group.until.lock() {
                let rest = until.saturating_duration_since(now);
                timeout = Some(timeout.map_or(rest, |timeout| timeout.min(rest)));
            }
            for (rank, peer) in group.peers.iter().enumerate() {
                let Some(peer) = peer else { continue };
                let reads = {
                    let inbox = peer.inbox.lock();
                    !inbox.ended && !inbox.held && inbox.inbox.is_some()
                };
                if reads && peer.remote {
                    timeout = Some(timeout.map_or(LOOK, |timeout| timeout.min(LOOK)));
                }
                if reads {
                    readers.push((fds.len(), group, rank, peer));
                    fds.push(PollFd::readable(peer.stream.as_raw_fd()));
                }
                let out = peer.out.lock();
                if !out.shut && out.unsent() {
                    writers.push((fds.len(), peer));
                    fds.push(PollFd::writable(peer.stream.as_raw_fd()));
                }
            }
        }
        if let Err(error) = poll(&mut fds, timeout) {
            tracing::error!(%error, "the monitor cannot watch its connections");
            thread::sleep(PROBE);
        }
        self.waker.finish();
        for (at, peer) in writers {
            if fds[at].is_ready() {
                peer.out.lock().flush(&peer.stream);
            }
        }
        for (at, group, rank, peer) in readers {
            if fds[at].is_ready() {
                group.hear(rank, peer);
            } else if peer.is_silent() {
                group.ended(rank, peer, "its machine does not answer any more");
            }
        }
    }
}

/// True on the monitor's own thread, which must never wait for itself.
fn on_the_monitor() -> bool {
    thread::current().name() == Some("raccl-monitor")
}

fn reason(broken: &Broken) -> String {
    match broken {
        Broken::Io(error) => format!("{broken}: {error}"),
        _ => broken.to_string(),
    }
}

#[cfg(test)]
pub(super) mod tests;
