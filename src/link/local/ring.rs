//! A bounded ring of bytes between one writing and one reading thread.
//!
//! | field      | written by        | read by | meaning                                                    |
//! |------------|-------------------|---------|------------------------------------------------------------|
//! | `written`  | writer (Release)  | reader (Acquire) | bytes put in since the beginning                  |
//! | `taken`    | reader (Release)  | writer (Acquire) | bytes taken out since the beginning               |
//! | `starving` | writer sets, reader clears | both    | the writer found too little room, and may be asleep |
//! | `writer_gone`, `reader_gone` | the one that goes (Release) | the other (Acquire) | nothing more goes in, or out |
//!
//! Byte number n lives in cell n modulo the capacity. The writer owns the cells of bytes `written .. taken + capacity`, the reader
//! those of `taken .. written`; the release of a counter hands cells over.
//!
//! The writer sets `starving`, then looks at `taken` again; the reader moves `taken`, then looks at `starving`; a sequentially
//! consistent fence lies between the two steps on both sides. So either the writer finds the room, or the reader finds that it
//! has to wake the writer.

use crossbeam::utils::CachePadded;
#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
use std::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
};

use crate::os::IoVec;

/// Cells are handed over after at most this many bytes, so that both sides copy at the same time.
const STEP: usize = 32 << 10;

pub(super) struct Ring {
    cells: Cells,
    written: CachePadded<AtomicUsize>,
    taken: CachePadded<AtomicUsize>,
    starving: CachePadded<AtomicBool>,
    writer_gone: AtomicBool,
    reader_gone: AtomicBool,
}

impl Ring {
    /// A ring for `capacity` bytes, a power of two.
    pub(super) fn new(capacity: usize) -> Ring {
        assert!(capacity.is_power_of_two(), "the numbers of bytes wrap around at a power of two");
        Ring {
            cells: Cells::new(capacity),
            written: CachePadded::new(AtomicUsize::new(0)),
            taken: CachePadded::new(AtomicUsize::new(0)),
            starving: CachePadded::new(AtomicBool::new(false)),
            writer_gone: AtomicBool::new(false),
            reader_gone: AtomicBool::new(false),
        }
    }

    /// Puts in what there is room for, from the front of `pieces`; how many bytes, or `None` when nobody reads any more. Calls
    /// `wake_reader` whenever bytes were put in.
    ///
    /// # Safety
    /// Every piece is valid for reads of its length, and only one thread at a time writes.
    pub(super) unsafe fn write(&self, pieces: &[IoVec], mut wake_reader: impl FnMut()) -> Option<usize> {
        if self.reader_gone.load(Ordering::Acquire) {
            return None;
        }
        let begin = self.written.load(Ordering::Relaxed);
        let mut written = begin;
        let mut limit = self.limit();
        for piece in pieces {
            let mut done = 0;
            while done < piece.iov_len {
                if written == limit {
                    limit = self.limit_when_starving(written);
                    if written == limit {
                        return Some(written.wrapping_sub(begin));
                    }
                }
                let step = (piece.iov_len - done).min(limit.wrapping_sub(written)).min(STEP);
                let from = piece.iov_base.cast::<u8>().wrapping_add(done);
                // SAFETY: the piece is valid by the caller's promise, and the cells from `written` to `limit` are the writer's.
                unsafe { self.cells.put(written, from, step) };
                done += step;
                written = written.wrapping_add(step);
                self.written.store(written, Ordering::Release);
                wake_reader();
            }
        }
        Some(written.wrapping_sub(begin))
    }

    /// Takes out what is there, into the front of `pieces`; how many bytes, or `None` when nothing will come any more. Calls
    /// `wake_writer` when the writer waits for the room that was made.
    ///
    /// # Safety
    /// Every piece is valid for writes of its length, and only one thread at a time reads.
    pub(super) unsafe fn read(&self, pieces: &[IoVec], mut wake_writer: impl FnMut()) -> Option<usize> {
        let begin = self.taken.load(Ordering::Relaxed);
        let mut limit = self.written.load(Ordering::Acquire);
        if begin == limit {
            if !self.writer_gone.load(Ordering::Acquire) {
                return Some(0);
            }
            // What was put in before the writer went is visible now.
            limit = self.written.load(Ordering::Acquire);
            if begin == limit {
                return None;
            }
        }
        let mut taken = begin;
        for piece in pieces {
            let mut done = 0;
            while done < piece.iov_len && taken != limit {
                let step = (piece.iov_len - done).min(limit.wrapping_sub(taken)).min(STEP);
                let to = piece.iov_base.cast::<u8>().wrapping_add(done);
                // SAFETY: the piece is valid by the caller's promise, and the cells from `taken` to `limit` are the reader's.
                unsafe { self.cells.get(taken, to, step) };
                done += step;
                taken = taken.wrapping_add(step);
                self.taken.store(taken, Ordering::Release);
                fence(Ordering::SeqCst);
                if self.starving.load(Ordering::Relaxed) {
                    self.starving.store(false, Ordering::Relaxed);
                    wake_writer();
                }
            }
        }
        Some(taken.wrapping_sub(begin))
    }

