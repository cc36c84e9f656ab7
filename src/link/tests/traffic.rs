//! Random traffic in both directions at once, driven by one thread that never waits.

use std::{collections::VecDeque, sync::Arc};

use proptest::prelude::*;

use super::{Random, header, payload, session_pair, sockets, trickle};
use crate::{
    link::{
        Arrival, Receiver, Sender, Ticket, local, sealed,
        stripe::{self, Inlet, Outlet, Split},
        tcp,
    },
    os::Waker,
};

/// One direction: what is sent at one end, and what is made of it at the other.
struct Direction<O, I> {
    sender: stripe::Sender<O>,
    receiver: stripe::Receiver<I>,
    /// Lengths of the messages that are still to be sent.
    to_send: VecDeque<usize>,
    /// Memory that the sender may still read.
    in_line: VecDeque<(Ticket, Vec<u8>)>,
    /// Number of messages sent and received.
    sent: u64,
    received: u64,
    lengths: Vec<usize>,
    landing: Option<Landing>,
}

struct Landing {
    memory: Vec<u8>,
    keep: usize,
    /// What the memory held when the landing was cancelled.
    cancelled: Option<Vec<u8>>,
}

/// Bytes behind what is kept, which must stay as they are.
const GUARD: usize = 32;

impl<O: Outlet, I: Inlet> Direction<O, I> {
    fn new(sender: stripe::Sender<O>, receiver: stripe::Receiver<I>, lengths: Vec<usize>) -> Direction<O, I> {
        let to_send = lengths.iter().copied().collect();
        Direction {
            sender,
            receiver,
            to_send,
            in_line: VecDeque::new(),
            sent: 0,
            received: 0,
            lengths,
            landing: None,
        }
    }

    fn done(&self) -> bool {
        self.received == self.lengths.len() as u64
    }

    fn step(&mut self, random: &mut Random) {
        match random.below(8) {
            0 => self.send(1 + random.below(4) as usize),
            1 => {
                self.sender.flush().unwrap();
            }
            _ => self.receive(random),
        }
        self.release();
    }

    fn send(&mut self, most: usize) {
        let count = most.min(self.to_send.len());
        let lengths: Vec<usize> = self.to_send.drain(..count).collect();
        let first = self.sent;
        let payloads: Vec<Vec<u8>> = (first..).zip(&lengths).map(|(n, &length)| payload(n, length)).collect();
        let messages: Vec<_> = (first..)
            .zip(&payloads)
            .map(|(n, payload)| (header(n, payload.len() as u64), payload.as_ptr()))
            .collect();
        if messages.is_empty() {
            return;
        }
        // SAFETY: `in_line` keeps the payloads until `release` finds them sent, or the sender is dropped with them.
        let last = unsafe { self.sender.send(&messages) }.unwrap();
        self.sent += count as u64;
        assert_eq!(last, Ticket(self.sent));
        self.in_line.extend((first + 1..).map(Ticket).zip(payloads));
    }

    /// Spoils what is said to be sent, so that a late read would show.
    fn release(&mut self) {
        let sent = self.sender.sent();
        assert!(sent <= Ticket(self.sent));
        assert_eq!(self.sender.pending(), sent < Ticket(self.sent));
        while self.in_line.front().is_some_and(|(ticket, _)| *ticket <= sent) {
            let (_, mut memory) = self.in_line.pop_front().unwrap();
            memory.fill(0x55);
        }
    }

