//! What happens when a message arrives: every header finds the place for its payload, every payload its operation.

use super::{
    core::{Core, Incoming, Operation, OperationId, Stored},
    health::Failure,
    lines::Lines,
    message::{ANNOUNCE_ALL, FOR_MESSAGE, RecvState, SendState, tag_of},
    run::AHEAD,
    shared::{ANNOUNCEMENTS, BUDGET, EAGER_LIMIT, cost},
};
use crate::link::{Header, MessageKind};

impl Core {
    /// Decides where the payload behind a header goes.
    pub(crate) fn header(&mut self, peer: usize, header: Header, lines: &Lines<'_>) -> Result<(), Failure> {
        if header.epoch != lines.epoch {
            return Err(broken(
                peer,
                lines,
                format!("a message of epoch {} in epoch {}", header.epoch, lines.epoch),
            ));
        }
        if !self.communicators.contains_key(&header.comm) {
            return self.header_for_unknown(peer, header, lines);
        }
        self.take_credit(peer, &header, lines)?;
        // The payload before this header has landed, so nothing is dropped here that a receiver still writes to. Nobody else may
        // do this: stored messages are handled while the next payload is landing.
        self.incoming[peer] = Incoming::Nothing;
        match header.kind {
            MessageKind::Credit => self.asked(peer, &header, lines)?,
            MessageKind::Grant => self.granted(peer, &header, lines)?,
            MessageKind::Collective => self.collective_header(peer, header, lines)?,
            MessageKind::Eager => self.eager_header(peer, header, lines)?,
            MessageKind::Announce => {
                let stored = Stored { peer, header, payload: Vec::new() };
                self.hold(&stored.header, peer, lines)?;
                self.offer(stored, lines)?;
            }
            MessageKind::Data => self.data_header(peer, &header, lines)?,
        }
        if header.length == 0 && header.kind != MessageKind::Announce {
            self.payload(peer, lines)?;
        }
        Ok(())
    }

    /// The payload has landed where [`Core::header`] decided.
    pub(crate) fn payload(&mut self, peer: usize, lines: &Lines<'_>) -> Result<(), Failure> {
        match std::mem::replace(&mut self.incoming[peer], Incoming::Nothing) {
            Incoming::Nothing | Incoming::Discard => Ok(()),
            Incoming::Place(id, place) => {
                if let Some(run) = self.table.run(id) {
                    run.arrived(&place);
                }
                self.advance(id, lines)
            }
            Incoming::Kept(id, place, bytes) => {
                if let Some(run) = self.table.run(id) {
                    run.deliver(place, bytes);
                }
                self.advance(id, lines)
            }
            Incoming::Posted(id, header) => {
                if let Some(recv) = self.table.recv(id) {
                    recv.state = RecvState::Done(header.length);
                    recv.moved = true;
                }
                Ok(())
            }
            Incoming::Data(id, length) => {
                if let Some(recv) = self.table.recv(id)
                    && let RecvState::Receiving { total, received } = recv.state
                {
                    let received = received + length;
                    recv.moved = true;
                    recv.state = if received == total {
                        RecvState::Done(total)
                    } else {
                        RecvState::Receiving { total, received }
                    };
                }
                Ok(())
            }
            Incoming::Store(header, payload) => self.store(Stored { peer, header, payload }, lines),
        }
    }

    /// A whole message that was stored: gives it to whoever waits for it now, or keeps it.
    pub(crate) fn store(&mut self, stored: Stored, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(group) = self.communicators.get_mut(&stored.header.comm) else {
            if !self.numbers.is_over(stored.header.comm) {
                self.limbo.keep(stored);
            }
            return Ok(());
        };
        if stored.header.kind != MessageKind::Collective {
            return self.offer(stored, lines);
        }
        match group.active(stored.header.sequence) {
            Some(id) => {
                self.replay(id, stored, lines)?;
                self.advance(id, lines)
            }
            None if stored.header.sequence < group.next_sequence => {
                Err(over(stored.peer, stored.header.sequence, lines))
            }
            None => {
                group.early.push_back(stored);
                Ok(())
            }
        }
    }

