//! Connecting the cables of a group.
//!
//! Every rank opens its devices and makes its queue pairs, then all ranks go through three rounds together, over connections
//! that they have already: they offer each other their queue pairs; they say that theirs are connected and have receives
//! posted; they say that a token came through every cable, in both directions and as deep as the queues are. If one rank fails,
//! every rank learns it in the same round, so that all of them use cables or none does.

use std::{
    collections::BTreeMap,
    io,
    net::TcpStream,
    path::PathBuf,
    sync::{Arc, Weak, atomic::AtomicU32},
    thread,
    time::{Duration, Instant},
};

use parking_lot::RwLock;
use raccl_sys::{Gid, Library, Peer, Route};
use serde::Serialize;

use super::{
    Options,
    bundle::{self, Bundle, MOST_STREAMS},
    crc32c::crc32c,
    device::{Device, Examined, NewLane},
    ends::{Cables, Carrier},
    hold::{self, Hold},
    keeper::{self, Kept},
    lane::Lane,
    offer::{Offer, OfferedClass},
    plan,
    registry::Registry,
    rounds::{Lost, Rounds},
    wire::{BULK, Class, Lent, PORT, Pair as QueuePairOf, Wire},
};
use crate::{
    config::DeviceMatrix,
    error::Cause,
    link::{LinkError, Receiver, Sender, stripe},
    os::IoVec,
};

/// What is to be connected.
pub(crate) struct Request<'a> {
    pub(crate) rank: usize,
    pub(crate) epoch: u32,
    pub(crate) matrix: &'a DeviceMatrix,
    pub(crate) library: Option<&'a PathBuf>,
    pub(crate) options: Options,
    /// Devices are freed when SIGTERM or SIGINT ends the process.
    pub(crate) signals: bool,
    pub(crate) until: Instant,
}

/// Why there are no cables.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Some rank cannot use its cables, and all ranks know: they may agree on another link.
    Unavailable { rank: usize, reason: String, source: Option<Cause> },
    /// A rank is gone.
    Lost { peer: usize, source: Cause },
}

/// How long a token may stand still.
const TOKEN: Duration = Duration::from_secs(5);
/// Ranks wait a little longer for each other than each of them waits for its devices.
const PATIENCE: Duration = Duration::from_secs(30);

/// The cables of this rank.
pub(crate) struct Cabled {
    /// By peer, `None` where there is no cable.
    pub(crate) links: Vec<Option<(Sender, Receiver)>>,
    /// What memory their devices may use.
    pub(crate) registry: Arc<Registry>,
}

/// Connects the cables that the matrix names. `sockets` are connections to every peer, none to oneself; afterwards they are as
/// before.
pub(crate) fn connect(request: &Request<'_>, sockets: Vec<Option<&TcpStream>>) -> Result<Cabled, Failure> {
    let hold = Hold::new(request.signals);
    let mut rounds = Rounds::new(sockets, request.until + PATIENCE + TOKEN);
    let size = request.matrix.size();
    let opened = match &hold {
        Ok(hold) => open(request, hold),
        Err(error) => Err(Trouble { reason: format!("signals cannot be watched: {error}"), source: None }),
    };
    let offers = agree(request.rank, &mut rounds, &opened, |opened, peer| {
        opened.ends.iter().filter(|end| end.peer == peer).map(End::offer).collect()
    })?;
    // Everybody has been told in the first round if there are none.
    let (lanes, registry) = match (&hold, opened) {
        (Ok(hold), Ok(Opened { ends, registry })) => {
            (meet(request, ends, &registry, &offers, hold), registry)
        }
        _ => (Ok(Vec::new()), Arc::new(Registry::without_devices())),
    };
    agree(request.rank, &mut rounds, &lanes, |_, _| ())?;
    let lanes = lanes.unwrap_or_default();
    let pairs = prove(request, &lanes).and_then(|()| pair_up(request, lanes, &hold));
    if let Err(failure) = agree(request.rank, &mut rounds, &pairs, |_, _| ()) {
        drop(pairs);
        // Which may be looking after one of them.
        keeper::settle();
        return Err(failure);
    }
    let mut links: Vec<Option<(Sender, Receiver)>> = (0..size).map(|_| None).collect();
    pairs.unwrap_or_default().into_iter().for_each(|pair| links[pair.peer] = Some(link(&pair)));
    Ok(Cabled { links, registry })
}

