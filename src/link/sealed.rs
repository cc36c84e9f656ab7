//! A lane whose bytes are sealed: what goes through it is secret, and whatever is changed, left out, repeated or added on the
//! way ends the link instead of being received.
//!
//! ```text
//! on the lane below:  | length u16 | record | length u16 | record | ...     a record is up to 16 KiB of the bytes, and a tag
//! ```
//! Bytes count as written when all of their record is out below, and as read when their record has opened, so both sides count
//! the same ones wherever the link is cut off. Only a lane that is asked for pays for any of this.

use std::{io, os::fd::RawFd};

use super::{LinkError, stripe};
use crate::{
    error::Cause,
    noise::{Opener, RECORD_LIMIT, Sealer, TAG_BYTES},
    os::IoVec,
};

/// The length in front of a record.
const HEADER_BYTES: usize = 2;
/// A record at its longest, with its length.
const RECORD_BYTES: usize = HEADER_BYTES + RECORD_LIMIT + TAG_BYTES;
/// Records that share a call to the lane below.
const BATCH: usize = 4;
/// Calls to the lane below in one read, so that a peer that sends without end cannot hold its reader.
const READS: usize = 2;

/// Seals what goes in.
pub(crate) struct Outlet<O> {
    below: O,
    sealer: Sealer,
    /// Plain bytes of the next record, gathered from pieces.
    plain: Box<[u8]>,
    /// Sealed records, of which `sent` bytes are out.
    sealed: Box<[u8]>,
    length: usize,
    sent: usize,
    /// How many plain bytes they are. Their writer still names them, and will until they are out.
    holds: usize,
}

impl<O: stripe::Outlet> Outlet<O> {
    pub(crate) fn new(below: O, sealer: Sealer) -> Outlet<O> {
        let plain = vec![0; RECORD_LIMIT].into();
        let sealed = vec![0; BATCH * RECORD_BYTES].into();
        Outlet { below, sealer, plain, sealed, length: 0, sent: 0, holds: 0 }
    }

    /// Seals records of what the pieces hold from `skip` on, up to a batch of them.
    ///
    /// # Safety
    /// Every piece is valid for reads of its length during the call.
    unsafe fn seal(&mut self, pieces: &[IoVec], mut skip: usize) -> Result<(), LinkError> {
        (self.length, self.sent, self.holds) = (0, 0, 0);
        for _ in 0..BATCH {
            // SAFETY: the caller keeps the pieces valid.
            let count = unsafe { gather(pieces, skip, &mut self.plain) };
            if count == 0 {
                break;
            }
            let (header, record) = self.sealed[self.length..].split_at_mut(HEADER_BYTES);
            let sealed = self
                .sealer
                .seal(&self.plain[..count], record)
                .map_err(|error| LinkError::Broken { what: "sealing failed", source: Cause::new(error) })?;
            // A sealed record fits 16 bits, which its limit is far below.
            header.copy_from_slice(&(sealed as u16).to_le_bytes());
            self.length += HEADER_BYTES + sealed;
            self.holds += count;
            skip += count;
        }
        Ok(())
    }

