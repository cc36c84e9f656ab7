//! What the ranks write, line by line onto our own standard output and standard error.
//!
//! One thread reads all ranks and writes whole lines, so lines never mix, whatever their length and
//! whichever stream they come from. When the reader of our output is slow the thread waits in `write`, stops
//! reading, and the ranks wait in turn; nothing piles up here. The rest of the launcher never waits for it.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Event;
use super::lines::Lines;
pub(super) use super::writer::To;
use super::writer::Writer;

/// After the last rank's end, silence of this length on a stream that some stray process still holds open
/// ends the wait for it.
const SILENCE: Duration = Duration::from_millis(300);

/// On a terminal an unfinished line is shown after this time, since it may be a question.
const THOUGHT: Duration = Duration::from_millis(100);

/// Bytes read at once.
const PIECE: usize = 1 << 16;

/// Most that is kept of what ssh says before its rank has started.
const HELD: usize = 1 << 14;

/// One output stream of one rank.
pub(super) struct Stream {
    pub(super) rank: usize,
    pub(super) from: OwnedFd,
    pub(super) to: To,
    /// On the standard error of a rank behind ssh: what the lines that are meant for the launcher hold
    /// before their message.
    pub(super) mark: Option<Vec<u8>>,
}

/// The thread that does it.
pub(super) struct Output {
    orders: Sender<Order>,
    wake: UnixStream,
}

enum Order {
    Add(Stream),
    Finish,
}

impl Output {
    /// Starts with no streams.
    pub(super) fn start(events: Sender<Event>) -> io::Result<Self> {
        let (orders, inbox) = channel();
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let writer = Writer::new();
        thread::Builder::new().name("output".into()).spawn(move || {
            Pump { inbox, woken, writer, events, streams: Vec::new(), finishing: false }.run();
        })?;
        Ok(Self { orders, wake })
    }

    /// Takes over one more stream.
    pub(super) fn add(&self, stream: Stream) {
        self.order(Order::Add(stream));
    }

    /// All ranks are gone: [`Event::OutputDone`] follows when all that they wrote is written.
    pub(super) fn finish(&self) {
        self.order(Order::Finish);
    }

    fn order(&self, order: Order) {
        // The thread lives until it has been told to finish, and a full wake-up pipe wakes as well as
        // another byte would.
        let _ = self.orders.send(order);
        let _ = (&self.wake).write(&[0]);
    }
}

/// The thread's own state.
struct Pump {
    inbox: Receiver<Order>,
    woken: UnixStream,
    writer: Writer,
    events: Sender<Event>,
    streams: Vec<Open>,
    finishing: bool,
}

struct Open {
    stream: Stream,
    lines: Lines,
    /// What ssh said so far, until the rank has started.
    held: Option<Vec<u8>>,
    /// When to show the unfinished line.
    show_at: Option<Instant>,
}

impl Pump {
    fn run(mut self) {
        let mut buffer = vec![0; PIECE];
        loop {
            self.take_orders();
            if self.finishing && self.streams.is_empty() {
                break;
            }
            let ready = match self.wait() {
                Ok(Some(ready)) => ready,
                Ok(None) => break,
                Err(error) => {
                    self.report(error.into());
                    break;
                }
            };
            // From the back, so that a closed stream can leave without moving those still to be visited.
            for index in ready.into_iter().rev() {
                self.read(index, &mut buffer);
            }
            self.show_unfinished();
        }
        while let Some(open) = self.streams.pop() {
            self.close(open);
        }
        // Nobody may be waiting, as in `close`.
        let _ = self.events.send(Event::OutputDone);
    }

    fn take_orders(&mut self) {
        let mut bytes = [0; 64];
        while matches!((&self.woken).read(&mut bytes), Ok(1..)) {}
        for order in self.inbox.try_iter() {
            match order {
                Order::Add(stream) => {
                    let held = stream.mark.is_some().then(Vec::new);
                    self.streams.push(Open { stream, lines: Lines::default(), held, show_at: None });
                }
                Order::Finish => self.finishing = true,
            }
        }
    }

