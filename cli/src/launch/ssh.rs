//! A rank behind ssh.
//!
//! The command that ssh is given is short and the same for every rank: it reads a script of a known length
//! from its standard input, and runs it. The script holds the program, its arguments, the environment and the
//! job's secret, so none of these is on a command line at either end, none passes through the far user's login
//! shell, and their length is not limited. The script's fixed part is `preamble.sh`.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use anyhow::{Context, anyhow};

use super::quote::{push_quoted, split};
use super::secret::Secret;
use super::stdin;

/// What every rank's script ends with.
const PREAMBLE: &str = include_str!("preamble.sh");

/// Options for a connection that nobody is there to help with. The first value that ssh sees wins, so options
/// in `RACCL_SSH` come before these.
const OPTIONS: [&str; 7] = [
    // Fail instead of asking for a password.
    "BatchMode=yes",
    "ConnectTimeout=30",
    // Notice a machine that is gone.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    // What the user's configuration forwards is not for ranks, and could be forwarded only once.
    "ClearAllForwardings=yes",
    // A connection that stays for later ones would stay in our process group.
    "ControlMaster=no",
    "LogLevel=ERROR",
];

/// How to reach other machines: the program and its options.
#[derive(Clone, Debug)]
pub(crate) struct Ssh {
    words: Vec<OsString>,
}

impl Ssh {
    /// From `RACCL_SSH`, or plain `ssh`.
    pub(super) fn from_environment() -> anyhow::Result<Self> {
        let Some(command) = env::var_os("RACCL_SSH") else { return Ok(Self { words: vec!["ssh".into()] }) };
        match split(&command) {
            Some(words) if !words.is_empty() => Ok(Self { words }),
            Some(_) => Err(anyhow!("RACCL_SSH is empty; unset it to use ssh")),
            None => Err(anyhow!("RACCL_SSH is `{}`, which has an open quote", command.display())),
        }
    }

    /// The command that reaches a host and runs there the script that it then reads.
    pub(super) fn command(&self, host: &str, script: &Script) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        for option in OPTIONS {
            command.args(["-o", option]);
        }
        command.args(["-T", "-x", host]).arg(script.reader());
        command
    }

    /// The program's name.
    pub(super) fn name(&self) -> &OsStr {
        &self.words[0]
    }
}

/// What a rank behind ssh is told.
pub(super) struct Script {
    text: Vec<u8>,
}

/// What goes into a script.
pub(super) struct Contents<'a> {
    /// The beginning of lines that are for the launcher.
    pub(super) mark: &'a [u8],
    pub(super) secret: &'a Secret,
    /// Whether the rank reads the launcher's input.
    pub(super) input: bool,
    pub(super) directory: &'a PathBuf,
    /// Whether the rank may run in another directory when this one is missing.
    pub(super) elsewhere: bool,
    pub(super) environment: &'a [(OsString, OsString)],
    pub(super) program: &'a [OsString],
}

impl Script {
    pub(super) fn new(contents: &Contents<'_>) -> Self {
        let mut text = b"{\n".to_vec();
        let yes = |yes: bool| OsStr::new(if yes { "yes" } else { "no" });
        for (name, value) in [
            ("raccl_mark", OsStr::from_bytes(contents.mark)),
            ("raccl_secret", OsStr::new(&contents.secret.to_hex())),
            ("raccl_input", yes(contents.input)),
            ("raccl_directory", contents.directory.as_os_str()),
            ("raccl_elsewhere", yes(contents.elsewhere)),
        ] {
            // Unset first, lest the value be exported because the environment has one of that name.
            text.extend_from_slice(format!("unset {name}\n{name}=").as_bytes());
            push_quoted(&mut text, value);
            text.push(b'\n');
        }
        text.extend_from_slice(b"raccl_environment() {\nunset RACCL_SECRET_FILE\n");
        let secret = (OsString::from("RACCL_SECRET_FD"), OsString::from("9"));
        for (name, value) in contents.environment.iter().chain([&secret]) {
            text.extend_from_slice(name.as_bytes());
            text.push(b'=');
            push_quoted(&mut text, value);
            text.extend_from_slice(b"\nexport ");
            text.extend_from_slice(name.as_bytes());
            text.push(b'\n');
        }
        text.extend_from_slice(b"}\nset --");
        for word in contents.program {
            text.push(b' ');
            push_quoted(&mut text, word);
        }
        text.push(b'\n');
        for line in PREAMBLE.lines().filter(|line| !line.trim_start().starts_with('#')) {
            text.extend_from_slice(line.as_bytes());
            text.push(b'\n');
        }
        text.extend_from_slice(b"}\n");
        Self { text }
    }

    /// What the far login shell runs, whichever shell that is: quotes and no more. Where the command does not
    /// lead a process group, as every sshd has it, it makes one.
    fn reader(&self) -> String {
        let length = self.text.len();
        format!(
            "exec sh -c 'if kill -0 -$$ 2>/dev/null; then :; elif command -v setsid >/dev/null; \
             then exec setsid sh -c \"$0\"; fi; eval \"$0\"' 'eval \"$(dd bs=1 count={length} 2>/dev/null)\"'"
        )
    }
}

/// Our side of an ssh's standard input. As long as it is open the rank may live.
pub(super) struct Line {
    socket: UnixStream,
}

impl Line {
    /// A new one, and the standard input to start ssh with.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let (socket, theirs) = UnixStream::pair()?;
        Ok((Self { socket }, theirs.into()))
    }

    /// Sends the script, in a thread of its own since nobody may read it for long, and then, for rank 0, all
    /// that we read.
    pub(super) fn send(&self, script: Script, input: bool) -> anyhow::Result<()> {
        let mut socket = self.socket.try_clone().context("cannot share a socket")?;
        let send = move || {
            // The only error is that ssh is gone, of which its exit status tells.
            if socket.write_all(&script.text).is_ok() && input {
                stdin::read(|piece| {
                    let sent = socket
                        .write_all(format!("{}\n", piece.len()).as_bytes())
                        .and_then(|()| socket.write_all(piece));
                    sent.is_ok()
                });
            }
        };
        thread::Builder::new().name("ssh input".into()).spawn(send).context("cannot start a thread")?;
        Ok(())
    }

    /// Tells the rank to end, whatever is being sent.
    pub(super) fn close(&self) {
        // The only error is that it is closed already.
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
    }
}

/// The beginning of lines that are for the launcher: nothing that a program writes by chance.
pub(super) fn mark() -> anyhow::Result<Vec<u8>> {
    let nonce = Secret::new().context("no random bytes")?.to_hex();
    Ok(format!("raccl-{}:", &nonce[..24]).into_bytes())
}
