//! Point-to-point messages: sent ahead when small, announced and granted when large.
//!
//! A small message that finds no budget waits for it. It could wait for ever: what fills the receiver's store may be for
//! receives that are posted only after the one that this message is for. A receiver to whom that may happen asks for it
//! (`ANNOUNCE_ALL`), and is announced small messages too as long as it asks.
//!
//! ```text
//!  sender                          receiver
//!    |---- Eager + payload ---------->|   up to EAGER_LIMIT bytes and within the budget
//!    |---- Announce(number, length) ->|   larger, or asked for
//!    |<--- Grant(number) -------------|   once a receive matches
//!    |---- Data(number) + chunk ----->|   straight into the receiver's buffer
//! ```

use super::{
    core::{Core, Operation, OperationId, Stored},
    health::Failure,
    lines::Lines,
    run::AHEAD,
    shared::{ANNOUNCEMENTS, EAGER_LIMIT, Shared, cost},
};
use crate::link::{Header, MessageKind, Signature, Ticket};

/// In [`Header::flags`] of a grant: it is for an announced message.
pub(crate) const FOR_MESSAGE: u32 = 2;

/// In [`Header::flags`] of a message that brings credit: a receive waits, and nothing that is stored is for it.
pub(crate) const ANNOUNCE_ALL: u32 = 4;

/// Bytes of an announced message in one chunk, usually.
const CHUNK: usize = 256 << 10;

/// Bytes left in line at a link before a stream waits.
const WINDOW: u64 = 1 << 20;

/// A send that did not go out at once.
pub(crate) struct SendOperation {
    pub(crate) comm: u32,
    /// World rank.
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) pointer: *const u8,
    pub(crate) length: usize,
    pub(crate) state: SendState,
    pub(crate) moved: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendState {
    /// Waits for budget, or to be announced.
    Queued,
    /// Waits for the receiver's grant.
    Announced,
    /// Granted: `offset` bytes are handed to the link.
    Streaming {
        number: u64,
        offset: usize,
    },
    /// Handed to the link, whose ticket this is.
    Flushing(Ticket),
    Done,
}

// SAFETY: the pointer is used by one thread at a time, under the engine's lock, while the thread that waits for the operation
// keeps the memory alive.
unsafe impl Send for SendOperation {}

/// A receive.
pub(crate) struct RecvOperation {
    pub(crate) comm: u32,
    /// World rank.
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) pointer: *mut u8,
    pub(crate) room: usize,
    pub(crate) state: RecvState,
    pub(crate) moved: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecvState {
    /// Waits for a message.
    Posted,
    /// A message sent ahead is landing.
    Landing,
    /// An announced message of `total` bytes is coming.
    Receiving { total: u64, received: u64 },
    /// The message had this many bytes.
    Done(u64),
}

// SAFETY: as for `SendOperation`.
unsafe impl Send for RecvOperation {}

impl SendOperation {
    pub(crate) fn finished(&self) -> bool {
        self.state == SendState::Done
    }
}

impl RecvOperation {
    pub(crate) fn finished(&self) -> bool {
        matches!(self.state, RecvState::Done(_))
    }

    /// Copies a whole stored message and finishes.
    pub(crate) fn take(&mut self, payload: &[u8]) {
        let count = payload.len().min(self.room);
        // SAFETY: the buffer has `room` bytes and is kept alive by whoever waits for this operation.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), self.pointer, count) };
        self.state = RecvState::Done(payload.len() as u64);
        self.moved = true;
    }

    /// Where the next `length` bytes of an announced message go and how many of them fit.
    pub(crate) fn window(&self, received: u64, length: u64) -> (*mut u8, usize) {
        let at = usize::try_from(received).unwrap_or(usize::MAX).min(self.room);
        let keep = (self.room - at).min(usize::try_from(length).unwrap_or(usize::MAX));
        (self.pointer.wrapping_add(at), keep)
    }
}

/// Tag and total length of a point-to-point message in its header's signature.
pub(crate) fn sign(tag: u64, total: u64) -> Signature {
    let mut signature = [0; 24];
    signature[0..8].copy_from_slice(&tag.to_le_bytes());
    signature[8..16].copy_from_slice(&total.to_le_bytes());
    signature
}

