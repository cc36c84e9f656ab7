//! Doors for the fuzz targets to what comes through cables and to what peers say before there are any.
#![forbid(unsafe_code)]

use std::{
    io::{Read, Write},
    net::Shutdown,
    time::{Duration, Instant},
};

use super::{
    bring_up::{Trouble, agree},
    crc32c::crc32c,
    device::MOST_SLOTS,
    offer::{Offer, OfferedClass},
    packet::{PACKET_BYTES, Packet},
    rounds::Rounds,
    wire::FRAME,
};
use crate::fuzzing::connection;

/// The number of a lane and the header of a packet that comes through it. Hardly any bytes have the sum that they should
/// have, so that they are tried with it too.
pub(crate) fn packet(bytes: &[u8]) {
    let Some((lane, bytes)) = bytes.split_first_chunk::<4>() else { return };
    let Some(bytes) = bytes.first_chunk::<PACKET_BYTES>() else { return };
    let lane = u32::from_le_bytes(*lane);
    decode(bytes, lane);
    let mut summed = *bytes;
    summed[28..].copy_from_slice(&crc32c(lane, &bytes[..28]).to_le_bytes());
    decode(&summed, lane);
}

fn decode(bytes: &[u8; PACKET_BYTES], lane: u32) {
    let Ok(packet) = Packet::decode(bytes, lane) else { return };
    let again = packet.encode(lane);
    assert_eq!(Packet::decode(&again, lane), Ok(packet));
    // All but the place of a payload's sum that is not given has a meaning, and so one form.
    let known = if packet.payload_sum.is_some() { PACKET_BYTES } else { 24 };
    assert_eq!(again[..known], bytes[..known]);
    assert!(Packet::decode(bytes, !lane).is_err(), "another lane's packet was taken for one of this");
}

/// This rank's cables have slots of so many bytes.
const SLOTS: [usize; 2] = [FRAME, 64 << 10];
/// Nobody has to wait: what the peer says is there from the beginning, and then its end.
const PATIENCE: Duration = Duration::from_secs(5);

/// A rank goes through the three rounds with a peer that says what the script says: answers in lines, or bytes that bring their
/// own lengths along.
pub(crate) fn offers(script: &[u8]) {
    let Some((&mode, script)) = script.split_first() else { return };
    let mut said = if mode & 1 == 0 { framed(script) } else { script.to_vec() };
    let classes = if mode & 4 == 0 { 2 } else { 1 };
    let cables = if mode & 8 == 0 { 1 } else { 2 };
    let (near, mut far) = connection();
    // The socket has room for what libFuzzer makes, and what it has none for is never said.
    let room = far.write(&said).unwrap_or(0);
    said.truncate(room);
    far.shutdown(Shutdown::Write).expect("a connection has an end");

    let mut rounds = Rounds::new(vec![None, Some(&near)], Instant::now() + PATIENCE);
    let opened = match mode & 2 {
        0 => Ok((0..cables).map(|index| own(index, classes)).collect::<Vec<Offer>>()),
        _ => Err(Trouble { reason: "there is no device".to_owned(), source: None }),
    };
    let Ok(offers) = agree(0, &mut rounds, &opened, |ends, _| ends.clone()) else { return };
    let offers = offers[1].as_deref().expect("the peer has answered");
    let met = (0..cables).try_for_each(|index| meet(offers, index, classes));
    let met = met.map_err(|reason| {
        // It is told to everybody.
        assert!((1..500).contains(&reason.len()), "{reason}");
        Trouble { reason, source: None }
    });
    for _ in 0..2 {
        if agree(0, &mut rounds, &met, |(), _| ()).is_err() {
            return;
        }
    }
    // What comes after the last answer is for others.
    let mut at = 0;
    for _ in 0..3 {
        let length = said[at..].first_chunk().expect("there were three answers");
        at += 4 + u32::from_le_bytes(*length) as usize;
    }
    let mut rest = Vec::new();
    (&near).read_to_end(&mut rest).expect("the peer has said all that it says");
    assert_eq!(rest, said[at..]);
}

fn own(index: usize, classes: usize) -> Offer {
    let class = |&slot_bytes: &usize| OfferedClass { queue_pair: 7, slot_bytes, recv_slots: 8 };
    Offer {
        index,
        device: "rdma_en5".to_owned(),
        lid: 0,
        gid: [1; 16],
        mtu: 1024,
        megabits: 80_000,
        classes: SLOTS[..classes].iter().map(class).collect(),
    }
}

/// What was found good is what the rest relies on.
fn meet(offers: &[Offer], index: usize, classes: usize) -> Result<(), String> {
    let offer = Offer::find(offers, index, 1, 0)?;
    offer.check("here to there", 1, SLOTS[..classes].iter().copied())?;
    assert_eq!(offer.index, index);
    assert!(!offer.classes.is_empty());
    for (slot_bytes, class) in SLOTS[..classes].iter().zip(&offer.classes) {
        assert_eq!(class.slot_bytes, *slot_bytes);
        assert!((1..=MOST_SLOTS).contains(&class.recv_slots) && class.recv_slots.is_power_of_two());
    }
    Ok(())
}

/// Each line as an answer.
fn framed(lines: &[u8]) -> Vec<u8> {
    let frame = |line: &[u8]| [&(line.len() as u32).to_le_bytes(), line].concat();
    lines.split(|&byte| byte == b'\n').flat_map(frame).collect()
}
