//! Watchers that write down what they are told.

use std::{
    collections::VecDeque,
    net::{TcpListener, TcpStream},
};

use super::super::{Connections, address::prepare, control::Control, watcher::CauseKind};
use super::*;

/// A watcher that writes down what it is told.
pub(in super::super) struct Recorder {
    notes: Mutex<VecDeque<String>>,
    sent: Vec<u64>,
}

impl Recorder {
    pub(in super::super) fn answering(sent: Vec<u64>) -> Arc<Recorder> {
        Arc::new(Recorder { notes: Mutex::new(VecDeque::new()), sent })
    }

    /// Everything noted so far.
    pub(in super::super) fn taken(&self) -> Vec<String> {
        self.notes.lock().drain(..).collect()
    }

    /// The next note, waiting for it.
    pub(in super::super) fn next(&self) -> String {
        loop {
            if let Some(note) = self.notes.lock().pop_front() {
                return note;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn note(&self, text: String) {
        self.notes.lock().push_back(text);
    }
}

impl Watcher for Recorder {
    fn goodbye(&self, peer: usize) -> Vec<u64> {
        self.note(format!("goodbye {peer}"));
        self.sent.clone()
    }

    fn goodbye_answered(&self, peer: usize, sent: Vec<u64>) {
        self.note(format!("answered {peer} {sent:?}"));
    }

    fn failed(&self, peer: usize, cause: RemoteCause) {
        self.note(format!("failed {peer}: origin {} {:?} {}", cause.origin, cause.kind, cause.message));
    }

    fn lost(&self, peer: usize, reason: String) {
        self.note(format!("lost {peer}: {reason}"));
    }

    fn status(&self, peer: usize, status: Status) {
        self.note(format!("status {peer}: {}", status.sequence));
    }

    fn alarm(&self) -> Arc<Alarm> {
        // Nobody listens: these watchers belong to no engine.
        Arc::new(Alarm::new(Arc::new(Waker::new().unwrap())))
    }

    fn aborted(&self) -> Option<RemoteCause> {
        None
    }
}

pub(in super::super) fn cause(origin: usize) -> RemoteCause {
    RemoteCause { origin, kind: CauseKind::Aborted, message: "boom".to_owned() }
}

fn status(sequence: u64) -> Status {
    Status { comm: 1, sequence, signature: [7; 24] }
}

/// Two connected ends, as ranks 0 and 1.
pub(in super::super) fn channels() -> (Channel, Channel) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let two = listener.accept().unwrap().0;
    prepare(&one).unwrap();
    prepare(&two).unwrap();
    let mut caller = Channel::caller(one, EVENT_LIMIT, None).unwrap();
    let mut called = Channel::called(two, EVENT_LIMIT, None);
    caller.send(b"hello");
    while called.receive().unwrap().is_none() {}
    called.send(b"welcome");
    while caller.receive().unwrap().is_none() {}
    (caller, called)
}

pub(in super::super) fn start(channels: Vec<Option<Channel>>, recorder: &Arc<Recorder>) -> Control {
    let rank = channels.iter().position(Option::is_none).unwrap();
    Control::start(Connections { past: past(channels.len()), channels }, rank, recorder.clone()).unwrap()
}

/// Of a first group.
fn past(size: usize) -> Vec<Past> {
    (0..size).map(|identity| Past { identity, attempt: 0 }).collect()
}

/// Two groups of one process that are each other's peer.
fn pair() -> [(Arc<Recorder>, Control); 2] {
    let (one, two) = channels();
    let recorders = [Recorder::answering(vec![10]), Recorder::answering(vec![20, 21])];
    let [a, b] = recorders;
    let control_a = start(vec![None, Some(one)], &a);
    let control_b = start(vec![Some(two), None], &b);
    [(a, control_a), (b, control_b)]
}

#[test]
fn a_goodbye_is_answered_with_the_peers_numbers_and_closing_is_no_loss() {
    let [(a, control_a), (b, control_b)] = pair();
    control_a.goodbye(1);
    control_a.goodbye(1);
    assert_eq!(b.next(), "goodbye 0");
    assert_eq!(a.next(), "answered 1 [20, 21]");
    control_a.close(|| true);
    // The peer leaves later, and nobody is there to answer it.
    control_b.goodbye(0);
    assert_eq!(b.next(), "answered 0 []");
    control_b.close(|| true);
    assert_eq!((a.taken(), b.taken()), (vec![], vec![]));
}

#[test]
fn goodbyes_that_cross_are_both_answered() {
    for _ in 0..50 {
        let [(a, control_a), (b, control_b)] = pair();
        control_a.goodbye(1);
        control_b.goodbye(0);
        let mut notes = [a.next(), a.next()];
        notes.sort();
        assert_eq!(notes, ["answered 1 [20, 21]", "goodbye 1"]);
        control_a.close(|| true);
        let mut notes = [b.next(), b.next()];
        notes.sort();
        assert_eq!(notes, ["answered 0 [10]", "goodbye 0"]);
    }
}

#[test]
fn a_peer_that_closes_without_a_word_is_lost() {
    let [(_a, control_a), (b, control_b)] = pair();
    drop(control_a);
    assert_eq!(b.next(), "lost 0: its connection closed");
    control_b.goodbye(0);
    assert_eq!(b.next(), "answered 0 []");
}

#[test]
fn a_failure_arrives_before_the_closing_and_instead_of_it() {
    for _ in 0..50 {
        let [(_a, control_a), (b, control_b)] = pair();
        // Unread bytes at the end that closes must not cost the last words.
        control_b.status(0, status(1));
        control_a.failed(1, &cause(0));
        control_a.failed(1, &cause(1));
        drop(control_a);
        assert_eq!(b.next(), "failed 0: origin 0 Aborted boom");
        drop(control_b);
        assert_eq!(b.taken(), Vec::<String>::new());
    }
}

#[test]
fn the_state_of_a_waiting_peer_arrives() {
    let [(_a, control_a), (b, _control_b)] = pair();
    for sequence in 0..100 {
        control_a.status(1, status(sequence));
    }
    for sequence in 0..100 {
        assert_eq!(b.next(), format!("status 0: {sequence}"));
    }
}

#[test]
fn malformed_frames_and_ranks_out_of_range_end_the_connection() {
    let out_of_range = Event::Failed(cause(2)).encode();
    for (frame, word) in
        [(vec![99], "unknown tag"), (vec![32, 0], "too long"), (out_of_range, "out of range")]
    {
        let (one, mut two) = channels();
        let recorder = Recorder::answering(vec![]);
        let _control = start(vec![None, Some(one)], &recorder);
        two.send(&frame);
        let note = recorder.next();
        assert!(note.starts_with("lost 1: it sent a") && note.contains(word), "{note}");
    }
}

#[test]
fn a_peer_that_does_not_read_costs_bounded_memory_and_no_time() {
    let (one, _two) = channels();
    let recorder = Recorder::answering(vec![]);
    let group = Arc::new(
        Group::new(vec![None, Some(one)], past(2), {
            let watcher: Arc<dyn Watcher> = recorder.clone();
            Arc::downgrade(&watcher)
        })
        .unwrap(),
    );
    watch(Arc::clone(&group)).unwrap();
    for sequence in 0..500_000 {
        group.status(1, status(sequence));
    }
    let backlog = group.peers[1].as_ref().unwrap().out.lock().backlog();
    assert!((1..BACKLOG + 100).contains(&backlog), "{backlog}");
    group.failed(1, &cause(0));
    group.close(|| true);
}

#[test]
fn a_watcher_that_is_gone_is_not_called() {
    let [(a, control_a), (b, control_b)] = pair();
    assert_eq!(Arc::strong_count(&a), 1);
    drop(a);
    control_b.goodbye(0);
    control_b.status(0, status(1));
    drop(control_a);
    assert_eq!(b.next(), "lost 0: its connection closed");
    assert_eq!(b.next(), "answered 0 []");
}