pub(crate) fn tag_of(signature: &Signature) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| signature[i]))
}

pub(crate) fn total_of(signature: &Signature) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| signature[8 + i]))
}

/// The header of a point-to-point message to `peer`.
pub(crate) fn header(
    shared: &Shared,
    epoch: u32,
    peer: usize,
    kind: MessageKind,
    number: u64,
    signature: Signature,
) -> Header {
    Header {
        kind,
        epoch,
        comm: shared.id,
        credit: shared.take_owed(peer),
        sequence: number,
        stream: 0,
        flags: if kind == MessageKind::Eager { AHEAD } else { 0 },
        signature,
        length: 0,
    }
}

impl Core {
    /// Posts a receive: matches what is stored, or waits in line.
    pub(crate) fn post_recv(&mut self, id: OperationId, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(recv) = self.table.recv(id) else { return Ok(()) };
        let (comm, peer, tag) = (recv.comm, recv.peer, recv.tag);
        let Some(group) = self.communicators.get_mut(&comm) else { return Ok(()) };
        let found = group.inbox[peer].iter().position(|stored| tag_of(&stored.header.signature) == tag);
        match found.and_then(|at| group.inbox[peer].remove(at)) {
            Some(stored) => self.match_stored(id, stored, lines),
            None => {
                group.posted[peer].push_back(id);
                self.relieve(comm, peer, lines)
            }
        }
    }

    /// The first posted receive for a message of `peer` with `tag`, taken out of the line.
    pub(crate) fn take_posted(&mut self, comm: u32, peer: usize, tag: u64) -> Option<OperationId> {
        let group = self.communicators.get_mut(&comm)?;
        let table = &self.table;
        let matches =
            |id: &OperationId| matches!(table.get(*id), Some(Operation::Recv(recv)) if recv.tag == tag);
        let at = group.posted[peer].iter().position(matches)?;
        group.posted[peer].remove(at)
    }

    /// Gives a complete message or announcement to the receive that waits for it, or stores it.
    pub(crate) fn offer(&mut self, stored: Stored, lines: &Lines<'_>) -> Result<(), Failure> {
        let (comm, peer, tag) = (stored.header.comm, stored.peer, tag_of(&stored.header.signature));
        match self.take_posted(comm, peer, tag) {
            Some(id) => self.match_stored(id, stored, lines),
            None => {
                if let Some(group) = self.communicators.get_mut(&comm) {
                    group.inbox[peer].push_back(stored);
                }
                Ok(())
            }
        }
    }

    fn match_stored(&mut self, id: OperationId, stored: Stored, lines: &Lines<'_>) -> Result<(), Failure> {
        let Stored { peer, header: head, payload } = stored;
        if head.kind == MessageKind::Announce {
            if let Some(group) = self.communicators.get_mut(&head.comm) {
                group.noted[peer] -= 1;
            }
            return self.accept_announced(id, peer, &head, lines);
        }
        if let Some(group) = self.communicators.get_mut(&head.comm)
            && head.flags & AHEAD != 0
        {
            group.held[peer] -= cost(payload.len());
            if group.shared.owe(peer, payload.len()) {
                group.give_credit(peer, lines)?;
            }
        }
        if let Some(recv) = self.table.recv(id) {
            recv.take(&payload);
        }
        Ok(())
    }

    /// Grants an announced message to a receive.
    pub(crate) fn accept_announced(
        &mut self,
        id: OperationId,
        peer: usize,
        announced: &Header,
        lines: &Lines<'_>,
    ) -> Result<(), Failure> {
        let Some(recv) = self.table.recv(id) else { return Ok(()) };
        recv.state = RecvState::Receiving { total: total_of(&announced.signature), received: 0 };
        recv.moved = true;
        let Some(group) = self.communicators.get_mut(&announced.comm) else { return Ok(()) };
        group.receiving.insert((peer, announced.sequence), id);
        let mut grant = header(
            &group.shared,
            lines.epoch,
            peer,
            MessageKind::Grant,
            announced.sequence,
            announced.signature,
        );
        grant.flags = FOR_MESSAGE;
        lines.post(peer, &grant).map(|_| ())
    }

