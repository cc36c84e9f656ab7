//! Everything that can be made to go wrong, and that it goes wrong in silence where the real thing does.

use std::time::{Duration, Instant};

use raccl_emulator::{Fault, Layout, Rules, Spec, Verb};
use raccl_sys::{Error, PortState};

use crate::lab::*;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

/// Sends message `id` from one port to another, and returns what arrived.
fn pass(a: &Port, b: &Port, id: u64, len: usize) -> Vec<u8> {
    b.recv(id, MEMORY / 2, len).unwrap();
    a.write(0, &pattern(id, len));
    a.send(id, 0, len).unwrap();
    b.wait_for(id);
    a.wait_for(id);
    b.read(MEMORY / 2, len)
}

#[test]
fn a_cut_cable_is_silent_and_its_ports_go_down() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        pass(&a, &b, 1, 100);
        lab.emulation.inject(&Fault::Cut { cable: 0, message: None }).unwrap();
        for port in [&a, &b] {
            assert_eq!(port.bench.context.port(1).unwrap().state(), PortState::Down);
        }
        b.recv(2, 0, 100).unwrap();
        a.send(2, 0, 100).unwrap();
        a.stays_silent();
        b.stays_silent();
        // It frees all the same.
        drop((a, b));
        assert!(lab.emulation.books().live.is_zero());
    });
}

#[test]
fn a_cable_can_be_cut_with_a_certain_message() {
    let spec = Layout::mesh().latency_ns(1_000_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(8);
        lab.emulation.inject(&Fault::Cut { cable: 0, message: Some(3) }).unwrap();
        for id in 0..3 {
            pass(&a, &b, id, 5000);
        }
        b.recv(3, 0, 5000).unwrap();
        a.send(3, 0, 5000).unwrap();
        a.stays_silent();
        b.stays_silent();
    });
}

#[test]
fn messages_under_way_are_lost_when_the_cable_is_cut() {
    let spec = Layout::mesh().latency_ns(1_500_000_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(8);
        b.recv(1, 0, 64).unwrap();
        a.send(1, 0, 64).unwrap();
        a.wait_for(1);
        lab.emulation.inject(&Fault::Cut { cable: 0, message: None }).unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        b.stays_silent();
    });
}

#[test]
fn a_cable_that_comes_back_carries_what_waited() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        pass(&a, &b, 1, 64);
        let start = Instant::now();
        lab.emulation.inject(&Fault::Flap { cable: 0, message: None, for_ms: 80 }).unwrap();
        b.recv(2, 0, 64).unwrap();
        a.send(2, 0, 64).unwrap();
        b.wait_for(2);
        a.wait_for(2);
        assert!(start.elapsed() >= Duration::from_millis(80));
        a.bench.context.active_port(1).unwrap();
        pass(&a, &b, 3, 64);
    });
}

#[test]
fn a_flap_loses_what_is_under_way_and_gives_the_receive_back() {
    let spec = Layout::mesh().latency_ns(1_500_000_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(8);
        b.recv(1, 0, 64).unwrap();
        a.send(1, 0, 11).unwrap();
        a.wait_for(1);
        lab.emulation.inject(&Fault::Flap { cable: 0, message: None, for_ms: 1 }).unwrap();
        b.stays_silent();
        a.send(2, 0, 22).unwrap();
        assert_eq!(b.wait_for(1).bytes(), 22);
        a.wait_for(2);
    });
}

#[test]
fn a_lost_message_leaves_its_receive_to_the_next() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        pass(&a, &b, 9, 64);
        lab.emulation.inject(&Fault::Lose { cable: 0, end: 0, message: 1, every: None }).unwrap();
        b.recv(1, 0, 64).unwrap();
        b.recv(2, 0, 64).unwrap();
        for (id, len) in [(1, 11), (2, 22), (3, 33)] {
            a.send(id, 0, len).unwrap();
            a.wait_for(id);
        }
        assert_eq!(b.wait_for(1).bytes(), 11);
        assert_eq!(b.wait_for(2).bytes(), 33);
    });
}

#[test]
fn every_so_many_messages_can_be_lost() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(128);
        lab.emulation.inject(&Fault::Lose { cable: 0, end: 0, message: 4, every: Some(5) }).unwrap();
        for id in 0..100 {
            b.recv(id, 0, 4096).unwrap();
            a.send(id, 0, id as usize).unwrap();
            a.wait_for(id);
        }
        let arrived: Vec<usize> = (0..80).map(|id| b.wait_for(id).bytes()).collect();
        let expected: Vec<usize> = (0..100).filter(|id| id % 5 != 4).collect();
        assert_eq!(arrived, expected);
    });
}

#[test]
fn a_corrupted_message_differs_in_one_bit_and_nothing_tells() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(64);
        for (id, len) in [(0, 1), (1, 80), (2, 81), (3, 4096), (4, 200_000)] {
            lab.emulation.inject(&Fault::Corrupt { cable: 0, end: 0, message: 0, every: None }).unwrap();
            let arrived = pass(&a, &b, id, len);
            let differing: u32 =
                arrived.iter().zip(pattern(id, len)).map(|(x, y)| (x ^ y).count_ones()).sum();
            assert_eq!(differing, 1, "{len} bytes");
            assert_eq!(pass(&a, &b, id, len), pattern(id, len), "the next one is whole");
        }
        assert_eq!(lab.emulation.books().mistakes.early_reuse, 0, "the sender did nothing wrong");
    });
}

