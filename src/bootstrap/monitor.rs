//! The one thread of a process that watches the control connections of all its groups.
//!
//! It starts with the first group and ends with the last. Who does what with a [`Peer`]:
//!
//! | field | written by | |
//! | --- | --- | --- |
//! | `out` | any thread, under its lock | frames are sent at once by the caller as far as the socket takes them, the rest by the monitor |
//! | `inbox` | the monitor alone | its lock is never contended |
//!
//! A watcher is called without any lock held.
#![forbid(unsafe_code)]

use std::{
    io,
    net::{Shutdown, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};

use super::{
    alarm::Alarm,
    channel::{Broken, Channel},
    event::{EVENT_LIMIT, Event},
    frames::{Inbox, Outbox},
    watcher::{RemoteCause, Status, Watcher},
};
use crate::os::{PollFd, Waker, poll};

/// How long last words may take to be sent, and then to be read by the peer.
const FAREWELL: Duration = Duration::from_secs(1);
/// A peer that does not read is told no more than this about where we are.
const BACKLOG: usize = 64 << 10;
/// Frames of one peer before the others have their turn.
const FRAMES: usize = 64;
/// A machine that vanishes is noticed after three unanswered probes.
const PROBE: Duration = Duration::from_secs(1);
const PROBES: u32 = 2;
/// Also with bytes under way, where the kernel does not probe.
#[cfg(any(target_os = "linux", target_os = "android"))]
const UNANSWERED: Duration = Duration::from_millis(2500);

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
    monitor: Mutex<Option<Arc<Monitor>>>,
}

struct Peer {
    stream: TcpStream,
    out: Mutex<Out>,
    inbox: Mutex<In>,
}

struct Out {
    outbox: Outbox,
    said_goodbye: bool,
    said_failed: bool,
    /// Nothing more can be said.
    shut: bool,
}

struct In {
    inbox: Inbox,
    they_left: bool,
    they_failed: bool,
    we_are_answered: bool,
    /// Nothing more can be heard.
    ended: bool,
}

impl Group {
    pub(super) fn new(channels: Vec<Option<Channel>>, watcher: Weak<dyn Watcher>) -> io::Result<Group> {
        let peer = |channel: Option<Channel>| channel.map(Peer::new).transpose();
        Ok(Group {
            watcher,
            peers: channels.into_iter().map(peer).collect::<io::Result<_>>()?,
            closed: AtomicBool::new(false),
            until: Mutex::new(None),
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
        self.say(peer, Event::Status(status), |out| out.outbox.backlog() < BACKLOG);
    }

    pub(super) fn ask(&self, peer: usize) {
        self.say(peer, Event::Ask, |out| out.outbox.backlog() < BACKLOG);
    }

    pub(super) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let until = Instant::now() + FAREWELL;
        while self.is_sending() && Instant::now() < until && !on_the_monitor() {
            let unsent = |peer: &&Peer| peer.out.lock().outbox.unsent();
            let mut fds: Vec<PollFd> = self
                .peers
                .iter()
                .flatten()
                .filter(unsent)
                .map(|peer| PollFd::writable(peer.stream.as_raw_fd()))
                .collect();
            if let Err(error) = poll(&mut fds, Some(until.saturating_duration_since(Instant::now()))) {
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
            out.outbox.queue(&event.encode());
            out.flush(&peer.stream);
            if out.outbox.unsent() {
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
            sending |= out.outbox.unsent();
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
            let heard = peer.inbox.lock().inbox.receive(&peer.stream);
            let frame = match heard {
                Ok(Some(frame)) => frame,
                Ok(None) => return,
                Err(broken) => return self.ended(rank, peer, &reason(&broken)),
            };
            if self.closed.load(Ordering::Acquire) {
                continue;
            }
            match Event::decode(&frame) {
                Ok(event) if event.ranks().any(|named| named >= self.peers.len()) => {
                    return self.ended(
                        rank,
                        peer,
                        "it sent a control message that names a rank out of range",
                    );
                }
                Ok(event) => self.handle(rank, peer, event),
                Err(malformed) => return self.ended(rank, peer, &format!("it sent a {malformed}")),
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
                    out.outbox.queue(&Event::GoodbyeAnswer { sent }.encode());
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
                if out.outbox.backlog() < BACKLOG {
                    out.outbox.queue(&Event::Arrived { packets }.encode());
                    out.flush(&peer.stream);
                }
            }),
            Event::Arrived { packets } => self.report(|watcher| watcher.arrived(rank, packets)),
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
            if !out.outbox.unsent() {
                out.shut(&peer.stream);
            }
            over &= out.shut && peer.inbox.lock().ended;
        }
        over || now >= until
    }
}

impl Peer {
    fn new(mut channel: Channel) -> io::Result<Peer> {
        channel.set_limit(EVENT_LIMIT);
        let (stream, inbox, outbox) = channel.into_parts();
        keep_alive(&stream)?;
        Ok(Peer {
            stream,
            out: Mutex::new(Out { outbox, said_goodbye: false, said_failed: false, shut: false }),
            inbox: Mutex::new(In {
                inbox,
                they_left: false,
                they_failed: false,
                we_are_answered: false,
                ended: false,
            }),
        })
    }
}

impl Out {
    fn flush(&mut self, stream: &TcpStream) {
        if !self.shut && self.outbox.flush(stream).is_err() {
            // How it ended is told by the reading side, which still finds what the peer said last.
            self.shut(stream);
        }
    }

    fn shut(&mut self, stream: &TcpStream) {
        if !std::mem::replace(&mut self.shut, true) {
            // It fails only if the peer is gone, and then there is nobody to tell.
            let _ = stream.shutdown(Shutdown::Write);
        }
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
                if !peer.inbox.lock().ended {
                    readers.push((fds.len(), group, rank, peer));
                    fds.push(PollFd::readable(peer.stream.as_raw_fd()));
                }
                let out = peer.out.lock();
                if !out.shut && out.outbox.unsent() {
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

/// Lets the kernel find out when the peer's machine is gone. A process that is stopped stays alive in this sense.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(PROBE).with_interval(PROBE).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(UNANSWERED))?;
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
