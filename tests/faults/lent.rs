//! Faults while devices send from memory of the user and receive there: whoever is told of one has the memory back.
//!
//! The emulated devices notice what no real one tells: memory that is deregistered while a device may still use it, and bytes
//! that change while they are sent.

use std::{
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::{Duration, Instant},
};

use raccl::{Buffer, Communicator, Config, Custom, Result, Sum};
use raccl_emulator::{Emulation, Fault, Layout, Mistakes, Verb};

use crate::{
    fleet::{Fleet, chain, say},
    kills::{BOUND, seed},
    support::{child, random::Random, setting},
};

/// What goes wrong, in the words of the ranks' environment.
const HARMS: [&str; 14] = [
    "cut", "port", "lose", "lose", "lose", "corrupt", "stall", "fail", "kill", "stop", "abort", "term",
    "panic", "absent",
];

#[test]
fn memory_is_the_users_again_whatever_goes_wrong() {
    const NAME: &str = "lent::memory_is_the_users_again_whatever_goes_wrong";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    let (injections, seed) = (setting("RACCL_TEST_INJECTIONS", 14), seed());
    for seed in seed..seed + injections as u64 {
        inject(NAME, seed);
    }
}

fn inject(name: &str, seed: u64) {
    let mut random = Random::new(seed);
    let harm = HARMS[seed as usize % HARMS.len()];
    let (size, cables) = (2 + random.below(4) / 3, 1 + random.below(3));
    let bulk = ["64K*8", "64K*8", "8K*2", "256K*4", "512K*2"][random.below(5)];
    let victim = random.below(size);
    // Where devices take their time, more is with them when something happens.
    let bandwidth = [300_000_000, 2_000_000_000, 100_000_000_000][random.below(3)];
    let spec = Layout::mesh().cables(cables).latency_ns(2000).bandwidth(bandwidth).spec(size);
    let emulation = Emulation::create(&spec).unwrap();
    let variables = [
        ("RACCL_TEST_SEED", seed.to_string()),
        ("RACCL_TEST_HARM", harm.to_owned()),
        ("RACCL_TEST_VICTIM", victim.to_string()),
        ("RACCL_VERBS_BULK", bulk.to_owned()),
        // What is lost last is noticed by the next word.
        ("RACCL_VERBS_KEEP_ALIVE", "300ms".to_owned()),
        ("RACCL_TIMEOUT", "4s".to_owned()),
        ("RACCL_LATE_TIMEOUT", "4s".to_owned()),
    ];
    let began = Instant::now();
    let mut fleet = Fleet::start_on(Some(&emulation), name, size, &variables);
    let others: Vec<usize> = (0..size).filter(|&rank| rank != victim).collect();
    fleet.wait_for("up", &(0..size).collect::<Vec<_>>());
    thread::sleep(Duration::from_micros(random.below(60_000) as u64));
    let cable = random.below(spec.cables.len());
    let end = random.below(2);
    // Few are small, so that what is hit carries bytes of the user more often than not.
    let message = random.below(400) as u64;
    let at = &spec.cables[cable].ends[end];
    let (machine, device) = (at.machine, at.device.clone());
    let fault = match harm {
        "cut" => Some(Fault::Cut { cable, message: Some(message) }),
        "port" => Some(Fault::PortDown { machine, device }),
        "lose" => Some(Fault::Lose { cable, end, message, every: None }),
        "corrupt" => Some(Fault::Corrupt { cable, end, message, every: None }),
        "stall" => Some(Fault::Stall { cable, end, message }),
        "fail" => {
            let verb = [Verb::IbvPostSend, Verb::IbvPostRecv, Verb::IbvPollCq][random.below(3)];
            Some(Fault::Fail { machine, device, verb, errno: 5, skip: message as u32, times: 1 })
        }
        _ => None,
    };
    let story =
        format!("seed {seed}: {harm} {fault:?}, victim {victim}, {size} ranks, {cables} cables, bulk {bulk}");
    println!("{story}");
    fault.inspect(|fault| emulation.inject(fault).unwrap());
    match harm {
        "kill" => _ = fleet.kill(victim),
        "term" => fleet.signal(victim, "TERM"),
        "stop" => {
            fleet.signal(victim, "STOP");
            fleet.wait_for("failed", &others);
            fleet.signal(victim, "CONT");
        }
        _ => {}
    }
    let ends = fleet.finish(BOUND);
    let story = format!("{story}: {ends:#?}");
    for (rank, end) in ends.iter().enumerate() {
        if rank == victim && matches!(harm, "kill" | "term") {
            continue;
        }
        end.assert_well(&story);
        // One bit of the user's bytes is not noticed unless payloads are summed.
        let Some(error) = end.heard("failed") else {
            assert!(harm == "corrupt" && end.heard("closed").is_some(), "{story}");
            continue;
        };
        let names_it = match harm {
            "kill" | "term" => error.contains(&format!("lost rank {victim}")),
            "abort" => error.contains(&format!("aborted by rank {victim}")),
            "panic" => error.contains("panicked") || error.contains(&format!("rank {victim}")),
            "stop" | "absent" => error.contains("nothing from rank"),
            _ => error.contains("verbs") || error.contains("cable"),
        };
        assert!(names_it, "{error}: {story}");
    }
    // The message behind a lost one may not fit the receive that it meets.
    let mut found = emulation.books().mistakes;
    if harm == "lose" {
        found.frame_mismatches = 0;
    }
    assert_eq!(found, Mistakes::default(), "{story}");
    for end in spec.cables.iter().flat_map(|cable| &cable.ends) {
        if harm != "kill" || end.machine != victim {
            let books = emulation.books_of(end.machine, &end.device).unwrap();
            assert!(books.live.is_zero(), "{books:?} is left: {story}");
        }
    }
    println!("{:?}", began.elapsed());
}

