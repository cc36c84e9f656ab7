//! Calling a rank until it answers.
#![forbid(unsafe_code)]

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, Socket, Type};

use super::{
    address::prepare,
    channel::{Broken, Channel, Pass},
    keys::Place,
    wait::Wait,
};

/// The other end may still boot: try again soon, then ever less often.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// How long one address may take before the next one's turn, at first and at most.
const CONNECTING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(8));
/// How long an answer may take, at first and at most. Whoever has answered the call itself is usually just busy.
const ANSWERING: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(40));

/// Tries the addresses of one rank in turn, over and over: connects, sends a first frame, waits for the answer.
#[derive(Debug)]
pub(super) struct Dialer {
    candidates: Vec<SocketAddr>,
    /// The candidate whose turn it is.
    turn: usize,
    /// Attempts so far.
    attempts: u32,
    /// Whole rounds through the candidates so far.
    rounds: u32,
    state: State,
    frame_limit: usize,
    /// What is proved first, if the job has a secret.
    pass: Option<Pass>,
    last_trouble: Option<Trouble>,
}

/// What became of an attempt that failed.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) text: String,
    pub(super) source: Option<io::Error>,
}

#[derive(Debug)]
enum State {
    Resting { until: Instant },
    Connecting { socket: Socket, address: SocketAddr, until: Instant },
    Asking { channel: Box<Channel>, address: SocketAddr, until: Instant },
}

/// The other end's first frame.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) channel: Channel,
    pub(super) address: SocketAddr,
    pub(super) frame: Vec<u8>,
}

impl Dialer {
    pub(super) fn new(candidates: Vec<SocketAddr>, frame_limit: usize, pass: Option<Pass>) -> Dialer {
        let state = State::Resting { until: Instant::now() };
        Dialer { candidates, turn: 0, attempts: 0, rounds: 0, state, frame_limit, pass, last_trouble: None }
    }

    /// Does what can be done now without waiting. `greeting` makes the first frame, from the connected stream and the number of
    /// the attempt. Only errors that no further attempt can mend are returned.
    pub(super) fn step(
        &mut self,
        now: Instant,
        greeting: &mut dyn FnMut(&TcpStream, u32) -> io::Result<Vec<u8>>,
    ) -> Result<Option<Answer>, Broken> {
        if matches!(self.state, State::Resting { until } if until <= now) {
            self.dial(now);
        }
        if let State::Connecting { socket, address, until } = &self.state {
            let address = *address;
            match connected(socket) {
                Ok(false) if now < *until => {}
                Ok(false) => self.next(now, address, timed_out("no connection came about in time")),
                Ok(true) => self.ask(now, greeting),
                Err(error) => self.next(now, address, Broken::Io(error)),
            }
        }
        if let State::Asking { channel, address, until } = &mut self.state {
            let address = *address;
            channel.flush();
            match channel.receive() {
                Ok(Some(frame)) => return Ok(self.answered(now, frame)),
                Ok(None) if now < *until => {}
                Ok(None) => self.next(now, address, timed_out("it took the call but did not answer in time")),
                Err(fatal @ (Broken::Version { .. } | Broken::Security { .. })) => return Err(fatal),
                // Between members it is a stranger at a peer's address; rank 0 is met at no other.
                Err(fatal @ Broken::Secret)
                    if self.pass.as_ref().is_some_and(|pass| pass.place == Place::Lobby) =>
                {
                    return Err(fatal);
                }
                Err(error) => self.next(now, address, error),
            }
        }
        Ok(None)
    }

    /// Starts over for another connection to the same rank, with the address that worked.
    pub(super) fn again(&mut self, candidates: Vec<SocketAddr>, pass: Option<Pass>) {
        self.candidates = candidates;
        self.pass = pass;
        self.turn = 0;
        self.rounds = 0;
        self.state = State::Resting { until: Instant::now() };
    }

    /// The candidates after a name was resolved anew.
    pub(super) fn set_candidates(&mut self, candidates: Vec<SocketAddr>) {
        self.turn %= candidates.len().max(1);
        self.candidates = candidates;
    }

    /// True between two attempts.
    pub(super) fn is_resting(&self) -> bool {
        matches!(self.state, State::Resting { .. })
    }

