//! Lanes in memory that take and give as few bytes as they like.

use std::{
    cell::RefCell,
    collections::VecDeque,
    os::fd::RawFd,
    sync::{Arc, Mutex},
};

use super::Random;
use crate::{
    link::{
        LinkError,
        stripe::{Inlet, Outlet, Read},
    },
    os::IoVec,
};

/// A lane that holds at most `room` bytes and moves at most `step` in a call.
pub(super) fn lane(seed: u64, room: usize, step: u64) -> (TrickleOutlet, TrickleInlet) {
    let pipe = Arc::new(Mutex::new(Pipe {
        bytes: VecDeque::new(),
        room,
        step,
        random: Random(seed | 1),
        ended: false,
    }));
    (TrickleOutlet(pipe.clone()), TrickleInlet(pipe))
}

pub(super) struct TrickleOutlet(Arc<Mutex<Pipe>>);
pub(super) struct TrickleInlet(Arc<Mutex<Pipe>>);

struct Pipe {
    bytes: VecDeque<u8>,
    room: usize,
    step: u64,
    random: Random,
    ended: bool,
}

impl Pipe {
    fn step(&mut self, limit: usize) -> usize {
        (self.random.below(self.step + 1) as usize).min(limit)
    }
}

impl Outlet for TrickleOutlet {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let mut pipe = self.0.lock().unwrap();
        let room = pipe.room - pipe.bytes.len();
        let taken = pipe.step(room.min(pieces.iter().map(|piece| piece.iov_len).sum()));
        let mut left = taken;
        for piece in pieces {
            let count = piece.iov_len.min(left);
            // SAFETY: the caller keeps the piece valid.
            let bytes = unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), count) };
            pipe.bytes.extend(bytes);
            left -= count;
            if left == 0 {
                break;
            }
        }
        Ok(taken)
    }

    fn shutdown(&mut self) -> bool {
        self.0.lock().unwrap().ended = true;
        true
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

impl Inlet for TrickleInlet {
    const READ_AHEAD: usize = 300;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<Read, LinkError> {
        let mut pipe = self.0.lock().unwrap();
        let here = pipe.bytes.len();
        if here == 0 && pipe.ended {
            return Ok(Read::End);
        }
        let wanted: usize = pieces.iter().map(|piece| piece.iov_len).sum();
        assert!(wanted > 0, "a read of nothing looks like an empty lane");
        let given = pipe.step(here.min(wanted));
        let mut left = given;
        for piece in pieces {
            let count = piece.iov_len.min(left);
            for (at, byte) in pipe.bytes.drain(..count).enumerate() {
                // SAFETY: the caller keeps the piece valid, and `at` is within it.
                unsafe { piece.iov_base.cast::<u8>().wrapping_add(at).write(byte) };
            }
            left -= count;
        }
        Ok(if given == 0 { Read::Empty } else { Read::Bytes(given) })
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

/// Takes and gives bytes without touching memory, and notes how many were asked for in each call.
#[derive(Default)]
pub(super) struct Phantom {
    pub(super) calls: Arc<Mutex<Vec<usize>>>,
    /// What is read first, before bytes that are not there.
    pub(super) first: RefCell<VecDeque<u8>>,
}

impl Outlet for Phantom {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        let total = pieces.iter().map(|piece| piece.iov_len).sum();
        self.calls.lock().unwrap().push(total);
        Ok(total)
    }

    fn shutdown(&mut self) -> bool {
        true
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

impl Inlet for Phantom {
    const READ_AHEAD: usize = 64;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<Read, LinkError> {
        let mut first = self.first.borrow_mut();
        if !first.is_empty() {
            let count = pieces[0].iov_len.min(first.len());
            for (at, byte) in first.drain(..count).enumerate() {
                // SAFETY: the caller keeps the piece valid, and `at` is within it.
                unsafe { pieces[0].iov_base.cast::<u8>().wrapping_add(at).write(byte) };
            }
            return Ok(Read::Bytes(count));
        }
        self.calls.lock().unwrap().push(pieces.iter().map(|piece| piece.iov_len).sum());
        Ok(Read::Bytes(pieces[0].iov_len))
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}