    /// Takes what came for a communicator before it was made here.
    pub(crate) fn leave_limbo(&mut self, comm: u32, lines: &Lines<'_>) -> Result<(), Failure> {
        // What is landing for it right now is counted as if it had come later.
        for peer in 0..self.incoming.len() {
            if let Incoming::Store(header, _) = &self.incoming[peer]
                && header.comm == comm
            {
                let header = *header;
                self.take_credit(peer, &header, lines)?;
                self.hold(&header, peer, lines)?;
            }
        }
        for stored in self.limbo.take(comm..=comm) {
            let peer = stored.peer;
            self.take_credit(peer, &stored.header, lines)?;
            match stored.header.kind {
                MessageKind::Credit => self.asked(peer, &stored.header, lines)?,
                MessageKind::Grant => self.granted(peer, &stored.header, lines)?,
                MessageKind::Collective | MessageKind::Eager | MessageKind::Announce => {
                    self.hold(&stored.header, peer, lines)?;
                    self.store(stored, lines)?;
                }
                MessageKind::Data => {
                    return Err(broken(peer, lines, "data of a message that was not granted".to_owned()));
                }
            }
        }
        Ok(())
    }

    /// Hands a stored message of a collective to its run.
    pub(crate) fn replay(
        &mut self,
        id: OperationId,
        stored: Stored,
        lines: &Lines<'_>,
    ) -> Result<(), Failure> {
        let Stored { peer, header, payload } = stored;
        self.check_signature(peer, &header)?;
        if header.kind == MessageKind::Grant {
            return self.granted(peer, &header, lines);
        }
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        if header.flags & AHEAD != 0 {
            group.held[peer] -= cost(payload.len());
            if group.shared.owe(peer, payload.len()) {
                group.give_credit(peer, lines)?;
            }
        }
        let from = group.shared.position[peer];
        if let (Some(run), Some(from)) = (self.table.run(id), from) {
            let place = run
                .accept(from, header.stream, header.length)
                .map_err(|reason| broken(peer, lines, reason))?;
            run.deliver(place, payload);
        }
        Ok(())
    }

    /// Takes a collective as far as it goes, and strikes it off when it is done.
    pub(crate) fn advance(&mut self, id: OperationId, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(run) = self.table.run(id) else { return Ok(()) };
        if run.heard > 0 {
            let group = self.communicators.get(&run.shared.id);
            run.unheard = group.and_then(|group| group.unheard(run.heard));
            if run.unheard.is_some() {
                return Ok(());
            }
            run.moved = true;
            run.heard = 0;
        }
        run.advance(lines)?;
        if run.finished() {
            let comm = run.shared.id;
            if let Some(group) = self.communicators.get_mut(&comm) {
                group.active.retain(|&(_, active)| active != id);
            }
        }
        Ok(())
    }

    fn take_credit(&mut self, peer: usize, header: &Header, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(group) = self.communicators.get(&header.comm) else { return Ok(()) };
        if group.shared.position[peer].is_none() {
            return Err(broken(
                peer,
                lines,
                format!("a message for communicator {}, which it is not in", header.comm),
            ));
        }
        if header.credit == 0 {
            return Ok(());
        }
        if !group.shared.credit(peer, header.credit) {
            return Err(broken(peer, lines, format!("{} units of credit that it never had", header.credit)));
        }
        let is_short =
            |id: OperationId| matches!(self.table.get(id), Some(Operation::Collective(run)) if run.short);
        let active = group.active.iter().map(|&(_, id)| id);
        let waiting: Vec<OperationId> = active.filter(|&id| is_short(id)).collect();
        self.pump_outbox(header.comm, peer, lines)?;
        waiting.into_iter().try_for_each(|id| self.advance(id, lines))
    }

    /// A peer says whether it wants to have announced what there is no budget for.
    fn asked(&mut self, peer: usize, header: &Header, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        group.asking[peer] = header.flags & ANNOUNCE_ALL != 0;
        self.pump_outbox(header.comm, peer, lines)
    }

