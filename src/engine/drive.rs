//! Waiting: one thread drives all links for everybody, the others park.
//!
//! A thread that waits takes the driver's role if nobody has it. The driver polls, delivers to whatever operation a message
//! belongs to, and leaves the engine's lock to anybody who wants it between two turns. When its own wait is over it wakes
//! another waiter, who takes the role. An idle driver spins, then yields its core, then sleeps in `poll` until a socket or the
//! waker says that there is something to do.
//!
//! Other threads change what there is to do: they start operations, and may finish some of others, as a message to oneself
//! does. Whoever does that under the lock [tells](Engine::stir) the threads that it concerns. A message that goes past the lock
//! may take with it what others had in line; then its sender rings the waker.

use std::{
    os::fd::RawFd,
    thread,
    time::{Duration, Instant},
};

use parking_lot::MutexGuard;

use super::{
    Engine,
    core::{Clock, Core, Incoming, Operation, OperationId, Waiter},
    health::Failure,
    message::{RecvState, SendState},
};
use crate::{
    bootstrap::{alarm::NEWS, watcher::Status},
    error::Error,
    link::{Arrival, LinkKind, Receiver, Sender},
    os::{self, PollFd},
};

/// How a driver without work waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Turns without anything to do before the core is yielded between turns.
    pub(crate) spins: u32,
    /// Turns after which the driver sleeps.
    pub(crate) turns: u32,
    /// How often deadlines are looked at, and the longest sleep.
    pub(crate) tick: Duration,
}

impl Policy {
    /// For a machine on which `ranks` processes or threads share `cores` cores: whoever spins there keeps another from working.
    pub(crate) fn new(ranks: usize, cores: usize) -> Policy {
        let (spins, turns) = if ranks > cores { (0, 2_000) } else { (2_000, 20_000) };
        Policy { spins, turns, tick: Duration::from_millis(20) }
    }
}

/// The longest sleep while something may come over a link that wakes nobody.
const NAP: Duration = Duration::from_micros(50);
/// How long an operation stands still before the others are told where it is.
const REPORT_AFTER: Duration = Duration::from_millis(100);
/// How often they are told again.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// How long a data connection may be closed before its control connection has to say why.
const VERDICT: Duration = Duration::from_millis(500);
/// Every how many turns the peers are polled from whom nothing is expected.
const OTHERS: u32 = 32;

