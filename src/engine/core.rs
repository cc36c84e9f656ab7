//! What the engine's lock guards: receivers, operations in flight, stored messages, and who waits.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    thread::Thread,
    time::{Duration, Instant},
};

use super::{
    block::Pool,
    call,
    health::{Failure, STATUSES},
    landing::Place,
    limbo::Limbo,
    lines::Lines,
    message::{self, ANNOUNCE_ALL, RecvOperation, SendOperation},
    numbers::Numbers,
    recorder::Recorder,
    run::Run,
    shared::{BUDGET, Shared},
};
use crate::link::{Header, MessageKind, Receiver, Signature};

/// A place in the engine's table of operations, with the life of that place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct OperationId {
    index: u32,
    life: u32,
}

/// An operation in flight, or finished and not yet fetched.
pub(crate) enum Operation {
    Collective(Box<Run>),
    Send(SendOperation),
    Recv(RecvOperation),
}

/// Everything behind the engine's lock.
pub(crate) struct Core {
    pub(crate) receivers: Vec<Option<Receiver>>,
    /// What the payload that a receiver is reading is for.
    pub(crate) incoming: Vec<Incoming>,
    /// When a receiver saw the end of its stream.
    pub(crate) closed: Vec<Option<Instant>>,
    /// Since when it is known that a peer that had said goodbye is no longer there.
    pub(crate) gone: Vec<Option<Instant>>,
    /// Few, and looked up for every message: a tree of them is faster than a hash.
    pub(crate) communicators: BTreeMap<u32, Group>,
    /// Messages for communicators that this rank has not made yet.
    pub(crate) limbo: Limbo,
    pub(crate) numbers: Numbers,
    pub(crate) table: Table,
    pub(super) recorder: Recorder,
    pub(crate) pool: Pool,
    /// Large point-to-point messages that are being sent.
    pub(crate) streaming: Vec<OperationId>,
    /// The group was left; a second time there is nothing to do.
    pub(crate) left: bool,
    /// What the thread that drives waits for; none while nobody drives.
    pub(crate) driver: Option<OperationId>,
    pub(crate) waiters: Vec<Waiter>,
    /// What the operations in flight need, as far as [`Engine::find_needs`](super::Engine::find_needs) has looked: whom they
    /// receive from and send to, and whether one waits for a link to take what is in line.
    pub(crate) receives: Vec<bool>,
    pub(crate) sends: Vec<bool>,
    pub(crate) lined_up: bool,
    pub(crate) clocks: HashMap<OperationId, Clock>,
    pub(crate) next_tick: Instant,
    /// How far each peer said it was, by communicator and peer.
    pub(crate) reports: HashMap<(u32, usize), u64>,
}

/// A thread that waits without driving.
pub(crate) struct Waiter {
    pub(crate) thread: Thread,
    pub(crate) target: OperationId,
}

/// When an operation moved last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    pub(crate) since: Instant,
    pub(crate) reported: Option<Instant>,
    /// Bytes moved on the links it uses when it was looked at last.
    pub(crate) bytes: u64,
}

/// What a payload is for.
pub(crate) enum Incoming {
    Nothing,
    /// A chunk for a collective in flight, going straight to its place.
    Place(OperationId, Place),
    /// The same, but kept until it can be placed.
    Kept(OperationId, Place, Vec<u8>),
    /// A message for a posted receive, straight into its buffer.
    Posted(OperationId, Header),
    /// A chunk of an announced message.
    Data(OperationId, u64),
    /// A message nobody waits for yet.
    Store(Header, Vec<u8>),
    /// A message for nobody.
    Discard,
}

/// A message that came before anybody asked for it.
pub(crate) struct Stored {
    pub(crate) peer: usize,
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

/// A communicator as the engine sees it. Everything by world rank.
pub(crate) struct Group {
    pub(crate) shared: Arc<Shared>,
    /// The number of the next collective.
    pub(crate) next_sequence: u64,
    /// Stands for all collectives so far.
    past: u16,
    /// The root of the last collective if that was a broadcast.
    last_root: Option<usize>,
    /// Collectives in flight.
    pub(crate) active: Vec<(u64, OperationId)>,
    /// Signatures of the last collectives, the newest last.
    pub(crate) history: VecDeque<(u64, Signature)>,
    /// Messages of collectives that this rank has not entered.
    pub(crate) early: VecDeque<Stored>,
    /// Receives that wait for a message, in the order they were posted.
    pub(crate) posted: Vec<VecDeque<OperationId>>,
    /// Messages and announcements that wait for a receive, in the order they came.
    pub(crate) inbox: Vec<VecDeque<Stored>>,
    /// Sends that wait for budget.
    pub(crate) outbox: Vec<VecDeque<OperationId>>,
    /// Announced sends by message number.
    pub(crate) announced: HashMap<(usize, u64), OperationId>,
    /// How many of them there are to each peer.
    pub(crate) announcing: Vec<usize>,
    /// Peers that want to have announced what there is no budget for.
    pub(crate) asking: Vec<bool>,
    /// Peers that were told last that we want the same.
    asked: Vec<bool>,
    /// Receives of announced messages by message number.
    pub(crate) receiving: HashMap<(usize, u64), OperationId>,
    /// Cost of what is stored and not owed back yet.
    pub(crate) held: Vec<i64>,
    /// Announcements that are stored.
    pub(crate) noted: Vec<usize>,
    /// How many collectives a peer has entered at least.
    pub(crate) entered: Vec<u64>,
}

/// A collective's place in the sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun {
    pub(crate) sequence: u64,
    /// Nothing is sent before all others have entered so many calls.
    pub(crate) heard: u64,
    /// The rank in the communicator that is told of our entering whatever else we send.
    pub(crate) tell: Option<usize>,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts { progress: Some(Duration::from_secs(30)), late: Some(Duration::from_secs(300)) }
    }
}

