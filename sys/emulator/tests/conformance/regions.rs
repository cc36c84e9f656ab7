//! What memory can be registered, and what becomes of work whose memory is not.

use raccl_emulator::{Layout, Rules, Spec};
use raccl_sys::{Error, MemoryRegion, ProtectionDomain};

use crate::lab::*;

const PAGE: usize = 16 << 10;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

/// Registers memory of the test's own, which stays until the process ends.
fn register(domain: &ProtectionDomain, start: *mut u8, len: usize) -> Result<MemoryRegion, Error> {
    // SAFETY: every caller maps the memory itself and never unmaps it, except where the emulator has to notice.
    unsafe { domain.register(start, len) }
}

fn map(len: usize, protection: i32) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
    // SAFETY: asks for new memory at a place of the system's choice; nothing that exists is touched.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

fn is_refused(result: Result<MemoryRegion, Error>, number: i32) {
    match result {
        Err(Error::Verb { verb: "ibv_reg_mr", errno, .. }) => assert_eq!(errno.number(), number),
        other => panic!("{other:?}"),
    }
}

#[test]
fn regions_begin_at_a_page_of_16_kib() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let start = map(16 * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        let aligned = start.map_addr(|address| address.next_multiple_of(PAGE));
        let region = register(&bench.domain, aligned, PAGE).unwrap();
        assert_eq!((region.as_ptr(), region.len()), (aligned, PAGE));
        register(&bench.domain, aligned, 1).unwrap();
        for offset in [1, 64, 4096] {
            is_refused(register(&bench.domain, aligned.map_addr(|address| address + offset), PAGE), 22);
        }
        let nothing = register(&bench.domain, aligned, 0);
        assert!(matches!(nothing, Err(Error::Argument { .. })));
    });
}

#[test]
fn regions_lie_within_a_bank_of_4_gib() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        const BANK: usize = 4 << 30;
        let start = map(2 * BANK, libc::PROT_READ | libc::PROT_WRITE);
        let edge = start.map_addr(|address| (address + PAGE).next_multiple_of(BANK));
        let before = edge.map_addr(|address| address - PAGE);
        register(&bench.domain, before, PAGE).unwrap();
        register(&bench.domain, edge, PAGE).unwrap();
        is_refused(register(&bench.domain, before, PAGE + 1), 22);
    });
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "nobody can be asked there what is mapped how")]
fn read_only_memory_is_refused() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        let start = map(4 * PAGE, libc::PROT_READ);
        let aligned = start.map_addr(|address| address.next_multiple_of(PAGE));
        is_refused(register(&bench.domain, aligned, PAGE), 13);
    });
}

#[test]
fn a_driver_that_grants_only_local_writing_is_asked_for_no_more() {
    let spec = Spec { rules: Rules { local_write_only: true, ..Rules::default() }, ..two() };
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(4);
        b.recv(1, 0, 8).unwrap();
        a.send(1, 0, 8).unwrap();
        b.wait_for(1);
    });
}

#[test]
fn receives_are_flushed_although_messages_for_them_are_on_their_way() {
    let hour = 3_600_000_000_000;
    one_process(&Layout::mesh().latency_ns(hour).spec(2), |lab| {
        let (a, b) = lab.wire(4);
        b.recv(1, 0, 64).unwrap();
        a.send(1, 0, 64).unwrap();
        a.wait_for(1);
        b.stays_silent();
        let gone = b.bench.domain.allocate(1).unwrap();
        let span = gone.span(0, 64).unwrap();
        drop(gone);
        // SAFETY: this is the mistake that stops the pair; the emulator does not touch the memory.
        unsafe { b.pair.post_send(2, span) }.unwrap();
        let statuses = [b.wait(), b.wait()].map(|done| (done.id(), done.status_name()));
        assert_eq!(statuses, [(2, "IBV_WC_LOC_PROT_ERR"), (1, "IBV_WC_WR_FLUSH_ERR")]);
    });
}

#[test]
fn work_with_memory_that_is_not_registered_fails_and_stops_the_pair() {
    one_process(&two(), |lab| {
        // A receive with the memory of another domain.
        let (a, b) = lab.wire(4);
        let foreign = lab.bench("m1.rdma_en2");
        let span = foreign.memory.span(0, 64).unwrap();
        // SAFETY: the memory is there for longer than the queue pair.
        unsafe { b.pair.post_recv(1, span) }.unwrap();
        b.recv(2, 0, 64).unwrap();
        a.send(1, 0, 64).unwrap();
        assert_eq!(b.wait().status_name(), "IBV_WC_LOC_PROT_ERR");
        assert_eq!(b.wait().status_name(), "IBV_WC_WR_FLUSH_ERR");
        // A send with memory that is deregistered already.
        let (a, _b) = lab.wire(4);
        let gone = a.bench.domain.allocate(1).unwrap();
        let span = gone.span(0, 64).unwrap();
        drop(gone);
        // SAFETY: this is the mistake that the test is about; the emulator does not touch the memory.
        unsafe { a.pair.post_send(1, span) }.unwrap();
        a.send(2, 0, 64).unwrap();
        let error = a.wait().check(&a.bench.context).unwrap_err();
        assert!(error.to_string().contains("IBV_WC_LOC_PROT_ERR"), "{error}");
        assert_eq!(a.wait().status_name(), "IBV_WC_WR_FLUSH_ERR");
        assert_eq!(lab.emulation.books().mistakes.bad_memory, 2);
    });
}

#[test]
fn memory_deregistered_under_a_posted_receive_is_not_written() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(4);
        let gone = b.bench.domain.allocate(1).unwrap();
        let span = gone.span(0, 64).unwrap();
        // SAFETY: this is the mistake that the test is about; the emulator does not touch the memory.
        unsafe { b.pair.post_recv(1, span) }.unwrap();
        drop(gone);
        assert_eq!(lab.emulation.books().mistakes.freed_out_of_order, 1);
        a.send(1, 0, 64).unwrap();
        assert_eq!(b.wait().status_name(), "IBV_WC_LOC_PROT_ERR");
    });
}

#[test]
fn spans_outside_a_region_are_refused_before_the_driver_sees_them() {
    one_process(&two(), |lab| {
        let bench = lab.bench("m0.rdma_en2");
        for (offset, len) in [(MEMORY, 1), (0, MEMORY + 1), (usize::MAX, 2), (MEMORY - 8, 9)] {
            assert!(matches!(bench.memory.span(offset, len), Err(Error::Argument { .. })));
        }
        assert_eq!(bench.memory.span(MEMORY - 8, 8).unwrap().bytes(), 8);
    });
}
