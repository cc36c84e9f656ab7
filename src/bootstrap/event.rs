//! What members of a formed group say to each other on control connections.
#![forbid(unsafe_code)]

use super::{
    council::Word,
    message::{SIZE_LIMIT, SOCKETS_LIMIT},
    watcher::{CauseKind, MESSAGE_LIMIT, RemoteCause, Status},
    wire::{Malformed, Reader, Writer},
};

/// Longest frame on a control connection.
pub(crate) const EVENT_LIMIT: usize = 16 << 10;

/// One frame of a control connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The sender makes no further call.
    Goodbye,
    /// Answer to a goodbye: how many bytes were sent to its sender on each data socket.
    GoodbyeAnswer { sent: Vec<u64> },
    /// The sender has failed.
    Failed(RemoteCause),
    /// The sender waits.
    Status(Status),
    /// The sender wants to know what has arrived of what it sent over cables.
    Ask,
    /// Answer to that: how many packets have arrived through each cable.
    Arrived { packets: Vec<u64> },
    /// About a new group of those who are left.
    Council(Word),
}

// Apart from the tags of the join protocol, so that neither is ever taken for the other.
const GOODBYE: u8 = 32;
const GOODBYE_ANSWER: u8 = 33;
const FAILED: u8 = 34;
const STATUS: u8 = 35;
const ASK: u8 = 36;
const ARRIVED: u8 = 37;
const COUNCIL: u8 = 38;

const PEER_LOST: u8 = 1;
const MISMATCH: u8 = 2;
const ABORTED: u8 = 3;
const OTHER: u8 = 4;

impl Event {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Event::Goodbye => vec![GOODBYE],
            Event::GoodbyeAnswer { sent } => counts(GOODBYE_ANSWER, sent),
            Event::Failed(cause) => {
                let mut writer = Writer::tagged(FAILED);
                writer.number(cause.origin);
                match &cause.kind {
                    CauseKind::PeerLost { peer } => {
                        writer.u8(PEER_LOST).number(*peer);
                    }
                    CauseKind::Mismatch { peer, sequence, mine, theirs } => {
                        writer.u8(MISMATCH).number(*peer).u64(*sequence);
                        writer.string(mine, MESSAGE_LIMIT).string(theirs, MESSAGE_LIMIT);
                    }
                    CauseKind::Aborted => {
                        writer.u8(ABORTED);
                    }
                    CauseKind::Other => {
                        writer.u8(OTHER);
                    }
                }
                writer.string(&cause.message, MESSAGE_LIMIT);
                writer.finish()
            }
            Event::Status(status) => {
                let mut writer = Writer::tagged(STATUS);
                writer.u32(status.comm).u64(status.sequence).raw(&status.signature);
                writer.finish()
            }
            Event::Ask => vec![ASK],
            Event::Arrived { packets } => counts(ARRIVED, packets),
            Event::Council(word) => {
                let mut writer = Writer::tagged(COUNCIL);
                word.write(&mut writer);
                writer.finish()
            }
        }
    }

    /// Decodes what a peer sent. Rank numbers are below [`SIZE_LIMIT`] but otherwise unchecked.
    pub(crate) fn decode(frame: &[u8]) -> Result<Event, Malformed> {
        let mut reader = Reader::new(frame, "control message");
        let event = match reader.u8("tag")? {
            GOODBYE => Event::Goodbye,
            GOODBYE_ANSWER => {
                reader.rename("answer to a goodbye");
                Event::GoodbyeAnswer { sent: reader.list("sockets", SOCKETS_LIMIT, |r| r.u64("bytes"))? }
            }
            FAILED => {
                reader.rename("failure");
                Event::Failed(RemoteCause {
                    origin: reader.number("origin", SIZE_LIMIT)?,
                    kind: match reader.u8("kind")? {
                        PEER_LOST => CauseKind::PeerLost { peer: reader.number("peer", SIZE_LIMIT)? },
                        MISMATCH => CauseKind::Mismatch {
                            peer: reader.number("peer", SIZE_LIMIT)?,
                            sequence: reader.u64("sequence")?,
                            mine: reader.string("mine", MESSAGE_LIMIT)?,
                            theirs: reader.string("theirs", MESSAGE_LIMIT)?,
                        },
                        ABORTED => CauseKind::Aborted,
                        OTHER => CauseKind::Other,
                        other => return Err(reader.wrong(format!("unknown kind {other}"))),
                    },
                    message: reader.string("message", MESSAGE_LIMIT)?,
                })
            }
            STATUS => {
                reader.rename("status");
                Event::Status(Status {
                    comm: reader.u32("communicator")?,
                    sequence: reader.u64("sequence")?,
                    signature: reader.array("signature")?,
                })
            }
            ASK => Event::Ask,
            ARRIVED => {
                reader.rename("count of what arrived");
                Event::Arrived { packets: reader.list("cables", SOCKETS_LIMIT, |r| r.u64("packets"))? }
            }
            COUNCIL => {
                reader.rename("word about a new group");
                Event::Council(Word::read(&mut reader)?)
            }
            other => return Err(reader.wrong(format!("unknown tag {other}"))),
        };
        reader.end()?;
        Ok(event)
    }

    /// The ranks it names.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = usize> {
        let (origin, peer) = match self {
            Event::Failed(RemoteCause { origin, kind, .. }) => match kind {
                CauseKind::PeerLost { peer } | CauseKind::Mismatch { peer, .. } => {
                    (Some(*origin), Some(*peer))
                }
                CauseKind::Aborted | CauseKind::Other => (Some(*origin), None),
            },
            // Identities are no ranks of the present group.
            Event::Goodbye
            | Event::GoodbyeAnswer { .. }
            | Event::Status(_)
            | Event::Ask
            | Event::Arrived { .. }
            | Event::Council(_) => (None, None),
        };
        origin.into_iter().chain(peer)
    }
}

