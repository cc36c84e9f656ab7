//! The 32 bytes in front of what one work request carries.
//!
//! ```text
//!  0       2   3    4       7      8          12     16       20      24          28           32
//! +-------+---+----+-------+------+----------+------+--------+-------+-----------+------------+
//! | magic |ver|kind| bytes |stream| sequence | turn | small  | bulk  |payload sum| header sum |
//! +-------+---+----+-------+------+----------+------+--------+-------+-----------+------------+
//! ```
//! All fields are little-endian. A queue pair has no way to tell its user that something was lost or came twice, so every
//! packet says which it is: `turn` counts the packets of its queue pair and `sequence` those of the lane that carry the stream,
//! over both queue pairs. `small` and `bulk` count the receives that the sender of the packet has posted so far. The header sum
//! begins with a number of the lane and direction, so that no other lane's packet is ever taken for one of this.
//!
//! Where the cables of a pair stand in for each other (see [`bundle`](super::bundle)), `stream` says whose bytes these are, and
//! `sequence` where in that stream they begin, modulo 2^32. Otherwise `stream` is 0.
#![forbid(unsafe_code)]

use super::crc32c::crc32c;

/// Size of an encoded [`Packet`].
pub(super) const PACKET_BYTES: usize = 32;

const MAGIC: u16 = 0xC17B;
const VERSION: u8 = 3;
/// In the byte of the kind: the payload's sum is given.
const SUMMED: u8 = 0x80;

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// The next bytes of the stream.
    Stream = 1,
    /// Nothing but the counts of receives; has no sequence.
    Credit = 2,
    /// The stream has ended.
    End = 3,
    /// Bytes of no meaning, so that a queue pair of long packets is not silent for ever; has no sequence.
    Idle = 4,
    /// A cable is dead: [`Down`]. Has no sequence, and always a payload sum.
    Down = 5,
    /// [`Bare`] packets come next, after the bytes of the stream that follow what says so. Always has a payload sum.
    Bare = 6,
}

/// A decoded header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) kind: Kind,
    /// Which stream it belongs to.
    pub(super) stream: u8,
    /// Bytes behind the header, fewer than 2^24.
    pub(super) bytes: u32,
    pub(super) sequence: u32,
    pub(super) turn: u32,
    /// Receives posted, by class.
    pub(super) posted: [u32; 2],
    /// CRC-32C of the payload, if the sender computes it.
    pub(super) payload_sum: Option<u32>,
}

impl Packet {
    /// One that says nothing but how many receives are posted, and that is yet to be counted.
    pub(super) const EMPTY: Packet = Packet {
        kind: Kind::Credit,
        stream: 0,
        bytes: 0,
        sequence: 0,
        turn: 0,
        posted: [0; 2],
        payload_sum: None,
    };

