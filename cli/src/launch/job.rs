//! One job: starts its ranks, watches them, ends them.
//!
//! The thread that runs a job owns all its processes; output and input have threads of their own, and
//! everything that happens reaches this one as an [`Event`]. A rank that has ended stays a zombie until the
//! whole job is over, so that the number of its process group cannot become somebody else's.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGPIPE, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;

use super::emulate::Emulated;
use super::exit::{Exit, of_signal, signal_name};
use super::keeper::Keeper;
use super::output::Output;
use super::rank::{Rank, on_host};
use super::secret::Secret;
use super::ssh::Ssh;
use super::{Event, group};
use crate::failure::{Failure, say};

/// Connections to one host that are being made at the same time. sshd turns some away from ten on.
const CONNECTING: usize = 8;

/// How long we wait for local ranks to become their program, before we listen to signals again.
const BECOMING: Duration = Duration::from_secs(5);

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
    /// How to reach other machines, if there are any.
    pub(crate) ssh: Option<Ssh>,
    /// What ranks read and write.
    pub(crate) streams: Streams,
    /// The cables between ranks, if those are machines of their own.
    pub(crate) emulation: Option<Emulated>,
}

/// What ranks read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    /// Their lines with their ranks before them, and for rank 0 what we read.
    Lines,
    /// What we have, and nothing to read.
    Ours,
}

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On this machine.
    Here,
    /// On this host, behind ssh.
    Ssh(String),
}

impl Job {
    /// Runs the job to its end, which is an error unless every rank ended with status 0. To be called on
    /// the main thread: ranks end with the thread that started them.
    pub(crate) fn run(self) -> Result<(), Failure> {
        let (sender, events) = channel();
        watch_signals(sender.clone()).context("cannot watch for signals")?;
        let memory = self.emulation.as_ref().and_then(Emulated::folder);
        let keeper = Keeper::start(memory).context("cannot start the process that ends orphaned ranks")?;
        let output = Output::start(sender).context("cannot start the thread for output")?;
        let mut running = Running {
            job: self,
            events,
            keeper,
            output,
            ranks: Vec::new(),
            pending: VecDeque::new(),
            failure: None,
            deadline: None,
            killed: false,
            drained: false,
        };
        if let Err(failure) = running.start() {
            running.fail(failure);
        }
        running.watch();
        running.clear_up();
        running.drain();
        running.result()
    }

    /// The program's name, for messages.
    fn program_name(&self) -> String {
        self.program.first().map_or_else(String::new, |name| name.display().to_string())
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
    job: Job,
    events: Receiver<Event>,
    keeper: Keeper,
    output: Output,
    ranks: Vec<Rank>,
    /// Ranks behind ssh that have not been started yet.
    pending: VecDeque<usize>,
    /// The first cause, once something went wrong. From then on the ranks are being ended.
    failure: Option<Failure>,
    /// When patience with the ranks that are being ended runs out.
    deadline: Option<Instant>,
    killed: bool,
    drained: bool,
}

impl Running {
    fn start(&mut self) -> Result<(), Failure> {
        let mut hand_overs = Vec::new();
        for number in 0..self.job.places.len() {
            if let Place::Ssh(_) = self.job.places[number] {
                self.pending.push_back(number);
                continue;
            }
            let (rank, hand_over) = Rank::start_here(number, &self.job, &mut self.keeper, &self.output)?;
            self.ranks.push(rank);
            hand_overs.push((number, hand_over));
        }
        self.start_pending()?;
        // Only now, so that they come up side by side.
        let deadline = Instant::now() + BECOMING;
        for (number, hand_over) in hand_overs {
            hand_over.started(deadline).map_err(|error| {
                let message = format!("cannot start `{}` as rank {number}", self.job.program_name());
                Failure::usage(anyhow::Error::new(error).context(message))
            })?;
        }
        Ok(())
    }