/// A frame of one number for each data connection.
fn counts(tag: u8, numbers: &[u64]) -> Vec<u8> {
    let mut writer = Writer::tagged(tag);
    let numbers = &numbers[..numbers.len().min(SOCKETS_LIMIT)];
    writer.number(numbers.len());
    for &number in numbers {
        writer.u64(number);
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{
        council::{Claim, Proposal, Seat},
        message::{ADDRESS_LIMIT, Member},
    };
    use super::*;

    fn word() -> impl Strategy<Value = Word> {
        let address = (any::<std::net::IpAddr>(), any::<u16>()).prop_map(std::net::SocketAddr::from);
        let member = (any::<u128>(), prop::collection::vec(address, 0..ADDRESS_LIMIT)).prop_map(
            |(host, addresses)| Member { host, named: addresses.len() / 2, addresses, cores: vec![] },
        );
        let claim = (any::<u32>(), member).prop_map(|(attempt, member)| Claim { attempt, member });
        let seats = prop::collection::btree_map(0..SIZE_LIMIT, claim.clone(), 0..4)
            .prop_map(|seats| seats.into_iter().map(|(identity, claim)| Seat { identity, claim }).collect());
        prop_oneof![
            claim.prop_map(Word::Enter),
            (any::<[u8; 32]>(), seats).prop_map(|(nonce, seats)| Word::Propose(Proposal { nonce, seats })),
            any::<[u8; 32]>().prop_map(|nonce| Word::Accept { nonce }),
            any::<[u8; 32]>().prop_map(|nonce| Word::Commit { nonce }),
            Just(Word::Excluded),
        ]
    }

    fn event() -> impl Strategy<Value = Event> {
        let rank = 0..SIZE_LIMIT;
        let kind = prop_oneof![
            rank.clone().prop_map(|peer| CauseKind::PeerLost { peer }),
            (rank.clone(), any::<u64>(), ".{0,99}", ".{0,99}").prop_map(|(peer, sequence, mine, theirs)| {
                CauseKind::Mismatch { peer, sequence, mine, theirs }
            }),
            Just(CauseKind::Aborted),
            Just(CauseKind::Other),
        ];
        prop_oneof![
            Just(Event::Goodbye),
            prop::collection::vec(any::<u64>(), 0..SOCKETS_LIMIT)
                .prop_map(|sent| Event::GoodbyeAnswer { sent }),
            Just(Event::Ask),
            prop::collection::vec(any::<u64>(), 0..SOCKETS_LIMIT)
                .prop_map(|packets| Event::Arrived { packets }),
            (rank, kind, ".{0,200}").prop_map(|(origin, kind, message)| Event::Failed(RemoteCause {
                origin,
                kind,
                message
            })),
            (any::<u32>(), any::<u64>(), any::<[u8; 24]>())
                .prop_map(|(comm, sequence, signature)| Event::Status(Status { comm, sequence, signature })),
            word().prop_map(Event::Council),
        ]
    }

    proptest! {
        #[test]
        fn every_event_survives_the_wire(event in event()) {
            let frame = event.encode();
            prop_assert!(frame.len() <= EVENT_LIMIT);
            prop_assert_eq!(Event::decode(&frame), Ok(event));
        }

        #[test]
        fn random_bytes_never_panic(tag in 30..40u8, mut bytes in any::<Vec<u8>>()) {
            let _ = Event::decode(&bytes);
            bytes.insert(0, tag);
            let _ = Event::decode(&bytes);
        }
    }

    #[test]
    fn texts_that_are_too_long_are_cut_not_refused() {
        let long = "ü".repeat(MESSAGE_LIMIT);
        let kind = CauseKind::Mismatch { peer: 1, sequence: 2, mine: long.clone(), theirs: long.clone() };
        let frame = Event::Failed(RemoteCause { origin: 3, kind, message: long }).encode();
        assert!(frame.len() <= EVENT_LIMIT);
        let Ok(Event::Failed(cause)) = Event::decode(&frame) else { panic!("decodes") };
        assert_eq!(cause.message.len(), MESSAGE_LIMIT);
    }
}
