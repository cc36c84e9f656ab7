//! The keeper: a process that outlives a killed launcher for long enough to end its ranks.
//!
//! A launcher that gets SIGKILL cannot clean up. The keeper holds the reading end of a pipe whose writing
//! end only the launcher has, so the end of the file tells it, on every system, that the launcher is gone.
//! The pipe carries the process groups it is answerable for: `+GROUP` and `-GROUP`, one a line. Ending whole
//! groups reaches what a rank's program started, which a death signal from the kernel does not.

use std::collections::HashSet;
use std::io::{self, BufRead, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::Context;
use rustix::process::{Pid, Signal};

use super::group;
use crate::failure::Failure;

/// The launcher's end.
pub(super) struct Keeper {
    process: Child,
    pipe: PipeWriter,
}

impl Keeper {
    /// Starts a keeper with nothing to keep.
    pub(super) fn start() -> io::Result<Self> {
        let (read, pipe) = io::pipe()?;
        let process = Command::new(super::this_executable()?)
            .arg("__keeper")
            .stdin(read)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Away from the terminal's signals.
            .process_group(0)
            .current_dir("/")
            .spawn()?;
        Ok(Self { process, pipe })
    }

    /// Makes it answerable for a process group.
    pub(super) fn guard(&mut self, group: Pid) -> io::Result<()> {
        writeln!(self.pipe, "+{}", group.as_raw_nonzero())
    }

    /// The process group is gone, and its number may come back as somebody else's.
    pub(super) fn release(&mut self, group: Pid) -> io::Result<()> {
        writeln!(self.pipe, "-{}", group.as_raw_nonzero())
    }

    /// Lets the keeper go; whatever it still guards it ends.
    pub(super) fn finish(self) -> io::Result<()> {
        let Self { mut process, pipe } = self;
        drop(pipe);
        process.wait().map(drop)
    }
}

/// What the keeper's process does.
pub(crate) fn keep() -> Result<(), Failure> {
    let mut groups = HashSet::new();
    for line in io::stdin().lock().lines() {
        let line = line.context("cannot read from the launcher")?;
        let number = |text: &str| Pid::from_raw(text.parse::<u32>().ok()?.try_into().ok()?);
        match (line.split_at_checked(1), line.get(1..).and_then(number)) {
            (Some(("+", _)), Some(group)) => drop(groups.insert(group)),
            (Some(("-", _)), Some(group)) => drop(groups.remove(&group)),
            _ => return Err(anyhow::anyhow!("the launcher said `{line}`").into()),
        }
    }
    for &group in &groups {
        group::signal(group, Signal::TERM);
        group::signal(group, Signal::CONT);
    }
    let deadline = Instant::now() + group::GRACE;
    group::wait_until_gone(&mut groups, deadline);
    for &group in &groups {
        group::signal(group, Signal::KILL);
    }
    Ok(())
}