/// A rank: moves large buffers until something happens.
fn work(config: Config) {
    let harm = std::env::var("RACCL_TEST_HARM").unwrap();
    let comm = config.connect().unwrap();
    let is_victim = comm.rank() == setting("RACCL_TEST_VICTIM", 0);
    let second = comm.duplicate().unwrap();
    say("up");
    let mut random = Random::new(seed());
    let rounds = if harm == "corrupt" { 6 } else { usize::MAX };
    let after = 2 + random.below(6);
    let result = thread::scope(|threads| {
        let (harm, second) = (harm.as_str(), &second);
        threads.spawn(move || beside(second, harm, is_victim));
        (0..rounds).try_for_each(|turn| {
            if harm == "absent" && is_victim && turn == after {
                thread::sleep(Duration::from_secs(6));
            }
            round(&comm, &mut random, turn as u32, harm == "corrupt")
        })
    });
    match result.and_then(|()| comm.barrier()) {
        Ok(()) => say("closed"),
        Err(error) => {
            say(&format!("failed {}", chain(&error)));
            assert!(comm.barrier().is_err(), "the group goes on after {error}");
        }
    }
}

#[test]
fn buffers_outlive_a_group_that_fails_and_are_ordinary_memory_in_the_next() {
    const NAME: &str = "lent::buffers_outlive_a_group_that_fails_and_are_ordinary_memory_in_the_next";
    if let Some(config) = child(NAME) {
        return shrink(config);
    }
    let emulation = Emulation::create(&Layout::mesh().cables(2).latency_ns(2000).spec(3)).unwrap();
    let mut fleet = Fleet::start_on(Some(&emulation), NAME, 3, &[]);
    fleet.wait_for("up", &[0, 1, 2]);
    fleet.kill(2);
    for end in &fleet.finish(BOUND)[..2] {
        end.assert_well("shrink");
        assert!(end.heard("went on").is_some(), "{end:#?}");
    }
    assert_eq!(emulation.books().mistakes, Mistakes::default());
    for (machine, device) in
        [0, 1].into_iter().flat_map(|machine| (2..6).map(move |device| (machine, device)))
    {
        let books = emulation.books_of(machine, &format!("rdma_en{device}")).unwrap();
        assert!(books.live.is_zero(), "{books:?} is left");
    }
}

fn shrink(config: Config) {
    let comm = config.connect().unwrap();
    let mut random = Random::new(5);
    let mut buffer = Lent::new(&comm, 1_000_000);
    let unused = Lent::new(&comm, 10);
    say("up");
    while round(&comm, &mut random, 0, false).is_ok() {}
    let smaller = comm.shrink().unwrap();
    let value = |rank: usize, index: usize| (index ^ rank << 20) as u32;
    let exchange = |mine: &mut [u32], theirs: &mut [u32]| {
        let (rank, other) = (smaller.rank(), 1 - smaller.rank());
        mine.iter_mut().enumerate().for_each(|(index, at)| *at = value(rank, index));
        smaller.send_recv(mine, other, theirs, other, 1).unwrap();
        assert!(theirs.iter().enumerate().all(|(index, &found)| found == value(other, index)));
        smaller.all_reduce(theirs, Sum).unwrap();
        smaller.uncopied().received
    };
    let mut ordinary = vec![0; 1_000_000];
    assert_eq!(exchange(&mut buffer, &mut ordinary), 0);
    assert_eq!(exchange(&mut ordinary, &mut buffer), 0);
    // The old group's devices go, and its buffers stay.
    drop(comm);
    assert_eq!(exchange(&mut buffer, &mut ordinary), 0);
    let (mut one, mut other) = (Lent::new(&smaller, 1_000_000), Lent::new(&smaller, 1_000_000));
    assert!(exchange(&mut one, &mut other) > 0);
    drop(unused);
    smaller.close().unwrap();
    say("went on");
}