    /// Pushes sealed records; whether all are out.
    fn push(&mut self) -> Result<bool, LinkError> {
        while self.sent < self.length {
            let rest = &self.sealed[self.sent..self.length];
            let piece = IoVec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the piece is `rest`, which nobody changes during the call.
            let taken = unsafe { self.below.write(&[piece]) }?;
            self.sent += taken;
            if taken < rest.len() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl<O: stripe::Outlet> stripe::Outlet for Outlet<O> {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let mut taken = 0;
        loop {
            if !self.push()? {
                return Ok(taken);
            }
            // If records were left from the call before, these bytes are at the front of the pieces once more.
            taken += std::mem::take(&mut self.holds);
            // SAFETY: the caller keeps the pieces valid.
            unsafe { self.seal(pieces, taken) }?;
            if self.holds == 0 {
                return Ok(taken);
            }
        }
    }

    fn shutdown(&mut self) -> bool {
        self.below.shutdown()
    }

    fn fd(&self) -> Option<RawFd> {
        self.below.fd()
    }
}

/// Opens what comes out.
pub(crate) struct Inlet<I> {
    below: I,
    opener: Opener,
    /// What was read below and not opened yet: `sealed[begin..end]`.
    sealed: Box<[u8]>,
    begin: usize,
    end: usize,
    /// An opened record, of which `plain[at..length]` was not given yet.
    plain: Box<[u8]>,
    at: usize,
    length: usize,
}

impl<I: stripe::Inlet> Inlet<I> {
    pub(crate) fn new(below: I, opener: Opener) -> Inlet<I> {
        let sealed = vec![0; BATCH * RECORD_BYTES].into();
        let plain = vec![0; RECORD_LIMIT].into();
        Inlet { below, opener, sealed, begin: 0, end: 0, plain, at: 0, length: 0 }
    }

    /// Opens the next record if all of it is there.
    fn open(&mut self) -> Result<bool, LinkError> {
        let waiting = &self.sealed[self.begin..self.end];
        let Some((header, rest)) = waiting.split_first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let length = usize::from(u16::from_le_bytes(*header));
        if length <= TAG_BYTES || length > RECORD_LIMIT + TAG_BYTES {
            return Err(LinkError::Protocol(format!(
                "a sealed record of {length} bytes, which no rank sends: it was changed on the way"
            )));
        }
        let Some(record) = rest.get(..length) else { return Ok(false) };
        self.length = self.opener.open(record, &mut self.plain).map_err(|_| {
            LinkError::Protocol(
                "a sealed record does not open: it was changed, repeated or left out on the way".to_owned(),
            )
        })?;
        self.at = 0;
        self.begin += HEADER_BYTES + length;
        Ok(true)
    }

    /// Reads below once. What was there and not opened moves to the front, where there is room for the rest of its record.
    fn fetch(&mut self) -> Result<Fetched, LinkError> {
        self.sealed.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        let room = &mut self.sealed[self.end..];
        let piece = IoVec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        // SAFETY: the piece is `room`, which nobody else touches during the call.
        match unsafe { self.below.read(&[piece]) }? {
            stripe::Read::Bytes(bytes) => {
                self.end += bytes;
                Ok(if bytes < room.len() { Fetched::All } else { Fetched::Some })
            }
            stripe::Read::Empty => Ok(Fetched::All),
            stripe::Read::End => Ok(Fetched::End),
        }
    }
}

/// What a read below has found.
enum Fetched {
    /// There may be more.
    Some,
    /// Everything that had arrived.
    All,
    /// Nothing more will come.
    End,
}

impl<I: stripe::Inlet> stripe::Inlet for Inlet<I> {
    const READ_AHEAD: usize = I::READ_AHEAD;

    /// When it gives less than was asked for, no record is left that could be opened: whoever then sleeps on the descriptor
    /// misses nothing.
    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        let wanted: usize = pieces.iter().map(|piece| piece.iov_len).sum();
        let mut given = 0;
        let mut reads = 0;
        loop {
            // SAFETY: the caller keeps the pieces valid, and none of them is part of `plain`.
            let count = unsafe { scatter(&self.plain[self.at..self.length], pieces, given) };
            self.at += count;
            given += count;
            if given == wanted {
                return Ok(stripe::Read::Bytes(given));
            }
            if self.open()? {
                continue;
            }
            if reads == READS {
                break;
            }
            reads += 1;
            match self.fetch()? {
                Fetched::Some => {}
                Fetched::All => reads = READS,
                Fetched::End if given > 0 => break,
                Fetched::End if self.begin < self.end => {
                    let source = Cause::new(io::Error::from(io::ErrorKind::UnexpectedEof));
                    return Err(LinkError::Broken {
                        what: "the stream ended inside a sealed record",
                        source,
                    });
                }
                Fetched::End => return Ok(stripe::Read::End),
            }
        }
        Ok(if given == 0 { stripe::Read::Empty } else { stripe::Read::Bytes(given) })
    }

    fn fd(&self) -> Option<RawFd> {
        self.below.fd()
    }
}

/// Copies from what the pieces hold behind their first `skip` bytes, as much as there is room for; how much.
///
/// # Safety
/// Every piece is valid for reads of its length during the call, and none overlaps `to`.
unsafe fn gather(pieces: &[IoVec], mut skip: usize, to: &mut [u8]) -> usize {
    let mut count = 0;
    for piece in pieces {
        let passed = skip.min(piece.iov_len);
        skip -= passed;
        let length = (piece.iov_len - passed).min(to.len() - count);
        let from = piece.iov_base.cast::<u8>().wrapping_add(passed);
        // SAFETY: `passed + length` is at most the piece's length, for which the caller keeps it valid; `length` fits the rest of
        // `to`, which is apart from it by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(from, to[count..].as_mut_ptr(), length) };
        count += length;
    }
    count
}

/// Copies into what the pieces hold behind their first `skip` bytes, as much as there is room for; how much.
///
/// # Safety
/// Every piece is valid for writes of its length during the call, and none overlaps `from`.
unsafe fn scatter(from: &[u8], pieces: &[IoVec], mut skip: usize) -> usize {
    let mut count = 0;
    for piece in pieces {
        let passed = skip.min(piece.iov_len);
        skip -= passed;
        let length = (piece.iov_len - passed).min(from.len() - count);
        let to = piece.iov_base.cast::<u8>().wrapping_add(passed);
        // SAFETY: `passed + length` is at most the piece's length, for which the caller keeps it valid; `length` is at most what
        // is left of `from`, which is apart from it by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(from[count..].as_ptr(), to, length) };
        count += length;
    }
    count
}
