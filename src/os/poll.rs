//! Sleeping until one of several descriptors is ready.

use std::{io, os::fd::RawFd, time::Duration};

/// A descriptor and what is awaited of it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PollFd(libc::pollfd);

impl PollFd {
    /// Waits for something to read, or the end of it.
    pub(crate) fn readable(fd: RawFd) -> PollFd {
        PollFd(libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
    }

    /// Waits for room to write.
    pub(crate) fn writable(fd: RawFd) -> PollFd {
        PollFd(libc::pollfd { fd, events: libc::POLLOUT, revents: 0 })
    }

    #[cfg(test)]
    pub(crate) fn fd(&self) -> RawFd {
        self.0.fd
    }

    /// Whether the last [`poll`] found what was awaited, or an error that the next read or write will report.
    pub(crate) fn is_ready(&self) -> bool {
        self.0.revents != 0
    }
}

/// Sleeps until a descriptor is ready or the time is over (`None`: for ever); how many are ready. A signal ends the sleep early
/// with 0 ready.
pub(crate) fn poll(fds: &mut [PollFd], timeout: Option<Duration>) -> io::Result<usize> {
    match sys_poll(fds, timeout) {
        Ok(ready) => Ok(ready),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            // What the kernel left in `revents` is undefined after an error.
            fds.iter_mut().for_each(|fd| fd.0.revents = 0);
            Ok(0)
        }
        Err(error) => Err(error),
    }
}

#[cfg(target_os = "linux")]
fn sys_poll(fds: &mut [PollFd], timeout: Option<Duration>) -> io::Result<usize> {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `PollFd` is a transparent `pollfd`, the slice is valid for its length, and `timeout` is null or points at a
    // timespec that outlives the call; a null signal mask leaves the mask alone.
    let ready =
        unsafe { libc::ppoll(fds.as_mut_ptr().cast(), fds.len() as libc::nfds_t, timeout, std::ptr::null()) };
    usize::try_from(ready).map_err(|_| io::Error::last_os_error())
}

#[cfg(not(target_os = "linux"))]
fn sys_poll(fds: &mut [PollFd], timeout: Option<Duration>) -> io::Result<usize> {
    // Rounded up: waking before the time only makes the caller come back to sleep nothing.
    let timeout = timeout.map_or(-1, |timeout| {
        libc::c_int::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
    });
    // SAFETY: `PollFd` is a transparent `pollfd` and the slice is valid for its length.
    let ready = unsafe { libc::poll(fds.as_mut_ptr().cast(), fds.len() as libc::nfds_t, timeout) };
    usize::try_from(ready).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::AsRawFd, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn poll_tells_ready_descriptors_from_quiet_ones() {
        let (mut loud, listener) = UnixStream::pair().unwrap();
        let (_silent, quiet) = UnixStream::pair().unwrap();
        let mut fds = [PollFd::readable(listener.as_raw_fd()), PollFd::readable(quiet.as_raw_fd())];
        assert_eq!(poll(&mut fds, Some(Duration::ZERO)).unwrap(), 0);
        assert!(!fds[0].is_ready() && !fds[1].is_ready());

        loud.write_all(b"x").unwrap();
        assert_eq!(poll(&mut fds, None).unwrap(), 1);
        assert!(fds[0].is_ready() && !fds[1].is_ready());
        assert_eq!(fds[0].fd(), listener.as_raw_fd());
    }

    #[test]
    fn a_writable_socket_is_ready_at_once() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(poll(&mut [PollFd::writable(a.as_raw_fd())], None).unwrap(), 1);
    }

    #[test]
    fn poll_sleeps_no_less_than_asked() {
        let begin = std::time::Instant::now();
        assert_eq!(poll(&mut [], Some(Duration::from_micros(1500))).unwrap(), 0);
        assert!(begin.elapsed() >= Duration::from_micros(1500));
    }
}