    /// Sends from the front of the line to a peer while the budget lasts, and announces what does not go ahead.
    pub(crate) fn pump_outbox(&mut self, comm: u32, peer: usize, lines: &Lines<'_>) -> Result<(), Failure> {
        loop {
            let Some(group) = self.communicators.get_mut(&comm) else { return Ok(()) };
            let Some(&id) = group.outbox[peer].front() else { return Ok(()) };
            let Some(send) = self.table.send(id) else {
                group.outbox[peer].pop_front();
                group.shared.unqueue(peer);
                continue;
            };
            let small = send.length <= EAGER_LIMIT;
            let eager = small && group.shared.take_budget(peer, send.length);
            if !eager {
                if (small && !group.asking[peer]) || group.announcing[peer] == ANNOUNCEMENTS {
                    return Ok(());
                }
                group.announcing[peer] += 1;
            }
            let number = group.shared.number(peer);
            let kind = if eager { MessageKind::Eager } else { MessageKind::Announce };
            let signature = sign(send.tag, send.length as u64);
            let mut head = header(&group.shared, lines.epoch, peer, kind, number, signature);
            send.moved = true;
            if eager {
                head.length = send.length as u64;
                // SAFETY: whoever waits for the operation keeps the payload alive until the ticket is sent or the link closed.
                let ticket = unsafe { lines.sender(peer)?.send(&head, send.pointer) };
                send.state = SendState::Flushing(ticket.map_err(|error| lines.failure(peer, error))?);
                self.streaming.push(id);
            } else {
                // SAFETY: there is no payload.
                let ticket = unsafe { lines.sender(peer)?.send(&head, std::ptr::null()) };
                ticket.map_err(|error| lines.failure(peer, error))?;
                send.state = SendState::Announced;
                group.announced.insert((peer, number), id);
            }
            group.outbox[peer].pop_front();
            group.shared.unqueue(peer);
        }
    }

    /// Takes granted messages further; true if something moved.
    pub(crate) fn pump_streams(&mut self, lines: &Lines<'_>) -> Result<bool, Failure> {
        let mut progressed = false;
        let streaming = std::mem::take(&mut self.streaming);
        let mut rest = Vec::new();
        for id in streaming {
            let Some(send) = self.table.send(id) else { continue };
            let before = send.state;
            if let SendState::Streaming { number, offset } = send.state
                && let Some(group) = self.communicators.get(&send.comm)
            {
                send.state = stream(send, &group.shared, number, offset, lines)?;
            }
            if let SendState::Flushing(ticket) = send.state
                && lines.sender(send.peer)?.sent() >= ticket
            {
                send.state = SendState::Done;
            }
            if send.state != before {
                send.moved = true;
                progressed = true;
            }
            if !send.finished() {
                rest.push(id);
            }
        }
        rest.append(&mut self.streaming);
        self.streaming = rest;
        Ok(progressed)
    }
}

/// Hands chunks to the link until its line is full or the message is out.
fn stream(
    send: &SendOperation,
    shared: &Shared,
    number: u64,
    mut offset: usize,
    lines: &Lines<'_>,
) -> Result<SendState, Failure> {
    let sender = lines.sender(send.peer)?;
    let signature = sign(send.tag, send.length as u64);
    let piece = lines.piece(send.peer, send.pointer, send.length, CHUNK);
    while sender.queued_bytes() < WINDOW {
        let bytes = piece.min(send.length - offset);
        let mut head = header(shared, lines.epoch, send.peer, MessageKind::Data, number, signature);
        head.length = bytes as u64;
        // SAFETY: whoever waits for the operation keeps the payload alive until the ticket is sent or the link closed.
        let ticket = unsafe { sender.send(&head, send.pointer.wrapping_add(offset)) };
        let ticket = ticket.map_err(|error| lines.failure(send.peer, error))?;
        offset += bytes;
        if offset == send.length {
            return Ok(SendState::Flushing(ticket));
        }
    }
    Ok(SendState::Streaming { number, offset })
}
