//! Links: one ordered, reliable, flow-controlled pipe of messages to one peer.
//!
//! A link has two halves. The [`Sender`] is shared by all threads and guarded by a lock of its own; the [`Receiver`] belongs to
//! whoever drives the engine. A message is a [`Header`] and a payload; links look at nothing of the header but its length.
//!
//! The engine drives a link like this: [`Sender::send`] puts a message in line and pushes as much as the link takes; what is
//! left goes out in later [`Sender::flush`] calls by anybody; memory is free again when [`Sender::sent`] has reached the
//! message's [`Ticket`]. [`Receiver::poll`] yields a header, then the engine says with [`Receiver::land`] where the payload
//! goes, then later polls move bytes until [`Arrival::Payload`].
//!
//! A thread that wants to sleep does this, so that nothing passes it by: [`Waker::prepare`](crate::os::Waker::prepare), then
//! collect [`Sender::fds`] and [`Receiver::fds`], then poll and flush once more and look at what it waits for, and only if
//! nothing at all has changed, [`os::poll`](crate::os::poll). Descriptors collected later could miss a lane that another thread
//! has emptied, along with the message the sleeper waits for.
//!
//! Kinds differ in how bytes travel, not in what a message is: each kind is one or more *lanes* (ordered pipes of bytes), and
//! [`stripe`] makes messages of them, over one lane or several.

mod header;
mod kind;
pub(crate) mod local;
mod sealed;
mod stripe;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
pub(crate) mod verbs;

use std::os::fd::RawFd;

use crate::error::Cause;
pub(crate) use header::{HEADER_BYTES, Header, MessageKind, Signature};
pub use kind::LinkKind;

const _: () = assert!(usize::BITS == 64, "lengths on the wire are 64-bit, and so must addresses be");

/// The number of a message on its link, from 1. Number 0 stands for "sent long ago".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Ticket(pub(crate) u64);

/// Why a link carries nothing any more.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum LinkError {
    /// This side closed it, or the peer did in an orderly way.
    #[error("the link is closed")]
    Closed,
    /// The operating system or the device reports a failure, or the stream ended inside a message.
    #[error("{what}")]
    Broken {
        /// What was attempted.
        what: &'static str,
        #[source]
        source: Cause,
    },
    /// The peer sent what no peer may send.
    #[error("{0}")]
    Protocol(String),
}

/// The sending half of a link. Shared by all threads.
pub(crate) enum Sender {
    Local(stripe::Sender<local::Outlet>),
    Tcp(stripe::Sender<tcp::Outlet>),
    Sealed(stripe::Sender<sealed::Outlet<tcp::Outlet>>),
    Verbs(stripe::Sender<verbs::Outlet>, verbs::Cables),
}

/// What a [`Receiver`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Nothing more at the moment. Bytes of a payload may have been moved all the same.
    Nothing,
    /// A message begins. If its length is not 0, [`Receiver::land`] or [`Receiver::cancel`] has to follow before the next poll.
    Header(Header),
    /// The payload of the last header is complete.
    Payload,
    /// The peer closed the link after a whole message. Stays so.
    Closed,
}

/// The receiving half of a link. One thread uses it at a time.
pub(crate) enum Receiver {
    Local(stripe::Receiver<local::Inlet>),
    Tcp(stripe::Receiver<tcp::Inlet>),
    Sealed(stripe::Receiver<sealed::Inlet<tcp::Inlet>>),
    Verbs(stripe::Receiver<verbs::Inlet>),
}

/// Does the same with the link inside, whatever its kind.
macro_rules! each {
    ($half:ident, $on:expr, $link:ident => $do:expr) => {
        match $on {
            $half::Local($link) => $do,
            $half::Tcp($link) => $do,
            $half::Sealed($link) => $do,
            $half::Verbs($link, ..) => $do,
        }
    };
}

impl Sender {
    pub(crate) fn kind(&self) -> LinkKind {
        match self {
            Sender::Local(_) => LinkKind::Local,
            Sender::Tcp(_) | Sender::Sealed(_) => LinkKind::Tcp,
            Sender::Verbs(..) => LinkKind::Verbs,
        }
    }

    /// Whether a long payload from there goes out without a copy. The registry is that of the link's devices.
    pub(crate) fn sends_in_place(&self, registry: &verbs::Registry, start: *const u8, bytes: usize) -> bool {
        self.cables().is_some() && registry.knows(start, bytes)
    }

