//! One job: starts its ranks, watches them, ends them.
//!
//! The thread that runs a job owns all its processes; output and input have threads of their own, and
//! everything that happens reaches this one as an [`Event`]. A rank that has ended stays a zombie until the
//! whole job is over, so that the number of its process group cannot become somebody else's.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Instant;

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGPIPE, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;

use super::keeper::Keeper;
use super::output::Output;
use super::rank::{Exit, Rank};
use super::secret::Secret;
use super::{Event, group};
use crate::failure::Failure;

/// What to run, and where.
pub(crate) struct Job {
    /// The place of each rank.
    pub(crate) places: Vec<Place>,
    /// Where rank 0 listens.
    pub(crate) coordinator: String,
    pub(crate) secret: Secret,
    /// Variables for all ranks, on top of what they inherit.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Where ranks run, if not here.
    pub(crate) directory: Option<PathBuf>,
    /// The program and its arguments.
    pub(crate) program: Vec<OsString>,
    /// Whether output lines begin with their rank.
    pub(crate) prefix: bool,
}

/// Where a rank runs.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// On this machine.
    Here,
}

impl Job {
    /// Runs the job to its end, which is an error unless every rank ended with status 0. To be called on
    /// the main thread: ranks end with the thread that started them.
    pub(crate) fn run(self) -> Result<(), Failure> {
        let (sender, events) = channel();
        watch_signals(sender.clone()).context("cannot watch for signals")?;
        group::adopt_orphans().context("cannot adopt the orphans of ranks")?;
        let keeper = Keeper::start().context("cannot start the process that ends orphaned ranks")?;
        let output = Output::start(self.prefix, sender).context("cannot start the thread for output")?;
        let mut running = Running {
            events,
            keeper,
            output,
            ranks: Vec::new(),
            failure: None,
            deadline: None,
            killed: false,
            drained: false,
        };
        if let Err(failure) = running.start(&self) {
            running.fail(failure);
        }
        running.watch();
        running.clear_up();
        running.drain();
        running.result()
    }
}

/// Sends the signals that concern a job as events.
fn watch_signals(events: Sender<Event>) -> std::io::Result<()> {
    // Not SIGHUP: `nohup` has it ignored, which a handler would undo. Otherwise it kills the launcher, and
    // the keeper ends the ranks.
    let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM, SIGTSTP])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// A job whose ranks have been started.
struct Running {
    events: Receiver<Event>,
    keeper: Keeper,
    output: Output,
    ranks: Vec<Rank>,
    /// The first cause, once something went wrong. From then on the ranks are being ended.
    failure: Option<Failure>,
    /// When patience with the ranks that are being ended runs out.
    deadline: Option<Instant>,
    killed: bool,
    drained: bool,
}

impl Running {
    fn start(&mut self, job: &Job) -> Result<(), Failure> {
        let mut hand_overs = Vec::new();
        for number in 0..job.places.len() {
            let (rank, hand_over) = Rank::start(number, job, &mut self.keeper, &self.output)?;
            self.ranks.push(rank);
            hand_overs.push(hand_over);
        }
        // Only now, so that they come up side by side.
        for (number, hand_over) in hand_overs.into_iter().enumerate() {
            hand_over.started().map_err(|error| {
                let program =
                    job.program.first().map_or_else(Default::default, |name| name.display().to_string());
                let message = format!("cannot start `{program}` as rank {number}");
                Failure::usage(anyhow::Error::new(error).context(message))
            })?;
        }
        Ok(())
    }

    /// Waits for every rank, and ends them all when one fails.
    fn watch(&mut self) {
        self.look();
        while self.ranks.iter().any(|rank| rank.exit().is_none()) {
            match self.next() {
                Some(event) => self.handle(event),
                None => self.kill(),
            }
        }
    }

