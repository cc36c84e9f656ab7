//! Several threads of a rank in one group at the same time.

use std::thread;

use raccl::{Communicator, Sum};

use crate::support::{Links, group, random::Random, setting};

/// Messages that the other rank's first thread receives; the last one has this value.
const MAIL: u64 = 1;
const END: u64 = u64::MAX;

/// One thread of each rank waits in `recv` all the time; the other sends, reduces on the same communicator and on a split of it.
fn receives_beside_everything_else(links: Links) {
    let steps = setting("RACCL_TEST_STEPS", 1000);
    let seed = setting("RACCL_TEST_SEED", 1);
    println!("seed {seed}, {steps} steps");
    group(links, 2, move |comm| {
        let part = comm.split(Some(0), 0).unwrap().unwrap();
        let other = 1 - comm.rank();
        let reader = {
            let comm = comm.clone();
            thread::spawn(move || read(&comm, other))
        };
        // Both ranks draw the same numbers, so they make the same collective calls.
        let mut random = Random::new(seed as u64);
        let mut sent = 0;
        for step in 0..steps as u64 {
            let length = [0, 1, 7, 300, 5000, 40_000][random.below(6)];
            match random.below(4) {
                0 | 1 => {
                    let mut message = vec![step; length + 1];
                    message[length] = sent;
                    comm.send(&message, other, MAIL).unwrap();
                    sent += 1;
                }
                2 => reduce(&comm, step, length),
                _ => reduce(&part, step, length),
            }
        }
        comm.send(&[END], other, MAIL).unwrap();
        // Both ranks sent as often.
        assert_eq!(reader.join().unwrap(), sent);
    });
}

fn read(comm: &Communicator, other: usize) -> u64 {
    let mut buffer = vec![0_u64; 50_000];
    let mut received = 0;
    loop {
        let count = comm.recv(&mut buffer, other, MAIL).unwrap();
        if buffer[..count] == [END] {
            return received;
        }
        assert_eq!(buffer[count - 1], received, "messages of one sender stay in order");
        assert!(buffer[..count - 1].windows(2).all(|pair| pair[0] == pair[1]));
        received += 1;
    }
}

fn reduce(comm: &Communicator, step: u64, length: usize) {
    let mut values = vec![step + comm.rank() as u64; length];
    comm.all_reduce(&mut values, Sum).unwrap();
    assert!(values.iter().all(|&value| value == 2 * step + 1), "step {step}");
}

#[test]
fn a_receiving_thread_disturbs_nobody_in_memory() {
    receives_beside_everything_else(Links::Local);
}

#[test]
fn a_receiving_thread_disturbs_nobody_over_tcp() {
    receives_beside_everything_else(Links::Tcp(2));
}

/// Threads of one rank on communicators of their own, all at once.
#[test]
fn communicators_of_different_threads_do_not_meet() {
    group(Links::Tcp(1), 3, |comm| {
        let mut parts: Vec<Communicator> = (0..4).map(|_| comm.duplicate().unwrap()).collect();
        thread::scope(|threads| {
            for (index, part) in parts.iter_mut().enumerate() {
                threads.spawn(move || {
                    for step in 0..100 {
                        let mut values = vec![index as i64 * 1000 + step; 500 * (index + 1)];
                        part.all_reduce(&mut values, Sum).unwrap();
                        assert!(values.iter().all(|&value| value == 3 * (index as i64 * 1000 + step)));
                    }
                });
            }
        });
    });
}
