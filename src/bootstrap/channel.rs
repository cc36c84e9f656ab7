//! Framing on a control connection.
//!
//! ```text
//! both ways:  | magic (8) | version u16 | security u16 |   then frames of   | length u32 | body |
//! ```
//! The preamble is in clear and never changes its form, so that any two versions can say that they differ. Whoever connects
//! speaks first; nothing at all is said to a caller that does not begin with the magic. What protects the frames is chosen by
//! `security`; everything above deals in whole bodies and does not see it.
#![forbid(unsafe_code)]

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::TcpStream,
};

/// The version of everything behind the preamble.
pub(crate) const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"\xF1raccl\r\n";
const PREAMBLE_BYTES: usize = 12;
/// Frames in clear.
const PLAIN: u16 = 0;
/// Read in pieces of this size, so that memory is taken for bytes that are there and not for a length that claims them.
const PIECE: usize = 16 << 10;

/// A connected, non-blocking stream that carries frames.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Outbox,
}

/// The half that receives.
#[derive(Debug)]
pub(crate) struct Inbox {
    expected: Part,
    partial: Vec<u8>,
    limit: usize,
}

/// The half that sends.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: VecDeque<u8>,
    /// Frames wait until the caller has shown the magic.
    silent: bool,
}

/// Why nothing more can be received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("its connection closed")]
    Closed,
    #[error("its connection broke")]
    Io(#[source] io::Error),
    #[error("it does not speak raccl's protocol")]
    Stranger,
    #[error(
        "it speaks version {theirs} of the protocol, this rank version {VERSION}; run the same raccl everywhere"
    )]
    Version { theirs: u16 },
    #[error("it wants security {theirs}, this rank {PLAIN}; give the job secret to every rank or to none")]
    Security { theirs: u16 },
    #[error("it sent a frame of {length} bytes where at most {limit} are allowed")]
    TooLong { length: usize, limit: usize },
}

impl Broken {
    /// The error below, for a report's cause.
    pub(crate) fn into_io(self) -> Option<io::Error> {
        match self {
            Broken::Io(error) => Some(error),
            _ => None,
        }
    }
}

/// The next thing that an inbox waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Preamble,
    Length,
    Body(usize),
}

impl Channel {
    /// The end that connected. `stream` must be non-blocking.
    pub(crate) fn caller(stream: TcpStream, limit: usize) -> Channel {
        Channel { stream, inbox: Inbox::new(limit), outbox: Outbox::speaking() }
    }

    /// The end that accepted. `stream` must be non-blocking.
    pub(crate) fn called(stream: TcpStream, limit: usize) -> Channel {
        Channel { stream, inbox: Inbox::new(limit), outbox: Outbox { silent: true, queue: VecDeque::new() } }
    }

    /// Frames longer than this are refused from now on.
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.inbox.limit = limit;
    }

    /// Queues a frame and sends what the socket takes. Errors show in [`receive`](Channel::receive).
    pub(crate) fn send(&mut self, body: &[u8]) {
        self.outbox.queue(body);
        self.flush();
    }

    /// Sends what the socket takes; true if nothing is left.
    pub(crate) fn flush(&mut self) -> bool {
        // The reading side meets the same error, after what the peer said before it.
        self.outbox.flush(&self.stream).unwrap_or(true)
    }

    /// True if something waits for room in the socket.
    pub(crate) fn unsent(&self) -> bool {
        self.outbox.unsent()
    }

    /// The next whole frame, if it is there. Reads nothing beyond it.
    pub(crate) fn receive(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        let received = self.inbox.receive(&self.stream);
        if self.outbox.silent && !matches!(self.inbox.expected, Part::Preamble) {
            // Also to a caller of another version, so that it can tell its user.
            self.outbox.speak();
            self.flush();
        }
        received
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The bare stream. Whatever was queued must have been flushed.
    pub(crate) fn into_stream(self) -> TcpStream {
        debug_assert!(!self.outbox.unsent() && self.inbox.partial.is_empty());
        self.stream
    }

    pub(crate) fn into_parts(self) -> (TcpStream, Inbox, Outbox) {
        (self.stream, self.inbox, self.outbox)
    }
}

impl Inbox {
    fn new(limit: usize) -> Inbox {
        Inbox { expected: Part::Preamble, partial: Vec::new(), limit }
    }

    /// The next whole frame, if it is there.
    pub(crate) fn receive(&mut self, mut stream: &TcpStream) -> Result<Option<Vec<u8>>, Broken> {
        loop {
            let need = match self.expected {
                Part::Preamble => PREAMBLE_BYTES,
                Part::Length => 4,
                Part::Body(length) => length,
            };
            while self.partial.len() < need {
                let have = self.partial.len();
                self.partial.resize(need.min(have + PIECE), 0);
                let read = stream.read(&mut self.partial[have..]);
                self.partial.truncate(have + read.as_ref().map_or(0, |&n| n));
                match read {
                    Ok(0) => return Err(Broken::Closed),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(Broken::Io(error)),
                }
                if self.expected == Part::Preamble && !MAGIC.starts_with(self.magic_so_far()) {
                    return Err(Broken::Stranger);
                }
            }
            let part = std::mem::take(&mut self.partial);
            match self.expected {
                Part::Preamble => {
                    self.expected = Part::Length;
                    let theirs = u16::from_le_bytes([part[8], part[9]]);
                    if theirs != VERSION {
                        return Err(Broken::Version { theirs });
                    }
                    let theirs = u16::from_le_bytes([part[10], part[11]]);
                    if theirs != PLAIN {
                        return Err(Broken::Security { theirs });
                    }
                }
                Part::Length => {
                    let length = u32::from_le_bytes([part[0], part[1], part[2], part[3]]) as usize;
                    if length > self.limit {
                        return Err(Broken::TooLong { length, limit: self.limit });
                    }
                    self.expected = Part::Body(length);
                }
                Part::Body(_) => {
                    self.expected = Part::Length;
                    return Ok(Some(part));
                }
            }
        }
    }