/// A trouble of this rank.
pub(super) struct Trouble {
    pub(super) reason: String,
    pub(super) source: Option<Cause>,
}

impl From<Box<dyn std::error::Error + Send + Sync>> for Trouble {
    fn from(source: Box<dyn std::error::Error + Send + Sync>) -> Trouble {
        Trouble { reason: source.to_string(), source: Some(source.into()) }
    }
}

impl From<raccl_sys::Error> for Trouble {
    fn from(source: raccl_sys::Error) -> Trouble {
        Trouble { reason: source.to_string(), source: Some(Cause::new(source)) }
    }
}

/// What was taken of the devices.
struct Opened {
    ends: Vec<End>,
    registry: Arc<Registry>,
}

/// One end of a cable, before it is connected.
struct End {
    peer: usize,
    /// Which of the cables of the pair.
    index: usize,
    device: String,
    /// Its place in the registry.
    place: usize,
    gid_index: u8,
    gid: Gid,
    lid: u16,
    mtu: u32,
    megabits: u32,
    new: NewLane,
}

/// A cable that is connected.
struct Joined {
    peer: usize,
    /// As fast as the slower of its ends; 0 if one of them does not say.
    megabits: u32,
    lane: Lane,
}

/// The cables of this rank to a peer.
struct Pair {
    peer: usize,
    /// Of each, in the order of the matrix.
    megabits: Vec<u32>,
    carrier: Carrier,
}

/// The number of the first packet of every queue pair.
const PSN: u32 = 7;

impl End {
    fn offer(&self) -> Offer {
        let class = |class: &super::device::NewClass| OfferedClass {
            queue_pair: class.pair.number(),
            slot_bytes: class.slot_bytes,
            recv_slots: class.recv_slots,
        };
        Offer {
            index: self.index,
            device: self.device.clone(),
            lid: self.lid,
            gid: self.gid.0,
            mtu: self.mtu,
            megabits: self.megabits,
            classes: self.new.classes.iter().map(class).collect(),
        }
    }
}

/// Looks at all devices, then takes what is needed of them and makes one end for each cable.
fn open(request: &Request<'_>, hold: &Arc<Hold>) -> Result<Opened, Trouble> {
    let library = Library::load(request.library.map(PathBuf::as_path))?;
    let list = library.devices()?;
    let cables = plan::cables(request.matrix, request.rank);
    let mut examined = Vec::new();
    for (name, cables) in cables {
        examined.push((Examined::new(&list, &name, cables.len(), request.until)?, name, cables));
    }
    let mut ends = Vec::new();
    let mut domains = Vec::new();
    for (examined, name, cables) in examined {
        let mut device = Device::new(examined, &request.options)?;
        domains.push(device.domain().clone());
        for (peer, index) in cables {
            ends.push(End {
                peer,
                index,
                device: name.clone(),
                place: domains.len() - 1,
                gid_index: device.gid.index,
                gid: device.gid.gid,
                lid: device.lid,
                mtu: device.mtu,
                megabits: device.megabits,
                new: device.lane()?,
            });
        }
    }
    // Both sides stripe in the order of the matrix.
    ends.sort_by_key(|end| (end.peer, end.index));
    let registry = match lends(&request.options) {
        true => Registry::new(domains, Some(Arc::clone(hold))),
        false => Registry::without_devices(),
    };
    Ok(Opened { ends, registry: Arc::new(registry) })
}

