//! One plan in flight: how far each step is, and the moves that take it further.
//!
//! A run touches the caller's buffers and its own workspace through raw pointers. Whoever starts a run keeps those buffers
//! alive and alone until the run has been taken out of the engine; see [`Run::start`].

use std::{
    collections::VecDeque,
    num::NonZeroU32,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{
    block::Block,
    health::Failure,
    lines::Lines,
    prepare::{Endpoint, GRANT_THRESHOLD, Landing, Prepared},
    shared::Shared,
};
use crate::{
    link::{Header, MessageKind, Signature, Ticket},
    plan::{Action, Buffer, Leaf, Span},
    reduce::{Reducer, Repr, Source},
};

/// In [`Header::flags`]: the message was sent ahead and its cost is to be given back.
pub(crate) const AHEAD: u32 = 1;

/// Bytes that a step leaves in line at a link before it waits for the link to take them.
const WINDOW: u64 = 1 << 20;

/// A plan in flight.
pub(crate) struct Run {
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) sequence: u64,
    pub(crate) signature: Signature,
    /// The call's name, for errors.
    pub(crate) operation: &'static str,
    /// Something happened since the deadline was looked at last.
    pub(crate) moved: bool,
    /// A step waits for a link to take what is in line.
    pub(crate) lined_up: bool,
    raw_size: usize,
    acc_size: usize,
    reducer: Option<Reducer<'static>>,
    input: *const u8,
    output: *mut u8,
    workspace: Block,
    steps: Vec<StepState>,
    peers: Vec<PeerState>,
    /// Steps before this one are finished.
    first: usize,
    /// Messages that came before their step was allowed to write them.
    early: Vec<Early>,
    sources: Vec<Source>,
    batch: Vec<(Header, *const u8)>,
}

// SAFETY: a run's pointers are used by one thread at a time, under the engine's lock, and the memory they point to is kept
// alive by the thread that waits for the run (contract of `Run::start`).
unsafe impl Send for Run {}

#[derive(Default)]
struct StepState {
    done: usize,
    finished: bool,
    /// Sends: elements handed to the link.
    issued: usize,
    /// Sends: that an empty stream's message was handed over.
    announced: bool,
    tickets: VecDeque<(Ticket, usize)>,
    /// Receives: what has come, by peer leaf.
    arrived: Vec<Arrived>,
}

#[derive(Default, Clone, Copy)]
struct Arrived {
    /// Elements whose message has begun.
    accepted: usize,
    /// A message has begun.
    begun: bool,
    /// Elements that are there.
    elements: usize,
    heard: bool,
}

#[derive(Default, Clone, Copy)]
struct PeerState {
    /// The peer has entered the operation, so everything of it may flow.
    granted: bool,
    /// We have sent a message of this operation, which tells the peer the same.
    told: bool,
    bytes: u64,
}

struct Early {
    place: Place,
    bytes: Vec<u8>,
}

/// Where a message's payload goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    from: usize,
    step: usize,
    leaf: usize,
    offset: usize,
    elements: usize,
    bytes: usize,
    /// Where to put it; null: it must be kept and handed to [`Run::deliver`].
    pub(crate) pointer: *mut u8,
}

// SAFETY: as for `Run`, whose place it is.
unsafe impl Send for Place {}

/// What a run needs to begin.
pub(crate) struct Start {
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) sequence: u64,
    pub(crate) signature: Signature,
    pub(crate) operation: &'static str,
    pub(crate) raw_size: usize,
    pub(crate) acc_size: usize,
    pub(crate) reducer: Option<Reducer<'static>>,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    pub(crate) workspace: Block,
}

impl Run {
    /// Makes a run, reusing a finished one of the same plan.
    ///
    /// # Safety
    /// Until the run is dropped or retired, `input` and `output` are valid for the plan's spans, nobody else writes what the
    /// plan reads or touches what it writes, and the reducer's user function lives.
    pub(crate) unsafe fn start(start: Start) -> Box<Run> {
        let spare = start.prepared.spare.lock().take();
        let mut run = match spare {
            Some(mut run) => {
                run.reset(start);
                run
            }
            None => Box::new(Run::new(start)),
        };
        for (peer, state) in run.peers.iter_mut().enumerate() {
            state.granted = peer == run.shared.rank;
        }
        run
    }

