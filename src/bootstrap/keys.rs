//! The keys of a job and of its groups, all derived from the job secret.
//!
//! ```text
//! job secret ──┬──> lobby key                 to reach rank 0 before the group has a nonce
//!              └──> group key (nonce) ──┬──> key of one place: a pair of ranks, control or data, and its number
//!                                       └──> ...
//! ```
//! A new life of a group has a new nonce, and with it new keys: what belonged to the old one proves nothing in it.
#![forbid(unsafe_code)]

use std::{fmt, hint};

use super::message::{Purpose, SIZE_LIMIT, SOCKETS_LIMIT};
use crate::{
    config::Secret,
    noise::{KEY_BYTES, derive},
};

/// What follows from the job secret alone.
#[derive(Debug, Clone)]
pub(crate) struct JobKeys {
    secret: Secret,
}

impl JobKeys {
    pub(crate) fn new(secret: Secret) -> JobKeys {
        JobKeys { secret }
    }

    /// For connections to rank 0 of those who are not in a group yet.
    pub(crate) fn lobby(&self) -> Key {
        Key(derive(self.secret.bytes(), &[b"raccl 1 lobby"]))
    }

    /// The keys of the group with this nonce.
    pub(crate) fn group(&self, nonce: &[u8; 32]) -> GroupKeys {
        GroupKeys { lobby: self.lobby(), group: Key(derive(self.secret.bytes(), &[b"raccl 1 group", nonce])) }
    }
}

/// The keys of one group.
#[derive(Debug)]
pub(crate) struct GroupKeys {
    lobby: Key,
    group: Key,
}

impl GroupKeys {
    /// What both ends of a connection at this place have to prove.
    pub(crate) fn place(&self, place: Place) -> Key {
        match place {
            Place::Lobby => self.lobby.clone(),
            Place::Pair { .. } => Key(derive(&self.group.0, &[b"place", &place.encode()])),
        }
    }
}

/// A key for one handshake. It is not shown by `Debug` and is overwritten when dropped.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    pub(crate) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(hidden)")
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        self.0.fill(0);
        hint::black_box(&self.0);
    }
}

/// Which connection this is. The caller says it in clear, because the called rank has to find the key for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// To rank 0, before the group is known.
    Lobby,
    /// Between two members.
    Pair { from: usize, to: usize, purpose: Purpose },
}

impl Place {
    /// Bytes of its encoding.
    pub(crate) const BYTES: usize = 13;

    pub(crate) fn encode(self) -> [u8; Place::BYTES] {
        let (kind, numbers) = match self {
            Place::Lobby => (0, [0; 3]),
            Place::Pair { from, to, purpose: Purpose::Control } => (1, [from, to, 0]),
            Place::Pair { from, to, purpose: Purpose::Data(index) } => (2, [from, to, index]),
        };
        let mut bytes = [0; Place::BYTES];
        bytes[0] = kind;
        for (number, bytes) in numbers.into_iter().zip(bytes[1..].chunks_exact_mut(4)) {
            // Ranks and sockets are counted in far fewer bits.
            bytes.copy_from_slice(&(number as u32).to_le_bytes());
        }
        bytes
    }

    /// `None` if no place has this encoding.
    pub(crate) fn decode(bytes: &[u8; Place::BYTES]) -> Option<Place> {
        let number = |at: usize| {
            let at = 1 + 4 * at;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize
        };
        let (from, to, index) = (number(0), number(1), number(2));
        if from >= SIZE_LIMIT || to >= SIZE_LIMIT || index >= SOCKETS_LIMIT {
            return None;
        }
        match (bytes[0], from, to, index) {
            (0, 0, 0, 0) => Some(Place::Lobby),
            (1, _, _, 0) => Some(Place::Pair { from, to, purpose: Purpose::Control }),
            (2, _, _, _) => Some(Place::Pair { from, to, purpose: Purpose::Data(index) }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place() -> impl Strategy<Value = Place> {
        let purpose = prop_oneof![Just(Purpose::Control), (0..SOCKETS_LIMIT).prop_map(Purpose::Data)];
        prop_oneof![
            Just(Place::Lobby),
            (0..SIZE_LIMIT, 0..SIZE_LIMIT, purpose).prop_map(|(from, to, purpose)| Place::Pair {
                from,
                to,
                purpose
            }),
        ]
    }

    proptest! {
        #[test]
        fn every_place_survives_the_wire(place in place()) {
            prop_assert_eq!(Place::decode(&place.encode()), Some(place));
        }

        #[test]
        fn a_place_has_one_encoding(bytes: [u8; Place::BYTES], kind in 0..4u8) {
            let mut bytes = bytes;
            bytes[0] = kind;
            for high in [3, 4, 7, 8, 11, 12] {
                bytes[high] &= 1;
            }
            if let Some(place) = Place::decode(&bytes) {
                prop_assert_eq!(place.encode(), bytes);
            }
        }

        #[test]
        fn two_places_have_two_keys(one in place(), two in place()) {
            let keys = JobKeys::new(Secret::new([3; 32])).group(&[4; 32]);
            prop_assert_eq!(keys.place(one) == keys.place(two), one == two);
        }
    }

    #[test]
    fn keys_differ_by_secret_and_nonce() {
        let place = Place::Pair { from: 1, to: 0, purpose: Purpose::Data(0) };
        let key =
            |secret: u8, nonce: u8| JobKeys::new(Secret::new([secret; 32])).group(&[nonce; 32]).place(place);
        assert!(key(1, 1) == key(1, 1));
        assert!(key(1, 1) != key(2, 1) && key(1, 1) != key(1, 2));
        let job = JobKeys::new(Secret::new([1; 32]));
        assert!(job.lobby() != job.group(&[1; 32]).place(place));
        assert!(job.lobby() == job.group(&[1; 32]).place(Place::Lobby));
        assert_eq!(format!("{:?} {:?}", job, job.lobby()), "JobKeys { secret: Secret(hidden) } Key(hidden)");
    }
}
