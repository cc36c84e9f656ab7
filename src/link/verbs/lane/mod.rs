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

mod bare;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use bare::{Lending, Placing};
use parking_lot::Mutex;
use raccl_sys::Completion;

use super::{
    crc32c::crc32c_raw,
    hold::Hold,
    keeper::Kept,
    packet::{Bare, Kind, PACKET_BYTES, Packet},
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
    lending: Lending,
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
    placing: Placing,
    failure: Option<LinkError>,
    /// Where completions are put.
    done: [Completion; BATCH],
    idle: u32,
    looked: Instant,
}

/// A packet that came and has not been read entirely.
struct Arrived {
    place: Place,
    order: Order,
    end: bool,
    /// Where in its place the unread bytes begin and end.
    at: usize,
    until: usize,
    /// To be compared before the first byte is read.
    sum: Option<u32>,
    /// What comes behind it on the bulk queue pair.
    bare: Option<Bare>,
}

/// Where a packet lies.
#[derive(Clone, Copy)]
enum Place {
    Slot(u32),
    /// Where its bytes are wanted.
    There(*mut u8),
}

// SAFETY: the pointer is only compared.
unsafe impl Send for Place {}

/// What tells when a packet is next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Sequence(u32),
    /// It has no header: those that were said to come are read by their turns.
    Turn(u32),
}

