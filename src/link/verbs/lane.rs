//! One cable as a pipe of bytes: packets over one queue pair or two, with credits, numbers and checksums.
//!
//! The stream is cut into packets. While as much is waiting as a bulk packet holds, bulk packets go out on the bulk queue pair,
//! each of exactly as many frames as the receives posted there; the rest goes in packets of one frame on the small queue pair.
//! So both sides of a queue pair always speak of messages of the same number of frames, and nothing is padded. Numbers put the
//! packets of the two queue pairs in order again.
//!
//! **Credits.** Each side counts the receives that it has posted, in all, and says so in every packet. A packet is sent only when
//! fewer have been sent on its queue pair than the peer has posted receives there, so no send ever meets no receive. Packets
//! that say nothing else go out when much is owed; a few receives of the small queue pair are reserved for them.
//!
//! **Who holds what.** `tx` is held by whoever sends: a thread that writes, or the reader returning credits, who only tries.
//! `rx` is held by whoever reads or polls; a writer in need of completions only tries. So nobody who holds one waits for the
//! other. Counts that both look at are atomics: `granted` and `done` are written under `rx` and read under `tx`; `posted` is
//! written under `rx` and `told` under `tx`, both read by either. Only the sums matter and each has one writer at a time, but a
//! slot is written again after its completion was seen, so `done` is stored with release and read with acquire.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use raccl_sys::{Completion, CompletionQueue, MemoryRegion, QueuePair, ReadyToSend};

use super::{
    crc32c::crc32c_raw,
    hold::Hold,
    packet::{Kind, PACKET_BYTES, Packet},
    source::Source,
};
use crate::{
    error::Cause,
    link::{LinkError, stripe},
    os::IoVec,
};

/// What Apple's driver counts queue depths in.
pub(super) const FRAME: usize = 4096;
/// The class of packets of one frame, and that of packets of many.
pub(super) const SMALL: usize = 0;
pub(super) const BULK: usize = 1;

/// Receives of the small queue pair that the stream leaves to credits and to the end.
const RESERVED: i32 = 3;
/// How often the port is looked at while nothing comes.
const LOOK: Duration = Duration::from_millis(250);
/// Reads that find nothing between two looks at the clock.
const IDLE_READS: u32 = 1024;
/// Completions taken at a time.
const BATCH: usize = 16;

/// What went wrong on a cable.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("cable {cable}: packet {expected} was lost, {got} came instead; check the cable")]
    Lost { cable: String, expected: u32, got: u32 },
    #[error("cable {cable}: a packet came damaged: {what}; check the cable")]
    Damaged { cable: String, what: String },
}

/// The queue pair of a class and its slots in registered memory.
pub(super) struct Class {
    pub(super) pair: QueuePair<ReadyToSend>,
    /// Bytes of a slot, header included; a packet of the bulk class has exactly as many.
    pub(super) slot_bytes: usize,
    /// Where the slots begin in the region.
    pub(super) send_at: usize,
    pub(super) recv_at: usize,
    /// How many there are, powers of two.
    pub(super) send_slots: u32,
    pub(super) recv_slots: u32,
    /// Receives that the peer has posted so far.
    pub(super) granted: AtomicU32,
    /// Our receives posted so far, and how many of them the peer has been told of.
    pub(super) posted: AtomicU32,
    pub(super) told: AtomicU32,
    /// Our sends that have completed.
    pub(super) done: AtomicU32,
}

/// What a lane is made of.
pub(super) struct Parts {
    /// Names the cable in errors: the device here, the peer, the device there.
    pub(super) cable: String,
    pub(super) queue: CompletionQueue,
    pub(super) region: MemoryRegion,
    /// The small class, and the bulk class if the lane has it.
    pub(super) classes: Vec<Class>,
    /// Numbers that begin the header sums of what goes out and of what comes in.
    pub(super) out_number: u32,
    pub(super) in_number: u32,
    /// Payloads are summed too.
    pub(super) sums: bool,
}