    /// Gives the run back for reuse; returns its workspace.
    pub(crate) fn retire(mut self: Box<Self>) -> Block {
        let workspace = std::mem::replace(&mut self.workspace, Block::empty());
        self.input = std::ptr::null();
        self.output = std::ptr::null_mut();
        self.reducer = None;
        self.early.clear();
        // A spare run must not keep its own plan alive.
        let prepared = std::mem::replace(&mut self.prepared, Prepared::nothing());
        *prepared.spare.lock() = Some(self);
        workspace
    }

    /// True when every step is finished.
    pub(crate) fn finished(&self) -> bool {
        self.first == self.steps.len()
    }

    /// Does everything that can be done now.
    pub(crate) fn advance(&mut self, lines: &Lines<'_>) -> Result<(), Failure> {
        if !self.early.is_empty() {
            self.place_early();
        }
        let prepared = Arc::clone(&self.prepared);
        self.lined_up = false;
        for index in self.first..self.steps.len() {
            if !self.steps[index].finished {
                let before = self.steps[index].done;
                match &prepared.plan.steps[index].action {
                    Action::Send { to, from } => self.send(&prepared, index, *to, from, lines)?,
                    Action::Recv { .. } => self.receive(&prepared, index),
                    Action::RecvFold { leaves, into, finish } => {
                        self.fold(&prepared, index, leaves, into, *finish)?
                    }
                    Action::Copy { from, into } => self.copy(&prepared, index, from, into),
                }
                self.moved |= self.steps[index].finished || self.steps[index].done != before;
            }
            if self.steps[index].finished && index == self.first {
                self.first += 1;
            }
        }
        Ok(())
    }

    /// Tells peers that will send much, or are `short` of budget, and have not been told by a message yet, that we have
    /// entered.
    pub(crate) fn grant(&mut self, lines: &Lines<'_>, short: impl Fn(usize) -> bool) -> Result<(), Failure> {
        for from in 0..self.peers.len() {
            let peer = self.shared.members[from];
            let wants = self.prepared.inbound[from] > GRANT_THRESHOLD
                || (!self.prepared.endpoints[from].is_empty() && short(peer));
            if !wants || self.peers[from].told {
                continue;
            }
            self.peers[from].told = true;
            let header = Header { flags: 0, ..self.header(lines, peer, MessageKind::Grant, 0, 0) };
            lines.post(peer, &header)?;
        }
        Ok(())
    }

    /// The peer (rank in the communicator) has entered the operation.
    pub(crate) fn granted(&mut self, from: usize) {
        self.peers[from].granted = true;
        self.moved = true;
    }

    /// Where a message of stream `stream` with `length` bytes goes; the error is what the peer did wrong.
    pub(crate) fn accept(&mut self, from: usize, stream: u32, length: u64) -> Result<Place, String> {
        let Some(&Endpoint { step, leaf, repr }) = self.prepared.endpoints[from].get(stream as usize) else {
            return Err(format!("{} has no stream {stream}", self.operation));
        };
        let size = self.size(repr);
        let room = self.prepared.lengths[step] - self.steps[step].arrived[leaf].accepted;
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if !bytes.is_multiple_of(size) || bytes / size > room {
            return Err(format!(
                "{} expects at most {room} elements of {size} bytes, {length} bytes came",
                self.operation
            ));
        }
        let arrived = &mut self.steps[step].arrived[leaf];
        if bytes == 0 && (room > 0 || arrived.begun) {
            return Err(format!("{} has no use for an empty message", self.operation));
        }
        let offset = arrived.accepted;
        let elements = bytes / size;
        arrived.accepted += elements;
        arrived.begun = true;
        self.peers[from].granted = true;
        let pointer = self.landing(step, leaf, offset, elements);
        Ok(Place { from, step, leaf, offset, elements, bytes, pointer })
    }

    /// The payload of an accepted message is where its place said.
    pub(crate) fn arrived(&mut self, place: &Place) {
        let arrived = &mut self.steps[place.step].arrived[place.leaf];
        arrived.elements += place.elements;
        arrived.heard = true;
        self.peers[place.from].bytes += place.bytes as u64;
        self.moved = true;
    }

    /// The payload of an accepted message is in `bytes`.
    pub(crate) fn deliver(&mut self, place: Place, bytes: Vec<u8>) {
        debug_assert_eq!(place.bytes, bytes.len());
        self.moved = true;
        self.early.push(Early { place, bytes });
        self.place_early();
    }

