//! Messages between two ranks: every length, many tags, to oneself, too long, out of order.

use std::time::Duration;

use raccl::{Communicator, Error};

use crate::support::{Links, bytes, group, launch, random::Random, setting};

const BOTH: [Links; 2] = [Links::Local, Links::Tcp(3)];

/// How long a receive waits where an error of the library would let it wait for ever.
const SOON: Duration = Duration::from_secs(60);

/// Lengths in bytes around every border there is.
const LENGTHS: [usize; 11] =
    [0, 1, 63, 4096, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 256 << 10, 1 << 20, (3 << 20) + 5, 2];

fn payload(seed: u64, length: usize) -> Vec<u8> {
    Random::new(seed).bytes(length)
}

fn other(comm: &Communicator) -> usize {
    1 - comm.rank()
}

#[test]
fn every_length_arrives_in_order() {
    for links in BOTH {
        group(links, 2, |comm| {
            for (tag, length) in LENGTHS.into_iter().enumerate() {
                let tag = tag as u64 % 3;
                for turn in 0..2 {
                    if comm.rank() == turn {
                        comm.send(&payload(length as u64, length), other(&comm), tag).unwrap();
                    } else {
                        let mut buffer = vec![0; length + 10];
                        assert_eq!(comm.recv(&mut buffer, other(&comm), tag).unwrap(), length);
                        assert!(buffer[..length] == payload(length as u64, length));
                        assert!(buffer[length..] == [0; 10], "beyond the message");
                    }
                }
            }
        });
    }
}

#[test]
fn both_may_send_at_once() {
    for links in BOTH {
        group(links, 2, |comm| {
            for length in LENGTHS {
                let mut buffer = vec![0; length];
                let mine = payload(comm.rank() as u64, length);
                let count = comm.send_recv(&mine, other(&comm), &mut buffer, other(&comm), 4).unwrap();
                assert_eq!(count, length);
                assert!(buffer == payload(other(&comm) as u64, length));
            }
        });
    }
}

#[test]
fn tags_may_be_received_in_any_order() {
    for links in BOTH {
        for seed in 0..8 {
            group(links, 2, move |comm| {
                let mut random = Random::new(seed);
                // One message for each, then some twice: messages of one tag stay in order.
                let tags: Vec<u64> = (0..40).map(|_| random.below(25) as u64 * 0x0123_4567_89ab).collect();
                let lengths: Vec<usize> = tags.iter().map(|_| LENGTHS[random.below(6)].min(5000)).collect();
                if comm.rank() == 0 {
                    for (index, (&tag, &length)) in tags.iter().zip(&lengths).enumerate() {
                        comm.send(&payload(index as u64, length), 1, tag).unwrap();
                    }
                    return;
                }
                let mut left: Vec<usize> = (0..tags.len()).collect();
                while !left.is_empty() {
                    let tag = tags[left[random.below(left.len())]];
                    let first = left.iter().position(|&index| tags[index] == tag).unwrap();
                    let index = left.remove(first);
                    let mut buffer = vec![0; 5000];
                    let count = comm.recv(&mut buffer, 0, tag).unwrap();
                    assert_eq!(count, lengths[index]);
                    assert!(buffer[..count] == payload(index as u64, count));
                }
            });
        }
    }
}

/// Sends that do not wait, of far more than is sent ahead, are received in an order of the receiver's own.
#[test]
fn many_messages_in_flight_may_be_received_in_any_order() {
    for links in BOTH {
        for seed in 0..2 {
            group(links, 2, move |comm| {
                let mut random = Random::new(seed);
                let messages: Vec<Vec<u8>> = (0..200)
                    .map(|index| payload(index, [0, 10, 3000, 60_000, 70_000][random.below(5)]))
                    .collect();
                let mut order: Vec<usize> = (0..messages.len()).collect();
                (1..order.len()).rev().for_each(|last| order.swap(last, random.below(last + 1)));
                if comm.rank() == 0 {
                    let sending = comm.scope(|scope| {
                        for (tag, message) in messages.iter().enumerate() {
                            let _ = scope.send(message, 1, tag as u64)?;
                        }
                        Ok(())
                    });
                    return sending.unwrap();
                }
                let comm = comm.with_late_timeout(SOON);
                for tag in order {
                    let mut buffer = vec![0; 70_000];
                    let count = comm.recv(&mut buffer, 0, tag as u64).unwrap();
                    assert!(buffer[..count] == messages[tag], "message {tag}");
                }
            });
        }
    }
}

