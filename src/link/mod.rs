//! Links: one ordered, reliable, flow-controlled pipe of messages to one peer.
//!
//! A link has two halves. The [`Sender`] is shared by all threads and guarded by a lock of its own; the [`Receiver`] belongs to
//! whoever drives the engine. A message is a [`Header`] and a payload; links look at nothing of the header but its length.
//!
//! The engine drives a link like this: [`Sender::send`] puts a message in line and pushes as much as the link takes; what is
//! left goes out in later [`Sender::flush`] calls by anybody; memory is free again when [`Sender::sent`] has reached the
//! message's [`Ticket`]. [`Receiver::poll`] yields a header, then the engine says with [`Receiver::land`] where the payload
//! goes, then later polls move bytes until [`Arrival::Payload`].

mod header;
mod kind;

pub(crate) use header::{HEADER_BYTES, Header, MessageKind, Signature};
pub use kind::LinkKind;
