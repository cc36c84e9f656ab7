//! The keeper: a process that outlives a killed launcher for long enough to end its ranks.
//!
//! A launcher that gets SIGKILL cannot clean up. The keeper holds the reading end of a pipe whose writing
//! end only the launcher has, so the end of the file tells it, on every system, that the launcher is gone.
//! The pipe carries the process groups it is answerable for: `+GROUP` and `-GROUP`, one a line; and `done`, when
//! the launcher has cleaned up itself. Ending whole
//! groups reaches what a rank's program started, which a death signal from the kernel does not.

use std::collections::HashSet;
use std::fs;
use std::io::{self, BufRead, PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
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
    /// Starts a keeper with no process to keep, and with a folder to remove if we do not come to it.
    pub(super) fn start(folder: Option<&Path>) -> io::Result<Self> {
        let (read, pipe) = io::pipe()?;
        let process = Command::new(super::this_executable()?)
            .arg("__keeper")
            .args(folder)
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

    /// Lets the keeper go. Whatever it still guards it ends.
    pub(super) fn finish(self) -> io::Result<()> {
        let Self { mut process, mut pipe } = self;
        let told = writeln!(pipe, "done");
        drop(pipe);
        process.wait()?;
        told
    }
}

/// What the keeper's process does.
pub(crate) fn keep(folder: Option<&Path>) -> Result<(), Failure> {
    let mut groups = HashSet::new();
    let mut folder = folder;
    for line in io::stdin().lock().lines() {
        // What cannot be read or understood is no launcher that is well, so it counts as gone.
        let Ok(line) = line else { break };
        let number = |text: &str| Pid::from_raw(text.parse::<u32>().ok()?.try_into().ok()?);
        match (line.split_at_checked(1), line.get(1..).and_then(number)) {
            (Some(("+", _)), Some(group)) => drop(groups.insert(group)),
            (Some(("-", _)), Some(group)) => drop(groups.remove(&group)),
            _ if line == "done" => folder = None,
            _ => break,
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
    match folder {
        Some(folder) => {
            fs::remove_dir_all(folder).context("cannot remove what the launcher left").map_err(Into::into)
        }
        None => Ok(()),
    }
}
