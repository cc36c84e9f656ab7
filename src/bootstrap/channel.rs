//! A connection that carries frames, once both ends have proved the job secret to each other if there is one.
//!
//! ```text
//! both ways:      | magic (8) | version u16 | security u16 |
//! security 0:     then frames in clear
//! security 1:     caller: | place (13) | handshake (48) |    called: | verdict u8 | handshake (48) |    then sealed frames
//! ```
//! The preamble is in clear and never changes its form, so that any two versions can say that they differ. Whoever connects
//! speaks first; nothing at all is said to a caller that does not begin with the magic. Preamble and place are bound by the
//! handshake's prologue, so whoever changes them on the way only makes the handshake fail. A caller is known when its first
//! frame opens, not before: its half of the handshake could have been recorded and replayed. Everything above deals in whole
//! frames and does not see any of this.
#![forbid(unsafe_code)]

use std::{io, net::TcpStream, sync::Arc};

use super::{
    frames::{Inbox, Outbox, Piece},
    keys::{GroupKeys, Key, Place},
};
use crate::noise::{HANDSHAKE_BYTES, Handshake, NoiseError, Session};

/// The version of everything behind the preamble.
pub(crate) const VERSION: u16 = 1;

pub(super) const MAGIC: [u8; 8] = *b"\xF1raccl\r\n";
pub(super) const PREAMBLE_BYTES: usize = 12;
/// Frames in clear.
pub(super) const PLAIN: u16 = 0;
/// A handshake with keys that follow from the job secret, then sealed frames.
pub(super) const SEALED: u16 = 1;

/// What a caller says first of all on a connection of `security`.
pub(super) const CALL_BYTES: usize = Place::BYTES + HANDSHAKE_BYTES;
/// What it is answered.
pub(super) const ANSWER_BYTES: usize = 1 + HANDSHAKE_BYTES;
/// First byte of the answer: the caller's half was good, the other half follows.
const AGREED: u8 = 1;
/// The caller has not proved the key; zeros follow.
const REFUSED: u8 = 2;

/// A connected, non-blocking stream that carries frames.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Outbox,
    security: Security,
    place: Option<Place>,
}

/// What a caller has to prove, and where it wants to.
#[derive(Debug, Clone)]
pub(crate) struct Pass {
    pub(crate) place: Place,
    pub(crate) key: Key,
}

#[derive(Debug)]
enum Security {
    /// There is nothing to prove, or it was, or it failed for good.
    Settled,
    Calling(Handshake),
    Called(Arc<GroupKeys>),
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
    #[error("{}", security_differs(*theirs, *ours))]
    Security { theirs: u16, ours: u16 },
    #[error(
        "it has another job secret than this rank; give every rank of a job the same secret, and every job its own address"
    )]
    Secret,
    #[error("what it sent was changed on the way or is not from this conversation")]
    Tampered,
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

impl From<NoiseError> for Broken {
    fn from(error: NoiseError) -> Broken {
        match error {
            NoiseError::Unproven => Broken::Secret,
            failed => Broken::Io(io::Error::other(failed)),
        }
    }
}

impl Channel {
    /// The end that connected. `stream` must be non-blocking. Without a pass nothing is proved and frames are in clear.
    pub(crate) fn caller(stream: TcpStream, limit: usize, pass: Option<&Pass>) -> Result<Channel, Broken> {
        let Some(Pass { place, key }) = pass else {
            let (inbox, mut outbox) = (Inbox::new(limit, PLAIN, 0), Outbox::new(PLAIN));
            outbox.speak();
            return Ok(Channel { stream, inbox, outbox, security: Security::Settled, place: None });
        };
        let (handshake, message) = Handshake::call(key.bytes(), &prologue(*place))?;
        let (inbox, mut outbox) = (Inbox::new(limit, SEALED, ANSWER_BYTES), Outbox::new(SEALED));
        outbox.speak();
        outbox.queue_raw(&place.encode());
        outbox.queue_raw(&message);
        Ok(Channel { stream, inbox, outbox, security: Security::Calling(handshake), place: Some(*place) })
    }

    /// The end that accepted. `stream` must be non-blocking. With keys, callers have to prove theirs.
    pub(crate) fn called(stream: TcpStream, limit: usize, keys: Option<&Arc<GroupKeys>>) -> Channel {
        let (security, inbox, outbox) = match keys {
            None => (Security::Settled, Inbox::new(limit, PLAIN, 0), Outbox::new(PLAIN)),
            Some(keys) => (
                Security::Called(Arc::clone(keys)),
                Inbox::new(limit, SEALED, CALL_BYTES),
                Outbox::new(SEALED),
            ),
        };
        Channel { stream, inbox, outbox, security, place: None }
    }

