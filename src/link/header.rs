//! The 64 bytes in front of every message.
//!
//! ```text
//!  0       2   3    4       8       12      16              24      28      32              56              64
//! +-------+---+----+-------+-------+-------+---------------+-------+-------+---------------+---------------+
//! | magic |ver|kind| epoch | comm  |credit |   sequence    |stream | flags |   signature   |    length     |
//! +-------+---+----+-------+-------+-------+---------------+-------+-------+---------------+---------------+
//! ```
//! All fields are little-endian. `signature` is 24 bytes that say which call the message belongs to; the engine compares them
//! before it uses the payload.
#![forbid(unsafe_code)]

/// Size of an encoded [`Header`].
pub(crate) const HEADER_BYTES: usize = 64;

const MAGIC: u16 = 0xC172;
const VERSION: u8 = 1;

/// Identifies the call that a message belongs to (see the engine's `Call` for a collective; tag and total length for
/// point-to-point).
pub(crate) type Signature = [u8; 24];

/// What a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MessageKind {
    /// A chunk of a collective's stream.
    Collective = 1,
    /// A whole point-to-point message, sent ahead.
    Eager = 2,
    /// Announces a point-to-point message too large to be sent ahead; no payload.
    Announce = 3,
    /// The receiver has room for what `sequence` names: a collective (flag 0) or an announced message (flag 1); no payload.
    Grant = 4,
    /// A chunk of an announced and granted point-to-point message.
    Data = 5,
    /// Nothing but `credit`; no payload.
    Credit = 6,
}

/// A decoded message header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: MessageKind,
    /// Which life of the group: a message of an earlier one is never mistaken for one of this.
    pub(crate) epoch: u32,
    /// Which communicator of the group.
    pub(crate) comm: u32,
    /// Units of send-ahead budget given back to the receiver of this header.
    pub(crate) credit: u32,
    /// Collectives: place in the communicator's sequence. Point-to-point: number of the message from this sender.
    pub(crate) sequence: u64,
    /// Collectives: which stream between this pair within the operation.
    pub(crate) stream: u32,
    pub(crate) flags: u32,
    pub(crate) signature: Signature,
    /// Bytes of payload behind this header.
    pub(crate) length: u64,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[2] = VERSION;
        bytes[3] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.comm.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.credit.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.stream.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.flags.to_le_bytes());
        bytes[32..56].copy_from_slice(&self.signature);
        bytes[56..64].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Decodes what a peer sent; the error says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, String> {
        let magic = u16::from_le_bytes([bytes[0], bytes[1]]);
        if magic != MAGIC {
            return Err(format!("a message starts with {magic:#06x} instead of {MAGIC:#06x}"));
        }
        if bytes[2] != VERSION {
            return Err(format!("message format {} instead of {VERSION}", bytes[2]));
        }
        let kind = match bytes[3] {
            1 => MessageKind::Collective,
            2 => MessageKind::Eager,
            3 => MessageKind::Announce,
            4 => MessageKind::Grant,
            5 => MessageKind::Data,
            6 => MessageKind::Credit,
            other => return Err(format!("unknown message kind {other}")),
        };
        let header = Header {
            kind,
            epoch: u32_at(bytes, 4),
            comm: u32_at(bytes, 8),
            credit: u32_at(bytes, 12),
            sequence: u64_at(bytes, 16),
            stream: u32_at(bytes, 24),
            flags: u32_at(bytes, 28),
            signature: std::array::from_fn(|i| bytes[32 + i]),
            length: u64_at(bytes, 56),
        };
        let bare = matches!(kind, MessageKind::Announce | MessageKind::Grant | MessageKind::Credit);
        if bare && header.length != 0 {
            return Err(format!("a {kind:?} message with {} bytes of payload", header.length));
        }
        Ok(header)
    }
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            kind: MessageKind::Collective,
            epoch: 7,
            comm: 0xAABBCCDD,
            credit: 9,
            sequence: u64::MAX - 1,
            stream: 3,
            flags: 0x8000_0001,
            signature: std::array::from_fn(|i| i as u8),
            length: 5 << 40,
        }
    }

    #[test]
    fn a_header_survives_the_wire() {
        assert_eq!(Header::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_wrong_magic_version_and_kind_is_refused() {
        for (at, value) in [(0, 0), (1, 0), (2, 2), (3, 0), (3, 7)] {
            let mut bytes = sample().encode();
            bytes[at] = value;
            assert!(Header::decode(&bytes).is_err(), "byte {at} = {value}");
        }
    }

    #[test]
    fn bare_kinds_carry_no_payload() {
        for kind in [MessageKind::Announce, MessageKind::Grant, MessageKind::Credit] {
            assert!(Header::decode(&Header { kind, ..sample() }.encode()).is_err());
            assert!(Header::decode(&Header { kind, length: 0, ..sample() }.encode()).is_ok());
        }
    }
}
