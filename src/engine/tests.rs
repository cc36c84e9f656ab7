//! The engine against peers that do what none should.

mod telling;
mod waking;

use super::*;
use crate::{bootstrap::watcher::Watcher, link::local};

/// The two halves of one end of a link.
type End = (Sender, Receiver);

/// Rank 0 of a group of which nobody else is an engine: the other ends of its links.
fn among(size: usize) -> (Engine, Vec<End>) {
    joined(size, Policy::new(1, 1), |waker| local::pair(Arc::clone(waker), Arc::new(Waker::new().unwrap())))
}

/// The same over other links, which wake the rank by its waker or by descriptors.
fn joined(size: usize, policy: Policy, link: impl Fn(&Arc<Waker>) -> (End, End)) -> (Engine, Vec<End>) {
    let waker = Arc::new(Waker::new().unwrap());
    let (mut senders, mut receivers, mut peers) = (vec![None], vec![None], Vec::new());
    for _ in 1..size {
        let ((sender, receiver), peer) = link(&waker);
        senders.push(Some(sender));
        receivers.push(Some(receiver));
        peers.push(peer);
    }
    let senders: Arc<[Option<Sender>]> = senders.into();
    let health = Arc::new(Health::new(0, Arc::clone(&waker), Arc::clone(&senders)));
    let control = Control::local(0, Arc::clone(&health) as Arc<dyn Watcher>, vec![None; size]);
    let engine = Engine::new(Parts {
        rank: 0,
        epoch: 1,
        senders,
        receivers,
        registry: Arc::new(Registry::without_devices()),
        health,
        waker,
        control,
        policy,
    });
    engine.register(Arc::new(Shared::new(0, size, (0..size).collect(), 0)), 0).unwrap();
    (engine, peers)
}

pub(super) fn alone() -> Engine {
    among(1).0
}

fn header(kind: MessageKind, sequence: u64, length: u64) -> Header {
    Header {
        kind,
        epoch: 1,
        comm: 0,
        credit: 0,
        sequence,
        stream: 0,
        flags: run::AHEAD,
        signature: [0; 24],
        length,
    }
}

/// What becomes of a message of rank 1's.
fn arrives(engine: &Engine, header: Header) -> Result<(), Failure> {
    engine.core.lock().header(1, header, &engine.lines())
}

/// A collective in flight in which rank 1 sends `count` bytes, with room for them.
fn receiving(engine: &Engine, count: usize, into: &mut [u8]) -> OperationId {
    let action = crate::plan::Action::Recv { from: 1, into: span(count) };
    entering(engine, vec![crate::plan::Step { action, after: Vec::new() }], into).unwrap()
}

/// A collective of these steps.
fn entering(engine: &Engine, steps: Vec<crate::plan::Step>, into: &mut [u8]) -> Result<OperationId> {
    let plan = crate::plan::Plan {
        algorithm: crate::plan::Algorithm::Direct,
        steps,
        scratch: Vec::new(),
        chunk: 1 << 10,
    };
    let submission = Submission {
        prepared: Prepared::new(plan, engine.size, false, |_| 1),
        signature: [0; 24],
        operation: "broadcast",
        raw_size: 1,
        acc_size: 1,
        reducer: None,
        input: std::ptr::null(),
        output: into.as_mut_ptr(),
        timeouts: Timeouts::default(),
    };
    let shared = Arc::clone(&engine.core.lock().communicators[&0].shared);
    // SAFETY: the buffer lives while the tests let anything arrive.
    unsafe { engine.submit(&shared, submission) }
}

fn span(count: usize) -> crate::plan::Span {
    let range = 0..count;
    crate::plan::Span {
        buffer: crate::plan::Buffer::Output,
        repr: crate::reduce::Repr::Raw,
        ranges: if count == 0 { Vec::new() } else { vec![range] },
    }
}

#[test]
fn extreme_numbers_in_headers_are_refused() {
    for number in [u64::MAX, u64::MAX - 1, i64::MAX as u64, i64::MAX as u64 - 1, 1 << 63] {
        let (engine, _peers) = among(2);
        let mut buffer = [0; 10];
        receiving(&engine, 10, &mut buffer);
        assert!(arrives(&engine, header(MessageKind::Collective, 0, number)).is_err());
        assert!(arrives(&engine, header(MessageKind::Eager, 0, number)).is_err());
        assert!(arrives(&engine, header(MessageKind::Collective, 1, number)).is_err());
        let (engine, _peers) = among(2);
        assert!(arrives(&engine, header(MessageKind::Grant, number, 0)).is_ok());
        assert!(arrives(&engine, header(MessageKind::Collective, number, 1)).is_ok());
    }
}

