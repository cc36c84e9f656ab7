//! Ranks as processes that a test kills, stops, and listens to line by line.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, ExitStatus},
    sync::mpsc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use raccl_emulator::{Emulation, Layout};

use crate::support::{HANG, cables::machine, free_address, random::Random, rank_command};

/// Begins each line that a rank says to its test.
const MARK: &str = "rank says: ";

/// Called by a rank: tells the test something, in one line.
pub(crate) fn say(text: &str) {
    // The test harness may have begun the line.
    println!("\n{MARK}{}", text.replace('\n', " "));
}

/// Microseconds on a clock that all processes of the machine share.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros() as u64
}

/// A group of processes. Those that still run are killed when it is dropped.
pub(crate) struct Fleet {
    ranks: Vec<Rank>,
    /// The cables between them, which are there as long as this is.
    #[allow(dead_code, reason = "kept, not read")]
    emulation: Option<Emulation>,
    lines: mpsc::Receiver<(usize, String)>,
}

struct Rank {
    child: Child,
    said: Vec<String>,
    errors: Option<thread::JoinHandle<String>>,
    readers: Option<thread::JoinHandle<()>>,
}

/// How a rank ended.
#[derive(Debug)]
pub(crate) struct End {
    /// `None` if it had to be killed because it did not end.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) said: Vec<String>,
    /// What it printed on its standard error, for the report of a failure.
    pub(crate) errors: String,
}

impl End {
    /// Fails the test unless the rank ended well, and on its own.
    pub(crate) fn assert_well(&self, story: &str) {
        let End { status, said, errors } = self;
        let ended = status.map_or("had to be killed".to_owned(), |status| status.to_string());
        let well = status.is_some_and(|status| status.success());
        assert!(well, "{story}: {ended}\n{}\n{errors}", said.join("\n"));
    }

    /// The rest of the line that begins with `word`.
    pub(crate) fn heard(&self, word: &str) -> Option<&str> {
        self.said.iter().find_map(|line| line.strip_prefix(word)).map(str::trim_start)
    }
}

impl Fleet {
    /// Starts `size` ranks of the test `name`, joined by sockets.
    pub(crate) fn start(name: &str, size: usize, variables: &[(&str, String)]) -> Fleet {
        Fleet::start_on(None, name, size, variables)
    }

    /// Starts ranks that are machines of their own, each joined with each other by one to three emulated cables.
    pub(crate) fn start_cabled(
        random: &mut Random,
        name: &str,
        size: usize,
        variables: &[(&str, String)],
    ) -> Fleet {
        let spec = Layout::mesh().cables(1 + random.below(3)).latency_ns(2000).spec(size);
        let emulation = Emulation::create(&spec).unwrap();
        let mut fleet = Fleet::start_on(Some(&emulation), name, size, variables);
        fleet.emulation = Some(emulation);
        fleet
    }

    /// Starts ranks that are the machines of an emulation, if there is one.
    pub(crate) fn start_on(
        emulation: Option<&Emulation>,
        name: &str,
        size: usize,
        variables: &[(&str, String)],
    ) -> Fleet {
        let coordinator = free_address();
        let commands = (0..size).map(|rank| {
            let mut command = rank_command(name, rank, size, &coordinator);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            command.envs(emulation.map(|emulation| machine(emulation, rank)).into_iter().flatten());
            command
        });
        Fleet::run(commands.collect())
    }

    /// Starts ranks by commands of the test's own, in rank order.
    pub(crate) fn run(commands: Vec<Command>) -> Fleet {
        let (line, lines) = mpsc::channel();
        let ranks = commands.into_iter().enumerate().map(|(rank, mut command)| {
            let mut child = command.spawn().unwrap();
            let stdout = BufReader::new(child.stdout.take().unwrap());
            let mut stderr = child.stderr.take().unwrap();
            let line = line.clone();
            let readers = thread::spawn(move || {
                for text in stdout.lines().map_while(Result::ok) {
                    if let Some(text) = text.strip_prefix(MARK) {
                        let _ = line.send((rank, text.to_owned()));
                    }
                }
            });
            let errors = thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = stderr.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            });
            Rank { child, said: Vec::new(), errors: Some(errors), readers: Some(readers) }
        });
        Fleet { ranks: ranks.collect(), lines, emulation: None }
    }

    pub(crate) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Waits until every one of `ranks` has said a line that begins with `word`.
    pub(crate) fn wait_for(&mut self, word: &str, ranks: &[usize]) {
        let until = Instant::now() + HANG;
        while let Some(&missing) = ranks.iter().find(|&&rank| !self.has_said(rank, word)) {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((rank, line)) => self.ranks[rank].said.push(line),
                Err(_) => self.give_up(&format!("rank {missing} does not say {word:?}")),
            }
        }
    }

    /// Waits until a rank has ended, while the others go on.
    pub(crate) fn wait_for_end(&mut self, rank: usize) {
        let until = Instant::now() + HANG;
        while self.ranks[rank].child.try_wait().unwrap().is_none() {
            if Instant::now() >= until {
                self.give_up(&format!("rank {rank} does not end"));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn has_said(&self, rank: usize, word: &str) -> bool {
        self.ranks[rank].said.iter().any(|line| line.starts_with(word))
    }

    /// Kills a rank; the time just before.
    pub(crate) fn kill(&mut self, rank: usize) -> u64 {
        let at = now();
        self.ranks[rank].child.kill().unwrap();
        at
    }

    /// Sends a signal by its name, such as `STOP`.
    pub(crate) fn signal(&self, rank: usize, signal: &str) {
        let pid = self.ranks[rank].child.id();
        let status = Command::new("sh").arg("-c").arg(format!("kill -{signal} {pid}")).status().unwrap();
        assert!(status.success(), "cannot send {signal} to rank {rank}");
    }

    /// Waits for all ranks to end. One that takes longer than `bound` is killed, and has no status.
    pub(crate) fn finish(mut self, bound: Duration) -> Vec<End> {
        self.end(bound)
    }

    fn end(&mut self, bound: Duration) -> Vec<End> {
        let until = Instant::now() + bound;
        let mut statuses: Vec<Option<ExitStatus>> = vec![None; self.size()];
        while statuses.iter().any(Option::is_none) && Instant::now() < until {
            for (rank, status) in self.ranks.iter_mut().zip(&mut statuses) {
                if status.is_none() {
                    *status = rank.child.try_wait().unwrap();
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
        for (rank, status) in self.ranks.iter_mut().zip(&statuses) {
            if status.is_none() {
                let _ = rank.child.kill();
                let _ = rank.child.wait();
            }
        }
        let errors: Vec<String> = self
            .ranks
            .iter_mut()
            .map(|rank| {
                let _ = rank.readers.take().map(thread::JoinHandle::join);
                rank.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default()
            })
            .collect();
        while let Ok((rank, line)) = self.lines.try_recv() {
            self.ranks[rank].said.push(line);
        }
        let ranks = self.ranks.iter_mut().zip(statuses).zip(errors);
        ranks
            .map(|((rank, status), errors)| End { status, said: std::mem::take(&mut rank.said), errors })
            .collect()
    }

    fn give_up(&mut self, reason: &str) -> ! {
        let ends = self.end(Duration::ZERO);
        panic!("{reason}: {ends:#?}");
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // They have usually ended long ago.
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

/// An error with all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text
}
