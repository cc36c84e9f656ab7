//! What ranks say to each other while a group forms. `docs/wire-format.md` has the bytes.
#![forbid(unsafe_code)]

use std::{net::SocketAddr, time::Duration};

use super::wire::{Malformed, Reader, Writer};

/// Longest job name, setting or reason.
pub(crate) const STRING_LIMIT: usize = 4096;
/// Most settings that are compared.
pub(crate) const SETTINGS_LIMIT: usize = 256;
/// Most addresses of one rank.
pub(crate) const ADDRESS_LIMIT: usize = 16;
/// Longest blob that rank 0 gives to everybody.
pub(crate) const BLOB_LIMIT: usize = 64 << 10;
/// Most ranks in a group.
pub(crate) const SIZE_LIMIT: usize = 1 << 16;
/// Of a machine's cores, 64 in each.
pub(crate) const CORE_WORDS_LIMIT: usize = 16;
/// Most data sockets of a pair.
pub(crate) const SOCKETS_LIMIT: usize = 256;
/// Most missing ranks that are named.
pub(crate) const MISSING_LIMIT: usize = 32;
/// Longest frame of a connection whose other end is not known yet.
pub(crate) const STRANGER_FRAME_LIMIT: usize = 64 << 10;

/// Longest frame that a member of a group of `size` ranks sends while the group forms.
pub(crate) fn frame_limit(size: usize) -> usize {
    const MEMBER_BYTES: usize = 16 + 4 + 4 + ADDRESS_LIMIT * 19 + 4 + CORE_WORDS_LIMIT * 8;
    STRANGER_FRAME_LIMIT + BLOB_LIMIT + size * MEMBER_BYTES
}

/// One frame of the join protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// A rank asks rank 0 to be taken in.
    Hello(Hello),
    /// Rank 0 has taken the rank in and still waits for others.
    Waiting(Waiting),
    /// The connection has no place in this group, which goes on without it.
    Refused { reason: String },
    /// The group cannot form. `origin` is the rank that found out first.
    Failed { origin: usize, reason: String },
    /// Everyone has arrived; now connect to each other.
    Roster(Roster),
    /// The sender has all its connections.
    Ready,
    /// Everyone has all connections: the group has formed.
    Go,
    /// First frame of a connection between two members.
    Greeting(Greeting),
    /// Answer to a greeting: the connection has found its place.
    Welcome,
}

/// Who a rank is and what it expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) job: String,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Settings that must be equal on all ranks.
    pub(crate) settings: Vec<(String, String)>,
    pub(crate) member: Member,
}

/// What other ranks need to know of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Member {
    /// Equal on ranks of the same machine.
    pub(crate) host: u128,
    /// The cores of its machine that it may use, a bit each.
    pub(crate) cores: Vec<u64>,
    /// Where it listens, the likeliest first.
    pub(crate) addresses: Vec<SocketAddr>,
    /// How many of these, from the front, the user asked for by name.
    pub(crate) named: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// Until rank 0 gives up.
    pub(crate) remaining: Duration,
    /// Ranks that have not arrived, the first [`MISSING_LIMIT`] of them.
    pub(crate) missing: Vec<usize>,
    /// How many have not arrived.
    pub(crate) count: usize,
}

/// What rank 0 decides for the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Roster {
    pub(crate) nonce: [u8; 32],
    /// Until rank 0 gives up.
    pub(crate) remaining: Duration,
    pub(crate) blob: Vec<u8>,
    /// Of every rank, in rank order.
    pub(crate) members: Vec<Member>,
}

/// Names the place of a connection between two members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// From the group's nonce, so that nobody joins the wrong group.
    pub(crate) group: [u8; 16],
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) purpose: Purpose,
    /// Counts the attempts at this place: a later one replaces an earlier one, which its maker has given up.
    pub(crate) attempt: u32,
}

/// What a connection between two members is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Control,
    /// The data socket of this number.
    Data(usize),
}

/// What a rank gives to a user-supplied exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) hello: Hello,
    /// Of rank 0 alone: nonce and blob.
    pub(crate) lead: Option<([u8; 32], Vec<u8>)>,
}