    /// The first peer that an unfinished step waits for, in world ranks, with the bytes it has sent for this operation and
    /// whether it is known to have entered.
    pub(crate) fn waits_for(&self) -> Option<(usize, u64, bool)> {
        let from =
            (self.first..self.steps.len()).filter(|&i| !self.steps[i].finished).find_map(|i| match &self
                .prepared
                .plan
                .steps[i]
                .action
            {
                Action::Send { to, .. } => Some(*to),
                Action::Recv { from, .. } => Some(*from),
                Action::RecvFold { leaves, .. } => {
                    let peers = leaves.iter().filter_map(|leaf| match leaf {
                        Leaf::Peer { rank, .. } => Some(*rank),
                        Leaf::Local(_) => None,
                    });
                    let state = &self.steps[i];
                    peers
                        .zip(&state.arrived)
                        .find(|(_, a)| !a.heard || a.elements < self.prepared.lengths[i])
                        .map(|(p, _)| p)
                }
                Action::Copy { .. } => None,
            })?;
        Some((self.shared.members[from], self.peers[from].bytes, self.peers[from].granted))
    }

    /// How far the unfinished steps are, in words.
    pub(crate) fn progress(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for i in (self.first..self.steps.len()).filter(|&i| !self.steps[i].finished) {
            let (state, length) = (&self.steps[i], self.prepared.lengths[i]);
            let what = match &self.prepared.plan.steps[i].action {
                Action::Send { to, .. } => format!("send to rank {}", self.shared.members[*to]),
                Action::Recv { from, .. } => format!("receive from rank {}", self.shared.members[*from]),
                Action::RecvFold { .. } => "fold".to_owned(),
                Action::Copy { .. } => "copy".to_owned(),
            };
            // Writing to a string cannot fail.
            let _ = write!(text, "; {what}: {}/{length} done", state.done);
            if state.issued != state.done {
                let _ = write!(text, ", {} handed over", state.issued);
            }
            for arrived in &state.arrived {
                let _ = write!(text, ", {} arrived", arrived.elements);
            }
            let _ = write!(text, ", {:?} allowed", self.allowed(&self.prepared, i));
        }
        text
    }

    /// Adds the world ranks that unfinished steps receive from to `peers`, and those they send to to `sends`.
    pub(crate) fn needs(&self, receives: &mut [bool], sends: &mut [bool]) {
        for i in (self.first..self.steps.len()).filter(|&i| !self.steps[i].finished) {
            match &self.prepared.plan.steps[i].action {
                Action::Send { to, .. } => sends[self.shared.members[*to]] = true,
                Action::Recv { from, .. } => receives[self.shared.members[*from]] = true,
                Action::RecvFold { leaves, .. } => {
                    let state = &self.steps[i];
                    let mut arrived = state.arrived.iter();
                    for leaf in leaves {
                        if let Leaf::Peer { rank, .. } = leaf
                            && arrived
                                .next()
                                .is_some_and(|a| !a.heard || a.elements < self.prepared.lengths[i])
                        {
                            receives[self.shared.members[*rank]] = true;
                        }
                    }
                }
                Action::Copy { .. } => {}
            }
        }
    }

    fn new(start: Start) -> Run {
        let steps = start.prepared.plan.steps.iter().map(|step| StepState::sized(&step.action)).collect();
        Run {
            peers: vec![PeerState::default(); start.shared.members.len()],
            steps,
            shared: start.shared,
            prepared: start.prepared,
            sequence: start.sequence,
            signature: start.signature,
            operation: start.operation,
            moved: false,
            lined_up: false,
            raw_size: start.raw_size,
            acc_size: start.acc_size,
            reducer: start.reducer,
            input: start.input,
            output: start.output,
            workspace: start.workspace,
            first: 0,
            early: Vec::new(),
            sources: Vec::new(),
            batch: Vec::new(),
        }
    }

    fn reset(&mut self, start: Start) {
        self.prepared = start.prepared;
        self.shared = start.shared;
        self.sequence = start.sequence;
        self.signature = start.signature;
        self.operation = start.operation;
        self.moved = false;
        self.lined_up = false;
        self.raw_size = start.raw_size;
        self.acc_size = start.acc_size;
        self.reducer = start.reducer;
        self.input = start.input;
        self.output = start.output;
        self.workspace = start.workspace;
        self.first = 0;
        self.peers.fill(PeerState::default());
        for step in &mut self.steps {
            step.done = 0;
            step.finished = false;
            step.issued = 0;
            step.announced = false;
            step.tickets.clear();
            step.arrived.fill(Arrived::default());
        }
    }