    /// Nothing more goes in.
    pub(super) fn end_writing(&self) {
        self.writer_gone.store(true, Ordering::Release);
    }

    /// Nothing more goes out.
    pub(super) fn end_reading(&self) {
        self.reader_gone.store(true, Ordering::Release);
    }

    /// The number of the first byte for which there is no room.
    fn limit(&self) -> usize {
        self.taken.load(Ordering::Acquire).wrapping_add(self.cells.capacity())
    }

    /// The same for a writer that has found no room for byte `written`, and will be woken if it still finds none.
    fn limit_when_starving(&self, written: usize) -> usize {
        let limit = self.limit();
        if limit != written {
            return limit;
        }
        self.starving.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.limit()
    }
}

// SAFETY: the cells are raw bytes, and the ring says which thread may touch which.
unsafe impl Sync for Cells {}

/// The memory of a ring. Left uninitialised at first, so that pages nobody uses cost nothing.
#[cfg(not(loom))]
struct Cells(Box<[MaybeUninit<UnsafeCell<u8>>]>);

#[cfg(not(loom))]
impl Cells {
    fn new(capacity: usize) -> Cells {
        Cells(Box::new_uninit_slice(capacity))
    }

    fn capacity(&self) -> usize {
        self.0.len()
    }

    /// # Safety
    /// `from` is valid for reads of `length` bytes; the cells of so many bytes from `number` on are the caller's, and they are
    /// at most all.
    unsafe fn put(&self, number: usize, from: *const u8, length: usize) {
        let (at, first) = self.place(number, length);
        // SAFETY: `at + first` is at most the capacity, and the caller owns these cells.
        unsafe { std::ptr::copy_nonoverlapping(from, self.base().wrapping_add(at), first) };
        // SAFETY: the rest is at most what lies before `at`, and the caller owns these cells.
        unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(first), self.base(), length - first) };
    }

    /// # Safety
    /// `to` is valid for writes of `length` bytes; the cells of so many bytes from `number` on are the caller's, were put in, and
    /// are at most all.
    unsafe fn get(&self, number: usize, to: *mut u8, length: usize) {
        let (at, first) = self.place(number, length);
        // SAFETY: `at + first` is at most the capacity, and the caller owns these cells.
        unsafe { std::ptr::copy_nonoverlapping(self.base().wrapping_add(at), to, first) };
        // SAFETY: the rest is at most what lies before `at`, and the caller owns these cells.
        unsafe { std::ptr::copy_nonoverlapping(self.base(), to.wrapping_add(first), length - first) };
    }

    fn base(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    /// Where byte `number` lives, and how many of `length` bytes come before the end of the memory.
    fn place(&self, number: usize, length: usize) -> (usize, usize) {
        let at = number & (self.capacity() - 1);
        (at, length.min(self.capacity() - at))
    }
}

/// The memory as loom watches it.
#[cfg(loom)]
struct Cells(Box<[UnsafeCell<u8>]>);

#[cfg(loom)]
impl Cells {
    fn new(capacity: usize) -> Cells {
        Cells((0..capacity).map(|_| UnsafeCell::new(0)).collect())
    }

    fn capacity(&self) -> usize {
        self.0.len()
    }