/// One cable to one peer.
pub(crate) struct Lane {
    parts: Parts,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    /// Dropped after all else.
    _hold: Arc<Hold>,
}

#[derive(Default)]
struct Tx {
    /// Packets sent, by class.
    sent: [u32; 2],
    /// Packets of the stream.
    sequence: u32,
    ended: bool,
    /// What `sent` was when the cable was last kept alive.
    noted: [u32; 2],
}

struct Rx {
    /// Packets that came, by class.
    turns: [u32; 2],
    /// Packets of the stream that have not been read, by class.
    arrived: [VecDeque<Arrived>; 2],
    /// Slots of the small class that were read and are not posted again yet: that waits until nothing else is to be done, since
    /// somebody waits for what was read.
    unposted: Vec<u32>,
    /// The next packet of the stream.
    sequence: u32,
    failure: Option<LinkError>,
    /// Where completions are put.
    done: [Completion; BATCH],
    idle: u32,
    looked: Instant,
}

/// A packet that lies in its slot.
struct Arrived {
    slot: u32,
    sequence: u32,
    end: bool,
    /// Where in the slot the unread bytes begin and end.
    at: usize,
    until: usize,
    /// To be compared before the first byte is read.
    sum: Option<u32>,
}

impl Lane {
    /// A lane of queue pairs that are ready and have no receives yet. Posts them all.
    pub(super) fn new(parts: Parts, hold: Arc<Hold>) -> Result<Lane, LinkError> {
        let rx = Rx {
            turns: [0; 2],
            arrived: Default::default(),
            unposted: Vec::new(),
            done: [Completion::default(); BATCH],
            sequence: 0,
            failure: None,
            idle: 0,
            looked: Instant::now(),
        };
        let lane = Lane { parts, tx: Mutex::default(), rx: Mutex::new(rx), _hold: hold };
        for (index, class) in lane.parts.classes.iter().enumerate() {
            for slot in 0..class.recv_slots {
                lane.post_receive(index, slot)?;
            }
            // The peer knows of these from the bring-up.
            class.told.store(class.recv_slots, Ordering::Relaxed);
        }
        Ok(lane)
    }

    /// Names the cable.
    pub(super) fn cable(&self) -> &str {
        &self.parts.cable
    }

    /// What tells the directions from those of all other cables: out and in.
    pub(super) fn numbers(&self) -> (u32, u32) {
        (self.parts.out_number, self.parts.in_number)
    }

    /// Before anything was sent: how much of the stream fills all bulk receives of the peer, and of this side, and some small
    /// bytes that make both queue pairs used. What is out at one end is in at the other.
    pub(super) fn windows(&self) -> (usize, usize) {
        let window = |receives: fn(&Class) -> u32| {
            let bulk = self.parts.classes.get(BULK);
            bulk.map_or(0, |class| receives(class) as usize * bulk_payload(class)) + FRAME / 2
        };
        (window(|class| class.granted.load(Ordering::Relaxed)), window(|class| class.recv_slots))
    }

    /// Takes bytes from the front of `pieces`; how many.
    ///
    /// # Safety
    /// Every piece is valid for reads of its length during the call.
    pub(super) unsafe fn write(&self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let mut tx = self.tx.lock();
        let mut source = Source::new(pieces);
        let total = source.left;
        while source.left > 0 {
            let class = match self.parts.classes.get(BULK) {
                Some(bulk) if source.left >= bulk_payload(bulk) => BULK,
                _ => SMALL,
            };
            let reserve = if class == SMALL { RESERVED } else { 0 };
            if !self.has_room(&tx, class, reserve) {
                self.poll_if_free()?;
                if !self.has_room(&tx, class, reserve) {
                    break;
                }
            }
            // SAFETY: the caller keeps the pieces valid.
            unsafe { self.send_stream(&mut tx, class, &mut source) }?;
        }
        Ok(total - source.left)
    }

