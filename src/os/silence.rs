//! What the kernel knows about a peer that does not answer.

use std::net::TcpStream;
#[cfg(target_os = "linux")]
use std::{mem::MaybeUninit, os::fd::AsRawFd};

use std::time::Duration;

/// What a connection's kernel has tried since it last heard anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux tells"))]
pub(crate) struct Silence {
    /// Keep-alive probes that nobody has answered.
    pub(crate) probes: u32,
    /// How often the same data were sent again.
    pub(crate) retransmissions: u32,
    /// Since the last acknowledgement.
    pub(crate) since: Duration,
}

/// Asks the kernel; `None` where it does not tell.
#[cfg(target_os = "linux")]
pub(crate) fn silence(stream: &TcpStream) -> Option<Silence> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which has as many.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return None;
    }
    // SAFETY: integers only, so that zeros are a value, and what the kernel has written is one too.
    let info = unsafe { info.assume_init() };
    let since = Duration::from_millis(info.tcpi_last_ack_recv.into());
    let (probes, retransmissions) = (info.tcpi_probes.into(), info.tcpi_retransmits.into());
    Some(Silence { probes, retransmissions, since })
}

/// Asks the kernel; `None` where it does not tell.
#[cfg(not(target_os = "linux"))]
pub(crate) fn silence(_stream: &TcpStream) -> Option<Silence> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_connection_that_was_just_made_is_not_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let silence = silence(&stream).unwrap();
        assert_eq!(silence.probes, 0);
        assert!(silence.since < Duration::from_secs(30), "{silence:?}");
    }
}
