//! One cable as it carries packets: its queue pairs, their slots in registered memory, and its credits.
//!
//! [`Lane`](super::lane::Lane) makes a stream of it, and [`Bundle`](super::bundle::Bundle) makes several streams of several.
//! Whoever owns a wire counts the packets and sees to it that only one thread sends at a time, and only one receives.
//!
//! **Credits.** Each side counts the receives that it has posted, in all, and says so in every packet. A packet is sent only when
//! fewer have been sent on its queue pair than the peer has posted receives there, so no send ever meets no receive. Packets
//! that say nothing else go out when much is owed; a few receives of the small queue pair are reserved for them.
//!
//! **Counts that both look at** are atomics: `granted` and `done` are written by who receives and read by who sends; `posted` is
//! written by who receives and `told` by who sends, both read by either. Only the sums matter and each has one writer at a time,
//! but a slot is written again after its completion was seen, so `done` is stored with release and read with acquire.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use parking_lot::RwLock;
use raccl_sys::{Completion, CompletionQueue, MemoryRegion, QueuePair, ReadyToSend, Span};

use super::{
    packet::{Bare, PACKET_BYTES, Packet},
    registry::Registry,
};
use crate::{error::Cause, link::LinkError};

/// What Apple's driver counts queue depths in.
pub(super) const FRAME: usize = 4096;
/// The class of packets of one frame, and that of packets of many.
pub(super) const SMALL: usize = 0;
pub(super) const BULK: usize = 1;
/// Every device has one port.
pub(super) const PORT: u8 = 1;

/// Receives of the small queue pair that streams leave to credits and to the end.
pub(super) const RESERVED: i32 = 3;
/// Completions taken at a time.
pub(super) const BATCH: usize = 16;

/// What went wrong on a cable.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("cable {cable}: packet {expected} was lost, {got} came instead; check the cable")]
    Lost { cable: String, expected: u32, got: u32 },
    #[error("cable {cable}: a packet came damaged: {what}; check the cable")]
    Damaged { cable: String, what: String },
    #[error("cable {cable}: its other end found it dead; the output of that rank says why")]
    GivenUp { cable: String },
    #[error(
        "cable {cable}: it was given up in the middle of a message; the first error of this rank says why"
    )]
    Revoked { cable: String },
}

/// The queue pair of a class and its slots in registered memory.
pub(super) struct Class {
    pub(super) pair: Pair,
    /// Bytes of a slot, header included; a packet of the bulk class has exactly as many.
    pub(super) slot_bytes: usize,
    /// Where the slots begin in the region.
    pub(super) send_at: usize,
    pub(super) recv_at: usize,
    /// How many there are, powers of two.
    pub(super) send_slots: u32,
    pub(super) recv_slots: u32,
    /// How many sends may be under way, at most as many as there are slots.
    pub(super) window: u32,
    /// How many receives the peer has.
    pub(super) peer_slots: u32,
    /// Receives that the peer has posted so far.
    pub(super) granted: AtomicU32,
    /// Our receives posted so far, and how many of them the peer has been told of.
    pub(super) posted: AtomicU32,
    pub(super) told: AtomicU32,
    /// Our sends that have completed.
    pub(super) done: AtomicU32,
}

/// What a cable is made of.
pub(super) struct Wire {
    /// Names the cable in errors: the device here, the peer, the device there.
    pub(super) cable: String,
    pub(super) queue: CompletionQueue,
    pub(super) region: MemoryRegion,
    /// The small class, and the bulk class if the cable has it.
    pub(super) classes: Vec<Class>,
    /// Numbers that begin the header sums of what goes out and of what comes in.
    pub(super) out_number: u32,
    pub(super) in_number: u32,
    /// Payloads are summed too.
    pub(super) sums: bool,
    /// Memory of the user that packets may come from and go to, if they may.
    pub(super) lent: Option<Lent>,
}

/// A queue pair, and whether it can be destroyed while others use it.
pub(super) enum Pair {
    Lasting(QueuePair<ReadyToSend>),
    Revocable(RwLock<Option<QueuePair<ReadyToSend>>>),
}