/// Goes through a round: what the others say to this rank, unless somebody is in trouble.
pub(super) fn agree<S, T: Serialize + serde::de::DeserializeOwned>(
    rank: usize,
    rounds: &mut Rounds<'_>,
    mine: &Result<S, Trouble>,
    say: impl Fn(&S, usize) -> T,
) -> Result<Vec<Option<T>>, Failure> {
    let answers = rounds
        .exchange(|peer| match mine {
            Ok(good) => Ok(say(good, peer)),
            Err(trouble) => Err(trouble.reason.clone()),
        })
        .map_err(|lost: Lost| Failure::Lost { peer: lost.peer, source: Cause::new(lost) })?;
    if let Err(trouble) = mine {
        let Trouble { reason, source } = trouble;
        return Err(Failure::Unavailable { rank, reason: reason.clone(), source: source.clone() });
    }
    let mut said = Vec::with_capacity(answers.len());
    for (peer, answer) in answers.into_iter().enumerate() {
        match answer.transpose() {
            Ok(answer) => said.push(answer),
            Err(reason) => return Err(Failure::Unavailable { rank: peer, reason, source: None }),
        }
    }
    Ok(said)
}

/// Connects each end with what the peer offers for the same cable.
fn meet(
    request: &Request<'_>,
    ends: Vec<End>,
    registry: &Arc<Registry>,
    offers: &[Option<Vec<Offer>>],
    hold: &Arc<Hold>,
) -> Result<Vec<Joined>, Trouble> {
    let mut lanes = Vec::with_capacity(ends.len());
    for end in ends {
        let (peer, index) = (end.peer, end.index);
        let offered = offers[peer].as_deref().unwrap_or_default();
        let offer = Offer::find(offered, index, peer, request.rank)
            .map_err(|reason| Trouble { reason, source: None })?;
        let megabits = end.megabits.min(offer.megabits);
        lanes.push(Joined { peer, megabits, lane: join(request, end, registry, offer, hold)? });
    }
    Ok(lanes)
}

fn join(
    request: &Request<'_>,
    end: End,
    registry: &Arc<Registry>,
    offer: &Offer,
    hold: &Arc<Hold>,
) -> Result<Lane, Trouble> {
    let End { peer, index, device, place, gid_index, mtu, new, .. } = end;
    let cable = format!("{index} from {device} of rank {} to {} of rank {peer}", request.rank, offer.device);
    let route = Route { port: PORT, gid_index, mtu: mtu.min(offer.mtu) };
    offer
        .check(&cable, peer, new.classes.iter().map(|class| class.slot_bytes))
        .map_err(|reason| Trouble { reason, source: None })?;
    let lends = lends(&request.options);
    let mut classes = Vec::new();
    // What has no counterpart is given back.
    for (class, offered) in new.classes.into_iter().zip(&offer.classes) {
        if request.options.degrade && offered.recv_slots > class.send_slots {
            let reason = format!(
                "cable {cable}: rank {peer} has {} receives, where {} packets can be kept to be sent again",
                offered.recv_slots, class.send_slots
            );
            return Err(Trouble { reason, source: None });
        }
        let remote = Peer { lid: offer.lid, queue_pair: offered.queue_pair, psn: PSN, gid: Gid(offer.gid) };
        let pair = class.pair.ready_to_receive(&route, &remote)?.ready_to_send(PSN)?;
        classes.push(Class {
            pair: if lends && classes.len() == BULK {
                QueuePairOf::Revocable(RwLock::new(Some(pair)))
            } else {
                QueuePairOf::Lasting(pair)
            },
            slot_bytes: class.slot_bytes,
            send_at: class.send_at,
            recv_at: class.recv_at,
            send_slots: class.send_slots,
            recv_slots: class.recv_slots,
            window: class.window,
            peer_slots: offered.recv_slots,
            granted: AtomicU32::new(offered.recv_slots),
            posted: AtomicU32::new(0),
            told: AtomicU32::new(0),
            done: AtomicU32::new(0),
        });
    }
    let wire = Wire {
        cable,
        queue: new.queue,
        region: new.region,
        classes,
        out_number: number(request.epoch, request.rank, peer, index),
        in_number: number(request.epoch, peer, request.rank, index),
        sums: request.options.sums,
        lent: lends.then(|| Lent { registry: Arc::clone(registry), device: place }),
    };
    Lane::new(wire, Arc::clone(hold)).map_err(|error| trouble(&error))
}

