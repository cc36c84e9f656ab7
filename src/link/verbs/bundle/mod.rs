//! The cables of a pair as as many streams, all of which go on while one cable is left.
//!
//! Normally each stream has its own cable, as with [`Lane`]. Every packet says which stream it belongs to and where in it, so
//! any cable may carry it. A send slot is used again when the peer's credits show that the packet has come, not when the device
//! is done with it, which on an unreliable queue pair says nothing about the other end.
//!
//! **Death.** A cable is dead to this side when a packet is missing, late or damaged, when a work request fails, when the port is
//! down, or when the peer says so; from then on nothing is sent or taken there. Each side tells the other through a cable that
//! is left how many packets had come ([`Kind::Down`]), and sends again what had not come to the other, before anything new.
//! [`Ledger`] keeps that account, and `recovery.rs` acts on it.
//!
//! **No packet is in another's way.** After a death a cable carries several streams, and packets that are read late would take
//! the receives of those that are awaited. So the sender takes the streams in turn (see
//! [`Outlet::in_turn`](crate::link::stripe::Outlet::in_turn)): every packet that has gone out can be read without one that has
//! not. What went out before the death is not so; for that much the receiver has memory beside its slots ([`Inbound`]).
//!
//! **What nobody misses.** A packet that is lost shows by the next one of its queue pair. So words follow the last packets, a few
//! at some distance, until the peer's credits show that these have come. The [keeper](super::keeper) says them.
//!
//! One lock guards all of it, since a writer of one stream may have to move the packets of any other.

mod inbound;
mod ledger;
mod recovery;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use raccl_sys::Completion;

use inbound::{Inbound, Place, Slot};
use ledger::{Ledger, Sent};

use super::{
    crc32c::crc32c_raw,
    hold::Hold,
    keeper::Kept,
    lane::Lane,
    packet::{Kind, PACKET_BYTES, Packet},
    source::Source,
    wire::{BATCH, BULK, Came, RESERVED, SMALL, Wire},
};
use crate::{
    link::{LinkError, stripe},
    os::IoVec,
};

/// The number of a stream is one byte of a packet.
pub(super) const MOST_STREAMS: usize = 256;

/// How often the keeper looks after a bundle.
pub(super) const TICK: Duration = Duration::from_millis(250);
/// How many words follow the last packet of a queue pair at most.
const WORDS: u8 = 3;
/// Of reads that find nothing, how many look at their own cable only before one looks at all.
const OWN_LOOKS: u32 = 32;
/// The cables to one peer.
pub(crate) struct Bundle {
    wires: Vec<Wire>,
    /// How many of them have died; written under the lock.
    deaths: AtomicU32,
    state: Mutex<State>,
    /// How long a queue pair may be silent.
    keep_alive: Option<Duration>,
    /// Dropped after all else.
    _hold: Arc<Hold>,
}

struct State {
    cables: Vec<Cable>,
    /// How far each stream has gone out, by its number, and whether it has ended.
    out: Vec<(u32, bool)>,
    ledger: Ledger,
    inbound: Inbound,
    /// Why nothing is carried any more.
    failure: Option<LinkError>,
    /// One of the two sides is leaving: what happens to cables from now on is no news.
    leaving: bool,
    looks: u32,
}

/// What is counted of a cable, by class.
struct Cable {
    /// Packets sent, and packets that came.
    sent: [u32; 2],
    came: [u32; 2],
    /// What `sent` was when the keeper last looked, and when that changed.
    noted: [u32; 2],
    spoke: [Instant; 2],
    /// How many words may still follow the last packet.
    words: [u8; 2],
}