    fn size(&self, repr: Repr) -> usize {
        match repr {
            Repr::Raw => self.raw_size,
            Repr::Acc => self.acc_size,
        }
    }

    fn allowed(&self, prepared: &Prepared, index: usize) -> Option<usize> {
        prepared.allowed(index, |i| self.steps[i].done, |i| self.steps[i].finished)
    }

    fn header(
        &self,
        lines: &Lines<'_>,
        peer: usize,
        kind: MessageKind,
        stream: u32,
        length: usize,
    ) -> Header {
        Header {
            kind,
            epoch: lines.epoch,
            comm: self.shared.id,
            credit: self.shared.take_owed(peer),
            sequence: self.sequence,
            stream,
            flags: 0,
            signature: self.signature,
            length: length as u64,
        }
    }

    fn send(
        &mut self,
        prepared: &Prepared,
        index: usize,
        to: usize,
        from: &Span,
        lines: &Lines<'_>,
    ) -> Result<(), Failure> {
        let Some(allowed) = self.allowed(prepared, index) else { return Ok(()) };
        let peer = self.shared.members[to];
        let sender = lines.sender(peer)?;
        let length = prepared.lengths[index];
        let size = self.size(from.repr);
        let mut batch = std::mem::take(&mut self.batch);
        let mut waiting = if batch_possible(&self.steps[index], length) { sender.queued_bytes() } else { 0 };
        let mut issued = self.steps[index].issued;
        while (issued < length || !self.steps[index].announced) && waiting < WINDOW {
            let (pointer, contiguous) = self.locate(from, issued);
            let end = next_boundary(issued, prepared.chunk).min(length).min(issued + contiguous);
            let bytes = (end - issued) * size;
            if end > allowed {
                break;
            }
            let granted = self.peers[to].granted;
            if !granted && !self.shared.take_budget(peer, bytes) {
                break;
            }
            let mut header =
                self.header(lines, peer, MessageKind::Collective, prepared.streams[index], bytes);
            header.flags = if granted { 0 } else { AHEAD };
            batch.push((header, pointer.cast_const()));
            self.steps[index].announced = true;
            waiting += bytes as u64;
            issued = end;
            self.steps[index].tickets.push_back((Ticket(0), issued));
        }
        let result = match batch.as_slice() {
            [] => Ok(None),
            // SAFETY: the payload lies in the run's buffers, which outlive the run (contract of `Run::start`); the run is not
            // retired before the ticket is sent, or before the link was closed.
            [(header, pointer)] => unsafe { sender.send(header, *pointer) }.map(Some),
            // SAFETY: as above.
            many => unsafe { sender.send_many(many) }.map(Some),
        };
        let count = batch.len();
        batch.clear();
        self.batch = batch;
        let state = &mut self.steps[index];
        if let Some(Ticket(last)) = result.map_err(|error| lines.failure(peer, error))? {
            state.issued = issued;
            let new = state.tickets.len() - count;
            for (i, ticket) in state.tickets.iter_mut().skip(new).enumerate() {
                ticket.0 = Ticket(last + 1 + i as u64 - count as u64);
            }
            self.peers[to].told = true;
        }
        let sent = sender.sent();
        while let Some(&(ticket, done)) = state.tickets.front()
            && ticket <= sent
        {
            state.done = done;
            state.tickets.pop_front();
        }
        self.lined_up |= !state.tickets.is_empty() || waiting >= WINDOW;
        state.finished =
            state.announced && state.done == length && state.tickets.is_empty() && state.issued == length;
        Ok(())
    }

    fn receive(&mut self, prepared: &Prepared, index: usize) {
        let Some(_) = self.allowed(prepared, index) else { return };
        let state = &mut self.steps[index];
        state.done = state.arrived[0].elements;
        state.finished = state.arrived[0].heard && state.done == prepared.lengths[index];
    }

