//! Waiting for any of several sockets while a group forms.
#![forbid(unsafe_code)]

use std::{
    io,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use crate::os::{PollFd, poll};

/// Collects what to wait for, then waits for the first of it.
pub(super) struct Wait {
    fds: Vec<PollFd>,
    until: Instant,
}

impl Wait {
    pub(super) fn until(until: Instant) -> Wait {
        Wait { fds: Vec::new(), until }
    }

    /// The wait also ends at `time`.
    pub(super) fn alarm(&mut self, time: Instant) {
        self.until = self.until.min(time);
    }

    pub(super) fn readable(&mut self, socket: &impl AsRawFd) {
        self.fds.push(PollFd::readable(socket.as_raw_fd()));
    }

    pub(super) fn writable(&mut self, socket: &impl AsRawFd) {
        self.fds.push(PollFd::writable(socket.as_raw_fd()));
    }

    /// Sleeps until something of what was collected happens. What it was shows when everything is tried, without blocking.
    pub(super) fn sleep(mut self) -> io::Result<()> {
        // The kernel's clock and ours may differ by a rounding; a full millisecond never spins.
        let rest = self.until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        poll(&mut self.fds, Some(rest)).map(drop)
    }
}