    /// The next event, or `None` when the deadline has passed.
    fn next(&mut self) -> Option<Event> {
        let event = match self.deadline {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
        };
        // The thread that watches signals holds a sender for ever, so there is no other error.
        event.ok()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Signal(SIGCHLD) => self.look(),
            Event::Signal(SIGTSTP) => self.pause(),
            Event::Signal(signal) => {
                if self.failure.is_some() {
                    // Asked again, or asked while already at it: no more patience.
                    return self.kill();
                }
                let text = anyhow!("ended every rank on {}", name(signal));
                self.fail(Failure::with_status(128 + signal as u8, text));
            }
            Event::OutputFailed(error) => {
                let status = match error.kind() {
                    std::io::ErrorKind::BrokenPipe => 128 + SIGPIPE as u8,
                    _ => 1,
                };
                let error = anyhow::Error::new(error).context("cannot write what the ranks print");
                self.fail(Failure::with_status(status, error));
            }
            Event::OutputDone => self.drained = true,
        }
    }

    /// Sees which ranks have ended.
    fn look(&mut self) {
        let mut worst: Option<(usize, Exit)> = None;
        for rank in &mut self.ranks {
            let Some(exit) = rank.look() else { continue };
            // Those that ended since the last look ended practically together. A rank whose peer is lost
            // leaves with an error, so signals and unusual statuses are nearer to the cause.
            if exit.gravity() > worst.map_or(0, |(_, worst)| worst.gravity()) {
                worst = Some((rank.number(), exit));
            }
        }
        if let Some((number, exit)) = worst {
            let message = match exit {
                Exit::Status(status) => anyhow!("rank {number} exited with status {status}"),
                Exit::Signal(signal) => anyhow!("rank {number} was killed by {}", name(signal)),
            };
            self.fail(Failure::with_status(exit.status(), message));
        }
    }

    /// Keeps the first cause and begins to end the ranks.
    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none() {
            self.failure = Some(failure);
            self.deadline = Some(Instant::now() + group::GRACE);
            for rank in &mut self.ranks {
                rank.end();
            }
        }
    }

    /// No more patience.
    fn kill(&mut self) {
        self.deadline = None;
        self.killed = true;
        for rank in &mut self.ranks {
            rank.kill();
        }
    }

    /// Ctrl-Z: the ranks stop, then we do; when somebody wakes us we wake them.
    fn pause(&mut self) {
        for rank in &self.ranks {
            group::signal(rank.group(), Signal::STOP);
        }
        if let Err(error) = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP) {
            crate::failure::say(format_args!("cannot stop: {error}"));
        }
        for rank in &self.ranks {
            group::signal(rank.group(), Signal::CONT);
        }
    }

    /// Every rank's own process has ended; ends what they have left behind.
    fn clear_up(&mut self) {
        let groups: Vec<Pid> = self.ranks.iter().map(Rank::group).collect();
        for &group in &groups {
            group::signal(group, Signal::TERM);
            group::signal(group, Signal::CONT);
        }
        for rank in &mut self.ranks {
            rank.reap();
        }
        let now = Instant::now();
        let deadline = if self.killed { now } else { self.deadline.unwrap_or(now + group::GRACE) };
        let mut left: HashSet<Pid> = groups.iter().copied().collect();
        group::wait_until_gone(&mut left, deadline);
        for &group in &left {
            group::signal(group, Signal::KILL);
        }
        for &group in &groups {
            if self.keeper.release(group).is_err() {
                // It is gone, so it will not end anybody by mistake.
                break;
            }
        }
    }

    /// Lets all that the ranks wrote reach our output. This waits for a reader that is slow, unless we are
    /// being ended ourselves.
    fn drain(&mut self) {
        self.output.finish();
        self.deadline = None;
        while !self.drained {
            match self.next() {
                Some(Event::Signal(signal @ (SIGINT | SIGTERM))) => {
                    return self.handle(Event::Signal(signal));
                }
                Some(event) => self.handle(event),
                None => return,
            }
        }
    }

    fn result(self) -> Result<(), Failure> {
        self.keeper.finish().context("cannot end the keeper")?;
        self.failure.map_or(Ok(()), Err)
    }
}

/// A signal as people look it up.
fn name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}
