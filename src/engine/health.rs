//! What has gone wrong, who has left, and where the others say they are.
//!
//! The monitor's thread writes here; callers read. The flag of the [`Alarm`] is the only thing that a healthy call looks at (one
//! relaxed load): zero means that nothing has happened since somebody last looked. Everything else is behind a mutex that is
//! held for a few instructions. The flag is set after the mutex's content (release) and whoever sees it takes the mutex, so no
//! more ordering is needed.
#![forbid(unsafe_code)]

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use crate::{
    bootstrap::{
        alarm::{ABORT, Alarm, FAILED, NEWS},
        watcher::{CauseKind, MESSAGE_LIMIT, RemoteCause, Status, Watcher},
    },
    error::{Cause, Error},
    link::{LinkKind, Sender, verbs::Cables},
    os::Waker,
};

/// Of what a peer says about where it is, so much is kept until somebody looks.
pub(crate) const STATUSES: usize = 16;

/// The first cause of a failure, independent of the call that reports it.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    PeerLost {
        peer: usize,
        reason: String,
        source: Option<Cause>,
    },
    Timeout {
        peer: usize,
        link: LinkKind,
        waited: Duration,
        bytes: u64,
        detail: String,
    },
    Mismatch {
        peer: usize,
        sequence: u64,
        mine: String,
        theirs: String,
    },
    /// The calls are the same but earlier ones were not.
    Diverged {
        peer: usize,
        comm: u32,
        sequence: u64,
        call: String,
    },
    Aborted,
    Protocol {
        peer: usize,
        link: LinkKind,
        reason: String,
    },
    Panicked {
        message: String,
    },
    System {
        what: &'static str,
        source: Cause,
    },
    Remote(RemoteCause),
}

/// Shared by the engine, the monitor and every call.
pub(crate) struct Health {
    rank: usize,
    alarm: Arc<Alarm>,
    news: Mutex<News>,
    answered: Condvar,
    senders: Arc<[Option<Sender>]>,
}

struct News {
    failure: Option<Failure>,
    /// The last calls of this rank when the failure was seen.
    record: Option<String>,
    /// The other ranks have been told of the failure.
    announced: bool,
    departed: Vec<bool>,
    answers: Vec<Option<Vec<u64>>>,
    /// What each peer says has arrived through its cables; all there is once it has ended.
    arrived: Vec<Arrived>,
    statuses: Vec<(usize, Status)>,
}

/// What is known of a peer's end of the cables to it.
#[derive(Debug, Clone, Default)]
struct Arrived {
    packets: Vec<u64>,
    ended: bool,
}

impl Health {
    pub(crate) fn new(rank: usize, waker: Arc<Waker>, senders: Arc<[Option<Sender>]>) -> Health {
        let size = senders.len();
        let news = News {
            failure: None,
            record: None,
            announced: false,
            departed: vec![false; size],
            answers: vec![None; size],
            arrived: vec![Arrived::default(); size],
            statuses: Vec::new(),
        };
        Health {
            rank,
            alarm: Arc::new(Alarm::new(waker)),
            news: Mutex::new(news),
            answered: Condvar::new(),
            senders,
        }
    }

    /// Zero when all is well: the one load that a healthy call pays.
    pub(crate) fn flag(&self) -> u32 {
        self.alarm.flag.load(Ordering::Relaxed)
    }

    /// True once nothing more can be called.
    pub(crate) fn has_failed(&self) -> bool {
        self.flag() & (FAILED | ABORT) != 0
    }

    /// The first cause as the error of `operation`, if the group has failed.
    pub(crate) fn error(&self, operation: &'static str) -> Option<Error> {
        if !self.has_failed() {
            return None;
        }
        self.admit_abort();
        let news = self.news.lock();
        let record = news.record.as_deref().unwrap_or_default();
        news.failure.as_ref().map(|failure| failure.error_after(operation, self.rank, record))
    }

    /// Keeps `failure` if it is the first, and says whether it is.
    pub(crate) fn fail(&self, failure: Failure) -> bool {
        let mut news = self.news.lock();
        let first = news.failure.is_none();
        if first {
            news.failure = Some(failure);
            self.alarm.flag.fetch_or(FAILED, Ordering::Release);
        }
        drop(news);
        self.answered.notify_all();
        self.alarm.waker.wake();
        first
    }

    /// A rung alarm becomes the failure that it stands for, unless there was one before.
    fn admit_abort(&self) {
        if self.flag() & FAILED != 0 {
            return;
        }
        let by = self.alarm.aborted_by();
        let cause = |message| RemoteCause { origin: by, kind: CauseKind::Aborted, message };
        self.fail(match by == self.rank {
            true => Failure::Aborted,
            false => Failure::Remote(cause(format!("aborted by rank {by}"))),
        });
    }

    /// Keeps the last calls of this rank, if nobody has yet, for the errors that report a failure.
    pub(crate) fn note(&self, record: impl FnOnce() -> String) {
        if self.news.lock().record.is_none() {
            let record = record();
            self.news.lock().record.get_or_insert(record);
        }
    }

