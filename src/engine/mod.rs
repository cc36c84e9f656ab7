//! The engine: plans in flight, their buffers, the links; waiting and failing.
//!
//! One lock guards all that the driver works on ([`core::Core`]); each link's sending half has a lock of its own, so that a
//! message that fits goes out without the engine's lock. See [`drive`] for who does the work.

mod arrive;
mod block;
pub(crate) mod call;
mod core;
mod drive;
mod fold;
mod health;
mod landing;
mod leave;
mod limbo;
mod lines;
mod message;
mod numbers;
mod prepare;
mod progress;
mod recorder;
mod reentry;
mod roster;
mod run;
mod shared;
#[cfg(test)]
mod tests;
mod trace;
mod unwind;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use parking_lot::{Mutex, MutexGuard};

pub use self::recorder::{FlightCall, FlightPeer, FlightRecord, FlightState};
use self::{
    core::{Core, Entry, Incoming, Operation, Stored, Table},
    health::Failure,
    limbo::Limbo,
    lines::Lines,
    message::{RecvOperation, RecvState, SendOperation, SendState, sign},
    numbers::Numbers,
    recorder::Recorder,
    run::{Run, Start},
    shared::EAGER_LIMIT,
    unwind::Unwind,
};
pub(crate) use self::{
    core::{OperationId, Timeouts},
    drive::Policy,
    health::Health,
    prepare::Prepared,
    reentry::refuse_inside,
    shared::Shared,
    trace::Trace,
};
#[cfg(test)]
pub(crate) use self::{reentry::inside, shared::BUDGET};
use crate::{
    bootstrap::control::{Control, Trigger},
    error::{Error, Result},
    link::{
        Header, LinkKind, MessageKind, Receiver, Sender, Signature,
        verbs::{self, Registry},
    },
    os::Waker,
    reduce::Reducer,
};

/// Moves the bytes of all communicators of one group.
pub(crate) struct Engine {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    epoch: u32,
    senders: Arc<[Option<Sender>]>,
    core: Mutex<Core>,
    registry: Arc<Registry>,
    health: Arc<Health>,
    waker: Arc<Waker>,
    control: Control,
    policy: Policy,
    /// Communicators whose last handle was dropped where the lock could not be taken.
    dropped: Mutex<Vec<u32>>,
    /// A trace is written, so that every message is to go through the table of operations.
    traced: AtomicBool,
}

/// What an engine is made of.
pub(crate) struct Parts {
    pub(crate) rank: usize,
    pub(crate) epoch: u32,
    /// By world rank, none for the own.
    pub(crate) senders: Arc<[Option<Sender>]>,
    pub(crate) receivers: Vec<Option<Receiver>>,
    /// What memory the devices of the links may use.
    pub(crate) registry: Arc<Registry>,
    pub(crate) health: Arc<Health>,
    pub(crate) waker: Arc<Waker>,
    pub(crate) control: Control,
    pub(crate) policy: Policy,
}

/// A collective call, ready to be submitted.
pub(crate) struct Submission {
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) signature: Signature,
    pub(crate) operation: &'static str,
    pub(crate) raw_size: usize,
    pub(crate) acc_size: usize,
    pub(crate) reducer: Option<Reducer<'static>>,
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    pub(crate) timeouts: Timeouts,
}

/// A point-to-point call: the peer's world rank, and memory.
pub(crate) struct Message {
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) pointer: *mut u8,
    pub(crate) length: usize,
    pub(crate) operation: &'static str,
    pub(crate) timeouts: Timeouts,
}