impl Bundle {
    /// Takes over lanes through which nothing goes at the moment but credits.
    pub(super) fn new(
        lanes: Vec<Lane>,
        keep_alive: Option<Duration>,
        hold: Arc<Hold>,
    ) -> Result<Bundle, LinkError> {
        let now = Instant::now();
        let (mut wires, mut cables) = (Vec::new(), Vec::new());
        for lane in lanes {
            let (wire, sent, came) = lane.into_wire()?;
            wires.push(wire);
            cables.push(Cable { sent, came, noted: sent, spoke: [now; 2], words: [0; 2] });
        }
        let sent: Vec<[u32; 2]> = cables.iter().map(|cable| cable.sent).collect();
        let state = State {
            out: vec![(0, false); wires.len()],
            ledger: Ledger::new(&sent),
            inbound: Inbound::new(wires.len()),
            cables,
            failure: None,
            leaving: false,
            looks: 0,
        };
        Ok(Bundle { wires, deaths: AtomicU32::new(0), state: Mutex::new(state), keep_alive, _hold: hold })
    }

    /// Names the cable that a stream has while all are alive.
    pub(super) fn cable(&self, stream: usize) -> &str {
        &self.wires[stream].cable
    }

    /// How many cables have died.
    pub(super) fn deaths(&self) -> u32 {
        self.deaths.load(Ordering::Acquire)
    }

    /// Takes bytes of a stream from the front of `pieces`; how many. None at all if more cables have died than the caller knows
    /// of, because its pieces may not be next then.
    ///
    /// # Safety
    /// Every piece is valid for reads of its length during the call.
    pub(super) unsafe fn write(
        &self,
        stream: usize,
        deaths: u32,
        pieces: &[IoVec],
    ) -> Result<usize, LinkError> {
        let state = &mut *self.state.lock();
        let mut source = Source::new(pieces);
        let total = source.left;
        let mut looked = false;
        while source.left > 0 && state.ledger.deaths() == deaths {
            let way = self.way(state, stream, source.left, RESERVED);
            let Some((cable, class)) = way.filter(|_| !state.ledger.is_recovering()) else {
                if std::mem::replace(&mut looked, true) {
                    break;
                }
                self.look(state, stream);
                state.check()?;
                continue;
            };
            looked = false;
            let bytes = source.left.min(self.wires[cable].classes[class].payload());
            let to = self.payload_slot(state, cable, class);
            // SAFETY: the slot is registered memory of ours, long enough, and the packet that it held has come to the peer; the
            // caller keeps the pieces valid.
            unsafe { source.copy(to, bytes) };
            let offset = state.out[stream].0;
            // A packet is shorter than 16 MiB.
            let sent = Sent { stream: stream as u8, offset, bytes: bytes as u32 };
            state.out[stream].0 = offset.wrapping_add(sent.bytes);
            self.send_stream(state, cable, class, sent);
        }
        state.check()?;
        Ok(total - source.left)
    }

