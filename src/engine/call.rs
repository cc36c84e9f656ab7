//! The signature of a collective call, as it stands in every message of it.
#![forbid(unsafe_code)]

use std::{borrow::Borrow, fmt, ops::Range};

use crate::{
    link::Signature,
    plan::Algorithm,
    reduce::{DType, ReduceOp},
};

/// Which collective a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum CallKind {
    Barrier = 1,
    AllReduce,
    AllGather,
    AllGatherV,
    ReduceScatter,
    ReduceScatterV,
    Broadcast,
    Split,
}

/// Everything in which the ranks must agree when they make a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) kind: CallKind,
    /// [`DType::code`], or 0 where elements only move.
    pub(crate) dtype: u8,
    /// [`ReduceOp`] code, or 0 where elements only move.
    pub(crate) reduce: u8,
    /// Bytes of an element, saturated.
    pub(crate) element: u16,
    /// Elements: of one rank's buffer, or of all parts together.
    pub(crate) count: u64,
    pub(crate) root: u32,
    /// Digest of the counts where they may differ from rank to rank.
    pub(crate) digest: u32,
    /// The algorithm chosen; differs only if ranks chose from different tunings.
    pub(crate) algorithm: u8,
}

impl Call {
    /// A call without root, counts, reduction.
    pub(crate) fn new(kind: CallKind, element: usize, count: usize) -> Call {
        Call {
            kind,
            dtype: 0,
            reduce: 0,
            element: u16::try_from(element).unwrap_or(u16::MAX),
            count: count as u64,
            root: 0,
            digest: 0,
            algorithm: 0,
        }
    }

    /// The operation's name as users call it.
    pub(crate) fn name(&self) -> &'static str {
        kind_name(self.kind as u8)
    }

    pub(crate) fn encode(&self) -> Signature {
        let mut bytes = [0; 24];
        bytes[0] = self.kind as u8;
        bytes[1] = self.dtype;
        bytes[2] = self.reduce;
        bytes[3] = self.algorithm;
        bytes[4..6].copy_from_slice(&self.element.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.root.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.digest.to_le_bytes());
        bytes
    }
}

/// Puts into a signature what was called before, so that ranks whose earlier calls differed are told apart by any later
/// message: `past` is [`remember`]ed from call to call.
pub(crate) fn stamp(signature: &mut Signature, past: u16) {
    signature[PAST].copy_from_slice(&past.to_le_bytes());
}

/// What stands for all calls up to one with this (stamped) signature.
pub(crate) fn remember(signature: &Signature) -> u16 {
    let hash = fnv(signature);
    (hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48)) as u16
}

/// Whether two signatures name the same call, whatever came before.
pub(crate) fn same_call(one: &Signature, other: &Signature) -> bool {
    one[..PAST.start] == other[..PAST.start] && one[PAST.end..] == other[PAST.end..]
}

/// The root of a broadcast: the one rank of a call that hears nothing of the others in it.
pub(crate) fn broadcast_root(signature: &Signature) -> Option<usize> {
    let root = u32::from_le_bytes(std::array::from_fn(|i| signature[16 + i]));
    (signature[0] == CallKind::Broadcast as u8).then_some(root as usize)
}

/// Where a signature says what was called before.
const PAST: Range<usize> = 6..8;

/// A digest of counts: FNV-1a over their little-endian bytes, folded to 32 bits.
pub(crate) fn digest(counts: &[usize]) -> u32 {
    let hash = fnv(counts.iter().flat_map(|&count| (count as u64).to_le_bytes()));
    (hash ^ (hash >> 32)) as u32
}

/// The name of the operation that a signature stands for.
pub(crate) fn name(signature: &Signature) -> &'static str {
    kind_name(signature[0])
}

/// Puts a signature, ours or a peer's, in words. Total: any bytes give some text.
pub(crate) fn describe(signature: &Signature) -> String {
    Described(signature).to_string()
}