const HELLO: u8 = 1;
const WAITING: u8 = 2;
const REFUSED: u8 = 3;
const FAILED: u8 = 4;
const ROSTER: u8 = 5;
const READY: u8 = 6;
const GO: u8 = 7;
const GREETING: u8 = 8;
const WELCOME: u8 = 9;
const CARD: u8 = 10;

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Message::Hello(hello) => {
                let mut writer = Writer::tagged(HELLO);
                hello.write(&mut writer);
                writer.finish()
            }
            Message::Waiting(waiting) => {
                let mut writer = Writer::tagged(WAITING);
                writer.u64(millis(waiting.remaining)).number(waiting.count);
                let named = waiting.missing.iter().take(MISSING_LIMIT);
                writer.number(named.len());
                for &rank in named {
                    writer.number(rank);
                }
                writer.finish()
            }
            Message::Refused { reason } => {
                let mut writer = Writer::tagged(REFUSED);
                writer.string(reason, STRING_LIMIT);
                writer.finish()
            }
            Message::Failed { origin, reason } => {
                let mut writer = Writer::tagged(FAILED);
                writer.number(*origin).string(reason, STRING_LIMIT);
                writer.finish()
            }
            Message::Roster(roster) => {
                let mut writer = Writer::tagged(ROSTER);
                writer.raw(&roster.nonce).u64(millis(roster.remaining)).bytes(&roster.blob);
                writer.number(roster.members.len());
                roster.members.iter().for_each(|member| member.write(&mut writer));
                writer.finish()
            }
            Message::Ready => vec![READY],
            Message::Go => vec![GO],
            Message::Greeting(greeting) => {
                let (kind, index) = match greeting.purpose {
                    Purpose::Control => (0, 0),
                    Purpose::Data(index) => (1, index),
                };
                let mut writer = Writer::tagged(GREETING);
                writer.raw(&greeting.group).number(greeting.from).number(greeting.to);
                writer.u8(kind).number(index).u32(greeting.attempt);
                writer.finish()
            }
            Message::Welcome => vec![WELCOME],
        }
    }

    /// Decodes any frame of the join protocol. A roster must be of exactly `size` ranks; rank numbers are below
    /// [`SIZE_LIMIT`] but otherwise unchecked.
    pub(crate) fn decode(frame: &[u8], size: usize) -> Result<Message, Malformed> {
        let mut reader = Reader::new(frame, "join message");
        let message = match reader.u8("tag")? {
            HELLO => Message::Hello(Hello::read(&mut reader)?),
            WAITING => {
                reader.rename("waiting");
                Message::Waiting(Waiting {
                    remaining: Duration::from_millis(reader.u64("remaining time")?),
                    count: reader.number("count", SIZE_LIMIT)?,
                    missing: reader.list("missing", MISSING_LIMIT, |r| r.number("rank", SIZE_LIMIT))?,
                })
            }
            REFUSED => {
                reader.rename("refusal");
                Message::Refused { reason: reader.string("reason", STRING_LIMIT)? }
            }
            FAILED => {
                reader.rename("failure");
                Message::Failed {
                    origin: reader.number("rank", SIZE_LIMIT)?,
                    reason: reader.string("reason", STRING_LIMIT)?,
                }
            }
            ROSTER => {
                reader.rename("roster");
                let roster = Roster {
                    nonce: reader.array("nonce")?,
                    remaining: Duration::from_millis(reader.u64("remaining time")?),
                    blob: reader.bytes("blob", BLOB_LIMIT)?.to_vec(),
                    members: reader.list("members", size, Member::read)?,
                };
                if roster.members.len() != size {
                    return Err(reader.wrong(format!("{} ranks instead of {size}", roster.members.len())));
                }
                Message::Roster(roster)
            }
            READY => Message::Ready,
            GO => Message::Go,
            GREETING => {
                reader.rename("greeting");
                Message::Greeting(Greeting {
                    group: reader.array("group")?,
                    from: reader.number("from", SIZE_LIMIT)?,
                    to: reader.number("to", SIZE_LIMIT)?,
                    purpose: match (reader.u8("kind")?, reader.number("index", SOCKETS_LIMIT)?) {
                        (0, 0) => Purpose::Control,
                        (1, index) => Purpose::Data(index),
                        (kind, index) => return Err(reader.wrong(format!("kind {kind} with index {index}"))),
                    },
                    attempt: reader.u32("attempt")?,
                })
            }
            WELCOME => Message::Welcome,
            other => return Err(reader.wrong(format!("unknown tag {other}"))),
        };
        reader.end()?;
        Ok(message)
    }

    /// Whether a frame is of those that are said while a group is connected, when it may be read by somebody who has given
    /// up that group.
    pub(crate) fn is_of_a_group_given_up(frame: &[u8]) -> bool {
        matches!(frame.first(), Some(&(READY | GO | FAILED)))
    }

    /// The name of the message in complaints.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Message::Hello(_) => "hello",
            Message::Waiting(_) => "waiting",
            Message::Refused { .. } => "refusal",
            Message::Failed { .. } => "failure",
            Message::Roster(_) => "roster",
            Message::Ready => "ready",
            Message::Go => "go",
            Message::Greeting(_) => "greeting",
            Message::Welcome => "welcome",
        }
    }
}

