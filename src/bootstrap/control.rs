//! What a group says over its control connections.
#![forbid(unsafe_code)]

use std::{
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    Connections,
    alarm::Alarm,
    monitor::{self, Bell, Group},
    watcher::{RemoteCause, Status, Watcher},
};
use crate::{Error, Result};

/// The control connections of one group, watched from [`start`](Control::start) to [`close`](Control::close).
///
/// A peer can leave in three ways:
///  - it says goodbye, is answered, and closes: nothing is reported but the goodbye;
///  - it says that it failed, and closes: the failure is reported, the closing is not;
///  - its connection closes or breaks without a word: it is reported as lost.
///
/// Each [`goodbye`](Control::goodbye) is answered once: by the peer, or, if its connection is gone or goes before it answers,
/// with no numbers at all, since then nothing more can come from it.
///
/// No method waits for a peer, except [`close`](Control::close), for a second at most.
pub(crate) struct Control(Kind);

enum Kind {
    Remote(Arc<Group>),
    Local(Local),
}

impl Control {
    /// Hands the connections of `rank` to the monitor, which reports to `watcher` as long as that lives.
    pub(crate) fn start(connections: Connections, rank: usize, watcher: Arc<dyn Watcher>) -> Result<Control> {
        let system = |what| move |error: io::Error| Error::System { what, rank, source: error.into() };
        let group = Group::new(connections.channels, connections.past, Arc::downgrade(&watcher))
            .map_err(system("setting keep-alive"))?;
        let group = Arc::new(group);
        monitor::watch(Arc::clone(&group)).map_err(system("starting the monitor"))?;
        Ok(Control(Kind::Remote(group)))
    }

    /// For the threads of one process: `rank` reaches the watchers of its peers directly. They are in rank order, `None` in its
    /// own place, and are called by the thread that calls the methods below.
    pub(crate) fn local(
        rank: usize,
        own: Arc<dyn Watcher>,
        peers: Vec<Option<Weak<dyn Watcher>>>,
    ) -> Control {
        let left = peers.iter().map(|_| AtomicBool::new(false)).collect();
        Control(Kind::Local(Local { rank, own, peers, left, closed: AtomicBool::new(false) }))
    }

    /// Tells the peer that this rank makes no further call.
    pub(crate) fn goodbye(&self, peer: usize) {
        match &self.0 {
            Kind::Remote(group) => group.goodbye(peer),
            Kind::Local(local) => local.goodbye(peer),
        }
    }

    /// Tells the peer that this rank has failed. The first cause counts, later ones are not sent.
    pub(crate) fn failed(&self, peer: usize, cause: &RemoteCause) {
        match &self.0 {
            Kind::Remote(group) => group.failed(peer, cause),
            Kind::Local(local) => local.failed(peer, cause),
        }
    }

    /// Tells the peer where this rank is. Dropped if the peer does not read.
    pub(crate) fn status(&self, peer: usize, status: Status) {
        match &self.0 {
            Kind::Remote(group) => group.status(peer, status),
            Kind::Local(local) => local.status(peer, status),
        }
    }

    /// The connections to other processes; none between threads.
    pub(super) fn group(&self) -> Option<&Arc<Group>> {
        match &self.0 {
            Kind::Remote(group) => Some(group),
            Kind::Local(_) => None,
        }
    }

    /// What ends the group from a signal handler. `rank` is this one.
    pub(crate) fn trigger(&self, rank: usize) -> Trigger {
        let (alarms, bell) = match &self.0 {
            Kind::Remote(group) => (group.alarm().into_iter().collect(), group.bell()),
            Kind::Local(local) => (local.alarms(), None),
        };
        Trigger { rank, alarms, bell }
    }

    /// Asks the peer what has arrived there through the cables. The answer is told to the watcher, or that the peer has ended.
    pub(crate) fn ask(&self, peer: usize) {
        match &self.0 {
            Kind::Remote(group) => group.ask(peer),
            // There are no cables between threads.
            Kind::Local(local) => local.own.ended(peer),
        }
    }