impl Group {
    /// How many signatures are remembered to name a mismatch.
    const HISTORY: usize = 256;

    pub(crate) fn new(shared: Arc<Shared>, world: usize) -> Group {
        Group {
            shared,
            next_sequence: 0,
            past: 0,
            last_root: None,
            active: Vec::new(),
            history: VecDeque::new(),
            early: VecDeque::new(),
            posted: (0..world).map(|_| VecDeque::new()).collect(),
            inbox: (0..world).map(|_| VecDeque::new()).collect(),
            outbox: (0..world).map(|_| VecDeque::new()).collect(),
            announced: HashMap::new(),
            announcing: vec![0; world],
            asking: vec![false; world],
            asked: vec![false; world],
            receiving: HashMap::new(),
            held: vec![0; world],
            noted: vec![0; world],
            entered: vec![0; world],
        }
    }

    /// True while so much of a peer is stored here that it may lack the budget for what is waited for. Below that, what it
    /// has left and what it is [given back](super::shared::Shared::owe) without being asked are enough for any message that
    /// needs no grant.
    pub(crate) fn is_crowded(&self, peer: usize) -> bool {
        self.held[peer] > BUDGET / 4
    }

    /// True while a receive waits here for a message that the peer may lack the budget to send: nothing of what fills the store
    /// is for that receive, so the budget may never come back.
    fn is_starved(&self, peer: usize) -> bool {
        self.is_crowded(peer) && !self.posted[peer].is_empty()
    }

    /// Whether the peer has to hear that a receive [starves](Group::is_starved), or is owed something.
    pub(crate) fn wants_relief(&self, peer: usize) -> bool {
        self.shared.owes(peer) || (self.is_starved(peer) && !self.asked[peer])
    }

    /// Sends what is owed to a peer in a message of its own. That says too whether a receive starves: as long as one does, the
    /// peer is to announce what it has no budget for.
    pub(crate) fn give_credit(&mut self, peer: usize, lines: &Lines<'_>) -> Result<(), Failure> {
        let mut head = message::header(&self.shared, lines.epoch, peer, MessageKind::Credit, 0, [0; 24]);
        self.asked[peer] = self.is_starved(peer);
        head.flags = if self.asked[peer] { ANNOUNCE_ALL } else { 0 };
        lines.post(peer, &head).map(|_| ())
    }

    /// A message of collective `sequence` has come from a peer, which has then entered all before it as well.
    pub(crate) fn has_entered(&mut self, peer: usize, sequence: u64) {
        self.entered[peer] = self.entered[peer].max(sequence.saturating_add(1));
    }

    /// Takes the next place in the sequence of collectives, and completes the call's signature.
    ///
    /// Whoever has finished a call knows that all ranks made the calls before it. Most calls cannot be finished before every
    /// rank was heard in them; the root of a broadcast hears nobody. So the others send it a word when they enter, and it
    /// sends nothing in a broadcast that follows another before it has heard all of them: those words of the call before if
    /// it was the root there too, else those of this call.
    pub(crate) fn begin(&mut self, signature: &mut Signature) -> Begun {
        call::stamp(signature, self.past);
        self.past = call::remember(signature);
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        if self.history.len() == Group::HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((sequence, *signature));
        let (me, root) = (self.shared.rank, call::broadcast_root(signature));
        let heard = match (std::mem::replace(&mut self.last_root, root), root) {
            (Some(before), Some(root)) if root == me => sequence + u64::from(before != me),
            _ => 0,
        };
        Begun { sequence, heard, tell: root.filter(|&root| root != me) }
    }

    /// The first member, by its world rank, that is not known to have entered so many collectives.
    pub(crate) fn unheard(&self, calls: u64) -> Option<usize> {
        let others = self.shared.members.iter().enumerate().filter(|&(rank, _)| rank != self.shared.rank);
        others.map(|(_, &member)| member).find(|&member| self.entered[member] < calls)
    }