impl Lane {
    /// A lane of queue pairs that are ready and have no receives yet. Posts them all.
    pub(super) fn new(wire: Wire, hold: Arc<Hold>) -> Result<Lane, LinkError> {
        let rx = Rx {
            turns: [0; 2],
            arrived: Default::default(),
            unposted: Vec::new(),
            placing: Placing::default(),
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
    /// Every piece is valid for reads of its length during the call, and what lies in memory that was lent stays so, and
    /// registered, and nobody writes there, until it is [settled](Self::unsettled) or [revoked](Self::revoke_sends).
    pub(super) unsafe fn write(&self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let mut tx = self.tx.lock();
        let mut source = Source::new(pieces);
        let total = source.left;
        while source.left > 0 {
            // SAFETY: the caller keeps the pieces valid.
            if let Some(done) = unsafe { self.write_bare(&mut tx, &mut source) } {
                if done? {
                    continue;
                }
                break;
            }
            let class = self.wire.class_for(source.left);
            let reserve = if class == SMALL { RESERVED } else { 0 };
            if !self.has_room_now(&tx, class, reserve)? {
                break;
            }
            // SAFETY: the caller keeps the pieces valid.
            unsafe { self.send_stream(&mut tx, class, &mut source) }?;
        }
        Ok(total - source.left)
    }

    /// Fills `pieces` from the front with what has arrived.
    ///
    /// # Safety
    /// Every piece is valid for writes of its length during the call. If the first is `lasting`, what of it lies in memory that was
    /// lent stays so, and registered, and nobody else touches it, until it has been filled or this was [revoked](Self::revoke_receives).
    pub(super) unsafe fn read(&self, pieces: &[IoVec], lasting: bool) -> Result<stripe::Read, LinkError> {
        let mut rx = self.rx.lock();
        let mut filled = 0;
        let mut ended = false;
        'pieces: for (index, piece) in pieces.iter().enumerate() {
            let mut done = 0;
            while done < piece.iov_len {
                // Whoever has something does not wait for a look at the device.
                let front = if filled > 0 { next(&rx) } else { self.front(&mut rx)? };
                let Some(class) = front else { break 'pieces };
                let Some(packet) = rx.arrived[class].front() else { break 'pieces };
                if packet.end {
                    ended = true;
                    break 'pieces;
                }
                let to = piece.iov_base.cast::<u8>().wrapping_add(done);
                // SAFETY: the caller keeps the piece writable, and `done` is less than its length.
                let count = unsafe { self.take(&mut rx, class, to, piece.iov_len - done) };
                let count = count.inspect_err(|error| rx.failure = Some(error.clone()))?;
                done += count;
                filled += count;
                if rx.arrived[class].front().is_some_and(|packet| packet.at == packet.until) {
                    let room = if lasting && index == 0 { piece.iov_len - done } else { 0 };
                    // SAFETY: the caller keeps what has not been filled of a lasting piece.
                    let freed = unsafe { self.is_read(&mut rx, class, to.wrapping_add(count), room) };
                    freed.inspect_err(|error| rx.failure = Some(error.clone()))?;
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
        if self.wire.is_revoked() {
            return Ok(true);
        }
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
        if self.wire.is_revoked() {
            return Ok(());
        }
        self.poll_if_free()?;
        let Some(mut tx) = self.tx.try_lock() else { return Ok(()) };
        for (index, class) in self.wire.classes.iter().enumerate() {
            let reserve = if index == SMALL { RESERVED } else { 0 };
            let busy = tx.ended || (index == BULK && tx.lending.is_busy());
            if tx.sent[index] == tx.noted[index] && !busy && self.has_room(&tx, index, reserve) {
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

    /// The same, after a look at what is done if there is none.
    fn has_room_now(&self, tx: &Tx, class: usize, reserve: i32) -> Result<bool, LinkError> {
        if self.has_room(tx, class, reserve) {
            return Ok(true);
        }
        self.poll_if_free()?;
        Ok(self.has_room(tx, class, reserve))
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
        tx.lending.position += bytes as u64;
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
        self.tx.try_lock().map_or(Ok(()), |mut tx| self.tell_credits(&mut tx))
    }

    /// The same for whoever is sending.
    fn tell_credits(&self, tx: &mut Tx) -> Result<(), LinkError> {
        // One receive stays for the end.
        if self.wire.owes() && !tx.ended && self.has_room(tx, SMALL, 1) {
            self.send(tx, SMALL, Packet { kind: Kind::Credit, ..Packet::EMPTY })?;
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
            let sequences = [a.order, b.order].into_iter().filter_map(|order| match order {
                Order::Sequence(sequence) => Some(sequence),
                Order::Turn(_) => None,
            });
            // The small one has a sequence.
            let (expected, got) = (rx.sequence, sequences.min().unwrap_or(rx.sequence));
            return Err(self.fail(rx, self.wire.lost(expected, got)));
        }
        Ok(found)
    }

    /// Takes bytes of the packet of that class that is next; how many.
    ///
    /// # Safety
    /// `to` is valid for writes of `room` bytes.
    unsafe fn take(&self, rx: &mut Rx, class: usize, to: *mut u8, room: usize) -> Result<usize, LinkError> {
        match rx.arrived[class].front().map(|packet| packet.order) {
            Some(Order::Turn(turn)) if !rx.placing.is_of(turn) => {
                return Err(self.wire.damaged("it is not the one that was said to come".to_owned()));
            }
            // Receives may be posted where that one goes: nothing else may fill the place, or they would outlast the call.
            Some(Order::Sequence(sequence)) if rx.placing.is_next(sequence) => {
                return Err(self.wire.damaged("it is in the place of one that was said to come".to_owned()));
            }
            _ => {}
        }
        if let Some(bare) = rx.arrived[class].front_mut().and_then(|packet| packet.bare.take()) {
            self.begin_bare(rx, bare)?;
        }
        let Some(packet) = rx.arrived[class].front_mut() else { return Ok(0) };
        let left = packet.until - packet.at;
        let slot = match packet.place {
            Place::Slot(slot) => slot,
            Place::There(there) if there == to && left <= room => {
                packet.at = packet.until;
                rx.placing.uncopied += left as u64;
                return Ok(left);
            }
            Place::There(_) => {
                return Err(self.wire.damaged("it came where something else is wanted".to_owned()));
            }
        };
        let from = self.wire.receive_slot(class, slot);
        if let Some(expected) = packet.sum.take() {
            // SAFETY: the slot is as long as the packet, and nothing is posted there until it has been read.
            let sum = unsafe { crc32c_raw(0, from.wrapping_add(packet.at), left) };
            if sum != expected {
                return Err(self.wire.damaged("the checksum of its payload is wrong".to_owned()));
            }
        }
        let count = left.min(room);
        // SAFETY: the slot holds the packet, whose unread bytes are at least so many, and the caller keeps the target writable,
        // which is never registered memory of ours.
        unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(packet.at), to, count) };
        packet.at += count;
        Ok(count)
    }

    /// The packet of that class that is next has been read entirely. `to` is where the next byte of the stream goes, and `room`
    /// how many have a place there.
    ///
    /// # Safety
    /// As for [`Lane::refill`].
    unsafe fn is_read(&self, rx: &mut Rx, class: usize, to: *mut u8, room: usize) -> Result<(), LinkError> {
        let Some(packet) = rx.arrived[class].pop_front() else { return Ok(()) };
        rx.sequence = rx.sequence.wrapping_add(1);
        if let Order::Turn(_) = packet.order {
            self.bare_is_read(rx);
        }
        match packet.place {
            Place::Slot(slot) if class == SMALL => return self.free(rx, slot),
            Place::Slot(slot) => rx.placing.spare(slot),
            Place::There(_) => {}
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.refill(rx, to, room) }
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
        let (index, slot, packet) = match self.wire.completed(completion)? {
            Some(Came::Packet { class, slot, packet }) => (class, slot, packet),
            Some(Came::Bare { slot, bytes }) => {
                let arrived = self.bare_arrived(rx, slot, bytes)?;
                rx.arrived[BULK].push_back(arrived);
                return Ok(());
            }
            None => return Ok(()),
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
            if index == SMALL {
                return self.wire.post_receive(index, slot);
            }
            rx.placing.spare(slot);
            // SAFETY: without room nothing is posted but slots.
            return unsafe { self.refill(rx, std::ptr::null_mut(), 0) };
        }
        let arrived = match packet.kind {
            Kind::Bare => self.announced(index, slot, &packet)?,
            _ => Arrived {
                place: Place::Slot(slot),
                order: Order::Sequence(packet.sequence),
                end: packet.kind == Kind::End,
                at: PACKET_BYTES,
                until: PACKET_BYTES + packet.bytes as usize,
                sum: packet.payload_sum,
                bare: None,
            },
        };
        rx.arrived[index].push_back(arrived);
        Ok(())
    }

    /// Posts the receive of a slot of the small class that was read again, now or soon.
    fn free(&self, rx: &mut Rx, slot: u32) -> Result<(), LinkError> {
        let most = (self.wire.classes[SMALL].recv_slots / 8) as usize;
        if rx.unposted.len() < most {
            rx.unposted.push(slot);
            return Ok(());
        }
        self.wire.post_receive(SMALL, slot)?;
        self.post_unposted(rx)
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
    let is_next = |class: &usize| {
        rx.arrived[*class].front().is_some_and(|packet| match packet.order {
            Order::Sequence(sequence) => sequence == rx.sequence,
            Order::Turn(_) => rx.placing.is_next(rx.sequence),
        })
    };
    [SMALL, BULK].into_iter().find(is_next)
}