    fn fold(
        &mut self,
        prepared: &Prepared,
        index: usize,
        leaves: &[Leaf],
        into: &Span,
        finish: bool,
    ) -> Result<(), Failure> {
        let Some(allowed) = self.allowed(prepared, index) else { return Ok(()) };
        let length = prepared.lengths[index];
        let state = &self.steps[index];
        let there = state.arrived.iter().map(|arrived| arrived.elements).min().unwrap_or(length).min(allowed);
        let heard = state.arrived.iter().all(|arrived| arrived.heard);
        let mut done = state.done;
        while done < length {
            let end = next_boundary(done, prepared.chunk).min(length);
            if end > there {
                break;
            }
            while done < end {
                done += self.fold_piece(prepared, index, leaves, into, finish, done, end - done)?;
            }
        }
        self.steps[index].done = done;
        self.steps[index].finished = heard && done == length;
        Ok(())
    }

    /// Folds up to `most` elements from `at` on; returns how many lie together in all operands and were folded.
    #[allow(clippy::too_many_arguments)]
    fn fold_piece(
        &mut self,
        prepared: &Prepared,
        index: usize,
        leaves: &[Leaf],
        into: &Span,
        finish: bool,
        at: usize,
        most: usize,
    ) -> Result<usize, Failure> {
        let (target, mut count) = self.locate(into, at);
        count = count.min(most);
        let mut sources = std::mem::take(&mut self.sources);
        sources.clear();
        let mut peer = 0;
        for leaf in leaves {
            let (ptr, repr) = match leaf {
                Leaf::Local(span) => {
                    let (pointer, contiguous) = self.locate(span, at);
                    count = count.min(contiguous);
                    (pointer, span.repr)
                }
                Leaf::Peer { repr, .. } => {
                    let pointer = match prepared.landings[index][peer] {
                        Landing::Result => target,
                        Landing::Workspace(offset) => self.workspace(offset + at * self.size(*repr)),
                    };
                    peer += 1;
                    (pointer, *repr)
                }
            };
            sources.push(Source { ptr: ptr.cast_const(), repr });
        }
        let result = self.apply(&sources, target, into.repr, finish, count);
        self.sources = sources;
        result.map(|()| count)
    }

    fn apply(
        &self,
        sources: &[Source],
        target: *mut u8,
        to: Repr,
        finish: bool,
        count: usize,
    ) -> Result<(), Failure> {
        let Some(reducer) = &self.reducer else {
            // Plans of operations without a reduction have folds of one operand only: a move.
            let bytes = count * self.raw_size;
            if let [source] = sources
                && source.ptr != target.cast_const()
            {
                // SAFETY: both lie in buffers valid for the run; `copy` allows them to overlap.
                unsafe { std::ptr::copy(source.ptr, target, bytes) };
            }
            return Ok(());
        };
        let finish = if finish { NonZeroU32::new(self.peers.len() as u32) } else { None };
        // SAFETY: every operand and the target lie in the run's buffers with `count` elements from there on, as `locate` says;
        // the plan keeps them equal or apart (proved by the plan verifier).
        let fold = || unsafe { reducer.fold(sources, target, to, finish, count) };
        catch_unwind(AssertUnwindSafe(fold)).map_err(|panic| {
            let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
            Failure::Panicked { message: message.unwrap_or_else(|| "no message".to_owned()) }
        })
    }

    fn copy(&mut self, prepared: &Prepared, index: usize, from: &Span, into: &Span) {
        let Some(allowed) = self.allowed(prepared, index) else { return };
        let length = prepared.lengths[index];
        let size = self.size(into.repr);
        let mut done = self.steps[index].done;
        while done < allowed {
            let (source, left) = self.locate(from, done);
            let (target, right) = self.locate(into, done);
            let count = left.min(right).min(allowed - done);
            if source != target {
                // SAFETY: both lie in buffers valid for the run; `copy` allows them to overlap.
                unsafe { std::ptr::copy(source, target, count * size) };
            }
            done += count;
        }
        self.steps[index].done = done;
        self.steps[index].finished = done == length;
    }

    /// Where element `at` of a span lies, and how many elements lie together from there.
    fn locate(&self, span: &Span, at: usize) -> (*mut u8, usize) {
        let base = match span.buffer {
            Buffer::Input => self.input.cast_mut(),
            Buffer::Output => self.output,
            Buffer::Scratch(index) => self.workspace(self.prepared.scratch[index]),
        };
        let mut before = at;
        for range in &span.ranges {
            if before < range.len() {
                let offset = (range.start + before) * self.size(span.repr);
                // `wrapping_add` because an empty buffer's pointer may dangle; a pointer that is used is in bounds.
                return (base.wrapping_add(offset), range.len() - before);
            }
            before -= range.len();
        }
        (base, 0)
    }

