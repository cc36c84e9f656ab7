//! A lane over an emulated cable, at whose other end is another or a test that sends whatever it likes.

mod liar;

use std::{env, os::unix::process::ExitStatusExt, path::Path, time::Instant};

use raccl_emulator::{Emulation, Fault, Mistakes, SPEC_VARIABLE, Verb};

use super::*;
use liar::*;

#[test]
fn what_is_said_to_come_goes_where_it_is_wanted() {
    joined("what_is_said_to_come_goes_where_it_is_wanted", || {
        let [one, other] = cable(true);
        let (lane, mut memory) = one.lane(2 << 20);
        let mut liar = other.liar();
        liar.announce(0, 30);
        let (mut total, mut here) = (0, 0);
        for fill in 1..=30 {
            total += liar.bare(0, fill);
            here = read(&lane, &mut memory, here, total).1;
        }
        assert_eq!(here, total);
        let mut rest = &memory.slice()[..total];
        for turn in 0..30 {
            let (packet, behind) = rest.split_at(Bare::length(SLOT, turn));
            assert!(packet.iter().all(|&byte| u32::from(byte) == turn + 1), "{turn}");
            rest = behind;
        }
        assert!(lane.uncopied().1 > total as u64 / 2, "{:?}", lane.uncopied());
        assert!(!lane.has_receives_out());
    });
}

#[test]
fn nothing_takes_the_place_of_what_was_said_to_come() {
    joined("nothing_takes_the_place_of_what_was_said_to_come", || {
        // So that receives are posted where the rest is wanted.
        let begin = |liar: &mut Liar, look: &mut dyn FnMut() -> bool| {
            liar.announce(0, 100);
            for _ in 0..4 {
                liar.bare(0, 7);
                look();
            }
        };
        let end = told(1 << 20, |liar, look| {
            begin(liar, look);
            while look() {
                liar.stream(SMALL, Kind::Stream, &[9; FRAME - PACKET_BYTES]);
            }
        });
        assert!(why(&end).contains("in the place of one that was said to come"), "{}", why(&end));
        let end = told(1 << 20, |liar, look| {
            begin(liar, look);
            liar.announce(4, 3);
        });
        assert!(why(&end).contains("in the place of one that was said to come"), "{}", why(&end));
        let end = told(1 << 20, |liar, look| {
            begin(liar, look);
            liar.stream(BULK, Kind::Stream, &[9; SLOT - PACKET_BYTES]);
        });
        assert!(why(&end).contains("in the place of one that was said to come"), "{}", why(&end));
        let end = told(1 << 20, |liar, look| {
            begin(liar, look);
            liar.stream(SMALL, Kind::End, &[]);
        });
        assert!(matches!(end.0, Ok(stripe::Read::End)), "{end:?}");
    });
}

#[test]
fn what_was_said_and_does_not_come_is_waited_for() {
    joined("what_was_said_and_does_not_come_is_waited_for", || {
        let end = told(1 << 20, |liar, look| {
            liar.announce(0, 100);
            liar.bare(0, 7);
            look();
        });
        assert!(matches!(end, (Ok(stripe::Read::Empty), bytes) if bytes == Bare::length(SLOT, 0)), "{end:?}");
        // It comes, and nobody has said so.
        let end = told(1 << 20, |liar, _| _ = liar.bare(0, 7));
        assert!(matches!(end, (Ok(stripe::Read::Empty), 0)), "{end:?}");
        let end = told(1 << 20, |liar, _| {
            liar.bare(0, 7);
            liar.stream(SMALL, Kind::Stream, &[1; 10]);
        });
        assert!(why(&end).contains("lost"), "{}", why(&end));
    });
}

