//! Doors for the fuzz targets to the decoders of what peers send. Not part of the API: it exists only when fuzzing.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

use crate::{
    bootstrap::{
        channel::{Channel, Pass},
        event::{EVENT_LIMIT, Event},
        keys::{JobKeys, Place},
        message::{Card, Message, Purpose, frame_limit},
    },
    config::Secret,
    link::{HEADER_BYTES, Header, verbs},
    plan::Overrides,
};

/// The group's size, which bounds what a message may hold.
const SIZE: usize = 5;

/// Every byte of a header means something, so that what decodes has one form.
pub fn header(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else { return };
    if let Ok(header) = Header::decode(bytes) {
        assert_eq!(&header.encode(), bytes);
    }
}

pub fn message(frame: &[u8]) {
    if let Ok(message) = Message::decode(frame, SIZE) {
        let again = message.encode();
        assert!(again.len() <= frame_limit(SIZE));
        assert_eq!(Message::decode(&again, SIZE), Ok(message));
    }
    if let Ok(card) = Card::decode(frame) {
        assert_eq!(Card::decode(&card.encode()), Ok(card));
    }
}

pub fn event(frame: &[u8]) {
    if let Ok(event) = Event::decode(frame) {
        let again = event.encode();
        assert!(again.len() <= EVENT_LIMIT);
        assert_eq!(Event::decode(&again), Ok(event));
    }
}

pub fn packet(bytes: &[u8]) {
    verbs::fuzzing::packet(bytes);
}

pub fn offers(script: &[u8]) {
    verbs::fuzzing::offers(script);
}

pub fn overrides(text: &str) {
    if let Ok(overrides) = text.parse::<Overrides>() {
        assert_eq!(overrides.to_string().parse(), Ok(overrides));
    }
}

/// Two ranks meet, and somebody between them does what the script says with what they send. With a secret nothing is received
/// but what was sent, in order, whatever happens on the way.
pub fn handshake(script: &[u8]) {
    let mut script = script.iter().copied();
    let Some(mode) = script.next() else { return };
    let secret = mode & 1 == 1;
    let place = match mode & 2 {
        0 => Place::Lobby,
        _ => Place::Pair { from: 2, to: 1, purpose: Purpose::Data(usize::from(mode >> 2)) },
    };
    let keys = Arc::new(JobKeys::new(Secret::new([7; 32])).group(&[9; 32]));
    let pass = Pass { place, key: keys.place(place) };
    let (one, mut near) = connection();
    let (two, mut far) = connection();
    let Ok(caller) = Channel::caller(one, LIMIT, secret.then_some(&pass)) else { return };
    let mut caller = End { channel: caller, heard: 0, over: false };
    let called = Channel::called(two, LIMIT, secret.then_some(&keys));
    let mut called = End { channel: called, heard: 0, over: false };
    let (mut up, mut down) = (Vec::new(), Vec::new());
    let (mut said_up, mut said_down) = (Vec::new(), Vec::new());
    caller.channel.flush();
    while let Some(step) = script.next() {
        let argument = usize::from(script.next().unwrap_or(0));
        let (way, said, end) = match step & 0x80 {
            0 => (&mut up, &mut said_up, &mut caller),
            _ => (&mut down, &mut said_down, &mut called),
        };
        let first = argument.min(way.len());
        match step & 7 {
            0 => {
                said.push(vec![step; argument]);
                end.channel.send(&vec![step; argument]);
            }
            // Everything goes through, or some of it.
            1 => pass_on(if step & 0x80 == 0 { &mut far } else { &mut near }, way, usize::MAX),
            2 => pass_on(if step & 0x80 == 0 { &mut far } else { &mut near }, way, argument),
            3 if first < way.len() => way[first] ^= step >> 3 | 1,
            4 => drop(way.drain(..first)),
            5 => drop(way.splice(0..0, script.by_ref().take(argument)).count()),
            6 => way.extend_from_within(..first),
            _ => {}
        }
        take_in(&mut near, &mut up);
        take_in(&mut far, &mut down);
        called.hear(secret, &said_up);
        caller.hear(secret, &said_down);
    }
}

/// Longest frame in the fuzzed handshake.
const LIMIT: usize = 200;

struct End {
    channel: Channel,
    heard: usize,
    over: bool,
}

impl End {
    fn hear(&mut self, secret: bool, said: &[Vec<u8>]) {
        while !self.over {
            match self.channel.receive() {
                Ok(None) => return,
                Ok(Some(frame)) => {
                    assert!(frame.len() <= LIMIT);
                    assert!(!secret || Some(&frame) == said.get(self.heard), "received what was not sent");
                    self.heard += 1;
                }
                Err(broken) => {
                    assert!(!broken.to_string().is_empty());
                    self.over = true;
                }
            }
        }
    }
}

/// A connection that needs no network.
pub(crate) fn connection() -> (TcpStream, TcpStream) {
    let (one, two) = UnixStream::pair().expect("the fuzzer has descriptors");
    let stream = |unix: UnixStream| {
        unix.set_nonblocking(true).expect("sockets can be told not to block");
        TcpStream::from(OwnedFd::from(unix))
    };
    (stream(one), stream(two))
}

fn pass_on(to: &mut TcpStream, bytes: &mut Vec<u8>, most: usize) {
    let count = most.min(bytes.len());
    // What the socket does not take stays.
    let taken = to.write(&bytes[..count]).unwrap_or(0);
    bytes.drain(..taken);
}

fn take_in(from: &mut TcpStream, bytes: &mut Vec<u8>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..count]);
    }
}