#[test]
fn a_stream_has_no_empty_messages_beyond_its_one() {
    let (engine, _peers) = among(2);
    let mut buffer = [0; 10];
    receiving(&engine, 10, &mut buffer);
    assert!(arrives(&engine, header(MessageKind::Collective, 0, 0)).is_err());

    let (engine, _peers) = among(2);
    let id = receiving(&engine, 0, &mut buffer);
    let place = |engine: &Engine| engine.core.lock().table.run(id).unwrap().accept(1, 0, 0).map(|_| ());
    assert!(place(&engine).is_ok());
    assert!(place(&engine).is_err());
}

/// Its header came before this rank entered the call, the rest would come when that is over.
#[test]
fn a_message_that_is_landing_when_another_call_is_made_is_a_mismatch() {
    let (engine, _peers) = among(2);
    let other = Header { signature: [7; 24], ..header(MessageKind::Collective, 0, 10) };
    assert!(arrives(&engine, other).is_ok());
    let result = entering(&engine, Vec::new(), &mut []);
    assert!(matches!(result, Err(Error::Mismatch { sequence: 0, .. })), "{result:?}");
}

#[test]
fn a_message_that_has_landed_when_its_call_is_over_is_refused() {
    let (engine, _peers) = among(2);
    assert!(arrives(&engine, header(MessageKind::Collective, 0, 10)).is_ok());
    let id = entering(&engine, Vec::new(), &mut []).unwrap();
    engine.finish(id, "broadcast").unwrap();
    let landed = engine.core.lock().payload(1, &engine.lines());
    assert!(matches!(landed, Err(Failure::Protocol { peer: 1, .. })), "{landed:?}");
}

#[test]
fn who_has_entered_a_call_has_entered_those_before() {
    let (engine, _peers) = among(2);
    for sequence in [2, 1, 5] {
        assert!(arrives(&engine, header(MessageKind::Grant, sequence, 0)).is_ok());
    }
    assert_eq!(engine.core.lock().communicators[&0].entered, [0, 6]);
}

#[test]
fn an_old_number_for_a_new_communicator_is_refused() {
    let (engine, _peers) = among(2);
    let shared = Shared::new(0, 2, Box::new([1, 0]), 0);
    assert!(matches!(engine.register(Arc::new(shared), 1), Err(Error::Protocol { peer: 1, .. })));
}

#[test]
fn what_is_landing_when_its_communicator_is_made_is_counted() {
    let (engine, _peers) = among(2);
    let comm = Numbers::new(2, 1).begin_split().unwrap();
    let head = Header { comm, ..header(MessageKind::Eager, 0, 100) };
    assert!(arrives(&engine, head).is_ok());
    engine.register(Arc::new(Shared::new(comm, 2, Box::new([1, 0]), 0)), 1).unwrap();
    assert_eq!(engine.core.lock().communicators[&comm].held, [0, 164]);
    assert!(engine.core.lock().payload(1, &engine.lines()).is_ok());
    assert_eq!(engine.core.lock().communicators[&comm].inbox[1].len(), 1);
}

/// As many as there are would take minutes if each were the slower the more have come.
#[test]
fn messages_for_nobody_are_bounded_however_small_they_are() {
    let (engine, _peers) = among(2);
    let of = |comm| Header { comm, ..header(MessageKind::Eager, 0, 0) };
    // Of the 16 MiB that are kept, each takes 64 bytes.
    let most = (16 << 20) / 64;
    assert!((1..=most).all(|comm| arrives(&engine, of(comm)).is_ok()));
    assert!(arrives(&engine, of(1)).is_err());
}

#[test]
fn announcements_that_wait_for_a_receive_are_counted() {
    let (engine, _peers) = among(2);
    let announce = |number| arrives(&engine, header(MessageKind::Announce, number, 0));
    assert!((0..16 << 10).all(|number| announce(number).is_ok()));
    assert!(announce(16 << 10).is_err());
}

#[test]
fn whoever_has_what_it_waits_for_leaves_what_is_behind_it_in_the_link() {
    let (engine, peers) = among(2);
    let mut byte = [0];
    let first = header(MessageKind::Collective, 0, 1);
    let mut second = Header { sequence: 1, ..first };
    call::stamp(&mut second.signature, call::remember(&first.signature));
    let payloads = [7, 8];
    for (header, payload) in [first, second].iter().zip(&payloads) {
        // SAFETY: the payload lives until the end of the test.
        unsafe { peers[0].0.send(header, payload) }.unwrap();
    }
    let id = receiving(&engine, 1, &mut byte);
    engine.finish(id, "broadcast").unwrap();
    assert!(engine.core.lock().communicators[&0].early.is_empty());
    let id = receiving(&engine, 1, &mut byte);
    engine.finish(id, "broadcast").unwrap();
    assert_eq!(byte, [8]);
}

