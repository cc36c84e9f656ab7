//! Proving a shared key to each other, and sealing records with what comes of it: Noise's NNpsk0, without any I/O.
//!
//! ```text
//! caller                                called
//!   | ephemeral key, proof of the key ---> |    can be replayed: whoever sent it is not known yet
//!   | <--- ephemeral key, proof of the key |
//!   | record 0 --------------------------> |    cannot: the caller is here, now, and has the key
//! ```
//! What is sealed stays secret even from those who learn the key later, since both ephemeral keys are gone by then.
#![forbid(unsafe_code)]

use std::{fmt, sync::Arc};

use snow::{
    Builder, HandshakeState, StatelessTransportState,
    params::{BaseChoice, CipherChoice, DHChoice, HandshakeChoice, HashChoice, NoiseParams},
    params::{HandshakeModifier, HandshakeModifierList, HandshakePattern},
    resolvers::{CryptoResolver, DefaultResolver},
};

/// Bytes of a key.
pub(crate) const KEY_BYTES: usize = 32;
/// Bytes of either message of a handshake: an ephemeral key and a tag.
pub(crate) const HANDSHAKE_BYTES: usize = 48;
/// What sealing adds to a record.
pub(crate) const TAG_BYTES: usize = 16;
/// Most plain bytes of a record: enough for the tag to cost nothing, and little enough to wait for.
pub(crate) const RECORD_LIMIT: usize = 16 << 10;

const NAME: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Why something was not done. After it the connection is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoiseError {
    /// The other side has another key, or bytes were changed on the way, or come from another conversation.
    #[error("what was received does not prove the key")]
    Unproven,
    /// The system gave no random numbers, or one key was used for all the records there can be.
    #[error("the cryptography failed: {0}")]
    Failed(snow::Error),
}

/// One side of a handshake that is under way.
pub(crate) struct Handshake(Box<HandshakeState>);

impl Handshake {
    /// The side that calls, and its message. Both sides must give the same prologue, which is bound to the proof.
    pub(crate) fn call(
        key: &[u8; KEY_BYTES],
        prologue: &[u8],
    ) -> Result<(Handshake, [u8; HANDSHAKE_BYTES]), NoiseError> {
        let state = builder(key, prologue).and_then(Builder::build_initiator).map_err(NoiseError::Failed)?;
        let mut handshake = Handshake(Box::new(state));
        let message = handshake.write()?;
        Ok((handshake, message))
    }

    /// The side that was called: checks the caller's message, and what to answer.
    pub(crate) fn answer(
        key: &[u8; KEY_BYTES],
        prologue: &[u8],
        message: &[u8],
    ) -> Result<([u8; HANDSHAKE_BYTES], Session), NoiseError> {
        let state = builder(key, prologue).and_then(Builder::build_responder).map_err(NoiseError::Failed)?;
        let mut handshake = Handshake(Box::new(state));
        handshake.read(message)?;
        let answer = handshake.write()?;
        Ok((answer, handshake.finish()?))
    }

    /// The caller's end of it: checks the answer.
    pub(crate) fn conclude(mut self, answer: &[u8]) -> Result<Session, NoiseError> {
        self.read(answer)?;
        self.finish()
    }

    fn write(&mut self) -> Result<[u8; HANDSHAKE_BYTES], NoiseError> {
        let mut message = [0; HANDSHAKE_BYTES];
        self.0.write_message(&[], &mut message).map_err(NoiseError::Failed)?;
        Ok(message)
    }

    fn read(&mut self, message: &[u8]) -> Result<(), NoiseError> {
        // Nothing is carried in the messages themselves.
        let nothing = self.0.read_message(message, &mut []).map_err(|_| NoiseError::Unproven)?;
        if nothing == 0 { Ok(()) } else { Err(NoiseError::Unproven) }
    }

    fn finish(self) -> Result<Session, NoiseError> {
        let state = Arc::new(self.0.into_stateless_transport_mode().map_err(NoiseError::Failed)?);
        let sealer = Sealer { state: Arc::clone(&state), next: 0 };
        Ok(Session { sealer, opener: Opener { state, next: 0 } })
    }
}

/// What a handshake was for: one end of a conversation.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

/// Seals the records of one direction, each under the next number.
///
/// The numbers have 64 bits, so a key lasts for longer than any machine; the last one is an error and never used again.
pub(crate) struct Sealer {
    state: Arc<StatelessTransportState>,
    next: u64,
}