    fn workspace(&self, offset: usize) -> *mut u8 {
        self.workspace.base().wrapping_add(offset)
    }

    /// Where `elements` received elements go; null if not in one piece or not yet.
    fn landing(&self, step: usize, leaf: usize, offset: usize, elements: usize) -> *mut u8 {
        let (span, landing) = match &self.prepared.plan.steps[step].action {
            Action::Recv { into, .. } => {
                let open =
                    self.allowed(&self.prepared, step).is_some_and(|allowed| offset + elements <= allowed);
                let waiting = self.early.iter().any(|early| early.place.step == step);
                if !open || waiting {
                    return std::ptr::null_mut();
                }
                (into, Landing::Result)
            }
            Action::RecvFold { into, .. } => (into, self.prepared.landings[step][leaf]),
            _ => return std::ptr::null_mut(),
        };
        match landing {
            Landing::Workspace(at) => {
                let repr = self.leaf_repr(step, leaf);
                self.workspace(at + offset * self.size(repr))
            }
            Landing::Result => match self.locate(span, offset) {
                (pointer, contiguous) if contiguous >= elements => pointer,
                _ => std::ptr::null_mut(),
            },
        }
    }

    fn leaf_repr(&self, step: usize, leaf: usize) -> Repr {
        let Action::RecvFold { leaves, .. } = &self.prepared.plan.steps[step].action else {
            return Repr::Raw;
        };
        let mut peers = leaves.iter().filter_map(|leaf| match leaf {
            Leaf::Peer { repr, .. } => Some(*repr),
            Leaf::Local(_) => None,
        });
        peers.nth(leaf).unwrap_or(Repr::Raw)
    }

    /// Copies stored messages to their places, in order, as far as their steps are allowed.
    fn place_early(&mut self) {
        let mut early = std::mem::take(&mut self.early);
        let mut blocked = Vec::new();
        early.retain(|Early { place, bytes }| {
            let key = (place.step, place.leaf);
            if blocked.contains(&key) || !self.place(place, bytes) {
                blocked.push(key);
                return true;
            }
            self.arrived(place);
            false
        });
        self.early = early;
    }

    /// Copies one stored message to its place; false if its step may not write yet.
    fn place(&self, place: &Place, bytes: &[u8]) -> bool {
        let action = &self.prepared.plan.steps[place.step].action;
        let size = match action {
            Action::Recv { into, .. } => self.size(into.repr),
            _ => self.size(self.leaf_repr(place.step, place.leaf)),
        };
        let (span, fixed) = match action {
            Action::Recv { into, .. } => {
                if self
                    .allowed(&self.prepared, place.step)
                    .is_none_or(|allowed| place.offset + place.elements > allowed)
                {
                    return false;
                }
                (into, None)
            }
            Action::RecvFold { into, .. } => match self.prepared.landings[place.step][place.leaf] {
                Landing::Workspace(at) => (into, Some(self.workspace(at + place.offset * size))),
                Landing::Result => (into, None),
            },
            _ => return true,
        };
        let mut copied = 0;
        while copied < place.elements {
            let (target, count) = match fixed {
                Some(target) => (target, place.elements),
                None => self.locate(span, place.offset + copied),
            };
            let count = count.min(place.elements - copied);
            let source = bytes[copied * size..].as_ptr();
            // SAFETY: `accept` checked that the elements fit the span, and the target lies in the run's buffers.
            unsafe { std::ptr::copy_nonoverlapping(source, target, count * size) };
            copied += count;
        }
        true
    }
}

impl StepState {
    fn sized(action: &Action) -> StepState {
        let peers = match action {
            Action::Recv { .. } => 1,
            Action::RecvFold { leaves, .. } => {
                leaves.iter().filter(|leaf| matches!(leaf, Leaf::Peer { .. })).count()
            }
            _ => 0,
        };
        StepState { arrived: vec![Arrived::default(); peers], ..StepState::default() }
    }
}

fn batch_possible(state: &StepState, length: usize) -> bool {
    state.issued < length || !state.announced
}

/// The end of the chunk that holds element `at`.
fn next_boundary(at: usize, chunk: usize) -> usize {
    (at - at % chunk).saturating_add(chunk)
}
