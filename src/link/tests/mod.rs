//! What every kind of link has to do: the same traffic over all of them, and over lanes made to be difficult.

mod ends;
mod lending;
mod sealing;
mod threads;
mod traffic;
mod trickle;
mod turns;

use std::net::{TcpListener, TcpStream};

use socket2::SockRef;

use super::{Header, MessageKind};
use crate::noise::{Handshake, Session};

/// Connected sockets over loopback, in the order of either side. Small buffers force short writes.
fn sockets(lanes: usize, send_buffer: Option<usize>) -> (Vec<TcpStream>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    if send_buffer.is_some() {
        // With loopback's large segments, less than a segment in flight would wait for delayed acknowledgements.
        SockRef::from(&listener).set_tcp_mss(1400).unwrap();
    }
    let connect = |_| {
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        if let Some(bytes) = send_buffer {
            SockRef::from(&ours).set_send_buffer_size(bytes).unwrap();
            SockRef::from(&theirs).set_send_buffer_size(bytes).unwrap();
        }
        (ours, theirs)
    };
    (0..lanes).map(connect).unzip()
}

/// Both ends of a conversation.
fn session_pair() -> (Session, Session) {
    let (handshake, message) = Handshake::call(&[1; 32], b"").unwrap();
    let (answer, called) = Handshake::answer(&[1; 32], b"", &message).unwrap();
    (handshake.conclude(&answer).unwrap(), called)
}

fn header(sequence: u64, length: u64) -> Header {
    Header {
        kind: MessageKind::Collective,
        epoch: 1,
        comm: 2,
        credit: 3,
        sequence,
        stream: 5,
        flags: 6,
        signature: [7; 24],
        length,
    }
}

/// Bytes in which no stretch looks like another.
fn payload(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed | 1);
    let mut bytes = vec![0; length];
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]));
    bytes
}

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }
}
