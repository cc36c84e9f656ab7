//! The sending side of all links, as runs and messages use it.

use super::health::{Failure, Health};
use crate::link::{Header, LinkError, LinkKind, Sender, Ticket, verbs::Registry};

/// Bytes of a large message in one piece where they go out from where the user has them. Of each piece, what comes before the
/// peer has posted receives where it wants the bytes is copied there, half a megabyte or so; others that share the link wait
/// meanwhile.
const LENT_PIECE: usize = 8 << 20;

/// The group's senders by world rank.
pub(crate) struct Lines<'a> {
    pub(crate) senders: &'a [Option<Sender>],
    pub(crate) epoch: u32,
    pub(crate) registry: &'a Registry,
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

    /// How much of a large message that begins there is to go to a peer in one piece: `usual`, if nothing speaks for more.
    pub(crate) fn piece(&self, peer: usize, start: *const u8, bytes: usize, usual: usize) -> usize {
        let sender = self.senders[peer].as_ref().filter(|_| bytes > usual);
        let in_place = sender.is_some_and(|sender| sender.sends_in_place(self.registry, start, bytes));
        if in_place { LENT_PIECE.max(usual) } else { usual }
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
