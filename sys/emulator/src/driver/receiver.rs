//! The receiving half of a queue pair.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use raccl_sys::abi;

use super::completion::{Batch, Clock};
use super::numbers::{EINVAL, ENOMEM};
use super::pair::{Link, Pair, PairObject, Peer};
use crate::channel::{CLAIMING, Entry, INLINE, LOST, STALLED, frames};
use crate::device_state::Mistake;
use crate::mapping::now;
use crate::spec::{Overrun, Verb};

/// Receives that have been posted and not completed, and where the peer's ring stands.
#[derive(Default)]
pub(super) struct Receiver {
    queue: VecDeque<Posted>,
    /// Of the depth, how much is taken.
    frames: u32,
    /// How many have been announced to the peer.
    announced: u64,
    /// The next message's number, as in [`Next`].
    cursor: u64,
    /// Up to where the peer's staging has been taken.
    bytes: u64,
    /// It was posted more than it bears, and receives nothing any more.
    stalled: bool,
}

/// A receive that has not completed.
struct Posted {
    id: u64,
    frames: u32,
    address: usize,
    len: usize,
    key: u32,
    time: u64,
    /// What the regions' table was when the memory was found good; `None` when it was not.
    generation: Option<u64>,
}

/// The message that is next, for polls that look before they take the receiver's lock: most find nothing.
///
/// Both fields are written under that lock. Who looks without it may see them as they were before a poll that another
/// thread is making, and finds what it would have found then.
#[derive(Default)]
pub(super) struct Next {
    number: AtomicU64,
    /// When it arrives, once it is on its way; 0 before.
    due: AtomicU64,
}

impl Next {
    /// Whether it has not arrived yet.
    #[inline]
    pub(super) fn is_to_come(&self, pair: &Pair, clock: &mut Clock) -> bool {
        let due = self.due.load(Ordering::Relaxed);
        if due > 0 {
            return clock.now() < due;
        }
        let Some(Link { peer: Some(peer), .. }) = pair.link() else { return true };
        let Some(ring) = peer.incoming() else { return true };
        let number = self.number.load(Ordering::Relaxed);
        peer.channel.entry(ring, number).number.load(Ordering::Acquire) != number + 1
    }
}

/// `ibv_post_recv`.
///
/// # Safety
///
/// `pair` is alive, `request` begins a list of work requests, `bad` can be written, and the memory that the requests
/// name is not touched until they complete.
pub(super) unsafe extern "C" fn post_recv(
    pair: *mut abi::ibv_qp,
    request: *mut abi::ibv_recv_wr,
    bad: *mut *mut abi::ibv_recv_wr,
) -> c_int {
    // SAFETY: the pointer is of a box that `create_qp` made.
    let pair = unsafe { &(*pair.cast::<PairObject>()).pair };
    let mut next = request;
    // SAFETY: the caller's list: each is null or a request that stays for the call.
    while let Some(request) = unsafe { next.as_ref() } {
        // SAFETY: a request has as many pieces as it says; `post` takes it only where that is one.
        let piece = unsafe { request.sg_list.as_ref() };
        if let Err(errno) = post(pair, request, piece) {
            // SAFETY: the caller's pointer can be written.
            unsafe { bad.write(next) };
            return errno;
        }
        next = request.next;
    }
    0
}

fn post(pair: &Pair, request: &abi::ibv_recv_wr, piece: Option<&abi::ibv_sge>) -> Result<(), i32> {
    if let Some(errno) = pair.context.injected(Verb::IbvPostRecv) {
        return Err(errno);
    }
    let Some(piece) = piece.filter(|_| request.num_sge == 1) else { return Err(EINVAL) };
    let len = piece.length as usize;
    let (fabric, device) = (&pair.context.fabric, pair.context.device);
    if len > fabric.spec.limits.message_bytes as usize || !pair.is_ready() {
        return Err(EINVAL);
    }
    let mut posted = Posted {
        id: request.wr_id,
        frames: frames(len),
        address: piece.addr as usize,
        len,
        key: piece.lkey,
        time: now(),
        generation: None,
    };
    let mut receiver = pair.receiver.lock().unwrap_or_else(PoisonError::into_inner);
    let total = receiver.frames + posted.frames;
    if total > pair.recv_depth {
        fabric.device(device).mistake(Mistake::Overrun);
        match fabric.spec.rules.overrun {
            Overrun::Refuse => return Err(-ENOMEM),
            Overrun::Stall => receiver.stalled = true,
        }
    }
    if fabric.spec.rules.unreliable_beyond.is_some_and(|most| posted.frames > 1 && total > most) {
        receiver.stalled = true;
    }
    let regions = pair.context.regions.read().unwrap_or_else(PoisonError::into_inner);
    if regions.allows(pair.domain.number, posted.key, posted.address, len) {
        posted.generation = Some(regions.generation);
    } else {
        fabric.device(device).mistake(Mistake::BadMemory);
    }
    drop(regions);
    receiver.frames = total;
    if !receiver.stalled {
        pair.channel.announce(receiver.announced, posted.time);
        receiver.announced += 1;
    }
    receiver.queue.push_back(posted);
    pair.recv_queue.expect();
    Ok(())
}

