//! Ranks that make different calls learn of it, whatever the calls are, and nobody takes wrong data for right.

use std::{
    thread,
    time::{Duration, Instant},
};

use raccl::{Avg, Communicator, Error, Max, Min, Result, Sum};

use crate::support::{HANG, Links, configured_group, group};

/// A collective call that one of the ranks may make instead of another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Barrier,
    AllReduce,
    AllReduceMax,
    AllReduceInts,
    AllReduceLonger,
    AllReduceLong,
    AllReduceNothing,
    AllReduceAvg,
    AllGather,
    AllGatherLong,
    AllGatherV,
    AllGatherVOtherCounts,
    ReduceScatter,
    ReduceScatterV,
    ReduceScatterMin,
    BroadcastFromFirst,
    BroadcastFromLast,
    BroadcastFromLastLong,
    BroadcastWide,
    Split,
}

use Call::*;

const CALLS: [Call; 20] = [
    Barrier,
    AllReduce,
    AllReduceMax,
    AllReduceInts,
    AllReduceLonger,
    AllReduceLong,
    AllReduceNothing,
    AllReduceAvg,
    AllGather,
    AllGatherLong,
    AllGatherV,
    AllGatherVOtherCounts,
    ReduceScatter,
    ReduceScatterV,
    ReduceScatterMin,
    BroadcastFromFirst,
    BroadcastFromLast,
    BroadcastFromLastLong,
    BroadcastWide,
    Split,
];

/// More than is sent ahead.
const LONG: usize = 50_000;

impl Call {
    fn make(self, comm: &Communicator) -> Result<()> {
        let size = comm.size();
        let last = size - 1;
        let uneven = |first: usize| {
            let mut counts = vec![2; size];
            counts[0] = first;
            counts[last] = 4 - first;
            counts
        };
        match self {
            Barrier => comm.barrier(),
            AllReduce => comm.all_reduce(&mut [1.0_f32; 12], Sum),
            AllReduceMax => comm.all_reduce(&mut [1.0_f32; 12], Max),
            AllReduceInts => comm.all_reduce(&mut [1_i32; 12], Sum),
            AllReduceLonger => comm.all_reduce(&mut [1.0_f32; 13], Sum),
            AllReduceLong => comm.all_reduce(&mut vec![1.0_f32; LONG], Sum),
            AllReduceNothing => comm.all_reduce(&mut [0.0_f32; 0], Sum),
            AllReduceAvg => comm.all_reduce(&mut vec![1.0_f32; LONG], Avg),
            AllGather => comm.all_gather(&mut vec![1.0_f32; 4 * size]),
            AllGatherLong => comm.all_gather(&mut vec![1_u8; LONG * size]),
            AllGatherV => comm.all_gather_v(&mut vec![1.0_f32; 2 * size], &uneven(1)),
            AllGatherVOtherCounts => comm.all_gather_v(&mut vec![1.0_f32; 2 * size], &uneven(3)),
            ReduceScatter => comm.reduce_scatter(&mut vec![1.0_f32; 2 * size], Sum).map(|_| ()),
            ReduceScatterV => {
                comm.reduce_scatter_v(&mut vec![1.0_f32; 2 * size], &uneven(1), Sum).map(|_| ())
            }
            ReduceScatterMin => comm.reduce_scatter(&mut vec![1.0_f32; 2 * size], Min).map(|_| ()),
            BroadcastFromFirst => comm.broadcast(&mut [1.0_f32; 12], 0),
            BroadcastFromLast => comm.broadcast(&mut [1.0_f32; 12], last),
            BroadcastFromLastLong => comm.broadcast(&mut vec![1_u8; LONG], last),
            BroadcastWide => comm.broadcast(&mut [1.0_f64; 12], 0),
            Split => comm.split(Some(0), 0).map(|_| ()),
        }
    }

