//! Lanes that hold what they took for longer than the call, or put bytes in their places before they are asked for.

use std::{
    os::fd::RawFd,
    sync::{Arc, Mutex},
};

use super::{header, payload};
use crate::{
    link::{
        Arrival, HEADER_BYTES, LinkError, Ticket,
        stripe::{Inlet, Outlet, Read, Receiver, Sender, Split},
    },
    os::IoVec,
};

/// A lane that takes everything, and says what the test wants of what it is done with.
#[derive(Clone, Default)]
struct Holder(Arc<Mutex<Held>>);

#[derive(Default)]
struct Held {
    taken: u64,
    settled: u64,
    revoked: usize,
}

impl Holder {
    /// All but so many of the bytes that were taken are free again.
    fn settle_but(&self, bytes: u64) {
        let mut held = self.0.lock().unwrap();
        held.settled = held.taken - bytes;
    }
}

impl Outlet for Holder {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let bytes: usize = pieces.iter().map(|piece| piece.iov_len).sum();
        self.0.lock().unwrap().taken += bytes as u64;
        Ok(bytes)
    }

    fn unsettled(&mut self) -> Result<u64, LinkError> {
        let held = self.0.lock().unwrap();
        Ok(held.taken - held.settled)
    }

    fn revoke(&mut self) {
        self.0.lock().unwrap().revoked += 1;
    }

    fn shutdown(&mut self) -> bool {
        true
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

const LONG: usize = 200 << 10;

/// Sends one long message over two lanes that hold it.
fn held() -> (Sender<Holder>, [Holder; 2], Vec<u8>, Ticket) {
    let lanes = [Holder::default(), Holder::default()];
    let sender = Sender::new(lanes.to_vec(), Split::new(&[1, 1]));
    let bytes = payload(1, LONG);
    // SAFETY: the payload is returned with the sender, and nobody writes to it.
    let ticket = unsafe { sender.send(&[(header(1, LONG as u64), bytes.as_ptr())]) }.unwrap();
    (sender, lanes, bytes, ticket)
}

#[test]
fn a_message_is_sent_when_every_lane_is_done_with_its_bytes() {
    let (sender, lanes, bytes, ticket) = held();
    assert_eq!(
        (sender.queued_bytes(), sender.pending()),
        (0, true),
        "nothing is in line, and all of it is held"
    );
    assert!(sender.sent() < ticket);
    assert!(!sender.flush().unwrap(), "nothing has changed");

    lanes[1].settle_but(0);
    lanes[0].settle_but(1);
    assert!(sender.flush().unwrap());
    assert!(sender.sent() < ticket, "a byte is held");

    // A short one behind it is free at once, and is not said to be before the first.
    // SAFETY: there is no payload.
    let short = unsafe { sender.send(&[(header(2, 0), std::ptr::null())]) }.unwrap();
    lanes[0].settle_but(1 + HEADER_BYTES as u64);
    sender.flush().unwrap();
    assert!(sender.sent() < ticket);
    lanes[0].settle_but(HEADER_BYTES as u64);
    assert!(sender.flush().unwrap());
    assert_eq!(sender.sent(), ticket);
    lanes[0].settle_but(0);
    assert!(sender.flush().unwrap());
    assert_eq!((sender.sent(), sender.pending()), (short, false));
    assert!(!sender.flush().unwrap());
    drop(bytes);
}

#[test]
fn closing_takes_back_what_is_held() {
    let (sender, lanes, _bytes, _) = held();
    assert_eq!(sender.close(), [(HEADER_BYTES + LONG / 2) as u64, (LONG / 2) as u64]);
    assert!(!sender.pending());
    for lane in lanes {
        assert_eq!(lane.0.lock().unwrap().revoked, 1);
    }
}

/// What a lane was asked for.
type Seen = Arc<Mutex<Vec<&'static str>>>;

/// A lane that gives a header, and then has nothing or fails.
struct Placer {
    first: Option<Vec<u8>>,
    fails: bool,
    seen: Seen,
}

impl Inlet for Placer {
    const READ_AHEAD: usize = 256;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<Read, LinkError> {
        if let Some(first) = self.first.take() {
            // SAFETY: the caller keeps the piece valid, which has room for a header.
            unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), pieces[0].iov_base.cast(), first.len()) };
            return Ok(Read::Bytes(first.len()));
        }
        self.seen.lock().unwrap().push("read");
        if self.fails { Err(LinkError::Closed) } else { Ok(Read::Empty) }
    }

    unsafe fn read_lasting(&mut self, pieces: &[IoVec]) -> Result<Read, LinkError> {
        self.seen.lock().unwrap().push("lasting");
        // SAFETY: the caller's promise is more than that.
        unsafe { self.read(pieces) }
    }

    fn revoke(&mut self) {
        self.seen.lock().unwrap().push("revoke");
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

/// A receiver to which the header of a long message has come, over two lanes.
fn landing(fails: bool, keep: usize, to: &mut [u8]) -> (Receiver<Placer>, [Seen; 2]) {
    let seen = [Arc::default(), Arc::default()];
    let lane = |index: usize| {
        let first = (index == 0).then(|| header(1, LONG as u64).encode().to_vec());
        Placer { first, fails: fails && index == 1, seen: Arc::clone(&seen[index]) }
    };
    let mut receiver = Receiver::new(vec![lane(0), lane(1)], Split::new(&[1, 1]));
    assert!(matches!(receiver.poll(), Ok(Arrival::Header(_))));
    assert!(keep <= to.len());
    // SAFETY: the test keeps the memory until it is done with the receiver.
    unsafe { receiver.land(to.as_mut_ptr(), keep) };
    (receiver, seen)
}

#[test]
fn what_is_kept_of_a_payload_lasts_and_what_is_dropped_does_not() {
    let mut to = vec![0; LONG];
    let (mut receiver, seen) = landing(false, LONG / 2, &mut to);
    assert_eq!(receiver.poll().unwrap(), Arrival::Nothing);
    assert_eq!(*seen[0].lock().unwrap(), ["lasting", "read"]);
    assert_eq!(*seen[1].lock().unwrap(), ["read"], "all of its part is dropped");
}

#[test]
fn nothing_is_put_anywhere_after_a_lane_has_failed_or_the_payload_is_not_wanted() {
    let mut to = vec![0; LONG];
    let (mut receiver, seen) = landing(true, LONG, &mut to);
    assert!(receiver.poll().is_err());
    seen.iter().for_each(|seen| assert_eq!(seen.lock().unwrap().last(), Some(&"revoke")));

    let (mut receiver, seen) = landing(false, LONG, &mut to);
    receiver.poll().unwrap();
    receiver.cancel();
    seen.iter().for_each(|seen| assert_eq!(seen.lock().unwrap().last(), Some(&"revoke")));
    receiver.poll().unwrap();
    assert_eq!(seen[0].lock().unwrap().last(), Some(&"read"), "it is read to be dropped");
}