    fn granted(&mut self, peer: usize, header: &Header, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        if header.flags & FOR_MESSAGE != 0 {
            let Some(id) = group.announced.remove(&(peer, header.sequence)) else {
                return Err(broken(
                    peer,
                    lines,
                    format!("a grant for message {}, which was not announced", header.sequence),
                ));
            };
            group.announcing[peer] -= 1;
            if let Some(send) = self.table.send(id) {
                send.state = SendState::Streaming { number: header.sequence, offset: 0 };
                send.moved = true;
                self.streaming.push(id);
                self.pump_streams(lines)?;
            }
            // Another may be announced in its place.
            return self.pump_outbox(header.comm, peer, lines);
        }
        self.check_signature(peer, header)?;
        self.has_entered(peer, header, lines)?;
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        let (active, from) = (group.active(header.sequence), group.shared.position[peer]);
        if let (Some(id), Some(from)) = (active, from) {
            if let Some(run) = self.table.run(id) {
                run.granted(from);
            }
            self.advance(id, lines)?;
        } else if header.sequence >= group.next_sequence && group.early.len() < GRANTS {
            // Kept for its signature.
            group.early.push_back(Stored { peer, header: *header, payload: Vec::new() });
        }
        Ok(())
    }

    fn collective_header(&mut self, peer: usize, header: Header, lines: &Lines<'_>) -> Result<(), Failure> {
        self.check_signature(peer, &header)?;
        self.has_entered(peer, &header, lines)?;
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        let (Some(id), Some(from)) = (group.active(header.sequence), group.shared.position[peer]) else {
            if header.sequence < group.next_sequence {
                return Err(over(peer, header.sequence, lines));
            }
            return self.hold_payload(peer, header, lines);
        };
        if header.flags & AHEAD != 0 && group.shared.owe(peer, header.length as usize) {
            group.give_credit(peer, lines)?;
        }
        let Some(run) = self.table.run(id) else { return Ok(()) };
        let place =
            run.accept(from, header.stream, header.length).map_err(|reason| broken(peer, lines, reason))?;
        self.incoming[peer] = if place.pointer.is_null() {
            // `accept` has checked the length against the operation's own.
            Incoming::Kept(id, place, vec![0; header.length as usize])
        } else {
            Incoming::Place(id, place)
        };
        Ok(())
    }

    fn eager_header(&mut self, peer: usize, header: Header, lines: &Lines<'_>) -> Result<(), Failure> {
        if header.length > EAGER_LIMIT as u64 {
            return Err(broken(peer, lines, format!("a message of {} bytes sent ahead", header.length)));
        }
        match self.take_posted(header.comm, peer, tag_of(&header.signature)) {
            Some(id) => {
                if let Some(group) = self.communicators.get_mut(&header.comm)
                    && group.shared.owe(peer, header.length as usize)
                {
                    group.give_credit(peer, lines)?;
                }
                if let Some(recv) = self.table.recv(id) {
                    recv.state = RecvState::Landing;
                }
                self.incoming[peer] = Incoming::Posted(id, header);
                Ok(())
            }
            None => self.hold_payload(peer, header, lines),
        }
    }

    fn data_header(&mut self, peer: usize, header: &Header, lines: &Lines<'_>) -> Result<(), Failure> {
        let unknown = |lines| {
            broken(peer, lines, format!("data of message {}, which was not granted", header.sequence))
        };
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        let Some(&id) = group.receiving.get(&(peer, header.sequence)) else { return Err(unknown(lines)) };
        let Some(recv) = self.table.recv(id) else { return Err(unknown(lines)) };
        let RecvState::Receiving { total, received } = recv.state else { return Err(unknown(lines)) };
        if header.length > total - received || (header.length == 0 && total > 0) {
            return Err(broken(
                peer,
                lines,
                format!("{} bytes of a message that lacks {}", header.length, total - received),
            ));
        }
        if received + header.length == total {
            group.receiving.remove(&(peer, header.sequence));
        }
        self.incoming[peer] = Incoming::Data(id, header.length);
        Ok(())
    }

    /// Makes room for a message that nobody waits for, within the sender's budget.
    fn hold_payload(&mut self, peer: usize, header: Header, lines: &Lines<'_>) -> Result<(), Failure> {
        self.hold(&header, peer, lines)?;
        // Bounded by the budget, as `hold` has checked.
        self.incoming[peer] = Incoming::Store(header, vec![0; header.length as usize]);
        Ok(())
    }

