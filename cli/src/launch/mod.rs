//! `raccl launch`: the ranks of a job as processes, here or behind ssh.
//!
//! [`job`] is the heart: it starts the ranks, watches them and ends them. A rank on this machine begins in
//! [`entry`]; [`keeper`] ends the ranks of a launcher that was killed; [`output`] and [`stdin`] carry what
//! ranks write and rank 0 reads.

mod entry;
mod group;
mod job;
mod keeper;
mod lines;
mod output;
mod port;
mod rank;
mod secret;
mod stdin;

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use anyhow::{Context, anyhow};

pub(crate) use self::entry::enter;
pub(crate) use self::job::{Job, Place};
pub(crate) use self::keeper::keep;
use self::secret::Secret;
use crate::args::{LaunchArgs, RunArgs};
use crate::failure::Failure;

/// What happens while a job runs.
enum Event {
    /// A signal arrived for the launcher.
    Signal(i32),
    /// Our own output cannot be written.
    OutputFailed(io::Error),
    /// All output is written.
    OutputDone,
}

/// Runs the command.
pub(crate) fn run(args: LaunchArgs) -> Result<(), Failure> {
    local(args.ranks as usize, args.run, args.program)?.run()
}

/// A job of ranks on this machine.
pub(crate) fn local(ranks: usize, args: RunArgs, program: Vec<OsString>) -> Result<Job, Failure> {
    if let Some(directory) = &args.cwd {
        let found = directory.metadata().with_context(|| format!("cannot run in {}", directory.display()));
        if !found.map_err(Failure::usage)?.is_dir() {
            return Err(Failure::usage(anyhow!("cannot run in {}: not a directory", directory.display())));
        }
    }
    let port = port::on_loopback(args.port)?;
    Ok(Job {
        places: vec![Place::Here; ranks],
        coordinator: format!("127.0.0.1:{port}"),
        secret: Secret::new().context("no random bytes for the job's secret")?,
        environment: environment(&args),
        directory: args.cwd,
        program,
        prefix: true,
    })
}

/// The variables that are the same for all ranks; those of the command line last, so they win.
fn environment(args: &RunArgs) -> Vec<(OsString, OsString)> {
    let mut variables = Vec::new();
    if let Some(link) = args.link {
        variables.push(("RACCL_LINK".into(), link.name().into()));
    }
    if let Some(timeout) = &args.timeout {
        variables.push(("RACCL_TIMEOUT".into(), timeout.into()));
    }
    variables.extend(args.environment.iter().cloned());
    variables
}

/// This command, to be started again.
fn this_executable() -> io::Result<PathBuf> {
    // On Linux the link stays right when the file has been replaced by a newer build meanwhile.
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { env::current_exe() }
}
