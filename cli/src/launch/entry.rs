//! The first moments of a local rank.
//!
//! A local rank begins as this same executable, so that everything that has to happen between fork and
//! exec happens in an ordinary process. It waits for the launcher to hand over, which the launcher does
//! only after its keeper knows the process group: a launcher that is killed at any moment leaves nothing
//! behind, since a rank whose launcher goes away before the hand-over simply ends.
//!
//! The launcher's end of the conversation is [`HandOver`]; standard input is the rank's end.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::secret::Secret;
use crate::failure::Failure;

/// The status of a rank that never became its program; the launcher reports the reason instead.
const NEVER_RAN: u8 = 127;

/// The launcher's end: gives a rank its secret and its standard input, and learns whether it could start.
pub(super) struct HandOver {
    channel: UnixStream,
}

impl HandOver {
    /// A new conversation, and the standard input to start the rank with.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let (channel, theirs) = UnixStream::pair()?;
        Ok((Self { channel }, theirs.into()))
    }

    /// Lets the rank go. Without `stdin` its standard input is empty.
    pub(super) fn give(&self, secret: &Secret, stdin: Option<&OwnedFd>) -> io::Result<()> {
        let fds: Vec<_> = stdin.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            // The buffer was made for one descriptor, and there is at most one.
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let sent = rustix::net::sendmsg(
            &self.channel,
            &[IoSlice::new(secret.bytes())],
            &mut control,
            SendFlags::empty(),
        )?;
        if sent == secret.bytes().len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Waits until the rank is its program, but no longer than until `deadline`. `Ok` also stands for a rank
    /// that died meanwhile, which its exit status tells better.
    pub(super) fn started(mut self, deadline: Instant) -> io::Result<()> {
        let patience = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.channel.set_read_timeout(Some(patience))?;
        let mut errno = [0; 4];
        match self.channel.read_exact(&mut errno) {
            Ok(()) => Err(io::Error::from_raw_os_error(i32::from_le_bytes(errno))),
            Err(_) => Ok(()),
        }
    }
}

/// Becomes the rank's program.
pub(crate) fn enter(program: Vec<OsString>) -> Result<(), Failure> {
    // Close-on-exec, so the launcher sees the end of the file when the program takes over.
    let mut channel = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().context("no channel")?);
    end_with_the_launcher().context("cannot ask to be told of the launcher's end")?;

    let Some((secret, stdin)) = receive(&channel).context("the launcher did not hand over")? else {
        return Err(Failure::with_status(NEVER_RAN, anyhow::anyhow!("the launcher is gone")));
    };
    let stdin = match stdin {
        Some(fd) => fd,
        None => File::open("/dev/null").context("cannot open /dev/null")?.into(),
    };
    rustix::stdio::dup2_stdin(stdin).context("cannot replace the standard input")?;

    let secret = secret.into_pipe().context("cannot make a pipe for the job's secret")?;
    let [name, arguments @ ..] = &program[..] else {
        return Err(Failure::usage(anyhow::anyhow!("no program")));
    };
    let error = Command::new(name)
        .args(arguments)
        .env_remove("RACCL_SECRET_FILE")
        .env("RACCL_SECRET_FD", secret.as_raw_fd().to_string())
        .exec();
    let errno = error.raw_os_error().unwrap_or(rustix::io::Errno::INVAL.raw_os_error());
    channel
        .write_all(&errno.to_le_bytes())
        .context("cannot tell the launcher that the program did not start")?;
    // The launcher says it, once for all ranks.
    std::process::exit(NEVER_RAN.into());
}

/// The kernel ends this process when the thread that started it is gone. Kept across exec. It is asked to
/// be gentle, so the program can free what outlives a process; the keeper comes after those that stay.
#[cfg(target_os = "linux")]
fn end_with_the_launcher() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?)
}

/// Elsewhere the keeper alone does it.
#[cfg(not(target_os = "linux"))]
fn end_with_the_launcher() -> io::Result<()> {
    Ok(())
}

/// The other half of [`HandOver::give`]; `None` when the launcher is gone.
fn receive(channel: &UnixStream) -> io::Result<Option<(Secret, Option<OwnedFd>)>> {
    let mut secret = Secret::blank();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let length = secret.bytes().len();
    let message = rustix::net::recvmsg(
        channel,
        &mut [IoSliceMut::new(secret.bytes_mut())],
        &mut control,
        RecvFlags::WAITALL,
    )?;
    if message.bytes != length {
        return Ok(None);
    }
    let stdin = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .next();
    if let Some(fd) = &stdin {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC)?;
    }
    Ok(Some((secret, stdin)))
}
