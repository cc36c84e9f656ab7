//! Everything is freed, in the driver's order, on every path; and what becomes of what is not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use raccl_emulator::{Emulation, Fault, Layout, Rules, Spec, Verb};
use raccl_sys::{Depths, Error, QueuePairOptions, Transport};

use crate::lab::*;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

fn is_clean(lab: &Lab) {
    let books = lab.emulation.books();
    assert!(books.live.is_zero(), "{books:?}");
    assert_eq!(books.mistakes, Default::default());
}

#[test]
fn handles_dropped_in_any_order_free_in_the_drivers() {
    one_process(&two(), |lab| {
        // Each of five handles goes at its turn: all 120 orders.
        for order in 0..120 {
            let Bench { context, domain, queue, memory, .. } = lab.bench("m0.rdma_en2");
            let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: 4, recv: 4 } };
            let pair = domain.queue_pair(&options, &queue, &queue).unwrap();
            pair.keep(&memory);
            let failures = context.failures();
            let mut handles: Vec<Box<dyn std::any::Any>> =
                vec![Box::new(context), Box::new(domain), Box::new(queue), Box::new(memory), Box::new(pair)];
            let mut rest = order;
            while !handles.is_empty() {
                let count = handles.len();
                drop(handles.remove(rest % count));
                rest /= count;
            }
            is_clean(lab);
            assert!(failures.take().is_empty());
        }
        assert_eq!(lab.emulation.books().made.queue_pairs, 120);
    });
}

/// Everything up to a connected queue pair with posted work, and an error wherever one comes.
fn bring_up(lab: &Lab, stop: usize) -> Result<(), Error> {
    let reached = |step: usize| assert_ne!(step, stop, "the test wants a panic here");
    let peer = lab.try_open("m1.rdma_en2")?;
    let context = lab.try_open("m0.rdma_en2")?;
    reached(0);
    let gid = context.ipv4_gid(1)?;
    let domain = context.protection_domain()?;
    reached(1);
    let queue = domain.completion_queue(16)?;
    reached(2);
    let memory = domain.allocate(1 << 16)?;
    reached(3);
    let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: 4, recv: 4 } };
    let pair = domain.queue_pair(&options, &queue, &queue)?;
    pair.keep(&memory);
    reached(4);
    let pair = pair.init(1)?;
    reached(5);
    let route = raccl_sys::Route { port: 1, gid_index: gid.index, mtu: 1024 };
    let peer = raccl_sys::Peer { lid: 0, queue_pair: 2, psn: 7, gid: peer.ipv4_gid(1)?.gid };
    let pair = pair.ready_to_receive(&route, &peer)?;
    reached(6);
    let pair = pair.ready_to_send(7)?;
    // SAFETY: nobody touches the memory, which the queue pair keeps.
    unsafe { pair.post_recv(1, memory.span(0, 64)?)? };
    reached(7);
    // SAFETY: as above.
    unsafe { pair.post_send(2, memory.span(64, 64)?)? };
    reached(8);
    queue.poll(&mut [Default::default()])?;
    Ok(())
}

#[test]
fn an_error_at_any_step_leaves_nothing_behind() {
    one_process(&two(), |lab| {
        bring_up(lab, usize::MAX).unwrap();
        let verbs = [
            Verb::IbvOpenDevice,
            Verb::IbvQueryPort,
            Verb::IbvQueryGid,
            Verb::IbvAllocPd,
            Verb::IbvCreateCq,
            Verb::IbvRegMr,
            Verb::IbvCreateQp,
            Verb::IbvModifyQp,
            Verb::IbvPostRecv,
            Verb::IbvPostSend,
            Verb::IbvPollCq,
        ];
        for verb in verbs {
            // Registration is tried again with fewer rights, so it has to fail twice.
            let times = if verb == Verb::IbvRegMr { 2 } else { 1 };
            let steps = if verb == Verb::IbvModifyQp { 3 } else { 1 };
            for skip in 0..steps {
                let device = "rdma_en2".into();
                let fault = Fault::Fail { machine: 0, device, verb, errno: 5, skip, times };
                lab.emulation.inject(&fault).unwrap();
                let error = bring_up(lab, usize::MAX).unwrap_err();
                assert!(error.to_string().contains("EIO"), "{verb:?}: {error}");
                is_clean(lab);
            }
        }
        bring_up(lab, usize::MAX).unwrap();
    });
}

#[test]
fn a_panic_at_any_step_leaves_nothing_behind() {
    one_process(&two(), |lab| {
        for step in 0..9 {
            catch_unwind(AssertUnwindSafe(|| bring_up(lab, step))).unwrap_err();
            is_clean(lab);
        }
    });
}