    /// The first cause.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.news.lock().failure.clone()
    }

    /// The first cause, once: for the one who tells the other ranks.
    pub(crate) fn announce(&self) -> Option<Failure> {
        let mut news = self.news.lock();
        if news.announced {
            return None;
        }
        news.announced = news.failure.is_some();
        news.failure.clone()
    }

    /// Waits until somebody has recorded a failure, or the time is up.
    pub(crate) fn wait_failure(&self, until: Instant) {
        let mut news = self.news.lock();
        while news.failure.is_none() && !self.answered.wait_until(&mut news, until).timed_out() {}
    }

    /// Waits until peers have told where they are: false if the group has failed or the time is up, however much they tell.
    pub(crate) fn wait_news(&self, until: Instant) -> bool {
        let mut news = self.news.lock();
        while news.failure.is_none() && news.statuses.is_empty() {
            if self.answered.wait_until(&mut news, until).timed_out() {
                break;
            }
        }
        news.failure.is_none() && !news.statuses.is_empty() && Instant::now() < until
    }

    /// True once the peer has said goodbye.
    pub(crate) fn departed(&self, peer: usize) -> bool {
        self.news.lock().departed[peer]
    }

    /// The peers that have said goodbye and are no longer there.
    pub(crate) fn gone(&self) -> Vec<usize> {
        let news = self.news.lock();
        (0..news.departed.len()).filter(|&peer| news.departed[peer] && news.arrived[peer].ended).collect()
    }

    /// What peers have told since the last call, and clears the flag for it.
    pub(crate) fn take_statuses(&self) -> Vec<(usize, Status)> {
        let mut news = self.news.lock();
        self.alarm.flag.fetch_and(!NEWS, Ordering::Relaxed);
        std::mem::take(&mut news.statuses)
    }

    /// Waits until `peer` has answered our goodbye, the group has failed, or the time is up.
    pub(crate) fn wait_answer(&self, peer: usize, until: Instant) -> Option<Vec<u64>> {
        let mut news = self.news.lock();
        loop {
            if let Some(sent) = &news.answers[peer] {
                return Some(sent.clone());
            }
            if news.failure.is_some() || self.answered.wait_until(&mut news, until).timed_out() {
                return news.answers[peer].clone();
            }
        }
    }

    /// Waits until `peer` has said that so many packets have arrived through its cables, or needs none any more, or the time is
    /// up. False if it has to be asked again.
    pub(crate) fn wait_arrived(&self, peer: usize, sent: &[u64], until: Instant) -> bool {
        let mut news = self.news.lock();
        loop {
            let Arrived { packets, ended } = &news.arrived[peer];
            // Both count modulo 2^32.
            let is_there =
                |(arrived, sent): (&u64, &u64)| (arrived.wrapping_sub(*sent) as u32).cast_signed() >= 0;
            let all = packets.len() == sent.len() && packets.iter().zip(sent).all(is_there);
            if *ended || all || news.failure.is_some() {
                return true;
            }
            if self.answered.wait_until(&mut news, until).timed_out() {
                return false;
            }
        }
    }
}

impl Watcher for Health {
    fn goodbye(&self, peer: usize) -> Vec<u64> {
        let sent = self.senders[peer].as_ref().map_or_else(Vec::new, Sender::close);
        self.news.lock().departed[peer] = true;
        self.alarm.flag.fetch_or(NEWS, Ordering::Release);
        self.alarm.waker.wake();
        sent
    }

    fn goodbye_answered(&self, peer: usize, sent: Vec<u64>) {
        self.news.lock().answers[peer] = Some(sent);
        self.answered.notify_all();
    }

    fn count_arrived(&self, peer: usize) -> Vec<u64> {
        self.senders[peer].as_ref().and_then(Sender::cables).map_or_else(Vec::new, Cables::arrived)
    }

    fn arrived(&self, peer: usize, packets: Vec<u64>) {
        self.news.lock().arrived[peer].packets = packets;
        self.answered.notify_all();
    }

    fn ended(&self, peer: usize) {
        self.news.lock().arrived[peer].ended = true;
        self.answered.notify_all();
    }

    fn failed(&self, _peer: usize, cause: RemoteCause) {
        self.fail(Failure::Remote(cause));
    }

    fn lost(&self, peer: usize, reason: String) {
        self.fail(Failure::PeerLost { peer, reason, source: None });
    }

    fn alarm(&self) -> Arc<Alarm> {
        Arc::clone(&self.alarm)
    }

    fn aborted(&self) -> Option<RemoteCause> {
        if self.flag() & ABORT == 0 {
            return None;
        }
        self.admit_abort();
        // Not announced by that: whoever closes the group before the others have been told tells them too.
        let failure = self.news.lock().failure.clone();
        failure.map(|failure| failure.cause(self.rank, "abort"))
    }