    /// How an error names it.
    fn name(self, size: usize) -> String {
        let last = size - 1;
        match self {
            Barrier => "barrier".to_owned(),
            AllReduce => "all_reduce(sum of 12 f32".to_owned(),
            AllReduceMax => "all_reduce(max of 12 f32".to_owned(),
            AllReduceInts => "all_reduce(sum of 12 i32".to_owned(),
            AllReduceLonger => "all_reduce(sum of 13 f32".to_owned(),
            AllReduceLong => format!("all_reduce(sum of {LONG} f32"),
            AllReduceNothing => "all_reduce(sum of 0 f32".to_owned(),
            AllReduceAvg => format!("all_reduce(avg of {LONG} f32"),
            AllGather => format!("all_gather({} x 4 bytes", 4 * size),
            AllGatherLong => format!("all_gather({} x 1 bytes", LONG * size),
            AllGatherV | AllGatherVOtherCounts => format!("all_gather_v({} x 4 bytes, counts ", 2 * size),
            ReduceScatter => format!("reduce_scatter(sum of {} f32", 2 * size),
            ReduceScatterV => format!("reduce_scatter_v(sum of {} f32, counts ", 2 * size),
            ReduceScatterMin => format!("reduce_scatter(min of {} f32", 2 * size),
            BroadcastFromFirst => "broadcast(12 x 4 bytes from root 0".to_owned(),
            BroadcastFromLast => format!("broadcast(12 x 4 bytes from root {last}"),
            BroadcastFromLastLong => format!("broadcast({LONG} x 1 bytes from root {last}"),
            BroadcastWide => "broadcast(12 x 8 bytes from root 0".to_owned(),
            Split => "split".to_owned(),
        }
    }
}

/// Checks that an error is a mismatch that names both calls.
fn names_both(error: &Error, one: Call, other: Call, size: usize) {
    let Error::Mismatch { sequence: 1, mine, theirs, rank, peer, .. } = error else {
        panic!("{one:?} and {other:?}: {error:?}");
    };
    assert!(rank != peer && *rank.max(peer) < size, "{error}");
    let (one, other) = (one.name(size), other.name(size));
    let straight = mine.starts_with(&one) && theirs.starts_with(&other);
    let crossed = mine.starts_with(&other) && theirs.starts_with(&one);
    assert!(straight || crossed, "{one} and {other}: {error}");
    assert!(error.to_string().contains(mine) && error.to_string().contains(theirs), "{error}");
}

/// One rank calls `odd`, the others call `even`, then all call `next`.
fn disagree(comm: &Communicator, odd_rank: usize, odd: Call, even: Call, next: Call) {
    // Once in agreement, so that the mismatch is at place 1. Who is slow hears of it in here.
    if let Err(error) = comm.barrier() {
        names_both(&error, odd, even, comm.size());
    }
    if let Err(error) = if comm.rank() == odd_rank { odd } else { even }.make(comm) {
        names_both(&error, odd, even, comm.size());
    }
    let Err(error) = next.make(comm) else {
        panic!("rank {} never heard of {odd:?} and {even:?}", comm.rank())
    };
    names_both(&error, odd, even, comm.size());
    // Over and over, without waiting for anything.
    let begin = Instant::now();
    for call in CALLS {
        names_both(&call.make(comm).unwrap_err(), odd, even, comm.size());
    }
    names_both(&comm.send(&[1_u8], 0, 0).unwrap_err(), odd, even, comm.size());
    names_both(&comm.recv(&mut [1_u8], 0, 0).unwrap_err(), odd, even, comm.size());
    assert!(begin.elapsed() < HANG / 4);
}

fn all_pairs(links: Links, size: usize, next: Call) {
    let mut turn = 0;
    for odd in CALLS {
        for even in CALLS.into_iter().filter(|&even| even != odd) {
            turn += 1;
            let odd_rank = turn % size;
            group(links, size, move |comm| disagree(&comm, odd_rank, odd, even, next));
        }
    }
}