    /// The streams that have something, or `None` when nothing comes any more.
    fn wait(&self) -> Result<Option<Vec<usize>>, Errno> {
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
        fds.extend(self.streams.iter().map(|open| PollFd::new(&open.stream.from, PollFlags::IN)));
        let show_at = self.streams.iter().filter_map(|open| open.show_at).min();
        let show = show_at.map(|at| at.saturating_duration_since(Instant::now()));
        let silence = self.finishing.then_some(SILENCE);
        let limit = show.into_iter().chain(silence).min().map(|limit| {
            // Both are below a second. A nanosecond more, lest we look a moment too early.
            Timespec { tv_sec: 0, tv_nsec: i64::from(limit.subsec_nanos()).min(999_999_998) + 1 }
        });
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) if self.finishing && show.is_none() => Ok(None),
            Ok(_) => {
                let ready = fds[1..].iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
                Ok(Some(ready.map(|(index, _)| index).collect()))
            }
            Err(Errno::INTR) => Ok(Some(Vec::new())),
            Err(error) => Err(error),
        }
    }

    fn read(&mut self, index: usize, buffer: &mut [u8]) {
        let open = &mut self.streams[index];
        match rustix::io::read(&open.stream.from, &mut *buffer) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            Ok(0) | Err(_) => {
                let open = self.streams.swap_remove(index);
                self.close(open);
            }
            Ok(length) => {
                let mut out = Vec::with_capacity(length + 64);
                let Open { stream, lines, held, show_at } = open;
                lines.feed(&buffer[..length], |line| {
                    deliver(line, stream, held, &mut self.writer, &self.events, &mut out);
                });
                let to = stream.to;
                // Not where a line may turn out to be for the launcher.
                let shown = stream.mark.is_none() && self.writer.is_terminal(to);
                *show_at = (shown && !lines.unfinished().is_empty()).then(|| Instant::now() + THOUGHT);
                self.write(to, &out);
            }
        }
    }

    fn show_unfinished(&mut self) {
        let now = Instant::now();
        for index in 0..self.streams.len() {
            let Open { stream, lines, show_at, .. } = &mut self.streams[index];
            if show_at.is_some_and(|at| at <= now) {
                *show_at = None;
                let mut out = Vec::new();
                self.writer.piece(stream.rank, stream.to, &lines.take_unfinished(), &mut out);
                let to = stream.to;
                self.write(to, &out);
            }
        }
    }

    fn close(&mut self, open: Open) {
        let Open { stream, mut lines, mut held, .. } = open;
        let mut out = Vec::new();
        let line = lines.take_unfinished();
        // Of a line that has been shown the end is still due.
        if !line.is_empty() || self.writer.is_inside(stream.rank, stream.to) {
            deliver(&line, &stream, &mut held, &mut self.writer, &self.events, &mut out);
        }
        self.write(stream.to, &out);
        if stream.mark.is_some() {
            let text = held.map(|text| String::from_utf8_lossy(&text).into_owned());
            // Nobody waits when the launcher has been told to leave at once.
            let _ = self.events.send(Event::Closed { rank: stream.rank, text: text.unwrap_or_default() });
        }
    }

    fn write(&mut self, to: To, bytes: &[u8]) {
        if let Err(error) = self.writer.write(to, bytes) {
            self.report(error);
        }
    }

    fn report(&mut self, error: io::Error) {
        let _ = self.events.send(Event::OutputFailed(error));
    }
}

/// One complete line: to the output, or to the launcher when it carries the mark.
fn deliver(
    line: &[u8],
    stream: &Stream,
    held: &mut Option<Vec<u8>>,
    writer: &mut Writer,
    events: &Sender<Event>,
    out: &mut Vec<u8>,
) {
    let marked = stream.mark.as_ref().and_then(|mark| {
        let at = line.windows(mark.len()).position(|part| part == &mark[..])?;
        Some((&line[..at], &line[at + mark.len()..]))
    });
    let text = marked.map_or(line, |(before, _)| before);
    match held {
        _ if marked.is_some() && text.is_empty() => {}
        Some(held) if held.len() + text.len() < HELD => {
            held.extend_from_slice(text);
            held.push(b'\n');
        }
        Some(_) => {}
        None => writer.line(stream.rank, stream.to, text, out),
    }
    if let Some((_, message)) = marked {
        if let Some(held) = held.take() {
            // It did start, so this was no more than a greeting.
            for line in held.strip_suffix(b"\n").into_iter().flat_map(|held| held.split(|&b| b == b'\n')) {
                writer.line(stream.rank, stream.to, line, out);
            }
        }
        let message = String::from_utf8_lossy(message).into_owned();
        let _ = events.send(Event::Said { rank: stream.rank, message });
    }
}