    pub(super) fn encode(&self, lane: u32) -> [u8; PACKET_BYTES] {
        let mut bytes = [0; PACKET_BYTES];
        bytes[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[2] = VERSION;
        bytes[3] = self.kind as u8 | if self.payload_sum.is_some() { SUMMED } else { 0 };
        let fields = [
            self.bytes | u32::from(self.stream) << 24,
            self.sequence,
            self.turn,
            self.posted[0],
            self.posted[1],
            self.payload_sum.unwrap_or(0),
        ];
        for (place, field) in bytes[4..28].chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let sum = crc32c(lane, &bytes[..28]);
        bytes[28..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes what has come; the error says what is wrong with it.
    pub(super) fn decode(bytes: &[u8; PACKET_BYTES], lane: u32) -> Result<Packet, String> {
        let field = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if field(28) != crc32c(lane, &bytes[..28]) {
            return Err("the checksum of its header is wrong".to_owned());
        }
        let magic = u16::from_le_bytes([bytes[0], bytes[1]]);
        if magic != MAGIC || bytes[2] != VERSION {
            return Err(format!(
                "it begins with {magic:#06x} and version {}, not {MAGIC:#06x} and {VERSION}",
                bytes[2]
            ));
        }
        let kind = match bytes[3] & !SUMMED {
            1 => Kind::Stream,
            2 => Kind::Credit,
            3 => Kind::End,
            4 => Kind::Idle,
            5 => Kind::Down,
            6 => Kind::Bare,
            other => return Err(format!("its kind is {other}")),
        };
        let packet = Packet {
            kind,
            stream: bytes[7],
            bytes: field(4) & 0x00FF_FFFF,
            sequence: field(8),
            turn: field(12),
            posted: [field(16), field(20)],
            payload_sum: (bytes[3] & SUMMED != 0).then(|| field(24)),
        };
        if matches!(kind, Kind::Stream | Kind::Idle | Kind::Down | Kind::Bare) == (packet.bytes == 0) {
            return Err(format!("it is a {kind:?} packet of {} bytes", packet.bytes));
        }
        Ok(packet)
    }
}

/// What one side has to know of a cable that is dead to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Down {
    /// Which of the pair's cables.
    pub(super) cable: u32,
    /// Packets that had come through it, by class.
    pub(super) came: [u32; 2],
}

impl Down {
    pub(super) const BYTES: usize = 12;

    pub(super) fn encode(&self) -> [u8; Down::BYTES] {
        let mut bytes = [0; Down::BYTES];
        for (place, field) in bytes.chunks_exact_mut(4).zip([self.cable, self.came[0], self.came[1]]) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Whatever has come says something; whether it can be is for the receiver to see.
    pub(super) fn decode(bytes: &[u8; Down::BYTES]) -> Down {
        let field = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Down { cable: field(0), came: [field(4), field(8)] }
    }
}

/// Packets of the bulk queue pair that have no header, because they come from where the user has them and go where the user wants
/// them.
///
/// How long such a packet is depends on its turn, so that the next one in its place is noticed: no two of [`Bare::PERIOD`] have the
/// same length, which is more than can be on their way. All are shorter than a packet with a header, by less than a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bare {
    /// The turn of the first of them.
    pub(super) turn: u32,
    pub(super) count: u32,
}

impl Bare {
    pub(super) const BYTES: usize = 8;
    /// A power of two, so that it goes on where turns begin again.
    const PERIOD: u32 = 128;
    const STEP: usize = 16;

    pub(super) fn encode(&self) -> [u8; Bare::BYTES] {
        (u64::from(self.count) << 32 | u64::from(self.turn)).to_le_bytes()
    }

    /// Whatever has come says something.
    pub(super) fn decode(bytes: &[u8; Bare::BYTES]) -> Bare {
        let both = u64::from_le_bytes(*bytes);
        Bare { turn: both as u32, count: (both >> 32) as u32 }
    }

    /// Bytes of the packet of a turn, where slots have so many.
    #[inline]
    pub(super) fn length(slot_bytes: usize, turn: u32) -> usize {
        slot_bytes - Bare::STEP * (1 + (turn % Bare::PERIOD) as usize)
    }

    /// The turn of a packet of so many bytes, of the first ones from `from` on.
    pub(super) fn turn(slot_bytes: usize, from: u32, bytes: usize) -> Option<u32> {
        let mut turns = (0..Bare::PERIOD).map(|ahead| from.wrapping_add(ahead));
        turns.find(|&turn| Bare::length(slot_bytes, turn) == bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::link::verbs::{device::MOST_SLOTS, wire::FRAME};

    fn sample() -> Packet {
        Packet {
            kind: Kind::Stream,
            stream: 5,
            bytes: 0x00FF_FFE0,
            sequence: u32::MAX,
            turn: 7,
            posted: [64, 5],
            payload_sum: Some(0xDEAD_BEEF),
        }
    }

    #[test]
    fn a_header_survives_the_wire() {
        for packet in [
            sample(),
            Packet { payload_sum: None, ..sample() },
            Packet { kind: Kind::Credit, bytes: 0, ..sample() },
            Packet { kind: Kind::End, bytes: 0, ..sample() },
            Packet { kind: Kind::Idle, ..sample() },
            Packet { kind: Kind::Down, bytes: 12, ..sample() },
            Packet { kind: Kind::Bare, bytes: 8, ..sample() },
        ] {
            assert_eq!(Packet::decode(&packet.encode(9), 9), Ok(packet));
        }
        let down = Down { cable: 2, came: [u32::MAX, 7] };
        assert_eq!(Down::decode(&down.encode()), down);
        let bare = Bare { turn: u32::MAX - 1, count: 9 };
        assert_eq!(Bare::decode(&bare.encode()), bare);
    }

    #[test]
    fn the_length_of_a_bare_packet_tells_its_turn_and_its_frames_are_those_of_a_slot() {
        let slot = 64 << 10;
        for from in [0, 100, 127, 128, u32::MAX - 5] {
            for ahead in 0..Bare::PERIOD {
                let turn = from.wrapping_add(ahead);
                let bytes = Bare::length(slot, turn);
                assert_eq!(Bare::turn(slot, from, bytes), Some(turn));
                assert!(bytes < slot && bytes > slot - FRAME);
            }
        }
        assert_eq!(Bare::turn(slot, 0, slot), None);
        const { assert!(Bare::PERIOD > MOST_SLOTS, "more than can be on their way") }
    }

    #[test]
    fn every_flipped_bit_and_every_other_lane_is_noticed() {
        let good = sample().encode(3);
        assert!(Packet::decode(&good, 4).is_err());
        for bit in 0..8 * PACKET_BYTES {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Packet::decode(&bad, 3).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: [u8; PACKET_BYTES], lane: u32) {
            let _ = Packet::decode(&bytes, lane);
        }
    }
}
