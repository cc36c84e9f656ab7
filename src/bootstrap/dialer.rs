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
    channel::{Broken, Channel},
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
    Connecting { socket: Socket, until: Instant },
    Asking { channel: Channel, until: Instant },
}

/// The other end's first frame.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) channel: Channel,
    pub(super) address: SocketAddr,
    pub(super) frame: Vec<u8>,
}

impl Dialer {
    pub(super) fn new(candidates: Vec<SocketAddr>, frame_limit: usize) -> Dialer {
        let state = State::Resting { until: Instant::now() };
        Dialer { candidates, turn: 0, attempts: 0, rounds: 0, state, frame_limit, last_trouble: None }
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
        if let State::Connecting { socket, until } = &self.state {
            match connected(socket) {
                Ok(false) if now < *until => {}
                Ok(false) => {
                    let text = "no connection came about in time";
                    self.next(now, Broken::Io(io::Error::new(io::ErrorKind::TimedOut, text)));
                }
                Ok(true) => self.ask(now, greeting),
                Err(error) => self.next(now, Broken::Io(error)),
            }
        }
        if let State::Asking { channel, until } = &mut self.state {
            channel.flush();
            match channel.receive() {
                Ok(Some(frame)) => return Ok(Some(self.answered(now, frame))),
                Ok(None) if now < *until => {}
                Ok(None) => {
                    let text = "it took the call but did not answer in time";
                    self.next(now, Broken::Io(io::Error::new(io::ErrorKind::TimedOut, text)));
                }
                Err(fatal @ (Broken::Version { .. } | Broken::Security { .. })) => return Err(fatal),
                Err(error) => self.next(now, error),
            }
        }
        Ok(None)
    }

    /// Starts over for another connection to the same rank, with the address that worked.
    pub(super) fn again(&mut self, candidates: Vec<SocketAddr>) {
        self.candidates = candidates;
        self.turn = 0;
        self.rounds = 0;
        self.state = State::Resting { until: Instant::now() };
    }

    /// The candidates after a name was resolved anew.
    pub(super) fn set_candidates(&mut self, candidates: Vec<SocketAddr>) {
        if !candidates.is_empty() {
            self.turn %= candidates.len();
            self.candidates = candidates;
        }
    }

    /// Counts whole rounds through the candidates.
    pub(super) fn rounds(&self) -> u32 {
        self.rounds
    }

    /// What became of the last attempt that failed.
    pub(super) fn last_trouble(&mut self) -> Option<Trouble> {
        self.last_trouble.take()
    }

    pub(super) fn candidates(&self) -> &[SocketAddr] {
        &self.candidates
    }

    /// The answer was no: gives the next candidate its turn.
    pub(super) fn reject(&mut self, now: Instant, reason: String) {
        self.next(now, Broken::Io(io::Error::other(reason)));
    }

    pub(super) fn interest(&self, wait: &mut Wait) {
        match &self.state {
            State::Resting { until } => wait.alarm(*until),
            State::Connecting { socket, until } => {
                wait.writable(socket);
                wait.alarm(*until);
            }
            State::Asking { channel, until } => {
                wait.readable(channel.stream());
                if channel.unsent() {
                    wait.writable(channel.stream());
                }
                wait.alarm(*until);
            }
        }
    }

    fn candidate(&self) -> Option<SocketAddr> {
        self.candidates.get(self.turn).copied()
    }

    fn dial(&mut self, now: Instant) {
        let Some(address) = self.candidate() else {
            self.state = State::Resting { until: now + PAUSES.1 };
            return;
        };
        self.attempts = self.attempts.saturating_add(1);
        match start_connecting(address) {
            Ok(socket) => {
                self.state = State::Connecting { socket, until: now + grown(CONNECTING, self.rounds) };
            }
            Err(error) => self.next(now, Broken::Io(error)),
        }
    }

    fn ask(&mut self, now: Instant, greeting: &mut dyn FnMut(&TcpStream, u32) -> io::Result<Vec<u8>>) {
        let rest = State::Resting { until: now };
        let State::Connecting { socket, .. } = std::mem::replace(&mut self.state, rest) else { return };
        let stream = TcpStream::from(socket);
        // A port of this machine that nobody listens on can, by chance, connect to itself.
        let alone = stream.local_addr().is_ok_and(|own| stream.peer_addr().is_ok_and(|peer| own == peer));
        if alone {
            self.next(now, Broken::Io(io::ErrorKind::ConnectionRefused.into()));
            return;
        }
        match prepare(&stream).and_then(|()| greeting(&stream, self.attempts)) {
            Ok(frame) => {
                let mut channel = Channel::caller(stream, self.frame_limit);
                channel.send(&frame);
                self.state = State::Asking { channel, until: now + grown(ANSWERING, self.rounds) };
            }
            Err(error) => self.next(now, Broken::Io(error)),
        }
    }

    fn answered(&mut self, now: Instant, frame: Vec<u8>) -> Answer {
        let rest = State::Resting { until: now + PAUSES.1 };
        let address = self.candidate();
        match (std::mem::replace(&mut self.state, rest), address) {
            (State::Asking { channel, .. }, Some(address)) => Answer { channel, address, frame },
            _ => unreachable!("called while a candidate was asked"),
        }
    }

    /// Gives the next candidate its turn, after a pause if all had theirs.
    fn next(&mut self, now: Instant, error: Broken) {
        if let Some(address) = self.candidate() {
            let text = match &error {
                Broken::Io(error) => format!("{address}: {error}"),
                other => format!("{address}: {other}"),
            };
            self.last_trouble = Some(Trouble { text, source: error.into_io() });
        }
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

fn grown((first, last): (Duration, Duration), rounds: u32) -> Duration {
    (first * (1 << rounds.min(16))).min(last)
}
