//! One peer as the monitor knows it: what has been said and heard, and whether its machine is still there.
#![forbid(unsafe_code)]

use std::{
    io,
    net::{Shutdown, TcpStream},
    time::Duration,
};

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};

use super::super::{
    channel::Channel,
    event::Event,
    frames::{Inbox, Outbox},
};
use crate::os::silence;

/// A machine that vanishes is noticed after three unanswered probes.
pub(super) const PROBE: Duration = Duration::from_secs(1);
const PROBES: u32 = 2;
/// Also with bytes under way, where the kernel does not probe.
#[cfg(any(target_os = "linux", target_os = "android"))]
const UNANSWERED: Duration = Duration::from_millis(2500);

/// The kernel's own verdict comes at its third whole second, which its timers make a little more than three. Where it tells how
/// many of its probes wait for an answer, or how often it has sent the same again, so many, and so long after the last sign of
/// life, are enough.
const UNANSWERED_PROBES: u32 = 2;
const RETRANSMISSIONS: u32 = 3;
const SILENCE: Duration = Duration::from_millis(2400);

pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) out: Mutex<Out>,
    pub(super) inbox: Mutex<In>,
    /// On another machine, which can vanish.
    pub(super) remote: bool,
}

impl Peer {
    pub(super) fn new(mut channel: Channel, limit: usize) -> io::Result<Peer> {
        channel.set_limit(limit);
        let (stream, inbox, outbox) = channel.into_parts();
        // What is gone already cannot be set up any more; reading shows how it ended.
        if stream.peer_addr().is_ok() {
            keep_alive(&stream)?;
        }
        let remote = match (stream.local_addr(), stream.peer_addr()) {
            (Ok(local), Ok(peer)) => local.ip() != peer.ip(),
            // It broke just now, which reading will show.
            _ => false,
        };
        Ok(Peer {
            remote: remote && silence(&stream).is_some(),
            stream,
            out: Mutex::new(Out {
                outbox: Some(outbox),
                said_goodbye: false,
                said_failed: false,
                shut: false,
            }),
            inbox: Mutex::new(In {
                inbox: Some(inbox),
                held: false,
                they_left: false,
                they_failed: false,
                we_are_answered: false,
                ended: false,
            }),
        })
    }

    /// True if the kernel has waited for an answer as long as anybody should.
    pub(super) fn is_silent(&self) -> bool {
        self.remote
            && silence(&self.stream).is_some_and(|found| {
                let tried = found.probes >= UNANSWERED_PROBES || found.retransmissions >= RETRANSMISSIONS;
                tried && found.since >= SILENCE
            })
    }
}

pub(super) struct Out {
    /// `None` while somebody else speaks on this connection.
    pub(super) outbox: Option<Outbox>,
    pub(super) said_goodbye: bool,
    pub(super) said_failed: bool,
    /// Nothing more can be said.
    pub(super) shut: bool,
}

pub(super) struct In {
    /// `None` while somebody else listens on this connection.
    pub(super) inbox: Option<Inbox>,
    /// What comes next is for somebody else, who takes the inbox in a moment.
    pub(super) held: bool,
    pub(super) they_left: bool,
    pub(super) they_failed: bool,
    pub(super) we_are_answered: bool,
    /// Nothing more can be heard.
    pub(super) ended: bool,
}

impl Out {
    pub(super) fn queue(&mut self, event: &Event) {
        if let Some(outbox) = &mut self.outbox {
            outbox.queue(&event.encode());
        }
    }

    pub(super) fn unsent(&self) -> bool {
        self.outbox.as_ref().is_some_and(Outbox::unsent)
    }

    pub(super) fn backlog(&self) -> usize {
        self.outbox.as_ref().map_or(0, Outbox::backlog)
    }

    pub(super) fn flush(&mut self, stream: &TcpStream) {
        let Some(outbox) = &mut self.outbox else { return };
        if !self.shut && outbox.flush(stream).is_err() {
            // How it ended is told by the reading side, which still finds what the peer said last.
            self.shut(stream);
        }
    }

    pub(super) fn shut(&mut self, stream: &TcpStream) {
        if !std::mem::replace(&mut self.shut, true) {
            // It fails only if the peer is gone, and then there is nobody to tell.
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

/// Lets the kernel find out when the peer's machine is gone. A process that is stopped stays alive in this sense.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(PROBE).with_interval(PROBE).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(UNANSWERED))?;
    Ok(())
}