impl Card {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::tagged(CARD);
        self.hello.write(&mut writer);
        match &self.lead {
            None => writer.u8(0),
            Some((nonce, blob)) => writer.u8(1).raw(nonce).bytes(blob),
        };
        writer.finish()
    }

    pub(crate) fn decode(blob: &[u8]) -> Result<Card, Malformed> {
        let mut reader = Reader::new(blob, "exchanged blob");
        let tag = reader.u8("tag")?;
        if tag != CARD {
            return Err(reader.wrong(format!("starts with {tag} instead of {CARD}")));
        }
        let card = Card {
            hello: Hello::read(&mut reader)?,
            lead: match reader.u8("lead")? {
                0 => None,
                1 => Some((reader.array("nonce")?, reader.bytes("blob", BLOB_LIMIT)?.to_vec())),
                other => return Err(reader.wrong(format!("lead is {other}"))),
            },
        };
        reader.end()?;
        Ok(card)
    }
}

impl Hello {
    fn write(&self, writer: &mut Writer) {
        writer.string(&self.job, STRING_LIMIT).number(self.rank).number(self.size);
        writer.number(self.settings.len());
        for (name, value) in &self.settings {
            writer.string(name, STRING_LIMIT).string(value, STRING_LIMIT);
        }
        self.member.write(writer);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Hello, Malformed> {
        reader.rename("hello");
        Ok(Hello {
            job: reader.string("job", STRING_LIMIT)?,
            rank: reader.number("rank", SIZE_LIMIT)?,
            size: reader.number("size", SIZE_LIMIT)?,
            settings: reader.list("settings", SETTINGS_LIMIT, |r| {
                Ok((r.string("name", STRING_LIMIT)?, r.string("value", STRING_LIMIT)?))
            })?,
            member: Member::read(reader)?,
        })
    }
}

impl Member {
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.u128(self.host).number(self.named).number(self.addresses.len());
        for &address in &self.addresses {
            writer.address(address);
        }
        writer.number(self.cores.len());
        for &word in &self.cores {
            writer.u64(word);
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Member, Malformed> {
        let member = Member {
            host: reader.u128("host")?,
            named: reader.number("named addresses", ADDRESS_LIMIT)?,
            addresses: reader.list("addresses", ADDRESS_LIMIT, |r| r.address("address"))?,
            cores: reader.list("cores", CORE_WORDS_LIMIT, |r| r.u64("cores"))?,
        };
        if member.named > member.addresses.len() {
            return Err(reader.wrong("more named addresses than addresses"));
        }
        Ok(member)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member() -> impl Strategy<Value = Member> {
        let address = (any::<std::net::IpAddr>(), any::<u16>()).prop_map(SocketAddr::from);
        let cores = prop::collection::vec(any::<u64>(), 0..=CORE_WORDS_LIMIT);
        let addresses = prop::collection::vec(address, 0..=ADDRESS_LIMIT);
        (any::<u128>(), addresses, any::<usize>(), cores).prop_map(|(host, addresses, named, cores)| Member {
            host,
            named: named % (addresses.len() + 1),
            addresses,
            cores,
        })
    }

    fn hello() -> impl Strategy<Value = Hello> {
        let rank = 0..SIZE_LIMIT;
        let settings = prop::collection::vec((".{0,20}", ".{0,20}"), 0..5);
        (".{0,40}", rank.clone(), rank, settings, member())
            .prop_map(|(job, rank, size, settings, member)| Hello { job, rank, size, settings, member })
    }

    fn message() -> impl Strategy<Value = Message> {
        let rank = 0..SIZE_LIMIT;
        let time = || any::<u32>().prop_map(|ms| Duration::from_millis(ms.into()));
        let purpose = prop_oneof![Just(Purpose::Control), (0..SOCKETS_LIMIT).prop_map(Purpose::Data)];
        prop_oneof![
            hello().prop_map(Message::Hello),
            (time(), prop::collection::vec(rank.clone(), 0..MISSING_LIMIT), rank.clone()).prop_map(
                |(remaining, missing, count)| Message::Waiting(Waiting { remaining, missing, count })
            ),
            ".{0,50}".prop_map(|reason| Message::Refused { reason }),
            (rank.clone(), ".{0,50}").prop_map(|(origin, reason)| Message::Failed { origin, reason }),
            (any::<[u8; 32]>(), time(), any::<Vec<u8>>(), prop::collection::vec(member(), 3)).prop_map(
                |(nonce, remaining, blob, members)| Message::Roster(Roster {
                    nonce,
                    remaining,
                    blob,
                    members
                })
            ),
            Just(Message::Ready),
            Just(Message::Go),
            Just(Message::Welcome),
            (any::<[u8; 16]>(), rank.clone(), rank, purpose, any::<u32>()).prop_map(
                |(group, from, to, purpose, attempt)| {
                    Message::Greeting(Greeting { group, from, to, purpose, attempt })
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn every_message_survives_the_wire(message in message()) {
            let frame = message.encode();
            prop_assert!(frame.len() <= frame_limit(3));
            prop_assert_eq!(Message::decode(&frame, 3), Ok(message));
        }

        #[test]
        fn every_card_survives_the_wire(hello in hello(), lead in any::<Option<([u8; 32], Vec<u8>)>>()) {
            let card = Card { hello, lead };
            prop_assert_eq!(Card::decode(&card.encode()), Ok(card));
        }

        #[test]
        fn random_bytes_never_panic(tag in 0..12u8, mut bytes in any::<Vec<u8>>()) {
            let _ = Message::decode(&bytes, 3);
            let _ = Card::decode(&bytes);
            bytes.insert(0, tag);
            let _ = Message::decode(&bytes, 3);
            let _ = Card::decode(&bytes);
        }

        #[test]
        fn a_damaged_message_decodes_to_something_else_or_not_at_all(
            message in message(), at in any::<usize>(), flip in 1..=255u8, cut in any::<bool>(),
        ) {
            let mut frame = message.encode();
            let at = at % frame.len();
            if cut {
                frame.truncate(at);
                prop_assert!(Message::decode(&frame, 3).is_err());
            } else {
                frame[at] ^= flip;
                prop_assert_ne!(Message::decode(&frame, 3), Ok(message));
            }
        }
    }

    #[test]
    fn a_roster_of_another_size_is_refused() {
        let roster = Roster {
            nonce: [0; 32],
            remaining: Duration::ZERO,
            blob: vec![],
            members: vec![Member::default(); 3],
        };
        let frame = Message::Roster(roster).encode();
        assert!(Message::decode(&frame, 3).is_ok());
        assert!(Message::decode(&frame, 2).is_err());
        assert!(Message::decode(&frame, 4).is_err());
    }
}
