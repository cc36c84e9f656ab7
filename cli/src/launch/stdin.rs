//! Our standard input, for rank 0.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Between two looks at whether we are in the terminal's foreground again.
const BACKGROUND: Duration = Duration::from_millis(200);

/// What rank 0 on this machine reads. A file, a pipe or a socket is handed on as it is. A terminal cannot be:
/// ranks are in process groups of their own, and the terminal stops those that read from the background; so
/// the launcher reads it for rank 0.
pub(super) fn for_local_rank() -> io::Result<OwnedFd> {
    let stdin = io::stdin();
    if !rustix::termios::isatty(&stdin) {
        return stdin.as_fd().try_clone_to_owned();
    }
    let (read, write) = io::pipe()?;
    let write = OwnedFd::from(write);
    thread::Builder::new().name("stdin".into()).spawn(move || {
        self::read(|piece| {
            let mut rest = piece;
            while !rest.is_empty() {
                match rustix::io::write(&write, rest) {
                    Ok(length) => rest = &rest[length..],
                    Err(Errno::INTR) => {}
                    // Rank 0 does not read any more.
                    Err(_) => return false,
                }
            }
            true
        });
    })?;
    Ok(read.into())
}

/// Gives `sink` all we read, piece by piece, and at the end an empty piece, until it returns false.
pub(super) fn read(mut sink: impl FnMut(&[u8]) -> bool) {
    let stdin = io::stdin();
    let mut buffer = vec![0; 1 << 16];
    loop {
        // Waiting does not stop a process in the terminal's background, but reading would.
        match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], None) {
            Ok(_) if in_background() => {
                thread::sleep(BACKGROUND);
                continue;
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            // There is nothing to wait for in what cannot be read.
            Err(_) => break,
        }
        match rustix::io::read(&stdin, &mut buffer[..]) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            // An input that cannot be read is an empty one, as for programs whose parent closed it.
            Ok(0) | Err(_) => break,
            Ok(length) => {
                if !sink(&buffer[..length]) {
                    return;
                }
            }
        }
    }
    sink(&[]);
}

/// Whether our input is a terminal whose foreground is somebody else's.
fn in_background() -> bool {
    rustix::termios::tcgetpgrp(io::stdin()).is_ok_and(|group| group != rustix::process::getpgrp())
}
