//! Threads that share a link, and sleep when there is nothing to do.

use std::sync::Arc;

use super::{Random, header, payload, sockets};
use crate::{
    link::{Arrival, Receiver, Sender, Ticket, local, tcp},
    os::{PollFd, Waker, poll},
};

const MESSAGES: u64 = 300;

/// The `n`-th message of sender `who`.
fn message(who: u64, n: u64) -> Vec<u8> {
    let mut random = Random(who * 1_000_003 + n * 7919 + 1);
    let length = match random.below(4) {
        0 => 0,
        1 | 2 => random.below(2000),
        _ => random.below(600_000),
    };
    payload(who << 32 | n, length as usize)
}

/// Sleeps until something happens to the link, unless `look` finds that something has happened already.
fn sleep(waker: &Waker, links: &[PollFd], look: impl FnOnce() -> bool) {
    if !look() {
        let mut fds = vec![PollFd::readable(waker.fd())];
        fds.extend(links);
        poll(&mut fds, None).unwrap();
    }
    waker.finish();
}

/// Sends the messages of `who`, one at a time; sleeps on `waker` or, without one, yields.
fn send_all(sender: &Sender, who: u64, waker: Option<&Waker>) {
    for n in 0..MESSAGES {
        let memory = message(who, n);
        let mut header = header(n, memory.len() as u64);
        header.stream = who as u32;
        // SAFETY: the memory is kept until the message is sent.
        let ticket = unsafe { sender.send(&header, memory.as_ptr()) }.unwrap();
        while sender.sent() < ticket {
            let moved = sender.flush().unwrap();
            match waker {
                _ if moved || sender.sent() >= ticket => {}
                Some(waker) => {
                    waker.prepare();
                    let mut fds = Vec::new();
                    sender.fds(&mut fds);
                    let links: Vec<PollFd> = fds.into_iter().map(PollFd::writable).collect();
                    sleep(waker, &links, || sender.flush().unwrap() || sender.sent() >= ticket);
                }
                None => std::thread::yield_now(),
            }
        }
    }
}

/// Receives everything that `senders` send; sleeps on `waker`.
fn receive_all(receiver: &mut Receiver, senders: usize, waker: &Waker) {
    let mut counts = vec![0; senders];
    let mut landing: Option<(usize, Vec<u8>)> = None;
    loop {
        let mut arrival = receiver.poll().unwrap();
        if arrival == Arrival::Nothing {
            let before = receiver.moved();
            waker.prepare();
            let mut fds = Vec::new();
            receiver.fds(&mut fds);
            let links: Vec<PollFd> = fds.into_iter().map(PollFd::readable).collect();
            sleep(waker, &links, || {
                arrival = receiver.poll().unwrap();
                arrival != Arrival::Nothing || receiver.moved() != before
            });
        }
        match arrival {
            Arrival::Nothing => {}
            Arrival::Header(header) => {
                let who = header.stream as usize;
                assert_eq!(header.sequence, counts[who], "sender {who}");
                let (_, memory) = landing.insert((who, vec![0; header.length as usize]));
                match header.length {
                    0 => check(&mut counts, landing.take()),
                    // SAFETY: `landing` keeps the memory until the payload is complete.
                    _ => unsafe { receiver.land(memory.as_mut_ptr(), memory.len()) },
                }
            }
            Arrival::Payload => check(&mut counts, landing.take()),
            Arrival::Closed => break,
        }
    }
    assert_eq!(counts, vec![MESSAGES; senders]);
}

fn check(counts: &mut [u64], landed: Option<(usize, Vec<u8>)>) {
    let (who, memory) = landed.expect("a payload without a header");
    assert!(memory == message(who as u64, counts[who]), "message {} of sender {who}", counts[who]);
    counts[who] += 1;
}

fn share(sender: Sender, mut receiver: Receiver, wakers: [Arc<Waker>; 2]) {
    std::thread::scope(|scope| {
        scope.spawn(|| receive_all(&mut receiver, 3, &wakers[1]));
        scope.spawn(|| {
            std::thread::scope(|scope| {
                scope.spawn(|| send_all(&sender, 0, Some(&wakers[0])));
                scope.spawn(|| send_all(&sender, 1, None));
                scope.spawn(|| send_all(&sender, 2, None));
            });
            assert_eq!(sender.sent(), Ticket(3 * MESSAGES));
            sender.shutdown();
        });
    });
}

#[test]
fn threads_share_a_link_between_threads_and_none_sleeps_for_ever() {
    let wakers = [(); 2].map(|()| Arc::new(Waker::new().unwrap()));
    let ((sender, _r), (_s, receiver)) = local::pair(wakers[0].clone(), wakers[1].clone());
    share(sender, receiver, wakers);
}

#[test]
fn threads_share_a_link_over_sockets_and_none_sleeps_for_ever() {
    for lanes in [1, 3] {
        let (ours, theirs) = sockets(lanes, None);
        let ((sender, _r), (_s, receiver)) = (tcp::pair(ours).unwrap(), tcp::pair(theirs).unwrap());
        share(sender, receiver, [(); 2].map(|()| Arc::new(Waker::new().unwrap())));
    }
}