struct Described<'a>(&'a Signature);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let element = u16::from_le_bytes([bytes[4], bytes[5]]);
        let count = u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i]));
        let root = u32::from_le_bytes(std::array::from_fn(|i| bytes[16 + i]));
        let digest = u32::from_le_bytes(std::array::from_fn(|i| bytes[20 + i]));
        let kind = kind_name(bytes[0]);
        if bytes[0] == CallKind::Barrier as u8 || bytes[0] == CallKind::Split as u8 {
            return f.write_str(kind);
        }
        write!(f, "{kind}(")?;
        if let Some(op) = ReduceOp::from_code(bytes[2]) {
            write!(f, "{op} of ")?;
        }
        match DType::from_code(bytes[1]) {
            Some(dtype) => write!(f, "{count} {dtype}")?,
            None => write!(f, "{count} x {element} bytes")?,
        }
        if bytes[0] == CallKind::Broadcast as u8 {
            write!(f, " from root {root}")?;
        }
        if digest != 0 {
            write!(f, ", counts {digest:08x}")?;
        }
        if bytes[3] != 0 {
            write!(f, ", {}", algorithm_name(bytes[3]))?;
        }
        f.write_str(")")
    }
}

fn fnv(bytes: impl IntoIterator<Item: Borrow<u8>>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| step(hash, *byte.borrow()))
}

fn kind_name(code: u8) -> &'static str {
    match code {
        1 => "barrier",
        2 => "all_reduce",
        3 => "all_gather",
        4 => "all_gather_v",
        5 => "reduce_scatter",
        6 => "reduce_scatter_v",
        7 => "broadcast",
        8 => "split",
        _ => "an unknown operation",
    }
}

fn algorithm_name(code: u8) -> String {
    match Algorithm::ALL.into_iter().find(|&algorithm| algorithm_code(algorithm) == code) {
        Some(algorithm) => algorithm.to_string(),
        None => format!("algorithm {code}"),
    }
}

/// What stands for an algorithm in a signature; 0 is none.
pub(crate) fn algorithm_code(algorithm: Algorithm) -> u8 {
    algorithm as u8 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_named_with_all_that_can_differ() {
        let call = Call {
            dtype: DType::Bf16.code(),
            reduce: ReduceOp::Sum.code(),
            ..Call::new(CallKind::AllReduce, 2, 1000)
        };
        assert_eq!(describe(&call.encode()), "all_reduce(sum of 1000 bf16)");
        let call = Call { root: 3, ..Call::new(CallKind::Broadcast, 4, 7) };
        assert_eq!(describe(&call.encode()), "broadcast(7 x 4 bytes from root 3)");
        assert_eq!(describe(&Call::new(CallKind::Barrier, 0, 0).encode()), "barrier");
    }

    #[test]
    fn what_was_called_before_is_remembered_for_ever() {
        let of = |calls: &[usize]| {
            let mut past = 0;
            for &count in calls {
                let mut signature = Call::new(CallKind::AllReduce, 4, count).encode();
                stamp(&mut signature, past);
                past = remember(&signature);
            }
            past
        };
        assert_eq!(of(&[1, 2, 3]), of(&[1, 2, 3]));
        assert_ne!(of(&[1, 2, 3]), of(&[2, 1, 3]));
        assert_ne!(of(&[7, 2, 3, 4]), of(&[8, 2, 3, 4]));
        let (mut one, other) = (Call::new(CallKind::Barrier, 0, 0).encode(), [1; 24]);
        stamp(&mut one, 17);
        assert!(same_call(&one, &Call::new(CallKind::Barrier, 0, 0).encode()) && !same_call(&one, &other));
    }

    #[test]
    fn foreign_bytes_have_a_description_too() {
        for fill in 0..=255 {
            assert!(!describe(&[fill; 24]).is_empty());
        }
    }

    #[test]
    fn counts_in_another_order_have_another_digest() {
        assert_ne!(digest(&[1, 2, 3]), digest(&[3, 2, 1]));
    }
}