impl Receiver {
    /// How many completions are due.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether work with a memory region is posted.
    pub(super) fn uses(&self, key: u32) -> bool {
        self.queue.iter().any(|posted| posted.key == key)
    }

    /// Completes what has arrived, in order.
    pub(super) fn poll(&mut self, pair: &Pair, into: &mut Batch, clock: &mut Clock) {
        while !into.is_full() && !self.queue.is_empty() {
            if pair.has_failed() {
                if let Some(posted) = self.pop() {
                    into.push(pair, posted.id, abi::IBV_WC_WR_FLUSH_ERR, abi::IBV_WC_RECV, 0);
                }
                continue;
            }
            let Some(link @ Link { peer: Some(peer), .. }) = pair.link() else { return };
            let Some(ring) = peer.incoming() else { return };
            if self.stalled {
                return;
            }
            let entry = peer.channel.entry(ring, self.cursor);
            if entry.number.load(Ordering::Acquire) != self.cursor + 1 {
                return;
            }
            let Some(sent) = self.time_of(pair, link, peer, entry, clock) else { return };
            let due = sent.saturating_add(link.wire.latency);
            if clock.now() < due {
                pair.next.due.store(due, Ordering::Relaxed);
                peer.channel.fetch(ring, entry);
                return;
            }
            self.take(pair, link, peer, entry, sent, into);
        }
    }

    /// When the next message was sent; `None` while it is not.
    fn time_of(
        &self,
        pair: &Pair,
        link: &Link,
        peer: &Peer,
        entry: &Entry,
        clock: &mut Clock,
    ) -> Option<u64> {
        let end = entry.end.load(Ordering::Acquire);
        if end > CLAIMING {
            return Some(end);
        }
        let stalled = entry.flags.load(Ordering::Relaxed) & STALLED != 0;
        if end == CLAIMING || stalled || peer.channel.is_gone() {
            return None;
        }
        let ready = entry.posted_at.load(Ordering::Relaxed).max(self.queue.front()?.time);
        link.wire.claim(&pair.context.fabric, 1 - link.wire.end, entry, ready, clock.now())
    }

    /// Takes the next message, which has arrived unless it was lost.
    fn take(&mut self, pair: &Pair, link: &Link, peer: &Peer, entry: &Entry, sent: u64, into: &mut Batch) {
        let len = entry.len.load(Ordering::Relaxed) as usize;
        let position = entry.position.load(Ordering::Relaxed);
        pair.active(sent.saturating_add(link.wire.latency));
        let on_the_way = link.wire.lost(&pair.context.fabric, len, sent);
        if on_the_way {
            // Its receive stays for another.
            pair.channel.give_back();
        } else if entry.flags.load(Ordering::Relaxed) & LOST == 0
            && let Some(posted) = self.pop()
        {
            let status = deliver(pair, peer, entry, &posted, len, position);
            if status != abi::IBV_WC_SUCCESS {
                pair.fail();
            }
            into.push(pair, posted.id, status, abi::IBV_WC_RECV, len as u32);
        }
        self.cursor += 1;
        pair.next.number.store(self.cursor, Ordering::Relaxed);
        pair.next.due.store(0, Ordering::Relaxed);
        if len > INLINE {
            self.bytes = position + (len as u64).next_multiple_of(64);
        }
        pair.channel.consume(self.cursor, self.bytes);
    }

    fn pop(&mut self) -> Option<Posted> {
        let posted = self.queue.pop_front()?;
        self.frames -= posted.frames;
        Some(posted)
    }
}

/// Copies a message to where its receive wants it.
fn deliver(
    pair: &Pair,
    peer: &Peer,
    entry: &Entry,
    posted: &Posted,
    len: usize,
    position: u64,
) -> abi::ibv_wc_status {
    if frames(len) != posted.frames || len > posted.len {
        pair.context.fabric.device(pair.context.device).mistake(Mistake::FrameMismatch);
        return abi::IBV_WC_LOC_LEN_ERR;
    }
    let regions = pair.context.regions.read().unwrap_or_else(PoisonError::into_inner);
    let good = posted.generation.is_some_and(|generation| {
        generation == regions.generation
            || regions.allows(pair.domain.number, posted.key, posted.address, posted.len)
    });
    if !good {
        return abi::IBV_WC_LOC_PROT_ERR;
    }
    let Some(ring) = peer.incoming() else { return abi::IBV_WC_GENERAL_ERR };
    let parts = if len <= INLINE {
        [(entry.inline(), len), (std::ptr::null_mut(), 0)]
    } else {
        peer.channel.staged(ring, position, len)
    };
    let mut done = 0;
    for (from, len) in parts {
        if len > 0 {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(posted.address + done);
            // SAFETY: the receive's memory is registered, so the program keeps it mapped until it no longer is, which
            // waits for the lock held here, and leaves it alone until the completion; the message fits it. The part
            // is of the peer's file and not written again until the message has been taken.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
            done += len;
        }
    }
    abi::IBV_WC_SUCCESS
}
