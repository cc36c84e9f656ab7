//! Calls from inside a user-defined operation, which would wait for the thread that makes them.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use raccl::{Collective, Communicator, Custom, Error, Result, Sum, local_group};

use crate::support::{Links, group};

const BOTH: [Links; 2] = [Links::Local, Links::Tcp(1)];

/// Runs `body` in the middle of an all-reduce, once, and gives back what the all-reduce returned.
fn inside(comm: &Communicator, body: impl FnOnce() + Send) -> Result<()> {
    let (body, ran) = (Mutex::new(Some(body)), AtomicBool::new(false));
    let operation = Custom::new(|left: &u64, right: &u64| {
        let body = body.lock().unwrap().take();
        if let Some(body) = body {
            body();
            ran.store(true, Ordering::Relaxed);
        }
        left + right
    });
    let mut values = [1_u64; 8];
    let result = comm.all_reduce(&mut values, operation);
    result.inspect(|()| {
        assert!(ran.load(Ordering::Relaxed), "the operation did not run");
        assert_eq!(values, [comm.size() as u64; 8]);
    })
}

/// Everything that returns a result, with the name under which it is refused.
fn everything(comm: &Communicator) -> Vec<(&'static str, Result<()>)> {
    let (size, me) = (comm.size(), comm.rank());
    let other = (me + 1) % size;
    let mut all = vec![0_u32; 3 * size];
    let counts = vec![3; size];
    let (ones, mut three, long) = ([1_u32; 3], [0_u32; 3], vec![0_u8; 100_000]);
    let nothing = |_| ();
    vec![
        ("barrier", comm.barrier()),
        ("all_reduce", comm.all_reduce(&mut three, Sum)),
        ("all_reduce", comm.all_reduce_into(&ones, &mut three, Sum)),
        ("all_gather", comm.all_gather(&mut all)),
        ("all_gather", comm.all_gather_into(&ones, &mut all)),
        ("all_gather_v", comm.all_gather_v(&mut all, &counts)),
        ("reduce_scatter", comm.reduce_scatter(&mut all, Sum).map(nothing)),
        ("reduce_scatter", comm.reduce_scatter_into(&all, &mut three, Sum)),
        ("reduce_scatter_v", comm.reduce_scatter_v_into(&all, &mut three, &counts, Sum)),
        ("broadcast", comm.broadcast(&mut three, 0)),
        ("send", comm.send(&ones, other, 1)),
        ("send", comm.send(&long, other, 1)),
        ("send", comm.send(&ones, me, 1)),
        ("recv", comm.recv(&mut three, other, 1).map(|_| ())),
        ("send_recv", comm.send_recv(&ones, other, &mut three, other, 1).map(|_| ())),
        ("split", comm.split(Some(0), 0).map(|_| ())),
        ("split", comm.duplicate().map(|_| ())),
        ("shrink", comm.shrink().map(|_| ())),
        ("send", comm.scope(|scope| scope.send(&ones, other, 1)?.wait())),
        ("recv", comm.scope(|scope| scope.recv(&mut three, other, 1)?.wait().map(|_| ()))),
        ("all_reduce", comm.scope(|scope| scope.all_reduce(&mut all, &Sum)?.wait())),
        ("close", comm.clone().close()),
    ]
}

fn assert_refused(all: Vec<(&'static str, Result<()>)>, by: usize) {
    for (name, result) in all {
        let error = result.expect_err(name);
        let Error::InvalidArgument { operation, rank, reason } = &error else { panic!("{name}: {error}") };
        assert_eq!((*operation, *rank), (name, by), "{error}");
        assert!(
            reason.contains("user-defined operation") && reason.contains("after the reduction"),
            "{error}"
        );
    }
}

#[test]
fn every_call_inside_a_user_defined_operation_is_refused() {
    for links in BOTH {
        group(links, 3, |comm| {
            let other = local_group(2).unwrap().remove(0);
            let row = comm.split(Some(comm.rank() as u64 / 2), 0).unwrap().unwrap();
            for _ in 0..2 {
                inside(&comm, || {
                    assert_refused(everything(&comm), comm.rank());
                    assert_refused(everything(&row), row.rank());
                    assert_refused(everything(&other), 0);
                    assert!(comm.flight_record().calls.is_empty());
                    // What takes no lock is allowed.
                    assert_eq!(comm.with_timeout(std::time::Duration::ZERO).size(), 3);
                    assert!(!comm.explain(Collective::AllReduce, 8).candidates.is_empty());
                    assert!(comm.link(comm.rank()).unwrap().is_none());
                })
                .unwrap();
            }
            // Nothing of it has happened.
            let mut sum = [1_u8];
            row.all_reduce(&mut sum, Sum).unwrap();
            assert_eq!(usize::from(sum[0]), row.size());
            comm.barrier().unwrap();
            comm.close().unwrap();
        });
    }
}

#[test]
fn communicators_may_be_dropped_inside_a_user_defined_operation() {
    for links in BOTH {
        group(links, 2, |comm| {
            for _ in 0..3 {
                let (half, copy) = (comm.split(Some(0), 0).unwrap(), comm.duplicate().unwrap());
                let mut others = local_group(2).unwrap();
                inside(&comm, || {
                    drop(half);
                    copy.close().unwrap_err();
                    // One of its group, which goes on, and then the last.
                    drop(others.pop());
                    drop(others);
                })
                .unwrap();
                comm.barrier().unwrap();
            }
            comm.close().unwrap();
        });
    }
}

#[test]
fn a_user_defined_operation_may_abort() {
    for links in BOTH {
        group(links, 3, |comm| {
            let aborter = 1;
            let error = inside(&comm, || {
                if comm.rank() == aborter {
                    comm.abort();
                }
            })
            .and_then(|()| comm.barrier())
            .unwrap_err();
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
        });
    }
}
