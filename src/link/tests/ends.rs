//! How links end, and what they do not put up with.

use std::{
    io::{ErrorKind, Write},
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex},
};

use super::{header, payload, sockets, trickle::Phantom};
use crate::{
    link::{
        Arrival, Header, LinkError, Receiver, Sender, Ticket, local,
        stripe::{self, Split},
        tcp,
    },
    os::Waker,
};

/// The receiver of a link over sockets whose other ends the test writes by hand.
fn by_hand(lanes: usize) -> (Vec<TcpStream>, (Sender, Receiver)) {
    let (ours, theirs) = sockets(lanes, None);
    (ours, tcp::pair(theirs).unwrap())
}

fn over_tcp(lanes: usize) -> ((Sender, Receiver), (Sender, Receiver)) {
    let (ours, theirs) = sockets(lanes, None);
    (tcp::pair(ours).unwrap(), tcp::pair(theirs).unwrap())
}

fn over_memory() -> ((Sender, Receiver), (Sender, Receiver)) {
    let waker = || Arc::new(Waker::new().unwrap());
    local::pair(waker(), waker())
}

/// Polls until there is something to say.
fn next(receiver: &mut Receiver) -> Result<Arrival, LinkError> {
    loop {
        match receiver.poll() {
            Ok(Arrival::Nothing) => std::thread::yield_now(),
            other => return other,
        }
    }
}

/// Sends, and keeps the payload for ever.
fn send(sender: &Sender, header: &Header, payload: Vec<u8>) -> Result<Ticket, LinkError> {
    assert_eq!(header.length, payload.len() as u64);
    // SAFETY: the payload is leaked, so it stays valid.
    unsafe { sender.send(header, payload.leak().as_ptr()) }
}

fn is_cut_short(result: Result<Arrival, LinkError>) -> bool {
    match result {
        Err(LinkError::Broken { source, .. }) => source.to_string() == ErrorKind::UnexpectedEof.to_string(),
        _ => false,
    }
}

#[test]
fn the_end_between_messages_is_closed_for_good() {
    for mut pairs in [over_tcp(1), over_tcp(3), over_memory()] {
        let (sender, receiver) = (&pairs.0.0, &mut pairs.1.1);
        send(sender, &header(1, 3), b"abc".to_vec()).unwrap();
        sender.shutdown();
        assert_eq!(next(receiver).unwrap(), Arrival::Header(header(1, 3)));
        let mut landed = [0; 3];
        // SAFETY: `landed` is used only after the payload is complete.
        unsafe { receiver.land(landed.as_mut_ptr(), 3) };
        assert_eq!(next(receiver).unwrap(), Arrival::Payload);
        assert_eq!(&landed, b"abc");
        assert_eq!(next(receiver).unwrap(), Arrival::Closed);
        assert_eq!(receiver.poll().unwrap(), Arrival::Closed);
        assert!(matches!(send(sender, &header(2, 0), vec![]), Err(LinkError::Closed)));
    }
}

#[test]
fn dropping_the_sender_closes_too() {
    for ((sender, _other), (_, mut receiver)) in [over_tcp(2), over_memory()] {
        assert_eq!(receiver.poll().unwrap(), Arrival::Nothing);
        drop(sender);
        assert_eq!(next(&mut receiver).unwrap(), Arrival::Closed);
    }
}

#[test]
fn the_end_inside_a_header_is_an_error_for_good() {
    let (mut ours, (_, mut receiver)) = by_hand(1);
    ours[0].write_all(&header(1, 9).encode()[..63]).unwrap();
    ours.clear();
    assert!(is_cut_short(next(&mut receiver)));
    assert!(is_cut_short(receiver.poll()));
}

#[test]
fn the_end_inside_a_payload_is_an_error_on_any_lane() {
    let length = 300 << 10;
    for dying in 0..3 {
        let (mut ours, (_, mut receiver)) = by_hand(3);
        let bytes = payload(1, length as usize);
        ours[0].write_all(&header(1, length).encode()).unwrap();
        for (lane, socket) in ours.iter_mut().enumerate() {
            let part = Split::new(&[1, 1, 1]).part(length, lane);
            let end = if lane == dying { part.end - 1 } else { part.end };
            socket.write_all(&bytes[part.start as usize..end as usize]).unwrap();
        }
        assert_eq!(next(&mut receiver).unwrap(), Arrival::Header(header(1, length)));
        let mut landed = vec![0; length as usize];
        // SAFETY: `landed` lives until the receiver has failed.
        unsafe { receiver.land(landed.as_mut_ptr(), landed.len()) };
        while receiver.moved() < 64 + length - 1 {
            assert_eq!(receiver.poll().unwrap(), Arrival::Nothing);
        }
        ours[dying].shutdown(Shutdown::Write).unwrap();
        assert!(is_cut_short(next(&mut receiver)), "lane {dying}");
    }
}