/// What another thread of the rank does meanwhile.
fn beside(second: &Communicator, harm: &str, is_victim: bool) {
    match harm {
        "abort" if is_victim => {
            thread::sleep(Duration::from_millis(50));
            second.abort();
        }
        "panic" => {
            let operation = Custom::new(|&left: &u32, &right: &u32| {
                assert!(!is_victim || left + right < 200, "the user's operation panicked");
                left + right
            });
            let calls = || (0..).try_for_each(|turn: u32| second.all_reduce(&mut [turn], operation));
            // A panic of the caller's own is the caller's.
            let _ended = catch_unwind(AssertUnwindSafe(calls));
        }
        _ => {}
    }
}

/// One exchange of buffers, on all ranks the same, and its results.
fn round(comm: &Communicator, random: &mut Random, turn: u32, is_harmed: bool) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let length = 50_000 + random.below(1_500_000);
    let root = random.below(size);
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let value =
        |rank: usize, index: usize| (index as u32).wrapping_mul(0x9E37_79B9) ^ (rank as u32 + 16 * turn);
    let of = |rank: usize, into: &mut [u32]| {
        into.iter_mut().enumerate().for_each(|(index, at)| *at = value(rank, index));
    };
    let check = |found: &[u32], expected: &dyn Fn(usize) -> u32, what: &str| {
        let wrong = found.iter().enumerate().find(|&(index, &found)| found != expected(index));
        assert!(is_harmed || wrong.is_none(), "{what} of {length} in turn {turn}: {wrong:?}");
    };
    match random.below(6) {
        0 => {
            let (mut mine, mut theirs) = (Lent::new(comm, length), Lent::new(comm, length));
            of(rank, &mut mine);
            comm.send_recv(&mine, next, &mut theirs, last, 1)?;
            check(&theirs, &|index| value(last, index), "send_recv");
        }
        1 => {
            let mut bytes = Lent::new(comm, length);
            let to = (root + 1) % size;
            // What is lost of one may not be made up for by the next.
            for message in 0..4 {
                if rank == root {
                    bytes
                        .iter_mut()
                        .enumerate()
                        .for_each(|(index, at)| *at = value(root, index).wrapping_add(message));
                    comm.send(&bytes, to, 2)?;
                } else if rank == to {
                    comm.recv(&mut bytes, root, 2)?;
                    check(
                        &bytes,
                        &|index| value(root, index).wrapping_add(message),
                        &format!("message {message}"),
                    );
                }
            }
        }
        2 => {
            let mut all = Lent::new(comm, length * size);
            of(rank, &mut all[rank * length..(rank + 1) * length]);
            comm.all_gather(&mut all)?;
            check(&all, &|index| value(index / length, index % length), "all_gather");
        }
        3 => {
            let mut bytes = Lent::new(comm, length);
            of(rank, &mut bytes);
            comm.broadcast(&mut bytes, root)?;
            check(&bytes, &|index| value(root, index), "broadcast");
        }
        4 => {
            let mut bytes = Lent::new(comm, length);
            of(rank, &mut bytes);
            comm.all_reduce(&mut bytes, Sum)?;
            let sum = |index| (0..size).map(|rank| value(rank, index)).fold(0, u32::wrapping_add);
            check(&bytes, &sum, "all_reduce");
        }
        _ => {
            // Of the user's own memory, and both ways at the same time.
            let mut memory = vec![0; 2 * length];
            let exchange = |memory: &mut [u32]| {
                let (mine, theirs) = memory.split_at_mut(length);
                of(rank, mine);
                let exchanged = comm.scope(|scope| {
                    let receiving = scope.recv(theirs, last, 3)?;
                    let sending = scope.send(mine, next, 3)?;
                    sending.wait()?;
                    receiving.wait().map(|_| ())
                });
                if exchanged.is_ok() {
                    check(theirs, &|index| value(last, index), "scope");
                }
                memory.fill(SPOILT);
                exchanged
            };
            comm.with_registered(&mut memory, exchange)??;
        }
    }
    Ok(())
}

/// What users make of their memory as soon as it is theirs again.
const SPOILT: u32 = 0xDEAD_BEEF;

/// A buffer that is overwritten and given back at once, whatever happens.
struct Lent(Buffer<u32>);

impl Lent {
    fn new(comm: &Communicator, length: usize) -> Lent {
        Lent(comm.allocate(length).unwrap())
    }
}

impl Deref for Lent {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u32] {
        &mut self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.0.fill(SPOILT);
    }
}