/// Whether packets may come from and go to memory that was lent: whoever sums payloads looks at every byte all the same, and what
/// may have to be sent again is kept in slots.
fn lends(options: &Options) -> bool {
    !options.sums && !options.degrade
}

/// Tells a direction of a cable from all others, of this group and of others.
fn number(epoch: u32, from: usize, to: usize, index: usize) -> u32 {
    let mut bytes = [0; 28];
    bytes[0..4].copy_from_slice(&epoch.to_le_bytes());
    for (place, value) in bytes[4..].chunks_exact_mut(8).zip([from, to, index]) {
        place.copy_from_slice(&(value as u64).to_le_bytes());
    }
    crc32c(0, &bytes)
}

/// Sends a token through every cable and waits for the peers'. It is as long as what the posted receives hold, and no two cables and
/// directions have the same, so it proves the pairing, both queue pairs and their depth.
fn prove(request: &Request<'_>, lanes: &[Joined]) -> Result<(), Trouble> {
    let mut moved = Instant::now();
    let mut tokens: Vec<Token> = lanes.iter().map(|joined| Token::new(&joined.lane)).collect();
    while tokens.iter().any(|token| !token.is_through()) {
        hold::check().map_err(|error| Trouble { reason: error.to_string(), source: None })?;
        for token in &mut tokens {
            if token.step().map_err(|error| trouble(&error))? {
                moved = Instant::now();
            }
        }
        if moved.elapsed() >= TOKEN
            && let Some(token) = tokens.iter().find(|token| !token.is_through())
        {
            let reason = format!(
                "{} of {} bytes came through cable {} and {} went in, and then nothing more for {TOKEN:?}; does the cable join these devices, \
                 in this order? If only some come, try RACCL_VERBS_BULK=16K*2",
                token.received,
                token.expected.len(),
                token.lane.cable(),
                token.sent
            );
            return Err(Trouble { reason, source: None });
        }
        thread::yield_now();
    }
    tracing::debug!(rank = request.rank, cables = lanes.len(), "every cable has carried its token");
    Ok(())
}

/// Brings together the lanes of each peer, and has them kept alive.
fn pair_up(
    request: &Request<'_>,
    lanes: Vec<Joined>,
    hold: &io::Result<Arc<Hold>>,
) -> Result<Vec<Pair>, Trouble> {
    // Without it there are no lanes.
    let Ok(hold) = hold else { return Ok(Vec::new()) };
    let mut by_peer: BTreeMap<usize, (Vec<u32>, Vec<Lane>)> = BTreeMap::new();
    for Joined { peer, megabits, lane } in lanes {
        let (speeds, lanes) = by_peer.entry(peer).or_default();
        speeds.push(megabits);
        lanes.push(lane);
    }
    let Options { keep_alive, degrade, .. } = request.options;
    let mut pairs = Vec::new();
    for (peer, (megabits, lanes)) in by_peer {
        let carrier = if degrade && (2..=MOST_STREAMS).contains(&lanes.len()) {
            let bundle = Bundle::new(lanes, keep_alive, Arc::clone(hold)).map_err(|error| trouble(&error))?;
            let bundle = Arc::new(bundle);
            let weak = Arc::downgrade(&bundle);
            keep(weak, bundle::TICK)?;
            Carrier::Bundle(bundle)
        } else {
            let lanes: Vec<Arc<Lane>> = lanes.into_iter().map(Arc::new).collect();
            for lane in &lanes {
                let weak = Arc::downgrade(lane);
                keep_alive.map_or(Ok(()), |every| keep(weak, every))?;
            }
            Carrier::Lanes(lanes)
        };
        pairs.push(Pair { peer, megabits, carrier });
    }
    Ok(pairs)
}

fn keep(whom: Weak<dyn Kept>, every: Duration) -> Result<(), Trouble> {
    keeper::keep(whom, every).map_err(|error| Trouble {
        reason: format!("the thread that keeps cables alive cannot be started: {error}"),
        source: Some(error.into()),
    })
}

