//! The bytes of a channel: the preamble, the handshake as a whole, frames in clear or sealed.
//!
//! ```text
//! frame in clear:  | length u32 | body |
//! sealed frame:    | length u16 | record | length u16 | record | ...    whose plain bytes are a frame in clear
//! ```
//! A sealed frame begins with a record of its own, so that nothing is read beyond it.
#![forbid(unsafe_code)]

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::TcpStream,
};

use super::channel::{Broken, MAGIC, PREAMBLE_BYTES, VERSION, preamble};
use crate::noise::{Opener, RECORD_LIMIT, Sealer, TAG_BYTES};

/// Read in pieces of this size, so that memory is taken for bytes that are there and not for a length that claims them.
const PIECE: usize = 16 << 10;

/// The half that receives.
#[derive(Debug)]
pub(crate) struct Inbox {
    expected: Part,
    partial: Vec<u8>,
    /// What is there of a sealed record.
    record: Vec<u8>,
    limit: usize,
    security: u16,
    /// Bytes of the handshake that follows the preamble; 0 for none.
    handshake: usize,
    protection: Protection<Opener>,
}

/// The half that sends.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: VecDeque<u8>,
    /// Nothing is said before the caller has shown the magic.
    silent: bool,
    security: u16,
    protection: Protection<Sealer>,
    /// Frames that wait for the handshake.
    waiting: Vec<Vec<u8>>,
    /// Why nothing can be sealed any more.
    failed: Option<String>,
}

/// What an inbox has found.
pub(super) enum Piece {
    /// The other side's part in it, once.
    Handshake(Vec<u8>),
    Frame(Vec<u8>),
}

/// How frames are protected.
#[derive(Debug)]
enum Protection<T> {
    /// Not at all.
    Clear,
    /// It has to be agreed upon first; no frame passes before.
    Awaited,
    Sealed(T),
}

/// The next thing that an inbox waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Preamble,
    Handshake,
    Length,
    Body(usize),
}

impl Inbox {
    /// With a handshake of so many bytes, frames are let through once there is an opener for them.
    pub(super) fn new(limit: usize, security: u16, handshake: usize) -> Inbox {
        let protection = if handshake == 0 { Protection::Clear } else { Protection::Awaited };
        let (partial, record) = (Vec::new(), Vec::new());
        Inbox { expected: Part::Preamble, partial, record, limit, security, handshake, protection }
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    pub(super) fn open_with(&mut self, opener: Opener) {
        self.protection = Protection::Sealed(opener);
    }

    pub(super) fn into_opener(self) -> Option<Opener> {
        match self.protection {
            Protection::Sealed(opener) => Some(opener),
            Protection::Clear | Protection::Awaited => None,
        }
    }

    /// Whoever is at the other end has shown that it speaks the protocol.
    pub(super) fn preamble_is_over(&self) -> bool {
        self.expected != Part::Preamble
    }

    /// Nothing of a next frame was read.
    pub(super) fn is_between(&self) -> bool {
        self.partial.is_empty() && self.record.is_empty()
    }

    /// The next whole frame, if it is there.
    pub(crate) fn receive(&mut self, stream: &TcpStream) -> Result<Option<Vec<u8>>, Broken> {
        match self.next(stream)? {
            None => Ok(None),
            Some(Piece::Frame(frame)) => Ok(Some(frame)),
            // Parts of a channel are taken when its handshake is long over.
            Some(Piece::Handshake(_)) => Err(Broken::Stranger),
        }
    }

    /// The handshake, or the next whole frame, if it is there. Reads nothing beyond it.
    pub(super) fn next(&mut self, stream: &TcpStream) -> Result<Option<Piece>, Broken> {
        loop {
            let need = match self.expected {
                Part::Preamble => PREAMBLE_BYTES,
                Part::Handshake => self.handshake,
                Part::Length => 4,
                Part::Body(length) => length,
            };
            if !self.gather(stream, need)? {
                return Ok(None);
            }
            match self.expected {
                Part::Preamble => {
                    let part = std::mem::take(&mut self.partial);
                    self.expected = if self.handshake > 0 { Part::Handshake } else { Part::Length };
                    let theirs = u16::from_le_bytes([part[8], part[9]]);
                    if theirs != VERSION {
                        return Err(Broken::Version { theirs });
                    }
                    let theirs = u16::from_le_bytes([part[10], part[11]]);
                    if theirs != self.security {
                        return Err(Broken::Security { theirs, ours: self.security });
                    }
                }
                Part::Handshake => {
                    self.expected = Part::Length;
                    return Ok(Some(Piece::Handshake(std::mem::take(&mut self.partial))));
                }
                Part::Length => {
                    let length: Vec<u8> = self.partial.drain(..4).collect();
                    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
                    if length > self.limit {
                        return Err(Broken::TooLong { length, limit: self.limit });
                    }
                    self.expected = Part::Body(length);
                }
                Part::Body(length) => {
                    if self.partial.len() > length {
                        // The last record holds more than its frame.
                        return Err(Broken::TooLong { length: self.partial.len(), limit: length });
                    }
                    self.expected = Part::Length;
                    return Ok(Some(Piece::Frame(std::mem::take(&mut self.partial))));
                }
            }
        }
    }

    /// Reads until `need` plain bytes are there; whether they are.
    fn gather(&mut self, stream: &TcpStream, need: usize) -> Result<bool, Broken> {
        if self.expected == Part::Preamble {
            let filled = fill(stream, &mut self.partial, need);
            // Also of what is not complete: whoever begins differently is not waited for.
            if !MAGIC.starts_with(&self.partial[..self.partial.len().min(MAGIC.len())]) {
                return Err(Broken::Stranger);
            }
            return filled;
        }
        match &mut self.protection {
            _ if self.expected == Part::Handshake => fill(stream, &mut self.partial, need),
            Protection::Clear => fill(stream, &mut self.partial, need),
            Protection::Awaited => Err(Broken::Secret),
            Protection::Sealed(opener) => {
                while self.partial.len() < need {
                    if !fill_record(stream, &mut self.record)? {
                        return Ok(false);
                    }
                    let sealed = &self.record[RECORD_HEADER_BYTES..];
                    let have = self.partial.len();
                    self.partial.resize(have + sealed.len() - TAG_BYTES, 0);
                    if opener.open(sealed, &mut self.partial[have..]).is_err() {
                        self.partial.truncate(have);
                        return Err(Broken::Tampered);
                    }
                    self.record.clear();
                }
                Ok(true)
            }
        }
    }
}

/// The length in front of a record.
const RECORD_HEADER_BYTES: usize = 2;

/// Reads a whole record with its length; whether it is there.
fn fill_record(stream: &TcpStream, record: &mut Vec<u8>) -> Result<bool, Broken> {
    if !fill(stream, record, RECORD_HEADER_BYTES)? {
        return Ok(false);
    }
    let length = usize::from(u16::from_le_bytes([record[0], record[1]]));
    // A frame has no empty records.
    if length <= TAG_BYTES || length > RECORD_LIMIT + TAG_BYTES {
        return Err(Broken::Tampered);
    }
    fill(stream, record, RECORD_HEADER_BYTES + length)
}

/// Reads until there are `need` bytes; whether there are.
fn fill(mut stream: &TcpStream, buffer: &mut Vec<u8>, need: usize) -> Result<bool, Broken> {
    while buffer.len() < need {
        let have = buffer.len();
        buffer.resize(need.min(have + PIECE), 0);
        let read = stream.read(&mut buffer[have..]);
        buffer.truncate(have + read.as_ref().map_or(0, |&n| n));
        match read {
            Ok(0) => return Err(Broken::Closed),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Broken::Io(error)),
        }
    }
    Ok(true)
}