    unsafe fn put(&self, number: usize, from: *const u8, length: usize) {
        for i in 0..length {
            self.0[number.wrapping_add(i) & (self.capacity() - 1)].with_mut(|cell| {
                // SAFETY: `from` is valid by the caller's promise; loom checks that the cell is.
                unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(i), cell, 1) }
            });
        }
    }

    unsafe fn get(&self, number: usize, to: *mut u8, length: usize) {
        for i in 0..length {
            self.0[number.wrapping_add(i) & (self.capacity() - 1)].with(|cell| {
                // SAFETY: `to` is valid by the caller's promise; loom checks that the cell is.
                unsafe { std::ptr::copy_nonoverlapping(cell, to.wrapping_add(i), 1) }
            });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn put(ring: &Ring, bytes: &[u8]) -> Option<usize> {
        let piece = IoVec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the piece is `bytes`, and tests write from one thread.
        unsafe { ring.write(&[piece], || ()) }
    }

    fn get(ring: &Ring, most: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; most];
        let piece = IoVec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the piece is `bytes`, and tests read from one thread.
        let count = unsafe { ring.read(&[piece], || ()) }?;
        bytes.truncate(count);
        Some(bytes)
    }

    #[test]
    fn bytes_come_out_in_order_across_the_wrap() {
        let ring = Ring::new(8);
        assert_eq!(put(&ring, b"abcdef"), Some(6));
        assert_eq!(get(&ring, 4).unwrap(), b"abcd");
        assert_eq!(put(&ring, b"ghijklmn"), Some(6));
        assert_eq!(put(&ring, b"x"), Some(0));
        assert_eq!(get(&ring, 99).unwrap(), b"efghijkl");
        assert_eq!(get(&ring, 99).unwrap(), b"");
    }

    #[test]
    fn counters_may_wrap_around() {
        let ring = Ring::new(8);
        ring.written.store(usize::MAX - 2, Ordering::Relaxed);
        ring.taken.store(usize::MAX - 2, Ordering::Relaxed);
        assert_eq!(put(&ring, b"abcdefghi"), Some(8));
        assert_eq!(get(&ring, 99).unwrap(), b"abcdefgh");
    }

    #[test]
    fn what_was_put_in_comes_out_before_the_end() {
        let ring = Ring::new(8);
        put(&ring, b"ab");
        ring.end_writing();
        assert_eq!(get(&ring, 99).unwrap(), b"ab");
        assert_eq!(get(&ring, 99), None);
    }

    #[test]
    fn writing_to_nobody_is_refused() {
        let ring = Ring::new(8);
        ring.end_reading();
        assert_eq!(put(&ring, b"ab"), None);
    }

    #[test]
    fn a_million_bytes_cross_between_threads() {
        const TOTAL: usize = 1 << 20;
        let ring = Ring::new(1 << 10);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let bytes: Vec<u8> = (0..TOTAL).map(|i| (i % 251) as u8).collect();
                let mut at = 0;
                while at < TOTAL {
                    let end = TOTAL.min(at + 1 + at % 777);
                    match put(&ring, &bytes[at..end]).unwrap() {
                        0 => std::thread::yield_now(),
                        count => at += count,
                    }
                }
                ring.end_writing();
            });
            let mut at = 0;
            while let Some(bytes) = get(&ring, 1 + at % 555) {
                if bytes.is_empty() {
                    std::thread::yield_now();
                }
                for byte in bytes {
                    assert_eq!(byte, (at % 251) as u8, "byte {at}");
                    at += 1;
                }
            }
            assert_eq!(at, TOTAL);
        });
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test --release --lib loom_`, or `ci/test loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{Arc, atomic::AtomicUsize},
        thread,
    };

    use super::*;

    fn put(ring: &Ring, bytes: &[u8], wake: impl FnMut()) -> Option<usize> {
        let piece = IoVec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the piece is `bytes`, and one thread of the model writes.
        unsafe { ring.write(&[piece], wake) }
    }

    fn get(ring: &Ring, bytes: &mut [u8], wake: impl FnMut()) -> Option<usize> {
        let piece = IoVec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the piece is `bytes`, and one thread of the model reads.
        unsafe { ring.read(&[piece], wake) }
    }

    #[test]
    fn loom_every_byte_arrives_once_and_before_the_end() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(2));
            let writer = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut left = &b"abc"[..];
                    while !left.is_empty() {
                        match put(&ring, left, || ()).unwrap() {
                            0 => thread::yield_now(),
                            count => left = &left[count..],
                        }
                    }
                    ring.end_writing();
                }
            });
            let (mut got, mut bytes) = (0, [0; 4]);
            while let Some(count) = get(&ring, &mut bytes[got..], || ()) {
                got += count;
                if count == 0 {
                    thread::yield_now();
                }
            }
            assert_eq!(&bytes[..got], b"abc");
            writer.join().unwrap();
        });
    }

    #[test]
    fn loom_a_writer_without_room_is_woken() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(1));
            let wakes = Arc::new(AtomicUsize::new(0));
            assert_eq!(put(&ring, b"a", || ()), Some(1));
            let reader = thread::spawn({
                let (ring, wakes) = (ring.clone(), wakes.clone());
                move || {
                    let wake = || {
                        wakes.fetch_add(1, Ordering::Relaxed);
                    };
                    assert_eq!(get(&ring, &mut [0], wake), Some(1));
                }
            });
            let written = put(&ring, b"b", || ()).unwrap();
            reader.join().unwrap();
            assert!(written == 1 || wakes.load(Ordering::Relaxed) == 1, "the writer would sleep for ever");
        });
    }
}
