//! Lanes that have a way in common.

use std::{
    os::fd::RawFd,
    sync::{Arc, Mutex},
};

use super::{header, payload};
use crate::{
    link::{
        HEADER_BYTES, LinkError,
        stripe::{Outlet, Sender, Split},
    },
    os::IoVec,
};

/// A lane that takes as much as the test allows.
struct Gate {
    in_turn: bool,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Default)]
struct Counts {
    room: usize,
    taken: usize,
}

impl Outlet for Gate {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let mut counts = self.counts.lock().unwrap();
        let taken = pieces.iter().map(|piece| piece.iov_len).sum::<usize>().min(counts.room);
        counts.room -= taken;
        counts.taken += taken;
        Ok(taken)
    }

    fn in_turn(&mut self) -> bool {
        self.in_turn
    }

    fn shutdown(&mut self) -> bool {
        true
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

const HALF: usize = 64 << 10;

/// Sends two messages of a half for each of two lanes, of which the first takes nothing yet. What the second takes.
fn two_messages(in_turn: bool) -> (Sender<Gate>, [Arc<Mutex<Counts>>; 2], Vec<u8>) {
    let counts = [usize::MIN, usize::MAX].map(|room| Arc::new(Mutex::new(Counts { room, taken: 0 })));
    let gates = counts.iter().map(|counts| Gate { in_turn, counts: Arc::clone(counts) });
    let sender = Sender::new(gates.collect(), Split::new(&[1, 1]));
    let bytes = payload(1, 2 * HALF);
    for sequence in 0..2 {
        // SAFETY: the payload is returned with the sender, and nobody writes to it.
        unsafe { sender.send(&[(header(sequence, bytes.len() as u64), bytes.as_ptr())]) }.unwrap();
    }
    (sender, counts, bytes)
}

#[test]
fn lanes_with_ways_of_their_own_do_not_wait_for_each_other() {
    let (_sender, counts, _bytes) = two_messages(false);
    assert_eq!(counts[1].lock().unwrap().taken, 2 * HALF);
}

#[test]
fn no_lane_gets_ahead_where_they_go_in_turn() {
    let (sender, counts, _bytes) = two_messages(true);
    let taken = || counts.each_ref().map(|counts| counts.lock().unwrap().taken);
    assert_eq!(taken(), [0, HALF]);
    for room in [HEADER_BYTES, HALF - 1] {
        counts[0].lock().unwrap().room = room;
        sender.flush().unwrap();
        assert_eq!(taken()[1], HALF, "the first message is not out");
    }
    // Its last byte; then neither has anything of it in line.
    counts[0].lock().unwrap().room = 1;
    sender.flush().unwrap();
    assert_eq!(taken(), [HEADER_BYTES + HALF, 2 * HALF]);
    counts[0].lock().unwrap().room = usize::MAX;
    sender.flush().unwrap();
    assert_eq!(taken()[0], 2 * (HEADER_BYTES + HALF));
    assert!(!sender.pending());
}