#[test]
fn absurd_announcements_are_refused() {
    joined("absurd_announcements_are_refused", || {
        for (turn, count) in [
            (0, u32::MAX),
            (0, 0),
            (0, 1025),
            (1000, 5),
            (u32::MAX, 5),
            (u32::MAX - 1000, 2000),
            (1 << 31, 9),
        ] {
            let end = told(1 << 20, |liar, look| {
                liar.announce(turn, count);
                look();
                for _ in 0..6 {
                    liar.bare(0, 7);
                }
            });
            assert!(why(&end).contains("bare packets come from"), "{turn} {count}: {}", why(&end));
            assert_eq!(end.1, 0, "{turn} {count}");
        }
        // It could be, since words without meaning may be on their way.
        let end = told(1 << 20, |liar, _| {
            liar.announce(3, 5);
            liar.bare(0, 7);
        });
        assert!(why(&end).contains("not the one that was said to come"), "{}", why(&end));
        for (class, payload) in [(SMALL, &[1; 7][..]), (SMALL, &[0; 1]), (BULK, &[0; SLOT - PACKET_BYTES])] {
            let end = told(1 << 20, |liar, _| liar.stream(class, Kind::Bare, payload));
            assert!(why(&end).contains("no use for"), "{}", why(&end));
        }
        for payload_sum in [None, Some(0)] {
            let end = told(1 << 20, |liar, _| {
                let words = Bare { turn: 0, count: 5 }.encode();
                liar.send(SMALL, Packet { kind: Kind::Bare, payload_sum, ..Packet::EMPTY }, &words);
            });
            assert!(why(&end).contains("checksum of its payload"), "{}", why(&end));
        }
        let [one, other] = cable(false);
        let (lane, mut memory) = one.lane(PAGE);
        let mut liar = other.liar();
        liar.announce(0, 5);
        let end = read(&lane, &mut memory, 0, PAGE);
        assert!(why(&end).contains("no use for"), "{}", why(&end));
    });
}

#[test]
fn a_packet_of_another_length_is_not_taken_for_the_one_that_is_next() {
    joined("a_packet_of_another_length_is_not_taken_for_the_one_that_is_next", || {
        // As many frames in each case, as the device wants.
        for (longer, what) in [(-16, "lost"), (-1, "has"), (-16 * 5, "lost")] {
            for before in [0, 5, 20] {
                let end = told(4 << 20, |liar, look| {
                    liar.announce(0, 100);
                    for _ in 0..before {
                        liar.bare(0, 7);
                        look();
                    }
                    liar.bare(longer, 8);
                });
                assert!(why(&end).contains(what), "{longer} {before}: {}", why(&end));
                let good: usize = (0..before).map(|turn| Bare::length(SLOT, turn)).sum();
                assert_eq!(end.1, good, "{longer} {before}");
            }
        }
    });
}

/// Numbers from a seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// What a peer might send that has lost its senses, most of it nearly right.
fn tell_something(liar: &mut Liar, draw: &mut Draw) {
    let fill = draw.below(256) as u8;
    match draw.below(20) {
        0..10 => _ = liar.bare(0, fill),
        10..14 => {
            let turn = liar.sent[BULK];
            let turn = [turn, turn, turn, turn.wrapping_add(3), turn.wrapping_sub(1), draw.0 as u32];
            let count = [1, 2, 5, 100, 1024, draw.0 as u32];
            liar.announce(turn[draw.below(6) as usize], count[draw.below(6) as usize]);
        }
        14 | 15 => {
            let bytes = 1 + draw.below((FRAME - PACKET_BYTES) as u64) as usize;
            liar.stream(SMALL, Kind::Stream, &[fill; FRAME][..bytes]);
        }
        16 => liar.sequence = liar.sequence.wrapping_add([1, u32::MAX, 2][draw.below(3) as usize]),
        17 => {
            liar.bare(-16 * draw.below(100) as isize, fill);
        }
        18 if draw.below(4) == 0 => liar.stream(BULK, Kind::Stream, &[fill; SLOT - PACKET_BYTES]),
        19 if draw.below(8) == 0 => liar.stream(SMALL, Kind::End, &[]),
        _ => liar.send(SMALL, Packet::EMPTY, &[]),
    }
}