#[test]
fn every_pair_of_calls_on_two_ranks_fails_on_both() {
    all_pairs(Links::Local, 2, Barrier);
}

#[test]
fn every_pair_of_calls_on_three_ranks_fails_on_all() {
    all_pairs(Links::Local, 3, AllReduce);
}

#[test]
fn every_pair_of_calls_on_four_ranks_fails_on_all() {
    all_pairs(Links::Local, 4, Barrier);
}

/// A broadcast's root hears of nobody in it, and yet knows in its next broadcast.
#[test]
fn a_broadcast_is_a_call_that_knows_too() {
    all_pairs(Links::Local, 2, BroadcastFromFirst);
    all_pairs(Links::Local, 3, BroadcastFromFirst);
    all_pairs(Links::Local, 3, BroadcastFromLast);
    all_pairs(Links::Local, 4, BroadcastFromLastLong);
}

#[test]
fn calls_that_differ_fail_over_tcp_too() {
    let pairs = [
        (AllReduce, AllReduceMax),
        (AllReduceLong, Barrier),
        (BroadcastFromFirst, BroadcastFromLast),
        (BroadcastFromLastLong, AllGatherLong),
        (AllGatherV, AllGatherVOtherCounts),
        (ReduceScatter, Split),
    ];
    for size in 2..=4 {
        for (index, (odd, even)) in pairs.into_iter().enumerate() {
            for next in [Barrier, AllGather, ReduceScatter, BroadcastFromFirst, BroadcastFromLast, Split] {
                group(Links::Tcp(1 + index % 2), size, move |comm| {
                    disagree(&comm, index % comm.size(), odd, even, next);
                });
            }
        }
    }
}

/// The root of a broadcast never hears of the one who called something else and who has no message for it.
#[test]
fn a_call_that_only_sends_is_followed_by_one_that_knows() {
    for size in 3..=5 {
        for next in
            [Barrier, AllReduce, AllGather, AllReduceLong, BroadcastFromFirst, BroadcastFromLast, Split]
        {
            for _ in 0..5 {
                group(Links::Local, size, move |comm| {
                    disagree(&comm, comm.size() - 1, BroadcastFromLast, BroadcastFromFirst, next);
                });
            }
        }
    }
}

#[test]
fn two_ranks_that_each_wait_for_the_others_broadcast_learn_of_it() {
    group(Links::Local, 2, |comm| {
        // No message meets: each is a receiver.
        let error = comm.broadcast(&mut [0.0_f32; 12], 1 - comm.rank()).unwrap_err();
        let Error::Mismatch { sequence: 0, mine, theirs, .. } = &error else { panic!("{error}") };
        assert!(mine.contains("from root") && theirs.contains("from root") && mine != theirs, "{error}");
    });
}

#[test]
fn a_split_and_a_gather_of_the_same_bytes_are_not_the_same_call() {
    for odd_rank in 0..2 {
        group(Links::Local, 2, move |comm| {
            let result = if comm.rank() == odd_rank {
                comm.all_gather(&mut [[0_u64; 4]; 2])
            } else {
                comm.split(Some(1), 0).map(|_| ())
            };
            let error = result.and_then(|()| comm.barrier()).unwrap_err();
            let Error::Mismatch { mine, theirs, .. } = &error else { panic!("{error}") };
            let text = format!("{mine} {theirs}");
            assert!(text.contains("split") && text.contains("all_gather("), "{error}");
        });
    }
}