    fn receive(&mut self, random: &mut Random) {
        if let Some(landing) = &mut self.landing
            && random.below(200) == 0
        {
            self.receiver.cancel();
            landing.cancelled.get_or_insert(landing.memory.clone());
        }
        match self.receiver.poll().unwrap() {
            Arrival::Nothing => {}
            Arrival::Header(found) => {
                let length = self.lengths[self.received as usize];
                assert_eq!(found, header(self.received, length as u64));
                assert!(self.landing.is_none());
                match length {
                    0 => self.received += 1,
                    _ => self.land(length, random),
                }
            }
            Arrival::Payload => {
                let landing = self.landing.take().expect("a payload that nobody was told of");
                let sent = payload(self.received, self.lengths[self.received as usize]);
                let (kept, guard) = landing.memory.split_at(landing.keep);
                match &landing.cancelled {
                    Some(then) => assert!(then == &landing.memory, "written after it was cancelled"),
                    None => assert!(kept == &sent[..landing.keep], "message {}", self.received),
                }
                assert_eq!(guard, [0xEE; GUARD]);
                self.received += 1;
            }
            Arrival::Closed => panic!("closed after {} messages", self.received),
        }
    }

    fn land(&mut self, length: usize, random: &mut Random) {
        let keep = match random.below(10) {
            0 => 0,
            1 => random.below(length as u64 + 1) as usize,
            _ => length,
        };
        let memory = vec![0xEE; keep + GUARD];
        let landing = self.landing.insert(Landing { memory, keep, cancelled: None });
        if random.below(20) == 0 {
            landing.cancelled = Some(landing.memory.clone());
            self.receiver.cancel();
        } else {
            // SAFETY: `landing` keeps the memory, untouched, until the payload is complete or cancelled.
            unsafe { self.receiver.land(landing.memory.as_mut_ptr(), keep) };
        }
    }
}

/// Runs both directions to their ends.
fn run<O: Outlet, I: Inlet>(mut ways: [Direction<O, I>; 2], random: &mut Random) {
    while !(ways[0].done() && ways[1].done()) {
        let way = random.below(2) as usize;
        ways[way].step(random);
    }
    for way in &mut ways {
        assert_eq!(way.receiver.poll().unwrap(), Arrival::Nothing);
        way.release();
        assert!(way.in_line.is_empty());
        assert_eq!(way.sender.queued_bytes(), 0);
        let total: usize = way.lengths.iter().map(|length| 64 + length).sum();
        assert_eq!(way.sender.moved(), total as u64);
        assert_eq!(way.receiver.moved(), total as u64);
        way.sender.shutdown();
    }
    for way in &mut ways {
        while way.receiver.poll().unwrap() != Arrival::Closed {}
    }
}

fn lengths(random: &mut Random, count: usize, largest: u64) -> Vec<usize> {
    let length = |random: &mut Random| match random.below(5) {
        0 => 0,
        1 => random.below(200),
        2 => random.below(20_000),
        _ => random.below(largest),
    };
    (0..count).map(|_| length(random) as usize).collect()
}

#[test]
fn random_traffic_over_sockets_with_small_buffers() {
    for (lanes, seed) in (1..=4).zip(1u64..) {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (ours, theirs) = sockets(lanes, Some(4096));
        let ((s1, r1), (s2, r2)) = (tcp::pair(ours).unwrap(), tcp::pair(theirs).unwrap());
        let (Sender::Tcp(s1), Receiver::Tcp(r1), Sender::Tcp(s2), Receiver::Tcp(r2)) = (s1, r1, s2, r2)
        else {
            panic!("tcp::pair made another kind");
        };
        let ways = [
            Direction::new(s1, r2, lengths(&mut random, 40, 1 << 20)),
            Direction::new(s2, r1, lengths(&mut random, 40, 1 << 20)),
        ];
        run(ways, &mut random);
    }
}

#[test]
fn random_traffic_between_threads() {
    let waker = || Arc::new(Waker::new().unwrap());
    let mut random = Random(77);
    let ((s1, r1), (s2, r2)) = local::pair(waker(), waker());
    let (Sender::Local(s1), Receiver::Local(r1), Sender::Local(s2), Receiver::Local(r2)) = (s1, r1, s2, r2)
    else {
        panic!("local::pair made another kind");
    };
    let ways = [
        Direction::new(s1, r2, lengths(&mut random, 100, 1 << 20)),
        Direction::new(s2, r1, lengths(&mut random, 100, 1 << 20)),
    ];
    run(ways, &mut random);
}

