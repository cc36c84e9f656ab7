//! The local link: two rings in memory between threads of one process.
//!
//! A ring is bounded, so what does not fit waits in the sender's line as it does with a full socket. Whoever could be asleep
//! is woken: the receiver's thread when bytes have arrived, the sender's when a ring that was too full has room again.

mod ring;

use std::{os::fd::RawFd, sync::Arc};

use super::{HEADER_BYTES, LinkError, Receiver, Sender, stripe};
use crate::os::{IoVec, Waker};
use ring::Ring;

/// Bytes that a direction holds. Fits a core's cache together with what is copied in and out.
const CAPACITY: usize = 256 << 10;

/// Links two threads: the first ends are for the one that sleeps on `a`, the second for the one that sleeps on `b`.
pub(crate) fn pair(a: Arc<Waker>, b: Arc<Waker>) -> ((Sender, Receiver), (Sender, Receiver)) {
    let (a_to_b, b_from_a) = direction(&a, &b);
    let (b_to_a, a_from_b) = direction(&b, &a);
    ((a_to_b, a_from_b), (b_to_a, b_from_a))
}

fn direction(from: &Arc<Waker>, to: &Arc<Waker>) -> (Sender, Receiver) {
    let ring = Arc::new(Ring::new(CAPACITY));
    let split = stripe::Split::new(&[1]);
    let outlet = Outlet { ring: ring.clone(), reader: to.clone() };
    let inlet = Inlet { ring, writer: from.clone() };
    let sender = stripe::Sender::new(vec![outlet], split.clone());
    (Sender::Local(sender), Receiver::Local(stripe::Receiver::new(vec![inlet], split)))
}

/// The end of a ring that bytes are put in. The other side sees the end of the stream when it is dropped.
pub(crate) struct Outlet {
    ring: Arc<Ring>,
    reader: Arc<Waker>,
}

impl stripe::Outlet for Outlet {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        // SAFETY: the caller keeps the pieces valid, and this is the ring's only outlet.
        unsafe { self.ring.write(pieces, || self.reader.wake()) }.ok_or(LinkError::Closed)
    }

    fn shutdown(&mut self) -> bool {
        self.ring.end_writing();
        self.reader.wake();
        true
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        stripe::Outlet::shutdown(self);
    }
}

/// The end of a ring that bytes are taken from. The other side's sends are refused when it is dropped.
pub(crate) struct Inlet {
    ring: Arc<Ring>,
    writer: Arc<Waker>,
}

impl stripe::Inlet for Inlet {
    // Reading costs no system call, so copying anything twice to read less often does not pay.
    const READ_AHEAD: usize = HEADER_BYTES;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        // SAFETY: the caller keeps the pieces valid, and this is the ring's only inlet.
        Ok(match unsafe { self.ring.read(pieces, || self.writer.wake()) } {
            Some(0) => stripe::Read::Empty,
            Some(bytes) => stripe::Read::Bytes(bytes),
            None => stripe::Read::End,
        })
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

impl Drop for Inlet {
    fn drop(&mut self) {
        self.ring.end_reading();
        self.writer.wake();
    }
}
