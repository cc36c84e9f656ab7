//! One cable as a pipe of bytes: packets over one queue pair or two, in order again.
//!
//! The stream is cut into packets. While as much is waiting as a bulk packet holds, bulk packets go out on the bulk queue pair,
//! each of exactly as many frames as the receives posted there; the rest goes in packets of one frame on the small queue pair.
//! So both sides of a queue pair always speak of messages of the same number of frames, and nothing is padded. Numbers put the
//! packets of the two queue pairs in order again.
//!
//! **Who holds what.** `tx` is held by whoever sends: a thread that writes, or the reader returning credits, who only tries.
//! `rx` is held by whoever reads or polls; a writer in need of completions only tries. So nobody who holds one waits for the
//! other. What both look at is in the [`Wire`].

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use raccl_sys::Completion;

use super::{
    crc32c::crc32c_raw,
    hold::Hold,
    keeper::Kept,
    packet::{Kind, PACKET_BYTES, Packet},
    source::Source,
    wire::{BATCH, BULK, Came, Class, FRAME, RESERVED, SMALL, Wire},
};
use crate::{
    link::{LinkError, stripe},
    os::IoVec,
};

/// How often the port is looked at while nothing comes.
const LOOK: Duration = Duration::from_millis(250);
/// Reads that find nothing between two looks at the clock.
const IDLE_READS: u32 = 1024;
/// One cable to one peer.
pub(crate) struct Lane {
    wire: Wire,
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
    pub(super) fn new(wire: Wire, hold: Arc<Hold>) -> Result<Lane, LinkError> {
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
        let lane = Lane { wire, tx: Mutex::default(), rx: Mutex::new(rx), _hold: hold };
        for (index, class) in lane.wire.classes.iter().enumerate() {
            for slot in 0..class.recv_slots {
                lane.wire.post_receive(index, slot)?;
            }
            // The peer knows of these from the bring-up.
            class.told.store(class.recv_slots, Ordering::Relaxed);
        }
        Ok(lane)
    }

    /// The cable itself, with the packets that were sent and that came, by class. Nothing of the stream is waiting.
    pub(super) fn into_wire(self) -> Result<(Wire, [u32; 2], [u32; 2]), LinkError> {
        self.post_unposted(&mut self.rx.lock())?;
        let Lane { wire, tx, rx, .. } = self;
        Ok((wire, tx.into_inner().sent, rx.into_inner().turns))
    }

    /// Names the cable.
    pub(super) fn cable(&self) -> &str {
        &self.wire.cable
    }

    /// What tells the directions from those of all other cables: out and in.
    pub(super) fn numbers(&self) -> (u32, u32) {
        (self.wire.out_number, self.wire.in_number)
    }

