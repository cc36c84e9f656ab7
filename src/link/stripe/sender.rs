//! The sending side: a line of messages in front of each lane.

use std::{
    collections::VecDeque,
    os::fd::RawFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use parking_lot::Mutex;

use super::{Outlet, Split};
use crate::{
    link::{HEADER_BYTES, Header, LinkError, Ticket},
    os::{IoVec, LARGEST_TRANSFER},
};

/// Pieces in one write at most: enough to fill any socket buffer with small messages.
const GATHER: usize = 64;
/// Parts in line up to which few pieces are enough, of which each part has two at most.
const FEW: usize = 2;
const NOTHING: IoVec = IoVec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// A lane that took so much or more at once may not be done with it.
const LASTING: usize = 4096;

/// Sends messages over lanes. The contract is that of [`crate::link::Sender`].
pub(crate) struct Sender<L> {
    /// Written under the lock, read by anybody: the last message that is out on every lane.
    sent: AtomicU64,
    /// As above: whether a lane has something in line, or is not done with what went out.
    pending: AtomicBool,
    /// As above: bytes pushed, and bytes in line.
    moved: AtomicU64,
    queued: AtomicU64,
    split: Split,
    line: Mutex<Line<L>>,
}

struct Line<L> {
    lanes: Vec<Lane<L>>,
    /// The number of the last message put in line.
    last: u64,
    /// Why nothing is sent any more.
    ended: Option<LinkError>,
}

struct Lane<L> {
    outlet: L,
    parts: VecDeque<Part>,
    /// Bytes that went out since the beginning, and how many of them the lane is done with.
    written: u64,
    settled: u64,
    /// Parts that went out and that the lane is not done with: tickets, and where in the stream they end.
    unsettled: VecDeque<(u64, u64)>,
}

/// What one message puts on one lane: its header (lane 0 only) and a range of its payload.
struct Part {
    ticket: u64,
    header: Option<[u8; HEADER_BYTES]>,
    payload: *const u8,
    length: usize,
    /// Bytes of header and payload that are out.
    done: usize,
}

// SAFETY: the payload is only read, and whoever sends promises that it may be until it is out, by any thread.
unsafe impl Send for Part {}

impl<L: Outlet> Sender<L> {
    /// A sender over these lanes, divided by `split`, which is for as many.
    pub(crate) fn new(outlets: Vec<L>, split: Split) -> Sender<L> {
        // The lines start with room, so that ordinary use never allocates while sending.
        let lanes = outlets.into_iter().map(|outlet| Lane {
            outlet,
            parts: VecDeque::with_capacity(GATHER),
            written: 0,
            settled: 0,
            unsettled: VecDeque::new(),
        });
        Sender {
            sent: AtomicU64::new(0),
            pending: AtomicBool::new(false),
            moved: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            split,
            line: Mutex::new(Line { lanes: lanes.collect(), last: 0, ended: None }),
        }
    }

    /// # Safety
    /// As for [`crate::link::Sender::send_many`].
    pub(crate) unsafe fn send(&self, messages: &[(Header, *const u8)]) -> Result<Ticket, LinkError> {
        let mut line = self.line.lock();
        if let Some(error) = &line.ended {
            return Err(error.clone());
        }
        let mut added = 0;
        for (header, payload) in messages {
            line.last += 1;
            added += HEADER_BYTES as u64 + header.length;
            line.put(&self.split, header, *payload);
        }
        self.queued.store(self.queued.load(Ordering::Relaxed) + added, Ordering::Relaxed);
        self.push(&mut line)?;
        Ok(Ticket(line.last))
    }

    pub(crate) fn sent(&self) -> Ticket {
        Ticket(self.sent.load(Ordering::Acquire))
    }

    pub(crate) fn pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    pub(crate) fn flush(&self) -> Result<bool, LinkError> {
        if !self.pending() {
            return Ok(false);
        }
        match self.line.try_lock() {
            Some(mut line) => self.push(&mut line),
            None => Ok(true),
        }
    }

    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self) -> Vec<u64> {
        let mut line = self.line.lock();
        self.end(&mut line, LinkError::Closed);
        line.lanes.iter().map(|lane| lane.written).collect()
    }

    pub(crate) fn shutdown(&self) -> bool {
        let mut line = self.line.lock();
        self.end(&mut line, LinkError::Closed);
        let mut done = true;
        for lane in &mut line.lanes {
            done &= lane.outlet.shutdown();
        }
        done
    }

    pub(crate) fn fds(&self, out: &mut Vec<RawFd>) {
        let line = self.line.lock();
        out.extend(
            line.lanes.iter().filter(|lane| !lane.parts.is_empty()).filter_map(|lane| lane.outlet.fd()),
        );
    }

    /// Closes, and lets go of the lanes.
    pub(crate) fn release(&self) {
        let mut line = self.line.lock();
        self.end(&mut line, LinkError::Closed);
        line.lanes.clear();
    }

    /// Pushes what the lanes take; whether bytes moved. After a failure the line is empty and the link has ended.
    fn push(&self, line: &mut Line<L>) -> Result<bool, LinkError> {
        let mut moved = 0;
        let mut settled = false;
        let mut failure = None;
        for index in 0..line.lanes.len() {
            let last = if line.lanes[index].outlet.in_turn() { line.last_in_turn(index) } else { u64::MAX };
            let lane = &mut line.lanes[index];
            let before = lane.unsettled.len();
            match lane.push(last) {
                Ok(bytes) => moved += bytes,
                Err(error) => failure = Some(error),
            }
            settled |= lane.unsettled.len() < before;
        }
        self.moved.store(self.moved.load(Ordering::Relaxed) + moved, Ordering::Relaxed);
        if let Some(error) = failure {
            self.end(line, error.clone());
            return Err(error);
        }
        self.queued.store(self.queued.load(Ordering::Relaxed) - moved, Ordering::Relaxed);
        self.sent.store(line.sent(), Ordering::Release);
        self.pending.store(line.lanes.iter().any(Lane::is_pending), Ordering::Release);
        Ok(moved > 0 || settled)
    }

    /// Drops what is in line and remembers why; the first reason stays.
    fn end(&self, line: &mut Line<L>, why: LinkError) {
        for lane in &mut line.lanes {
            lane.outlet.revoke();
            lane.parts.clear();
            lane.unsettled.clear();
        }
        line.ended.get_or_insert(why);
        self.queued.store(0, Ordering::Relaxed);
        self.pending.store(false, Ordering::Release);
    }
}

