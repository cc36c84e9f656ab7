//! The sending half of a queue pair.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use raccl_sys::abi;

use super::completion::{Batch, Clock};
use super::numbers::{EINVAL, ENOMEM};
use super::pair::{Link, Pair, PairObject, Peer};
use crate::cable_state::Harm;
use crate::channel::{CLAIMING, INLINE, LOST, STALLED, frames};
use crate::checksum::Sum;
use crate::device_state::Mistake;
use crate::mapping::now;
use crate::spec::Verb;

/// From here on it pays to look whether all staging is free, so that it is used from its beginning, which is in the
/// cache.
const LARGE: usize = 16 << 10;
/// Messages begin in staging at a multiple of this.
const ALIGN: u64 = 64;

/// Sends that have been posted and not completed, and where the rings stand.
#[derive(Default)]
pub(super) struct Sender {
    queue: VecDeque<Pending>,
    /// Of the depth, how much is taken.
    frames: u32,
    /// The next message's number.
    posted: u64,
    /// Messages below have been given their time.
    claimed: u64,
    /// Which of the peer's receives the next message is for.
    credit: u64,
    /// How many receives the peer is known to have posted.
    known: u64,
    /// Where in staging the next message goes.
    head: u64,
    /// How many messages the peer is known to have taken.
    taken: u64,
    /// Up to where staging is known to be free again.
    free: u64,
    /// By a fault, or after too long a silence, nothing is sent any more.
    stalled: bool,
}

/// A send that has not completed.
struct Pending {
    id: u64,
    frames: u32,
    signaled: bool,
    address: usize,
    len: usize,
    key: u32,
    sum: u64,
    /// What the regions' table was when the memory was found good.
    generation: u64,
    fate: Fate,
}

enum Fate {
    /// It is message number so much.
    Message(u64),
    /// It has been sent at that time.
    Sent(u64),
    /// It fails with that status.
    Fails(abi::ibv_wc_status),
    /// There is no peer: it never completes.
    Never,
}