    /// Sends what is queued, as long as that `may_wait` but for a second at most, and closes. The watcher is not called any more,
    /// but a call that is under way may still be when this returns. Later calls of any method do nothing.
    pub(crate) fn close(&self, may_wait: impl Fn() -> bool) {
        match &self.0 {
            Kind::Remote(group) => group.close(may_wait),
            Kind::Local(local) => local.close(),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.close(|| true);
    }
}

/// Ends a group without a lock and without taking or giving back memory.
pub(crate) struct Trigger {
    rank: usize,
    /// Of this rank; in a group of threads, of all ranks.
    alarms: Box<[Arc<Alarm>]>,
    /// Of the monitor, which tells the other processes.
    bell: Option<Bell>,
}

impl Trigger {
    pub(crate) fn pull(&self) {
        self.alarms.iter().for_each(|alarm| alarm.abort(self.rank));
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }
}

/// Without sockets.
struct Local {
    rank: usize,
    own: Arc<dyn Watcher>,
    peers: Vec<Option<Weak<dyn Watcher>>>,
    /// Peers that know that this rank is gone, or why it failed.
    left: Vec<AtomicBool>,
    closed: AtomicBool,
}

impl Local {
    /// The peer's watcher, unless either side is gone.
    fn peer(&self, peer: usize) -> Option<Arc<dyn Watcher>> {
        if self.closed.load(Ordering::Acquire) { None } else { self.peers.get(peer)?.as_ref()?.upgrade() }
    }

    fn goodbye(&self, peer: usize) {
        if self.closed.load(Ordering::Acquire) || self.left[peer].swap(true, Ordering::AcqRel) {
            return;
        }
        let sent = self.peer(peer).map_or(Vec::new(), |watcher| watcher.goodbye(self.rank));
        self.own.goodbye_answered(peer, sent);
    }

    fn failed(&self, peer: usize, cause: &RemoteCause) {
        if let Some(watcher) = self.peer(peer) {
            self.left[peer].store(true, Ordering::Release);
            watcher.failed(self.rank, cause.clone());
        }
    }

    fn status(&self, peer: usize, status: Status) {
        if let Some(watcher) = self.peer(peer) {
            watcher.status(self.rank, status);
        }
    }

    fn alarms(&self) -> Box<[Arc<Alarm>]> {
        let peers = self.peers.iter().flatten().filter_map(Weak::upgrade);
        std::iter::once(self.own.alarm()).chain(peers.map(|watcher| watcher.alarm())).collect()
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        for (peer, left) in self.peers.iter().zip(&self.left) {
            if !left.load(Ordering::Acquire)
                && let Some(watcher) = peer.as_ref().and_then(Weak::upgrade)
            {
                watcher.lost(self.rank, "it closed without a goodbye".to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        monitor::tests::{Recorder, cause},
        watcher::Watcher,
    };
    use super::*;

    fn locals(size: usize) -> (Vec<Arc<Recorder>>, Vec<Control>) {
        let recorders: Vec<Arc<Recorder>> =
            (0..size).map(|rank| Recorder::answering(vec![rank as u64])).collect();
        let watcher = |rank: usize| -> Arc<dyn Watcher> { recorders[rank].clone() };
        let controls = (0..size).map(|rank| {
            let peers =
                (0..size).map(|peer| (peer != rank).then(|| Arc::downgrade(&watcher(peer)))).collect();
            Control::local(rank, watcher(rank), peers)
        });
        let controls = controls.collect();
        (recorders, controls)
    }

    #[test]
    fn a_local_goodbye_is_answered_with_the_peers_numbers() {
        let (recorders, controls) = locals(2);
        controls[0].goodbye(1);
        assert_eq!(recorders[1].taken(), ["goodbye 0"]);
        assert_eq!(recorders[0].taken(), ["answered 1 [1]"]);
        drop(controls);
        assert_eq!(recorders[1].taken(), Vec::<String>::new());
        assert_eq!(recorders[0].taken(), ["lost 1: it closed without a goodbye"]);
    }

    #[test]
    fn a_local_failure_reaches_its_peer_and_closing_adds_nothing() {
        let (recorders, controls) = locals(3);
        controls[2].failed(0, &cause(2));
        controls[2].close(|| true);
        assert_eq!(recorders[0].taken(), ["failed 2: origin 2 Aborted boom"]);
        assert_eq!(recorders[1].taken(), ["lost 2: it closed without a goodbye"]);
        controls[2].failed(1, &cause(2));
        assert_eq!(recorders[1].taken(), Vec::<String>::new());
    }

    #[test]
    fn a_goodbye_to_a_local_peer_that_is_gone_is_answered_with_nothing() {
        let (mut recorders, mut controls) = locals(2);
        drop((controls.pop(), recorders.pop()));
        controls[0].goodbye(1);
        assert_eq!(recorders[0].taken(), ["lost 1: it closed without a goodbye", "answered 1 []"]);
    }
}
