//! One rank's process: the rank itself, or the ssh behind which it is.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::entry::HandOver;
use super::exit::Exit;
use super::job::{Job, Place, Streams};
use super::keeper::Keeper;
use super::output::{Output, Stream, To};
use super::ssh::{Contents, Line, Script, mark};
use super::{group, stdin};

/// How long after the end of an ssh we wait for the end of what it wrote.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A rank that was started.
pub(super) struct Rank {
    number: usize,
    process: Child,
    group: Pid,
    /// How our child ended, and when we saw it.
    gone: Option<(Exit, Instant)>,
    /// How the rank ended.
    exit: Option<Exit>,
    far: Option<Far>,
}

/// What there is about a rank behind ssh.
struct Far {
    line: Line,
    started: bool,
    /// What ssh wrote before the rank started, once it writes no more.
    last_words: Option<String>,
}

impl Rank {
    /// Starts a rank on this machine. It becomes the program as soon as it has been handed over to, which is
    /// done here; what is returned tells whether that worked.
    pub(super) fn start_here(
        number: usize,
        job: &Job,
        keeper: &mut Keeper,
        output: &Output,
    ) -> anyhow::Result<(Self, HandOver)> {
        let what = || format!("cannot start rank {number}");
        let (hand_over, channel) = HandOver::new().with_context(what)?;
        let mut command = Command::new(super::this_executable().with_context(what)?);
        command.arg("__rank").arg("--").args(&job.program).envs(environment(number, job)).stdin(channel);
        if let Some(directory) = &job.directory {
            command.current_dir(directory);
        }
        let rank = Self::spawn(number, command, None, job.streams, output).with_context(what)?;
        // Not running yet: it ends by itself when it is not handed over to.
        keeper.guard(rank.group).context("the keeper is gone").with_context(what)?;
        let reads = number == 0 && job.streams == Streams::Lines;
        let stdin = reads.then(stdin::for_local_rank).transpose().with_context(what)?;
        hand_over.give(&job.secret, stdin.as_ref()).with_context(what)?;
        Ok((rank, hand_over))
    }

    /// Starts a rank behind ssh.
    pub(super) fn start_far(
        number: usize,
        host: &str,
        job: &Job,
        keeper: &mut Keeper,
        output: &Output,
    ) -> anyhow::Result<Self> {
        let what = || format!("cannot start rank {number} on {host}");
        let input = number == 0;
        let here = std::env::current_dir();
        let directory = match (&job.directory, &here) {
            (Some(directory), _) => directory,
            (None, here) => here.as_ref().map_err(|error| anyhow!("no current directory: {error}"))?,
        };
        let mark = mark().with_context(what)?;
        let script = Script::new(&Contents {
            mark: &mark,
            secret: &job.secret,
            input,
            directory,
            elsewhere: job.directory.is_none(),
            environment: &far_environment(number, job),
            program: &job.program,
        });
        let (line, stdin) = Line::new().with_context(what)?;
        let ssh = job.ssh.as_ref().ok_or_else(|| anyhow!("no ssh")).with_context(what)?;
        let mut command = ssh.command(host, &script);
        command.stdin(stdin);
        let mut rank = Self::spawn(number, command, Some(mark), Streams::Lines, output)
            .with_context(|| format!("cannot run `{}`", ssh.name().display()))
            .with_context(what)?;
        keeper.guard(rank.group).context("the keeper is gone").with_context(what)?;
        line.send(script, input).with_context(what)?;
        rank.far = Some(Far { line, started: false, last_words: None });
        Ok(rank)
    }