impl Engine {
    pub(crate) fn new(parts: Parts) -> Engine {
        let size = parts.senders.len();
        let core = Core {
            receivers: parts.receivers,
            incoming: (0..size).map(|_| Incoming::Nothing).collect(),
            closed: vec![None; size],
            gone: vec![None; size],
            communicators: Default::default(),
            limbo: Limbo::new(size),
            numbers: Numbers::new(size, parts.rank),
            table: Table::default(),
            recorder: Recorder::new(),
            pool: Default::default(),
            streaming: Vec::new(),
            driver: None,
            left: false,
            waiters: Vec::new(),
            receives: vec![false; size],
            sends: vec![false; size],
            lined_up: false,
            clocks: Default::default(),
            reports: Default::default(),
            next_tick: Instant::now(),
        };
        Engine {
            rank: parts.rank,
            size,
            epoch: parts.epoch,
            senders: parts.senders,
            core: Mutex::new(core),
            registry: parts.registry,
            health: parts.health,
            waker: parts.waker,
            control: parts.control,
            policy: parts.policy,
            dropped: Mutex::new(Vec::new()),
            traced: AtomicBool::new(false),
        }
    }

    /// The kind of link to a peer, none to oneself.
    pub(crate) fn link(&self, peer: usize) -> Option<LinkKind> {
        self.senders[peer].as_ref().map(Sender::kind)
    }