    fn magic_so_far(&self) -> &[u8] {
        &self.partial[..self.partial.len().min(MAGIC.len())]
    }
}

impl Outbox {
    fn speaking() -> Outbox {
        let mut outbox = Outbox { queue: VecDeque::new(), silent: true };
        outbox.speak();
        outbox
    }

    /// Puts the preamble in front of what is queued and lets it go.
    fn speak(&mut self) {
        let [v0, v1] = VERSION.to_le_bytes();
        let [s0, s1] = PLAIN.to_le_bytes();
        for byte in MAGIC.into_iter().chain([v0, v1, s0, s1]).rev() {
            self.queue.push_front(byte);
        }
        self.silent = false;
    }

    /// Queues a frame.
    pub(crate) fn queue(&mut self, body: &[u8]) {
        debug_assert!(u32::try_from(body.len()).is_ok());
        self.queue.extend((body.len() as u32).to_le_bytes());
        self.queue.extend(body);
    }

    /// Sends what the socket takes; true if nothing is left. After an error the queue is gone.
    pub(crate) fn flush(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        while !self.silent && !self.queue.is_empty() {
            match stream.write(self.queue.as_slices().0) {
                Ok(sent) => drop(self.queue.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.queue.clear();
                    return Err(error);
                }
            }
        }
        Ok(self.queue.is_empty())
    }

    pub(crate) fn unsent(&self) -> bool {
        !self.silent && !self.queue.is_empty()
    }

    /// Bytes that wait.
    pub(crate) fn backlog(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let two = listener.accept().unwrap().0;
        two.set_nonblocking(true).unwrap();
        (one, two)
    }

    fn wait_for(channel: &mut Channel) -> Result<Vec<u8>, Broken> {
        loop {
            match channel.receive() {
                Ok(None) => std::thread::yield_now(),
                Ok(Some(frame)) => return Ok(frame),
                Err(broken) => return Err(broken),
            }
        }
    }

    #[test]
    fn frames_arrive_whole_and_in_order_however_they_are_cut() {
        let (mut raw, two) = pair();
        let mut channel = Channel::called(two, 1 << 20);
        let mut outbox = Outbox::speaking();
        let bodies: Vec<Vec<u8>> = [0, 1, 5, 40_000].map(|n| (0..n).map(|i| i as u8).collect()).into();
        bodies.iter().for_each(|body| outbox.queue(body));
        let bytes: Vec<u8> = outbox.queue.into_iter().collect();
        let writer = std::thread::spawn(move || {
            let (drip, rest) = bytes.split_at(60);
            for byte in drip {
                raw.write_all(&[*byte]).unwrap();
                std::thread::yield_now();
            }
            raw.write_all(rest).unwrap();
            raw
        });
        for body in bodies {
            assert_eq!(wait_for(&mut channel).unwrap(), body);
        }
        let mut raw = writer.join().unwrap();
        raw.read_exact(&mut [0; PREAMBLE_BYTES]).unwrap();
        drop(raw);
        assert!(matches!(wait_for(&mut channel), Err(Broken::Closed)));
    }

    #[test]
    fn strangers_hear_nothing() {
        for greeting in [&b"GET / HTTP/1.1\r\n"[..], b"\xF1racc\0", b"\x16\x03\x01"] {
            let (mut raw, two) = pair();
            let mut channel = Channel::called(two, 100);
            raw.write_all(greeting).unwrap();
            assert!(matches!(wait_for(&mut channel), Err(Broken::Stranger)));
            channel.send(b"secret");
            drop(channel);
            let mut heard = Vec::new();
            let _ = raw.read_to_end(&mut heard);
            assert_eq!(heard, b"");
        }
    }

    #[test]
    fn another_version_is_told_ours() {
        let (mut raw, two) = pair();
        let mut channel = Channel::called(two, 100);
        raw.write_all(&MAGIC).unwrap();
        raw.write_all(&[9, 0, 0, 0]).unwrap();
        assert!(matches!(wait_for(&mut channel), Err(Broken::Version { theirs: 9 })));
        let mut heard = [0; PREAMBLE_BYTES];
        raw.read_exact(&mut heard).unwrap();
        assert_eq!(heard[..8], MAGIC);
        assert_eq!(heard[8..10], VERSION.to_le_bytes());
    }

    #[test]
    fn a_frame_beyond_the_limit_is_refused_by_its_length() {
        let (mut raw, two) = pair();
        let mut channel = Channel::called(two, 100);
        let mut outbox = Outbox::speaking();
        outbox.queue.extend(101u32.to_le_bytes());
        raw.write_all(outbox.queue.make_contiguous()).unwrap();
        assert!(matches!(wait_for(&mut channel), Err(Broken::TooLong { length: 101, limit: 100 })));
    }
}