#[test]
fn a_hostile_header_is_an_error_and_its_length_costs_nothing() {
    let (mut ours, (_, mut receiver)) = by_hand(1);
    ours[0].write_all(&[0xFF; 64]).unwrap();
    assert!(matches!(next(&mut receiver), Err(LinkError::Protocol(_))));
    assert!(matches!(receiver.poll(), Err(LinkError::Protocol(_))));

    for lanes in [1, 4] {
        let (mut ours, (_, mut receiver)) = by_hand(lanes);
        ours[0].write_all(&header(1, u64::MAX).encode()).unwrap();
        ours[0].write_all(b"abcdefg").unwrap();
        assert_eq!(next(&mut receiver).unwrap(), Arrival::Header(header(1, u64::MAX)));
        let mut landed = [0; 9];
        // SAFETY: `landed` is used only after the cancel.
        unsafe { receiver.land(landed.as_mut_ptr(), 5) };
        loop {
            assert_eq!(receiver.poll().unwrap(), Arrival::Nothing);
            if receiver.moved() == 64 + 7 {
                break;
            }
        }
        receiver.cancel();
        assert_eq!(&landed, b"abcde\0\0\0\0");
        drop(ours);
        assert!(is_cut_short(next(&mut receiver)));
    }
}

#[test]
fn a_closed_sender_holds_nothing_and_says_what_it_sent() {
    for lanes in [1, 3] {
        let ((sender, _), (_, mut receiver)) = over_tcp(lanes);
        let length = 64 << 20;
        let memory = payload(1, length);
        // SAFETY: the memory is freed only after the close.
        let ticket = unsafe { sender.send(&header(1, length as u64), memory.as_ptr()) }.unwrap();
        assert!(sender.pending() && sender.sent() < ticket, "the test needs more than the sockets hold");
        assert_eq!(sender.queued_bytes() + sender.moved(), 64 + length as u64);
        let mut fds = Vec::new();
        sender.fds(&mut fds);
        assert_eq!(fds.len(), lanes);

        let sent = sender.close();
        drop(memory);
        assert_eq!(sent.len(), lanes);
        assert_eq!(sent.iter().sum::<u64>(), sender.moved());
        assert!(!sender.pending() && sender.sent() < ticket && sender.queued_bytes() == 0);
        assert!(!sender.flush().unwrap());
        assert!(matches!(send(&sender, &header(2, 0), vec![]), Err(LinkError::Closed)));
        assert_eq!(sender.close(), sent);
        fds.clear();
        sender.fds(&mut fds);
        assert!(fds.is_empty());

        while !receiver.drain(&sent) {
            std::thread::yield_now();
        }
        assert_eq!(receiver.moved(), sent.iter().sum::<u64>());
        assert_eq!(receiver.poll().unwrap(), Arrival::Closed);
    }
}

#[test]
fn draining_waits_for_what_was_sent_and_for_no_more() {
    let (mut ours, (_, mut receiver)) = by_hand(2);
    ours[0].write_all(&header(1, 300 << 10).encode()).unwrap();
    assert_eq!(next(&mut receiver).unwrap(), Arrival::Header(header(1, 300 << 10)));
    let mut landed = [1; 8];
    // SAFETY: `landed` is not used before the drain.
    unsafe { receiver.land(landed.as_mut_ptr(), landed.len()) };
    assert!(receiver.drain(&[64, 0]));
    assert!(!receiver.drain(&[64, 10]));
    ours[1].write_all(&[5; 9]).unwrap();
    assert!(!receiver.drain(&[64, 10]));
    ours[0].write_all(&[5; 100]).unwrap();
    ours[1].write_all(&[5; 1]).unwrap();
    while !receiver.drain(&[164, 10]) {}
    assert_eq!(landed, [1; 8]);
    assert_eq!(receiver.moved(), 174);
    // More than will ever come: the end of the stream ends the wait.
    assert!(!receiver.drain(&[u64::MAX, u64::MAX]));
    drop(ours);
    while !receiver.drain(&[u64::MAX, u64::MAX]) {}
}

