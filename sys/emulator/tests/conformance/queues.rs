//! What queues do with work: depths, frames, credits, completions.

use raccl_emulator::{Layout, Overrun, Rules, Spec};
use raccl_sys::{Error, Provider};

use crate::lab::*;

const FRAME: usize = 4096;

fn two() -> Spec {
    Layout::mesh().spec(2)
}

#[test]
fn the_emulator_says_that_it_follows_apples_rules() {
    one_process(&two(), |lab| assert_eq!(lab.library.provider(), Provider::Apple));
}

#[test]
fn a_send_waits_for_its_receive() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        a.write(0, b"early");
        a.send(1, 0, 5).unwrap();
        a.stays_silent();
        b.recv(2, 0, 64).unwrap();
        assert_eq!(b.wait_for(2).bytes(), 5);
        a.wait_for(1);
        assert_eq!(b.read(0, 5), b"early");
    });
}

#[test]
fn a_receive_alone_lets_the_message_through_while_its_sender_looks_away() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8);
        for id in 0..3 {
            a.write(id * 64, &pattern(id as u64, 64));
            a.send(id as u64, id * 64, 64).unwrap();
        }
        for id in 0..3 {
            b.recv(id as u64, id * 64, 64).unwrap();
        }
        for id in 0..3 {
            b.wait_for(id as u64);
            assert_eq!(b.read(id * 64, 64), pattern(id as u64, 64));
        }
        for id in 0..3 {
            a.wait_for(id);
        }
    });
}

#[test]
fn a_completed_send_may_not_have_arrived() {
    let spec = Layout::mesh().latency_ns(20_000_000_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(8);
        b.recv(2, 0, 64).unwrap();
        a.send(1, 0, 64).unwrap();
        a.wait_for(1);
        assert!(b.poll().is_empty(), "it is under way for 20 s, which nobody waits for");
    });
}

#[test]
fn completions_come_in_order() {
    let spec = Layout::mesh().latency_ns(3_000).bandwidth(2_000_000_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(128);
        let len = |id: u64| 1 + (id as usize * 1237) % (2 * FRAME);
        for round in 0..20 {
            for id in 0..32 {
                b.recv(id, (32 + id as usize) * 2 * FRAME, len(id).next_multiple_of(FRAME)).unwrap();
                a.write(id as usize * 2 * FRAME, &pattern(id + round, len(id)));
                a.send(id, id as usize * 2 * FRAME, len(id)).unwrap();
            }
            for id in 0..32 {
                assert_eq!(b.wait_for(id).bytes(), len(id));
                assert_eq!(b.read((32 + id as usize) * 2 * FRAME, len(id)), pattern(id + round, len(id)));
            }
            for id in 0..32 {
                a.wait_for(id);
            }
        }
        let mistakes = lab.emulation.books().mistakes;
        assert_eq!(mistakes, Default::default());
    });
}

#[test]
fn an_eight_kib_send_takes_two_slots() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(4);
        a.send(1, 0, 2 * FRAME).unwrap();
        a.send(2, 0, FRAME + 1).unwrap();
        let full = a.send(3, 0, 1).unwrap_err();
        assert!(matches!(&full, Error::Verb { errno, .. } if errno.is("ENOMEM")), "{full}");
        b.recv(1, 0, 2 * FRAME).unwrap();
        b.wait_for(1);
        a.wait_for(1);
        a.send(3, 0, 1).unwrap();
        a.send(4, 0, 0).unwrap();
        a.send(5, 0, 0).unwrap_err();
    });
}

#[test]
fn a_receive_beyond_the_depth_is_taken_and_stalls_the_pair() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(4);
        b.recv(1, 0, FRAME).unwrap();
        b.recv(2, 0, 3 * FRAME).unwrap();
        b.recv(3, 0, 1).unwrap();
        a.send(1, 0, FRAME).unwrap();
        b.stays_silent();
        assert_eq!(lab.emulation.books().mistakes.overruns, 1);
    });
}

#[test]
fn a_driver_may_refuse_a_receive_beyond_the_depth_with_a_negative_number() {
    let spec = Spec { rules: Rules { overrun: Overrun::Refuse, ..Rules::default() }, ..two() };
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(2);
        b.recv(1, 0, FRAME).unwrap();
        b.recv(2, 0, FRAME).unwrap();
        let full = b.recv(3, 0, 1).unwrap_err();
        assert!(matches!(&full, Error::Verb { errno, .. } if errno.is("ENOMEM")), "{full}");
        a.send(1, 0, FRAME).unwrap();
        b.wait_for(1);
        b.recv(3, 0, 1).unwrap();
    });
}

