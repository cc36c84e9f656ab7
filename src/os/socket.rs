//! Gathered sends and scattered receives on non-blocking stream sockets.

use std::{
    io,
    net::{IpAddr, TcpStream},
    os::fd::{AsRawFd, BorrowedFd},
};

use socket2::SockRef;

use super::interface::on_a_local_network;

/// A run of memory in a system call. Building one is safe; whoever hands it to the kernel answers for it.
pub(crate) type IoVec = libc::iovec;

/// More bytes than this are never put into one system call (macOS refuses 2 GiB and more).
pub(crate) const LARGEST_TRANSFER: usize = 1 << 30;

#[cfg(target_os = "linux")]
const SEND_FLAGS: libc::c_int = libc::MSG_NOSIGNAL;
#[cfg(not(target_os = "linux"))]
const SEND_FLAGS: libc::c_int = 0;

/// Prepares a connected socket for the data path: non-blocking, no delay, no SIGPIPE. Buffer sizes stay as they are, because
/// the kernel's automatic ones are better than any constant.
pub(crate) fn tune(socket: &TcpStream) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    // A peer that is gone already is found by whoever reads; nothing can be set for it any more.
    let Ok(peer) = socket.peer_addr().map(|address| address.ip()) else { return Ok(()) };
    socket.set_nodelay(true)?;
    #[cfg(target_vendor = "apple")]
    SockRef::from(socket).set_nosigpipe(true)?;
    if socket.local_addr()?.ip() == peer || on_a_local_network(peer) {
        pace_nothing(socket, peer);
    }
    Ok(())
}

/// Sends from the front of `pieces`, whose total is at most [`LARGEST_TRANSFER`]: how many bytes the kernel took, or `None`
/// when it has no room.
///
/// # Safety
/// Every piece is valid for reads of its length during the call.
pub(crate) unsafe fn send(socket: BorrowedFd<'_>, pieces: &[IoVec]) -> io::Result<Option<usize>> {
    let mut small = [0; SMALL];
    // SAFETY: the caller keeps the pieces valid.
    if let Some(length) = unsafe { gather(pieces, &mut small) } {
        return retry(|| {
            // SAFETY: `small` has `length` bytes.
            unsafe { libc::send(socket.as_raw_fd(), small.as_ptr().cast(), length, SEND_FLAGS) }
        });
    }
    let message = message_of(pieces);
    retry(|| {
        // SAFETY: `message` names `pieces`, which the caller keeps valid, and nothing else.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, SEND_FLAGS) }
    })
}

/// Receives into the front of `pieces`, whose total is at most [`LARGEST_TRANSFER`] and not 0: how many bytes arrived (0 at the
/// end of the stream), or `None` when nothing is there.
///
/// # Safety
/// Every piece is valid for writes of its length during the call.
pub(crate) unsafe fn receive(socket: BorrowedFd<'_>, pieces: &[IoVec]) -> io::Result<Option<usize>> {
    if let [piece] = pieces {
        return retry(|| {
            // SAFETY: the caller keeps the piece valid.
            unsafe { libc::recv(socket.as_raw_fd(), piece.iov_base, piece.iov_len, 0) }
        });
    }
    let mut message = message_of(pieces);
    retry(|| {
        // SAFETY: `message` names `pieces`, which the caller keeps valid, and nothing else.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) }
    })
}

/// Up to so many bytes are sent as one piece: for the kernel a list of pieces is more work than the copy.
const SMALL: usize = 512;

/// Copies all pieces behind one another, if they fit; returns their length.
///
/// # Safety
/// Every piece is valid for reads of its length.
unsafe fn gather(pieces: &[IoVec], into: &mut [u8; SMALL]) -> Option<usize> {
    let total = pieces.iter().try_fold(0_usize, |sum, piece| sum.checked_add(piece.iov_len))?;
    let mut rest = into.get_mut(..total)?;
    for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
        let (now, later) = rest.split_at_mut(piece.iov_len);
        // SAFETY: readable by the caller's promise; the target is as long, and our own.
        unsafe { now.as_mut_ptr().copy_from_nonoverlapping(piece.iov_base.cast(), now.len()) };
        rest = later;
    }
    Some(total)
}

fn message_of(pieces: &[IoVec]) -> libc::msghdr {
    // SAFETY: all zero is a valid msghdr: no name, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // The kernel reads the array of pieces and does not write to it.
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<Option<usize>> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(Some(bytes));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // ENOBUFS: macOS reports a full interface queue this way; trying again later is all one can do.
            Some(libc::EAGAIN | libc::ENOBUFS) => return Ok(None),
            #[allow(unreachable_patterns, reason = "the same number as EAGAIN on the systems we know")]
            Some(libc::EWOULDBLOCK) => return Ok(None),
            _ => return Err(error),
        }
    }
}

/// Chooses a congestion control that sends as fast as the window allows. BBR, some systems' default, paces even loopback and
/// halves the throughput of short paths. A refusal costs speed only.
#[cfg(target_os = "linux")]
fn pace_nothing(socket: &TcpStream, peer: IpAddr) {
    if let Err(error) = SockRef::from(socket).set_tcp_congestion(b"reno") {
        tracing::debug!(%peer, %error, "the kernel keeps its own congestion control");
    }
}

#[cfg(not(target_os = "linux"))]
fn pace_nothing(_socket: &TcpStream, _peer: IpAddr) {}
