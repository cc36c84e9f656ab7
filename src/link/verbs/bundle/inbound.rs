//! The streams of a pair as they come in: packets of any cable, put in order.
//!
//! Normally a packet stays in the slot where it came until it is read. Once a cable has died, packets are moved out of the slots
//! as long as there is room for them here, so that none that has to be read later is in the way of one that is awaited.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// What a packet costs beside its bytes.
const OVERHEAD: usize = 128;

/// The streams of a pair.
pub(super) struct Inbound {
    streams: Vec<Stream>,
    /// How much is kept outside of slots, and how much may be.
    kept: usize,
    room: usize,
    /// How many packets lie in slots.
    in_slots: usize,
}

#[derive(Default)]
struct Stream {
    /// Where the first packet that has not been read entirely begins.
    next: u64,
    waiting: BTreeMap<u64, Piece>,
}

/// The payload of a packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) place: Place,
    /// Of its bytes, how many have been read, and how many there are: none at the end of the stream.
    pub(super) read: usize,
    pub(super) bytes: usize,
}

/// Where a payload lies.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    Slot(Slot),
    Kept(Box<[u8]>),
}

/// A receive slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) cable: usize,
    pub(super) class: usize,
    pub(super) slot: u32,
}

impl Inbound {
    pub(super) fn new(streams: usize) -> Inbound {
        let streams = (0..streams).map(|_| Stream::default()).collect();
        Inbound { streams, kept: 0, room: 0, in_slots: 0 }
    }

    /// Takes in a packet that lies in a slot; false if its bytes have come before and the slot is free. There is such a stream.
    pub(super) fn put(&mut self, stream: usize, offset: u32, slot: Slot, bytes: usize) -> bool {
        let stream = &mut self.streams[stream];
        // Offsets are told modulo 2^32.
        let ahead = offset.wrapping_sub(stream.next as u32).cast_signed();
        let Ok(ahead) = u64::try_from(ahead) else { return false };
        let std::collections::btree_map::Entry::Vacant(entry) = stream.waiting.entry(stream.next + ahead)
        else {
            return false;
        };
        entry.insert(Piece { place: Place::Slot(slot), read: 0, bytes });
        self.in_slots += 1;
        true
    }

    /// What is next in the stream, if it has come.
    pub(super) fn front(&self, stream: usize) -> Option<&Piece> {
        let Stream { next, waiting } = &self.streams[stream];
        waiting.first_key_value().filter(|(offset, _)| *offset == next).map(|(_, piece)| piece)
    }

    /// So many bytes more of the front have been read; its slot if that was the last of them.
    pub(super) fn read(&mut self, stream: usize, bytes: usize) -> Option<Slot> {
        let Stream { next, waiting } = &mut self.streams[stream];
        let mut front = waiting.first_entry()?;
        front.get_mut().read += bytes;
        if front.get().read < front.get().bytes {
            return None;
        }
        let piece = front.remove();
        *next += piece.bytes as u64;
        match piece.place {
            Place::Slot(slot) => {
                self.in_slots -= 1;
                Some(slot)
            }
            Place::Kept(_) => {
                self.kept -= piece.bytes + OVERHEAD;
                None
            }
        }
    }

    /// Bytes of the stream that have come without a gap, modulo 2^32, and one more at its end.
    pub(super) fn arrived(&self, stream: usize) -> u32 {
        let Stream { next, waiting } = &self.streams[stream];
        let mut end = *next;
        for (offset, piece) in waiting {
            if *offset != end {
                break;
            }
            if piece.bytes == 0 {
                end += 1;
                break;
            }
            end += piece.bytes as u64;
        }
        end as u32
    }

    /// Allows so many bytes more outside of slots.
    pub(super) fn allow(&mut self, bytes: usize) {
        self.room += bytes;
    }