    /// What this rank called at a place of the sequence, if it is remembered.
    pub(crate) fn called(&self, sequence: u64) -> Option<&Signature> {
        let back = self.next_sequence.checked_sub(sequence.checked_add(1)?)?;
        let index = self.history.len().checked_sub(usize::try_from(back).ok()? + 1)?;
        self.history.get(index).map(|(_, signature)| signature)
    }

    /// The last calls, the newest last; not more than a peer [keeps](super::health::Health) of them.
    pub(crate) fn latest(&self) -> impl Iterator<Item = &(u64, Signature)> {
        self.history.iter().skip(self.history.len().saturating_sub(STATUSES))
    }

    /// Compares a peer's call with ours at the same place of the sequence.
    pub(crate) fn compare(&self, peer: usize, sequence: u64, theirs: &Signature) -> Result<(), Failure> {
        match self.called(sequence) {
            Some(mine) if mine == theirs => Ok(()),
            Some(mine) if call::same_call(mine, theirs) => {
                Err(Failure::Diverged { peer, comm: self.shared.id, sequence, call: call::describe(mine) })
            }
            Some(mine) => {
                let (mine, theirs) = (call::describe(mine), call::describe(theirs));
                Err(Failure::Mismatch { peer, sequence, mine, theirs })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn active(&self, sequence: u64) -> Option<OperationId> {
        self.active.iter().find(|(at, _)| *at == sequence).map(|&(_, id)| id)
    }
}

/// The operations in flight.
#[derive(Default)]
pub(crate) struct Table {
    /// Something in it may have changed since [`Engine::find_needs`](super::Engine::find_needs) looked at it.
    pub(super) changed: bool,
    slots: Vec<(u32, Option<Entry>)>,
    free: Vec<u32>,
}

/// An operation with its deadlines.
pub(crate) struct Entry {
    pub(crate) operation: Operation,
    pub(crate) timeouts: Timeouts,
}

/// The deadlines of a call; `None`: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// How long nothing may move once the peer has entered the operation.
    pub(crate) progress: Option<Duration>,
    /// How long a peer may take to enter the operation.
    pub(crate) late: Option<Duration>,
}

impl Table {
    pub(crate) fn insert(&mut self, entry: Entry) -> OperationId {
        self.changed = true;
        match self.free.pop() {
            Some(index) => {
                let slot = &mut self.slots[index as usize];
                slot.1 = Some(entry);
                OperationId { index, life: slot.0 }
            }
            None => {
                self.slots.push((0, Some(entry)));
                // Four thousand million operations in flight do not fit in memory.
                OperationId { index: (self.slots.len() - 1) as u32, life: 0 }
            }
        }
    }

    pub(crate) fn entry(&self, id: OperationId) -> Option<&Entry> {
        let slot = self.slots.get(id.index as usize)?;
        if slot.0 == id.life { slot.1.as_ref() } else { None }
    }

    pub(crate) fn get(&self, id: OperationId) -> Option<&Operation> {
        self.entry(id).map(|entry| &entry.operation)
    }

    pub(crate) fn get_mut(&mut self, id: OperationId) -> Option<&mut Operation> {
        self.changed = true;
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.0 == id.life { slot.1.as_mut().map(|entry| &mut entry.operation) } else { None }
    }

    pub(crate) fn remove(&mut self, id: OperationId) -> Option<Operation> {
        self.changed = true;
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.0 != id.life {
            return None;
        }
        let entry = slot.1.take()?;
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(id.index);
        Some(entry.operation)
    }

    /// Everything in flight, in no particular order.
    pub(crate) fn ids(&self) -> impl Iterator<Item = OperationId> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, (_, operation))| operation.is_some())
            .map(|(index, &(life, _))| OperationId { index: index as u32, life })
    }

    pub(crate) fn run(&mut self, id: OperationId) -> Option<&mut Run> {
        match self.get_mut(id) {
            Some(Operation::Collective(run)) => Some(run),
            _ => None,
        }
    }

    pub(crate) fn recv(&mut self, id: OperationId) -> Option<&mut RecvOperation> {
        match self.get_mut(id) {
            Some(Operation::Recv(recv)) => Some(recv),
            _ => None,
        }
    }

    pub(crate) fn send(&mut self, id: OperationId) -> Option<&mut SendOperation> {
        match self.get_mut(id) {
            Some(Operation::Send(send)) => Some(send),
            _ => None,
        }
    }

    /// True when the operation is finished (and waits to be fetched).
    pub(crate) fn finished(&self, id: OperationId) -> bool {
        match self.get(id) {
            Some(Operation::Collective(run)) => run.finished(),
            Some(Operation::Send(send)) => send.finished(),
            Some(Operation::Recv(recv)) => recv.finished(),
            None => true,
        }
    }
}