#[test]
fn deep_queues_of_several_frames_can_be_unreliable() {
    let spec = Spec { rules: Rules { unreliable_beyond: Some(64), ..Rules::default() }, ..two() };
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(256);
        for id in 0..4 {
            b.recv(id, 0, 16 * FRAME).unwrap();
            a.send(id, 0, 16 * FRAME).unwrap();
            b.wait_for(id);
            a.wait_for(id);
        }
        for id in 0..5 {
            b.recv(id, 0, 16 * FRAME).unwrap();
            a.send(id, 0, 16 * FRAME).unwrap();
        }
        b.stays_silent();
    });
}

#[test]
fn depths_may_be_adjusted_and_only_a_query_tells() {
    let spec = Spec { rules: Rules { adjust_depth: Some(16), ..Rules::default() }, ..two() };
    one_process(&spec, |lab| {
        let (a, _b) = lab.wire(64);
        assert_eq!((a.pair.depths().send, a.pair.depths().recv), (16, 16));
        for id in 0..16 {
            a.send(id, 0, 1).unwrap();
        }
        a.send(16, 0, 1).unwrap_err();
    });
}

#[test]
fn depths_are_those_asked_for_where_the_driver_cannot_be_asked() {
    let spec = Spec { rules: Rules { queries: false, ..Rules::default() }, ..two() };
    one_process(&spec, |lab| {
        let (a, _b) = lab.wire(64);
        assert_eq!((a.pair.depths().send, a.pair.depths().recv), (64, 64));
        let error = a.bench.context.limits().unwrap_err();
        assert!(error.to_string().contains("EOPNOTSUPP"), "{error}");
    });
}

#[test]
fn message_and_receive_must_have_as_many_frames() {
    one_process(&two(), |lab| {
        for receive in [FRAME, 8 * FRAME] {
            let (a, b) = lab.wire(16);
            b.recv(1, 0, receive).unwrap();
            b.recv(2, 0, 4 * FRAME).unwrap();
            a.send(1, 0, 4 * FRAME).unwrap();
            a.wait_for(1);
            let failed = b.wait();
            assert_eq!((failed.id(), failed.status_name()), (1, "IBV_WC_LOC_LEN_ERR"));
            let error = failed.check(&b.bench.context).unwrap_err();
            assert!(error.to_string().contains("frames"), "{error}");
            let flushed = b.wait();
            assert_eq!((flushed.id(), flushed.status_name()), (2, "IBV_WC_WR_FLUSH_ERR"));
        }
        assert_eq!(lab.emulation.books().mistakes.frame_mismatches, 2);
    });
}

#[test]
fn the_last_frame_need_not_be_full() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(16);
        b.recv(1, 0, 2 * FRAME).unwrap();
        a.write(0, &pattern(3, 5000));
        a.send(1, 0, 5000).unwrap();
        assert_eq!(b.wait_for(1).bytes(), 5000);
        assert_eq!(b.read(0, 5000), pattern(3, 5000));
    });
}

#[test]
fn a_message_has_at_most_4095_frames() {
    one_process(&two(), |lab| {
        let (a, b) = lab.wire(8192);
        assert_eq!(b.bench.context.port(1).unwrap().max_message(), 16_773_120);
        b.recv(1, 0, 4095 * FRAME).unwrap();
        a.send(1, 0, 4095 * FRAME).unwrap();
        b.wait_for(1);
        a.send(2, 0, 4095 * FRAME + 1).unwrap_err();
    });
}

#[test]
fn a_buffer_changed_before_its_send_has_completed_is_found_out() {
    one_process(&two(), |lab| {
        for len in [8, 1000, 100_000] {
            let (a, b) = lab.wire(64);
            a.write(0, &pattern(1, len));
            a.send(1, 0, len).unwrap();
            a.write(len / 2, &[0xee]);
            b.recv(1, 0, len).unwrap();
            b.wait_for(1);
            assert_eq!(a.wait().status_name(), "IBV_WC_GENERAL_ERR");
        }
        assert_eq!(lab.emulation.books().mistakes.early_reuse, 3);
    });
}

#[test]
fn a_completion_queue_that_is_too_small_is_counted() {
    one_process(&two(), |lab| {
        let (mut a, b) = lab.benches();
        a.queue = a.domain.completion_queue(2).unwrap();
        let (a, _b) = connect_both(a, b, 8);
        a.send(1, 0, 1).unwrap();
        a.send(2, 0, 1).unwrap();
        assert_eq!(lab.emulation.books().mistakes.completion_queue_too_small, 0);
        a.send(3, 0, 1).unwrap();
        assert_eq!(lab.emulation.books().mistakes.completion_queue_too_small, 1);
    });
}