/// `ibv_post_send`.
///
/// # Safety
///
/// `pair` is alive, `request` begins a list of work requests, `bad` can be written, and the memory that the requests
/// name stays as it is until they complete.
pub(super) unsafe extern "C" fn post_send(
    pair: *mut abi::ibv_qp,
    request: *mut abi::ibv_send_wr,
    bad: *mut *mut abi::ibv_send_wr,
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

fn post(pair: &Pair, request: &abi::ibv_send_wr, piece: Option<&abi::ibv_sge>) -> Result<(), i32> {
    if let Some(errno) = pair.context.injected(Verb::IbvPostSend) {
        return Err(errno);
    }
    let time = now();
    let Some(piece) = piece.filter(|_| request.num_sge == 1) else { return Err(EINVAL) };
    let known_flags = abi::IBV_SEND_SIGNALED;
    let len = piece.length as usize;
    if request.opcode != abi::IBV_WR_SEND
        || request.send_flags & !known_flags != 0
        || len > pair.context.fabric.spec.limits.message_bytes as usize
        || !pair.is_ready()
    {
        return Err(EINVAL);
    }
    let signaled = pair.signal_all || request.send_flags & abi::IBV_SEND_SIGNALED != 0;
    let mut pending = Pending {
        id: request.wr_id,
        frames: frames(len),
        signaled,
        address: piece.addr as usize,
        len,
        key: piece.lkey,
        sum: 0,
        generation: 0,
        fate: Fate::Never,
    };
    let mut sender = pair.sender.lock().unwrap_or_else(PoisonError::into_inner);
    if sender.frames + pending.frames > pair.send_depth {
        return Err(ENOMEM);
    }
    let regions = pair.context.regions.read().unwrap_or_else(PoisonError::into_inner);
    pending.generation = regions.generation;
    if !regions.allows(pair.domain.number, pending.key, pending.address, len) {
        pair.context.fabric.device(pair.context.device).mistake(Mistake::BadMemory);
        pending.fate = Fate::Fails(abi::IBV_WC_LOC_PROT_ERR);
    } else if let Some(link @ Link { peer: Some(peer), .. }) = pair.link() {
        sender.transmit(pair, link, peer, &mut pending, time)?;
    }
    drop(regions);
    sender.frames += pending.frames;
    sender.queue.push_back(pending);
    pair.sending.store(sender.queue.len(), Ordering::Release);
    if signaled {
        pair.send_queue.expect();
    }
    Ok(())
}

impl Sender {
    /// How many completions are due.
    pub(super) fn len(&self) -> usize {
        self.queue.iter().filter(|pending| pending.signaled).count()
    }

    /// Whether work with a memory region is posted.
    pub(super) fn uses(&self, key: u32) -> bool {
        self.queue.iter().any(|pending| pending.key == key)
    }

    /// Copies a message to where the peer finds it.
    fn transmit(
        &mut self,
        pair: &Pair,
        link: &Link,
        peer: &Peer,
        pending: &mut Pending,
        time: u64,
    ) -> Result<(), i32> {
        let (fabric, wire) = (&pair.context.fabric, &link.wire);
        let len = pending.len;
        let position = self.place(peer, len)?;
        let mut flags = 0;
        let mut corrupt = false;
        match fabric.cable(wire.cable).directions[wire.end].count() {
            None => {}
            Some((Harm::Lose, _)) => flags |= LOST,
            Some((Harm::Corrupt, _)) => corrupt = true,
            Some((Harm::Stall, _)) => self.stalled = true,
            Some((harm @ (Harm::Cut | Harm::Flap), length)) => {
                fabric.cable(wire.cable).go_down(harm, length, time);
            }
        }
        self.stalled |= pair.has_died_of_silence(time);
        pair.active(time);
        if self.stalled {
            flags |= STALLED;
        }
        let message = self.posted;
        let entry = pair.channel.entry(peer.ring, message);
        let parts = if len <= INLINE {
            [(entry.inline(), len), (std::ptr::null_mut(), 0)]
        } else {
            pair.channel.staged(peer.ring, position, len)
        };
        pending.sum = copy_out(pending.address, &parts, fabric.spec.rules.check_reuse);
        if corrupt && len > 0 {
            flip_a_bit(&parts, message);
        }
        entry.len.store(len as u32, Ordering::Relaxed);
        entry.flags.store(flags, Ordering::Relaxed);
        entry.position.store(position, Ordering::Relaxed);
        entry.credit.store(self.credit, Ordering::Relaxed);
        entry.posted_at.store(time, Ordering::Relaxed);
        self.advance(pair, link, peer, time);
        let mut end = 0;
        pending.fate = Fate::Message(message);
        if !self.stalled && self.claimed == message && self.has_credit(peer, self.credit) {
            let ready = time.max(peer.channel.announced_at(self.credit));
            if let Some(sent) = wire.claim_unseen(fabric, wire.end, len, ready, time) {
                end = sent;
                pending.fate = Fate::Sent(sent);
                self.claimed += 1;
            }
        }
        entry.end.store(end, Ordering::Relaxed);
        // From here on the peer sees it.
        entry.number.store(message + 1, Ordering::Release);
        self.posted += 1;
        if flags & LOST == 0 {
            self.credit += 1;
        }
        if len > INLINE {
            self.head = position + (len as u64).next_multiple_of(ALIGN);
        }
        Ok(())
    }

    /// Where in staging a message goes. There is always room, except behind messages that do not fit the receives
    /// they met.
    fn place(&mut self, peer: &Peer, len: usize) -> Result<u64, i32> {
        let ring = peer.ring;
        let need = if len > INLINE { (len as u64).next_multiple_of(ALIGN) } else { 0 };
        let has_room = |sender: &Sender| {
            sender.posted - sender.taken < ring.entries as u64
                && sender.head + need - sender.free <= ring.staging
        };
        if len >= LARGE || !has_room(self) {
            let (messages, bytes) = peer.channel.taken();
            self.taken = messages;
            // What was skipped below is free too, though the peer does not say so.
            self.free = self.free.max(bytes);
        }
        if self.taken == self.posted && need > 0 {
            // All of it is free: begin at its beginning.
            self.head = self.head.next_multiple_of(ring.staging);
            self.free = self.head;
        }
        if has_room(self) { Ok(self.head) } else { Err(ENOMEM) }
    }

    /// Whether the peer has posted receive number `credit` for this queue pair.
    #[inline]
    fn has_credit(&mut self, peer: &Peer, credit: u64) -> bool {
        if self.known <= credit {
            if peer.incoming().is_none() || peer.channel.is_gone() {
                return false;
            }
            self.known = peer.channel.announced();
        }
        self.known > credit
    }

    /// Gives messages that have met their receives their times, in order.
    fn advance(&mut self, pair: &Pair, link: &Link, peer: &Peer, now: u64) {
        while self.claimed < self.posted {
            let entry = pair.channel.entry(peer.ring, self.claimed);
            let end = entry.end.load(Ordering::Acquire);
            if end == CLAIMING || end == 0 && !self.claim(pair, link, peer, now) {
                return;
            }
            self.claimed += 1;
        }
    }

    fn claim(&mut self, pair: &Pair, link: &Link, peer: &Peer, now: u64) -> bool {
        let entry = pair.channel.entry(peer.ring, self.claimed);
        let credit = entry.credit.load(Ordering::Relaxed);
        if entry.flags.load(Ordering::Relaxed) & STALLED != 0 || !self.has_credit(peer, credit) {
            return false;
        }
        let ready = entry.posted_at.load(Ordering::Relaxed).max(peer.channel.announced_at(credit));
        link.wire.claim(&pair.context.fabric, link.wire.end, entry, ready, now).is_some()
    }

    /// Completes what is done, in order.
    pub(super) fn poll(&mut self, pair: &Pair, into: &mut Batch, clock: &mut Clock) {
        while let Some(front) = self.queue.front() {
            if into.is_full() {
                return;
            }
            let status = if pair.has_failed() {
                abi::IBV_WC_WR_FLUSH_ERR
            } else {
                match front.fate {
                    Fate::Never => return,
                    Fate::Fails(status) => {
                        pair.fail();
                        status
                    }
                    Fate::Sent(end) => match self.sent(pair, end, clock) {
                        Some(status) => status,
                        None => return,
                    },
                    Fate::Message(message) => {
                        let Some(link @ Link { peer: Some(peer), .. }) = pair.link() else { return };
                        self.advance(pair, link, peer, clock.now());
                        if self.claimed <= message {
                            return;
                        }
                        let end = pair.channel.entry(peer.ring, message).end.load(Ordering::Acquire);
                        match self.sent(pair, end, clock) {
                            Some(status) => status,
                            None => return,
                        }
                    }
                }
            };
            if let Some(done) = self.queue.pop_front() {
                pair.sending.store(self.queue.len(), Ordering::Release);
                self.frames -= done.frames;
                if done.signaled || status != abi::IBV_WC_SUCCESS {
                    into.push(pair, done.id, status, abi::IBV_WC_SEND, done.len as u32);
                }
            }
        }
    }

    /// How the first send of the queue ends, which has the time `end`; `None` while it has not.
    fn sent(&self, pair: &Pair, end: u64, clock: &mut Clock) -> Option<abi::ibv_wc_status> {
        let (front, link) = (self.queue.front()?, pair.link()?);
        let fabric = &pair.context.fabric;
        if clock.now() < end || link.wire.unsent(fabric, end) {
            return None;
        }
        if !fabric.spec.rules.check_reuse || front.is_as_posted(pair) {
            return Some(abi::IBV_WC_SUCCESS);
        }
        fabric.device(pair.context.device).mistake(Mistake::EarlyReuse);
        eprintln!(
            "raccl-emulator: the {} bytes of a send by queue pair {} were changed before it had completed",
            front.len, pair.number
        );
        pair.fail();
        Some(abi::IBV_WC_GENERAL_ERR)
    }
}

impl Pending {
    /// Whether the message's bytes are still those that were posted. Memory that has been deregistered since is not
    /// looked at: it may be gone.
    fn is_as_posted(&self, pair: &Pair) -> bool {
        let regions = pair.context.regions.read().unwrap_or_else(PoisonError::into_inner);
        if regions.generation != self.generation
            && !regions.allows(pair.domain.number, self.key, self.address, self.len)
        {
            return true;
        }
        let mut sum = Sum::default();
        // SAFETY: the memory is registered, and whoever registered it keeps it mapped until it no longer is, which
        // waits for the lock held here.
        unsafe { sum.add(std::ptr::with_exposed_provenance(self.address), std::ptr::null_mut(), self.len) };
        sum.value() == self.sum
    }
}

/// Copies a message from a program's memory into shared parts, and sums it up if wanted.
fn copy_out(from: usize, parts: &[(*mut u8, usize); 2], wants_sum: bool) -> u64 {
    let mut sum = Sum::default();
    let mut done = 0;
    for (to, len) in parts {
        let from = std::ptr::with_exposed_provenance::<u8>(from + done);
        if wants_sum {
            // SAFETY: the memory is registered, so the program keeps it mapped; the part is of our own file, and all
            // but the last are multiples of 64 bytes long.
            unsafe { sum.add(from, *to, *len) };
        } else if *len > 0 {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from, *to, *len) };
        }
        done += len;
    }
    sum.value()
}

/// Damages a message on its way, another place each time.
fn flip_a_bit(parts: &[(*mut u8, usize); 2], message: u64) {
    let len: usize = parts.iter().map(|part| part.1).sum();
    let mut at = (message as usize).wrapping_mul(7919) % len;
    for (start, part) in parts {
        if at < *part {
            // SAFETY: `at` lies in the part, which nobody else has yet.
            let byte = unsafe { start.add(at) };
            // SAFETY: as above.
            let value = unsafe { byte.read() };
            // SAFETY: as above.
            unsafe { byte.write(value ^ 1 << (message % 8)) };
            return;
        }
        at -= part;
    }
}
