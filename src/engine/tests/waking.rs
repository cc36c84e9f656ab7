//! Threads that wait hear at once what other threads do. Here nobody looks again before an hour is over, so that a test in
//! which somebody is not told does not end.

use std::{
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use socket2::SockRef;

use super::*;
use crate::{
    link::{Arrival, tcp},
    os::{PollFd, poll},
};

const PATIENT: Policy = Policy { spins: 0, turns: 0, tick: Duration::from_secs(3600) };

fn in_memory(waker: &Arc<Waker>) -> (End, End) {
    local::pair(Arc::clone(waker), Arc::new(Waker::new().unwrap()))
}

/// A socket that holds a few messages only.
fn over_tcp(_: &Arc<Waker>) -> (End, End) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    SockRef::from(&ours).set_send_buffer_size(4096).unwrap();
    let theirs = listener.accept().unwrap().0;
    (tcp::pair(vec![ours]).unwrap(), tcp::pair(vec![theirs]).unwrap())
}

fn shared(engine: &Engine) -> Arc<Shared> {
    Arc::clone(&engine.core.lock().communicators[&0].shared)
}

/// Receives three bytes.
fn receive(engine: &Engine, peer: usize, tag: u64) -> [u8; 3] {
    let mut buffer = [0; 3];
    let message = Message {
        peer,
        tag,
        pointer: buffer.as_mut_ptr(),
        length: 3,
        operation: "recv",
        timeouts: Timeouts { progress: None, late: None },
    };
    // SAFETY: the buffer outlives the operation, which is finished here.
    let id = unsafe { engine.submit_recv(&shared(engine), message) }.unwrap();
    assert_eq!(engine.finish(id, "recv").unwrap(), 3);
    buffer
}

fn outgoing(peer: usize, tag: u64, payload: &'static [u8]) -> Message {
    Message {
        peer,
        tag,
        pointer: payload.as_ptr().cast_mut(),
        length: payload.len(),
        operation: "send",
        timeouts: Timeouts { progress: None, late: None },
    }
}

fn start_sending(engine: &Engine, peer: usize, tag: u64, payload: &'static [u8]) -> OperationId {
    // SAFETY: the payload lives for ever.
    unsafe { engine.submit_send(&shared(engine), outgoing(peer, tag, payload)) }.unwrap()
}

/// A peer sends three bytes.
fn send_from(peer: &End, tag: u64, payload: &'static [u8; 3]) {
    let head = Header { signature: sign(tag, 3), ..header(MessageKind::Eager, 0, 3) };
    // SAFETY: the payload lives for ever.
    unsafe { peer.0.send(&head, payload.as_ptr()) }.unwrap();
}

/// Reads whole messages at a peer.
fn read(peer: &mut End, messages: usize) {
    let mut left = messages;
    while left > 0 {
        match peer.1.poll().unwrap() {
            Arrival::Nothing => thread::yield_now(),
            Arrival::Header(head) if head.length > 0 => peer.1.cancel(),
            Arrival::Header(_) | Arrival::Payload => left -= 1,
            Arrival::Closed => panic!("the link was closed"),
        }
    }
}

/// Waits until the driver has found nothing to do. It keeps the lock until it sleeps.
fn until_asleep(engine: &Engine) {
    while !engine.waker.is_parked() {
        thread::yield_now();
    }
}

fn until_waiting(engine: &Engine, threads: usize) {
    while engine.core.lock().waiters.len() < threads {
        thread::yield_now();
    }
}

#[test]
fn a_message_to_oneself_wakes_the_driver_that_waits_for_it() {
    let (engine, _peers) = joined(2, PATIENT, in_memory);
    thread::scope(|threads| {
        let receiving = threads.spawn(|| receive(&engine, 0, 5));
        until_asleep(&engine);
        start_sending(&engine, 0, 5, b"abc");
        assert_eq!(&receiving.join().unwrap(), b"abc");
    });
}

#[test]
fn a_message_to_oneself_wakes_a_thread_that_does_not_drive() {
    let (engine, peers) = joined(2, PATIENT, in_memory);
    thread::scope(|threads| {
        let driving = threads.spawn(|| receive(&engine, 1, 5));
        until_asleep(&engine);
        let receiving = threads.spawn(|| receive(&engine, 0, 5));
        until_waiting(&engine, 1);
        start_sending(&engine, 0, 5, b"abc");
        assert_eq!(&receiving.join().unwrap(), b"abc");
        send_from(&peers[0], 5, b"def");
        assert_eq!(&driving.join().unwrap(), b"def");
    });
}

#[test]
fn whoever_drives_next_is_told() {
    let (engine, peers) = joined(3, PATIENT, in_memory);
    thread::scope(|threads| {
        let first = threads.spawn(|| receive(&engine, 1, 5));
        until_asleep(&engine);
        let second = threads.spawn(|| receive(&engine, 2, 5));
        until_waiting(&engine, 1);
        send_from(&peers[0], 5, b"abc");
        assert_eq!(&first.join().unwrap(), b"abc");
        until_asleep(&engine);
        send_from(&peers[1], 5, b"def");
        assert_eq!(&second.join().unwrap(), b"def");
    });
}

/// What a full socket did not take goes out when there is room, though whoever started it does something else.
#[test]
fn what_is_started_while_the_driver_sleeps_goes_out() {
    const MESSAGES: usize = 8;
    let (engine, mut peers) = joined(3, PATIENT, over_tcp);
    thread::scope(|threads| {
        let driving = threads.spawn(|| receive(&engine, 2, 5));
        until_asleep(&engine);
        for _ in 0..MESSAGES {
            start_sending(&engine, 1, 0, &[7; 60_000]);
        }
        read(&mut peers[0], MESSAGES);
        send_from(&peers[1], 5, b"abc");
        assert_eq!(&driving.join().unwrap(), b"abc");
    });
}

/// A message that goes past the lock takes with it what another thread waits to see out.
#[test]
fn what_goes_out_with_a_message_past_the_lock_is_noticed() {
    let (engine, mut peers) = joined(2, PATIENT, in_memory);
    // More than a link in memory holds.
    let last = (0..5).map(|_| start_sending(&engine, 1, 0, &[7; 60_000])).last().unwrap();
    assert!(engine.is_pushing(1));
    read(&mut peers[0], 4);
    // From here on as if another thread drove and slept, and this one had nothing to do with it.
    engine.core.lock().driver = Some(last);
    engine.waker.prepare();
    // SAFETY: the payload lives for ever.
    unsafe { engine.send(&shared(&engine), outgoing(1, 0, b"abc")) }.unwrap();
    assert_eq!(poll(&mut [PollFd::readable(engine.waker.fd())], Some(Duration::ZERO)).unwrap(), 1);
    engine.waker.finish();
}