impl Sealer {
    /// Seals a record of at most [`RECORD_LIMIT`] bytes into the front of `out`, which has room for [`TAG_BYTES`] more.
    pub(crate) fn seal(&mut self, plain: &[u8], out: &mut [u8]) -> Result<usize, NoiseError> {
        debug_assert!(plain.len() <= RECORD_LIMIT);
        let written = self.state.write_message(self.next, plain, out).map_err(NoiseError::Failed)?;
        self.next += 1;
        Ok(written)
    }
}

/// Opens the records of the other direction, in the order in which they were sealed and no other.
pub(crate) struct Opener {
    state: Arc<StatelessTransportState>,
    next: u64,
}

impl Opener {
    /// Opens a record into the front of `out`, which has room for all of it without its tag. After an error `out` holds
    /// nothing of use.
    pub(crate) fn open(&mut self, record: &[u8], out: &mut [u8]) -> Result<usize, NoiseError> {
        let opened = self.state.read_message(self.next, record, out).map_err(|_| NoiseError::Unproven)?;
        self.next += 1;
        Ok(opened)
    }
}

/// A key for `context`, which tells nothing of `key` nor of the keys for other contexts.
///
/// It is the last step of HKDF with Noise's hash function, which needs no more than that because `key` is as good as random
/// already. snow has the HMAC, so no further crate is needed for it.
pub(crate) fn derive(key: &[u8; KEY_BYTES], context: &[&[u8]]) -> [u8; KEY_BYTES] {
    let mut info = Vec::new();
    for part in context {
        // With their lengths, so that no two lists of parts make the same bytes.
        info.extend((part.len() as u64).to_le_bytes());
        info.extend_from_slice(part);
    }
    info.push(1);
    let mut derived = [0; KEY_BYTES];
    let Some(mut hash) = DefaultResolver.resolve_hash(&HashChoice::Blake2s) else {
        unreachable!("Cargo.toml asks snow for BLAKE2s")
    };
    hash.hmac(key, &info, &mut derived);
    derived
}

