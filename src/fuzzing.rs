//! Doors for the fuzz targets to the decoders of what peers send. Not part of the API: it exists only when fuzzing.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

use crate::{
    bootstrap::{
        event::{EVENT_LIMIT, Event},
        message::{Card, Message, frame_limit},
    },
    link::{HEADER_BYTES, Header},
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