#[test]
fn no_sequence_of_lies_leaves_the_device_with_what_was_lent() {
    let mut mistakes = joined_for("no_sequence_of_lies_leaves_the_device_with_what_was_lent", || {
        let number = |name| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let seed = number("RACCL_TEST_SEED").unwrap_or(1);
        let (mut errors, mut whole) = (0, 0);
        for seed in seed..seed + number("RACCL_TEST_LIES").unwrap_or(150) {
            println!("seed {seed}");
            let mut draw = Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
            let bytes = (1 + draw.below(20) as usize) * PAGE * 4 + draw.below(1000) as usize;
            // It begins well, or not even that.
            let well = draw.below(4) > 0;
            let end = told(bytes, |liar, look| {
                liar.is_hasty = true;
                if well {
                    liar.announce(0, 1 + draw.below(60) as u32);
                }
                for _ in 0..60 {
                    tell_something(liar, &mut draw);
                    if !look() {
                        break;
                    }
                }
            });
            errors += usize::from(end.0.is_err());
            whole += usize::from(end.1 == bytes);
        }
        assert!(errors > 0 && whole > 0, "{errors} {whole}");
    });
    // Those that are too long for where the next is wanted.
    mistakes.frame_mismatches = 0;
    assert_eq!(mistakes, Mistakes::default());
}

/// Puts the counters of a lane that has not been used to where they are after so many packets.
fn advance(lane: &Lane, turns: u32) {
    lane.tx.lock().sent = [turns; 2];
    lane.rx.lock().turns = [turns; 2];
    for class in &lane.wire.classes {
        class.done.store(turns, Ordering::Relaxed);
        for count in [&class.granted, &class.posted, &class.told] {
            count.store(turns.wrapping_add(class.recv_slots), Ordering::Relaxed);
        }
    }
}

/// Sends so much one way, of memory that was lent into memory that was lent. Whoever sends does not read.
fn one_way(one: &Lane, from: &mut Memory, other: &Lane, to: &mut Memory) {
    let bytes = from.length;
    for (index, byte) in from.slice().iter_mut().enumerate() {
        *byte = (index ^ index >> 8 ^ index >> 16) as u8;
    }
    let (mut sent, mut came) = (0, 0);
    let until = Instant::now() + LONG;
    while came < bytes || one.unsettled().unwrap() > 0 {
        assert!(Instant::now() < until, "{sent} and {came} of {bytes}");
        if sent < bytes {
            // SAFETY: nobody writes there before it is settled.
            sent += unsafe { one.write(&[from.piece(sent)]) }.unwrap();
        }
        let (last, now) = read(other, to, came, bytes);
        last.unwrap();
        came = now;
    }
    assert!(from.slice() == to.slice());
}

#[test]
fn turns_may_begin_again_in_the_middle_of_what_was_said_to_come() {
    joined("turns_may_begin_again_in_the_middle_of_what_was_said_to_come", || {
        const BYTES: usize = 12 << 20;
        for before in [3, 40, 100] {
            let [one, other] = cable(true);
            let ((one, mut from), (other, mut to)) = (one.lane(BYTES), other.lane(BYTES));
            for lane in [&one, &other] {
                advance(lane, 0_u32.wrapping_sub(before));
            }
            one_way(&one, &mut from, &other, &mut to);
            assert!(other.uncopied().1 > BYTES as u64 / 2, "{:?}", other.uncopied());
            assert!(one.tx.lock().sent[BULK] < 1000, "the turns have begun again");
        }
    });
}