impl Engine {
    /// Waits until the operation `target` is finished, driving the links if nobody else does. On an error nothing that was submitted touches
    /// its memory any more.
    pub(crate) fn wait<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        target: OperationId,
        operation: &'static str,
    ) -> Result<MutexGuard<'a, Core>, Error> {
        /// How many turns with something to do go by before the deadlines of others are looked at all the same.
        const BUSY: u32 = 1024;
        let mut driving = false;
        let mut idle = 0;
        let mut busy = 0;
        let result = loop {
            if core.table.finished(target) {
                break Ok(());
            }
            if let Some(error) = self.health.error(operation) {
                self.collapse(&mut core, operation);
                // With what was in flight, which is on record now.
                break Err(self.health.error(operation).unwrap_or(error));
            }
            if !driving && core.driver.is_none() {
                core.driver = Some(target);
                driving = true;
            }
            if !driving {
                self.park(&mut core, target);
                continue;
            }
            match self.turn(&mut core, idle) {
                Ok(true) => {
                    idle = 0;
                    busy += 1;
                    self.unpark(&core);
                    if busy == BUSY {
                        busy = 0;
                        if let Err(failure) = self.tick(&mut core) {
                            self.fail(&mut core, failure, operation);
                        }
                    }
                }
                Ok(false) => {
                    idle += 1;
                    if let Err(failure) = self.rest(&mut core, idle) {
                        self.fail(&mut core, failure, operation);
                    }
                }
                Err(failure) => self.fail(&mut core, failure, operation),
            }
            MutexGuard::bump(&mut core);
        };
        if driving {
            core.driver = None;
        }
        // Not one whose own wait is over: it would return without driving, and the others would sleep on. Also if we did not
        // drive ourselves, because the driver may have handed over to us just before our wait was over.
        if core.driver.is_none()
            && let Some(next) = core.waiters.iter().find(|waiter| !core.table.finished(waiter.target))
        {
            next.thread.unpark();
        }
        result.map(|()| core)
    }

    /// Ends the group: keeps the first cause, tells the others, and lets go of all memory.
    pub(crate) fn fail(&self, core: &mut Core, failure: Failure, operation: &'static str) {
        if let Failure::PeerLost { peer, .. } = failure
            && !self.health.departed(peer)
        {
            // A broken data connection is often the echo of a failure elsewhere, whose cause is on its way.
            self.health.wait_failure(Instant::now() + VERDICT);
        }
        let failure = match failure {
            Failure::Diverged { peer, comm, .. } => self.find_first(core, peer, comm).unwrap_or(failure),
            other => other,
        };
        // Whoever sees the failure is to see this too.
        self.health.note(|| core.flight_record(self.rank, &self.senders).summary());
        self.health.fail(failure);
        self.collapse(core, operation);
    }

    /// A peer's earlier calls were others than ours: which was the first? Both sides tell the other their last calls, and
    /// whoever sees the difference first says so to everybody. None if nobody does in time or the failure is known already.
    fn find_first(&self, core: &mut Core, peer: usize, comm: u32) -> Option<Failure> {
        let until = Instant::now() + VERDICT;
        for &(sequence, signature) in core.communicators.get(&comm)?.latest() {
            self.control.status(peer, Status { comm, sequence, signature });
        }
        while self.health.wait_news(until) {
            match self.read_news(core) {
                Ok(()) | Err(Failure::Diverged { .. }) => {}
                Err(first) => return Some(first),
            }
        }
        None
    }

    /// After a failure: no link and no operation touches anybody's memory from here on.
    pub(crate) fn collapse(&self, core: &mut Core, operation: &'static str) {
        self.health.note(|| core.flight_record(self.rank, &self.senders).summary());
        if let Some(trace) = &mut core.recorder.trace {
            trace.flush();
        }
        for sender in self.senders.iter().flatten() {
            sender.close();
        }
        for (peer, receiver) in core.receivers.iter_mut().enumerate() {
            if let Some(receiver) = receiver {
                receiver.cancel();
            }
            core.incoming[peer] = Incoming::Nothing;
        }
        if let Some(failure) = self.health.announce() {
            self.tell(&failure, operation);
        }
        for waiter in &core.waiters {
            waiter.thread.unpark();
        }
    }

    /// Tells the other ranks of a failure, unless they have been told.
    pub(crate) fn tell(&self, failure: &Failure, operation: &'static str) {
        let cause = failure.cause(self.rank, operation);
        for peer in (0..self.size).filter(|&peer| peer != self.rank) {
            self.control.failed(peer, &cause);
        }
    }

    /// Polls everything once; true if something moved.
    pub(crate) fn turn(&self, core: &mut Core, idle: u32) -> Result<bool, Failure> {
        if self.health.flag() & NEWS != 0 {
            self.read_news(core)?;
        }
        self.find_needs(core);
        let mut moved = false;
        for step in 1..self.size {
            let peer = (self.rank + step) % self.size;
            if core.receives[peer] || idle % OTHERS == OTHERS - 1 {
                moved |= self.poll_peer(core, peer)?;
            }
        }
        for (peer, sender) in self.senders.iter().enumerate() {
            if let Some(sender) = sender
                && sender.pending()
            {
                moved |= sender.flush().map_err(|error| self.lines().failure(peer, error))?;
            }
        }
        // Whoever drives next does the rest.
        if moved && core.driver.is_some_and(|target| core.table.finished(target)) {
            return Ok(true);
        }
        // Whoever sent last may have pushed what others had in line.
        if core.lined_up || core.table.changed {
            let waiting: Vec<OperationId> = lined_up(core).collect();
            for id in waiting {
                core.advance(id, &self.lines())?;
                moved |= core.table.finished(id);
            }
        }
        if !core.streaming.is_empty() {
            moved |= core.pump_streams(&self.lines())?;
        }
        Ok(moved)
    }

    fn poll_peer(&self, core: &mut Core, peer: usize) -> Result<bool, Failure> {
        /// After so many messages of one peer it is the others' turn.
        const FAIR: usize = 64;
        let lines = self.lines();
        let mut moved = false;
        for _ in 0..FAIR {
            let Some(receiver) = &mut core.receivers[peer] else { break };
            if core.closed[peer].is_some() {
                break;
            }
            // Nothing is under way any more then, also if nobody has told the end of the stream, which over cables only the
            // peer itself could do.
            let gone = core.gone[peer].filter(|at| receiver.is_silent() && at.elapsed() > VERDICT);
            let before = gone.map(|_| receiver.moved());
            match receiver.poll() {
                Ok(Arrival::Nothing) => {
                    // Bytes of a payload may have come all the same.
                    if before == Some(receiver.moved()) {
                        core.closed[peer] = Some(Instant::now());
                    }
                    break;
                }
                Ok(Arrival::Header(header)) => {
                    core.header(peer, header, &lines)?;
                    if header.length > 0 {
                        self.land(core, peer, header.length);
                    }
                }
                Ok(Arrival::Payload) => core.payload(peer, &lines)?,
                Ok(Arrival::Closed) => core.closed[peer] = Some(Instant::now()),
                Err(error) => return Err(lines.failure(peer, error)),
            }
            moved = true;
            // Who waits for it is not to wait for another look at the link.
            if core.driver.is_some_and(|target| core.table.finished(target)) {
                break;
            }
        }
        self.check_closed(core, peer)?;
        Ok(moved)
    }

    /// Tells the receiver where the payload of the header just handled goes.
    fn land(&self, core: &mut Core, peer: usize, length: u64) {
        let Core { incoming, table, receivers, .. } = core;
        let Some(receiver) = &mut receivers[peer] else { return };
        let whole = usize::try_from(length).unwrap_or(usize::MAX);
        let (to, keep) = match &mut incoming[peer] {
            Incoming::Place(_, place) => (place.pointer, whole),
            Incoming::Kept(_, _, bytes) | Incoming::Store(_, bytes) => (bytes.as_mut_ptr(), bytes.len()),
            Incoming::Posted(id, _) => match table.recv(*id) {
                Some(recv) => recv.window(0, length),
                None => (std::ptr::null_mut(), 0),
            },
            Incoming::Data(id, _) => match table.recv(*id) {
                Some(recv) => match recv.state {
                    RecvState::Receiving { received, .. } => recv.window(received, length),
                    _ => (std::ptr::null_mut(), 0),
                },
                None => (std::ptr::null_mut(), 0),
            },
            Incoming::Nothing | Incoming::Discard => (std::ptr::null_mut(), 0),
        };
        // SAFETY: the memory belongs to an operation in flight, whose owner waits until it is removed from the engine, which
        // happens after the payload has landed or the receiver was cancelled; or to the engine itself.
        unsafe { receiver.land(to, keep) };
    }

    /// An operation that needs a peer whose stream has ended cannot be finished.
    fn check_closed(&self, core: &mut Core, peer: usize) -> Result<(), Failure> {
        let Some(at) = core.closed[peer] else { return Ok(()) };
        // What came before the end may have been all that was needed.
        self.find_needs(core);
        if !core.receives[peer] {
            return Ok(());
        }
        let reason = if self.health.departed(peer) {
            "it has left the group".to_owned()
        } else if at.elapsed() > VERDICT {
            "its connection was closed".to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::PeerLost { peer, reason, source: None })
    }

    /// Which peers the operations in flight wait for, and whether links are to take something first.
    fn find_needs(&self, core: &mut Core) {
        if !std::mem::take(&mut core.table.changed) {
            return;
        }
        let waits = lined_up(core).next().is_some();
        core.lined_up = waits;
        let Core { receives, sends, table, .. } = core;
        receives.fill(false);
        sends.fill(false);
        for id in table.ids() {
            match table.get(id) {
                Some(Operation::Collective(run)) => run.needs(receives, sends),
                Some(Operation::Send(send)) if !send.finished() => {
                    // A grant or credit may come.
                    receives[send.peer] |= matches!(send.state, SendState::Queued | SendState::Announced);
                    sends[send.peer] = true;
                }
                Some(Operation::Recv(recv)) if !recv.finished() => receives[recv.peer] = true,
                _ => {}
            }
        }
        for (peer, &needed) in sends.iter().enumerate() {
            receives[peer] |= needed;
        }
        receives[self.rank] = false;
    }

    /// What a driver does when nothing moved.
    fn rest(&self, core: &mut MutexGuard<'_, Core>, idle: u32) -> Result<(), Failure> {
        if idle < self.policy.spins {
            // A turn is long enough to need no pause between it and the next.
            if idle.is_multiple_of(256) {
                self.tick(core)?;
            }
        } else if idle < self.policy.turns {
            MutexGuard::unlocked(core, thread::yield_now);
            if idle.is_multiple_of(64) {
                self.tick(core)?;
            }
        } else {
            self.tick(core)?;
            self.sleep(core)?;
        }
        Ok(())
    }

    /// Sleeps until a socket or the waker has something.
    fn sleep(&self, core: &mut MutexGuard<'_, Core>) -> Result<(), Failure> {
        self.waker.prepare();
        // Whoever does something after this point wakes us; what was done before is seen now.
        let moved = self.turn(core, OTHERS - 1);
        if !matches!(moved, Ok(false)) || self.health.flag() != 0 {
            self.waker.finish();
            if matches!(moved, Ok(true)) {
                self.unpark(core);
            }
            return moved.map(|_| ());
        }
        let (mut readable, mut writable): (Vec<RawFd>, Vec<RawFd>) = (vec![self.waker.fd()], Vec::new());
        for (peer, receiver) in core.receivers.iter().enumerate() {
            if let Some(receiver) = receiver
                && core.closed[peer].is_none()
            {
                receiver.fds(&mut readable);
            }
        }
        for sender in self.senders.iter().flatten().filter(|sender| sender.pending()) {
            sender.fds(&mut writable);
        }
        let mut fds: Vec<PollFd> = readable.into_iter().map(PollFd::readable).collect();
        fds.extend(writable.into_iter().map(PollFd::writable));
        let silent = core.receivers.iter().flatten().any(Receiver::is_silent);
        let longest = if silent { NAP } else { self.policy.tick };
        let result = MutexGuard::unlocked(core, || os::poll(&mut fds, Some(longest)));
        self.waker.finish();
        result.map(|_| ()).map_err(|source| Failure::System { what: "poll", source: source.into() })
    }

    /// Waits without driving.
    fn park(&self, core: &mut MutexGuard<'_, Core>, target: OperationId) {
        let me = thread::current();
        core.waiters.push(Waiter { thread: me.clone(), target });
        MutexGuard::unlocked(core, || thread::park_timeout(5 * self.policy.tick));
        core.waiters.retain(|waiter| waiter.thread.id() != me.id());
    }

    /// For a thread that has changed what is in flight and does not drive: wakes those whose wait is over by that, and the
    /// driver if it may sleep on what is there to do now.
    pub(super) fn stir(&self, core: &Core) {
        self.unpark(core);
        let Some(target) = core.driver else { return };
        // It sleeps on the sockets that had something in line then, and looks at streams that have ended only when it wakes.
        let chores = || {
            self.senders.iter().flatten().any(Sender::pending)
                || !core.streaming.is_empty()
                || lined_up(core).next().is_some()
                || core.closed.iter().any(Option::is_some)
        };
        if core.table.finished(target) || chores() {
            self.waker.wake();
        }
    }

    /// Wakes those whose wait is over.
    pub(super) fn unpark(&self, core: &Core) {
        for waiter in &core.waiters {
            if core.table.finished(waiter.target) {
                waiter.thread.unpark();
            }
        }
    }

    /// Looks at what peers said about where they are.
    fn read_news(&self, core: &mut Core) -> Result<(), Failure> {
        let mut diverged = Ok(());
        for (peer, status) in self.health.take_statuses() {
            let Some(group) = core.communicators.get(&status.comm) else { continue };
            match group.compare(peer, status.sequence, &status.signature) {
                // The call that began it may be told of further on.
                Err(later @ Failure::Diverged { .. }) => diverged = diverged.and(Err(later)),
                other => other?,
            }
            core.reports.insert((status.comm, peer), status.sequence);
        }
        diverged
    }

    /// Looks at the deadlines, at most once a [tick](Policy::tick).
    fn tick(&self, core: &mut Core) -> Result<(), Failure> {
        let now = Instant::now();
        if now < core.next_tick {
            return Ok(());
        }
        core.next_tick = now + self.policy.tick;
        for peer in self.health.gone() {
            core.gone[peer].get_or_insert(now);
        }
        let ids: Vec<OperationId> = core.table.ids().collect();
        let Core { clocks, table, .. } = &mut *core;
        clocks.retain(|&id, _| table.entry(id).is_some());
        ids.into_iter().try_for_each(|id| self.check_clock(core, id, now))
    }

    fn check_clock(&self, core: &mut Core, id: OperationId, now: Instant) -> Result<(), Failure> {
        let Some(entry) = core.table.entry(id) else { return Ok(()) };
        if core.table.finished(id) {
            return Ok(());
        }
        let timeouts = entry.timeouts;
        let (peer, bytes, entered, place) = match &entry.operation {
            Operation::Collective(run) => {
                let Some((peer, bytes, entered)) = run.waits_for() else { return Ok(()) };
                (peer, bytes, entered, Some((run.shared.clone(), run.sequence, run.signature)))
            }
            Operation::Send(send) => {
                let (entered, bytes) = match send.state {
                    SendState::Queued | SendState::Announced => (false, 0),
                    SendState::Streaming { offset, .. } => (true, offset as u64),
                    SendState::Flushing(_) | SendState::Done => (true, send.length as u64),
                };
                (send.peer, bytes, entered, None)
            }
            Operation::Recv(recv) => match recv.state {
                RecvState::Receiving { received, .. } => (recv.peer, received, true, None),
                state => (recv.peer, 0, state == RecvState::Landing, None),
            },
        };
        let moved = match core.table.get_mut(id) {
            Some(Operation::Collective(run)) => std::mem::take(&mut run.moved),
            Some(Operation::Send(send)) => std::mem::take(&mut send.moved),
            Some(Operation::Recv(recv)) => std::mem::take(&mut recv.moved),
            None => false,
        };
        let traffic = self.traffic(core, id, peer);
        let clock = core.clocks.entry(id).or_insert(Clock { since: now, reported: None, bytes: traffic });
        if moved || clock.bytes != traffic {
            *clock = Clock { since: now, reported: None, bytes: traffic };
            return Ok(());
        }
        let waited = now - clock.since;
        let due = clock.reported.is_none_or(|last| now - last >= REPORT_EVERY);
        if let Some((shared, sequence, signature)) = &place
            && waited >= REPORT_AFTER
            && due
        {
            clock.reported = Some(now);
            let status = Status { comm: shared.id, sequence: *sequence, signature: *signature };
            for &member in shared.members.iter().filter(|&&member| member != self.rank) {
                self.control.status(member, status);
            }
        }
        let reported = place.as_ref().is_some_and(|(shared, sequence, _)| {
            core.reports.get(&(shared.id, peer)).is_some_and(|at| at >= sequence)
        });
        let entered = entered || reported;
        let limit = if entered { timeouts.progress } else { timeouts.late };
        if limit.is_some_and(|limit| waited >= limit) {
            let link = self.senders[peer].as_ref().map_or(LinkKind::Local, Sender::kind);
            let mut detail =
                if entered { "it has entered the call" } else { "it is not known to have entered the call" }
                    .to_owned();
            if let Some(run) = core.table.run(id) {
                detail += &run.progress();
            }
            return Err(Failure::Timeout { peer, link, waited, bytes, detail });
        }
        Ok(())
    }

    /// Bytes moved so far on the links that carry the operation's payload right now.
    fn traffic(&self, core: &Core, id: OperationId, peer: usize) -> u64 {
        let landing = match &core.incoming[peer] {
            Incoming::Place(at, _)
            | Incoming::Kept(at, ..)
            | Incoming::Posted(at, _)
            | Incoming::Data(at, _) => *at == id,
            _ => false,
        };
        let received =
            if landing { core.receivers[peer].as_ref().map_or(0, |receiver| receiver.moved()) } else { 0 };
        let sent = self.senders[peer].as_ref().filter(|sender| sender.pending()).map_or(0, Sender::moved);
        received.wrapping_add(sent)
    }
}

/// The collectives that wait for a link to take what is in line.
fn lined_up(core: &Core) -> impl Iterator<Item = OperationId> + '_ {
    let is_lined_up =
        |id: OperationId| matches!(core.table.get(id), Some(Operation::Collective(run)) if run.lined_up);
    core.table.ids().filter(move |&id| is_lined_up(id))
}