    /// Fills `pieces` from the front with what has arrived of a stream.
    ///
    /// # Safety
    /// Every piece is valid for writes of its length during the call.
    pub(super) unsafe fn read(&self, stream: usize, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        let state = &mut *self.state.lock();
        let mut filled = 0;
        'pieces: for piece in pieces {
            let mut done = 0;
            while done < piece.iov_len {
                // Whoever has something does not wait for a look at the devices.
                if filled == 0 && state.inbound.front(stream).is_none() {
                    self.look(state, stream);
                }
                let Some(front) = state.inbound.front(stream) else { break 'pieces };
                if front.bytes == 0 {
                    if filled == 0 {
                        return Ok(stripe::Read::End);
                    }
                    break 'pieces;
                }
                let from = match &front.place {
                    Place::Slot(slot) => self.payload(slot),
                    Place::Kept(bytes) => bytes.as_ptr(),
                };
                let count = (front.bytes - front.read).min(piece.iov_len - done);
                let to = piece.iov_base.cast::<u8>().wrapping_add(done);
                // SAFETY: the payload has `bytes` bytes of which `read` have been read; if it is in a slot, nothing is posted there
                // until it has been read entirely. The caller keeps the piece writable, which is no memory of ours.
                unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(front.read), to, count) };
                done += count;
                filled += count;
                if let Some(slot) = state.inbound.read(stream, count) {
                    self.post_receive(state, slot);
                }
            }
        }
        self.return_credits(state);
        if filled > 0 {
            return Ok(stripe::Read::Bytes(filled));
        }
        state.check()?;
        Ok(stripe::Read::Empty)
    }

    /// Tells the peer that a stream has ended, if that can be told now; whether that and all that was sent has left.
    pub(super) fn end(&self, stream: usize) -> Result<bool, LinkError> {
        let state = &mut *self.state.lock();
        self.look_at_all(state);
        state.check()?;
        let (offset, ended) = state.out[stream];
        if !ended
            && !state.ledger.is_recovering()
            && let Some((cable, class)) = self.way(state, stream, 0, 0)
        {
            state.out[stream].1 = true;
            self.send_stream(state, cable, class, Sent { stream: stream as u8, offset, bytes: 0 });
        }
        let has_left = |cable: usize| {
            let classes = self.wires[cable].classes.iter().zip(state.cables[cable].sent);
            classes.into_iter().all(|(class, sent)| class.done.load(Ordering::Acquire) == sent)
        };
        let mut alive = (0..self.wires.len()).filter(|&cable| state.ledger.is_alive(cable));
        Ok(state.out[stream].1 && !state.ledger.is_recovering() && alive.all(has_left))
    }

    /// Moves along what can be moved although nobody calls.
    pub(super) fn tend(&self) -> Result<(), LinkError> {
        let state = &mut *self.state.lock();
        self.look_at_all(state);
        if !state.leaving {
            for (cable, wire) in self.wires.iter().enumerate() {
                if let Err(error) = wire.look_at_port() {
                    self.lose(state, cable, error);
                }
                for class in 0..wire.classes.len() {
                    self.say_word(state, cable, class);
                }
            }
            self.recover(state);
        }
        self.return_credits(state);
        state.check()
    }

    /// What happens to cables is no news any more, since one side is leaving or the group has failed.
    pub(super) fn leave(&self) {
        self.state.lock().leaving = true;
    }

    /// Bytes of each stream that have been sent so far, and one more at its end, modulo 2^32.
    pub(super) fn sent(&self) -> Vec<u64> {
        let out = &self.state.lock().out;
        out.iter().map(|&(offset, ended)| offset.wrapping_add(ended.into()).into()).collect()
    }

    /// The same of what has arrived. Waits while somebody else is at it, which is not long.
    pub(super) fn arrived(&self) -> Vec<u64> {
        let state = &mut *self.state.lock();
        self.look_at_all(state);
        (0..self.wires.len()).map(|stream| state.inbound.arrived(stream).into()).collect()
    }

    /// Where the next packet of a stream can go of which so much is waiting: on its own cable while all are alive, else on any.
    fn way(&self, state: &State, stream: usize, waiting: usize, reserve: i32) -> Option<(usize, usize)> {
        let count = self.wires.len();
        let reach = if state.ledger.deaths() == 0 { 1 } else { count };
        (0..reach).map(|step| (stream + step) % count).find_map(|cable| {
            let class = self.wires[cable].class_for(waiting);
            let reserve = if class == SMALL { reserve } else { 0 };
            self.has_room(state, cable, class, reserve).then_some((cable, class))
        })
    }

    /// Whether a packet of the class can be sent, has a slot, and leaves `reserve` receives of the peer for others.
    fn has_room(&self, state: &State, cable: usize, class: usize, reserve: i32) -> bool {
        let wire = &self.wires[cable];
        state.ledger.is_alive(cable)
            && wire.has_room(class, state.cables[cable].sent[class], reserve)
            && state.ledger.open(cable, class) < wire.classes[class].send_slots as usize
    }

    /// Sends a packet of a stream whose bytes are in the next slot.
    fn send_stream(&self, state: &mut State, cable: usize, class: usize, sent: Sent) {
        let Sent { stream, offset: sequence, bytes } = sent;
        let kind = if bytes == 0 { Kind::End } else { Kind::Stream };
        let payload_sum = (self.wires[cable].sums && bytes > 0).then(|| {
            // SAFETY: the bytes were just written there, and nobody else writes to the slot.
            unsafe { crc32c_raw(0, self.payload_slot(state, cable, class), bytes as usize) }
        });
        let packet = Packet { kind, stream, bytes, sequence, payload_sum, ..Packet::EMPTY };
        self.send(state, cable, class, packet, Some(sent));
    }

    /// Sends a packet, for which there is room, and lets words follow it.
    fn send(&self, state: &mut State, cable: usize, class: usize, packet: Packet, what: Option<Sent>) {
        state.cables[cable].words[class] = WORDS;
        self.post(state, cable, class, packet, what);
    }

    fn post(&self, state: &mut State, cable: usize, class: usize, mut packet: Packet, what: Option<Sent>) {
        let sent = &mut state.cables[cable].sent[class];
        packet.turn = *sent;
        *sent = packet.turn.wrapping_add(1);
        state.ledger.sent(cable, class, what);
        // If it cannot be sent it is among what has not come.
        if let Err(error) = self.wires[cable].send(class, &mut packet) {
            self.lose(state, cable, error);
        }
    }

    /// Says a word on a queue pair on which nothing has been said since the last call, if the peer may have missed the last
    /// packet, or if it has been silent for long.
    fn say_word(&self, state: &mut State, cable: usize, class: usize) {
        let now = Instant::now();
        let Cable { sent, noted, spoke, words, .. } = &mut state.cables[cable];
        if noted[class] != sent[class] {
            (noted[class], spoke[class]) = (sent[class], now);
            return;
        }
        let unsure = words[class] > 0 && state.ledger.open(cable, class) > 0;
        let silent = self.keep_alive.is_some_and(|every| now - spoke[class] >= every);
        // Credits need fewer than these leave, and streams more.
        let reserve = if class == SMALL { RESERVED - 1 } else { 0 };
        if !(unsure || silent) || !self.has_room(state, cable, class, reserve) {
            return;
        }
        let cable_state = &mut state.cables[cable];
        cable_state.words[class] = cable_state.words[class].saturating_sub(1);
        cable_state.noted[class] = cable_state.noted[class].wrapping_add(1);
        cable_state.spoke[class] = now;
        let word = match class {
            BULK => {
                // A packet is shorter than 16 MiB.
                let bytes = self.wires[cable].classes[class].payload() as u32;
                Packet { kind: Kind::Idle, bytes, ..Packet::EMPTY }
            }
            _ => Packet::EMPTY,
        };
        self.post(state, cable, class, word, None);
    }

    /// Says how many receives have been posted where the peer does not know of many.
    fn return_credits(&self, state: &mut State) {
        for (cable, wire) in self.wires.iter().enumerate() {
            // One receive stays for the end, and what a peer has been told that is gone is lost.
            if wire.owes()
                && !state.out.iter().all(|&(_, ended)| ended)
                && self.has_room(state, cable, SMALL, 1)
            {
                self.send(state, cable, SMALL, Packet::EMPTY, None);
            }
        }
    }

    /// Looks for what has come for a stream.
    fn look(&self, state: &mut State, stream: usize) {
        state.looks = state.looks.wrapping_add(1);
        if state.ledger.deaths() > 0 || state.looks.is_multiple_of(OWN_LOOKS) {
            self.look_at_all(state);
        } else {
            self.poll(state, stream);
            self.recover(state);
        }
    }

    fn look_at_all(&self, state: &mut State) {
        // A dead cable may bring the peer's word that another is dead, where this was found dead by one side alone.
        (0..self.wires.len()).for_each(|cable| self.poll(state, cable));
        self.recover(state);
    }

    /// Takes all completions of a cable.
    fn poll(&self, state: &mut State, cable: usize) {
        let mut done = [Completion::default(); BATCH];
        while state.failure.is_none() {
            let count = match self.wires[cable].poll(&mut done) {
                Ok(count) => count,
                Err(error) => return self.lose(state, cable, error),
            };
            for completion in &done[..count] {
                if let Err(error) = self.completed(state, cable, completion) {
                    self.lose(state, cable, error);
                }
            }
            if count < BATCH {
                return;
            }
        }
    }

    fn completed(&self, state: &mut State, cable: usize, completion: &Completion) -> Result<(), LinkError> {
        let wire = &self.wires[cable];
        let (class, slot, packet) = match wire.completed(completion)? {
            Some(Came::Packet { class, slot, packet }) => (class, slot, packet),
            // Whose memory is lent is sent again from nowhere, so that none is.
            Some(Came::Bare { bytes, .. }) => return Err(wire.damaged(format!("it has {bytes} bytes"))),
            None => return Ok(()),
        };
        let slot = Slot { cable, class, slot };
        if let Some(expected) = packet.payload_sum {
            // SAFETY: the slot holds the packet, and nothing is posted there until it has been read.
            let sum = unsafe { crc32c_raw(0, self.payload(&slot), packet.bytes as usize) };
            if sum != expected {
                return Err(wire.damaged("the checksum of its payload is wrong".to_owned()));
            }
        }
        let is_alive = state.ledger.is_alive(cable);
        if is_alive {
            let expected = state.cables[cable].came[class];
            if packet.turn != expected {
                return Err(wire.lost(expected, packet.turn));
            }
            state.cables[cable].came[class] = expected.wrapping_add(1);
            wire.granted(&packet);
            for (index, class) in wire.classes.iter().enumerate() {
                // A receive is posted again after its packet has come.
                let turn = class.granted.load(Ordering::Relaxed).wrapping_sub(class.peer_slots);
                state.ledger.acknowledge(cable, index, turn);
            }
        }
        match packet.kind {
            Kind::Down => {
                let down = self.read_down(&slot, &packet).map_err(|what| wire.damaged(what))?;
                self.post_receive(state, slot);
                self.heard(state, &down);
            }
            _ if !is_alive => {}
            Kind::Credit | Kind::Idle => self.post_receive(state, slot),
            Kind::Stream | Kind::End => {
                let stream = usize::from(packet.stream);
                if stream >= self.wires.len() {
                    return Err(wire.damaged(format!("it is of stream {stream}")));
                }
                state.leaving |= packet.kind == Kind::End;
                if !state.inbound.put(stream, packet.sequence, slot, packet.bytes as usize) {
                    self.post_receive(state, slot);
                }
            }
            Kind::Bare => {
                return Err(
                    wire.damaged("it is of a pair whose cables do not stand in for each other".to_owned())
                );
            }
        }
        Ok(())
    }

    /// A slot is free for the next packet, if its cable is alive.
    fn post_receive(&self, state: &mut State, slot: Slot) {
        if state.ledger.is_alive(slot.cable)
            && let Err(error) = self.wires[slot.cable].post_receive(slot.class, slot.slot)
        {
            self.lose(state, slot.cable, error);
        }
    }

    /// Where the payload of a packet that came begins.
    fn payload(&self, slot: &Slot) -> *const u8 {
        self.wires[slot.cable].receive_slot(slot.class, slot.slot).wrapping_add(PACKET_BYTES)
    }

    /// Where the payload of the next packet goes.
    fn payload_slot(&self, state: &State, cable: usize, class: usize) -> *mut u8 {
        self.wires[cable].send_slot(class, state.cables[cable].sent[class]).wrapping_add(PACKET_BYTES)
    }
}

impl State {
    fn check(&self) -> Result<(), LinkError> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

impl Kept for Bundle {
    fn name(&self) -> &str {
        self.cable(0)
    }

    fn keep(&self) -> Result<(), LinkError> {
        self.tend()
    }
}