/// A token on its way out and another on its way in.
struct Token<'a> {
    lane: &'a Lane,
    own: Vec<u8>,
    sent: usize,
    expected: Vec<u8>,
    received: usize,
}

impl<'a> Token<'a> {
    fn new(lane: &'a Lane) -> Token<'a> {
        let (out, incoming) = lane.numbers();
        let (out_bytes, in_bytes) = lane.windows();
        let (own, expected) = (pattern(out, out_bytes), pattern(incoming, in_bytes));
        Token { lane, own, sent: 0, expected, received: 0 }
    }

    fn is_through(&self) -> bool {
        self.sent == self.own.len() && self.received == self.expected.len()
    }

    /// Moves what can be moved; whether that is anything.
    fn step(&mut self) -> Result<bool, LinkError> {
        let before = self.sent + self.received;
        let rest = &self.own[self.sent..];
        if !rest.is_empty() {
            let piece = IoVec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the piece is a slice that lives as long as the call, and is only read; nothing was lent yet.
            self.sent += unsafe { self.lane.write(&[piece]) }?;
        }
        let mut bytes = [0_u8; 4096];
        let most = bytes.len().min(self.expected.len() - self.received);
        if most == 0 {
            return Ok(self.sent + self.received > before);
        }
        let piece = IoVec { iov_base: bytes.as_mut_ptr().cast(), iov_len: most };
        // SAFETY: the piece is an array of ours that nobody else has.
        match unsafe { self.lane.read(&[piece], false) }? {
            stripe::Read::Bytes(count)
                if bytes[..count] == self.expected[self.received..self.received + count] =>
            {
                self.received += count;
                Ok(true)
            }
            stripe::Read::Bytes(_) => {
                let reason =
                    format!("cable {}: another token came than that of its other end", self.lane.cable());
                Err(LinkError::Protocol(reason))
            }
            stripe::Read::Empty => Ok(self.sent + self.received > before),
            stripe::Read::End => Err(LinkError::Closed),
        }
    }
}

/// Bytes that no other number has.
fn pattern(number: u32, length: usize) -> Vec<u8> {
    let mut state = u64::from(number) << 32 | 0x9E37_79B9;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// The link of a pair.
fn link(pair: &Pair) -> (Sender, Receiver) {
    let split = stripe::Split::new(&weights(pair.megabits.clone()));
    let (outlets, inlets) = pair.carrier.ends(pair.megabits.len());
    let sender = stripe::Sender::new(outlets, split.clone());
    let cables = Cables::new(pair.carrier.clone());
    (Sender::Verbs(sender, cables), Receiver::Verbs(stripe::Receiver::new(inlets, split)))
}

/// Cables carry in proportion to their speeds, or equally if one of them has none. Both sides have the same numbers.
fn weights(megabits: Vec<u32>) -> Vec<u32> {
    if megabits.contains(&0) { vec![1; megabits.len()] } else { megabits }
}

fn trouble(error: &LinkError) -> Trouble {
    match error {
        LinkError::Broken { source, .. } => {
            Trouble { reason: source.to_string(), source: Some(source.clone()) }
        }
        other => Trouble { reason: other.to_string(), source: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_cables_carry_more() {
        assert_eq!(weights(vec![80_000, 40_000]), [80_000, 40_000]);
        assert_eq!(weights(vec![80_000, 0, 40_000]), [1, 1, 1]);
    }

    #[test]
    fn no_two_directions_of_cables_have_the_same_number_or_token() {
        let mut numbers = Vec::new();
        for epoch in [1, 2] {
            for (from, to) in [(0, 1), (1, 0), (0, 2)] {
                numbers.extend((0..3).map(|index| number(epoch, from, to, index)));
            }
        }
        let tokens: Vec<Vec<u8>> = numbers.iter().map(|&number| pattern(number, 32)).collect();
        for (i, token) in tokens.iter().enumerate() {
            assert!(!tokens[..i].contains(token), "{i}");
        }
    }
}
