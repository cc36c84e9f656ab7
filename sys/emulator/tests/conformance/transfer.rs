//! Messages arrive: whole, in order, between processes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use raccl_emulator::{Fault, Layout};
use raccl_sys::Completion;

use crate::lab::*;

#[test]
fn messages_of_every_size_arrive_between_processes() {
    let spec = Layout::mesh().spec(2);
    processes(&spec, |lab| {
        let bench = lab.bench("rdma_en2");
        let pair = bench.pair(1024);
        let peers = lab.exchange("peers", &peer_bytes(&bench.peer(pair.number())));
        let port = bench.connect(pair, &peer_of(&peers[1 - lab.machine]));
        let sizes =
            [0, 1, 7, 8, 79, 80, 81, 100, 4095, 4096, 4097, 8192, 65_536, 65_537, 1 << 20, (4 << 20) - 1];
        let half = MEMORY / 2;
        for (id, len) in sizes.into_iter().enumerate() {
            let id = id as u64;
            port.recv(id, half, len).unwrap();
            lab.barrier(&format!("posted-{id}"));
            port.write(0, &pattern(id * 2 + lab.machine as u64, len));
            port.send(100 + id, 0, len).unwrap();
            let mut ids = [port.wait(), port.wait()].map(|done| {
                done.check(&port.bench.context).unwrap();
                if done.is_receive() {
                    assert_eq!(done.bytes(), len);
                }
                done.id()
            });
            ids.sort_unstable();
            assert_eq!(ids, [id, 100 + id]);
            assert_eq!(port.read(half, len), pattern(id * 2 + (1 - lab.machine) as u64, len), "{len} bytes");
        }
    });
}

/// A small generator of numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }
}

/// A message as the model has it.
struct Expected {
    seed: u64,
    len: usize,
    lost: bool,
    corrupt: bool,
}

#[test]
fn whatever_two_ends_do_messages_arrive_as_a_queue_would_pass_them() {
    let spec = Layout::mesh().latency_ns(2_000).bandwidth(3_000_000_000).spec(2);
    one_process(&spec, |lab| {
        const SLOT: usize = 4096;
        const DEPTH: u64 = 16;
        let mut random = Random(0x1234_5678_9abc_def1);
        for _ in 0..10 {
            let (a, b) = lab.wire(DEPTH as u32);
            let mut expected = VecDeque::new();
            let (mut posted, mut received) = (0, 0);
            let (mut sent, mut completed) = (0, 0);
            let mut trap = None;
            let deadline = Instant::now() + LONG;
            while received < 400 {
                assert!(
                    Instant::now() < deadline,
                    "{received} of {posted} receives, {completed} of {sent} sends"
                );
                match random.below(6) {
                    0 | 1 if posted - received < DEPTH => {
                        b.recv(posted, posted as usize % DEPTH as usize * SLOT, SLOT).unwrap();
                        posted += 1;
                    }
                    2 | 3 if sent - completed < DEPTH => {
                        let len = random.below(SLOT as u64 + 1) as usize;
                        let offset = sent as usize % DEPTH as usize * SLOT;
                        a.write(offset, &pattern(sent, len));
                        a.send(sent, offset, len).unwrap();
                        let (lost, corrupt) = (trap == Some(true), trap == Some(false));
                        expected.push_back(Expected { seed: sent, len, lost, corrupt });
                        trap = None;
                        sent += 1;
                    }
                    4 if trap.is_none() && random.below(4) == 0 => {
                        let lose = random.below(2) == 0;
                        let fault = if lose {
                            Fault::Lose { cable: 0, end: 0, message: 0, every: None }
                        } else {
                            Fault::Corrupt { cable: 0, end: 0, message: 0, every: None }
                        };
                        lab.emulation.inject(&fault).unwrap();
                        trap = Some(lose);
                    }
                    _ => {
                        for done in a.poll() {
                            done.check(&a.bench.context).unwrap();
                            assert_eq!(done.id(), completed);
                            completed += 1;
                        }
                        for done in b.poll() {
                            done.check(&b.bench.context).unwrap();
                            assert_eq!(done.id(), received);
                            let message: Expected = loop {
                                let message = expected.pop_front().expect("nothing comes from nowhere");
                                if !message.lost {
                                    break message;
                                }
                            };
                            assert_eq!(done.bytes(), message.len);
                            let bytes = b.read(received as usize % DEPTH as usize * SLOT, message.len);
                            let original = pattern(message.seed, message.len);
                            let flipped: u32 =
                                bytes.iter().zip(&original).map(|(x, y)| (x ^ y).count_ones()).sum();
                            assert_eq!(flipped, u32::from(message.corrupt && message.len > 0));
                            received += 1;
                        }
                    }
                }
            }
            if trap.is_some() {
                // It would hit the next round's first message.
                b.recv(posted, 0, SLOT).unwrap();
                while a.send(sent, MEMORY / 2, 1).is_err() {
                    a.poll();
                }
            }
        }
        assert_eq!(lab.emulation.books().mistakes, Default::default());
    });
}