    /// Starts ranks behind ssh, as many as their hosts take at the moment.
    fn start_pending(&mut self) -> anyhow::Result<()> {
        let places = &self.job.places;
        let mut connecting: HashMap<String, usize> = HashMap::new();
        for rank in self.ranks.iter().filter(|rank| rank.is_connecting()) {
            *connecting.entry(on_host(&places[rank.number()])).or_default() += 1;
        }
        for _ in 0..self.pending.len() {
            let Some(number) = self.pending.pop_front() else { break };
            let Place::Ssh(host) = &places[number] else { continue };
            let connecting = connecting.entry(on_host(&places[number])).or_default();
            if *connecting >= CONNECTING {
                self.pending.push_back(number);
                continue;
            }
            *connecting += 1;
            let rank = Rank::start_far(number, host, &self.job, &mut self.keeper, &self.output)?;
            self.ranks.push(rank);
        }
        Ok(())
    }

    /// Waits for every rank, and ends them all when one fails.
    fn watch(&mut self) {
        self.look();
        while !self.pending.is_empty() || self.ranks.iter().any(|rank| !rank.is_over()) {
            if self.pending.is_empty() && self.ranks.iter().all(|rank| rank.exit().is_some()) && !self.killed
            {
                // Only connections are left. They go when the far ends have let go of them.
                self.deadline.get_or_insert_with(|| Instant::now() + group::GRACE);
            }
            match self.next() {
                Some(event) => self.handle(event),
                None if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) => self.kill(),
                None => self.look(),
            }
        }
    }

    /// The next event, or `None` when it is time to look or the deadline has passed.
    fn next(&mut self) -> Option<Event> {
        let look = self.ranks.iter().filter_map(Rank::look_at).min();
        // The thread that watches signals holds a sender for ever, so events do not end.
        match look.into_iter().chain(self.deadline).min() {
            None => self.events.recv().ok(),
            Some(until) => self.events.recv_timeout(until.saturating_duration_since(Instant::now())).ok(),
        }
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
                let text = anyhow!("ended every rank on {}", signal_name(signal));
                self.fail(Failure::with_status(of_signal(signal), text));
            }
            Event::OutputFailed(error) => {
                let status = match error.kind() {
                    std::io::ErrorKind::BrokenPipe => of_signal(SIGPIPE),
                    _ => 1,
                };
                let error = anyhow::Error::new(error).context("cannot write what the ranks print");
                self.fail(Failure::with_status(status, error));
            }
            Event::OutputDone => self.drained = true,
            Event::Said { rank, message } => {
                if let Some(rank) = self.ranks.iter_mut().find(|other| other.number() == rank) {
                    let ended = rank.hear(&message).map(|exit| (rank.number(), exit));
                    self.judge(ended);
                }
                self.go_on();
            }
            Event::Closed { rank, text } => {
                if let Some(rank) = self.ranks.iter_mut().find(|other| other.number() == rank) {
                    rank.hear_no_more(text);
                }
                self.look();
            }
        }
    }

    /// Sees which ranks have ended.
    fn look(&mut self) {
        let ended: Vec<_> =
            self.ranks.iter_mut().filter_map(|rank| Some((rank.number(), rank.look()?))).collect();
        self.judge(ended);
        self.go_on();
    }

    /// Whether ranks that ended practically together, in the order of their numbers, are the job's end.
    fn judge(&mut self, ended: impl IntoIterator<Item = (usize, Exit)>) {
        let mut worst: Option<(usize, Exit)> = None;
        for (number, exit) in ended {
            if exit.gravity() > worst.map_or(0, |(_, worst)| worst.gravity()) {
                worst = Some((number, exit));
            }
        }
        let Some((number, exit)) = worst else { return };
        if let Some(rank) = self.ranks.iter().find(|rank| rank.number() == number) {
            let failure = exit.failure(rank, &self.job.places[number], &self.job.program_name());
            self.fail(failure);
        }
    }

    /// Starts what had to wait for others, if all is well.
    fn go_on(&mut self) {
        if self.failure.is_none()
            && let Err(error) = self.start_pending()
        {
            self.fail(error.into());
        }
    }

    /// Keeps the first cause and begins to end the ranks.
    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none() {
            self.failure = Some(failure);
            self.pending.clear();
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
            say(format_args!("cannot stop: {error}"));
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
        // The kernel needs a moment, and longer for a process that waits for a device.
        group::wait_until_gone(&mut left, Instant::now() + group::GRACE / 2);
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