    /// Before anything was sent: how much of the stream fills all bulk receives of the peer, and of this side, and some small
    /// bytes that make both queue pairs used. What is out at one end is in at the other.
    pub(super) fn windows(&self) -> (usize, usize) {
        let window = |receives: fn(&Class) -> u32| {
            let bulk = self.wire.classes.get(BULK);
            bulk.map_or(0, |class| receives(class) as usize * class.payload()) + FRAME / 2
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
            let class = self.wire.class_for(source.left);
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
                // Whoever has something does not wait for a look at the device.
                let front = if filled > 0 { next(&rx) } else { self.front(&mut rx)? };
                let Some(class) = front else { break 'pieces };
                let Some(packet) = rx.arrived[class].front_mut() else { break 'pieces };
                if packet.end {
                    ended = true;
                    break 'pieces;
                }
                let from = self.wire.receive_slot(class, packet.slot);
                if let Some(expected) = packet.sum.take() {
                    // SAFETY: the slot is as long as the packet, and nothing is posted there until it has been read.
                    let sum =
                        unsafe { crc32c_raw(0, from.wrapping_add(packet.at), packet.until - packet.at) };
                    if sum != expected {
                        let what = "the checksum of its payload is wrong".to_owned();
                        return Err(self.fail(&mut rx, self.wire.damaged(what)));
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

    /// Tells the peer that the stream has ended, if that can be told now; whether that and all that was sent has left.
    pub(super) fn end(&self) -> Result<bool, LinkError> {
        let mut tx = self.tx.lock();
        self.poll_if_free()?;
        if !tx.ended && self.has_room(&tx, SMALL, 0) {
            let sequence = tx.sequence;
            self.send(&mut tx, SMALL, Packet { kind: Kind::End, sequence, ..Packet::EMPTY })?;
            tx.ended = true;
        }
        let left = |(index, class): (usize, &Class)| class.done.load(Ordering::Acquire) == tx.sent[index];
        Ok(tx.ended && self.wire.classes.iter().enumerate().all(left))
    }

    /// Says a word on each queue pair on which nothing has been said since the last call, unless somebody is sending, and posts
    /// again the receives for the peer's words.
    pub(super) fn keep_alive(&self) -> Result<(), LinkError> {
        self.poll_if_free()?;
        let Some(mut tx) = self.tx.try_lock() else { return Ok(()) };
        for (index, class) in self.wire.classes.iter().enumerate() {
            let reserve = if index == SMALL { RESERVED } else { 0 };
            if tx.sent[index] == tx.noted[index] && !tx.ended && self.has_room(&tx, index, reserve) {
                let word = match index {
                    SMALL => Packet::EMPTY,
                    // A packet is shorter than 4 GiB.
                    _ => Packet { kind: Kind::Idle, bytes: class.payload() as u32, ..Packet::EMPTY },
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
        self.wire.has_room(class, tx.sent[class], reserve)
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
        let bytes = source.left.min(self.wire.classes[class].payload());
        let to = self.wire.send_slot(class, tx.sent[class]).wrapping_add(PACKET_BYTES);
        // SAFETY: the slot is registered memory of ours, long enough, and its last send has completed.
        unsafe { source.copy(to, bytes) };
        // SAFETY: the bytes were just written there.
        let payload_sum = self.wire.sums.then(|| unsafe { crc32c_raw(0, to, bytes) });
        let sequence = tx.sequence;
        // A packet is shorter than 4 GiB.
        let packet =
            Packet { kind: Kind::Stream, bytes: bytes as u32, sequence, payload_sum, ..Packet::EMPTY };
        self.send(tx, class, packet)?;
        tx.sequence = sequence.wrapping_add(1);
        Ok(())
    }

    /// Writes a packet's header in front of its payload and posts both. There is room.
    fn send(&self, tx: &mut Tx, class: usize, mut packet: Packet) -> Result<(), LinkError> {
        packet.turn = tx.sent[class];
        self.wire.send(class, &mut packet)?;
        tx.sent[class] = packet.turn.wrapping_add(1);
        Ok(())
    }

    /// Says how many receives have been posted, if the peer does not know of many of them and nobody else is sending.
    fn return_credits(&self) -> Result<(), LinkError> {
        if !self.wire.owes() {
            return Ok(());
        }
        let Some(mut tx) = self.tx.try_lock() else { return Ok(()) };
        // One receive stays for the end.
        if !tx.ended && self.has_room(&tx, SMALL, 1) {
            self.send(&mut tx, SMALL, Packet { kind: Kind::Credit, ..Packet::EMPTY })?;
        }
        Ok(())
    }

    /// The class of the packet that is next in the stream, if it has arrived.
    fn front(&self, rx: &mut Rx) -> Result<Option<usize>, LinkError> {
        if let Some(class) = next(rx) {
            return Ok(Some(class));
        }
        self.poll(rx)?;
        let found = next(rx);
        if let (None, [Some(a), Some(b)]) = (found, [rx.arrived[SMALL].front(), rx.arrived[BULK].front()]) {
            let (expected, got) = (rx.sequence, a.sequence.min(b.sequence));
            return Err(self.fail(rx, self.wire.lost(expected, got)));
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
            let count = self.wire.poll(&mut rx.done);
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
        let Some(Came { class: index, slot, packet }) = self.wire.completed(completion)? else {
            return Ok(());
        };
        let expected = rx.turns[index];
        if packet.turn != expected {
            return Err(self.wire.lost(expected, packet.turn));
        }
        rx.turns[index] = expected.wrapping_add(1);
        self.wire.granted(&packet);
        if packet.kind == Kind::Down || packet.stream != 0 {
            return Err(self.wire.damaged("it is of a pair whose cables stand in for each other".to_owned()));
        }
        if matches!(packet.kind, Kind::Credit | Kind::Idle) {
            return self.wire.post_receive(index, slot);
        }
        rx.arrived[index].push_back(Arrived {
            slot,
            sequence: packet.sequence,
            end: packet.kind == Kind::End,
            at: PACKET_BYTES,
            until: PACKET_BYTES + packet.bytes as usize,
            sum: packet.payload_sum,
        });
        Ok(())
    }

    /// Posts the receive of a slot that was read again, now or soon.
    fn free(&self, rx: &mut Rx, index: usize, slot: u32) -> Result<(), LinkError> {
        let most = (self.wire.classes[SMALL].recv_slots / 8) as usize;
        if index == SMALL && rx.unposted.len() < most {
            rx.unposted.push(slot);
            return Ok(());
        }
        self.wire.post_receive(index, slot)?;
        if index == SMALL { self.post_unposted(rx) } else { Ok(()) }
    }

    fn post_unposted(&self, rx: &mut Rx) -> Result<(), LinkError> {
        while let Some(slot) = rx.unposted.pop() {
            self.wire.post_receive(SMALL, slot)?;
        }
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
        self.wire.look_at_port().inspect_err(|error| rx.failure = Some(error.clone()))
    }

    fn fail(&self, rx: &mut Rx, failure: LinkError) -> LinkError {
        rx.failure = Some(failure.clone());
        failure
    }
}

impl Kept for Lane {
    fn name(&self) -> &str {
        self.cable()
    }

    fn keep(&self) -> Result<(), LinkError> {
        self.keep_alive()
    }
}

/// The class of the packet that is next in the stream, if it is known to have arrived.
fn next(rx: &Rx) -> Option<usize> {
    let is_next =
        |class: &usize| rx.arrived[*class].front().is_some_and(|packet| packet.sequence == rx.sequence);
    [SMALL, BULK].into_iter().find(is_next)
}