#[test]
fn several_threads_may_work_on_one_queue_pair() {
    one_process(&Layout::mesh().spec(2), |lab| {
        const COUNT: u64 = 2000;
        const SLOTS: u64 = 16;
        let (a, b) = lab.wire(64);
        let (a, b) = (&a, &b);
        // How many of each have been posted and completed, for the windows.
        let [sent, received] = [const { AtomicU64::new(0) }; 2];
        let (sent, received) = (&sent, &received);
        let offset = |id: u64| (id % SLOTS) as usize * 8192;
        let wait = |counter: &AtomicU64, id: u64| {
            let deadline = Instant::now() + LONG;
            while id >= counter.load(Ordering::Acquire) + SLOTS {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            // For each end one thread that posts and one that polls.
            scope.spawn(move || {
                for id in 0..COUNT {
                    wait(received, id);
                    b.recv(id, offset(id), 8192).unwrap();
                }
            });
            scope.spawn(move || {
                for id in 0..COUNT {
                    wait(sent, id);
                    a.write(offset(id), &pattern(id, 5000));
                    a.send(id, offset(id), 5000).unwrap();
                }
            });
            scope.spawn(move || {
                for id in 0..COUNT {
                    a.wait_for(id);
                    sent.store(id + 1, Ordering::Release);
                }
            });
            for id in 0..COUNT {
                b.wait_for(id);
                assert_eq!(b.read(offset(id), 5000), pattern(id, 5000));
                received.store(id + 1, Ordering::Release);
            }
        });
    });
}

#[test]
fn threads_that_poll_one_queue_find_each_message_once() {
    one_process(&Layout::mesh().latency_ns(5_000).spec(2), |lab| {
        const COUNT: u64 = 4000;
        const SLOTS: u64 = 16;
        let (a, b) = lab.wire(64);
        let found = AtomicU64::new(0);
        let offset = |id: u64| (id % SLOTS) as usize * 4096;
        let deadline = Instant::now() + LONG;
        let poll = || {
            let mut ids = Vec::new();
            while found.load(Ordering::Acquire) < COUNT {
                assert!(Instant::now() < deadline);
                let mut done = [Completion::default(); 2];
                let count = b.bench.queue.poll(&mut done).unwrap();
                for done in &done[..count] {
                    done.check(&b.bench.context).unwrap();
                    assert_eq!(b.read(offset(done.id()), 100), pattern(done.id(), 100));
                    ids.push(done.id());
                    found.fetch_add(1, Ordering::AcqRel);
                }
                std::thread::yield_now();
            }
            ids
        };
        let mut ids = std::thread::scope(|scope| {
            let pollers = [scope.spawn(poll), scope.spawn(poll)];
            for id in 0..COUNT {
                // A slot is used again when all before have been read, whoever is at which.
                while found.load(Ordering::Acquire) < id / SLOTS * SLOTS {
                    assert!(Instant::now() < deadline);
                    std::thread::yield_now();
                }
                b.recv(id, offset(id), 100).unwrap();
                a.write(offset(id), &pattern(id, 100));
                a.send(id, offset(id), 100).unwrap();
                a.wait_for(id);
            }
            pollers.map(|poller| poller.join().unwrap()).concat()
        });
        ids.sort_unstable();
        assert!(ids.into_iter().eq(0..COUNT));
    });
}

#[test]
fn all_machines_of_a_mesh_send_to_all_at_once() {
    let spec = Layout::mesh().cables(2).latency_ns(1_000).spec(4);
    processes(&spec, |lab| {
        let names = lab.emulation.spec().device_names();
        let mine = &names[lab.machine];
        let benches: Vec<_> = (0..4)
            .flat_map(|other| {
                mine[other].iter().enumerate().map(move |(cable, device)| (other, cable, device))
            })
            .map(|(other, cable, device)| (other, cable, lab.bench(device)))
            .collect();
        let pairs: Vec<_> = benches.iter().map(|(.., bench)| bench.pair(64)).collect();
        // Each machine publishes, for each other and cable, its end: 20 bytes at (other * 2 + cable).
        let mut ends = vec![0; 4 * 2 * 20];
        for ((other, cable, bench), pair) in benches.iter().zip(&pairs) {
            let at = (other * 2 + cable) * 20;
            ends[at..at + 20].copy_from_slice(&peer_bytes(&bench.peer(pair.number())));
        }
        let all = lab.exchange("ends", &ends);
        let ports: Vec<_> = benches
            .into_iter()
            .zip(pairs)
            .map(|((other, cable, bench), pair)| {
                let at = (lab.machine * 2 + cable) * 20;
                (other, cable, bench.connect(pair, &peer_of(&all[other][at..at + 20])))
            })
            .collect();
        let len = 10_000;
        for round in 0..20 {
            for (_, _, port) in &ports {
                port.recv(0, MEMORY / 2, 3 * 4096).unwrap();
            }
            lab.barrier(&format!("round-{round}"));
            let seed =
                |from: usize, to: usize, cable: usize| (round * 64 + from * 16 + to * 4 + cable) as u64;
            for (other, cable, port) in &ports {
                port.write(0, &pattern(seed(lab.machine, *other, *cable), len));
                port.send(1, 0, len).unwrap();
            }
            for (other, cable, port) in &ports {
                for _ in 0..2 {
                    port.wait().check(&port.bench.context).unwrap();
                }
                assert_eq!(port.read(MEMORY / 2, len), pattern(seed(*other, lab.machine, *cable), len));
            }
        }
    });
}