fn builder<'a>(key: &'a [u8; KEY_BYTES], prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    let modifiers = HandshakeModifierList { list: vec![HandshakeModifier::Psk(0)] };
    let handshake = HandshakeChoice { pattern: HandshakePattern::NN, modifiers };
    let params = NoiseParams::new(
        NAME.to_owned(),
        BaseChoice::Noise,
        handshake,
        DHChoice::Curve25519,
        CipherChoice::ChaChaPoly,
        HashChoice::Blake2s,
    );
    Builder::new(params).psk(0, key)?.prologue(prologue)
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handshake(hidden)")
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").field("next", &self.next).finish_non_exhaustive()
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").field("next", &self.next).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions(one: [u8; 32], two: [u8; 32]) -> Result<[(Sealer, Opener); 2], NoiseError> {
        let parts = |session: Session| (session.sealer, session.opener);
        let (handshake, message) = Handshake::call(&one, b"prologue")?;
        let (answer, called) = Handshake::answer(&two, b"prologue", &message)?;
        Ok([handshake.conclude(&answer)?, called].map(parts))
    }

    fn sealed(sealer: &mut Sealer, plain: &[u8]) -> Vec<u8> {
        let mut record = vec![0; plain.len() + TAG_BYTES];
        let written = sealer.seal(plain, &mut record).unwrap();
        assert_eq!(written, record.len());
        record
    }

    fn opened(opener: &mut Opener, record: &[u8]) -> Result<Vec<u8>, NoiseError> {
        let mut plain = vec![0; record.len().saturating_sub(TAG_BYTES)];
        let length = opener.open(record, &mut plain)?;
        plain.truncate(length);
        Ok(plain)
    }

    #[test]
    fn records_open_in_order_on_the_other_side_only() {
        let [(mut seal, mut open_own), (mut seal_back, mut open)] = sessions([7; 32], [7; 32]).unwrap();
        for length in [0, 1, 1000, RECORD_LIMIT] {
            let plain = vec![length as u8; length];
            let record = sealed(&mut seal, &plain);
            assert!(length < 16 || !record.windows(16).any(|window| plain.starts_with(window)));
            assert!(opened(&mut open_own, &record).is_err(), "sent back to its sender");
            assert_eq!(opened(&mut open, &record).unwrap(), plain);
            assert!(opened(&mut open, &record).is_err(), "sent again");
            let record = sealed(&mut seal_back, &plain);
            assert_eq!(opened(&mut open_own, &record).unwrap(), plain);
        }
        let (first, second) = (sealed(&mut seal, b"1"), sealed(&mut seal, b"2"));
        assert!(opened(&mut open, &second).is_err(), "before its turn");
        assert_eq!(opened(&mut open, &first).unwrap(), b"1");
    }

    #[test]
    fn any_changed_bit_of_a_record_or_of_the_handshake_is_noticed() {
        let [(mut seal, _), (_, mut open)] = sessions([7; 32], [7; 32]).unwrap();
        let record = sealed(&mut seal, b"something");
        for bit in 0..record.len() * 8 {
            let mut changed = record.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(opened(&mut open, &changed).is_err(), "bit {bit}");
        }
        for cut in 0..record.len() {
            assert!(opened(&mut open, &record[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(opened(&mut open, &record).unwrap(), b"something");

        let (_, message) = Handshake::call(&[7; 32], b"").unwrap();
        for bit in (0..message.len() * 8).step_by(5) {
            let mut changed = message;
            changed[bit / 8] ^= 1 << (bit % 8);
            // X25519 ignores the highest bit of a key, but the hash of the conversation does not.
            assert!(Handshake::answer(&[7; 32], b"", &changed).is_err(), "bit {bit}");
        }
        let (answer, ..) = Handshake::answer(&[7; 32], b"", &message).unwrap();
        for bit in (0..answer.len() * 8).step_by(29) {
            let mut changed = answer;
            changed[bit / 8] ^= 1 << (bit % 8);
            let (handshake, _) = Handshake::call(&[7; 32], b"").unwrap();
            assert!(handshake.conclude(&changed).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_key_and_another_prologue_are_refused_on_sight() {
        assert!(matches!(sessions([7; 32], [8; 32]), Err(NoiseError::Unproven)));
        let (_, message) = Handshake::call(&[7; 32], b"version 1").unwrap();
        let answer = Handshake::answer(&[7; 32], b"version 2", &message);
        assert!(matches!(answer, Err(NoiseError::Unproven)));
    }

    #[test]
    fn a_replayed_first_message_opens_nothing() {
        let (handshake, message) = Handshake::call(&[7; 32], b"").unwrap();
        let (answer, mut called) = Handshake::answer(&[7; 32], b"", &message).unwrap();
        let mut caller = handshake.conclude(&answer).unwrap();
        let record = sealed(&mut caller.sealer, b"let me in");
        assert_eq!(opened(&mut called.opener, &record).unwrap(), b"let me in");
        // Whoever has recorded all of that gets an answer, as the message proves the key, but has no use for it.
        let (_, mut again) = Handshake::answer(&[7; 32], b"", &message).unwrap();
        assert!(opened(&mut again.opener, &record).is_err());
    }

    #[test]
    fn the_last_number_is_an_error_and_no_record() {
        let [(mut seal, _), _] = sessions([7; 32], [7; 32]).unwrap();
        seal.next = u64::MAX - 1;
        sealed(&mut seal, b"the last one");
        for _ in 0..2 {
            assert!(matches!(seal.seal(b"", &mut [0; 16]), Err(NoiseError::Failed(_))));
        }
    }

    #[test]
    fn derived_keys_differ_by_every_part() {
        let key = |key: u8, context: &[&[u8]]| derive(&[key; 32], context);
        let mut keys = vec![
            key(1, &[b"a", b"b"]),
            key(2, &[b"a", b"b"]),
            key(1, &[b"ab"]),
            key(1, &[b"ab", b""]),
            key(1, &[b"b", b"a"]),
            key(1, &[]),
        ];
        keys.push([1; 32]);
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 7);
        assert_eq!(key(1, &[b"a", b"b"]), key(1, &[b"a", b"b"]));
    }

    /// The name goes into the first hash, and the choices into the arithmetic: they must say the same.
    #[test]
    fn the_name_is_that_of_the_choices() {
        let named: NoiseParams = NAME.parse().unwrap();
        let Ok(built) = builder(&[0; 32], b"") else { panic!("the key has its length") };
        let state = built.build_initiator().unwrap();
        assert!(state.is_initiator());
        assert_eq!(named.handshake.pattern, HandshakePattern::NN);
        assert_eq!(named.handshake.modifiers.list, [HandshakeModifier::Psk(0)]);
        assert_eq!(named.dh, DHChoice::Curve25519);
        assert_eq!(named.cipher, CipherChoice::ChaChaPoly);
        assert_eq!(named.hash, HashChoice::Blake2s);
    }
}
