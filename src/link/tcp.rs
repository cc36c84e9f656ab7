//! The TCP link: one or more sockets between two ranks.

use std::{
    io,
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::Arc,
};

use super::{LinkError, Receiver, Sender, sealed, stripe};
use crate::{
    error::Cause,
    noise::Session,
    os::{self, IoVec},
};

/// Makes a link of connected sockets. Both sides must name them in the same order.
pub(crate) fn pair(sockets: Vec<TcpStream>) -> io::Result<(Sender, Receiver)> {
    if sockets.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a TCP link needs at least one socket"));
    }
    sockets.iter().try_for_each(os::tune)?;
    let sockets: Vec<Arc<TcpStream>> = sockets.into_iter().map(Arc::new).collect();
    let split = stripe::Split::new(&vec![1; sockets.len()]);
    let outlets = sockets.iter().map(|socket| Outlet(socket.clone())).collect();
    let inlets = sockets.into_iter().map(Inlet).collect();
    let sender = stripe::Sender::new(outlets, split.clone());
    let receiver = stripe::Receiver::new(inlets, split);
    Ok((Sender::Tcp(sender), Receiver::Tcp(receiver)))
}

/// The same, sealed: each socket with what its two ends have agreed upon.
pub(crate) fn sealed_pair(sockets: Vec<(TcpStream, Session)>) -> io::Result<(Sender, Receiver)> {
    if sockets.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a TCP link needs at least one socket"));
    }
    let split = stripe::Split::new(&vec![1; sockets.len()]);
    let (mut outlets, mut inlets) = (Vec::new(), Vec::new());
    for (socket, Session { sealer, opener }) in sockets {
        os::tune(&socket)?;
        let socket = Arc::new(socket);
        outlets.push(sealed::Outlet::new(Outlet(Arc::clone(&socket)), sealer));
        inlets.push(sealed::Inlet::new(Inlet(socket), opener));
    }
    let sender = stripe::Sender::new(outlets, split.clone());
    let receiver = stripe::Receiver::new(inlets, split);
    Ok((Sender::Sealed(sender), Receiver::Sealed(receiver)))
}

/// The sending direction of a socket. The peer sees the end of the stream when it is dropped.
pub(crate) struct Outlet(Arc<TcpStream>);

impl stripe::Outlet for Outlet {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        // SAFETY: the caller keeps the pieces valid.
        match unsafe { os::send(self.0.as_fd(), pieces) } {
            Ok(taken) => Ok(taken.unwrap_or(0)),
            Err(error) => {
                Err(LinkError::Broken { what: "sending over TCP failed", source: Cause::new(error) })
            }
        }
    }

    fn shutdown(&mut self) -> bool {
        // It fails only when the connection is gone already, which the peer sees as well.
        let _ = self.0.shutdown(Shutdown::Write);
        true
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        stripe::Outlet::shutdown(self);
    }
}

/// The receiving direction of a socket.
pub(crate) struct Inlet(Arc<TcpStream>);

impl stripe::Inlet for Inlet {
    const READ_AHEAD: usize = 64 << 10;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        // SAFETY: the caller keeps the pieces valid.
        match unsafe { os::receive(self.0.as_fd(), pieces) } {
            Ok(Some(0)) => Ok(stripe::Read::End),
            Ok(Some(bytes)) => Ok(stripe::Read::Bytes(bytes)),
            Ok(None) => Ok(stripe::Read::Empty),
            Err(error) => {
                Err(LinkError::Broken { what: "receiving over TCP failed", source: Cause::new(error) })
            }
        }
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}