#[test]
fn what_a_late_rank_calls_is_compared_with_what_is_long_over() {
    for next in [Barrier, BroadcastFromFirst, BroadcastFromLast] {
        group(Links::Local, 2, move |comm| {
            if comm.rank() == 0 {
                // Returns before the other rank has entered.
                comm.broadcast(&mut [1_u32], 0).unwrap();
                comm.send(&[0_u8], 1, 0).unwrap();
                let error = next.make(&comm).unwrap_err();
                assert!(matches!(error, Error::Mismatch { sequence: 0, .. }), "{error}");
            } else {
                comm.recv(&mut [0_u8], 0, 0).unwrap();
                let error = comm.all_reduce(&mut [7_u32], Sum).unwrap_err();
                assert!(matches!(error, Error::Mismatch { sequence: 0, .. }), "{error}");
            }
        });
    }
}

/// Also where the roots take turns: none sends before it knows that all the others made the call before.
#[test]
fn roots_that_take_turns_reach_everybody_in_order() {
    for size in 2..=5 {
        group(Links::Tcp(1), size, move |comm| {
            for turn in 0..400 {
                let root = [0, turn % size, turn / 7 % size][turn % 3];
                let mut data = [if comm.rank() == root { turn as u64 } else { 0 }; 3];
                comm.broadcast(&mut data, root).unwrap();
                assert_eq!(data, [turn as u64; 3]);
            }
        });
    }
}

#[test]
fn a_root_waits_for_who_is_late_no_longer_than_the_deadline() {
    let configure = |config: raccl::Config| config.late_timeout(Duration::from_millis(300));
    configured_group(Links::Tcp(1), 2, configure, |comm| {
        if comm.rank() == 0 {
            comm.broadcast(&mut [1_u8], 0).unwrap();
            let error = comm.broadcast(&mut [1_u8], 0).unwrap_err();
            let Error::Timeout { peer: 1, detail, .. } = &error else { panic!("{error}") };
            assert!(detail.contains("rank 1 has not entered the broadcast before"), "{error}");
        } else {
            // As long as it takes until the root has given up.
            let patient = comm.with_late_timeout(Duration::ZERO);
            let error = patient.recv(&mut [0_u8], 0, 0).unwrap_err();
            assert!(matches!(error, Error::Remote { .. }), "{error}");
        }
    });
}

#[test]
fn a_collective_that_meets_a_message_ends_by_its_deadline() {
    let configure = |config: raccl::Config| {
        config.timeout(Duration::from_millis(300)).late_timeout(Duration::from_millis(300))
    };
    configured_group(Links::Tcp(1), 2, configure, |comm| {
        let error = if comm.rank() == 0 {
            comm.all_reduce(&mut [1.0_f32; 4], Sum).unwrap_err()
        } else {
            comm.recv(&mut [0.0_f32; 4], 0, 0).unwrap_err()
        };
        // One of the two was first; the other heard of it.
        let named = matches!(error, Error::Timeout { .. })
            || error.to_string().contains("failed first") && error.to_string().contains("nothing from rank");
        assert!(named, "{error}");
    });
}

#[test]
fn a_mismatch_in_a_part_of_the_group_fails_all_of_it() {
    group(Links::Local, 4, |comm| {
        // Whoever is slow hears of it in the split already.
        let row = comm.split(Some(comm.rank() as u64 / 2), 0).map(Option::unwrap);
        let row = match row {
            Ok(row) => row,
            Err(error) => {
                assert!(matches!(error, Error::Mismatch { rank: 0 | 1, peer: 0 | 1, .. }), "{error}");
                return;
            }
        };
        if comm.rank() < 2 {
            let result = if comm.rank() == 0 { row.barrier() } else { row.all_reduce(&mut [1_u8], Sum) };
            let error = result.and_then(|()| row.barrier()).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        } else {
            // The others are only told.
            let until = Instant::now() + HANG / 2;
            let error = loop {
                match row.barrier() {
                    Ok(()) => assert!(Instant::now() < until, "nobody told us"),
                    Err(error) => break error,
                }
                thread::sleep(Duration::from_millis(1));
            };
            assert!(matches!(error, Error::Mismatch { rank: 0 | 1, peer: 0 | 1, .. }), "{error}");
        }
        assert!(comm.barrier().is_err());
    });
}