impl Outbox {
    pub(super) fn new(security: u16) -> Outbox {
        let protection =
            if security == super::channel::PLAIN { Protection::Clear } else { Protection::Awaited };
        let (queue, waiting) = (VecDeque::new(), Vec::new());
        Outbox { queue, silent: true, security, protection, waiting, failed: None }
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    /// Puts the preamble in front of what is queued and lets it go.
    pub(super) fn speak(&mut self) {
        for byte in preamble(self.security).into_iter().rev() {
            self.queue.push_front(byte);
        }
        self.silent = false;
    }

    /// Queues a part of the handshake.
    pub(super) fn queue_raw(&mut self, bytes: &[u8]) {
        self.queue.extend(bytes);
    }

    /// The handshake is over: seals what has waited for it, and everything from now on.
    pub(super) fn seal_with(&mut self, sealer: Sealer) {
        self.protection = Protection::Sealed(sealer);
        for frame in std::mem::take(&mut self.waiting) {
            self.queue(&frame);
        }
    }

    pub(super) fn into_sealer(self) -> Option<Sealer> {
        match self.protection {
            Protection::Sealed(sealer) => Some(sealer),
            Protection::Clear | Protection::Awaited => None,
        }
    }

    /// Queues a frame.
    pub(crate) fn queue(&mut self, body: &[u8]) {
        debug_assert!(u32::try_from(body.len()).is_ok());
        let length = (body.len() as u32).to_le_bytes();
        match &mut self.protection {
            Protection::Clear => {
                self.queue.extend(length);
                self.queue.extend(body);
            }
            Protection::Awaited => self.waiting.push(body.to_vec()),
            Protection::Sealed(sealer) => {
                let frame = [&length, body].concat();
                let mut record = [0; RECORD_LIMIT + TAG_BYTES];
                for plain in frame.chunks(RECORD_LIMIT) {
                    match sealer.seal(plain, &mut record) {
                        Ok(length) => {
                            // At most the size of `record`, which 16 bits can say.
                            self.queue.extend((length as u16).to_le_bytes());
                            self.queue.extend(&record[..length]);
                        }
                        Err(error) => self.failed = Some(error.to_string()),
                    }
                }
            }
        }
    }

    /// Sends what the socket takes; true if nothing is left. After an error the queue is gone.
    pub(crate) fn flush(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        if let Some(failed) = &self.failed {
            self.queue.clear();
            return Err(io::Error::other(failed.clone()));
        }
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
impl Outbox {
    /// What would be sent.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.queue.into()
    }
}
