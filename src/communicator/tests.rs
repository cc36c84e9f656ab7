//! Groups of threads.
use super::*;
use crate::{Sum, local_group};

fn run<R: Send>(size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let group = local_group(size).unwrap();
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
