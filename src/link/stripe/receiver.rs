//! The receiving side: finds headers on lane 0 and lands the parts of payloads.

use std::{io, os::fd::RawFd};

use super::{Inlet, Read, Split};
use crate::{
    error::Cause,
    link::{Arrival, HEADER_BYTES, Header, LinkError},
    os::{IoVec, LARGEST_TRANSFER},
};

/// When at least this much of a payload is to come on lane 0, no more than the next header is read behind it, so that the
/// payload after that goes straight to its place as well. Behind less, a whole inbox is read.
const BULK: usize = 16 << 10;

/// Bytes that are read at a time only to be dropped.
const SCRATCH: usize = 64 << 10;

/// Reads on one lane in one call of `drain`, so that a peer that sends without end cannot hold its caller.
const DRAIN_READS: usize = 64;

/// Receives messages over lanes. The contract is that of [`crate::link::Receiver`].
pub(crate) struct Receiver<L> {
    lanes: Vec<Lane<L>>,
    split: Split,
    inbox: Inbox,
    /// The last read on lane 0 found less than there was room for: the next poll need not ask again. Only where asking is a
    /// system call, and where a thread that sleeps on the lane's descriptor is told all the same.
    dry: bool,
    /// The last payload was so large that reading ahead of the next would copy more than it saves. Messages of a size come in
    /// rows, so this guesses well; a wrong guess costs a read or a copy.
    bulk: bool,
    /// Where unwanted bytes go; empty until there are some.
    scratch: Vec<u8>,
    state: State,
    /// Where the payload goes, and how much of it; of meaning in `Landing` only.
    to: *mut u8,
    keep: u64,
    moved: u64,
}

// SAFETY: `to` is only written through, and whoever lands a payload promises that this receiver may, on any thread.
unsafe impl<L: Send> Send for Receiver<L> {}

enum State {
    /// A header is next.
    Between,
    /// A header with this much payload was handed out; nobody said yet where the payload goes.
    Announced { length: u64 },
    /// The lanes' parts are being received.
    Landing,
    /// Nothing is received any more.
    Ended(Result<Arrival, LinkError>),
}

struct Lane<L> {
    inlet: L,
    /// The part of the payload in hand that comes on this lane, from where it begins to where it ends.
    at: u64,
    end: u64,
    /// Bytes that came in since the beginning.
    read: u64,
}

impl<L: Inlet> Receiver<L> {
    /// A receiver over these lanes, divided by `split`, which is for as many.
    pub(crate) fn new(inlets: Vec<L>, split: Split) -> Receiver<L> {
        Receiver {
            lanes: inlets.into_iter().map(|inlet| Lane { inlet, at: 0, end: 0, read: 0 }).collect(),
            split,
            inbox: Inbox::new(L::READ_AHEAD),
            dry: false,
            bulk: false,
            scratch: Vec::new(),
            state: State::Between,
            to: std::ptr::null_mut(),
            keep: 0,
            moved: 0,
        }
    }

    pub(crate) fn poll(&mut self) -> Result<Arrival, LinkError> {
        let result = match &self.state {
            State::Between => self.poll_header(),
            State::Landing => self.poll_payload(),
            State::Ended(how) => how.clone(),
            State::Announced { .. } => unreachable!("poll before land: the caller skipped a step"),
        };
        if matches!(result, Err(_) | Ok(Arrival::Closed)) {
            self.revoke();
            self.state = State::Ended(result.clone());
        }
        result
    }

