//! Leaving a group in order, and ending it because the process ends.
#![forbid(unsafe_code)]

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use super::{Engine, Health, core::Core, health::Failure};
use crate::{
    bootstrap::watcher::{CauseKind, RemoteCause},
    error::Result,
    link::{Sender, verbs},
};

/// How long leaving waits for the peers to confirm.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long the last bytes may take to leave and to arrive, also if a peer that does not answer has used up the time above.
const PATIENCE: Duration = Duration::from_secs(1);

impl Engine {
    /// Says goodbye, reads what peers still sent, and closes. Returns the error that the group had failed with before.
    pub(crate) fn leave(&self) -> Result<()> {
        let mut core = self.core.lock();
        if std::mem::replace(&mut core.left, true) {
            return Ok(());
        }
        // What happens from here on is no failure of this rank: others may still have needed it, and may say so.
        let result = self.health.error("close").map_or(Ok(()), Err);
        if result.is_ok() {
            self.part(&mut core);
        }
        // If it failed meanwhile, what was under way to the others may never arrive: they are told not to wait for it.
        if self.health.error("close").is_some() {
            self.collapse(&mut core, "close");
        } else {
            // Before the devices, which may take long: peers that wait for this rank's word that all has arrived wait no more.
            self.control.close(|| !self.health.has_failed());
        }
        if let Some(failure) = self.health.failure() {
            // Whoever announces it may not have come to that yet, and cannot any more in a moment.
            self.tell(&failure, "close");
        }
        core.receivers.iter_mut().for_each(|receiver| *receiver = None);
        self.senders.iter().flatten().for_each(Sender::release);
        self.registry.release();
        // After the devices: a signal that ends the process waits for them, and not for last words that a peer does not read.
        self.control.close(|| true);
        result
    }

    /// Says goodbye, reads what peers still sent, and sees what was sent to them on its way. No longer than until the group
    /// fails: a signal that ends the process is such a failure, and waits for this rank to let go of its devices.
    fn part(&self, core: &mut Core) {
        let until = Instant::now() + FAREWELL;
        // Also to those who have left: they may be waiting for their own answers still.
        let peers: Vec<usize> = (0..self.size).filter(|&peer| peer != self.rank).collect();
        peers.iter().for_each(|&peer| self.control.goodbye(peer));
        for &peer in &peers {
            let Some(sent) = self.health.wait_answer(peer, until) else { continue };
            if let Some(receiver) = &mut core.receivers[peer] {
                receiver.cancel();
                while !receiver.drain(&sent) && self.may_wait(until) {
                    std::thread::yield_now();
                }
            }
        }
        let until = until.max(Instant::now() + PATIENCE);
        let is_awaited =
            |peer: usize, sender: &Sender| sender.cables().is_none() || !self.health.departed(peer);
        let senders = self.senders.iter().enumerate();
        let senders = senders.filter_map(|(peer, sender)| Some((peer, sender.as_ref()?)));
        let mut ending: Vec<&Sender> =
            senders.filter(|&(peer, sender)| is_awaited(peer, sender)).map(|(_, sender)| sender).collect();
        loop {
            ending.retain(|sender| !sender.shutdown());
            if ending.is_empty() || !self.may_wait(until) {
                break;
            }
            std::thread::yield_now();
        }
        self.confirm(until);
    }

    /// Waits until what was sent over cables has arrived: what is under way is lost once this side lets go of a cable.
    fn confirm(&self, until: Instant) {
        /// How long after a question the next one follows.
        const PAUSE: Duration = Duration::from_millis(2);
        let cables = self.senders.iter().enumerate();
        let cables = cables.filter_map(|(peer, sender)| Some((peer, sender.as_ref()?.cables()?)));
        let mut open: Vec<_> = cables.map(|(peer, cables)| (peer, cables, cables.sent())).collect();
        loop {
            for (peer, cables, _) in &open {
                cables.tend();
                self.control.ask(*peer);
            }
            open.retain(|(peer, _, sent)| !self.health.wait_arrived(*peer, sent, Instant::now() + PAUSE));
            if open.is_empty() || !self.may_wait(until) {
                break;
            }
        }
        for (peer, ..) in open {
            tracing::warn!(rank = self.rank, peer, "leaving before the last bytes are known to have arrived");
        }
    }

    fn may_wait(&self, until: Instant) -> bool {
        Instant::now() < until && !self.health.has_failed()
    }

    /// What ends the group before a signal ends the process.
    pub(crate) fn ending(self: &Arc<Engine>) -> Ending {
        Ending { rank: self.rank, engine: Arc::downgrade(self), health: Arc::downgrade(&self.health) }
    }
}

/// A group that a signal may end; see [`Engine::ending`].
pub(crate) struct Ending {
    rank: usize,
    /// Nobody finds it here while the group is being closed.
    engine: Weak<Engine>,
    /// There until the group has been closed.
    health: Weak<Health>,
}

impl verbs::End for Ending {
    fn stop(&self, signal: &'static str) {
        let Some(health) = self.health.upgrade() else { return };
        // To the others this rank is lost, as it would be without cables.
        let kind = CauseKind::PeerLost { peer: self.rank };
        let message = format!("rank {} was ended by {signal}", self.rank);
        health.fail(Failure::Remote(RemoteCause { origin: self.rank, kind, message }));
    }

    fn free(&self, until: Instant) {
        // Otherwise somebody is closing it, sees the failure, and frees the devices next.
        let Some(engine) = self.engine.upgrade() else { return };
        // Whoever has the lock sees the failure, unless it is in an operation of the user's.
        let Some(mut core) = engine.core.try_lock_until(until) else { return };
        core.left = true;
        engine.collapse(&mut core, "close");
        core.receivers.iter_mut().for_each(|receiver| *receiver = None);
        engine.senders.iter().flatten().for_each(Sender::release);
        engine.registry.release();
    }

    fn is_over(&self) -> bool {
        self.health.strong_count() == 0
    }
}
