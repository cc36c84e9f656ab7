//! Groups whose members leave at different moments.

use std::{thread, time::Duration};

use raccl::{Error, Sum};

use crate::support::{Links, group, random::Random, setting};

/// After its last operation every rank leaves when it likes; what it has sent arrives all the same.
fn members_leave_when_they_like(links: Links, groups: usize) {
    let seed = setting("RACCL_TEST_SEED", 1);
    println!("seed {seed}, {groups} groups");
    for index in 0..groups {
        let mut random = Random::new((seed * 100_000 + index) as u64);
        let size = 2 + random.below(3);
        let last = random.below(4);
        group(links, size, move |comm| {
            let mut random = Random::new((index * 16 + comm.rank()) as u64);
            let rank = comm.rank();
            let mut values = vec![rank as u32; 1000];
            comm.all_reduce(&mut values, Sum).unwrap();
            match last {
                0 => comm.barrier().unwrap(),
                1 => {
                    let mut everything = vec![0; 3000 * size];
                    comm.all_gather_into(&vec![rank; 3000], &mut everything).unwrap();
                    assert!(everything.iter().enumerate().all(|(i, &from)| from == i / 3000));
                }
                2 => {
                    let mut values = vec![if rank == 0 { 7_u8 } else { 0 }; 200_000];
                    comm.broadcast(&mut values, 0).unwrap();
                    assert!(values.iter().all(|&value| value == 7));
                }
                _ if rank == 0 => {
                    // Rank 0 sends and leaves at once; the others look for their message when they find time.
                    for peer in 1..size {
                        comm.send(&vec![peer; 4000], peer, 5).unwrap();
                    }
                }
                _ => {
                    thread::sleep(Duration::from_micros(random.below(3000) as u64));
                    let mut message = vec![0; 4000];
                    assert_eq!(comm.recv(&mut message, 0, 5).unwrap(), 4000);
                    assert!(message.iter().all(|&value| value == rank));
                }
            }
            thread::sleep(Duration::from_micros(random.below(2000) as u64));
            comm.close().unwrap();
        });
    }
}

#[test]
fn members_leave_when_they_like_in_memory() {
    members_leave_when_they_like(Links::Local, setting("RACCL_TEST_GROUPS", 100));
}

#[test]
fn members_leave_when_they_like_over_tcp() {
    members_leave_when_they_like(Links::Tcp(1), setting("RACCL_TEST_GROUPS", 60));
}

#[test]
fn who_needs_a_rank_that_has_left_is_told_so() {
    for links in [Links::Local, Links::Tcp(1)] {
        group(links, 2, |comm| {
            if comm.rank() == 0 {
                comm.close().unwrap();
            } else {
                let error = comm.all_reduce(&mut [1], Sum).unwrap_err();
                assert!(matches!(error, Error::PeerLost { peer: 0, .. }), "{error}");
                assert!(error.to_string().contains("lost rank 0"), "{error}");
                let again = comm.barrier().unwrap_err();
                assert!(matches!(again, Error::PeerLost { peer: 0, .. }), "{again}");
            }
        });
    }
}
