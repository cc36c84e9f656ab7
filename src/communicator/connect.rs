//! Forming a group of processes: configuration, bootstrap, links, engine.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{Communicator, group::assemble};
use crate::{
    bootstrap::{self, Joined, Meeting, Settings, control::Control, watcher::Watcher},
    config::{Config, LinkChoice, Rendezvous, Resolved},
    engine::{Health, Parts, Policy, Timeouts},
    error::{Error, Result},
    link::{LinkKind, Receiver, Sender, tcp},
    os::{self, Waker},
    plan::Tuning,
};

impl Config {
    /// Forms the group and returns its communicator. Every rank calls it; it returns when all ranks are connected.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that are malformed or contradict each other, [`Error::Unavailable`] for a link kind that
    /// is not there, [`Error::Bootstrap`] if the group cannot be formed in time.
    ///
    /// ```
    /// let comm = raccl::Config::new().connect()?; // a group of one
    /// assert_eq!((comm.rank(), comm.size()), (0, 1));
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn connect(self) -> Result<Communicator> {
        let resolved = self.resolve()?;
        let (rank, size) = (resolved.rank, resolved.size);
        check_link(rank, resolved.link)?;
        let timeouts = Timeouts { progress: resolved.timeout, late: resolved.late_timeout };
        let tuning = tuning(&resolved)?;
        if size == 1 {
            return alone(tuning, timeouts);
        }
        let sockets = resolved.sockets.unwrap_or(1);
        let blob = Vec::new();
        let published = resolved.published;
        let settings = Settings {
            rank,
            size,
            job: resolved.job.unwrap_or_default(),
            meeting: match resolved.rendezvous {
                Rendezvous::Coordinator(address) => Meeting::Coordinator(address),
                Rendezvous::Listener(listener) => Meeting::Listener(listener),
                Rendezvous::Exchange(exchange) => Meeting::Exchange(exchange),
                Rendezvous::Alone => {
                    let reason = format!("nothing says where the {size} ranks meet; set RACCL_COORDINATOR");
                    return Err(Error::Bootstrap { rank, reason, source: None });
                }
            },
            bind: resolved.interfaces.iter().map(|address| address.ip()).collect(),
            sockets,
            connect_timeout: resolved.connect_timeout,
            digest: vec![
                ("sockets".to_owned(), sockets.to_string()),
                ("link".to_owned(), resolved.link.to_string()),
            ],
            blob,
            host: os::host_id(),
            allow_any_address: resolved.insecure,
        };
        let joined = bootstrap::join(settings)?;
        drop(published);
        connect_links(joined, tuning, timeouts)
    }
}

fn connect_links(joined: Joined, tuning: Tuning, timeouts: Timeouts) -> Result<Communicator> {
    let Joined { rank, epoch, hosts, data, control, .. } = joined;
    let mut senders: Vec<Option<Sender>> = Vec::new();
    let mut receivers: Vec<Option<Receiver>> = Vec::new();
    for (peer, sockets) in data.into_iter().enumerate() {
        if peer == rank {
            senders.push(None);
            receivers.push(None);
            continue;
        }
        let (sender, receiver) =
            tcp::pair(sockets).map_err(|source| system(rank, "setting up a socket", source))?;
        senders.push(Some(sender));
        receivers.push(Some(receiver));
    }
    let senders: Arc<[Option<Sender>]> = senders.into();
    let waker = Arc::new(Waker::new().map_err(|source| system(rank, "making a waker", source))?);
    let health = Arc::new(Health::new(rank, Arc::clone(&waker), Arc::clone(&senders)));
    let control = Control::start(control, rank, Arc::clone(&health) as Arc<dyn Watcher>)?;
    let neighbours = hosts.iter().filter(|&&host| host == hosts[rank]).count();
    let policy = Policy::new(neighbours, os::available_cores());
    let parts = Parts { rank, epoch, senders, receivers, health, waker, control, policy };
    assemble(parts, Arc::new(tuning), timeouts)
}

fn alone(tuning: Tuning, timeouts: Timeouts) -> Result<Communicator> {
    let senders: Arc<[Option<Sender>]> = Arc::new([None]);
    let waker = Arc::new(Waker::new().map_err(|source| system(0, "making a waker", source))?);
    let health = Arc::new(Health::new(0, Arc::clone(&waker), Arc::clone(&senders)));
    let control = Control::local(0, Arc::clone(&health) as Arc<dyn Watcher>, vec![None]);
    let parts = Parts {
        rank: 0,
        epoch: 1,
        senders,
        receivers: vec![None],
        health,
        waker,
        control,
        policy: Policy::new(1, os::available_cores()),
    };
    assemble(parts, Arc::new(tuning), timeouts)
}

/// Refuses link kinds that this machine or version does not have.
fn check_link(rank: usize, choice: LinkChoice) -> Result<()> {
    let reason = match choice {
        LinkChoice::Auto | LinkChoice::Only(LinkKind::Tcp) => return Ok(()),
        LinkChoice::Only(LinkKind::Local) => "it joins threads of one process: use raccl::local_group",
        LinkChoice::Only(LinkKind::Shm) => "this version has no shared-memory link yet; use auto or tcp",
        LinkChoice::Only(LinkKind::Verbs) => "this version has no verbs link yet; use auto or tcp",
    };
    let LinkChoice::Only(link) = choice else { return Ok(()) };
    Err(Error::Unavailable { rank, link, reason: reason.to_owned(), source: None })
}

fn tuning(resolved: &Resolved) -> Result<Tuning> {
    let _ = resolved;
    Ok(Tuning::default())
}

fn system(rank: usize, what: &'static str, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::System { what, rank, source: crate::Cause::new(source) }
}
