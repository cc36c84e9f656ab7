//! The sending side of all links, as runs and messages use it.

use super::health::{Failure, Health};
use crate::link::{Header, LinkError, LinkKind, Sender, Ticket};

/// The group's senders by world rank.
pub(crate) struct Lines<'a> {
    pub(crate) senders: &'a [Option<Sender>],
    pub(crate) epoch: u32,
    pub(crate) health: &'a Health,
}

impl Lines<'_> {
    /// The sender to a peer; an error once the peer has left.
    pub(crate) fn sender(&self, peer: usize) -> Result<&Sender, Failure> {
        self.senders[peer].as_ref().ok_or_else(|| Failure::Protocol {
            peer,
            link: LinkKind::Local,
            reason: "a plan sends to the own rank".to_owned(),
        })
    }

    /// Sends a message without payload. Nobody misses it if the peer has left.
    pub(crate) fn post(&self, peer: usize, header: &Header) -> Result<Ticket, Failure> {
        // SAFETY: there is no payload.
        match unsafe { self.sender(peer)?.send(header, std::ptr::null()) } {
            Ok(ticket) => Ok(ticket),
            Err(LinkError::Closed) => Ok(Ticket(0)),
            Err(error) => Err(self.failure(peer, error)),
        }
    }

    /// What a link's error means for the group.
    pub(crate) fn failure(&self, peer: usize, error: LinkError) -> Failure {
        failure(self.health, self.senders, peer, error)
    }
}

/// What a link's error means for the group.
pub(crate) fn failure(health: &Health, senders: &[Option<Sender>], peer: usize, error: LinkError) -> Failure {
    let link = senders[peer].as_ref().map_or(LinkKind::Local, Sender::kind);
    match error {
        LinkError::Closed if health.departed(peer) => {
            Failure::PeerLost { peer, reason: "it has left the group".to_owned(), source: None }
        }
        LinkError::Closed => {
            Failure::PeerLost { peer, reason: format!("its {link} connection was closed"), source: None }
        }
        LinkError::Broken { what, source } => Failure::PeerLost {
            peer,
            reason: format!("{what} on its {link} connection failed"),
            source: Some(source),
        },
        LinkError::Protocol(reason) => Failure::Protocol { peer, link, reason },
    }
}