#[test]
fn both_sides_may_send_everything_before_either_receives() {
    let mut random = Random(5);
    let (ours, theirs) = sockets(2, None);
    let ((s1, r1), (s2, r2)) = (tcp::pair(ours).unwrap(), tcp::pair(theirs).unwrap());
    let (Sender::Tcp(s1), Receiver::Tcp(r1), Sender::Tcp(s2), Receiver::Tcp(r2)) = (s1, r1, s2, r2) else {
        panic!("tcp::pair made another kind");
    };
    let mut ways = [Direction::new(s1, r2, vec![1 << 20; 24]), Direction::new(s2, r1, vec![1 << 20; 24])];
    ways.iter_mut().for_each(|way| way.send(24));
    assert!(ways.iter().all(|way| way.sender.pending()), "the test needs more than the sockets hold");
    run(ways, &mut random);
}

#[test]
fn random_traffic_over_sealed_sockets_with_small_buffers() {
    for (lanes, seed) in [(1, 1u64), (3, 2)] {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let (ours, theirs) = sockets(lanes, Some(4096));
        let (ends1, ends2): (Vec<_>, Vec<_>) = (0..lanes).map(|_| session_pair()).unzip();
        let (s1, r1) = tcp::sealed_pair(ours.into_iter().zip(ends1).collect()).unwrap();
        let (s2, r2) = tcp::sealed_pair(theirs.into_iter().zip(ends2).collect()).unwrap();
        let (Sender::Sealed(s1), Receiver::Sealed(r1), Sender::Sealed(s2), Receiver::Sealed(r2)) =
            (s1, r1, s2, r2)
        else {
            panic!("tcp::sealed_pair made another kind");
        };
        let ways = [
            Direction::new(s1, r2, lengths(&mut random, 30, 1 << 20)),
            Direction::new(s2, r1, lengths(&mut random, 30, 1 << 20)),
        ];
        run(ways, &mut random);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// As below, with records of their own cut on top of it.
    #[test]
    fn random_traffic_over_sealed_lanes_that_trickle(
        seed in 1u64..,
        weights in prop::collection::vec(1u32..100, 1..3),
        room in 1usize..100_000,
        step in prop_oneof![1u64..200, 1000u64..60_000],
    ) {
        let mut random = Random(seed);
        let largest = if step < 1000 || room < 1000 { 3000 } else { 200 << 10 };
        let way = |random: &mut Random| {
            let (outlets, inlets) = weights.iter().map(|_| {
                let (outlet, inlet) = trickle::lane(random.next(), room, step);
                let (one, two) = session_pair();
                (sealed::Outlet::new(outlet, one.sealer), sealed::Inlet::new(inlet, two.opener))
            }).unzip();
            let split = Split::new(&weights);
            let sender = stripe::Sender::new(outlets, split.clone());
            Direction::new(sender, stripe::Receiver::new(inlets, split), lengths(random, 10, largest))
        };
        let ways = [way(&mut random), way(&mut random)];
        run(ways, &mut random);
    }

    /// Every way to cut a stream into reads and writes: headers in pieces, parts that lag behind, lanes of unequal weight.
    #[test]
    fn random_traffic_over_lanes_that_trickle(
        seed in 1u64..,
        weights in prop::collection::vec(1u32..100, 1..5),
        room in 1usize..100_000,
        step in prop_oneof![1u64..200, 1000u64..60_000],
    ) {
        let mut random = Random(seed);
        // Enough for the largest to be cut over four lanes, as long as the steps let it through in reasonable time.
        let largest = if step < 1000 || room < 1000 { 3000 } else { 400 << 10 };
        let way = |random: &mut Random| {
            let (outlets, inlets) = weights.iter().map(|_| trickle::lane(random.next(), room, step)).unzip();
            let split = Split::new(&weights);
            let sender = stripe::Sender::new(outlets, split.clone());
            Direction::new(sender, stripe::Receiver::new(inlets, split), lengths(random, 12, largest))
        };
        let ways = [way(&mut random), way(&mut random)];
        run(ways, &mut random);
    }
}