    /// Counts a stored message against its sender's budget, and an announcement against how many there may be.
    fn hold(&mut self, header: &Header, peer: usize, lines: &Lines<'_>) -> Result<(), Failure> {
        let Some(group) = self.communicators.get_mut(&header.comm) else { return Ok(()) };
        if header.kind == MessageKind::Announce {
            group.noted[peer] += 1;
            if group.noted[peer] > ANNOUNCEMENTS {
                let reason = format!("more than {ANNOUNCEMENTS} announcements");
                return Err(broken(peer, lines, reason));
            }
            return Ok(());
        }
        let length = usize::try_from(header.length).unwrap_or(usize::MAX).min(BUDGET as usize * 2);
        group.held[peer] += cost(length);
        if header.flags & AHEAD == 0 || group.held[peer] > BUDGET {
            let reason = format!("{length} bytes of call or message {} beyond its budget", header.sequence);
            return Err(broken(peer, lines, reason));
        }
        if group.active.is_empty() && group.posted[peer].is_empty() {
            return Ok(());
        }
        self.relieve(header.comm, peer, lines)
    }

    /// Lets a peer of whom much is stored here send what is waited for: gives back all that it is owed, asks it to announce the
    /// rest, and tells it which collectives have been entered.
    pub(crate) fn relieve(&mut self, comm: u32, peer: usize, lines: &Lines<'_>) -> Result<(), Failure> {
        let Core { communicators, table, .. } = self;
        let Some(group) = communicators.get_mut(&comm) else { return Ok(()) };
        if !group.is_crowded(peer) {
            return Ok(());
        }
        if group.wants_relief(peer) {
            group.give_credit(peer, lines)?;
        }
        group.active.iter().try_for_each(|&(_, id)| match table.run(id) {
            Some(run) => run.grant(lines, |other| other == peer),
            None => Ok(()),
        })
    }

    fn header_for_unknown(&mut self, peer: usize, header: Header, lines: &Lines<'_>) -> Result<(), Failure> {
        if self.numbers.is_over(header.comm) {
            // One that was dropped here: what still arrives for it is nobody's.
            self.incoming[peer] = Incoming::Discard;
            return Ok(());
        }
        if !self.limbo.has_room(peer, header.length) {
            return Err(broken(
                peer,
                lines,
                format!("a message for communicator {}, which does not exist", header.comm),
            ));
        }
        self.incoming[peer] = Incoming::Store(header, vec![0; header.length as usize]);
        if header.length == 0 {
            self.payload(peer, lines)?;
        }
        Ok(())
    }

    /// A message of a collective has come from a peer, which some broadcast of ours may have waited for.
    fn has_entered(&mut self, peer: usize, header: &Header, lines: &Lines<'_>) -> Result<(), Failure> {
        let Core { communicators, table, .. } = self;
        let Some(group) = communicators.get_mut(&header.comm) else { return Ok(()) };
        group.has_entered(peer, header.sequence);
        let mut waited = |id: OperationId| table.run(id).is_some_and(|run| run.unheard == Some(peer));
        if !group.active.iter().any(|&(_, id)| waited(id)) {
            return Ok(());
        }
        let waiting: Vec<OperationId> =
            group.active.iter().map(|&(_, id)| id).filter(|&id| waited(id)).collect();
        waiting.into_iter().try_for_each(|id| self.advance(id, lines))
    }

    /// Compares the calls of those whose messages of a call that this rank enters now are landing: that call may be over when
    /// they have landed.
    pub(crate) fn check_landing(&self, comm: u32, sequence: u64) -> Result<(), Failure> {
        self.incoming.iter().enumerate().try_for_each(|(peer, incoming)| match incoming {
            Incoming::Store(header, _)
                if header.kind == MessageKind::Collective
                    && (header.comm, header.sequence) == (comm, sequence) =>
            {
                self.check_signature(peer, header)
            }
            _ => Ok(()),
        })
    }

    /// Compares a peer's call with ours at the same place of the sequence.
    pub(crate) fn check_signature(&self, peer: usize, header: &Header) -> Result<(), Failure> {
        let Some(group) = self.communicators.get(&header.comm) else { return Ok(()) };
        group.compare(peer, header.sequence, &header.signature)
    }
}

/// Grants kept of collectives that this rank has not entered.
const GRANTS: usize = 4096;

fn over(peer: usize, sequence: u64, lines: &Lines<'_>) -> Failure {
    broken(peer, lines, format!("a message of call {sequence}, which is over"))
}

fn broken(peer: usize, lines: &Lines<'_>, reason: String) -> Failure {
    let link = lines.senders[peer].as_ref().map_or(crate::link::LinkKind::Local, crate::link::Sender::kind);
    Failure::Protocol { peer, link, reason }
}
