//! Questions that every rank answers to every other, over connections that are there already.
#![forbid(unsafe_code)]

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use serde::{Serialize, de::DeserializeOwned};

use super::hold;
use crate::os::{PollFd, poll};

/// How often a signal that ends the process is looked for.
const LOOK: Duration = Duration::from_millis(50);
/// No answer is longer.
const LONGEST: usize = 1 << 20;

/// The connections of a rank, by peer.
pub(super) struct Rounds<'a> {
    sockets: Vec<Option<&'a TcpStream>>,
    until: Instant,
}

/// The connection to a peer ended or said nothing in time.
#[derive(Debug, thiserror::Error)]
#[error("rank {peer} did not take part in setting up the cables")]
pub(super) struct Lost {
    pub(super) peer: usize,
    #[source]
    pub(super) source: io::Error,
}

impl<'a> Rounds<'a> {
    /// Over these non-blocking sockets, of which there is none to the own rank.
    pub(super) fn new(sockets: Vec<Option<&'a TcpStream>>, until: Instant) -> Rounds<'a> {
        Rounds { sockets, until }
    }

    /// Gives every peer its answer and returns theirs. Since everybody waits for everybody, nobody is in the next round while
    /// somebody is in the one before.
    pub(super) fn exchange<T: Serialize + DeserializeOwned>(
        &mut self,
        answer: impl Fn(usize) -> T,
    ) -> Result<Vec<Option<T>>, Lost> {
        let mut talks = Vec::new();
        for (peer, socket) in self.sockets.iter().enumerate() {
            let Some(socket) = socket else { continue };
            let body = serde_json::to_vec(&answer(peer)).map_err(|error| lost(peer, error.into()))?;
            talks.push(Talk::new(peer, socket, &body)?);
        }
        while talks.iter().any(Talk::is_open) {
            for talk in &mut talks {
                talk.step().map_err(|source| lost(talk.peer, source))?;
            }
            self.sleep(&talks)?;
        }
        let mut answers: Vec<Option<T>> = self.sockets.iter().map(|_| None).collect();
        for talk in talks {
            let answer = serde_json::from_slice(&talk.incoming[PREFIX..]);
            answers[talk.peer] = Some(answer.map_err(|error| lost(talk.peer, error.into()))?);
        }
        Ok(answers)
    }

    fn sleep(&self, talks: &[Talk<'_>]) -> Result<(), Lost> {
        let open: Vec<&Talk<'_>> = talks.iter().filter(|talk| talk.is_open()).collect();
        let Some(first) = open.first() else { return Ok(()) };
        let rest = self.until.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(lost(first.peer, io::ErrorKind::TimedOut.into()));
        }
        let wait = |talk: &&Talk<'_>| match talk.is_sending() {
            true => PollFd::writable(talk.socket.as_raw_fd()),
            false => PollFd::readable(talk.socket.as_raw_fd()),
        };
        let mut fds: Vec<PollFd> = open.iter().map(wait).collect();
        hold::check().map_err(|source| lost(first.peer, source))?;
        poll(&mut fds, Some(rest.min(LOOK))).map(drop).map_err(|source| lost(first.peer, source))
    }
}

/// Bytes of the length in front of an answer.
const PREFIX: usize = 4;

/// One answer each way.
struct Talk<'a> {
    peer: usize,
    socket: &'a TcpStream,
    outgoing: Vec<u8>,
    sent: usize,
    incoming: Vec<u8>,
    /// How long the incoming answer is with its length, as far as that is known.
    wanted: usize,
}

impl<'a> Talk<'a> {
    fn new(peer: usize, socket: &'a TcpStream, body: &[u8]) -> Result<Talk<'a>, Lost> {
        if body.len() > LONGEST {
            return Err(lost(
                peer,
                io::Error::other(format!("an answer of {} bytes is too long", body.len())),
            ));
        }
        // Shorter than 4 GiB.
        let mut outgoing = (body.len() as u32).to_le_bytes().to_vec();
        outgoing.extend_from_slice(body);
        Ok(Talk { peer, socket, outgoing, sent: 0, incoming: Vec::new(), wanted: PREFIX })
    }

    fn is_sending(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    fn is_open(&self) -> bool {
        self.is_sending() || self.incoming.len() < self.wanted
    }

    /// Sends and receives what can be.
    fn step(&mut self) -> io::Result<()> {
        let mut socket = self.socket;
        while self.is_sending() {
            match socket.write(&self.outgoing[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        // Never more than this answer: what comes behind it belongs to others.
        while self.incoming.len() < self.wanted {
            let mut piece = [0; 4096];
            let most = piece.len().min(self.wanted - self.incoming.len());
            match socket.read(&mut piece[..most]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.incoming.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
            if self.wanted == PREFIX
                && let Some(length) = self.incoming.first_chunk()
            {
                let length = u32::from_le_bytes(*length) as usize;
                if length > LONGEST {
                    return Err(io::Error::other(format!("an answer of {length} bytes")));
                }
                self.wanted += length;
            }
        }
        Ok(())
    }
}

fn lost(peer: usize, source: io::Error) -> Lost {
    Lost { peer, source }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        (one, other)
    }

    #[test]
    fn answers_of_any_size_reach_the_other_side_and_nothing_more_is_read() {
        let (one, other) = pair();
        let until = Instant::now() + Duration::from_secs(60);
        let long = "x".repeat(900_000);
        let expected = long.clone();
        let helper = thread::spawn(move || {
            let mut rounds = Rounds::new(vec![Some(&other), None], until);
            let answers: Vec<_> = (0..3)
                .map(|round| rounds.exchange(|_| format!("{round}")).unwrap()[0].clone().unwrap())
                .collect();
            (&other).write_all(b"rest").unwrap();
            answers
        });
        let mut rounds = Rounds::new(vec![None, Some(&one)], until);
        for round in 0..3 {
            assert_eq!(rounds.exchange(|_| long.clone()).unwrap(), [None, Some(format!("{round}"))]);
        }
        assert_eq!(helper.join().unwrap(), vec![expected; 3]);
        let mut rest = [0; 4];
        one.set_nonblocking(false).unwrap();
        (&one).read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"rest");
    }

    #[test]
    fn a_peer_that_says_nothing_or_nonsense_is_an_error() {
        let (one, other) = pair();
        let mut rounds = Rounds::new(vec![Some(&one)], Instant::now() + Duration::from_millis(20));
        assert_eq!(rounds.exchange(|_| 1).unwrap_err().source.kind(), io::ErrorKind::TimedOut);
        (&other).write_all(&[0xFF; 8]).unwrap();
        let mut rounds = Rounds::new(vec![Some(&one)], Instant::now() + Duration::from_secs(60));
        let error = rounds.exchange(|_| 1).unwrap_err();
        assert!(error.source.to_string().contains("an answer of"), "{error:?}");
        drop(other);
        assert_eq!(rounds.exchange(|_| 1).unwrap_err().peer, 0);
    }
}
