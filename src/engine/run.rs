//! One plan in flight: how far each step is, and the moves that take it further.
//!
//! A run touches the caller's buffers and its own workspace through raw pointers. Whoever starts a run keeps those buffers
//! alive and alone until the run has been taken out of the engine; see [`Run::start`].

use std::{collections::VecDeque, sync::Arc};

use super::{
    block::Block,
    core::Begun,
    health::Failure,
    landing::Early,
    lines::Lines,
    prepare::{GRANT_THRESHOLD, Prepared},
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
    /// Nothing is sent before all others have entered so many calls.
    pub(crate) heard: u64,
    /// Of those who have not, the first, by its world rank.
    pub(crate) unheard: Option<usize>,
    tell: Option<usize>,
    pub(crate) signature: Signature,
    /// The call's name, for errors.
    pub(crate) operation: &'static str,
    /// Something happened since the deadline was looked at last.
    pub(crate) moved: bool,
    /// A step waits for a link to take what is in line.
    pub(crate) lined_up: bool,
    /// A step waits for budget to send ahead.
    pub(crate) short: bool,
    pub(super) raw_size: usize,
    pub(super) acc_size: usize,
    pub(super) reducer: Option<Reducer<'static>>,
    input: *const u8,
    output: *mut u8,
    workspace: Block,
    pub(super) steps: Vec<StepState>,
    pub(super) peers: Vec<PeerState>,
    /// Steps before this one are finished.
    pub(super) first: usize,
    /// Messages that came before their step was allowed to write them.
    pub(super) early: Vec<Early>,
    pub(super) sources: Vec<Source>,
    batch: Vec<(Header, *const u8)>,
}

// SAFETY: a run's pointers are used by one thread at a time, under the engine's lock, and the memory they point to is kept
// alive by the thread that waits for the run (contract of `Run::start`).
unsafe impl Send for Run {}

#[derive(Default)]
pub(super) struct StepState {
    pub(super) done: usize,
    pub(super) finished: bool,
    /// Sends: elements handed to the link.
    pub(super) issued: usize,
    /// Sends: that an empty stream's message was handed over.
    announced: bool,
    tickets: VecDeque<(Ticket, usize)>,
    /// Receives: what has come, by peer leaf.
    pub(super) arrived: Vec<Arrived>,
}

#[derive(Default, Clone, Copy)]
pub(super) struct Arrived {
    /// Elements whose message has begun.
    pub(super) accepted: usize,
    /// A message has begun.
    pub(super) begun: bool,
    /// Elements that are there.
    pub(super) elements: usize,
    pub(super) heard: bool,
}

#[derive(Default, Clone, Copy)]
pub(super) struct PeerState {
    /// The peer has entered the operation, so everything of it may flow.
    pub(super) granted: bool,
    /// We have sent a message of this operation, which tells the peer the same.
    told: bool,
    pub(super) bytes: u64,
}

/// What a run needs to begin.
pub(crate) struct Start {
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) begun: Begun,
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
        self.short = false;
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
            if wants {
                self.tell_entered(lines, from)?;
            }
        }
        Ok(())
    }

    /// Tells the root of a broadcast, which would not hear of us otherwise, that we have entered.
    pub(crate) fn tell(&mut self, lines: &Lines<'_>) -> Result<(), Failure> {
        self.tell.map_or(Ok(()), |root| self.tell_entered(lines, root))
    }

    fn tell_entered(&mut self, lines: &Lines<'_>, to: usize) -> Result<(), Failure> {
        if self.peers[to].told {
            return Ok(());
        }
        self.peers[to].told = true;
        let peer = self.shared.members[to];
        let header = Header { flags: 0, ..self.header(lines, peer, MessageKind::Grant, 0, 0) };
        lines.post(peer, &header).map(|_| ())
    }

    /// The peer (rank in the communicator) has entered the operation.
    pub(crate) fn granted(&mut self, from: usize) {
        self.peers[from].granted = true;
        self.moved = true;
    }

    fn new(start: Start) -> Run {
        let steps = start.prepared.plan.steps.iter().map(|step| StepState::sized(&step.action)).collect();
        Run {
            peers: vec![PeerState::default(); start.shared.members.len()],
            steps,
            shared: start.shared,
            prepared: start.prepared,
            sequence: start.begun.sequence,
            heard: start.begun.heard,
            unheard: None,
            tell: start.begun.tell,
            signature: start.signature,
            operation: start.operation,
            moved: false,
            lined_up: false,
            short: false,
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
        self.sequence = start.begun.sequence;
        self.heard = start.begun.heard;
        self.unheard = None;
        self.tell = start.begun.tell;
        self.signature = start.signature;
        self.operation = start.operation;
        self.moved = false;
        self.lined_up = false;
        self.short = false;
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

    pub(super) fn size(&self, repr: Repr) -> usize {
        match repr {
            Repr::Raw => self.raw_size,
            Repr::Acc => self.acc_size,
        }
    }

    pub(super) fn allowed(&self, prepared: &Prepared, index: usize) -> Option<usize> {
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
        let chunk = self.chunk(prepared, from, issued, length, allowed, |start, bytes, usual| {
            lines.piece(peer, start, bytes, usual)
        });
        while (issued < length || !self.steps[index].announced) && waiting < WINDOW {
            let (pointer, contiguous) = self.locate(from, issued);
            let end = next_boundary(issued, chunk).min(length).min(issued + contiguous);
            let bytes = (end - issued) * size;
            if end > allowed {
                break;
            }
            let granted = self.peers[to].granted;
            if !granted && !self.shared.take_budget(peer, bytes) {
                self.short = true;
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

    /// Elements of a message of a step that sends. What nobody folds or passes on may as well come in long pieces.
    fn chunk(
        &self,
        prepared: &Prepared,
        from: &Span,
        issued: usize,
        length: usize,
        allowed: usize,
        piece: impl Fn(*const u8, usize, usize) -> usize,
    ) -> usize {
        let is_final = self.reducer.is_none() && prepared.plan.passes_nothing_on();
        if !is_final || allowed < length || length - issued <= prepared.chunk {
            return prepared.chunk;
        }
        let size = self.size(from.repr).max(1);
        let (start, contiguous) = self.locate(from, issued);
        piece(start.cast_const(), contiguous * size, prepared.chunk * size) / size
    }

    fn receive(&mut self, prepared: &Prepared, index: usize) {
        let Some(_) = self.allowed(prepared, index) else { return };
        let state = &mut self.steps[index];
        state.done = state.arrived[0].elements;
        state.finished = state.arrived[0].heard && state.done == prepared.lengths[index];
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
    pub(super) fn locate(&self, span: &Span, at: usize) -> (*mut u8, usize) {
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

    pub(super) fn workspace(&self, offset: usize) -> *mut u8 {
        self.workspace.base().wrapping_add(offset)
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
pub(super) fn next_boundary(at: usize, chunk: usize) -> usize {
    (at - at % chunk).saturating_add(chunk)
}