    fn status(&self, peer: usize, status: Status) {
        let mut news = self.news.lock();
        // The latest of each peer: one that floods pushes out its own.
        if news.statuses.iter().filter(|(from, _)| *from == peer).count() >= STATUSES
            && let Some(oldest) = news.statuses.iter().position(|(from, _)| *from == peer)
        {
            news.statuses.remove(oldest);
        }
        news.statuses.push((peer, status));
        drop(news);
        self.answered.notify_all();
        self.alarm.flag.fetch_or(NEWS, Ordering::Release);
        self.alarm.waker.wake();
    }
}

impl Failure {
    /// The failure as `operation` on `rank` reports it, without the calls before it.
    pub(crate) fn error(&self, operation: &'static str, rank: usize) -> Error {
        self.error_after(operation, rank, "")
    }

    /// The failure as `operation` on `rank` reports it. `record`: the last calls of this rank, if they are known.
    fn error_after(&self, operation: &'static str, rank: usize, record: &str) -> Error {
        let record = || record.to_owned();
        match self.clone() {
            Failure::PeerLost { peer, reason, source } => {
                Error::PeerLost { operation, rank, peer, reason, detail: record(), source }
            }
            Failure::Timeout { peer, link, waited, bytes, mut detail } => {
                if !record().is_empty() {
                    detail = format!("{detail}; {}", record());
                }
                Error::Timeout { operation, rank, peer, link, waited, bytes, detail }
            }
            Failure::Mismatch { peer, sequence, mine, theirs } => {
                Error::Mismatch { rank, peer, sequence, mine, theirs, detail: record() }
            }
            Failure::Diverged { peer, sequence, call, .. } => {
                let after = |whose| format!("{call} after {whose} earlier calls");
                let (mine, theirs) = (after("these"), after("other"));
                Error::Mismatch { rank, peer, sequence, mine, theirs, detail: record() }
            }
            Failure::Aborted => Error::Aborted { operation, rank, by: rank },
            Failure::Protocol { peer, link, reason } => Error::Protocol { rank, peer, link, reason },
            Failure::Panicked { message } => Error::OperationPanicked { operation, rank, message },
            Failure::System { what, source } => Error::System { what, rank, source },
            Failure::Remote(RemoteCause { origin, kind, message }) => match kind {
                // Its own last words.
                CauseKind::PeerLost { peer } if peer != rank && peer == origin => {
                    Error::PeerLost { operation, rank, peer, reason: message, detail: record(), source: None }
                }
                CauseKind::PeerLost { peer } if peer != rank => {
                    let reason = format!("as rank {origin} found");
                    let source = Some(Cause::new(io::Error::other(message)));
                    Error::PeerLost { operation, rank, peer, reason, detail: record(), source }
                }
                // What broke is between the two of us, so that either lost the other.
                CauseKind::PeerLost { .. } if origin != rank => {
                    let reason = format!("it can no longer reach this rank: {message}");
                    Error::PeerLost { operation, rank, peer: origin, reason, detail: record(), source: None }
                }
                CauseKind::Mismatch { peer, sequence, mine, theirs } => {
                    Error::Mismatch { rank: origin, peer, sequence, mine, theirs, detail: record() }
                }
                CauseKind::Aborted => Error::Aborted { operation, rank, by: origin },
                CauseKind::PeerLost { .. } | CauseKind::Other => {
                    Error::Remote { operation, rank, by: origin, message }
                }
            },
        }
    }

    /// The failure as it is told to the other ranks.
    pub(crate) fn cause(&self, rank: usize, operation: &'static str) -> RemoteCause {
        let kind = match self {
            Failure::Remote(cause) => return cause.clone(),
            Failure::PeerLost { peer, .. } => CauseKind::PeerLost { peer: *peer },
            Failure::Mismatch { peer, sequence, mine, theirs } => CauseKind::Mismatch {
                peer: *peer,
                sequence: *sequence,
                mine: mine.clone(),
                theirs: theirs.clone(),
            },
            Failure::Aborted => CauseKind::Aborted,
            _ => CauseKind::Other,
        };
        let error = self.error(operation, rank);
        let mut message = error.to_string();
        let mut below = std::error::Error::source(&error);
        while let Some(cause) = below {
            message += &format!(": {cause}");
            below = cause.source();
        }
        let mut end = message.len().min(MESSAGE_LIMIT);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        RemoteCause { origin: rank, kind, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread that tells the others may come too late: the group may be closed between its asking and its telling.
    #[test]
    fn an_abort_that_the_monitor_has_heard_of_is_still_to_be_told_by_whoever_leaves() {
        let health = Health::new(1, Arc::new(Waker::new().unwrap()), Arc::new([None, None]));
        assert!(health.aborted().is_none());
        health.alarm.abort(1);
        for _ in 0..2 {
            let cause = health.aborted().unwrap();
            assert_eq!((cause.origin, cause.kind), (1, CauseKind::Aborted));
        }
        assert!(matches!(health.announce(), Some(Failure::Aborted)));
        assert!(health.announce().is_none());
    }
}