impl<L: Outlet> Line<L> {
    /// Distributes a message, the `last` one, over the lanes.
    fn put(&mut self, split: &Split, header: &Header, payload: *const u8) {
        let encoded = header.encode();
        let lanes = if split.applies(header.length) { self.lanes.len() } else { 1 };
        for (index, lane) in self.lanes[..lanes].iter_mut().enumerate() {
            let range = split.part(header.length, index);
            if index > 0 && range.is_empty() {
                continue;
            }
            lane.parts.push_back(Part {
                ticket: self.last,
                header: (index == 0).then_some(encoded),
                payload: payload.wrapping_add(range.start as usize),
                length: (range.end - range.start) as usize,
                done: 0,
            });
        }
    }

    /// The last message of which a lane may send its part without getting ahead of the others.
    fn last_in_turn(&self, lane: usize) -> u64 {
        let others = self.lanes.iter().enumerate().filter(|&(other, _)| other != lane);
        others.filter_map(|(_, other)| other.parts.front()).map(|part| part.ticket).min().unwrap_or(u64::MAX)
    }

    /// The last message that is out on every lane.
    fn sent(&self) -> u64 {
        self.lanes.iter().filter_map(Lane::first).min().map_or(self.last, |ticket| ticket - 1)
    }
}

impl<L: Outlet> Lane<L> {
    /// Pushes what the lane takes of the messages up to `last`; how many bytes.
    fn push(&mut self, last: u64) -> Result<u64, LinkError> {
        let before = self.written;
        while self.parts.front().is_some_and(|part| part.ticket <= last) {
            // Clearing many takes longer than sending a small message should.
            let (mut few, mut many);
            let pieces: &mut [IoVec] = if self.parts.len() <= FEW {
                few = [NOTHING; 2 * FEW];
                &mut few
            } else {
                many = [NOTHING; GATHER];
                &mut many
            };
            let (count, total) = self.gather(pieces, last);
            // SAFETY: headers live in the line, which does not change during the call; payloads are valid by the promise that
            // their senders gave.
            let taken = unsafe { self.outlet.write(&pieces[..count]) }?;
            if self.settled < self.written || taken >= LASTING {
                let unsettled = self.outlet.unsettled()?;
                self.settled = self.written + taken as u64 - unsettled;
            } else {
                self.settled += taken as u64;
            }
            self.advance(taken);
            if taken < total {
                break;
            }
        }
        if self.written == before && self.settled < self.written {
            self.settled = self.written - self.outlet.unsettled()?;
        }
        while self.unsettled.front().is_some_and(|&(_, end)| end <= self.settled) {
            self.unsettled.pop_front();
        }
        Ok(self.written - before)
    }

    /// Whether something is in line, or the lane is not done with what went out.
    fn is_pending(&self) -> bool {
        !self.parts.is_empty() || !self.unsettled.is_empty()
    }

    /// The first message of which something is in line, or with which the lane is not done.
    fn first(&self) -> Option<u64> {
        let unsettled = self.unsettled.front().map(|&(ticket, _)| ticket);
        unsettled.or_else(|| self.parts.front().map(|part| part.ticket))
    }

    /// Names what is at the front of the line; how many pieces and bytes that is.
    fn gather(&self, pieces: &mut [IoVec], last: u64) -> (usize, usize) {
        let (mut count, mut total) = (0, 0);
        let parts = self.parts.iter().take_while(|part| part.ticket <= last);
        for (base, length) in parts.flat_map(Part::rest).filter(|&(_, length)| length > 0) {
            if count == pieces.len() || total == LARGEST_TRANSFER {
                break;
            }
            let length = length.min(LARGEST_TRANSFER - total);
            pieces[count] = IoVec { iov_base: base.cast_mut().cast(), iov_len: length };
            count += 1;
            total += length;
        }
        (count, total)
    }

    /// Takes from the line what is out.
    fn advance(&mut self, mut taken: usize) {
        let mut end = self.written;
        self.written += taken as u64;
        while let Some(part) = self.parts.front_mut() {
            let step = taken.min(part.size() - part.done);
            part.done += step;
            taken -= step;
            end += step as u64;
            if part.done < part.size() {
                break;
            }
            if end > self.settled {
                self.unsettled.push_back((part.ticket, end));
            }
            self.parts.pop_front();
        }
    }
}

impl Part {
    fn size(&self) -> usize {
        self.header.map_or(0, |header| header.len()) + self.length
    }

    /// What is left of the header and of the payload.
    fn rest(&self) -> [(*const u8, usize); 2] {
        let header = self.header.as_ref().map_or(&[][..], |header| &header[..]);
        let left = &header[self.done.min(header.len())..];
        let begun = self.done.saturating_sub(header.len());
        [(left.as_ptr(), left.len()), (self.payload.wrapping_add(begun), self.length - begun)]
    }
}