#[test]
fn a_stalled_pair_sends_nothing_although_receives_are_posted() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        let (c, d) = lab.wire(8);
        lab.emulation.inject(&Fault::Stall { cable: 0, end: 0, message: 1 }).unwrap();
        pass(&a, &b, 1, 64);
        b.recv(2, 0, 64).unwrap();
        a.send(2, 0, 64).unwrap();
        a.stays_silent();
        b.stays_silent();
        // Another queue pair of the same cable, and the other direction, go on.
        pass(&c, &d, 3, 64);
        a.recv(4, 0, 64).unwrap();
        b.send(4, 0, 64).unwrap();
        a.wait_for(4);
    });
}

#[test]
fn calls_fail_as_they_are_told_to() {
    one_process(&two(), |lab| {
        let fail = |verb, errno, skip, times| {
            let device = "rdma_en2".into();
            lab.emulation.inject(&Fault::Fail { machine: 0, device, verb, errno, skip, times }).unwrap();
        };
        let bench = lab.bench("m0.rdma_en2");
        fail(Verb::IbvAllocPd, 96, 1, 2);
        bench.context.protection_domain().unwrap();
        for _ in 0..2 {
            let error = bench.context.protection_domain().unwrap_err();
            assert!(error.to_string().contains("ENODATA"), "{error}");
        }
        bench.context.protection_domain().unwrap();
        // Numbers are the same error with either sign, in calls that return pointers and in those that do not.
        for errno in [16, -16] {
            for verb in [Verb::IbvOpenDevice, Verb::IbvQueryPort, Verb::IbvQueryGid, Verb::IbvCreateCq] {
                fail(verb, errno, 0, 1);
                let error = match verb {
                    Verb::IbvOpenDevice => lab.try_open("m0.rdma_en2").map(drop),
                    Verb::IbvQueryPort => bench.context.port(1).map(drop),
                    Verb::IbvQueryGid => bench.context.gid(1, 0).map(drop),
                    _ => bench.domain.completion_queue(1).map(drop),
                }
                .unwrap_err();
                assert!(matches!(&error, Error::Verb { errno, .. } if errno.is("EBUSY")), "{error}");
            }
        }
        // The other machine is not concerned.
        fail(Verb::IbvAllocPd, 96, 0, 1);
        lab.bench("m1.rdma_en2");
    });
}

#[test]
fn posting_and_polling_fail_as_they_are_told_to() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        let fail = |verb| {
            let device = "rdma_en2".into();
            let fault = Fault::Fail { machine: 0, device, verb, errno: -12, skip: 0, times: 1 };
            lab.emulation.inject(&fault).unwrap();
        };
        fail(Verb::IbvPostSend);
        assert!(a.send(1, 0, 1).unwrap_err().to_string().contains("ENOMEM"));
        fail(Verb::IbvPostRecv);
        assert!(a.recv(1, 0, 1).unwrap_err().to_string().contains("ENOMEM"));
        fail(Verb::IbvPollCq);
        let error = a.bench.queue.poll(&mut [Default::default()]).unwrap_err();
        assert!(error.to_string().contains("ibv_poll_cq"), "{error}");
        pass(&a, &b, 2, 64);
    });
}

#[test]
fn faults_can_be_there_from_the_start() {
    let spec = Spec { faults: vec![Fault::Lose { cable: 0, end: 0, message: 0, every: None }], ..two() };
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(8);
        b.recv(1, 0, 64).unwrap();
        a.send(1, 0, 1).unwrap();
        a.wait_for(1);
        a.send(2, 0, 2).unwrap();
        assert_eq!(b.wait_for(1).bytes(), 2);
    });
}

#[test]
fn faults_of_things_that_are_not_there_are_refused() {
    let emulation = raccl_emulator::Emulation::create(&two()).unwrap();
    for fault in [
        Fault::Cut { cable: 1, message: None },
        Fault::Lose { cable: 0, end: 2, message: 0, every: None },
        Fault::PortDown { machine: 2, device: "rdma_en2".into() },
        Fault::PortDown { machine: 0, device: "rdma_en3".into() },
        Fault::Gid { machine: 0, device: "rdma_en2".into(), index: Some(8) },
    ] {
        emulation.inject(&fault).unwrap_err();
    }
    for _ in 0..16 {
        emulation.inject(&Fault::Lose { cable: 0, end: 0, message: 0, every: None }).unwrap();
    }
    emulation.inject(&Fault::Lose { cable: 0, end: 0, message: 0, every: None }).unwrap_err();
}

#[test]
fn a_pair_that_was_silent_for_too_long_is_dead_and_one_kept_alive_is_not() {
    let spec = Spec { rules: Rules { idle_death_ms: Some(2000), ..Rules::default() }, ..two() };
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(8);
        let (c, d) = lab.wire(8);
        let end = Instant::now() + Duration::from_millis(2500);
        let mut id = 0;
        while Instant::now() < end {
            pass(&c, &d, id, 64);
            id += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
        b.recv(1, 0, 64).unwrap();
        a.send(1, 0, 64).unwrap();
        a.stays_silent();
        b.stays_silent();
        pass(&c, &d, id, 64);
        // Receiving keeps alive too.
        pass(&d, &c, id, 64);
    });
}
