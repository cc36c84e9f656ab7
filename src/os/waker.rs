//! Waking a thread that sleeps in `poll`, at no cost while it is awake.
//!
//! The sleeper and its wakers run this protocol:
//!
//! ```text
//! sleeper                              waker
//! parked = true                        publish something
//! fence                                fence
//! look at everything once more         parked was true? -> set it false, write to the descriptor
//! nothing? poll the descriptor
//! parked = false, empty the descriptor
//! ```
//! The two fences order "parked, then look" against "publish, then parked?": at least one side sees the other, so either the
//! sleeper finds what was published or the waker finds it parked. A waker that is late may write after the sleeper has woken
//! for another reason; the next sleep then ends early, which is harmless.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// A descriptor that becomes readable when another thread has something for the one that sleeps on it. One thread at a time
/// may be between [`prepare`](Waker::prepare) and [`finish`](Waker::finish); any number may wake it.
pub(crate) struct Waker {
    parked: Parked,
    bell: Bell,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        Ok(Waker { parked: Parked::new(), bell: Bell::new()? })
    }

    /// Announces that the calling thread is about to sleep. It has to look once more at everything it could be woken for, and
    /// may then poll [`fd`](Waker::fd).
    pub(crate) fn prepare(&self) {
        self.parked.prepare();
    }

    /// Ends what [`prepare`](Waker::prepare) began, whether the thread slept or not.
    pub(crate) fn finish(&self) {
        self.parked.finish();
        self.bell.silence();
    }

    /// Wakes the sleeper if there is one. What it shall find must have been published before. Costs a fence and a load while
    /// nobody sleeps. Safe in a signal handler.
    pub(crate) fn wake(&self) {
        if self.parked.claim() {
            keep_errno(|| self.bell.ring());
        }
    }

    /// Whether a thread is about to sleep or sleeps, and nobody has woken it.
    #[cfg(test)]
    pub(crate) fn is_parked(&self) -> bool {
        self.parked.0.load(Ordering::Relaxed)
    }

    /// The descriptor to poll for reading.
    pub(crate) fn fd(&self) -> RawFd {
        self.bell.fd()
    }
}

/// The protocol without the descriptor.
struct Parked(AtomicBool);

impl Parked {
    fn new() -> Parked {
        Parked(AtomicBool::new(false))
    }