    fn spawn(
        number: usize,
        mut command: Command,
        mark: Option<Vec<u8>>,
        streams: Streams,
        output: &Output,
    ) -> anyhow::Result<Self> {
        command.process_group(0);
        if streams == Streams::Lines {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let mut process = command.spawn()?;
        // The command holds the child's end of its standard input, which only the child may have.
        drop(command);
        let group = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let group = group.context("a process without a number")?;
        if let Some(from) = process.stdout.take() {
            output.add(Stream { rank: number, from: from.into(), to: To::Stdout, mark: None });
        }
        if let Some(from) = process.stderr.take() {
            output.add(Stream { rank: number, from: from.into(), to: To::Stderr, mark });
        }
        Ok(Self { number, process, group, gone: None, exit: None, far: None })
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// The process group on this machine.
    pub(super) fn group(&self) -> Pid {
        self.group
    }

    /// How the rank ended, if that is known.
    pub(super) fn exit(&self) -> Option<Exit> {
        self.exit
    }

    /// Whether our child has ended and it is known how the rank did.
    pub(super) fn is_over(&self) -> bool {
        self.exit.is_some() && self.gone.is_some()
    }

    /// Whether this is an ssh that may still be on its way to the far machine.
    pub(super) fn is_connecting(&self) -> bool {
        self.exit.is_none() && self.far.as_ref().is_some_and(|far| !far.started)
    }

    /// Whether the program runs, as far as we know.
    pub(super) fn has_started(&self) -> bool {
        self.far.as_ref().is_none_or(|far| far.started)
    }

    /// What ssh had to say, if the rank did not start.
    pub(super) fn last_words(&self) -> &str {
        self.far.as_ref().and_then(|far| far.last_words.as_deref()).unwrap_or_default()
    }

    /// When to [look](Self::look) again even if nothing happens.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let (_, when) = self.gone?;
        self.exit.is_none().then(|| when + LAST_WORDS)
    }

    /// Looks whether the rank has ended since the last look. The process stays to be reaped.
    pub(super) fn look(&mut self) -> Option<Exit> {
        if self.gone.is_none() {
            self.gone = self.wait().map(|exit| (exit, Instant::now()));
        }
        let (gone, when) = self.gone?;
        if self.exit.is_some() {
            return None;
        }
        self.exit = match &self.far {
            None => Some(gone),
            // What the far end said last may still be on its way to us.
            Some(far) if far.last_words.is_none() && when.elapsed() < LAST_WORDS => None,
            Some(_) => Some(Exit::Lost(match gone {
                Exit::Signal(signal) => Some(signal),
                _ => None,
            })),
        };
        self.exit
    }

    fn wait(&self) -> Option<Exit> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        match rustix::process::waitid(WaitId::Pid(self.group), options) {
            Ok(None) => None,
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (_, Some(signal)) => Some(Exit::Signal(signal)),
                (status, None) => Some(Exit::Status(status.unwrap_or(1))),
            },
            // Somebody else reaped our child, which nobody does; how it ended is lost.
            Err(_) => Some(Exit::Status(1)),
        }
    }

    /// Takes a message of the far end. Returns how the rank ended, if it did.
    pub(super) fn hear(&mut self, message: &str) -> Option<Exit> {
        let far = self.far.as_mut()?;
        let exit = match message.split_once(' ') {
            Some(("ended", status)) => Exit::Status(status.parse().ok()?),
            Some(("no", "directory")) => Exit::NoDirectory,
            None if message == "missing" => Exit::NoProgram,
            _ => {
                far.started |= message == "started";
                return None;
            }
        };
        if self.exit.is_some() {
            return None;
        }
        // Let the far end tidy up and leave.
        far.line.close();
        self.exit = Some(exit);
        self.exit
    }

    /// The far end, or its ssh, writes no more.
    pub(super) fn hear_no_more(&mut self, text: String) {
        if let Some(far) = &mut self.far {
            far.last_words = Some(text);
        }
    }

    /// Asks it to end.
    pub(super) fn end(&mut self) {
        match &self.far {
            // The far end ends the rank; meanwhile we hear its output.
            Some(far) if far.started => far.line.close(),
            _ => {
                group::signal(self.group, Signal::TERM);
                // For those that are stopped.
                group::signal(self.group, Signal::CONT);
            }
        }
    }

    /// Ends it.
    pub(super) fn kill(&mut self) {
        group::signal(self.group, Signal::KILL);
    }

    /// Frees the number of the process, which has ended.
    pub(super) fn reap(&mut self) {
        // The only error is that there is nothing to reap, as in `wait`.
        let _ = self.process.wait();
    }
}

/// What a rank's environment has on top of what it inherits.
fn environment(number: usize, job: &Job) -> impl Iterator<Item = (OsString, OsString)> + '_ {
    let place = &job.places[number];
    let before = job.places[..number].iter().filter(|&other| other == place).count();
    let together = job.places.iter().filter(|&other| other == place).count();
    let place = [
        ("RACCL_RANK", number.to_string()),
        ("RACCL_SIZE", job.places.len().to_string()),
        ("RACCL_LOCAL_RANK", before.to_string()),
        ("RACCL_LOCAL_SIZE", together.to_string()),
        ("RACCL_COORDINATOR", job.coordinator.clone()),
    ];
    let machine = job.emulation.iter().flat_map(move |emulation| emulation.environment(number));
    let place = place.into_iter().chain(machine).map(|(name, value)| (name.into(), value.into()));
    job.environment.iter().cloned().chain(place)
}

/// The same for a rank on another machine, which inherits nothing from us: what concerns the library goes
/// along.
fn far_environment(number: usize, job: &Job) -> Vec<(OsString, OsString)> {
    let ours = |name: &OsStr| {
        let name = name.as_encoded_bytes();
        let not_ours = [&b"RACCL_SSH"[..], b"RACCL_SECRET_FILE", b"RACCL_SECRET_FD"];
        name.starts_with(b"RACCL_") && !not_ours.contains(&name) && super::is_shell_name(name)
    };
    let inherited = std::env::vars_os().filter(|(name, _)| ours(name));
    let mut variables: HashMap<_, _> = inherited.collect();
    variables.extend(environment(number, job));
    variables.into_iter().collect()
}

/// Where a rank is, for messages: nothing for this machine.
pub(super) fn on_host(place: &Place) -> String {
    match place {
        Place::Here => String::new(),
        Place::Ssh(host) => format!(" on {host}"),
    }
}
