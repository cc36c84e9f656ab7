//! What is done about a dead cable.

use std::sync::atomic::Ordering;

use super::{
    Bundle, State,
    inbound::Slot,
    ledger::{Again, Sent},
};
use crate::link::{
    LinkError,
    verbs::{
        crc32c::crc32c_raw,
        packet::{Down, Kind, PACKET_BYTES, Packet},
        wire::{Class, RESERVED, SMALL},
    },
};

/// How much a receiver keeps beside its slots for each cable that has died, in all the receives of the pair: what was there
/// before, what was under way, what goes under way before the peer knows, and what is sent again.
const KEPT: usize = 4;

impl Bundle {
    /// A cable has died, unless it had before. The last takes the link with it.
    pub(super) fn lose(&self, state: &mut State, cable: usize, error: LinkError) {
        if !state.ledger.is_alive(cable) || state.failure.is_some() {
            return;
        }
        let left = state.ledger.alive() - 1;
        if left == 0 {
            state.failure = Some(error);
            return;
        }
        state.ledger.die(cable, state.cables[cable].came);
        self.deaths.store(state.ledger.deaths(), Ordering::Release);
        let receives = |class: &Class| class.slot_bytes * class.recv_slots as usize;
        let all: usize = self.wires.iter().flat_map(|wire| &wire.classes).map(receives).sum();
        state.inbound.allow(KEPT * all);
        let cable = &self.wires[cable].cable;
        let reason = match &error {
            LinkError::Broken { source, .. } => source.to_string(),
            other => other.to_string(),
        };
        if state.leaving {
            tracing::debug!(cable, left, reason, "a cable has died while the group ends");
        } else {
            tracing::warn!(
                cable,
                left,
                reason,
                "a cable has died; this pair goes on over those that are left"
            );
        }
    }

    /// After a death: tells the peer, makes room, and sends again what did not come, as far as all that can be done now.
    pub(super) fn recover(&self, state: &mut State) {
        let mut deaths = 0;
        // Whatever is sent may show another cable to be dead.
        while state.failure.is_none() && deaths != state.ledger.deaths() {
            deaths = state.ledger.deaths();
            // Before credits for the room are returned, so that the peer knows before it sends more.
            self.tell(state);
            self.make_room(state);
            self.send_again(state);
            self.return_credits(state);
        }
    }

    fn tell(&self, state: &mut State) {
        while let Some((cable, came)) = state.ledger.untold() {
            let ways = 0..self.wires.len();
            let Some(through) = ways.into_iter().find(|&way| self.has_room(state, way, SMALL, 0)) else {
                return;
            };
            // There are not more than streams.
            let payload = Down { cable: cable as u32, came }.encode();
            let to = self.payload_slot(state, through, SMALL);
            // SAFETY: the slot is registered memory of ours, longer than this, and the packet that it held has come to the peer.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), to, payload.len()) };
            // SAFETY: the bytes were just written there, and nobody else writes to the slot.
            let payload_sum = Some(unsafe { crc32c_raw(0, to, payload.len()) });
            let bytes = payload.len() as u32;
            state.ledger.told(cable, through);
            self.send(
                state,
                through,
                SMALL,
                Packet { kind: Kind::Down, bytes, payload_sum, ..Packet::EMPTY },
                None,
            );
        }
    }

    fn make_room(&self, state: &mut State) {
        loop {
            let State { inbound, ledger, .. } = state;
            let take = |slot: &Slot, count: usize| {
                let mut bytes = vec![0; count].into_boxed_slice();
                // SAFETY: the slot holds so many bytes of payload, nothing is posted there, and the target is new.
                unsafe { std::ptr::copy_nonoverlapping(self.payload(slot), bytes.as_mut_ptr(), count) };
                bytes
            };
            let Some(slot) = inbound.keep(|slot| ledger.is_alive(slot.cable), take) else { return };
            self.post_receive(state, slot);
        }
    }

    fn send_again(&self, state: &mut State) {
        while let Some(Again { cable: dead, class: from_class, turn, sent, done }) = state.ledger.next_again()
        {
            let left = (sent.bytes - done) as usize;
            let reserve = if left == 0 { 0 } else { RESERVED };
            let Some((cable, class)) = self.way(state, sent.stream.into(), left, reserve) else { return };
            let bytes = left.min(self.wires[cable].classes[class].payload());
            let from =
                self.wires[dead].send_slot(from_class, turn).wrapping_add(PACKET_BYTES + done as usize);
            let to = self.payload_slot(state, cable, class);
            // SAFETY: the slot of a dead cable is not written any more and holds the packet; the other is registered memory of
            // another slot, long enough, and the packet that it held has come to the peer.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
            // A packet is shorter than 16 MiB.
            let bytes = bytes as u32;
            state.ledger.sent_again(bytes);
            self.send_stream(
                state,
                cable,
                class,
                Sent { offset: sent.offset.wrapping_add(done), bytes, ..sent },
            );
        }
    }

    /// The peer has found a cable dead, or answers that it knows.
    pub(super) fn heard(&self, state: &mut State, down: &Down) {
        let cable = down.cable as usize;
        let Some(wire) = self.wires.get(cable) else {
            let what = format!("the peer says that cable {cable} of {} is dead", self.wires.len());
            state.failure.get_or_insert(LinkError::Protocol(what));
            return;
        };
        self.lose(state, cable, wire.given_up());
        if let Err(what) = state.ledger.heard(cable, down.came) {
            let what = format!("cable {}: {what}", wire.cable);
            state.failure.get_or_insert(LinkError::Protocol(what));
        }
    }

    /// What a packet says of a dead cable.
    pub(super) fn read_down(&self, slot: &Slot, packet: &Packet) -> Result<Down, String> {
        let mut bytes = [0; Down::BYTES];
        if packet.bytes as usize != bytes.len() || packet.payload_sum.is_none() {
            return Err(format!("it is a {:?} packet of {} bytes", packet.kind, packet.bytes));
        }
        // SAFETY: the slot holds so many bytes of payload, and nothing is posted there.
        unsafe { std::ptr::copy_nonoverlapping(self.payload(slot), bytes.as_mut_ptr(), bytes.len()) };
        Ok(Down::decode(&bytes))
    }
}