/// A message of a tag is received before all those that were sent earlier, though these are more than a receiver stores.
#[test]
fn stored_messages_do_not_hold_up_a_later_one() {
    for links in BOTH {
        for length in [0, 1000, 60_000] {
            group(links, 2, move |comm| {
                let comm = comm.with_late_timeout(SOON);
                let many = (600 << 10) / (length + 64);
                let (one, large) = (payload(1, length), payload(2, 200_000));
                if comm.rank() == 0 {
                    let sending = comm.scope(|scope| {
                        for _ in 0..many {
                            let _ = scope.send(&one, 1, 1)?;
                        }
                        let _ = scope.send(&large, 1, 2)?;
                        scope.send(b"last", 1, 3)?.wait()
                    });
                    return sending.unwrap();
                }
                let mut buffer = vec![0; 200_000];
                assert_eq!(comm.recv(&mut buffer, 0, 3).unwrap(), 4);
                assert_eq!(&buffer[..4], b"last");
                assert_eq!(comm.recv(&mut buffer, 0, 2).unwrap(), 200_000);
                assert!(buffer == large);
                for _ in 0..many {
                    assert_eq!(comm.recv(&mut buffer, 0, 1).unwrap(), length);
                    assert!(buffer[..length] == one);
                }
            });
        }
    }
}

/// There is a bound to what is announced too, which does no harm to messages that are received in their order.
#[test]
fn more_messages_than_may_be_announced_arrive_in_their_order() {
    for links in BOTH {
        group(links, 2, |comm| {
            let comm = comm.with_late_timeout(SOON);
            // Some 8000 are sent ahead, and 16384 announced.
            const MANY: u32 = 25_000;
            if comm.rank() == 0 {
                let numbers: Vec<[u32; 1]> = (0..MANY).map(|number| [number]).collect();
                let sending = comm.scope(|scope| {
                    for number in &numbers {
                        let _ = scope.send(number, 1, 1)?;
                    }
                    scope.send(b"last", 1, 2)?.wait()
                });
                return sending.unwrap();
            }
            let mut last = [0; 4];
            let receiving = comm.scope(|scope| {
                let pending = scope.recv(&mut last, 0, 2)?;
                for number in 0..MANY {
                    let mut next = [0];
                    comm.recv(&mut next, 0, 1)?;
                    assert_eq!(next, [number]);
                }
                pending.wait()
            });
            assert_eq!(receiving.unwrap(), 4);
            assert_eq!(&last, b"last");
        });
    }
}

#[test]
fn messages_to_oneself_wait_to_be_received() {
    for links in BOTH {
        group(links, 2, |comm| {
            let me = comm.rank();
            for length in LENGTHS {
                comm.send(&payload(1, length), me, 1).unwrap();
                comm.send(&payload(2, length), me, 2).unwrap();
                let mut buffer = vec![0; length];
                assert_eq!(comm.recv(&mut buffer, me, 2).unwrap(), length);
                assert!(buffer == payload(2, length));
                assert_eq!(comm.recv(&mut buffer, me, 1).unwrap(), length);
                assert!(buffer == payload(1, length));
                assert_eq!(comm.send_recv(&payload(3, length), me, &mut buffer, me, 3).unwrap(), length);
                assert!(buffer == payload(3, length));
            }
            // The receive first, the send from another thread.
            std::thread::scope(|threads| {
                let waiting = threads.spawn(|| {
                    let mut buffer = [0; 3];
                    comm.recv(&mut buffer, me, 9).map(|count| (count, buffer))
                });
                comm.send(b"abc", me, 9).unwrap();
                assert_eq!(waiting.join().unwrap().unwrap(), (3, *b"abc"));
            });
        });
    }
}

