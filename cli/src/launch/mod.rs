//! `raccl launch`: the ranks of a job as processes, here or behind ssh.
//!
//! [`job`] is the heart: it starts the ranks, watches them and ends them. A rank on this machine begins in
//! [`entry`]; [`keeper`] ends the ranks of a launcher that was killed; [`output`] and [`stdin`] carry what
//! ranks write and rank 0 reads.

mod emulate;
mod entry;
mod exit;
mod group;
mod hosts;
mod job;
mod keeper;
mod lines;
mod output;
mod port;
mod quote;
mod rank;
mod secret;
mod ssh;
mod stdin;
mod writer;

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use raccl_emulator::Layout;

use self::emulate::Emulated;
pub(crate) use self::entry::enter;
use self::hosts::Hosts;
pub(crate) use self::job::{Job, Place, Streams};
pub(crate) use self::keeper::keep;
use self::secret::Secret;
use self::ssh::Ssh;
use crate::args::{LaunchArgs, RunArgs, variable};
use crate::failure::Failure;

/// What happens while a job runs.
enum Event {
    /// A signal arrived for the launcher.
    Signal(i32),
    /// A rank's far end has a message for the launcher.
    Said { rank: usize, message: String },
    /// A rank's far end, or its ssh, writes no more. This is what it wrote if the rank did not start.
    Closed { rank: usize, text: String },
    /// Our own output cannot be written.
    OutputFailed(io::Error),
    /// All output is written.
    OutputDone,
}

/// Runs the command.
pub(crate) fn run(args: LaunchArgs) -> Result<(), Failure> {
    let LaunchArgs { ranks, hosts, hostfile, coordinator, emulate: layout, run, program } = args;
    let ranks = ranks.map(|ranks| ranks as usize);
    let hosts = match (hosts, hostfile) {
        (Some(list), _) => Hosts::from_list(&list, ranks),
        (None, Some(path)) => Hosts::from_file(&path, ranks),
        // One of the three is there, or clap would have complained.
        (None, None) => {
            let mut job = local(ranks.unwrap_or(1), run, program)?;
            emulate(&mut job, layout.as_ref())?;
            return job.run();
        }
    };
    on_hosts(&hosts.map_err(Failure::usage)?, coordinator.as_deref(), run, program)?.run()
}

/// A job of ranks on this machine that write as one program does.
pub(crate) fn quiet(ranks: usize, layout: Option<&Layout>, program: Vec<OsString>) -> Result<Job, Failure> {
    let mut job = local(ranks, RunArgs::default(), program)?;
    job.streams = Streams::Ours;
    emulate(&mut job, layout)?;
    Ok(job)
}

/// Puts cables between the ranks of a job.
fn emulate(job: &mut Job, layout: Option<&Layout>) -> Result<(), Failure> {
    if let Some(layout) = layout {
        let emulated = Emulated::new(layout, job.places.len())?;
        // First, so that the command line wins.
        job.environment.splice(0..0, emulated.defaults());
        job.emulation = Some(emulated);
    }
    Ok(())
}

/// A job of ranks on this machine.
fn local(ranks: usize, args: RunArgs, program: Vec<OsString>) -> Result<Job, Failure> {
    if let Some(directory) = &args.cwd {
        check_directory(directory).map_err(Failure::usage)?;
    }
    let port = port::on_loopback(args.port)?;
    Ok(Job {
        places: vec![Place::Here; ranks],
        coordinator: format!("127.0.0.1:{port}"),
        secret: Secret::new().context("no random bytes for the job's secret")?,
        environment: environment(&args),
        directory: args.cwd,
        program,
        ssh: None,
        streams: Streams::Lines,
        emulation: None,
    })
}

/// A job of ranks on several machines.
fn on_hosts(
    hosts: &Hosts,
    coordinator: Option<&str>,
    args: RunArgs,
    program: Vec<OsString>,
) -> Result<Job, Failure> {
    if hosts.ranks().all(hosts::is_here) && coordinator.is_none() {
        return local(hosts.ranks().len(), args, program);
    }
    let port = args.port.map_or_else(port::random, Ok)?;
    let coordinator = hosts.coordinator(coordinator, port).map_err(Failure::usage)?;
    let mut variables: Vec<(OsString, OsString)> = Vec::new();
    if let Some(devices) = hosts.devices()
        && env::var_os("RACCL_DEVICES").is_none()
    {
        variables.push(("RACCL_DEVICES".into(), devices.to_string().into()));
    }
    for text in &hosts.environment {
        let pair = variable(text.into()).map_err(|error| anyhow!("\"envs\" of the hostfile: {error}"));
        variables.push(pair.map_err(Failure::usage)?);
    }
    variables.extend(environment(&args));
    if let Some((name, _)) = variables.iter().find(|(name, _)| !is_shell_name(name.as_encoded_bytes())) {
        let name = name.display();
        return Err(Failure::usage(anyhow!(
            "`{name}` cannot be set on other machines: a shell has no such names"
        )));
    }
    let place = |host: &str| if hosts::is_here(host) { Place::Here } else { Place::Ssh(host.to_owned()) };
    Ok(Job {
        places: hosts.ranks().map(place).collect(),
        coordinator: coordinator.to_string(),
        secret: Secret::new().context("no random bytes for the job's secret")?,
        environment: variables,
        directory: args.cwd,
        program,
        ssh: Some(Ssh::from_environment().map_err(Failure::usage)?),
        streams: Streams::Lines,
        emulation: None,
    })
}

fn check_directory(directory: &Path) -> anyhow::Result<()> {
    let what = || format!("cannot run in {}", directory.display());
    if directory.metadata().with_context(what)?.is_dir() {
        Ok(())
    } else {
        Err(anyhow!("not a directory").context(what()))
    }
}

/// Whether a shell can have a variable of this name.
fn is_shell_name(name: &[u8]) -> bool {
    let word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric();
    name.first().is_some_and(|first| !first.is_ascii_digit()) && name.iter().copied().all(word)
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