    /// Moves a packet out of a slot for which `wanted` is true, the first in a stream first: `take` makes bytes of what
    /// the slot holds. The slot, which is free then; none if there is no such packet or no room.
    pub(super) fn keep(
        &mut self,
        wanted: impl Fn(&Slot) -> bool,
        take: impl FnOnce(&Slot, usize) -> Box<[u8]>,
    ) -> Option<Slot> {
        if self.in_slots == 0 {
            return None;
        }
        let room = self.room - self.kept;
        let mut pieces = self.streams.iter_mut().flat_map(|stream| stream.waiting.values_mut());
        let is_wanted = |piece: &&mut Piece| match &piece.place {
            Place::Slot(slot) => wanted(slot) && piece.bytes + OVERHEAD <= room,
            Place::Kept(_) => false,
        };
        let piece = pieces.find(is_wanted)?;
        let Place::Slot(slot) = piece.place else { return None };
        piece.place = Place::Kept(take(&slot, piece.bytes));
        self.kept += piece.bytes + OVERHEAD;
        self.in_slots -= 1;
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(slot: u32) -> Slot {
        Slot { cable: 0, class: 0, slot }
    }

    /// Reads a stream as far as it goes: the slots of its packets, and how many packets were kept outside.
    fn drain(inbound: &mut Inbound, stream: usize) -> (Vec<u32>, usize) {
        let (mut slots, mut kept) = (Vec::new(), 0);
        while let Some(piece) = inbound.front(stream).filter(|piece| piece.bytes > 0) {
            match inbound.read(stream, piece.bytes - piece.read) {
                Some(slot) => slots.push(slot.slot),
                None => kept += 1,
            }
        }
        (slots, kept)
    }

    #[test]
    fn packets_are_read_in_order_and_once() {
        let mut inbound = Inbound::new(2);
        assert!(inbound.put(0, 10, slot(1), 5));
        assert!(inbound.put(1, 0, slot(9), 3));
        assert_eq!(inbound.front(0), None);
        assert_eq!(inbound.arrived(0), 0);
        assert!(inbound.put(0, 0, slot(2), 10));
        assert_eq!((inbound.arrived(0), inbound.arrived(1)), (15, 3));
        assert!(!inbound.put(0, 0, slot(3), 10), "it has come");
        assert_eq!(inbound.read(0, 4), None);
        assert!(!inbound.put(0, 0, slot(3), 10), "it is being read");
        assert_eq!(drain(&mut inbound, 0), (vec![2, 1], 0));
        assert!(!inbound.put(0, 0, slot(3), 10), "it has been read");
        assert!(inbound.put(0, 15, slot(4), 0));
        assert_eq!(inbound.arrived(0), 16);
        assert_eq!(inbound.front(0).map(|piece| piece.bytes), Some(0));
    }

    #[test]
    fn packets_are_kept_outside_of_slots_within_bounds() {
        let mut inbound = Inbound::new(1);
        for index in 0..4 {
            assert!(inbound.put(0, 100 * index, slot(index), 100));
        }
        let take = |_: &Slot, bytes| vec![7; bytes].into();
        assert_eq!(inbound.keep(|_| true, take), None, "nothing is allowed");
        inbound.allow(2 * (100 + OVERHEAD));
        assert_eq!(inbound.keep(|slot| slot.slot != 0, take), Some(slot(1)));
        assert_eq!(inbound.keep(|_| true, take), Some(slot(0)));
        assert_eq!(inbound.keep(|_| true, take), None, "no room");
        assert_eq!(inbound.front(0).map(|piece| &piece.place), Some(&Place::Kept(vec![7; 100].into())));
        assert_eq!(inbound.read(0, 100), None);
        assert_eq!(inbound.keep(|_| true, take), Some(slot(2)));
        assert_eq!(drain(&mut inbound, 0), (vec![3], 2));
        assert_eq!((inbound.kept, inbound.in_slots), (0, 0));
    }

    #[test]
    fn offsets_go_on_behind_the_largest() {
        let mut inbound = Inbound::new(1);
        inbound.streams[0].next = u64::from(u32::MAX) - 4;
        assert!(inbound.put(0, 5, slot(1), 3));
        assert!(inbound.put(0, u32::MAX - 4, slot(0), 10));
        assert_eq!(drain(&mut inbound, 0), (vec![0, 1], 0));
        assert_eq!(inbound.arrived(0), 8);
    }

    proptest! {
        #[test]
        fn no_offsets_of_a_peer_panic(packets: Vec<(u32, u16)>) {
            let mut inbound = Inbound::new(1);
            inbound.allow(10_000);
            for (index, (offset, bytes)) in packets.into_iter().enumerate() {
                inbound.put(0, offset, slot(index as u32), bytes.into());
                inbound.keep(|_| true, |_, bytes| vec![0; bytes].into());
                drain(&mut inbound, 0);
                inbound.arrived(0);
            }
        }
    }
}
