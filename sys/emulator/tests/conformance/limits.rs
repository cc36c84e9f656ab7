//! How much a device has, over all processes.

use raccl_emulator::{Layout, Limits, Resource, Spec};
use raccl_sys::{Depths, Error, QueuePairOptions, Transport};

use crate::lab::*;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

fn failed<T: std::fmt::Debug>(result: Result<T, Error>, verb: &str, number: i32) {
    match result {
        Err(Error::Verb { verb: failed, errno, .. }) => assert_eq!((failed, errno.number()), (verb, number)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn limits_are_reported_with_one_queue_pair_more_than_can_be_used() {
    one_process(&two(), |lab| {
        let limits = lab.open("m0.rdma_en2").limits().unwrap().expect("they can be asked for");
        assert_eq!((limits.queue_pairs, limits.domains, limits.regions), (11, 11, 100));
        assert_eq!((limits.completion_queues, limits.ports), (11, 1));
        assert_eq!(limits.work_requests, 8192);
    });
}

#[test]
fn the_eleventh_queue_pair_is_refused_as_busy() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let pairs: Vec<_> = (0..10).map(|_| bench.pair(4)).collect();
        let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: 4, recv: 4 } };
        failed(bench.domain.queue_pair(&options, &bench.queue, &bench.queue), "ibv_create_qp", 16);
        let error = bench.domain.queue_pair(&options, &bench.queue, &bench.queue).unwrap_err().to_string();
        assert!(error.contains("EBUSY") && error.contains("restart"), "{error}");
        // Each device has its own.
        lab.bench("m1.rdma_en2").pair(4);
        drop(pairs);
        bench.pair(4);
    });
}

#[test]
fn two_queue_pairs_can_be_all_there_are() {
    let spec = Spec { limits: Limits { queue_pairs: 2, domains: 6, ..Limits::default() }, ..two() };
    one_process(&spec, |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let limits = bench.context.limits().unwrap().expect("they can be asked for");
        assert_eq!((limits.queue_pairs, limits.domains), (3, 6));
        let _two = (bench.pair(4), bench.pair(4));
        let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: 4, recv: 4 } };
        failed(bench.domain.queue_pair(&options, &bench.queue, &bench.queue), "ibv_create_qp", 16);
    });
}

#[test]
fn domains_queues_and_regions_run_out() {
    one_process(&two(), |lab| {
        let context = lab.open("m0.rdma_en2");
        let domains: Vec<_> = (0..11).map(|_| context.protection_domain().unwrap()).collect();
        failed(context.protection_domain(), "ibv_alloc_pd", 96);
        let queues: Vec<_> = (0..11).map(|_| domains[0].completion_queue(8).unwrap()).collect();
        failed(domains[0].completion_queue(8), "ibv_create_cq", 12);
        let regions: Vec<_> = (0..100).map(|_| domains[1].allocate(1).unwrap()).collect();
        failed(domains[1].allocate(1), "ibv_reg_mr", 12);
        drop((domains, queues, regions));
        assert_eq!(lab.emulation.books().live.domains, 0);
    });
}

#[test]
fn limits_hold_over_all_processes() {
    processes_of_all(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let pairs: Vec<_> = (0..5).map(|_| bench.pair(4)).collect();
        lab.barrier("full");
        let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: 4, recv: 4 } };
        failed(bench.domain.queue_pair(&options, &bench.queue, &bench.queue), "ibv_create_qp", 16);
        lab.barrier("seen");
        drop(pairs);
    });
}

#[test]
fn what_others_have_leaked_is_missing() {
    one_process(&two(), |lab| {
        let leak = |resource, count| raccl_emulator::Fault::Leak {
            machine: 0,
            device: "rdma_en2".into(),
            resource,
            count,
        };
        lab.emulation.inject(&leak(Resource::Domains, 10)).unwrap();
        lab.emulation.inject(&leak(Resource::QueuePairs, 9)).unwrap();
        let bench = lab.bench("m0.rdma_en2");
        failed(bench.context.protection_domain(), "ibv_alloc_pd", 96);
        let _last = bench.pair(4);
        let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: 4, recv: 4 } };
        failed(bench.domain.queue_pair(&options, &bench.queue, &bench.queue), "ibv_create_qp", 16);
        let books = lab.emulation.books_of(0, "rdma_en2").expect("the device is there");
        assert_eq!((books.leaked.domains, books.live.domains), (10, 1));
    });
}

#[test]
fn queues_are_at_most_as_deep_as_reported() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let make = |send, recv| {
            let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send, recv } };
            bench.domain.queue_pair(&options, &bench.queue, &bench.queue)
        };
        make(8192, 8192).unwrap();
        for (send, recv) in [(8193, 1), (1, 8193), (0, 1), (1, 0)] {
            failed(make(send, recv), "ibv_create_qp", 22);
        }
        assert!(matches!(bench.domain.completion_queue(0), Err(Error::Argument { .. })));
        failed(bench.domain.completion_queue(1 << 20), "ibv_create_cq", 22);
    });
}

#[test]
fn reliable_connections_are_refused() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let options = QueuePairOptions { transport: Transport::Rc, depth: Depths { send: 4, recv: 4 } };
        let error = bench.domain.queue_pair(&options, &bench.queue, &bench.queue).unwrap_err();
        assert!(error.to_string().contains("EOPNOTSUPP") && error.to_string().contains("UC"), "{error}");
    });
}