#[test]
fn five_hundred_cycles_leave_nothing_behind() {
    one_process(&two(), |lab| {
        for _ in 0..500 {
            bring_up(lab, usize::MAX).unwrap();
        }
        is_clean(lab);
        assert_eq!(lab.emulation.books().made.queue_pairs, 500);
        let folder = lab.emulation.spec_file().parent().unwrap();
        let files = std::fs::read_dir(folder).unwrap().count();
        assert_eq!(files, 3, "the description, the fabric and what this process prints are left");
    });
}

#[test]
fn what_the_driver_refuses_to_free_is_reported() {
    one_process(&two(), |lab| {
        for (verb, name) in [
            (Verb::IbvDestroyQp, "ibv_destroy_qp"),
            (Verb::IbvDeregMr, "ibv_dereg_mr"),
            (Verb::IbvDestroyCq, "ibv_destroy_cq"),
            (Verb::IbvDeallocPd, "ibv_dealloc_pd"),
            (Verb::IbvCloseDevice, "ibv_close_device"),
        ] {
            let (a, b) = lab.wire(4);
            let failures = a.bench.context.failures();
            let device = "rdma_en2".into();
            let fault = Fault::Fail { machine: 0, device, verb, errno: 5, skip: 0, times: 1 };
            lab.emulation.inject(&fault).unwrap();
            drop((a, b));
            let errors = failures.take();
            assert!(errors[0].to_string().contains(name), "{errors:?}");
            assert!(errors[0].to_string().contains("EIO"), "{errors:?}");
        }
    });
}

#[test]
fn what_a_killed_process_had_stays_taken_and_its_peer_hears_nothing() {
    killed(&two(), |lab| lose_the_peer(lab, 64));
}

#[test]
fn a_driver_may_take_back_what_a_killed_process_had() {
    let spec = Spec { rules: Rules { leak_when_killed: false, ..Rules::default() }, ..two() };
    killed(&spec, |lab| lose_the_peer(lab, 30_000));
}

/// Machine 1 is killed in the middle, and machine 0 sees what it sees.
fn lose_the_peer(lab: &Lab, len: usize) {
    let bench = lab.bench("rdma_en2");
    let pair = bench.pair(8);
    let peers = lab.exchange("peers", &peer_bytes(&bench.peer(pair.number())));
    let port = bench.connect(pair, &peer_of(&peers[1 - lab.machine]));
    port.recv(1, 0, len).unwrap();
    lab.barrier("posted");
    port.send(2, len, len).unwrap();
    port.wait().check(&port.bench.context).unwrap();
    port.wait().check(&port.bench.context).unwrap();
    lab.barrier("passed");
    if lab.machine == 1 {
        loop {
            std::thread::park();
        }
    }
    // The parent gives a third sign when the other is dead.
    let dead = lab.emulation.spec_file().with_file_name("dead");
    let deadline = Instant::now() + LONG;
    while !dead.exists() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    port.recv(3, 0, len).unwrap();
    port.send(4, len, len).unwrap();
    port.stays_silent();
    port.bench.context.active_port(1).unwrap();
}

/// Runs `body` in two processes of which the second is killed, and looks at the books.
fn killed<F: FnOnce(&Lab)>(spec: &Spec, body: F) {
    if role().is_some() {
        body(&Lab::here());
        return;
    }
    let name = test_of::<F>();
    let emulation = Emulation::create(spec).unwrap();
    let survivor = start(&name, &emulation, emulation.environment(0), 0);
    let mut victim = start(&name, &emulation, emulation.environment(1), 1);
    let passed = |machine: usize| emulation.spec_file().with_file_name(format!("exchange-passed-{machine}"));
    let deadline = Instant::now() + LONG;
    while !(passed(0).exists() && passed(1).exists()) {
        assert!(Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    victim.child.kill().unwrap();
    victim.child.wait().unwrap();
    std::fs::write(emulation.spec_file().with_file_name("dead"), "").unwrap();
    finish(vec![survivor]);
    assert!(emulation.books_of(0, "rdma_en2").unwrap().live.is_zero());
    let left = emulation.books_of(1, "rdma_en2").unwrap().live;
    assert_eq!((left.contexts, left.domains, left.queue_pairs, left.regions), (1, 1, 1, 1));
    // The next process to open the device takes it back, where that is the rule.
    finish(vec![start("freeing::opens_and_leaves", &emulation, emulation.environment(1), 1)]);
    let left = emulation.books_of(1, "rdma_en2").unwrap().live;
    assert_eq!(left.queue_pairs, u64::from(spec.rules.leak_when_killed));
    assert_eq!(left.is_zero(), !spec.rules.leak_when_killed);
}

#[test]
fn opens_and_leaves() {
    processes(&two(), |lab| drop(lab.bench("rdma_en2").pair(4)));
}
