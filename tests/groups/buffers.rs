//! Memory that devices know: the same results from it, in it, and with one side only.

use std::env;

use raccl::{Buffer, Communicator, Error, Sum, Uncopied};

use crate::support::{Links, cables::OVER_CABLES, group, random::Random};

/// What goes out in bare packets at the smallest, and what comes before the peer has receives posted in their places.
const LEAST: usize = 128 << 10;
const AHEAD: usize = 512 << 10;

pub(crate) fn cabled() -> bool {
    env::var_os(OVER_CABLES).is_some()
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(length).collect()
}

fn filled(comm: &Communicator, bytes: &[u8]) -> Buffer<u8> {
    let mut buffer = comm.allocate(bytes.len()).unwrap();
    assert_eq!(buffer.is_registered(), cabled() && !bytes.is_empty());
    buffer.copy_from_slice(bytes);
    buffer
}

fn since(before: Uncopied, comm: &Communicator) -> Uncopied {
    let now = comm.uncopied();
    Uncopied { sent: now.sent - before.sent, received: now.received - before.received }
}

#[test]
fn messages_of_every_length_where_one_side_has_a_buffer_or_both() {
    for cables in 1..=3 {
        group(Links::Tcp(cables), 2, move |comm| {
            let comm = &comm;
            let lengths = [0, 1000, LEAST, LEAST + 1, (1 << 20) + 7, (9 << 20) + 13];
            for (round, length) in lengths.into_iter().enumerate() {
                for (sends, receives) in [(false, false), (true, false), (false, true), (true, true)] {
                    let expected = pattern(round as u64, length);
                    let before = comm.uncopied();
                    if comm.rank() == 0 {
                        let buffer = filled(comm, &expected);
                        let bytes = if sends { &buffer[..] } else { &expected };
                        comm.send(bytes, 1, 7).unwrap();
                    } else {
                        let (mut buffer, mut plain) = (filled(comm, &vec![1; length]), vec![1; length]);
                        let bytes = if receives { &mut buffer[..] } else { &mut plain };
                        assert_eq!(comm.recv(bytes, 0, 7).unwrap(), length);
                        assert!(bytes == expected, "{length} bytes, {sends} {receives}");
                    }
                    let Uncopied { sent, received } = since(before, comm);
                    let sent_so = cabled() && sends && length >= LEAST;
                    // What is divided among the cables may be too short on each.
                    let is_long = cables == 1 || length > cables * LEAST;
                    assert!(
                        !sent_so || comm.rank() == 1 || !is_long || sent as usize > length / 2,
                        "{sent} of {length}"
                    );
                    assert!(sent_so || sent == 0, "{sent} of {length}");
                    let placed = sent_so && receives && comm.rank() == 1;
                    assert!(placed || received == 0, "{received} of {length}");
                    // What comes ahead is less than half of the long ones.
                    let most = placed && length > 8 * AHEAD;
                    assert!(!most || received as usize > length / 2, "{received} of {length}");
                }
            }
        });
    }
}

#[test]
fn a_part_of_a_buffer_at_any_place_in_both_directions_at_once() {
    group(Links::Tcp(2), 2, |comm| {
        let comm = &comm;
        let other = 1 - comm.rank();
        let length = (3 << 20) + 5;
        let mine = filled(comm, &pattern(comm.rank() as u64, length));
        let theirs = pattern(other as u64, length);
        let mut into = comm.allocate::<u8>(length).unwrap();
        for (from, to, bytes) in
            [(0, 0, length), (1, 3, length - 3), (4097, 31, 2 << 20), (77, 1 << 20, 700_000)]
        {
            into.fill(0);
            comm.scope(|scope| {
                let sending = scope.send(&mine[from..from + bytes], other, 1)?;
                let receiving = scope.recv(&mut into[to..to + bytes], other, 1)?;
                sending.wait()?;
                receiving.wait().map(|_| ())
            })
            .unwrap();
            assert!(into[to..to + bytes] == theirs[from..from + bytes], "{from} to {to}");
            let around = into[..to].iter().chain(&into[to + bytes..]);
            assert!(around.copied().all(|byte| byte == 0), "bytes were written outside, {from} to {to}");
        }
    });
}

