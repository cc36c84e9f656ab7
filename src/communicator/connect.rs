//! Forming a group of processes: configuration, bootstrap, links, engine.
#![forbid(unsafe_code)]

use std::{path::Path, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Communicator, group::assemble};
use crate::{
    bootstrap::{self, Joined, Meeting, Settings, control::Control, watcher::Watcher},
    config::{Config, LinkChoice, Rendezvous, Resolved},
    engine::{Health, Parts, Policy, Timeouts, Trace},
    error::{Cause, Error, Result},
    link::{LinkKind, Receiver, Sender, tcp},
    os::{self, Waker},
    plan::{OverrideError, Overrides},
    topology::{Topology, without_cable},
};

/// What rank 0 settles for all.
#[derive(Serialize, Deserialize)]
struct Wishes {
    /// Of its machine.
    cores: usize,
    overrides: Overrides,
}

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
        check_unused(&resolved)?;
        let timeouts = Timeouts { progress: resolved.timeout, late: resolved.late_timeout };
        let wishes =
            Wishes { cores: os::available_cores(), overrides: overrides(resolved.overrides.as_deref())? };
        let trace = resolved.trace.as_deref().map(|path| start_trace(path, rank, size)).transpose()?;
        if size == 1 {
            return Ok(alone(wishes, timeouts)?.with_trace(trace));
        }
        let sockets = resolved.sockets.unwrap_or(1);
        let (choice, encrypt) = (resolved.link, resolved.encrypt);
        let blob =
            serde_json::to_vec(&wishes).map_err(|source| system(rank, "encoding the settings", source))?;
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
                ("encrypt".to_owned(), encrypt.to_string()),
            ],
            blob,
            host: os::host_id(),
            secret: resolved.secret,
            insecure: resolved.insecure,
        };
        let joined = bootstrap::join(settings)?;
        drop(published);
        let wishes = serde_json::from_slice(&joined.blob).map_err(|source| Error::Bootstrap {
            rank,
            reason: "rank 0's settings cannot be read; do all ranks run the same version?".to_owned(),
            source: Some(Cause::new(source)),
        })?;
        Ok(connect_links(joined, (choice, encrypt), wishes, timeouts)?.with_trace(trace))
    }

    /// Checks the settings against each other and reads the files that they name (but for the secret, which may come from a
    /// pipe), without looking for the other ranks: what a launcher can say once that every rank would say.
    ///
    /// # Errors
    /// [`Error::Config`], as [`connect`](Config::connect) would return it.
    ///
    /// ```
    /// let config = raccl::Config::new().rank(0).size(3).devices(r#"[[null, "a"], ["b", null]]"#);
    /// assert!(config.check().unwrap_err().to_string().contains("the matrix is for 2 ranks, but the group has 3"));
    /// ```
    pub fn check(&self) -> Result<()> {
        self.check_settings()?;
        overrides(self.overrides()).map(|_| ())
    }
}

impl Communicator {
    fn with_trace(self, trace: Option<Trace>) -> Communicator {
        if let Some(trace) = trace {
            self.engine().trace(trace);
        }
        self
    }
}

/// Makes the file first, so that a path that cannot be is said before anybody waits.
fn start_trace(path: &Path, rank: usize, size: usize) -> Result<Trace> {
    Trace::create(path, rank, size).map_err(|source| Error::Config {
        what: "RACCL_TRACE or Config::trace".to_owned(),
        value: path.display().to_string(),
        reason: "a file for the trace cannot be made there".to_owned(),
        source: Some(Cause::new(source)),
    })
}

fn connect_links(
    joined: Joined,
    (choice, encrypt): (LinkChoice, bool),
    wishes: Wishes,
    timeouts: Timeouts,
) -> Result<Communicator> {
    let Joined { rank, epoch, hosts, data, sessions, control, .. } = joined;
    let mut senders: Vec<Option<Sender>> = Vec::new();
    let mut receivers: Vec<Option<Receiver>> = Vec::new();
    for (peer, (sockets, sessions)) in data.into_iter().zip(sessions).enumerate() {
        if peer == rank {
            senders.push(None);
            receivers.push(None);
            continue;
        }
        let link = if encrypt {
            // Settings without a secret, and so without sessions, do not get here.
            tcp::sealed_pair(sockets.into_iter().zip(sessions).collect())
        } else {
            tcp::pair(sockets)
        };
        let (sender, receiver) = link.map_err(|source| system(rank, "setting up a socket", source))?;
        senders.push(Some(sender));
        receivers.push(Some(receiver));
    }
    let senders: Arc<[Option<Sender>]> = senders.into();
    let waker = Arc::new(Waker::new().map_err(|source| system(rank, "making a waker", source))?);
    let health = Arc::new(Health::new(rank, Arc::clone(&waker), Arc::clone(&senders)));
    let control = Control::start(control, rank, Arc::clone(&health) as Arc<dyn Watcher>)?;
    let (near, far) = without_cable(choice);
    let topology = Topology::new(&hosts, near, far, wishes.cores, wishes.overrides);
    let neighbours = hosts.iter().filter(|&&host| host == hosts[rank]).count();
    let policy = Policy::new(neighbours, os::available_cores());
    let parts = Parts { rank, epoch, senders, receivers, health, waker, control, policy };
    assemble(parts, Arc::new(topology), timeouts)
}

fn alone(wishes: Wishes, timeouts: Timeouts) -> Result<Communicator> {
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
        policy: Policy::new(1, wishes.cores),
    };
    let topology = Topology::new(&[()], LinkKind::Local, LinkKind::Local, wishes.cores, wishes.overrides);
    assemble(parts, Arc::new(topology), timeouts)
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

/// Refuses what this version cannot do where going on without it would be wrong, and warns where it is only slower or less.
fn check_unused(resolved: &Resolved) -> Result<()> {
    let Resolved { rank, size, local_size, origin, .. } = resolved;
    if resolved.devices.is_some() || resolved.verbs_library.is_some() {
        let ring = resolved.prefer_ring;
        tracing::warn!(rank, ring, "devices are named, but this version has no verbs link: TCP is used");
    }
    let secret = resolved.secret.is_some();
    tracing::debug!(rank, size, ?local_size, ?origin, secret, "joining");
    Ok(())
}

fn overrides(text: Option<&str>) -> Result<Overrides> {
    let Some(text) = text else { return Ok(Overrides::default()) };
    text.parse().map_err(|source: OverrideError| Error::Config {
        what: "RACCL_ALGORITHM or Config::algorithm".to_owned(),
        value: text.to_owned(),
        reason: "it is no list of algorithms such as all_reduce:0-32k=one_shot,32k-=two_shot".to_owned(),
        source: Some(Cause::new(source)),
    })
}

fn system(rank: usize, what: &'static str, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::System { what, rank, source: Cause::new(source) }
}