    /// # Safety
    /// As for [`crate::link::Receiver::land`].
    pub(crate) unsafe fn land(&mut self, to: *mut u8, keep: usize) {
        let State::Announced { length } = self.state else {
            unreachable!("land without a header: the caller made a step twice");
        };
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            let part = self.split.part(length, index);
            (lane.at, lane.end) = (part.start, part.end);
        }
        self.to = to;
        self.keep = keep as u64;
        self.state = State::Landing;
    }

    pub(crate) fn cancel(&mut self) {
        if matches!(self.state, State::Announced { .. }) {
            // SAFETY: no byte is kept, so none is written.
            unsafe { self.land(std::ptr::null_mut(), 0) };
        }
        self.revoke();
        self.to = std::ptr::null_mut();
        self.keep = 0;
    }

    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    pub(crate) fn drain(&mut self, sent_by_peer: &[u64]) -> bool {
        self.cancel();
        if !matches!(self.state, State::Ended(_)) {
            self.state = State::Ended(Ok(Arrival::Closed));
        }
        self.scratch.resize(SCRATCH, 0);
        let mut done = true;
        for (lane, &sent) in self.lanes.iter_mut().zip(sent_by_peer) {
            for _ in 0..DRAIN_READS {
                if lane.read >= sent {
                    break;
                }
                let piece = IoVec { iov_base: self.scratch.as_mut_ptr().cast(), iov_len: self.scratch.len() };
                // SAFETY: the piece is the scratch memory, which is ours.
                match unsafe { lane.inlet.read(&[piece]) } {
                    Ok(Read::Bytes(bytes)) => {
                        lane.read += bytes as u64;
                        self.moved += bytes as u64;
                    }
                    Ok(Read::Empty) => break,
                    // Nothing more will come: as good as done. The error is of no use to anybody who is leaving.
                    Ok(Read::End) | Err(_) => lane.read = u64::MAX,
                }
            }
            done &= lane.read >= sent;
        }
        done
    }

    pub(crate) fn fds(&self, out: &mut Vec<RawFd>) {
        match self.state {
            State::Between => out.extend(self.lanes[0].inlet.fd()),
            State::Announced { .. } => {}
            State::Landing => out.extend(
                self.lanes.iter().filter(|lane| lane.at < lane.end).filter_map(|lane| lane.inlet.fd()),
            ),
            // For drain.
            State::Ended(_) => out.extend(self.lanes.iter().filter_map(|lane| lane.inlet.fd())),
        }
    }

    /// Nothing is written any more where a payload lands.
    fn revoke(&mut self) {
        if matches!(self.state, State::Landing) {
            self.lanes.iter_mut().for_each(|lane| lane.inlet.revoke());
        }
    }

    fn poll_header(&mut self) -> Result<Arrival, LinkError> {
        if self.inbox.len() < HEADER_BYTES {
            if std::mem::take(&mut self.dry) {
                return Ok(Arrival::Nothing);
            }
            let piece = self.inbox.room(if self.bulk { HEADER_BYTES } else { L::READ_AHEAD });
            // SAFETY: the piece is the inbox's free memory.
            match unsafe { self.lanes[0].inlet.read(&[piece]) }? {
                Read::Empty => return Ok(Arrival::Nothing),
                Read::End if self.inbox.len() == 0 => return Ok(Arrival::Closed),
                Read::End => return Err(cut_short("the stream ended inside a header")),
                Read::Bytes(bytes) => {
                    self.inbox.filled(bytes);
                    self.dry = bytes < piece.iov_len && self.lanes[0].inlet.fd().is_some();
                    self.lanes[0].read += bytes as u64;
                    self.moved += bytes as u64;
                }
            }
        }
        let Some(encoded) = self.inbox.take_header() else { return Ok(Arrival::Nothing) };
        let header = Header::decode(&encoded).map_err(LinkError::Protocol)?;
        self.bulk = header.length >= L::READ_AHEAD as u64;
        if header.length > 0 {
            self.state = State::Announced { length: header.length };
        }
        Ok(Arrival::Header(header))
    }

    fn poll_payload(&mut self) -> Result<Arrival, LinkError> {
        self.land_from_inbox();
        for index in 0..self.lanes.len() {
            if self.lanes[index].at < self.lanes[index].end {
                self.read_part(index)?;
            }
        }
        if self.lanes.iter().any(|lane| lane.at < lane.end) {
            return Ok(Arrival::Nothing);
        }
        self.to = std::ptr::null_mut();
        self.state = State::Between;
        Ok(Arrival::Payload)
    }

    /// Moves what was read ahead of the payload on lane 0 to its place.
    fn land_from_inbox(&mut self) {
        let lane = &mut self.lanes[0];
        let ready = self.inbox.take((lane.end - lane.at).min(self.inbox.len() as u64) as usize);
        let kept = self.keep.saturating_sub(lane.at).min(ready.len() as u64) as usize;
        if kept > 0 {
            let to = self.to.wrapping_add(lane.at as usize);
            // SAFETY: `at + kept` is at most `keep`, up to which the caller of `land` keeps the destination writable; it is
            // the user's or the engine's memory and never part of the inbox.
            unsafe { std::ptr::copy_nonoverlapping(ready.as_ptr(), to, kept) };
        }
        lane.at += ready.len() as u64;
    }

    /// Reads once from a lane whose part is not complete. On lane 0 the inbox is empty then.
    fn read_part(&mut self, index: usize) -> Result<(), LinkError> {
        let lane = &mut self.lanes[index];
        let rest = lane.end - lane.at;
        let kept = self.keep.saturating_sub(lane.at).min(rest);
        let mut pieces = [IoVec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        let mut count = 0;
        if kept > 0 {
            let length = kept.min(LARGEST_TRANSFER as u64) as usize;
            pieces[0] = IoVec { iov_base: self.to.wrapping_add(lane.at as usize).cast(), iov_len: length };
            count = 1;
        }
        if kept == rest && index == 0 {
            if kept < LARGEST_TRANSFER as u64 {
                let most = if kept as usize >= BULK { HEADER_BYTES } else { L::READ_AHEAD };
                pieces[count] = self.inbox.room(most);
                count += 1;
            }
        } else if kept < rest && kept < LARGEST_TRANSFER as u64 {
            self.scratch.resize(SCRATCH, 0);
            let length = (rest - kept).min(self.scratch.len() as u64) as usize;
            pieces[count] = IoVec { iov_base: self.scratch.as_mut_ptr().cast(), iov_len: length };
            count += 1;
        }
        let room: usize = pieces[..count].iter().map(|piece| piece.iov_len).sum();
        let read = if kept > 0 {
            // SAFETY: the first piece is within the first `keep` bytes of the destination, which the caller of `land` keeps
            // writable until all of it is there or the lane is revoked; the other is the inbox's free memory or the scratch memory.
            unsafe { lane.inlet.read_lasting(&pieces[..count]) }
        } else {
            // SAFETY: the piece is the inbox's free memory or the scratch memory.
            unsafe { lane.inlet.read(&pieces[..count]) }
        };
        match read? {
            Read::Empty => {}
            Read::End => return Err(cut_short("the stream ended inside a payload")),
            Read::Bytes(bytes) => {
                lane.read += bytes as u64;
                self.moved += bytes as u64;
                let landed = (bytes as u64).min(rest);
                lane.at += landed;
                if index == 0 {
                    self.dry = bytes < room && lane.inlet.fd().is_some();
                }
                self.inbox.filled(bytes - landed as usize);
            }
        }
        Ok(())
    }
}

fn cut_short(what: &'static str) -> LinkError {
    LinkError::Broken { what, source: Cause::new(io::Error::from(io::ErrorKind::UnexpectedEof)) }
}

/// Bytes of lane 0 that were read ahead.
struct Inbox {
    bytes: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl Inbox {
    fn new(size: usize) -> Inbox {
        Inbox { bytes: vec![0; size.max(HEADER_BYTES)].into(), begin: 0, end: 0 }
    }

    fn len(&self) -> usize {
        self.end - self.begin
    }

    /// Free memory behind what is there, at most `most` of it and never nothing, as long as less than a header is there.
    fn room(&mut self, most: usize) -> IoVec {
        if self.begin > 0 {
            self.bytes.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.len());
        }
        let free = &mut self.bytes[self.end..];
        IoVec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len().min(most) }
    }

    /// Takes over what was read into [`room`](Self::room).
    fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    fn take(&mut self, bytes: usize) -> &[u8] {
        self.begin += bytes;
        &self.bytes[self.begin - bytes..self.begin]
    }

    fn take_header(&mut self) -> Option<[u8; HEADER_BYTES]> {
        if self.len() < HEADER_BYTES {
            return None;
        }
        self.take(HEADER_BYTES).try_into().ok()
    }
}