#[test]
fn collectives_on_registered_buffers() {
    for (size, cables) in [(2, 1), (3, 2), (4, 1)] {
        group(Links::Tcp(cables), size, move |comm| {
            let comm = &comm;
            let rank = comm.rank();
            for count in [1000, (1 << 20) + size] {
                let part = |rank: usize, i: usize| (rank * 1000 + i % 97) as u32;
                let mut gathered = comm.allocate::<u32>(size * count).unwrap();
                (0..count).for_each(|i| gathered[rank * count + i] = part(rank, i));
                comm.all_gather(&mut gathered).unwrap();
                for (at, &value) in gathered.iter().enumerate() {
                    assert_eq!(value, part(at / count, at % count), "all_gather at {at}");
                }

                let mut root = comm.allocate::<u32>(count).unwrap();
                if rank == 1 {
                    (0..count).for_each(|i| root[i] = part(9, i));
                }
                comm.broadcast(&mut root, 1).unwrap();
                assert!((0..count).all(|i| root[i] == part(9, i)), "broadcast");

                let to = |from: usize, to: usize, i: usize| (from * 100 + to * 10 + i % 7) as u32;
                (0..size).for_each(|peer| {
                    (0..count).for_each(|i| gathered[peer * count + i] = to(rank, peer, i));
                });
                let mut sums = comm.allocate::<u32>(count).unwrap();
                (0..count).for_each(|i| sums[i] = part(rank, i));
                comm.all_reduce(&mut sums, Sum).unwrap();
                let expected = |i: usize| (0..size).map(|rank| part(rank, i)).sum::<u32>();
                assert!((0..count).all(|i| sums[i] == expected(i)), "all_reduce");
                comm.reduce_scatter_into(&gathered, &mut sums, Sum).unwrap();
                let expected = |i: usize| (0..size).map(|from| to(from, rank, i)).sum::<u32>();
                assert!((0..count).all(|i| sums[i] == expected(i)), "reduce_scatter");
            }
            let Uncopied { sent, received } = comm.uncopied();
            assert_eq!(sent > 0 && received > 0, cabled(), "{sent} {received}");
        });
    }
}

#[test]
fn two_communicators_share_the_cables_while_buffers_are_on_their_way() {
    group(Links::Tcp(2), 2, |comm| {
        let comm = &comm;
        let second = comm.duplicate().unwrap();
        let other = 1 - comm.rank();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let mine = filled(comm, &pattern(comm.rank() as u64, 5 << 20));
                let theirs = pattern(other as u64, 5 << 20);
                let mut into = comm.allocate::<u8>(5 << 20).unwrap();
                for _ in 0..10 {
                    into.fill(0);
                    comm.send_recv(&mine, other, &mut into, other, 4).unwrap();
                    assert!(into[..] == theirs[..]);
                }
            });
            for round in 0..200_u32 {
                let mut small = [round + second.rank() as u32; 3];
                second.all_reduce(&mut small, Sum).unwrap();
                assert_eq!(small, [2 * round + 1; 3]);
            }
        });
        drop(second);
    });
}

#[test]
fn a_message_that_is_too_long_fills_the_buffer_and_nothing_else() {
    group(Links::Tcp(1), 2, |comm| {
        let comm = &comm;
        let long = pattern(3, 6 << 20);
        if comm.rank() == 0 {
            comm.send(&filled(comm, &long), 1, 0).unwrap();
            comm.send(&[9_u8], 1, 1).unwrap();
        } else {
            let mut buffer = filled(comm, &vec![5; 6 << 20]);
            let room = 4_000_001;
            let error = comm.recv(&mut buffer[..room], 0, 0).unwrap_err();
            assert!(
                matches!(error, Error::Truncated { sent, room: 4_000_001, .. } if sent == 6 << 20),
                "{error}"
            );
            assert!(buffer[..room] == long[..room]);
            assert!(buffer[room..].iter().all(|&byte| byte == 5), "bytes were written behind the buffer");
            let mut after = [0_u8];
            comm.recv(&mut after, 0, 1).unwrap();
            assert_eq!(after, [9]);
        }
    });
}

#[test]
fn what_is_borrowed_is_known_for_a_while() {
    group(Links::Tcp(1), 2, |comm| {
        let comm = &comm;
        let mut memory = vec![comm.rank() as u8 + 1; 4 << 20];
        let before = comm.uncopied();
        let exchange = |memory: &mut [u8]| {
            let (mine, theirs) = memory.split_at_mut(2 << 20);
            comm.send_recv(mine, 1 - comm.rank(), theirs, 1 - comm.rank(), 0).unwrap();
            assert!(theirs.iter().all(|&byte| byte == 2 - comm.rank() as u8));
        };
        comm.with_registered(&mut memory, exchange).unwrap();
        assert_eq!(since(before, comm).sent > 1 << 20, cabled());
        // Not any more.
        let before = comm.uncopied();
        exchange(&mut memory);
        assert_eq!(since(before, comm), Uncopied::default());
    });
}

#[test]
fn a_buffer_may_outlive_its_group() {
    let buffers = group(Links::Tcp(1), 2, |comm| {
        let mut buffer = comm.allocate::<f32>(1 << 18).unwrap();
        buffer.fill(1.0);
        comm.all_reduce(&mut buffer, Sum).unwrap();
        buffer
    });
    for buffer in buffers {
        assert!(!buffer.is_registered());
        assert!(buffer.iter().all(|&value| value == 2.0));
    }
}