    /// What became of the last attempt that failed.
    pub(super) fn last_trouble(&mut self) -> Option<Trouble> {
        self.last_trouble.take()
    }

    /// The answer was no: gives the next candidate its turn.
    pub(super) fn reject(&mut self, now: Instant, address: SocketAddr, reason: String) {
        self.next(now, address, Broken::Io(io::Error::other(reason)));
    }

    pub(super) fn interest(&self, wait: &mut Wait) {
        match &self.state {
            State::Resting { until } => wait.alarm(*until),
            State::Connecting { socket, until, .. } => {
                wait.writable(socket);
                wait.alarm(*until);
            }
            State::Asking { channel, until, .. } => {
                wait.readable(channel.stream());
                if channel.unsent() {
                    wait.writable(channel.stream());
                }
                wait.alarm(*until);
            }
        }
    }

    fn dial(&mut self, now: Instant) {
        let Some(&address) = self.candidates.get(self.turn) else {
            self.state = State::Resting { until: now + PAUSES.1 };
            return;
        };
        self.attempts = self.attempts.saturating_add(1);
        match start_connecting(address) {
            Ok(socket) => {
                let until = now + grown(CONNECTING, self.rounds);
                self.state = State::Connecting { socket, address, until };
            }
            Err(error) => self.next(now, address, Broken::Io(error)),
        }
    }

    fn ask(&mut self, now: Instant, greeting: &mut dyn FnMut(&TcpStream, u32) -> io::Result<Vec<u8>>) {
        let State::Connecting { socket, address, .. } = self.rest(now) else { return };
        let stream = TcpStream::from(socket);
        // A port of this machine that nobody listens on can, by chance, connect to itself.
        let alone = stream.local_addr().is_ok_and(|own| stream.peer_addr().is_ok_and(|peer| own == peer));
        if alone {
            self.next(now, address, Broken::Io(io::ErrorKind::ConnectionRefused.into()));
            return;
        }
        let frame = prepare(&stream).and_then(|()| greeting(&stream, self.attempts)).map_err(Broken::Io);
        let called = frame.and_then(|frame| {
            let mut channel = Channel::caller(stream, self.frame_limit, self.pass.as_ref())?;
            channel.send(&frame);
            Ok(Box::new(channel))
        });
        match called {
            Ok(channel) => {
                self.state = State::Asking { channel, address, until: now + grown(ANSWERING, self.rounds) };
            }
            Err(error) => self.next(now, address, error),
        }
    }

    fn answered(&mut self, now: Instant, frame: Vec<u8>) -> Option<Answer> {
        match self.rest(now + PAUSES.1) {
            State::Asking { channel, address, .. } => Some(Answer { channel: *channel, address, frame }),
            State::Resting { .. } | State::Connecting { .. } => None,
        }
    }

    fn rest(&mut self, until: Instant) -> State {
        std::mem::replace(&mut self.state, State::Resting { until })
    }

    /// Gives the next candidate its turn, after a pause if all had theirs.
    fn next(&mut self, now: Instant, address: SocketAddr, error: Broken) {
        let text = match &error {
            Broken::Io(error) => format!("{address}: {error}"),
            other => format!("{address}: {other}"),
        };
        self.last_trouble = Some(Trouble { text, source: error.into_io() });
        self.turn += 1;
        let mut until = now;
        if self.turn >= self.candidates.len() {
            self.turn = 0;
            until += grown(PAUSES, self.rounds);
            self.rounds = self.rounds.saturating_add(1);
        }
        self.state = State::Resting { until };
    }
}

fn start_connecting(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

/// Whether a connection that was started has come about.
fn connected(socket: &Socket) -> io::Result<bool> {
    if let Some(error) = socket.take_error()? {
        return Err(error);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        // What some systems say when the connection was refused between the two questions.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
        Err(error) => Err(error),
    }
}

fn timed_out(text: &str) -> Broken {
    Broken::Io(io::Error::new(io::ErrorKind::TimedOut, text))
}

fn grown((first, last): (Duration, Duration), rounds: u32) -> Duration {
    (first * (1 << rounds.min(16))).min(last)
}