    /// What memory the devices of the links may use.
    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Bytes that links have sent from where they were, and received where they were wanted.
    pub(crate) fn uncopied(&self) -> (u64, u64) {
        let cables = self.senders.iter().flatten().filter_map(Sender::cables);
        cables.map(verbs::Cables::uncopied).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// The last calls of this rank; none inside a user-defined operation.
    pub(crate) fn flight_record(&self) -> FlightRecord {
        if reentry::is_inside() {
            return FlightRecord { rank: self.rank, calls: Vec::new() };
        }
        self.core.lock().flight_record(self.rank, &self.senders)
    }

    /// Writes all calls from now on to a trace.
    pub(crate) fn trace(&self, trace: Trace) {
        self.core.lock().recorder.trace = Some(trace);
        self.traced.store(true, Ordering::Relaxed);
    }

    /// Bytes that a link has carried to a peer.
    #[cfg(test)]
    pub(crate) fn sent_to(&self, peer: usize) -> u64 {
        self.senders[peer].as_ref().map_or(0, Sender::moved)
    }

    /// Whether something for a peer is in line.
    #[cfg(test)]
    pub(crate) fn is_pushing(&self, peer: usize) -> bool {
        self.senders[peer].as_ref().is_some_and(Sender::pending)
    }

    /// Runs a collective to its end.
    ///
    /// # Safety
    /// `input` and `output` are valid for the plan's spans during the call, nobody else writes what the plan reads or touches
    /// what it writes, and the reducer's user function lives as long.
    pub(crate) unsafe fn collective(&self, comm: &Arc<Shared>, submission: Submission) -> Result<()> {
        let operation = submission.operation;
        let _unwind = self.enter(comm, operation)?;
        let mut core = self.core.lock();
        // SAFETY: passed on; the operation is removed below before the call returns.
        let id = unsafe { self.submit_locked(&mut core, comm, submission) }?;
        self.finish_locked(core, id, operation).map(|_| ())
    }

    /// Starts a collective; [`Engine::finish`] ends it.
    ///
    /// # Safety
    /// As [`Engine::collective`], until [`Engine::finish`] has returned.
    pub(crate) unsafe fn submit(&self, comm: &Arc<Shared>, submission: Submission) -> Result<OperationId> {
        let _unwind = self.enter(comm, submission.operation)?;
        let mut core = self.core.lock();
        // SAFETY: passed on.
        unsafe { self.submit_locked(&mut core, comm, submission) }
    }

    /// Sends a message, going past the engine's lock when it can.
    ///
    /// # Safety
    /// `message.pointer` is valid for reads of `message.length` bytes during the call, and nobody writes there.
    pub(crate) unsafe fn send(&self, comm: &Arc<Shared>, message: Message) -> Result<()> {
        let operation = message.operation;
        let _unwind = self.enter(comm, operation)?;
        if let Some(error) = self.health.error(operation) {
            return Err(error);
        }
        let peer = message.peer;
        let direct = peer != self.rank
            && message.length <= EAGER_LIMIT
            && !comm.has_queued(peer)
            && !self.traced.load(Ordering::Relaxed);
        if !direct || !comm.take_budget(peer, message.length) {
            // SAFETY: passed on; the operation is removed before the call returns.
            let id = unsafe { self.submit_send(comm, message) }?;
            return self.finish(id, operation).map(|_| ());
        }
        let signature = sign(message.tag, message.length as u64);
        let mut header =
            message::header(comm, self.epoch, peer, MessageKind::Eager, comm.number(peer), signature);
        header.length = message.length as u64;
        let lines = self.lines();
        let sender = lines.sender(peer).map_err(|failure| failure.error(operation, self.rank))?;
        let before = sender.sent();
        // SAFETY: the caller keeps the payload during this call, which returns once the ticket is sent or the link closed.
        let ticket = match unsafe { sender.send(&header, message.pointer) } {
            Ok(ticket) => ticket,
            Err(error) => {
                let mut core = self.core.lock();
                let result = Err(self.lines().failure(peer, error));
                return self.check(&mut core, result, operation);
            }
        };
        if sender.sent() >= ticket {
            // What others had in line went with it, and the driver may sleep until the link takes that.
            if ticket.0 > before.0 + 1 {
                self.waker.wake();
            }
            return Ok(());
        }
        let mut core = self.core.lock();
        let Message { tag, pointer, length, timeouts, .. } = message;
        let send = SendOperation {
            comm: comm.id,
            peer,
            tag,
            pointer: pointer.cast_const(),
            length,
            state: SendState::Flushing(ticket),
            moved: false,
        };
        let id = core.enter(Entry { operation: Operation::Send(send), timeouts });
        core.streaming.push(id);
        self.stir(&core);
        self.finish_locked(core, id, operation).map(|_| ())
    }

    /// Starts a send; [`Engine::finish`] ends it.
    ///
    /// # Safety
    /// As [`Engine::send`], until [`Engine::finish`] has returned.
    pub(crate) unsafe fn submit_send(&self, comm: &Arc<Shared>, message: Message) -> Result<OperationId> {
        let Message { peer, tag, pointer, length, operation, timeouts } = message;
        let _unwind = self.enter(comm, operation)?;
        let mut core = self.core.lock();
        self.refuse_failed(&mut core, operation)?;
        let state = if peer == self.rank { SendState::Done } else { SendState::Queued };
        let send = SendOperation {
            comm: comm.id,
            peer,
            tag,
            pointer: pointer.cast_const(),
            length,
            state,
            moved: false,
        };
        let id = core.enter(Entry { operation: Operation::Send(send), timeouts });
        let result = if peer == self.rank {
            // SAFETY: the caller vouches for the payload; an empty one may have any pointer, which is not used.
            let payload = unsafe { copy_of(pointer, length) };
            core.offer(self.to_self(comm, tag, payload), &self.lines())
        } else {
            comm.queue(peer);
            if let Some(group) = core.communicators.get_mut(&comm.id) {
                group.outbox[peer].push_back(id);
            }
            core.pump_outbox(comm.id, peer, &self.lines())
                .and_then(|()| core.pump_streams(&self.lines()).map(|_| ()))
        };
        self.check_submission(core, result, id, operation)
    }

    /// Starts a receive; [`Engine::finish`] ends it and tells the message's length.
    ///
    /// # Safety
    /// `message.pointer` is valid for writes of `message.length` bytes until [`Engine::finish`] has returned, and nobody else
    /// touches that memory.
    pub(crate) unsafe fn submit_recv(&self, comm: &Arc<Shared>, message: Message) -> Result<OperationId> {
        let Message { peer, tag, pointer, length, operation, timeouts } = message;
        let _unwind = self.enter(comm, operation)?;
        let mut core = self.core.lock();
        self.refuse_failed(&mut core, operation)?;
        let recv = RecvOperation {
            comm: comm.id,
            peer,
            tag,
            pointer,
            room: length,
            state: RecvState::Posted,
            moved: false,
        };
        let id = core.enter(Entry { operation: Operation::Recv(recv), timeouts });
        let result = core.post_recv(id, &self.lines());
        self.check_submission(core, result, id, operation)
    }

    /// Waits for an operation and removes it; for a receive, the bytes that the message had.
    pub(crate) fn finish(&self, id: OperationId, operation: &'static str) -> Result<u64> {
        let _unwind = self.unwind(operation);
        self.finish_locked(self.core.lock(), id, operation)
    }

    /// True if an operation would be finished without waiting; moves things on if nobody else does.
    pub(crate) fn test(&self, id: OperationId, operation: &'static str) -> Result<bool> {
        let _unwind = self.unwind(operation);
        let mut core = self.core.lock();
        self.refuse_failed(&mut core, operation)?;
        if core.driver.is_none() && !core.table.finished(id) {
            let result = self.turn(&mut core, 0);
            if matches!(result, Ok(true)) {
                self.unpark(&core);
            }
            self.check(&mut core, result.map(|_| ()), operation)?;
        }
        Ok(core.table.finished(id))
    }

    /// Ends every call on every rank.
    pub(crate) fn abort(&self) {
        if reentry::is_inside() {
            return self.abort_handle().pull();
        }
        self.health.fail(Failure::Aborted);
        self.collapse(&mut self.core.lock(), "abort");
    }

    /// Ends every call on every rank, unless the group has failed already.
    pub(crate) fn give_up(&self, operation: &'static str) {
        self.health.fail(Failure::Aborted);
        self.collapse(&mut self.core.lock(), operation);
    }

    /// How this rank talks to the others beside the links.
    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    /// What [`Engine::abort`] does, for where no lock may be taken.
    pub(crate) fn abort_handle(&self) -> Trigger {
        self.control.trigger(self.rank)
    }

    /// Begins a call, before the lock is taken; see [`Engine::unwind`].
    fn enter(&self, comm: &Shared, operation: &'static str) -> Result<Unwind<'_>> {
        refuse_inside(operation, comm.rank)?;
        Ok(self.unwind(operation))
    }

    unsafe fn submit_locked(
        &self,
        core: &mut Core,
        comm: &Arc<Shared>,
        submission: Submission,
    ) -> Result<OperationId> {
        let Submission {
            prepared,
            mut signature,
            operation,
            raw_size,
            acc_size,
            reducer,
            input,
            output,
            timeouts,
        } = submission;
        self.refuse_failed(core, operation)?;
        let workspace = core.pool.take(prepared.workspace);
        let Some(group) = core.communicators.get_mut(&comm.id) else {
            // A communicator is registered as long as a handle of it exists, and the caller has one.
            unreachable!("communicator {} is not registered", comm.id);
        };
        let begun = group.begin(&mut signature);
        let shared = Arc::clone(comm);
        let start = Start {
            prepared,
            shared,
            begun,
            signature,
            operation,
            raw_size,
            acc_size,
            reducer,
            input,
            output,
            workspace,
        };
        // SAFETY: the caller keeps the buffers until the operation is finished, and `finish_locked` retires the run.
        let run = unsafe { Run::start(start) };
        let id = core.enter(Entry { operation: Operation::Collective(run), timeouts });
        let result = self.begin(core, comm, begun.sequence, id);
        match result {
            Ok(()) => {
                self.stir(core);
                Ok(id)
            }
            Err(failure) => {
                self.fail(core, failure, operation);
                core.exit(id);
                Err(self.first_cause(operation))
            }
        }
    }

    fn begin(&self, core: &mut Core, comm: &Shared, sequence: u64, id: OperationId) -> Result<(), Failure> {
        let lines = self.lines();
        if let Some(group) = core.communicators.get_mut(&comm.id) {
            group.active.push((sequence, id));
            if let Some(run) = core.table.run(id) {
                let entered = |&member: &usize| group.entered[member] > sequence;
                (0..comm.members.len())
                    .filter(|&from| entered(&comm.members[from]))
                    .for_each(|from| run.granted(from));
            }
            if !group.early.is_empty() {
                let early = std::mem::take(&mut group.early);
                let (now, later): (Vec<Stored>, Vec<Stored>) =
                    early.into_iter().partition(|stored| stored.header.sequence == sequence);
                group.early = later.into();
                now.into_iter().try_for_each(|stored| core.replay(id, stored, &lines))?;
            }
        }
        core.check_landing(comm.id, sequence)?;
        core.advance(id, &lines)?;
        let Core { table, communicators, .. } = core;
        match (table.run(id), communicators.get(&comm.id)) {
            (Some(run), Some(_)) if run.finished() => run.tell(&lines),
            (Some(run), Some(group)) => {
                run.tell(&lines)?;
                run.grant(&lines, |peer| group.is_crowded(peer))
            }
            _ => Ok(()),
        }
    }

    fn finish_locked(
        &self,
        core: MutexGuard<'_, Core>,
        id: OperationId,
        operation: &'static str,
    ) -> Result<u64> {
        match self.wait(core, id, operation) {
            Ok(mut core) => match core.exit(id) {
                Some(Operation::Collective(run)) => {
                    let workspace = run.retire();
                    core.pool.give(workspace);
                    Ok(0)
                }
                Some(Operation::Recv(RecvOperation { state: RecvState::Done(bytes), .. })) => Ok(bytes),
                _ => Ok(0),
            },
            Err(error) => {
                self.core.lock().exit(id);
                Err(error)
            }
        }
    }

    fn check_submission(
        &self,
        mut core: MutexGuard<'_, Core>,
        result: Result<(), Failure>,
        id: OperationId,
        operation: &'static str,
    ) -> Result<OperationId> {
        match self.check(&mut core, result, operation) {
            Ok(()) => {
                self.stir(&core);
                Ok(id)
            }
            Err(error) => {
                core.exit(id);
                Err(error)
            }
        }
    }

    fn check(&self, core: &mut Core, result: Result<(), Failure>, operation: &'static str) -> Result<()> {
        result.map_err(|failure| {
            self.fail(core, failure, operation);
            self.first_cause(operation)
        })
    }

    fn refuse_failed(&self, core: &mut Core, operation: &'static str) -> Result<()> {
        if !self.health.has_failed() {
            return Ok(());
        }
        self.collapse(core, operation);
        Err(self.first_cause(operation))
    }

    fn first_cause(&self, operation: &'static str) -> Error {
        // Only asked after a failure was recorded, and none is ever taken back.
        self.health.error(operation).unwrap_or(Error::Aborted { operation, rank: self.rank, by: self.rank })
    }

    fn to_self(&self, comm: &Shared, tag: u64, payload: Vec<u8>) -> Stored {
        let header = Header {
            kind: MessageKind::Eager,
            epoch: self.epoch,
            comm: comm.id,
            credit: 0,
            sequence: 0,
            stream: 0,
            flags: 0,
            signature: sign(tag, payload.len() as u64),
            length: payload.len() as u64,
        };
        Stored { peer: self.rank, header, payload }
    }

    fn lines(&self) -> Lines<'_> {
        Lines { senders: &self.senders, epoch: self.epoch, registry: &self.registry, health: &self.health }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Whoever wants the error calls `close`.
        let _ = self.leave();
    }
}

/// # Safety
/// `pointer` is valid for reads of `length` bytes unless that is zero.
unsafe fn copy_of(pointer: *const u8, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    if length > 0 {
        // SAFETY: the caller vouches for the source; the target was just made that long.
        unsafe { std::ptr::copy_nonoverlapping(pointer, bytes.as_mut_ptr(), length) };
    }
    bytes
}
