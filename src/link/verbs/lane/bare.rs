//! Bytes of the stream that are sent from where the user has them, and received where the user wants them.
//!
//! Where a long piece of what is to be sent lies in memory that was lent (see [`Registry`](crate::link::verbs::Registry)), the sender
//! says so in a packet of the small queue pair, in its place in the stream, and sends [`Bare`] packets, which have no header: a
//! device takes each message from one place and puts it in one place. The receiver knows from then on what comes on the bulk queue
//! pair and of which bytes of the stream it is. Receives that are posted already take it in their slots; all others are posted
//! where the bytes are wanted, if that is in memory that was lent too. So whatever side has lent its memory saves its copy, and
//! neither has to know of the other.
//!
//! **Loss.** The length of a bare packet tells its turn, so that a packet in the place of one that was lost is an error before
//! anybody takes its bytes for those that were wanted.
//!
//! **Memory that was lent** is the user's again when its bytes are [out](Lane::unsettled) or [in](Lane::read), or else the queue pair
//! is destroyed: nothing else keeps a device from memory that it was told of.

use std::{
    collections::VecDeque,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use super::{Arrived, Lane, Order, Place, Rx, Tx};
use crate::link::{
    LinkError,
    verbs::{
        crc32c::crc32c_raw,
        packet::{Bare, Kind, PACKET_BYTES, Packet},
        source::Source,
        wire::{BULK, FRAME, RESERVED, SMALL},
    },
};

/// Bare packets that are said to come at a time.
const MOST: u32 = 1024;
/// A piece of so many bulk packets is worth being told of.
const WORTH: usize = 2;
/// How long what is on its way out may take once nobody waits for it any more.
const GRACE: Duration = Duration::from_millis(20);

/// Of the sending side.
#[derive(Default)]
pub(super) struct Lending {
    /// Bare packets that were said to come and are not sent yet.
    left: u32,
    /// Bytes of the stream that were sent.
    pub(super) position: u64,
    /// Packets that the device may still read where the user has them: the turn of each, and where in the stream it begins.
    out: VecDeque<(u32, u64)>,
    /// Bytes that were sent from where the user has them.
    pub(super) uncopied: u64,
}

/// Of the receiving side.
#[derive(Default)]
pub(super) struct Placing {
    /// Of the bare packets that were said to come: the first that has not been read entirely, its place in the sequence, and how
    /// many there are from it on.
    turn: u32,
    sequence: u32,
    left: u32,
    /// Receives that are posted where their bytes are wanted.
    placed: VecDeque<Placed>,
    /// Slots of the bulk class in which nothing is, and for which no receive is posted.
    spare: Vec<u32>,
    /// Bytes that came where they were wanted.
    pub(super) uncopied: u64,
}

struct Placed {
    turn: u32,
    to: *mut u8,
}

// SAFETY: the pointer is only told to the device, and compared; whoever wants bytes there keeps the memory.
unsafe impl Send for Placed {}

impl Lending {
    pub(super) fn is_busy(&self) -> bool {
        self.left > 0
    }
}

impl Placing {
    /// Whether a bare packet is next.
    #[inline]
    pub(super) fn is_next(&self, sequence: u32) -> bool {
        self.left > 0 && self.sequence == sequence
    }

    /// A slot of the bulk class has been read.
    pub(super) fn spare(&mut self, slot: u32) {
        self.spare.push(slot);
    }

    /// Whether the bare packet of this turn is the one that is next.
    pub(super) fn is_of(&self, turn: u32) -> bool {
        self.turn == turn
    }
}

impl Lane {
    /// Sends bare packets, or says that they come, if that is what is to be done next; `None` if it is not, else whether it could
    /// be done.
    ///
    /// # Safety
    /// As for [`Lane::write`], for the pieces of the source.
    pub(super) unsafe fn write_bare(
        &self,
        tx: &mut Tx,
        source: &mut Source<'_>,
    ) -> Option<Result<bool, LinkError>> {
        let slot_bytes = self.wire.classes.get(BULK)?.slot_bytes;
        if tx.lending.left == 0 {
            let ahead = self.is_worth_it(source, slot_bytes)?;
            return Some(self.has_room_now(tx, SMALL, RESERVED).and_then(|room| {
                if room {
                    // SAFETY: the caller keeps the pieces valid.
                    unsafe { self.announce(tx, source, ahead, slot_bytes) }?;
                }
                Ok(room)
            }));
        }
        Some(self.has_room_now(tx, BULK, 0).and_then(|room| {
            if room {
                // SAFETY: the caller keeps the pieces valid until the packet is out.
                unsafe { self.send_bare(tx, source, slot_bytes) }?;
            }
            // These packets do not tell of the receives that are posted here, and without one the peer cannot tell of its own.
            // Maybe nobody reads here, who would say so.
            self.tell_credits(tx)?;
            Ok(room)
        }))
    }

    /// Bytes that were sent from where they were, and received where they were wanted.
    pub(in crate::link::verbs) fn uncopied(&self) -> (u64, u64) {
        let sent = self.tx.lock().lending.uncopied;
        (sent, self.rx.lock().placing.uncopied)
    }

    /// Whether the device may still write where bytes are wanted.
    #[cfg(test)]
    pub(super) fn has_receives_out(&self) -> bool {
        !self.rx.lock().placing.placed.is_empty()
    }

    /// How many of the bytes that were written have not left the user's memory. Always the last ones.
    pub(in crate::link::verbs) fn unsettled(&self) -> Result<u64, LinkError> {
        let mut tx = self.tx.lock();
        if tx.lending.out.is_empty() {
            return Ok(0);
        }
        self.poll_if_free()?;
        self.settle(&mut tx);
        Ok(tx.lending.out.front().map_or(0, |(_, begin)| tx.lending.position - begin))
    }

    /// Keeps the device from what of the user's memory is not out yet. The lane carries nothing any more if there was any.
    pub(in crate::link::verbs) fn revoke_sends(&self) {
        let mut tx = self.tx.lock();
        let until = Instant::now() + GRACE;
        while !tx.lending.out.is_empty() {
            // What can be sent is sent: the peer may have it before this side hears so.
            let polled = self.poll_if_free();
            self.settle(&mut tx);
            if polled.is_err() || Instant::now() >= until {
                break;
            }
        }
        if !tx.lending.out.is_empty() {
            self.wire.revoke();
            tx.lending.out.clear();
        }
    }

    /// Keeps the device from where bytes are wanted. The lane carries nothing any more if there is such a place.
    pub(in crate::link::verbs) fn revoke_receives(&self) {
        let mut rx = self.rx.lock();
        if !rx.placing.placed.is_empty() {
            self.wire.revoke();
            rx.placing.placed.clear();
            let revoked = self.wire.revoked();
            rx.failure.get_or_insert(revoked);
        }
    }

    /// Takes note of the packet that says that bare ones come.
    pub(super) fn announced(&self, class: usize, slot: u32, packet: &Packet) -> Result<Arrived, LinkError> {
        let can_come = self.wire.lent.is_some() && self.wire.classes.len() > BULK;
        if class != SMALL || !can_come || (packet.bytes as usize) < Bare::BYTES {
            return Err(self.wire.damaged(format!("it has no use for {} bytes that say so", packet.bytes)));
        }
        let from = self.wire.receive_slot(SMALL, slot).wrapping_add(PACKET_BYTES);
        // SAFETY: the slot is as long as the packet, and nothing is posted there until it has been read.
        let sum = unsafe { crc32c_raw(0, from, packet.bytes as usize) };
        if packet.payload_sum != Some(sum) {
            return Err(self.wire.damaged("the checksum of its payload is wrong".to_owned()));
        }
        let mut bytes = [0; Bare::BYTES];
        // SAFETY: the packet has so many bytes, as above.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), Bare::BYTES) };
        Ok(Arrived {
            place: Place::Slot(slot),
            order: Order::Sequence(packet.sequence),
            end: false,
            at: PACKET_BYTES + Bare::BYTES,
            until: PACKET_BYTES + packet.bytes as usize,
            sum: None,
            bare: Some(Bare::decode(&bytes)),
        })
    }

    /// Takes note of a bare packet.
    pub(super) fn bare_arrived(
        &self,
        rx: &mut Rx,
        slot: Option<u32>,
        bytes: usize,
    ) -> Result<Arrived, LinkError> {
        let turn = rx.turns[BULK];
        if bytes != Bare::length(self.wire.classes[BULK].slot_bytes, turn) {
            return Err(self.wire.lost_bare(turn, bytes));
        }
        rx.turns[BULK] = turn.wrapping_add(1);
        let place = match slot {
            Some(slot) => Place::Slot(slot),
            None => match rx.placing.placed.pop_front() {
                Some(placed) if placed.turn == turn => Place::There(placed.to),
                _ => return Err(self.wire.damaged("it came where none was wanted".to_owned())),
            },
        };
        Ok(Arrived {
            place,
            order: Order::Turn(turn),
            end: false,
            at: 0,
            until: bytes,
            sum: None,
            bare: None,
        })
    }

    /// The packet that is next says that bare ones come behind its bytes.
    pub(super) fn begin_bare(&self, rx: &mut Rx, bare: Bare) -> Result<(), LinkError> {
        let Bare { turn, count } = bare;
        let next = match rx.arrived[BULK].front() {
            Some(Arrived { order: Order::Turn(next), .. }) => *next,
            _ => rx.turns[BULK],
        };
        // Words of no meaning may still be on their way in front of them, though not more than there are receives for.
        let ahead = turn.wrapping_sub(next);
        if count == 0 || count > MOST || ahead > self.wire.classes[BULK].recv_slots {
            let what = format!("it says that {count} bare packets come from {turn} on, and {next} is next");
            return Err(self.wire.damaged(what));
        }
        rx.placing.turn = turn;
        rx.placing.left = count;
        rx.placing.sequence = rx.sequence.wrapping_add(1);
        Ok(())
    }

    /// The bare packet that is next has been read entirely.
    pub(super) fn bare_is_read(&self, rx: &mut Rx) {
        rx.placing.turn = rx.placing.turn.wrapping_add(1);
        rx.placing.sequence = rx.placing.sequence.wrapping_add(1);
        rx.placing.left -= 1;
    }

    /// Posts bulk receives again: where the bytes are wanted, if that is known and in memory that was lent, else in slots. `to` is
    /// where the next byte of the stream goes, and `room` how many have a place there.
    ///
    /// # Safety
    /// Nobody reads or writes the `room` bytes at `to`, and what was lent of them stays registered, until they have been read or
    /// this was [revoked](Self::revoke_receives).
    pub(super) unsafe fn refill(&self, rx: &mut Rx, to: *mut u8, room: usize) -> Result<(), LinkError> {
        let class = &self.wire.classes[BULK];
        // The next bare packet to be read, and where it goes.
        let (mut next, mut at) = (rx.placing.turn, 0);
        loop {
            let turn = class.posted.load(Ordering::Relaxed);
            if turn.wrapping_sub(rx.turns[BULK]) >= class.recv_slots {
                return Ok(());
            }
            let ahead = turn.wrapping_sub(rx.placing.turn);
            if room > 0 && ahead < rx.placing.left {
                while next != turn && at < room {
                    at += Bare::length(class.slot_bytes, next);
                    next = next.wrapping_add(1);
                }
                let bytes = Bare::length(class.slot_bytes, turn);
                if at < room
                    && bytes <= room - at
                    && let Some(span) = self.wire.lent_span(to.wrapping_add(at), bytes)
                {
                    // SAFETY: the span is of the bytes that the caller keeps.
                    unsafe { self.wire.place(turn, span) }?;
                    rx.placing.placed.push_back(Placed { turn, to: to.wrapping_add(at) });
                    continue;
                }
            }
            let Some(slot) = rx.placing.spare.pop() else { return Ok(()) };
            self.wire.post_receive(BULK, slot)?;
        }
    }

    /// Before how many bytes a long piece in memory that was lent begins, and how long it is.
    fn is_worth_it(&self, source: &Source<'_>, slot_bytes: usize) -> Option<(usize, usize)> {
        if source.left < WORTH * slot_bytes {
            return None;
        }
        let lent = self.wire.lent.as_ref()?;
        let (before, start, bytes) = source.find_longer(WORTH * slot_bytes)?;
        let fits = before <= FRAME - PACKET_BYTES - Bare::BYTES;
        (fits && lent.registry.knows(start, bytes)).then_some((before, bytes))
    }

    /// Sends the bytes before a long piece, and says that bare packets come.
    ///
    /// # Safety
    /// As for [`Lane::write`], and there is room.
    unsafe fn announce(
        &self,
        tx: &mut Tx,
        source: &mut Source<'_>,
        (before, piece): (usize, usize),
        slot_bytes: usize,
    ) -> Result<(), LinkError> {
        let first = tx.sent[BULK];
        let (mut count, mut bytes) = (0, 0);
        while count < MOST {
            bytes += Bare::length(slot_bytes, first.wrapping_add(count));
            if bytes > piece {
                break;
            }
            count += 1;
        }
        let words = Bare { turn: first, count }.encode();
        let payload = self.wire.send_slot(SMALL, tx.sent[SMALL]).wrapping_add(PACKET_BYTES);
        // SAFETY: the slot is registered memory of ours, longer than that, and its last send has completed.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), payload, Bare::BYTES) };
        // SAFETY: so many bytes have room behind it, and the caller keeps the pieces valid.
        unsafe { source.copy(payload.wrapping_add(Bare::BYTES), before) };
        // SAFETY: the bytes were just written there.
        let sum = unsafe { crc32c_raw(0, payload, Bare::BYTES + before) };
        let packet = Packet {
            kind: Kind::Bare,
            // Less than a frame.
            bytes: (Bare::BYTES + before) as u32,
            sequence: tx.sequence,
            payload_sum: Some(sum),
            ..Packet::EMPTY
        };
        self.send(tx, SMALL, packet)?;
        tx.sequence = tx.sequence.wrapping_add(1);
        tx.lending.position += before as u64;
        tx.lending.left = count;
        Ok(())
    }

    /// # Safety
    /// As for [`Lane::write`], and there is room.
    unsafe fn send_bare(
        &self,
        tx: &mut Tx,
        source: &mut Source<'_>,
        slot_bytes: usize,
    ) -> Result<(), LinkError> {
        let turn = tx.sent[BULK];
        let bytes = Bare::length(slot_bytes, turn);
        match source
            .first()
            .and_then(|(start, there)| (there >= bytes).then(|| self.wire.lent_span(start, bytes)).flatten())
        {
            Some(span) => {
                // SAFETY: the caller keeps the piece as it is until this is settled or revoked.
                unsafe { self.wire.send_bare(turn, span) }?;
                tx.lending.out.push_back((turn, tx.lending.position));
                tx.lending.uncopied += bytes as u64;
                source.skip(bytes);
            }
            None if source.left < bytes => {
                // Whoever writes has cut a message short that was announced whole.
                return Err(self.wire.damaged(format!("{} bytes are left of {bytes}", source.left)));
            }
            // Where one region ends and the next begins.
            None => {
                let span = self.wire.bare_slot(turn, bytes)?;
                // SAFETY: the slot is registered memory of ours, long enough, and its last send has completed.
                unsafe { source.copy(self.wire.send_slot(BULK, turn), bytes) };
                // SAFETY: the slot is not written again before the completion.
                unsafe { self.wire.send_bare(turn, span) }?;
            }
        }
        tx.sent[BULK] = turn.wrapping_add(1);
        tx.sequence = tx.sequence.wrapping_add(1);
        tx.lending.position += bytes as u64;
        tx.lending.left -= 1;
        Ok(())
    }

    /// Forgets what is out.
    fn settle(&self, tx: &mut Tx) {
        let Some(class) = self.wire.classes.get(BULK) else { return };
        let done = class.done.load(Ordering::Acquire);
        while let Some(&(turn, _)) = tx.lending.out.front()
            && turn.wrapping_sub(done).cast_signed() < 0
        {
            tx.lending.out.pop_front();
        }
    }
}