#[test]
fn a_collective_that_is_short_of_budget_goes_on_with_every_credit() {
    let (engine, _peers) = among(2);
    // Messages of 1 KiB.
    let mut buffer = vec![0; 2 * BUDGET as usize];
    let action = crate::plan::Action::Send { to: 1, from: span(buffer.len()) };
    let step = crate::plan::Step { action, after: Vec::new() };
    let id = entering(&engine, vec![step], &mut buffer).unwrap();
    let issued = || engine.core.lock().table.run(id).unwrap().steps[0].issued;
    let most = (BUDGET / 1088) as usize * 1024;
    assert_eq!(issued(), most);
    for messages in 1..4 {
        arrives(&engine, Header { credit: 1088, ..header(MessageKind::Credit, 0, 0) }).unwrap();
        assert_eq!(issued(), most + messages * 1024);
    }
}

/// The last message that rank 1 got.
fn last_to(peer: &mut End) -> Option<Header> {
    let mut last = None;
    loop {
        match peer.1.poll().unwrap() {
            crate::link::Arrival::Header(header) => last = Some(header),
            _ => return last,
        }
    }
}

#[test]
fn a_peer_is_asked_to_announce_only_while_a_receive_needs_it() {
    let (engine, mut peers) = among(2);
    let comm = Arc::clone(&engine.core.lock().communicators[&0].shared);
    let eager =
        |number, tag| Header { signature: sign(tag, 1000), ..header(MessageKind::Eager, number, 1000) };
    let comes = |number, tag| {
        arrives(&engine, eager(number, tag)).unwrap();
        engine.core.lock().payload(1, &engine.lines()).unwrap();
    };
    let mut buffer = [0; 1000];
    let pointer = buffer.as_mut_ptr();
    let post = |tag| {
        let timeouts = Timeouts::default();
        let message = Message { peer: 1, tag, pointer, length: 1000, operation: "recv", timeouts };
        // SAFETY: the buffer lives while the test lets anything arrive.
        unsafe { engine.submit_recv(&comm, message) }.unwrap();
    };
    (0..400).for_each(|number| comes(number, 1));
    assert!(last_to(&mut peers[0]).is_none(), "nobody waits for anything");
    post(2);
    let asked = last_to(&mut peers[0]).unwrap();
    assert_eq!((asked.kind, asked.flags), (MessageKind::Credit, message::ANNOUNCE_ALL));
    comes(400, 1);
    assert!(last_to(&mut peers[0]).is_none(), "it was asked already");
    comes(401, 2);
    // More than half of the budget is due.
    (0..300).for_each(|_| post(1));
    let credit = last_to(&mut peers[0]).unwrap();
    assert_eq!((credit.kind, credit.flags), (MessageKind::Credit, 0));
}

#[test]
fn small_messages_are_announced_when_that_is_asked_for() {
    const PAYLOAD: &[u8] = &[7; 60_000];
    let (engine, _peers) = among(2);
    let comm = Arc::clone(&engine.core.lock().communicators[&0].shared);
    let start = |tag| {
        let (pointer, timeouts) = (PAYLOAD.as_ptr().cast_mut(), Timeouts::default());
        let message = Message { peer: 1, tag, pointer, length: PAYLOAD.len(), operation: "send", timeouts };
        // SAFETY: the payload is a constant.
        unsafe { engine.submit_send(&comm, message) }.unwrap()
    };
    let sent = (0..20).map(start).last().unwrap();
    assert!(comm.has_queued(1));
    let ask = Header { flags: message::ANNOUNCE_ALL, ..header(MessageKind::Credit, 0, 0) };
    arrives(&engine, ask).unwrap();
    assert!(!comm.has_queued(1));
    let waits = |state| engine.core.lock().table.send(sent).unwrap().state == state;
    assert!(waits(SendState::Announced));
    // Eight were sent ahead; this one is the twentieth.
    arrives(&engine, Header { flags: message::FOR_MESSAGE, ..header(MessageKind::Grant, 19, 0) }).unwrap();
    assert!(!waits(SendState::Announced));
    // Asked no more.
    arrives(&engine, Header { flags: 0, ..header(MessageKind::Credit, 0, 0) }).unwrap();
    start(0);
    assert!(comm.has_queued(1));
}