#[test]
fn what_is_lost_is_noticed_before_what_follows_is_taken_for_it() {
    let mut mistakes = joined_for("what_is_lost_is_noticed_before_what_follows_is_taken_for_it", || {
        const BYTES: usize = 12 << 20;
        let emulation = Emulation::attach(Path::new(&env::var_os(SPEC_VARIABLE).unwrap())).unwrap();
        for message in [1, 2, 7, 8, 9, 30, 127, 128, 129, 150] {
            let [one, other] = cable(true);
            let ((one, mut from), (other, mut to)) = (one.lane(BYTES), other.lane(BYTES));
            // The first says that the others come.
            emulation.inject(&Fault::Lose { cable: 0, end: 0, message, every: None }).unwrap();
            for (index, byte) in from.slice().iter_mut().enumerate() {
                *byte = (index / 8).to_le_bytes()[index % 3];
            }
            let (mut sent, mut came, mut error) = (0, 0, None);
            let until = Instant::now() + LONG;
            while error.is_none() && came < BYTES {
                assert!(Instant::now() < until, "message {message} was lost, and nobody says so");
                // SAFETY: nobody writes there before it is settled or revoked.
                sent += unsafe { one.write(&[from.piece(sent)]) }.unwrap();
                let (last, now) = read(&other, &mut to, came, BYTES);
                (error, came) = (last.err(), now);
            }
            assert!(
                from.slice()[..came] == to.slice()[..came],
                "wrong data after message {message} was lost"
            );
            let error = error.expect("all came although one was lost");
            assert!(matches!(error, LinkError::Broken { .. }), "{error:?}");
            other.revoke_receives();
            one.revoke_sends();
        }
    });
    // What follows may be longer than the place of what was lost.
    mistakes.frame_mismatches = 0;
    assert_eq!(mistakes, Mistakes::default());
}

#[test]
fn whoever_only_sends_says_what_receives_it_has_for_words_of_credit() {
    joined("whoever_only_sends_says_what_receives_it_has_for_words_of_credit", || {
        for depth in [2, 4, 64] {
            let [one, other] = deep_cable(true, depth);
            // More of such words than there are receives for them.
            let bytes = 24 << 20;
            let ((one, mut from), (other, mut to)) = (one.lane(bytes), other.lane(bytes));
            for _ in 0..2 {
                one_way(&one, &mut from, &other, &mut to);
            }
        }
    });
}

#[test]
fn what_does_not_leave_is_taken_from_the_device() {
    joined("what_does_not_leave_is_taken_from_the_device", || {
        let [one, other] = cable(true);
        let (lane, mut memory) = one.lane(2 << 20);
        // Nobody reads there, so that only what was posted ahead goes out, and what may be under way beyond.
        let other = other.liar();
        // SAFETY: the memory is left alone until it has been revoked.
        let taken = unsafe { lane.write(&[memory.piece(0)]) }.unwrap();
        assert!(taken > 2 * SLOT - FRAME, "{taken}");
        lane.wire.classes[BULK].granted.fetch_add(100, Ordering::Relaxed);
        let until = Instant::now() + LONG;
        let mut all = taken;
        while lane.wire.has_room(BULK, lane.tx.lock().sent[BULK], 0) || all < (DEPTH as usize + 1) * SLOT {
            assert!(Instant::now() < until);
            // SAFETY: as above.
            all += unsafe { lane.write(&[memory.piece(all)]) }.unwrap();
        }
        assert!(lane.unsettled().unwrap() > 0);
        lane.revoke_sends();
        assert_eq!(lane.unsettled().unwrap(), 0);
        assert!(lane.wire.is_revoked());
        drop(memory);
        // SAFETY: the piece has no bytes.
        assert!(unsafe { lane.write(&[]) }.is_ok());
        drop(other);
    });
}

#[test]
fn a_process_ends_if_its_device_cannot_be_kept_from_what_was_lent() {
    const SIGABRT: i32 = 6;
    if env::var_os(INSIDE).is_none() {
        let (_, output) = run("a_process_ends_if_its_device_cannot_be_kept_from_what_was_lent");
        assert_eq!(output.status.signal(), Some(SIGABRT), "{output:?}");
        return;
    }
    let [one, other] = cable(true);
    let (lane, mut memory) = one.lane(2 << 20);
    let mut liar = other.liar();
    liar.announce(0, 100);
    let mut at = 0;
    for _ in 0..4 {
        liar.bare(0, 7);
        at = read(&lane, &mut memory, at, 1 << 20).1;
    }
    assert!(lane.has_receives_out());
    let emulation = Emulation::attach(Path::new(&env::var_os(SPEC_VARIABLE).unwrap())).unwrap();
    let (machine, device, verb) = (0, "rdma_en2".to_owned(), Verb::IbvDestroyQp);
    emulation.inject(&Fault::Fail { machine, device, verb, errno: 5, skip: 0, times: 1 }).unwrap();
    lane.revoke_receives();
}