    /// Puts a message in line and pushes what the link takes now.
    ///
    /// # Safety
    /// `payload` is valid for reads of `header.length` bytes, and nobody writes to them, until [`sent`](Self::sent) has reached
    /// the ticket, [`close`](Self::close) has returned, or any call here has returned an error.
    pub(crate) unsafe fn send(&self, header: &Header, payload: *const u8) -> Result<Ticket, LinkError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.send_many(&[(*header, payload)]) }
    }

    /// Puts several messages in line at once, so that they share system calls; the ticket of the last.
    ///
    /// # Safety
    /// As for [`send`](Self::send), for each of them.
    pub(crate) unsafe fn send_many(&self, messages: &[(Header, *const u8)]) -> Result<Ticket, LinkError> {
        // SAFETY: the caller's promise is the same.
        each!(Sender, self, link => unsafe { link.send(messages) })
    }

    /// The last message whose memory is free again; so is that of all before it.
    pub(crate) fn sent(&self) -> Ticket {
        each!(Sender, self, link => link.sent())
    }

    /// Whether something is in line.
    pub(crate) fn pending(&self) -> bool {
        each!(Sender, self, link => link.pending())
    }

    /// Pushes what is in line; whether that made a difference. While another thread is at it, does nothing and says true,
    /// because whatever that thread does is news to the caller. Look at [`sent`](Self::sent) after it, not before.
    pub(crate) fn flush(&self) -> Result<bool, LinkError> {
        each!(Sender, self, link => link.flush())
    }

    /// Bytes in line.
    pub(crate) fn queued_bytes(&self) -> u64 {
        each!(Sender, self, link => link.queued_bytes())
    }

    /// Bytes pushed so far, headers included.
    pub(crate) fn moved(&self) -> u64 {
        each!(Sender, self, link => link.moved())
    }

    /// Forgets everything in line: afterwards no pointer is held, and every later send is refused as closed. What was sent of
    /// the first message in line stays sent. Returns the bytes that were sent in all, lane by lane.
    pub(crate) fn close(&self) -> Vec<u64> {
        if let Some(cables) = self.cables() {
            cables.leave();
        }
        each!(Sender, self, link => link.close())
    }

    /// [Closes](Self::close), and lets the peer see the end of the stream. False if that and what was sent before it are still on
    /// their way out, which may be for ever: then call it again later.
    pub(crate) fn shutdown(&self) -> bool {
        each!(Sender, self, link => link.shutdown())
    }

    /// Lets go of the link's device, after the receiver was dropped: what is left undone there is lost. Does nothing where the link
    /// has none.
    pub(crate) fn release(&self) {
        if let Sender::Verbs(link, cables) = self {
            link.release();
            cables.release();
        }
    }

    /// The cables of the link, where its last bytes are lost if this side lets go of them before they have arrived.
    pub(crate) fn cables(&self) -> Option<&verbs::Cables> {
        match self {
            Sender::Verbs(_, cables) => Some(cables),
            _ => None,
        }
    }

    /// Appends the descriptors to poll for writing. Those of lanes with nothing in line are left out; local links have none,
    /// and wake their threads instead.
    pub(crate) fn fds(&self, out: &mut Vec<RawFd>) {
        each!(Sender, self, link => link.fds(out));
    }
}

impl Receiver {
    /// Looks for what has arrived and moves it along. Makes at most one read a lane, so that callers can be fair to all links;
    /// call it until it says [`Arrival::Nothing`] before sleeping on [`fds`](Self::fds), because more may have been read ahead.
    pub(crate) fn poll(&mut self) -> Result<Arrival, LinkError> {
        each!(Receiver, self, link => link.poll())
    }

    /// Says where the payload of the header that was just polled goes. Bytes beyond `keep` are read and dropped.
    ///
    /// # Safety
    /// `to` is valid for writes of `keep` bytes, and nobody else touches them, until [`poll`](Self::poll) has returned
    /// [`Arrival::Payload`] or an error, or [`cancel`](Self::cancel) or [`drain`](Self::drain) was called.
    pub(crate) unsafe fn land(&mut self, to: *mut u8, keep: usize) {
        // SAFETY: the caller's promise is the same.
        each!(Receiver, self, link => unsafe { link.land(to, keep) });
    }

    /// The rest of the payload that is landing, or has yet to be landed, is read and dropped; its memory is not touched any
    /// more. [`poll`](Self::poll) still says [`Arrival::Payload`] at its end. Does nothing between messages.
    pub(crate) fn cancel(&mut self) {
        each!(Receiver, self, link => link.cancel());
    }

    /// Bytes received so far, headers included.
    pub(crate) fn moved(&self) -> u64 {
        each!(Receiver, self, link => link.moved())
    }

    /// Whether nothing tells a sleeper that something has come, so that whoever waits has to look again and again.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Receiver::Verbs(_))
    }

    /// Reads and drops until the peer's bytes, counted lane by lane from the beginning of the link as its [`Sender::close`]
    /// says them, are all in, or the stream ends or fails: then it is done and returns true. Otherwise call it again later.
    /// From the first call on, the link receives nothing any more and [`poll`](Self::poll) says closed.
    pub(crate) fn drain(&mut self, sent_by_peer: &[u64]) -> bool {
        each!(Receiver, self, link => link.drain(sent_by_peer))
    }

    /// Appends the descriptors to poll for reading: those from which the next thing has to come. None while a header waits for
    /// [`land`](Self::land); local links have none at all, and wake their threads instead.
    pub(crate) fn fds(&self, out: &mut Vec<RawFd>) {
        each!(Receiver, self, link => link.fds(out));
    }
}
