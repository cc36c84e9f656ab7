//! One rank's process.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::entry::HandOver;
use super::job::Job;
use super::keeper::Keeper;
use super::output::{Output, Stream, To};
use super::{group, stdin};

/// A rank that was started.
pub(super) struct Rank {
    number: usize,
    process: Child,
    group: Pid,
    exit: Option<Exit>,
}

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    Status(i32),
    Signal(i32),
}

impl Exit {
    /// As the shell counts.
    pub(super) fn status(self) -> u8 {
        match self {
            Exit::Status(status) => status as u8,
            Exit::Signal(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }

    /// How likely it is the cause, when several ranks end at the same time; 0 for none.
    pub(super) fn gravity(self) -> u8 {
        match self {
            Exit::Status(0) => 0,
            Exit::Status(1) => 1,
            Exit::Status(_) => 2,
            Exit::Signal(_) => 3,
        }
    }
}

impl Rank {
    /// Starts a rank on this machine. It becomes the program as soon as it has been handed over to, which is
    /// done here; what is returned tells whether that worked.
    pub(super) fn start(
        number: usize,
        job: &Job,
        keeper: &mut Keeper,
        output: &Output,
    ) -> anyhow::Result<(Self, HandOver)> {
        let what = || format!("cannot start rank {number}");
        let (hand_over, channel) = HandOver::new().with_context(what)?;
        let mut command = Command::new(super::this_executable().with_context(what)?);
        command
            .arg("__rank")
            .arg("--")
            .args(&job.program)
            .envs(job.environment.iter().map(|(name, value)| (name, value)))
            .env("RACCL_RANK", number.to_string())
            .env("RACCL_SIZE", job.places.len().to_string())
            .env("RACCL_COORDINATOR", &job.coordinator)
            .stdin(channel)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(directory) = &job.directory {
            command.current_dir(directory);
        }
        let mut process = command.spawn().with_context(what)?;
        // The command holds the rank's end of the channel, which only the rank may have.
        drop(command);

        // A process number is positive and fits.
        let group =
            i32::try_from(process.id()).ok().and_then(Pid::from_raw).ok_or_else(|| anyhow!(what()))?;
        if let Some(from) = process.stdout.take() {
            output.add(Stream { rank: number, from: from.into(), to: To::Stdout });
        }
        if let Some(from) = process.stderr.take() {
            output.add(Stream { rank: number, from: from.into(), to: To::Stderr });
        }
        // Not running yet: it ends by itself when it is not handed over to.
        keeper.guard(group).context("the keeper is gone").with_context(what)?;
        let stdin = (number == 0).then(stdin::for_local_rank).transpose().with_context(what)?;
        hand_over.give(&job.secret, stdin.as_ref()).with_context(what)?;
        Ok((Self { number, process, group, exit: None }, hand_over))
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn group(&self) -> Pid {
        self.group
    }

    /// How it ended, if it has been seen to.
    pub(super) fn exit(&self) -> Option<Exit> {
        self.exit
    }

    /// Looks whether it has ended since the last look. The process stays to be reaped.
    pub(super) fn look(&mut self) -> Option<Exit> {
        if self.exit.is_some() {
            return None;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        self.exit = match rustix::process::waitid(WaitId::Pid(self.group), options) {
            Ok(None) => None,
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (_, Some(signal)) => Some(Exit::Signal(signal)),
                (status, None) => Some(Exit::Status(status.unwrap_or(1))),
            },
            // Somebody else reaped our child, which nobody does; how it ended is lost.
            Err(_) => Some(Exit::Status(1)),
        };
        self.exit
    }

    /// Asks it to end.
    pub(super) fn end(&mut self) {
        group::signal(self.group, Signal::TERM);
        // For those that are stopped.
        group::signal(self.group, Signal::CONT);
    }

    /// Ends it.
    pub(super) fn kill(&mut self) {
        group::signal(self.group, Signal::KILL);
    }

    /// Frees the number of the process, which has ended.
    pub(super) fn reap(&mut self) {
        // The only error is that there is nothing to reap, as in `look`.
        let _ = self.process.wait();
    }
}
