//! Groups that are made and closed again and again in one process.

use std::{fs, thread, time::Duration};

use raccl::{Communicator, Sum, local_group};

use crate::{
    fleet::{Fleet, say},
    kills::BOUND,
    support::{Meeting, child, rank_command, ranks, setting},
};

/// What a process holds.
#[derive(Debug, Clone, Copy)]
struct Holdings {
    descriptors: usize,
    threads: usize,
    kilobytes: usize,
}

impl Holdings {
    fn now() -> Holdings {
        let entries = |path| fs::read_dir(path).map_or(0, Iterator::count);
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kilobytes = resident.trim().trim_end_matches("kB").trim().parse().unwrap();
        Holdings { descriptors: entries("/proc/self/fd"), threads: entries("/proc/self/task"), kilobytes }
    }

    /// What is left once the monitor's thread has seen off the last sockets.
    fn settled() -> Holdings {
        let mut last = Holdings::now();
        for _ in 0..300 {
            thread::sleep(Duration::from_millis(10));
            let now = Holdings::now();
            if (now.descriptors, now.threads) == (last.descriptors, last.threads) && now.threads <= 2 {
                return now;
            }
            last = now;
        }
        last
    }
}

/// In a process of its own, because other tests open and close things too.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "counts in /proc")]
fn groups_that_come_and_go_leave_nothing_behind() {
    const NAME: &str = "cycles::groups_that_come_and_go_leave_nothing_behind";
    if child(NAME).is_some() {
        return come_and_go();
    }
    let ends = Fleet::run(vec![rank_command(NAME, 0, 1, "127.0.0.1:1")]).finish(10 * BOUND);
    let end = &ends[0];
    end.assert_well("cycles");
    assert!(end.heard("flat").is_some(), "{end:#?}");
    end.said.iter().for_each(|line| println!("{line}"));
}

fn come_and_go() {
    let cycles = setting("RACCL_TEST_CYCLES", 60);
    // Memory that is taken once, and kept by allocator, thread locals and the like.
    (0..20).for_each(cycle);
    let before = Holdings::settled();
    say(&format!("before {before:?}"));
    (0..cycles).for_each(cycle);
    let after = Holdings::settled();
    say(&format!("after {cycles} cycles {after:?}"));
    assert_eq!(after.descriptors, before.descriptors, "descriptors");
    assert_eq!(after.threads, before.threads, "threads");
    // A leak of one group's smallest buffer in every cycle would be far more.
    let allowed = before.kilobytes + 2048 + cycles;
    assert!(after.kilobytes <= allowed, "{before:?}, {after:?}");
    say("flat");
}

/// A group of two threads and one of two over TCP, used and closed; now and then after a failure.
fn cycle(index: usize) {
    let locals = local_group(2).unwrap();
    let locals: Vec<_> = locals.into_iter().map(|comm| thread::spawn(move || live(comm, index))).collect();
    locals.into_iter().for_each(|rank| rank.join().unwrap());
    let meeting = Meeting::new();
    ranks(2, move |rank| live(meeting.config(rank, 2).sockets(1 + index % 2).connect().unwrap(), index));
}

fn live(comm: Communicator, index: usize) {
    let mut values = vec![comm.rank() as u32 + 1; 10_000];
    comm.all_reduce(&mut values, Sum).unwrap();
    assert!(values.iter().all(|&value| value == 3));
    let half = comm.split(Some(comm.rank() as u64), 0).unwrap();
    drop(half);
    // Whoever comes through this knows that the other has come so far.
    let _ = comm.barrier();
    if index.is_multiple_of(4) {
        let shrunk = comm.shrink().unwrap();
        drop(comm);
        return use_and_leave(shrunk, index);
    }
    use_and_leave(comm, index);
}

fn use_and_leave(comm: Communicator, index: usize) {
    comm.barrier().unwrap();
    match index % 5 {
        0 if comm.rank() == 0 => {
            comm.barrier().unwrap();
            comm.abort();
        }
        0 => while comm.barrier().is_ok() {},
        1 => drop(comm),
        _ => comm.close().unwrap(),
    }
}
