//! SIGTERM and SIGINT while there is something to put away before the process ends.
//!
//! The handler writes to a pipe, and a thread that reads there does what is to be done and then raises the signal again, which
//! by then has its default effect. A second signal has it at once. A signal for which the program has a handler of its own, or
//! which it ignores, is left alone.
//!
//! `PENDING` is set before `WATCHED` is looked at by the handler, and `WATCHED` is cleared before `PENDING` is looked at by
//! whoever stops watching, so a signal that comes at that moment is seen by one of them at least.

use std::{
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::fd::AsRawFd,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI32, Ordering},
    },
    thread,
    time::Duration,
};

use super::waker::keep_errno;

/// The signals that ask a process to end.
const SIGNALS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];
/// What the handler writes, and what ends the thread.
const SIGNAL: u8 = b's';
const QUIT: u8 = b'q';
/// How long a process that exits by itself waits for the signal that is about to end it.
const EXIT_WAITS: Duration = Duration::from_millis(1100);

/// The first signal that came; 0 if none has.
static PENDING: AtomicI32 = AtomicI32::new(0);
static WATCHED: AtomicBool = AtomicBool::new(false);
/// The process that installed the handler: a child of it has the handler too, but not the thread.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// Where the handler writes; never closed.
static BELL: AtomicI32 = AtomicI32::new(-1);
static PIPE: OnceLock<(PipeReader, PipeWriter)> = OnceLock::new();

/// From now on, when one of the signals comes that nobody else handles, `end` is called with its name on a thread of its own,
/// and then the signal ends the process. To be called once before [`unwatch`] is.
pub(crate) fn watch(end: fn(&'static str)) -> io::Result<()> {
    let reader = prepare()?.try_clone()?;
    thread::Builder::new().name("raccl-signals".to_owned()).spawn(move || listen(reader, end))?;
    // SAFETY: takes no argument and has no precondition.
    OWNER.store(unsafe { libc::getpid() }, Ordering::SeqCst);
    WATCHED.store(true, Ordering::SeqCst);
    let handler: extern "C" fn(libc::c_int) = on_signal;
    for signal in SIGNALS {
        if disposition(signal)? == libc::SIG_DFL {
            set_disposition(signal, handler as libc::sighandler_t)?;
        }
    }
    Ok(())
}

/// As it was before [`watch`]. A signal that came meanwhile ends the process.
pub(crate) fn unwatch() {
    let handler: extern "C" fn(libc::c_int) = on_signal;
    for signal in SIGNALS {
        // Unless the program has put its own there since. Neither call can fail for these signals.
        if disposition(signal).is_ok_and(|found| found == handler as libc::sighandler_t) {
            let _ = set_disposition(signal, libc::SIG_DFL);
        }
    }
    WATCHED.store(false, Ordering::SeqCst);
    let pending = PENDING.load(Ordering::SeqCst);
    if pending != 0 {
        die(pending);
    }
    if let Some((_, writer)) = PIPE.get() {
        // A pipe with room for thousands of bytes, into which a few are written.
        let _ = (&*writer).write_all(&[QUIT]);
    }
}

fn prepare() -> io::Result<&'static PipeReader> {
    if PIPE.get().is_none() {
        let (reader, writer) = io::pipe()?;
        // Whoever comes second has made a pipe for nothing.
        let (_, writer) = PIPE.get_or_init(|| (reader, writer));
        BELL.store(writer.as_raw_fd(), Ordering::SeqCst);
        // SAFETY: the function may be called at any exit: it only sleeps.
        if unsafe { libc::atexit(at_exit) } != 0 {
            return Err(io::Error::other("no more functions can be called at exit"));
        }
    }
    PIPE.get().map(|(reader, _)| reader).ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn listen(mut reader: PipeReader, end: fn(&'static str)) {
    let mut byte = [0];
    while let Err(error) = reader.read_exact(&mut byte) {
        if error.kind() != io::ErrorKind::Interrupted {
            // The other end is never closed.
            return;
        }
    }
    if byte == [SIGNAL] {
        let signal = PENDING.load(Ordering::SeqCst);
        end(name(signal));
        die(signal);
    }
}

/// Only what may be done in a signal handler.
extern "C" fn on_signal(signal: libc::c_int) {
    let first = PENDING.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    // SAFETY: takes no argument and has no precondition.
    let here = unsafe { libc::getpid() } == OWNER.load(Ordering::SeqCst);
    if first && here && WATCHED.load(Ordering::SeqCst) {
        keep_errno(|| {
            let bytes = [SIGNAL];
            // SAFETY: the array is valid for reads of its length.
            unsafe { libc::write(BELL.load(Ordering::SeqCst), bytes.as_ptr().cast(), bytes.len()) };
        });
    } else {
        strike(signal);
    }
}

/// A process that ends by itself while its devices are being freed is to free them all.
extern "C" fn at_exit() {
    // SAFETY: takes no argument and has no precondition.
    let here = unsafe { libc::getpid() } == OWNER.load(Ordering::SeqCst);
    if here && PENDING.load(Ordering::SeqCst) != 0 && WATCHED.load(Ordering::SeqCst) {
        thread::sleep(EXIT_WAITS);
    }
}

/// Ends the process by a signal.
fn die(signal: libc::c_int) -> ! {
    strike(signal);
    // It was sent to this thread and is not blocked here.
    // SAFETY: ends the process at once, and has no precondition.
    unsafe { libc::_exit(128 + signal) }
}

/// Sends this thread a signal with its default effect; inside a handler for the same signal that comes at its end.
fn strike(signal: libc::c_int) {
    // It cannot fail for a signal that exists.
    let _ = set_disposition(signal, libc::SIG_DFL);
    // SAFETY: a signal set is plain data, for which zeroes are a value.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a local variable.
    unsafe { libc::sigemptyset(&raw mut set) };
    // SAFETY: as above.
    unsafe { libc::sigaddset(&raw mut set, signal) };
    // SAFETY: the set is valid, and the previous one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
    // SAFETY: takes no pointer.
    unsafe { libc::raise(signal) };
}

fn disposition(signal: libc::c_int) -> io::Result<libc::sighandler_t> {
    // SAFETY: plain data, for which zeroes are a value.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is set, and what is found is written to a local variable.
    match unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut found) } {
        0 => Ok(found.sa_sigaction),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_disposition(signal: libc::c_int, handler: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: plain data, for which zeroes are a value: no signal blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    // System calls of the program go on where they can.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action is a local variable; its handler is a constant or a function that does only what a handler may.
    match unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn name(signal: libc::c_int) -> &'static str {
    if signal == libc::SIGINT { "SIGINT" } else { "SIGTERM" }
}
