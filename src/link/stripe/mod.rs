//! Messages over one or several lanes.
//!
//! A lane is an ordered, reliable pipe of bytes: a socket, a cable, a ring in memory. Lane 0 carries every header, and the
//! payload of every message that is small; a larger payload is cut into one contiguous part for each lane. Part 0 follows the
//! header on lane 0, the other parts follow one another on their lanes with nothing between them. Where to cut is a function of
//! the length and of what both sides were built with, so nothing about it travels:
//!
//! ```text
//! lane 0:  | header a | a | header b | part 0 of b | header c | c |
//! lane 1:                            | part 1 of b |
//! lane 2:                            | part 2 of b |
//! ```

mod receiver;
mod sender;
mod split;

use std::os::fd::RawFd;

pub(crate) use receiver::Receiver;
pub(crate) use sender::Sender;
pub(crate) use split::Split;

use super::LinkError;
use crate::os::IoVec;

/// Where one lane's bytes go in.
pub(crate) trait Outlet: Send {
    /// Takes bytes from the front of `pieces`, in order; how many. Fewer than there are means that the lane is full for now.
    ///
    /// # Safety
    /// Every piece is valid for reads of its length during the call. Payload that is taken stays so, and nobody writes there, until
    /// it is no longer [`unsettled`](Self::unsettled), or [`revoke`](Self::revoke) has returned.
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError>;

    /// How many of the last bytes that were taken may still be read where they are. After an error, call
    /// [`revoke`](Self::revoke).
    fn unsettled(&mut self) -> Result<u64, LinkError> {
        Ok(0)
    }

    /// From here on nothing reads the bytes that were taken, which may mean that some of them are never sent and the lane is
    /// broken.
    fn revoke(&mut self) {}

    /// Whether lanes have a way in common, so that none may run ahead of the others: no byte of a message may be taken while
    /// another lane has bytes of an earlier one in line. Asked before each write or row of writes.
    fn in_turn(&mut self) -> bool {
        false
    }

    /// Lets the other side see the end of the stream; true when that has left, or never will. Otherwise it has to be called again.
    fn shutdown(&mut self) -> bool;

    /// A descriptor that becomes writable when a full lane has room, if the lane has one.
    fn fd(&self) -> Option<RawFd>;
}

/// Where one lane's bytes come out.
pub(crate) trait Inlet: Send {
    /// How many bytes to read ahead while a header is awaited. More saves calls, and costs a copy of what comes behind it.
    const READ_AHEAD: usize;

    /// Fills `pieces`, whose total is not 0, from the front.
    ///
    /// # Safety
    /// Every piece is valid for writes of its length during the call.
    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<Read, LinkError>;

    /// As [`read`](Self::read), and what the first piece lacks afterwards may be put there already when it comes.
    ///
    /// # Safety
    /// As for `read`; besides, the first piece stays valid, and nobody else touches it, until it has been filled or
    /// [`revoke`](Self::revoke) has returned. The next read begins where this one ends.
    unsafe fn read_lasting(&mut self, pieces: &[IoVec]) -> Result<Read, LinkError> {
        // SAFETY: the caller's promise is more than that.
        unsafe { self.read(pieces) }
    }

    /// From here on nothing writes to a piece that was to last, which may mean that the lane is broken.
    fn revoke(&mut self) {}

    /// A descriptor that becomes readable when bytes have arrived, if the lane has one.
    fn fd(&self) -> Option<RawFd>;
}

/// What came out of an [`Inlet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    Bytes(usize),
    /// Nothing has arrived.
    Empty,
    /// Nothing will arrive any more.
    End,
}
