//! What sealed links do not let through.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    time::Duration,
};

use super::{header, payload, session_pair, sockets};
use crate::link::{Arrival, LinkError, Receiver, Sender, tcp};

const LENGTH: usize = 5000;

/// A message of [`LENGTH`] bytes goes through, as far as `change` lets the bytes of the lane.
fn through(change: impl Fn(&mut Vec<u8>)) -> Result<Vec<u8>, LinkError> {
    let (ours, near) = sockets(1, None);
    let (far, theirs) = sockets(1, None);
    let (one, two) = session_pair();
    let (sender, _) = tcp::sealed_pair(ours.into_iter().zip([one]).collect()).unwrap();
    let (_theirs, mut receiver) = tcp::sealed_pair(theirs.into_iter().zip([two]).collect()).unwrap();
    let sent = payload(7, LENGTH);
    // SAFETY: `sent` lives until the end of the function, when the sender is long gone.
    unsafe { sender.send(&header(1, LENGTH as u64), sent.as_ptr()) }.unwrap();
    let mut bytes = captured(&sender, near);
    drop(sender);
    change(&mut bytes);
    let mut far = far.into_iter().next().unwrap();
    far.write_all(&bytes).unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    received(&mut receiver)
}

/// All that has come out of the lane.
fn captured(sender: &Sender, near: Vec<TcpStream>) -> Vec<u8> {
    assert!(!sender.pending(), "a socket holds that much");
    sender.shutdown();
    let mut near = near.into_iter().next().unwrap();
    near.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = Vec::new();
    near.read_to_end(&mut bytes).unwrap();
    bytes
}

fn received(receiver: &mut Receiver) -> Result<Vec<u8>, LinkError> {
    let mut memory = vec![0xEE; LENGTH];
    loop {
        match receiver.poll()? {
            Arrival::Nothing => std::thread::yield_now(),
            Arrival::Header(found) => {
                assert_eq!(found, header(1, LENGTH as u64), "a changed header came through");
                // SAFETY: `memory` is used only after the payload is complete.
                unsafe { receiver.land(memory.as_mut_ptr(), LENGTH) };
            }
            Arrival::Payload => return Ok(memory),
            Arrival::Closed => panic!("closed where a message was sent"),
        }
    }
}

#[test]
fn what_is_sealed_comes_through_and_cannot_be_read_on_the_way() {
    let sent = payload(7, LENGTH);
    let arrived = through(|bytes| {
        assert!(bytes.len() > LENGTH + 64 && bytes.len() < LENGTH + 200);
        for window in sent.chunks(16) {
            assert!(!bytes.windows(16).any(|found| found == window));
        }
    });
    assert!(arrived.unwrap() == payload(7, LENGTH));
}

#[test]
fn no_changed_byte_is_ever_received() {
    // The length, the header, the payload, the tag.
    for at in [0, 1, 2, 5, 50, 66, 67, 1000, 3333, LENGTH + 60, LENGTH + 65, LENGTH + 81] {
        for flip in [1, 0x80] {
            let outcome = through(|bytes| bytes[at] ^= flip);
            assert!(
                matches!(outcome, Err(LinkError::Protocol(_) | LinkError::Broken { .. })),
                "byte {at}: {outcome:?}"
            );
        }
    }
}

#[test]
fn nothing_left_out_repeated_or_cut_off_is_received() {
    let outcomes = [
        through(|bytes| drop(bytes.drain(10..11))),
        through(|bytes| bytes.insert(10, 0)),
        through(|bytes| bytes.truncate(LENGTH)),
        through(|bytes| bytes.truncate(1)),
        through(|bytes| bytes.splice(0..0, [0, 0]).for_each(drop)),
        through(|bytes| bytes.splice(0..0, [0xff, 0xff]).for_each(drop)),
    ];
    for (number, outcome) in outcomes.iter().enumerate() {
        assert!(outcome.is_err(), "{number}");
    }
}

#[test]
fn a_record_that_is_sent_again_ends_the_link() {
    let (ours, near) = sockets(1, None);
    let (far, theirs) = sockets(1, None);
    let (one, two) = session_pair();
    let (sender, _) = tcp::sealed_pair(ours.into_iter().zip([one]).collect()).unwrap();
    let (_theirs, mut receiver) = tcp::sealed_pair(theirs.into_iter().zip([two]).collect()).unwrap();
    // SAFETY: there is no payload.
    unsafe { sender.send(&header(1, 0), std::ptr::null()) }.unwrap();
    let bytes = captured(&sender, near);
    let mut far = far.into_iter().next().unwrap();
    far.write_all(&bytes).unwrap();
    let mut next = || loop {
        match receiver.poll() {
            Ok(Arrival::Nothing) => std::thread::yield_now(),
            other => return other,
        }
    };
    assert_eq!(next().unwrap(), Arrival::Header(header(1, 0)));
    far.write_all(&bytes).unwrap();
    assert!(matches!(next(), Err(LinkError::Protocol(text)) if text.contains("does not open")));
}
