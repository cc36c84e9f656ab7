//! Leaving a group in order, and ending it because the process ends.
#![forbid(unsafe_code)]

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use super::{Engine, health::Failure};
use crate::{
    bootstrap::watcher::{CauseKind, RemoteCause},
    error::Result,
    link::{Sender, verbs},
};

/// How long leaving waits for the peers to confirm.
const FAREWELL: Duration = Duration::from_secs(2);

impl Engine {
    /// Says goodbye, reads what peers still sent, and closes. Returns the error that the group had failed with before.
    pub(crate) fn leave(&self) -> Result<()> {
        let mut core = self.core.lock();
        if std::mem::replace(&mut core.left, true) {
            return Ok(());
        }
        // What happens from here on is no failure of this rank: others may still have needed it, and may say so.
        let result = self.health.error("close").map_or(Ok(()), Err);
        if result.is_err() {
            self.collapse(&mut core, "close");
        } else {
            let until = Instant::now() + FAREWELL;
            // Also to those who have left: they may be waiting for their own answers still.
            let peers: Vec<usize> = (0..self.size).filter(|&peer| peer != self.rank).collect();
            peers.iter().for_each(|&peer| self.control.goodbye(peer));
            for &peer in &peers {
                let Some(sent) = self.health.wait_answer(peer, until) else { continue };
                if let Some(receiver) = &mut core.receivers[peer] {
                    receiver.cancel();
                    while !receiver.drain(&sent) && Instant::now() < until {
                        std::thread::yield_now();
                    }
                }
            }
            for (peer, sender) in self.senders.iter().enumerate() {
                if let Some(sender) = sender
                    && (sender.cables().is_none() || !self.health.departed(peer))
                {
                    sender.shutdown();
                }
            }
            self.confirm(until);
        }
        self.control.close();
        core.receivers.iter_mut().for_each(|receiver| *receiver = None);
        self.senders.iter().flatten().for_each(Sender::release);
        result
    }

    /// Waits until what was sent over cables has arrived: what is under way is lost once this side lets go of a cable.
    fn confirm(&self, until: Instant) {
        /// How long after a question the next one follows.
        const PAUSE: Duration = Duration::from_millis(2);
        for (peer, sender) in self.senders.iter().enumerate() {
            let Some(cables) = sender.as_ref().and_then(Sender::cables) else { continue };
            let sent = cables.sent();
            loop {
                cables.tend();
                self.control.ask(peer);
                if self.health.wait_arrived(peer, &sent, Instant::now() + PAUSE) {
                    break;
                }
                if Instant::now() >= until {
                    tracing::warn!(
                        rank = self.rank,
                        peer,
                        "leaving before the last bytes are known to have arrived"
                    );
                    break;
                }
            }
        }
    }

    /// What ends the group before a signal ends the process.
    pub(crate) fn ending(self: &Arc<Engine>) -> Ending {
        Ending(Arc::downgrade(self))
    }
}

/// A group that a signal may end; see [`Engine::ending`].
pub(crate) struct Ending(Weak<Engine>);

impl verbs::End for Ending {
    fn end(&self, signal: &'static str, until: Instant) {
        let Some(engine) = self.0.upgrade() else { return };
        // To the others this rank is lost, as it would be without cables.
        let kind = CauseKind::PeerLost { peer: engine.rank };
        let message = format!("rank {} was ended by {signal}", engine.rank);
        engine.health.fail(Failure::Remote(RemoteCause { origin: engine.rank, kind, message }));
        // Whoever has the lock sees the failure, unless it is in an operation of the user's.
        let Some(mut core) = engine.core.try_lock_until(until) else { return };
        core.left = true;
        engine.collapse(&mut core, "close");
        core.receivers.iter_mut().for_each(|receiver| *receiver = None);
        engine.senders.iter().flatten().for_each(Sender::release);
    }

    fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}