    /// Fills `pieces` from the front with what has arrived.
    ///
    /// # Safety
    /// Every piece is valid for writes of its length during the call.
    pub(super) unsafe fn read(&self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        let mut rx = self.rx.lock();
        let mut filled = 0;
        let mut ended = false;
        'pieces: for piece in pieces {
            let mut done = 0;
            while done < piece.iov_len {
                let Some(class) = self.front(&mut rx)? else { break 'pieces };
                let Some(packet) = rx.arrived[class].front_mut() else { break 'pieces };
                if packet.end {
                    ended = true;
                    break 'pieces;
                }
                let from = self.receive_slot(class, packet.slot);
                if let Some(expected) = packet.sum.take() {
                    // SAFETY: the slot is as long as the packet, and nothing is posted there until it has been read.
                    let sum =
                        unsafe { crc32c_raw(0, from.wrapping_add(packet.at), packet.until - packet.at) };
                    if sum != expected {
                        let what = "the checksum of its payload is wrong".to_owned();
                        return Err(
                            self.fail(&mut rx, Fault::Damaged { cable: self.parts.cable.clone(), what })
                        );
                    }
                }
                let count = (packet.until - packet.at).min(piece.iov_len - done);
                let to = piece.iov_base.cast::<u8>().wrapping_add(done);
                // SAFETY: the slot holds the packet, whose unread bytes are at least so many, and the caller keeps the piece
                // writable, which is never registered memory of ours.
                unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(packet.at), to, count) };
                packet.at += count;
                done += count;
                filled += count;
                if packet.at == packet.until {
                    let slot = packet.slot;
                    rx.arrived[class].pop_front();
                    rx.sequence = rx.sequence.wrapping_add(1);
                    self.free(&mut rx, class, slot).inspect_err(|error| rx.failure = Some(error.clone()))?;
                }
            }
        }
        if filled == 0 && !rx.unposted.is_empty() {
            self.post_unposted(&mut rx).inspect_err(|error| rx.failure = Some(error.clone()))?;
        }
        self.return_credits()?;
        if filled > 0 {
            rx.idle = 0;
            return Ok(stripe::Read::Bytes(filled));
        }
        if ended {
            return Ok(stripe::Read::End);
        }
        self.look_at_port(&mut rx)?;
        Ok(stripe::Read::Empty)
    }

    /// Tells the peer that the stream has ended, if that can be told, and waits until all that was sent has left.
    pub(super) fn end(&self, patience: Duration) -> Result<(), LinkError> {
        let until = Instant::now() + patience;
        loop {
            let mut tx = self.tx.lock();
            self.poll_if_free()?;
            if !tx.ended && self.has_room(&tx, SMALL, 0) {
                let sequence = tx.sequence;
                self.send(&mut tx, SMALL, Packet { kind: Kind::End, sequence, ..EMPTY })?;
                tx.ended = true;
            }
            let left = |(index, class): (usize, &Class)| class.done.load(Ordering::Acquire) == tx.sent[index];
            if tx.ended && self.parts.classes.iter().enumerate().all(left) || Instant::now() >= until {
                return Ok(());
            }
            drop(tx);
            std::thread::yield_now();
        }
    }

    /// Says a word on each queue pair on which nothing has been said since the last call, unless somebody is sending, and posts
    /// again the receives for the peer's words.
    pub(super) fn keep_alive(&self) -> Result<(), LinkError> {
        self.poll_if_free()?;
        let Some(mut tx) = self.tx.try_lock() else { return Ok(()) };
        for (index, class) in self.parts.classes.iter().enumerate() {
            let reserve = if index == SMALL { RESERVED } else { 0 };
            if tx.sent[index] == tx.noted[index] && !tx.ended && self.has_room(&tx, index, reserve) {
                let word = match index {
                    SMALL => EMPTY,
                    // A packet is shorter than 4 GiB.
                    _ => Packet { kind: Kind::Idle, bytes: bulk_payload(class) as u32, ..EMPTY },
                };
                self.send(&mut tx, index, word)?;
            }
            tx.noted[index] = tx.sent[index];
        }
        Ok(())
    }

    /// Packets sent so far, modulo 2^32.
    pub(super) fn packets_sent(&self) -> u64 {
        self.tx.lock().sent.into_iter().fold(0, u32::wrapping_add).into()
    }

    /// Packets that have come so far, modulo 2^32. Waits while somebody else reads, which is not long.
    pub(super) fn packets_arrived(&self) -> u64 {
        let mut rx = self.rx.lock();
        // Whoever reads is told of a failure, which stays.
        let _ = self.poll(&mut rx);
        rx.turns.into_iter().fold(0, u32::wrapping_add).into()
    }

    /// Whether a packet of the class can be sent and leaves `reserve` receives of the peer for others.
    fn has_room(&self, tx: &Tx, class: usize, reserve: i32) -> bool {
        let (sent, class) = (tx.sent[class], &self.parts.classes[class]);
        sent.wrapping_sub(class.done.load(Ordering::Acquire)) < class.send_slots
            && class.granted.load(Ordering::Relaxed).wrapping_sub(sent).cast_signed() > reserve
    }

    /// Sends the next packet of the stream.
    ///
    /// # Safety
    /// The source's pieces are valid for reads, and there is room.
    unsafe fn send_stream(
        &self,
        tx: &mut Tx,
        class: usize,
        source: &mut Source<'_>,
    ) -> Result<(), LinkError> {
        let parts = &self.parts.classes[class];
        let bytes = source.left.min(parts.slot_bytes - PACKET_BYTES);
        let to = self.send_slot(class, tx.sent[class]).wrapping_add(PACKET_BYTES);
        // SAFETY: the slot is registered memory of ours, long enough, and its last send has completed.
        unsafe { source.copy(to, bytes) };
        // SAFETY: the bytes were just written there.
        let payload_sum = self.parts.sums.then(|| unsafe { crc32c_raw(0, to, bytes) });
        let sequence = tx.sequence;
        // A packet is shorter than 4 GiB.
        let packet = Packet { kind: Kind::Stream, bytes: bytes as u32, sequence, payload_sum, ..EMPTY };
        self.send(tx, class, packet)?;
        tx.sequence = sequence.wrapping_add(1);
        Ok(())
    }

    /// Writes a packet's header in front of its payload and posts both. There is room.
    fn send(&self, tx: &mut Tx, class: usize, mut packet: Packet) -> Result<(), LinkError> {
        for (index, class) in self.parts.classes.iter().enumerate() {
            packet.posted[index] = class.posted.load(Ordering::Relaxed);
            class.told.store(packet.posted[index], Ordering::Relaxed);
        }
        packet.turn = tx.sent[class];
        let header = packet.encode(self.parts.out_number);
        let to = self.send_slot(class, packet.turn);
        // SAFETY: the slot is registered memory of ours, longer than a header, and its last send has completed.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), to, PACKET_BYTES) };
        let parts = &self.parts.classes[class];
        let offset = to.addr() - self.parts.region.as_ptr().addr();
        let span = self.parts.region.span(offset, PACKET_BYTES + packet.bytes as usize).map_err(sending)?;
        let id = identity(SEND, class, packet.turn);
        // SAFETY: the slot is not written again before the completion, and the queue pair keeps the region.
        unsafe { parts.pair.post_send(id, span) }.map_err(sending)?;
        tx.sent[class] = packet.turn.wrapping_add(1);
        Ok(())
    }

    /// Says how many receives have been posted, if the peer does not know of many of them and nobody else is sending.
    fn return_credits(&self) -> Result<(), LinkError> {
        let due = |class: &Class| {
            let owed = class.posted.load(Ordering::Relaxed).wrapping_sub(class.told.load(Ordering::Relaxed));
            owed >= (class.recv_slots / 4).max(1)
        };
        if !self.parts.classes.iter().any(due) {
            return Ok(());
        }
        let Some(mut tx) = self.tx.try_lock() else { return Ok(()) };
        // One receive stays for the end.
        if !tx.ended && self.has_room(&tx, SMALL, 1) {
            self.send(&mut tx, SMALL, Packet { kind: Kind::Credit, ..EMPTY })?;
        }
        Ok(())
    }

    /// The class of the packet that is next in the stream, if it has arrived.
    fn front(&self, rx: &mut Rx) -> Result<Option<usize>, LinkError> {
        let find = |rx: &Rx| {
            let is_next = |class: &usize| {
                rx.arrived[*class].front().is_some_and(|packet| packet.sequence == rx.sequence)
            };
            [SMALL, BULK].into_iter().find(is_next)
        };
        if let Some(class) = find(rx) {
            return Ok(Some(class));
        }
        self.poll(rx)?;
        let found = find(rx);
        if let (None, [Some(a), Some(b)]) = (found, [rx.arrived[SMALL].front(), rx.arrived[BULK].front()]) {
            let (expected, got) = (rx.sequence, a.sequence.min(b.sequence));
            return Err(self.fail(rx, Fault::Lost { cable: self.parts.cable.clone(), expected, got }));
        }
        Ok(found)
    }

    /// Polls unless somebody else does.
    fn poll_if_free(&self) -> Result<(), LinkError> {
        self.rx.try_lock().map_or(Ok(()), |mut rx| self.poll(&mut rx))
    }

    /// Takes all completions.
    fn poll(&self, rx: &mut Rx) -> Result<(), LinkError> {
        if let Some(failure) = &rx.failure {
            return Err(failure.clone());
        }
        loop {
            let count = self.parts.queue.poll(&mut rx.done).map_err(receiving);
            let count = count.inspect_err(|error| rx.failure = Some(error.clone()))?;
            for index in 0..count {
                let completion = rx.done[index];
                self.completed(rx, &completion).inspect_err(|error| rx.failure = Some(error.clone()))?;
            }
            if count < BATCH {
                return Ok(());
            }
        }
    }

    fn completed(&self, rx: &mut Rx, completion: &Completion) -> Result<(), LinkError> {
        let (kind, index, slot) = parse(completion.id());
        let checked = completion.check(self.parts.queue.context());
        let Some(class) = self.parts.classes.get(index) else {
            return Err(self.damaged(format!(
                "the driver completes request {:#x}, which was not made",
                completion.id()
            )));
        };
        if kind == SEND {
            checked.map_err(sending)?;
            class.done.store(slot.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        checked.map_err(receiving)?;
        let mut header = [0; PACKET_BYTES];
        if completion.bytes() < PACKET_BYTES || slot >= class.recv_slots {
            return Err(self.damaged(format!("it has {} bytes", completion.bytes())));
        }
        // SAFETY: the slot is longer than a header, and its receive has completed, so the device does not write there.
        unsafe {
            std::ptr::copy_nonoverlapping(self.receive_slot(index, slot), header.as_mut_ptr(), PACKET_BYTES)
        };
        let packet = Packet::decode(&header, self.parts.in_number).map_err(|what| self.damaged(what))?;
        let until = PACKET_BYTES + packet.bytes as usize;
        if until != completion.bytes() || until > class.slot_bytes {
            return Err(
                self.damaged(format!("its header says {until} bytes, and {} came", completion.bytes()))
            );
        }
        let expected = rx.turns[index];
        if packet.turn != expected {
            let cable = self.parts.cable.clone();
            return Err(receiving(Fault::Lost { cable, expected, got: packet.turn }));
        }
        rx.turns[index] = expected.wrapping_add(1);
        for (class, posted) in self.parts.classes.iter().zip(packet.posted) {
            // A packet of the other queue pair may have said more already.
            if posted.wrapping_sub(class.granted.load(Ordering::Relaxed)).cast_signed() > 0 {
                class.granted.store(posted, Ordering::Relaxed);
            }
        }
        if matches!(packet.kind, Kind::Credit | Kind::Idle) {
            return self.post_receive(index, slot);
        }
        rx.arrived[index].push_back(Arrived {
            slot,
            sequence: packet.sequence,
            end: packet.kind == Kind::End,
            at: PACKET_BYTES,
            until,
            sum: packet.payload_sum,
        });
        Ok(())
    }

    /// Posts the receive of a slot that was read again, now or soon.
    fn free(&self, rx: &mut Rx, index: usize, slot: u32) -> Result<(), LinkError> {
        let most = (self.parts.classes[SMALL].recv_slots / 8) as usize;
        if index == SMALL && rx.unposted.len() < most {
            rx.unposted.push(slot);
            return Ok(());
        }
        self.post_receive(index, slot)?;
        if index == SMALL { self.post_unposted(rx) } else { Ok(()) }
    }

    fn post_unposted(&self, rx: &mut Rx) -> Result<(), LinkError> {
        while let Some(slot) = rx.unposted.pop() {
            self.post_receive(SMALL, slot)?;
        }
        Ok(())
    }

    fn post_receive(&self, index: usize, slot: u32) -> Result<(), LinkError> {
        let class = &self.parts.classes[index];
        let offset = class.recv_at + slot as usize * class.slot_bytes;
        let span = self.parts.region.span(offset, class.slot_bytes).map_err(receiving)?;
        // SAFETY: what the slot held has been read, nothing looks at it before the completion, and the queue pair keeps the
        // region. No more are posted than the queue is deep.
        unsafe { class.pair.post_recv(identity(RECEIVE, index, slot), span) }.map_err(receiving)?;
        class.posted.store(class.posted.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        Ok(())
    }

    /// Asks the device from time to time whether the cable is still there, since a receive that never comes says nothing.
    fn look_at_port(&self, rx: &mut Rx) -> Result<(), LinkError> {
        rx.idle += 1;
        if rx.idle < IDLE_READS {
            return Ok(());
        }
        rx.idle = 0;
        let now = Instant::now();
        if now - rx.looked < LOOK {
            return Ok(());
        }
        rx.looked = now;
        match self.parts.queue.context().active_port(PORT) {
            Ok(_) => Ok(()),
            Err(error) => {
                let failure = receiving(error);
                rx.failure = Some(failure.clone());
                Err(failure)
            }
        }
    }

    fn send_slot(&self, class: usize, turn: u32) -> *mut u8 {
        let class = &self.parts.classes[class];
        let slot = (turn % class.send_slots) as usize;
        self.parts.region.as_ptr().wrapping_add(class.send_at + slot * class.slot_bytes)
    }

    fn receive_slot(&self, class: usize, slot: u32) -> *const u8 {
        let class = &self.parts.classes[class];
        self.parts.region.as_ptr().wrapping_add(class.recv_at + slot as usize * class.slot_bytes)
    }

    fn fail(&self, rx: &mut Rx, fault: Fault) -> LinkError {
        let failure = receiving(fault);
        rx.failure = Some(failure.clone());
        failure
    }

    fn damaged(&self, what: String) -> LinkError {
        receiving(Fault::Damaged { cable: self.parts.cable.clone(), what })
    }
}

/// Every device has one port.
pub(super) const PORT: u8 = 1;

/// Bytes of the stream in a bulk packet.
fn bulk_payload(class: &Class) -> usize {
    class.slot_bytes - PACKET_BYTES
}

/// A packet of which nothing is said yet.
const EMPTY: Packet =
    Packet { kind: Kind::Credit, bytes: 0, sequence: 0, turn: 0, posted: [0; 2], payload_sum: None };

const SEND: u8 = 1;
const RECEIVE: u8 = 2;

/// The number of a work request: what it is, its class, and the turn of a send or the slot of a receive.
fn identity(kind: u8, class: usize, number: u32) -> u64 {
    u64::from(kind) << 40 | (class as u64) << 32 | u64::from(number)
}

fn parse(identity: u64) -> (u8, usize, u32) {
    ((identity >> 40) as u8, (identity >> 32) as usize & 0xFF, identity as u32)
}

fn sending(source: impl std::error::Error + Send + Sync + 'static) -> LinkError {
    LinkError::Broken { what: "sending through a cable", source: Cause::new(source) }
}

fn receiving(source: impl std::error::Error + Send + Sync + 'static) -> LinkError {
    LinkError::Broken { what: "receiving through a cable", source: Cause::new(source) }
}