#[test]
fn sending_to_a_peer_that_is_gone_fails_and_stays_failed() {
    let ((sender, _receiver), peer) = over_tcp(1);
    // The peer leaves bytes unread, so its kernel answers with a reset.
    send(&sender, &header(1, 0), vec![]).unwrap();
    drop(peer);
    let first = loop {
        match send(&sender, &header(1, 1 << 20), vec![1; 1 << 20]) {
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(first, LinkError::Broken { .. }), "{first:?}");
    assert!(std::error::Error::source(&first).is_some());
    assert!(!sender.pending() && !sender.flush().unwrap());
    assert_eq!(send(&sender, &header(1, 0), vec![]).unwrap_err().to_string(), first.to_string());

    let ((sender, _receiver), peer) = over_memory();
    drop(peer);
    assert!(matches!(send(&sender, &header(1, 0), vec![]), Err(LinkError::Closed)));
}

#[test]
fn the_receiver_names_the_lanes_that_it_waits_for() {
    let (mut ours, (_, mut receiver)) = by_hand(2);
    let waits = |receiver: &Receiver| {
        let mut fds = Vec::new();
        receiver.fds(&mut fds);
        fds.len()
    };
    let length = 128 << 10;
    assert_eq!(waits(&receiver), 1);
    ours[0].write_all(&header(1, length).encode()).unwrap();
    next(&mut receiver).unwrap();
    assert_eq!(waits(&receiver), 0);
    let mut landed = vec![0; length as usize];
    // SAFETY: `landed` lives until the payload is complete.
    unsafe { receiver.land(landed.as_mut_ptr(), landed.len()) };
    assert_eq!(waits(&receiver), 2);
    ours[0].write_all(&vec![1; length as usize / 2]).unwrap();
    while receiver.moved() < 64 + length / 2 {
        assert_eq!(receiver.poll().unwrap(), Arrival::Nothing);
    }
    assert_eq!(waits(&receiver), 1);
    ours[1].write_all(&vec![1; length as usize / 2]).unwrap();
    assert_eq!(next(&mut receiver).unwrap(), Arrival::Payload);
}

#[test]
fn a_local_sender_that_waits_for_room_is_woken() {
    let wakers = [(); 2].map(|()| Arc::new(Waker::new().unwrap()));
    let ((sender, _r), (_s, mut receiver)) = local::pair(wakers[0].clone(), wakers[1].clone());
    let awake = |waker: &Waker| {
        let mut fds = [crate::os::PollFd::readable(waker.fd())];
        crate::os::poll(&mut fds, Some(std::time::Duration::ZERO)).unwrap() == 1
    };

    wakers[1].prepare();
    send(&sender, &header(1, 1 << 20), vec![9; 1 << 20]).unwrap();
    assert!(awake(&wakers[1]), "the receiver sleeps on");
    wakers[1].finish();

    assert!(sender.pending());
    wakers[0].prepare();
    assert!(!sender.flush().unwrap(), "there was room");
    assert!(!awake(&wakers[0]));
    assert_eq!(next(&mut receiver).unwrap(), Arrival::Header(header(1, 1 << 20)));
    assert!(awake(&wakers[0]), "the sender sleeps on");
    wakers[0].finish();
}

/// Who sleeps on a waker looks once after `prepare`; unlike a socket, nothing tells it later what it overlooked.
#[test]
fn one_look_at_a_local_link_finds_what_is_there() {
    let ((sender, _r), (_s, mut receiver)) = over_memory();
    for n in 0..3 {
        send(&sender, &header(n, 100), vec![4; 100]).unwrap();
        assert_eq!(receiver.poll().unwrap(), Arrival::Header(header(n, 100)));
        let mut landed = [0; 100];
        // SAFETY: `landed` lives until the payload is complete.
        unsafe { receiver.land(landed.as_mut_ptr(), landed.len()) };
        assert_eq!(receiver.poll().unwrap(), Arrival::Payload);
    }
}

#[test]
fn no_system_call_moves_two_gigabytes() {
    let length = 5 << 30;
    let split = Split::new(&[1]);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let lane = || Phantom { calls: calls.clone(), ..Phantom::default() };

    let sender = stripe::Sender::new(vec![lane()], split.clone());
    // SAFETY: a phantom lane does not look at what is sent.
    unsafe { sender.send(&[(header(1, length), std::ptr::dangling())]) }.unwrap();
    assert_eq!(sender.sent(), Ticket(1));
    assert_eq!(calls.lock().unwrap().iter().sum::<usize>() as u64, 64 + length);
    assert!(calls.lock().unwrap().iter().all(|&bytes| bytes <= 1 << 30));

    calls.lock().unwrap().clear();
    let inlet = lane();
    inlet.first.borrow_mut().extend(header(1, length).encode());
    let mut receiver = stripe::Receiver::new(vec![inlet], split);
    assert_eq!(receiver.poll().unwrap(), Arrival::Header(header(1, length)));
    // SAFETY: a phantom lane does not write what is received.
    unsafe { receiver.land(std::ptr::dangling_mut(), length as usize) };
    while receiver.poll().unwrap() == Arrival::Nothing {}
    assert_eq!(receiver.moved(), 64 + length);
    assert!(calls.lock().unwrap().iter().all(|&bytes| bytes <= (1 << 30)));
}
