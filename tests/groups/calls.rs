//! Scopes, user-defined operations, aborting, deadlines and splits.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::{Duration, Instant},
};

use raccl::{Custom, Error, Sum};

use crate::support::{Links, group};

const BOTH: [Links; 2] = [Links::Local, Links::Tcp(1)];

/// A product of 2 x 2 matrices depends on the order of its factors.
fn times(a: &[i64; 4], b: &[i64; 4]) -> [i64; 4] {
    let entry = |row: usize, column: usize| {
        a[2 * row].wrapping_mul(b[column]).wrapping_add(a[2 * row + 1].wrapping_mul(b[2 + column]))
    };
    [entry(0, 0), entry(0, 1), entry(1, 0), entry(1, 1)]
}

#[test]
fn a_user_defined_operation_is_applied_in_rank_order() {
    let factor = |rank: usize, i: usize| [1, rank as i64 + 1, i as i64 % 5, 1];
    for links in BOTH {
        for size in [1, 2, 3, 5, 7] {
            for count in [1, 10, 20_000] {
                group(links, size, move |comm| {
                    let mut values: Vec<[i64; 4]> = (0..count).map(|i| factor(comm.rank(), i)).collect();
                    comm.all_reduce(&mut values, Custom::new(times)).unwrap();
                    for (i, value) in values.iter().enumerate() {
                        let expected =
                            (1..size).fold(factor(0, i), |left, rank| times(&left, &factor(rank, i)));
                        assert_eq!(*value, expected, "element {i} of {count} on {size} ranks");
                    }
                });
            }
        }
    }
}

#[test]
fn a_panic_in_a_user_defined_operation_is_an_error_everywhere() {
    for links in BOTH {
        group(links, 3, |comm| {
            let bomb = Custom::new(|left: &u32, right: &u32| {
                assert!(left + right < 3, "too much");
                left + right
            });
            let error =
                comm.all_reduce(&mut [comm.rank() as u32], bomb).and_then(|()| comm.barrier()).unwrap_err();
            assert!(
                matches!(error, Error::OperationPanicked { .. } | Error::Remote { .. })
                    && error.to_string().contains("too much"),
                "{error}"
            );
        });
    }
}

#[test]
fn a_scope_finishes_what_was_not_waited_for() {
    for links in BOTH {
        group(links, 2, |comm| {
            let other = 1 - comm.rank();
            let (sent, mut received) = (vec![comm.rank() as u8; 300_000], vec![9_u8; 300_000]);
            let mut sums = [[1_u32; 4], [2; 4]];
            comm.scope(|scope| {
                let _ = scope.recv(&mut received, other, 1)?;
                let _ = scope.send(&sent, other, 1)?;
                let [first, second] = &mut sums;
                let _ = scope.all_reduce(first, &Sum)?;
                let pending = scope.all_reduce(second, &Sum)?;
                while !pending.test()? {
                    thread::yield_now();
                }
                pending.wait()
            })
            .unwrap();
            assert!(received.iter().all(|&value| usize::from(value) == other));
            assert_eq!(sums, [[2; 4], [4; 4]]);
        });
    }
}

#[test]
fn a_panic_in_a_scope_still_finishes_its_operations() {
    group(Links::Tcp(1), 2, |comm| {
        let other = 1 - comm.rank();
        let mut received = vec![0_u8; 100_000];
        let panic = catch_unwind(AssertUnwindSafe(|| {
            comm.scope(|scope| -> raccl::Result<()> {
                let _ = scope.recv(&mut received, other, 1)?;
                comm.send(&vec![5_u8; 100_000], other, 1)?;
                panic!("in the middle");
            })
        }));
        assert!(panic.is_err());
        assert!(received.iter().all(|&value| value == 5));
        comm.barrier().unwrap();
    });
}

#[test]
fn abort_ends_the_calls_of_every_rank() {
    for links in BOTH {
        group(links, 3, |comm| {
            if comm.rank() == 1 {
                // Long enough for the others to sleep in their calls.
                thread::sleep(Duration::from_millis(150));
                comm.abort();
            } else {
                let error = comm.recv(&mut [0_u8], 1, 0).unwrap_err();
                assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
            }
            assert!(matches!(comm.barrier(), Err(Error::Aborted { by: 1, .. })));
        });
    }
}

#[test]
fn a_rank_that_never_comes_is_an_error_that_names_it() {
    for links in BOTH {
        group(links, 2, |comm| {
            if comm.rank() == 0 {
                let patient = comm.with_late_timeout(Duration::from_millis(200));
                let begin = Instant::now();
                let error = patient.all_reduce(&mut [1.0_f32], Sum).unwrap_err();
                assert!(begin.elapsed() >= Duration::from_millis(200));
                assert!(matches!(error, Error::Timeout { peer: 1, bytes: 0, .. }), "{error}");
            } else {
                // Ends with the other rank's failure, which it does not cause.
                let error = comm.recv(&mut [0_u8], 0, 0).unwrap_err();
                assert!(matches!(error, Error::Remote { by: 0, .. }), "{error}");
            }
        });
    }
}

#[test]
fn splits_of_splits_have_the_ranks_that_their_keys_say() {
    for links in BOTH {
        group(links, 6, |comm| {
            let rank = comm.rank();
            let half = comm.split(Some(rank as u64 % 2), -(rank as i64)).unwrap().unwrap();
            assert_eq!((half.size(), half.rank()), (3, 2 - rank / 2));
            let some = half.split((half.rank() > 0).then_some(9), 0).unwrap();
            assert_eq!(
                some.as_ref().map(|part| (part.size(), part.rank())),
                [None, Some((2, 0)), Some((2, 1))][half.rank()]
            );
            if let Some(part) = some {
                let mut members = [0, 0];
                part.all_gather_into(&[rank], &mut members).unwrap();
                assert_eq!(members, [2 + rank % 2, rank % 2]);
            }
            for _ in 0..100 {
                comm.duplicate().unwrap();
            }
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn messages_overtake_the_making_of_their_communicator() {
    group(Links::Tcp(1), 2, |comm| {
        let copy = comm.duplicate().unwrap();
        if comm.rank() == 0 {
            for value in 0..100_u32 {
                copy.send(&[value], 1, 0).unwrap();
            }
        } else {
            thread::sleep(Duration::from_millis(20));
            for value in 0..100_u32 {
                let mut message = [0];
                copy.recv(&mut message, 0, 0).unwrap();
                assert_eq!(message, [value]);
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_sender_is_held_back_until_its_receiver_comes() {
    group(Links::Tcp(1), 2, |comm| {
        const MESSAGES: u64 = 20_000;
        if comm.rank() == 0 {
            for value in 0..MESSAGES {
                comm.send(&[value; 16], 1, 0).unwrap();
            }
        } else {
            thread::sleep(Duration::from_millis(100));
            for value in 0..MESSAGES {
                let mut message = [0; 16];
                comm.recv(&mut message, 0, 0).unwrap();
                assert_eq!(message, [value; 16]);
            }
        }
    });
}