#[test]
fn a_message_longer_than_the_buffer_is_an_error_of_the_receiver_alone() {
    for links in BOTH {
        group(links, 2, |comm| {
            for length in LENGTHS.into_iter().filter(|&length| length > 0) {
                for room in [0, 1, length / 2, length - 1].into_iter().filter(|&room| room < length) {
                    // Sent ahead, and after the receiver waits.
                    for early in [true, false] {
                        if comm.rank() == 0 {
                            if !early {
                                comm.recv(&mut [0_u8; 0], 1, 1).unwrap();
                            }
                            comm.send(&payload(5, length), 1, 0).unwrap();
                            comm.send(b"next", 1, 0).unwrap();
                        } else {
                            if !early {
                                comm.send(&[0_u8; 0], 0, 1).unwrap();
                            }
                            let mut buffer = vec![0; room + 8];
                            let error = comm.recv(&mut buffer[..room], 0, 0).unwrap_err();
                            let Error::Truncated { rank: 1, peer: 0, tag: 0, sent, room: was } = error else {
                                panic!("{error}");
                            };
                            assert_eq!((sent, was), (length as u64, room as u64));
                            assert!(buffer[..room] == payload(5, length)[..room]);
                            assert!(buffer[room..] == [0; 8], "beyond the buffer");
                            let mut buffer = [0; 4];
                            assert_eq!(comm.recv(&mut buffer, 0, 0).unwrap(), 4);
                            assert_eq!(&buffer, b"next");
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn a_message_of_no_whole_number_of_elements_is_an_error_of_the_receiver_alone() {
    for links in BOTH {
        group(links, 2, |comm| {
            for length in [1, 5, (64 << 10) + 2] {
                if comm.rank() == 0 {
                    comm.send(&vec![7_u8; length], 1, 0).unwrap();
                } else {
                    let mut buffer = vec![0_u32; 100_000];
                    let error = comm.recv(&mut buffer, 0, 0).unwrap_err();
                    assert!(matches!(error, Error::InvalidArgument { operation: "recv", .. }), "{error}");
                    assert!(error.to_string().contains(&format!("{length} bytes")), "{error}");
                }
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn messages_in_a_scope_of_every_pair_arrive() {
    for links in BOTH {
        group(links, 4, |comm| {
            for length in [10, 30_000, 200_000] {
                let size = comm.size();
                let mut received = vec![vec![0_u8; length]; size];
                let sent: Vec<Vec<u8>> =
                    (0..size).map(|peer| payload((comm.rank() * size + peer) as u64, length)).collect();
                comm.scope(|scope| {
                    let mut pending = Vec::new();
                    for (peer, buffer) in received.iter_mut().enumerate() {
                        pending.push(scope.recv(buffer, peer, 3)?);
                    }
                    for (peer, buffer) in sent.iter().enumerate() {
                        // Not waited for: the scope's end does.
                        let _ = scope.send(buffer, peer, 3)?;
                    }
                    for pending in pending {
                        assert_eq!(pending.wait()?, length);
                    }
                    Ok(())
                })
                .unwrap();
                for (peer, buffer) in received.iter().enumerate() {
                    assert!(*buffer == payload((peer * size + comm.rank()) as u64, length));
                }
            }
        });
    }
}

/// With `RACCL_TEST_HUGE` 5 GiB; it takes as much memory in both processes.
#[test]
fn a_message_of_more_than_two_gib_crosses() {
    let length = if setting("RACCL_TEST_HUGE", 0) > 0 { 5 << 30 } else { 40 << 20 };
    launch("messages::a_message_of_more_than_two_gib_crosses", 2, &[], |config| {
        let comm = config.connect().unwrap();
        // Every 4 KiB another value, so that no page is where another should be.
        let stamp = |page: usize| (page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        const WORDS: usize = 512;
        if comm.rank() == 0 {
            let mut words = vec![0_u64; length / 8];
            words.chunks_mut(WORDS).enumerate().for_each(|(page, words)| words.fill(stamp(page)));
            let begin = std::time::Instant::now();
            comm.send(&words, 1, 0).unwrap();
            comm.recv(&mut [0_u8; 0], 1, 0).unwrap();
            println!("{} bytes in {:?}", bytes(&words).len(), begin.elapsed());
        } else {
            let mut words = vec![0_u64; length / 8];
            assert_eq!(comm.recv(&mut words, 0, 0).unwrap(), words.len());
            let wrong = words
                .chunks(WORDS)
                .enumerate()
                .position(|(page, words)| words.iter().any(|&word| word != stamp(page)));
            assert_eq!(wrong, None);
            comm.send(&[0_u8; 0], 0, 0).unwrap();
        }
    });
}
