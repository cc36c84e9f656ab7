//! Groups of threads.

mod cabling;

use half::bf16;
use num_complex::Complex;

use super::*;
use crate::{
    Avg, Fractional, Sum,
    link::{self, LinkKind},
    local_group,
    topology::Topology,
};

fn run<R: Send>(size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    run_on(local_group(size).unwrap(), body)
}

fn run_on<R: Send>(group: Vec<Communicator>, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let body = &body;
    std::thread::scope(|threads| {
        let ranks: Vec<_> = group.into_iter().map(|comm| threads.spawn(move || body(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn all_reduce_adds() {
    for size in 1..6 {
        for count in [0, 1, 3, 1000, 100_000, 1_000_003] {
            run(size, |comm| {
                let input: Vec<f32> = (0..count).map(|i| (i % 100 + comm.rank()) as f32).collect();
                let mut output = vec![0.0; count];
                comm.all_reduce_into(&input, &mut output, Sum).unwrap();
                let expected = |i: usize| (size * (i % 100) + size * (size - 1) / 2) as f32;
                assert!((0..count).all(|i| output[i] == expected(i)));
                let mut buffer = input;
                comm.all_reduce(&mut buffer, Sum).unwrap();
                assert!(buffer == output);
                comm.barrier().unwrap();
                let row = comm.split(Some(comm.rank() as u64 % 2), 0).unwrap().unwrap();
                row.barrier().unwrap();
                let mut all = vec![0; comm.size()];
                comm.all_gather_into(&[comm.rank()], &mut all).unwrap();
                assert_eq!(all, (0..size).collect::<Vec<_>>());
            });
        }
    }
}

#[test]
fn splits_at_the_same_time_make_different_communicators() {
    run(2, |comm| {
        let (first, second) = (comm.duplicate().unwrap(), comm.duplicate().unwrap());
        let begun = std::sync::Barrier::new(2);
        let split = |parent: Communicator| {
            begun.wait();
            parent.duplicate().unwrap()
        };
        let (a, b) = std::thread::scope(|threads| {
            let (a, b) = (threads.spawn(|| split(first)), threads.spawn(|| split(second)));
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_ne!(a.inner.shared.id, b.inner.shared.id);
        let mut values = [1_u32, 10];
        let (one, ten) = values.split_at_mut(1);
        std::thread::scope(|threads| {
            threads.spawn(|| a.all_reduce(one, Sum).unwrap());
            threads.spawn(|| b.all_reduce(ten, Sum).unwrap());
        });
        assert_eq!(values, [2, 20]);
    });
}

#[test]
fn stored_messages_do_not_hold_up_a_collective() {
    run(2, |comm| {
        let comm = comm.with_late_timeout(Duration::from_secs(20));
        let mut buffer = [7_u8; 1000];
        // As many as are sent ahead at all, so that nothing is left for the broadcast.
        let messages = crate::engine::BUDGET as usize / 1064;
        if comm.rank() == 0 {
            (0..messages).for_each(|i| comm.send(&[i as u8; 1000], 1, 5).unwrap());
        }
        comm.broadcast(&mut buffer, 0).unwrap();
        if comm.rank() == 1 {
            for i in 0..messages {
                assert_eq!(comm.recv(&mut buffer, 0, 5).unwrap(), 1000);
                assert_eq!(buffer, [i as u8; 1000]);
            }
        }
    });
}

#[test]
fn plans_go_with_their_communicator() {
    let comm = local_group(1).unwrap().remove(0);
    let plan = comm.inner.planner.plan(plan_of(&[1]), 0, 1, true, 1, 1, false);
    let kept = Arc::downgrade(&plan);
    drop(plan);
    comm.all_gather(&mut [1_u8]).unwrap();
    assert!(kept.upgrade().is_some_and(|plan| plan.spare.lock().is_some()), "the call used another plan");
    drop(comm);
    assert!(kept.upgrade().is_none());
}

fn plan_of(counts: &[usize]) -> crate::plan::Collective {
    crate::plan::Collective::AllGather { counts: counts.to_vec() }
}

#[test]
fn a_rank_that_has_left_is_not_told_that_another_is_lost() {
    let mut group = local_group(2).unwrap();
    let (one, zero) = (group.pop().unwrap(), group.pop().unwrap());
    one.engine().leave().unwrap();
    zero.close().unwrap();
    one.close().unwrap();
}

#[test]
fn a_started_all_reduce_meets_a_blocking_one_of_any_length() {
    let count = (3 << 20) + 8;
    run(2, |comm| {
        let mut values = vec![1_u8 + comm.rank() as u8; count];
        if comm.rank() == 0 {
            comm.all_reduce(&mut values, Sum).unwrap();
        } else {
            comm.scope(|scope| scope.all_reduce(&mut values, &Sum)?.wait()).unwrap();
        }
        assert!(values.iter().all(|&value| value == 3));
    });
}

#[test]
fn a_send_ends_when_its_peer_leaves() {
    let mut group = local_group(2).unwrap();
    let (one, zero) = (group.pop().unwrap(), group.pop().unwrap());
    std::thread::scope(|threads| {
        // More than a link holds; the first that does not fit waits for the peer.
        let sending = threads.spawn(|| (0..64).try_for_each(|_| zero.send(&[0_u8; 60_000], 1, 0)));
        while !zero.engine().is_pushing(1) && !sending.is_finished() {
            std::thread::yield_now();
        }
        drop(one);
        assert!(matches!(sending.join().unwrap(), Err(Error::PeerLost { peer: 1, .. })));
    });
}

/// Numbers that no two orders of addition sum to the same bits, on the whole.
fn sample(rank: usize, i: usize) -> f32 {
    let mixed = (rank as u64 * 1_000_003 + i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f32 / 4e6 - 2.1
}

/// The bits of sums and averages of f32, bf16 and complex numbers, in place and not.
fn bits(comm: &Communicator, count: usize) -> Vec<u8> {
    fn of<T: Fractional>(comm: &Communicator, mine: Vec<T>, bits: &mut Vec<u8>) {
        let mut output = vec![T::zeroed(); mine.len()];
        comm.all_reduce_into(&mine, &mut output, Sum).unwrap();
        bits.extend_from_slice(bytemuck::cast_slice(&output));
        let mut output = mine;
        comm.all_reduce(&mut output, Avg).unwrap();
        bits.extend_from_slice(bytemuck::cast_slice(&output));
    }
    let mine = |i| sample(comm.rank(), i);
    let mut bits = Vec::new();
    of::<f32>(comm, (0..count).map(mine).collect(), &mut bits);
    of::<bf16>(comm, (0..count).map(|i| bf16::from_f32(mine(i))).collect(), &mut bits);
    of::<Complex<f32>>(comm, (0..count).map(|i| Complex::new(mine(i), mine(i + 7))).collect(), &mut bits);
    bits
}

/// What tests over processes prove of the default chunk holds for every other.
#[test]
fn no_chunk_size_changes_bits() {
    for size in 2..=9 {
        for algorithm in [
            "one_shot",
            "two_shot",
            "recursive_doubling",
            "recursive_halving",
            "ring",
            "bidirectional_ring",
            "line",
        ] {
            let with_chunk = |chunk| {
                let overrides = format!("all_reduce:{algorithm}").parse().unwrap();
                let topology = Topology::new(&vec![(); size], LinkKind::Local, LinkKind::Local, 2, overrides);
                let link =
                    |low: &Arc<_>, high: &Arc<_>| Ok(link::local::pair(Arc::clone(low), Arc::clone(high)));
                let mut group = local::threads(topology, link).unwrap();
                for comm in &mut group {
                    Arc::get_mut(&mut comm.inner).unwrap().planner.set_chunk(chunk);
                }
                let all = run_on(group, |comm| {
                    assert_eq!(comm.explain(Collective::AllReduce, 4000).algorithm.name(), algorithm);
                    bits(&comm, 3001)
                });
                assert!(all.iter().all(|bits| *bits == all[0]), "{algorithm} on {size} ranks, chunk {chunk}");
                all.into_iter().next()
            };
            let whole = with_chunk(1 << 20);
            for chunk in [16, 1000, 5000] {
                assert!(with_chunk(chunk) == whole, "{algorithm} on {size} ranks, chunk {chunk}");
            }
        }
    }
}

/// Whoever is refused inside a user-defined operation has waited for nothing: the scope still does.
#[test]
fn what_may_not_be_waited_for_stays_in_its_scope() {
    let comm = local_group(1).unwrap().remove(0);
    let mut buffer = [0_u8; 3];
    comm.scope(|scope| {
        let pending = scope.recv(&mut buffer, 0, 9)?;
        assert!(matches!(crate::engine::inside(|| pending.test()), Err(Error::InvalidArgument { .. })));
        assert!(matches!(crate::engine::inside(|| pending.wait()), Err(Error::InvalidArgument { .. })));
        comm.send(b"abc", 0, 9)
    })
    .unwrap();
    assert_eq!(&buffer, b"abc");
}