    fn prepare(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn finish(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// True for exactly one of the wakers that find the sleeper parked.
    fn claim(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }
}

/// An eventfd: one descriptor, and one read empties it.
#[cfg(target_os = "linux")]
struct Bell(OwnedFd);

#[cfg(target_os = "linux")]
impl Bell {
    fn new() -> io::Result<Bell> {
        // SAFETY: eventfd takes no pointer.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above just returned this descriptor, and nobody else knows it.
        Ok(Bell(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn ring(&self) {
        // The only failure is a full counter, and then the descriptor is readable already.
        write(self.fd(), &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        read(self.fd(), &mut [0; 8]);
    }

    fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A pipe: the read end is polled, the write end rung.
#[cfg(not(target_os = "linux"))]
struct Bell {
    reader: OwnedFd,
    writer: OwnedFd,
}

#[cfg(not(target_os = "linux"))]
impl Bell {
    fn new() -> io::Result<Bell> {
        let mut ends = [0; 2];
        // SAFETY: pipe writes two descriptors to the array.
        if unsafe { libc::pipe(ends.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above just returned this descriptor, and nobody else knows it.
        let reader = unsafe { OwnedFd::from_raw_fd(ends[0]) };
        // SAFETY: as above.
        let writer = unsafe { OwnedFd::from_raw_fd(ends[1]) };
        for end in [&reader, &writer] {
            set_flags(end.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK)?;
            set_flags(end.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC)?;
        }
        Ok(Bell { reader, writer })
    }

    fn ring(&self) {
        // The only failure is a full pipe, and then the other end is readable already.
        write(self.writer.as_raw_fd(), &[1]);
    }

    fn silence(&self) {
        let mut bytes = [0; 64];
        while read(self.reader.as_raw_fd(), &mut bytes) == bytes.len() as isize {}
    }

    fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }
}

#[cfg(not(target_os = "linux"))]
fn set_flags(fd: RawFd, command: libc::c_int, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: both set commands take an int and no pointer.
    match unsafe { libc::fcntl(fd, command, flags) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Does something after which `errno` is as it was: a signal handler may have interrupted somebody who is about to read it.
pub(super) fn keep_errno(body: impl FnOnce()) {
    #[cfg(target_os = "linux")]
    // SAFETY: takes no argument and has no precondition; the result is this thread's own variable.
    let errno = unsafe { libc::__errno_location() };
    #[cfg(not(target_os = "linux"))]
    // SAFETY: as above.
    let errno = unsafe { libc::__error() };
    // SAFETY: the variable lives as long as the thread, and no reference to it exists.
    let before = unsafe { errno.read() };
    body();
    // SAFETY: as above.
    unsafe { errno.write(before) };
}

fn write(fd: RawFd, bytes: &[u8]) -> isize {
    // SAFETY: `bytes` is valid for reads of its length.
    unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) }
}

fn read(fd: RawFd, bytes: &mut [u8]) -> isize {
    // SAFETY: `bytes` is valid for writes of its length.
    unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len()) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{sync::Arc, sync::atomic::AtomicU64, time::Duration};

    use super::*;
    use crate::os::{PollFd, poll};

    fn rings(waker: &Waker) -> bool {
        poll(&mut [PollFd::readable(waker.fd())], Some(Duration::ZERO)).unwrap() == 1
    }

    #[test]
    fn only_a_parked_thread_is_woken_and_only_once() {
        let waker = Waker::new().unwrap();
        waker.wake();
        assert!(!rings(&waker));

        waker.prepare();
        assert!(!rings(&waker));
        waker.wake();
        waker.wake();
        assert!(rings(&waker));
        waker.finish();
        assert!(!rings(&waker));
        waker.wake();
        assert!(!rings(&waker));
    }

    #[test]
    fn no_wake_is_lost_between_two_threads() {
        const ROUNDS: u64 = 2000;
        let waker = Arc::new(Waker::new().unwrap());
        let published = Arc::new(AtomicU64::new(0));
        let seen = Arc::new(AtomicU64::new(0));
        let sleeper = std::thread::spawn({
            let (waker, published, seen) = (waker.clone(), published.clone(), seen.clone());
            move || {
                for round in 1..=ROUNDS {
                    while published.load(Ordering::Acquire) < round {
                        waker.prepare();
                        if published.load(Ordering::Acquire) < round {
                            poll(&mut [PollFd::readable(waker.fd())], None).unwrap();
                        }
                        waker.finish();
                    }
                    seen.store(round, Ordering::Release);
                }
            }
        });
        for round in 1..=ROUNDS {
            published.store(round, Ordering::Release);
            waker.wake();
            while seen.load(Ordering::Acquire) < round {
                std::thread::yield_now();
            }
        }
        sleeper.join().unwrap();
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test --release --lib loom_`, or `ci/test loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        thread,
    };

    use super::Parked;

    /// The descriptor is modelled as a flag; a sleeper that neither saw the data nor is rung would sleep for ever.
    #[test]
    fn loom_a_sleeper_sees_the_data_or_is_rung() {
        loom::model(|| {
            let parked = Arc::new(Parked::new());
            let bell = Arc::new(AtomicBool::new(false));
            let data = Arc::new(AtomicBool::new(false));
            let waker = thread::spawn({
                let (parked, bell, data) = (parked.clone(), bell.clone(), data.clone());
                move || {
                    data.store(true, Ordering::Release);
                    if parked.claim() {
                        bell.store(true, Ordering::Release);
                    }
                }
            });
            parked.prepare();
            let seen = data.load(Ordering::Acquire);
            waker.join().unwrap();
            assert!(seen || bell.load(Ordering::Acquire), "the sleeper would never wake");
            parked.finish();
        });
    }

    #[test]
    fn loom_two_wakers_ring_once_at_most_and_never_not_at_all() {
        loom::model(|| {
            let parked = Arc::new(Parked::new());
            let data = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            parked.prepare();
            let wakers = [0, 1].map(|which| {
                let (parked, data) = (parked.clone(), data.clone());
                thread::spawn(move || {
                    data[which].store(true, Ordering::Release);
                    parked.claim()
                })
            });
            let seen = data.iter().any(|data| data.load(Ordering::Acquire));
            let rung = wakers.map(|waker| waker.join().unwrap()).into_iter().filter(|&rung| rung).count();
            assert!(rung <= 1, "two rings for one sleep");
            assert!(seen || rung == 1, "the sleeper would never wake");
        });
    }
}