/// Memory of the user, as a device knows it.
pub(super) struct Lent {
    pub(super) registry: Arc<Registry>,
    pub(super) device: usize,
}

/// What came.
pub(super) enum Came {
    /// A packet with a header, which lies in its slot.
    Packet { class: usize, slot: u32, packet: Packet },
    /// One without, of so many bytes, in a slot of the bulk class or else where it was wanted.
    Bare { slot: Option<u32>, bytes: usize },
}

impl Wire {
    /// Whether a packet of the class can be sent after `sent` others, and leaves `reserve` receives of the peer for others.
    #[inline]
    pub(super) fn has_room(&self, class: usize, sent: u32, reserve: i32) -> bool {
        let class = &self.classes[class];
        sent.wrapping_sub(class.done.load(Ordering::Acquire)) < class.window
            && class.granted.load(Ordering::Relaxed).wrapping_sub(sent).cast_signed() > reserve
    }

    /// Whether the peer does not know of many of the receives that are posted.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        let due = |class: &Class| {
            let owed = class.posted.load(Ordering::Relaxed).wrapping_sub(class.told.load(Ordering::Relaxed));
            owed >= (class.recv_slots / 4).max(1)
        };
        self.classes.iter().any(due)
    }

    /// The class for the next packet of a stream of which so much is waiting.
    #[inline]
    pub(super) fn class_for(&self, waiting: usize) -> usize {
        match self.classes.get(BULK) {
            Some(bulk) if waiting >= bulk.payload() => BULK,
            _ => SMALL,
        }
    }

    /// Writes a packet's header in front of its payload and posts both. There is room, and `turn` packets of the class have been
    /// sent before.
    #[inline]
    pub(super) fn send(&self, class: usize, packet: &mut Packet) -> Result<(), LinkError> {
        for (index, class) in self.classes.iter().enumerate() {
            packet.posted[index] = class.posted.load(Ordering::Relaxed);
            class.told.store(packet.posted[index], Ordering::Relaxed);
        }
        let header = packet.encode(self.out_number);
        let to = self.send_slot(class, packet.turn);
        // SAFETY: the slot is registered memory of ours, longer than a header, and its last send has completed.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), to, PACKET_BYTES) };
        let offset = to.addr() - self.region.as_ptr().addr();
        let span = self.region.span(offset, PACKET_BYTES + packet.bytes as usize).map_err(sending)?;
        let id = identity(SEND, class, packet.turn);
        self.with_pair(class, sending, |pair| {
            // SAFETY: the slot is not written again before the completion, and the queue pair keeps the region.
            unsafe { pair.post_send(id, span) }
        })
    }

    /// Sends a bulk packet without a header, after `turn` others. There is room.
    ///
    /// # Safety
    /// Nobody writes to the span, which is the slot of that turn or lies in memory that was lent, and this stays registered, until
    /// the packet is [done](Class::done) or this was [revoked](Self::revoke).
    pub(super) unsafe fn send_bare(&self, turn: u32, span: Span) -> Result<(), LinkError> {
        self.with_pair(BULK, sending, |pair| {
            // SAFETY: the caller's promise is the same.
            unsafe { pair.post_send(identity(SEND, BULK, turn), span) }
        })
    }

    /// Posts a receive for the bulk packet of a turn where it is wanted. All before it have been posted.
    ///
    /// # Safety
    /// Nobody reads or writes the span, which lies in memory that was lent, and this stays registered, until the packet came or
    /// this was [revoked](Self::revoke).
    pub(super) unsafe fn place(&self, turn: u32, span: Span) -> Result<(), LinkError> {
        self.with_pair(BULK, receiving, |pair| {
            // SAFETY: the caller's promise is the same.
            unsafe { pair.post_recv(identity(PLACED, BULK, turn), span) }
        })?;
        self.classes[BULK].posted.store(turn.wrapping_add(1), Ordering::Relaxed);
        Ok(())
    }

    /// Destroys the bulk queue pair, so that the device does not touch memory that was lent any more. The cable carries nothing
    /// from here on.
    pub(super) fn revoke(&self) {
        let Some(Class { pair: Pair::Revocable(pair), .. }) = self.classes.get(BULK) else { return };
        let Some(pair) = pair.write().take() else { return };
        if let Err(error) = pair.destroy() {
            // Whoever lent the memory must not go on: the device may write there at any time.
            tracing::error!(cable = self.cable, %error, "the device cannot be kept from the memory of a call: aborting");
            std::process::abort();
        }
    }

    /// Whether this was revoked.
    pub(super) fn is_revoked(&self) -> bool {
        match self.classes.get(BULK) {
            Some(Class { pair: Pair::Revocable(pair), .. }) => pair.read().is_none(),
            _ => false,
        }
    }

    /// Posts the receive of a slot.
    #[inline]
    pub(super) fn post_receive(&self, index: usize, slot: u32) -> Result<(), LinkError> {
        let class = &self.classes[index];
        let offset = class.recv_at + slot as usize * class.slot_bytes;
        let span = self.region.span(offset, class.slot_bytes).map_err(receiving)?;
        self.with_pair(index, receiving, |pair| {
            // SAFETY: what the slot held has been read, nothing looks at it before the completion, and the queue pair keeps the
            // region. No more are posted than the queue is deep.
            unsafe { pair.post_recv(identity(RECEIVE, index, slot), span) }
        })?;
        class.posted.store(class.posted.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        Ok(())
    }

    /// Takes completions off the queue, the oldest first; how many.
    #[inline]
    pub(super) fn poll(&self, into: &mut [Completion]) -> Result<usize, LinkError> {
        self.queue.poll(into).map_err(receiving)
    }

    /// Takes note of a completion; the packet that it announces, if it is of a receive.
    #[inline]
    pub(super) fn completed(&self, completion: &Completion) -> Result<Option<Came>, LinkError> {
        let (kind, index, slot) = parse(completion.id());
        let checked = completion.check(self.queue.context());
        let Some(class) = self.classes.get(index) else {
            return Err(self.damaged(format!(
                "the driver completes request {:#x}, which was not made",
                completion.id()
            )));
        };
        if kind == SEND {
            checked.map_err(sending)?;
            class.done.store(slot.wrapping_add(1), Ordering::Release);
            return Ok(None);
        }
        checked.map_err(receiving)?;
        if kind == PLACED {
            return Ok(Some(Came::Bare { slot: None, bytes: completion.bytes() }));
        }
        if index == BULK
            && self.lent.is_some()
            && completion.bytes() < class.slot_bytes
            && slot < class.recv_slots
        {
            return Ok(Some(Came::Bare { slot: Some(slot), bytes: completion.bytes() }));
        }
        let mut header = [0; PACKET_BYTES];
        if completion.bytes() < PACKET_BYTES || slot >= class.recv_slots {
            return Err(self.damaged(format!("it has {} bytes", completion.bytes())));
        }
        // SAFETY: the slot is longer than a header, and its receive has completed, so the device does not write there.
        unsafe {
            std::ptr::copy_nonoverlapping(self.receive_slot(index, slot), header.as_mut_ptr(), PACKET_BYTES)
        };
        let packet = Packet::decode(&header, self.in_number).map_err(|what| self.damaged(what))?;
        let until = PACKET_BYTES + packet.bytes as usize;
        if until != completion.bytes() || until > class.slot_bytes {
            return Err(
                self.damaged(format!("its header says {until} bytes, and {} came", completion.bytes()))
            );
        }
        Ok(Some(Came::Packet { class: index, slot, packet }))
    }

    /// Takes note of the receives that the peer has posted.
    #[inline]
    pub(super) fn granted(&self, packet: &Packet) {
        for (class, posted) in self.classes.iter().zip(packet.posted) {
            // A packet of the other queue pair may have said more already.
            if posted.wrapping_sub(class.granted.load(Ordering::Relaxed)).cast_signed() > 0 {
                class.granted.store(posted, Ordering::Relaxed);
            }
        }
    }

    /// Asks the device whether the cable is still there, since a receive that never comes says nothing.
    pub(super) fn look_at_port(&self) -> Result<(), LinkError> {
        self.queue.context().active_port(PORT).map(drop).map_err(receiving)
    }

    /// The slot of the packet of that turn.
    #[inline]
    pub(super) fn send_slot(&self, class: usize, turn: u32) -> *mut u8 {
        let class = &self.classes[class];
        let slot = (turn % class.send_slots) as usize;
        self.region.as_ptr().wrapping_add(class.send_at + slot * class.slot_bytes)
    }

    #[inline]
    pub(super) fn receive_slot(&self, class: usize, slot: u32) -> *const u8 {
        let class = &self.classes[class];
        self.region.as_ptr().wrapping_add(class.recv_at + slot as usize * class.slot_bytes)
    }

    /// These bytes as the device knows them, if they were lent.
    #[inline]
    pub(super) fn lent_span(&self, start: *const u8, bytes: usize) -> Option<Span> {
        let Lent { registry, device } = self.lent.as_ref()?;
        registry.find(*device, start, bytes)
    }

    /// The slot of a bulk packet without a header, of so many bytes.
    pub(super) fn bare_slot(&self, turn: u32, bytes: usize) -> Result<Span, LinkError> {
        let offset = self.send_slot(BULK, turn).addr() - self.region.as_ptr().addr();
        self.region.span(offset, bytes).map_err(sending)
    }

    /// What the bare packet of a turn should have been, and what came in its place.
    pub(super) fn lost_bare(&self, expected: u32, bytes: usize) -> LinkError {
        match Bare::turn(self.classes[BULK].slot_bytes, expected, bytes) {
            Some(got) => self.lost(expected, got),
            None => self.damaged(format!("it has {bytes} bytes")),
        }
    }

    #[inline]
    fn with_pair(
        &self,
        class: usize,
        failed: fn(raccl_sys::Error) -> LinkError,
        post: impl FnOnce(&QueuePair<ReadyToSend>) -> Result<(), raccl_sys::Error>,
    ) -> Result<(), LinkError> {
        match &self.classes[class].pair {
            Pair::Lasting(pair) => post(pair).map_err(failed),
            Pair::Revocable(pair) => match &*pair.read() {
                Some(pair) => post(pair).map_err(failed),
                None => Err(self.revoked()),
            },
        }
    }

    pub(super) fn revoked(&self) -> LinkError {
        receiving(Fault::Revoked { cable: self.cable.clone() })
    }

    pub(super) fn lost(&self, expected: u32, got: u32) -> LinkError {
        receiving(Fault::Lost { cable: self.cable.clone(), expected, got })
    }

    pub(super) fn damaged(&self, what: String) -> LinkError {
        receiving(Fault::Damaged { cable: self.cable.clone(), what })
    }

    pub(super) fn given_up(&self) -> LinkError {
        receiving(Fault::GivenUp { cable: self.cable.clone() })
    }
}

impl Class {
    /// Bytes of a stream in the longest packet; a bulk packet has exactly as many.
    #[inline]
    pub(super) fn payload(&self) -> usize {
        self.slot_bytes - PACKET_BYTES
    }
}

const SEND: u8 = 1;
const RECEIVE: u8 = 2;
/// A receive that is not in a slot.
const PLACED: u8 = 3;

/// The number of a work request: what it is, its class, and the turn of a send or the slot of a receive.
fn identity(kind: u8, class: usize, number: u32) -> u64 {
    u64::from(kind) << 40 | (class as u64) << 32 | u64::from(number)
}

fn parse(identity: u64) -> (u8, usize, u32) {
    ((identity >> 40) as u8, (identity >> 32) as usize & 0xFF, identity as u32)
}

fn sending(source: impl std::error::Error + Send + Sync + 'static) -> LinkError {
    LinkError::Broken { what: "sending through a cable", source: Cause::new(source) }
}

fn receiving(source: impl std::error::Error + Send + Sync + 'static) -> LinkError {
    LinkError::Broken { what: "receiving through a cable", source: Cause::new(source) }
}