    /// Frames longer than this are refused from now on.
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.inbox.set_limit(limit);
    }

    /// The place for which the caller has shown a key, on a connection that asks for one. Only its first frame shows that it
    /// was really the caller.
    pub(crate) fn place(&self) -> Option<Place> {
        self.place
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
        loop {
            let received = self.inbox.next(&self.stream);
            if self.outbox.is_silent() && self.inbox.preamble_is_over() {
                // Also to a caller of another version, so that it can tell its user.
                self.outbox.speak();
                self.flush();
            }
            match received? {
                None => return Ok(None),
                Some(Piece::Frame(frame)) => return Ok(Some(frame)),
                Some(Piece::Handshake(bytes)) => self.shake_hands(&bytes)?,
            }
        }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The bare stream, and how to go on sealing what goes over it, if it was sealed so far. Whatever was queued must have been
    /// flushed.
    pub(crate) fn into_stream(self) -> (TcpStream, Option<Session>) {
        debug_assert!(!self.outbox.unsent() && self.inbox.is_between());
        let session = match (self.outbox.into_sealer(), self.inbox.into_opener()) {
            (Some(sealer), Some(opener)) => Some(Session { sealer, opener }),
            _ => None,
        };
        (self.stream, session)
    }

    pub(crate) fn into_parts(self) -> (TcpStream, Inbox, Outbox) {
        (self.stream, self.inbox, self.outbox)
    }

    /// Parts of a channel on which all that had to be proved was proved.
    pub(crate) fn from_parts(stream: TcpStream, inbox: Inbox, outbox: Outbox) -> Channel {
        Channel { stream, inbox, outbox, security: Security::Settled, place: None }
    }

    fn shake_hands(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        match std::mem::replace(&mut self.security, Security::Settled) {
            Security::Calling(handshake) => {
                let (&[verdict], answer) = bytes.split_first_chunk::<1>().ok_or(Broken::Stranger)?;
                if verdict != AGREED {
                    return Err(Broken::Secret);
                }
                self.seal(handshake.conclude(answer)?);
            }
            Security::Called(keys) => match answer(&keys, bytes) {
                Ok((place, answer, session)) => {
                    self.outbox.queue_raw(&[AGREED]);
                    self.outbox.queue_raw(&answer);
                    self.place = Some(place);
                    self.seal(session);
                }
                Err(error) => {
                    self.outbox.queue_raw(&[REFUSED]);
                    self.outbox.queue_raw(&[0; HANDSHAKE_BYTES]);
                    self.flush();
                    return Err(error.into());
                }
            },
            // The inbox yields one handshake, and only where there is one to make.
            Security::Settled => return Err(Broken::Stranger),
        }
        Ok(())
    }

    fn seal(&mut self, session: Session) {
        self.inbox.open_with(session.opener);
        self.outbox.seal_with(session.sealer);
        self.flush();
    }
}

/// The called rank's half of the handshake.
fn answer(keys: &GroupKeys, call: &[u8]) -> Result<(Place, [u8; HANDSHAKE_BYTES], Session), NoiseError> {
    let (place, message) = call.split_first_chunk().ok_or(NoiseError::Unproven)?;
    let place = Place::decode(place).ok_or(NoiseError::Unproven)?;
    let (answer, session) = Handshake::answer(keys.place(place).bytes(), &prologue(place), message)?;
    Ok((place, answer, session))
}

/// The first bytes of a connection, either way.
pub(super) fn preamble(security: u16) -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    bytes[10..].copy_from_slice(&security.to_le_bytes());
    bytes
}

/// All that is said in clear. The two preambles are the same, or the handshake would not begin.
fn prologue(place: Place) -> [u8; PREAMBLE_BYTES + Place::BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES + Place::BYTES];
    bytes[..PREAMBLE_BYTES].copy_from_slice(&preamble(SEALED));
    bytes[PREAMBLE_BYTES..].copy_from_slice(&place.encode());
    bytes
}

fn security_differs(theirs: u16, ours: u16) -> String {
    let next =
        "give the job secret to every rank (RACCL_SECRET_FILE, or a launcher that hands it out) or to none";
    match (theirs, ours) {
        (PLAIN, SEALED) => format!("it has no job secret, but this rank has one; {next}"),
        (SEALED, PLAIN) => format!("it asks for the job secret, which this rank was not given; {next}"),
        _ => format!("it wants security {theirs}, this rank {ours}; run the same raccl everywhere"),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

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
        let mut channel = Channel::called(two, 1 << 20, None);
        let mut outbox = Outbox::new(PLAIN);
        outbox.speak();
        let bodies: Vec<Vec<u8>> = [0, 1, 5, 40_000].map(|n| (0..n).map(|i| i as u8).collect()).into();
        bodies.iter().for_each(|body| outbox.queue(body));
        let bytes = outbox.into_bytes();
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
            let mut channel = Channel::called(two, 100, None);
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
        let mut channel = Channel::called(two, 100, None);
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
        let mut channel = Channel::called(two, 100, None);
        raw.write_all(&preamble(PLAIN)).unwrap();
        raw.write_all(&101u32.to_le_bytes()).unwrap();
        assert!(matches!(wait_for(&mut channel), Err(Broken::TooLong { length: 101, limit: 100 })));
    }
}
