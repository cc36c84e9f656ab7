//! A trace of all calls in Chrome's format, which chrome://tracing and Perfetto show as a time line.
//!
//! The file is a JSON array of events and is one at any moment: each write puts events where the closing bracket stands and
//! closes the array again, so a process that ends in whatever way leaves a valid file, without what was not written yet.
//! Events are collected in memory and written when there are many, once a second while calls end, when the group fails and
//! when it is left.
#![forbid(unsafe_code)]

use std::{
    cell::Cell,
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use super::recorder::Words;

/// Bytes of events that are kept until they are written.
const FULL: usize = 256 << 10;

/// How long events are kept while others come.
const EVERY: Duration = Duration::from_secs(1);

/// The end of the array.
const CLOSE: &[u8] = b"\n]\n";

/// One rank's trace.
pub(crate) struct Trace {
    path: PathBuf,
    /// None after a write has failed.
    file: Option<File>,
    rank: usize,
    /// Where the closing bracket stands.
    end: u64,
    /// Events that are not written yet, each with a comma and a newline before it.
    pending: Vec<u8>,
    written: Instant,
    /// A moment by both clocks: ranks have the time of day in common, as far as they have.
    origin: (Instant, Duration),
}

/// An event of Chrome's format.
#[derive(Serialize)]
struct Event<'a, A: Serialize> {
    name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    cat: &'a str,
    ph: &'a str,
    /// In microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: usize,
    tid: u64,
    args: A,
}

/// What a call's event shows when it is clicked.
#[derive(Serialize)]
struct Details<'a> {
    call: &'a str,
    communicator: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<&'a str>,
    /// Bytes sent and received.
    bytes: u64,
    failed: bool,
}

#[derive(Serialize)]
struct Name {
    name: String,
}

impl Trace {
    /// Begins a file of its own for a rank: the path itself in a group of one, otherwise with the rank in its name.
    pub(crate) fn create(path: &Path, rank: usize, size: usize) -> io::Result<Trace> {
        let path = if size == 1 { path.to_owned() } else { of_rank(path, rank) };
        let mut file = File::create(&path)?;
        let now = Instant::now();
        let day = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = Name { name: format!("rank {rank} of {size}") };
        let event = Event {
            name: "process_name",
            cat: "",
            ph: "M",
            ts: None,
            dur: None,
            pid: rank,
            tid: 0,
            args: name,
        };
        let mut first = b"[\n".to_vec();
        serde_json::to_writer(&mut first, &event)?;
        let end = first.len() as u64;
        first.extend_from_slice(CLOSE);
        file.write_all(&first)?;
        Ok(Trace { path, file: Some(file), rank, end, pending: Vec::new(), written: now, origin: (now, day) })
    }

    /// Adds a call that ends now.
    pub(super) fn add(&mut self, begun: Instant, words: &Words, communicator: u32, bytes: u64, failed: bool) {
        if self.file.is_none() {
            return;
        }
        let now = Instant::now();
        let (origin, day) = self.origin;
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let event = Event {
            name: words.name,
            cat: if words.sequence.is_some() { "collective" } else { "message" },
            ph: "X",
            ts: Some(micros(day + begun.saturating_duration_since(origin))),
            dur: Some(micros(now.saturating_duration_since(begun))),
            pid: self.rank,
            tid: thread_number(),
            args: Details {
                call: &words.call,
                communicator,
                sequence: words.sequence,
                algorithm: words.algorithm.map(|algorithm| algorithm.name()),
                bytes,
                failed,
            },
        };
        let before = self.pending.len();
        self.pending.extend_from_slice(b",\n");
        if let Err(error) = serde_json::to_writer(&mut self.pending, &event) {
            // Numbers and strings always have a form; if not, the event is left out whole.
            self.pending.truncate(before);
            tracing::warn!(%error, "an event of the trace cannot be encoded");
        }
        if self.pending.len() >= FULL || now.saturating_duration_since(self.written) >= EVERY {
            self.flush();
        }
    }

    /// Writes what was collected. After an error, which is logged, the trace ends.
    pub(super) fn flush(&mut self) {
        self.written = Instant::now();
        let Some(file) = self.file.as_mut().filter(|_| !self.pending.is_empty()) else { return };
        let events = self.pending.len() as u64;
        self.pending.extend_from_slice(CLOSE);
        let result = file.seek(SeekFrom::Start(self.end)).and_then(|_| file.write_all(&self.pending));
        self.pending.clear();
        match result {
            Ok(()) => self.end += events,
            Err(error) => {
                tracing::warn!(rank = self.rank, file = %self.path.display(), %error, "the trace ends here");
                // What is there may end inside an event; up to the last good one it is whole.
                if let Some(mut file) = self.file.take()
                    && let Err(error) = file
                        .set_len(self.end)
                        .and_then(|()| file.seek(SeekFrom::Start(self.end)))
                        .and_then(|_| file.write_all(CLOSE))
                {
                    tracing::warn!(rank = self.rank, %error, "the trace's last line is damaged");
                }
            }
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.flush();
    }
}

/// `trace.json` becomes `trace.rank3.json`.
fn of_rank(path: &Path, rank: usize) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".rank{rank}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// A small number for this thread.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: Cell<u64> = const { Cell::new(0) };
    }
    OWN.with(|own| {
        if own.get() == 0 {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        own.get()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::*;

    fn words(call: &str) -> Words {
        Words { sequence: Some(7), call: call.to_owned(), algorithm: None, name: "barrier" }
    }

    fn events(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).expect("the file is there");
        serde_json::from_str(&text).expect("valid JSON")
    }

    /// A path of this test alone.
    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("raccl-trace-{}-{name}.json", std::process::id()))
    }

    #[test]
    fn the_file_is_valid_at_every_moment() {
        let path = path("valid");
        let mut trace = Trace::create(&path, 0, 1).expect("writable");
        assert_eq!(events(&path).len(), 1);
        for count in 0..50 {
            trace.add(Instant::now(), &words("\"quoted\" \\ \n"), 0, 12, false);
            if count % 7 == 0 {
                trace.flush();
            }
            let written = events(&path).len();
            assert!((1..=count + 2).contains(&written));
        }
        drop(trace);
        let events = events(&path);
        assert_eq!(events.len(), 51);
        assert_eq!(
            (&events[50]["ph"], &events[50]["args"]["sequence"]),
            (&Value::from("X"), &Value::from(7))
        );
        assert_eq!(events[50]["args"]["call"], "\"quoted\" \\ \n");
        fs::remove_file(path).expect("removable");
    }

    #[test]
    fn many_events_are_written_before_the_end() {
        let path = path("many");
        let mut trace = Trace::create(&path, 0, 1).expect("writable");
        for _ in 0..5000 {
            trace.add(Instant::now(), &words("barrier"), 0, 0, false);
        }
        assert!(events(&path).len() > 1000 && trace.pending.len() < FULL);
        drop(trace);
        assert_eq!(events(&path).len(), 5001);
        fs::remove_file(path).expect("removable");
    }

    #[test]
    fn each_rank_has_a_file_of_its_own() {
        for (given, rank_3) in [
            ("trace.json", "trace.rank3.json"),
            ("/a/b.c/trace", "/a/b.c/trace.rank3"),
            ("x.y.json", "x.y.rank3.json"),
        ] {
            assert_eq!(of_rank(Path::new(given), 3), Path::new(rank_3));
        }
        assert!(Trace::create(Path::new("/no/such/folder/trace.json"), 0, 1).is_err());
    }
}
