//! Forming a group of processes: configuration, bootstrap, links, engine.
#![forbid(unsafe_code)]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{Communicator, group::assemble, shrink::Lineage};
use crate::{
    bootstrap::{self, Joined, Meeting, Settings, control::Control, watcher::Watcher},
    config::{Config, DeviceMatrix, LinkChoice, Rendezvous, Resolved},
    engine::{Health, Parts, Policy, Timeouts, Trace},
    error::{Cause, Error, Result},
    link::{
        LinkKind, Receiver, Sender, tcp,
        verbs::{self, Cabled, Registry},
    },
    os::{self, Waker},
    plan::{OverrideError, Overrides},
    topology::{Topology, without_cable},
};

/// How this rank makes links and plans, in the first group and in those that come after it.
#[derive(Clone)]
pub(super) struct Recipe {
    choice: LinkChoice,
    encrypt: bool,
    wishes: Wishes,
    timeouts: Timeouts,
    cables: Option<Arc<Cables>>,
}

/// What rank 0 settles for all.
#[derive(Clone, Serialize, Deserialize)]
struct Wishes {
    overrides: Overrides,
    /// How cables are used.
    cables: verbs::Options,
}

/// What this rank brings along for its cables.
struct Cables {
    matrix: DeviceMatrix,
    library: Option<PathBuf>,
    signals: bool,
    /// Without them there is no group.
    required: bool,
    /// How long connecting them may take.
    patience: Duration,
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
        check_link(&resolved)?;
        check_unused(&resolved)?;
        let timeouts = Timeouts { progress: resolved.timeout, late: resolved.late_timeout };
        let wishes =
            Wishes { overrides: overrides(resolved.overrides.as_deref())?, cables: cable_options(&resolved) };
        let trace = resolved.trace.as_deref().map(|path| start_trace(path, rank, size)).transpose()?;
        let (choice, encrypt) = (resolved.link, resolved.encrypt);
        if size == 1 {
            let recipe = Recipe { choice, encrypt, wishes, timeouts, cables: None };
            return Ok(alone(recipe)?.with_trace(trace));
        }
        let sockets = resolved.sockets.unwrap_or(1);
        // For all of it, and for each later group anew.
        let patience = resolved.connect_timeout.min(Duration::from_secs(365 * 24 * 3600));
        let until = Instant::now() + patience;
        let required = resolved.link == LinkChoice::Only(LinkKind::Verbs);
        let cables = match resolved.link {
            LinkChoice::Auto | LinkChoice::Only(LinkKind::Verbs) => resolved.devices,
            LinkChoice::Only(_) => None,
        };
        let cables = cables.map(|matrix| Cables {
            matrix: if resolved.prefer_ring { matrix.neighbours_only() } else { matrix },
            library: resolved.verbs_library,
            signals: resolved.signals,
            required,
            patience,
        });
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
                (
                    "devices".to_owned(),
                    cables.as_ref().map_or("none".to_owned(), |cables| cables.matrix.fingerprint()),
                ),
            ],
            blob,
            host: os::host_id(),
            cores: os::own_cores(),
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
        let recipe = Recipe { choice, encrypt, wishes, timeouts, cables: cables.map(Arc::new) };
        Ok(connect_links(joined, recipe, until)?.with_trace(trace))
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

/// From connections to the communicator of a group. A rank that is lost while cables are connected is an error in a first
/// group; in a later one the group is made without cables, to be shrunk again.
fn connect_links(joined: Joined, recipe: Recipe, until: Instant) -> Result<Communicator> {
    let Recipe { choice, encrypt, wishes, timeouts, cables } = recipe.clone();
    let matrix = cables.as_ref().map(|cables| cables.matrix.of_ranks(&joined.charter.identities()));
    let cabled = match (&cables, &matrix) {
        (Some(cables), Some(matrix)) => connect_cables(&joined, cables, matrix, wishes.cables, until)?,
        _ => None,
    };
    let matrix = matrix.filter(|_| cabled.is_some());
    let (mut cabled, registry) = match cabled {
        Some(Cabled { links, registry }) => (links, registry),
        None => (Vec::new(), Arc::new(Registry::without_devices())),
    };
    let Joined { rank, epoch, hosts, cores, data, sessions, control, charter, .. } = joined;
    let mut senders: Vec<Option<Sender>> = Vec::new();
    let mut receivers: Vec<Option<Receiver>> = Vec::new();
    for (peer, (sockets, sessions)) in data.into_iter().zip(sessions).enumerate() {
        if peer == rank {
            senders.push(None);
            receivers.push(None);
            continue;
        }
        if let Some((sender, receiver)) = cabled.get_mut(peer).and_then(Option::take) {
            senders.push(Some(sender));
            receivers.push(Some(receiver));
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
    let topology = Topology::new(&hosts, near, far, cores[0], wishes.overrides);
    let topology = match &matrix {
        Some(matrix) => topology.with_cables(matrix),
        None => topology,
    };
    let neighbours = hosts.iter().filter(|&&host| host == hosts[rank]).count();
    let policy = Policy::new(neighbours, cores[rank]);
    let parts = Parts { rank, epoch, senders, receivers, registry, health, waker, control, policy };
    let watched = matrix.is_some() && cables.is_some_and(|cables| cables.signals);
    let lineage = Lineage::Processes { charter: Box::new(charter), recipe };
    let comm = assemble(parts, Arc::new(topology), timeouts, lineage)?;
    if watched {
        verbs::on_signal(Arc::new(comm.engine().ending()));
    }
    Ok(comm)
}

/// The same for a group that follows a failed one.
pub(super) fn connect_again(joined: Joined, recipe: Recipe) -> Result<Communicator> {
    let patience = recipe.cables.as_ref().map_or(Duration::ZERO, |cables| cables.patience);
    connect_links(joined, recipe, Instant::now() + patience)
}

/// A group of this rank only.
pub(super) fn alone(recipe: Recipe) -> Result<Communicator> {
    let Recipe { wishes, timeouts, .. } = recipe.clone();
    let senders: Arc<[Option<Sender>]> = Arc::new([None]);
    let waker = Arc::new(Waker::new().map_err(|source| system(0, "making a waker", source))?);
    let health = Arc::new(Health::new(0, Arc::clone(&waker), Arc::clone(&senders)));
    let control = Control::local(0, Arc::clone(&health) as Arc<dyn Watcher>, vec![None]);
    let parts = Parts {
        rank: 0,
        epoch: 1,
        senders,
        receivers: vec![None],
        registry: Arc::new(Registry::without_devices()),
        health,
        waker,
        control,
        policy: Policy::new(1, os::available_cores()),
    };
    let topology =
        Topology::new(&[()], LinkKind::Local, LinkKind::Local, os::available_cores(), wishes.overrides);
    assemble(parts, Arc::new(topology), timeouts, Lineage::Alone(recipe))
}

/// Connects the pairs that have cables, by peer; none at all if that is not possible and nobody insists.
fn connect_cables(
    joined: &Joined,
    cables: &Cables,
    matrix: &DeviceMatrix,
    options: verbs::Options,
    until: Instant,
) -> Result<Option<Cabled>> {
    let rank = joined.rank;
    let request = verbs::Request {
        rank,
        epoch: joined.epoch,
        matrix,
        library: cables.library.as_ref(),
        options,
        signals: cables.signals,
        until,
    };
    match verbs::connect(&request, joined.data.iter().map(|sockets| sockets.first()).collect()) {
        Ok(cabled) => Ok(Some(cabled)),
        Err(verbs::Failure::Lost { peer, source }) if joined.charter.is_first() => {
            let reason = format!("rank {peer} was lost while the cables were connected; see its output");
            Err(Error::Bootstrap { rank, reason, source: Some(source) })
        }
        Err(verbs::Failure::Lost { peer, source }) => {
            tracing::debug!(rank, peer, %source, "lost while the cables of a smaller group were connected");
            Ok(None)
        }
        Err(verbs::Failure::Unavailable { rank: at, reason, source }) => {
            let reason = if at == rank { reason } else { format!("rank {at} says: {reason}") };
            if cables.required {
                return Err(Error::Unavailable { rank, link: LinkKind::Verbs, reason, source });
            }
            tracing::warn!(rank, reason, "the cables cannot be used: all pairs take TCP");
            Ok(None)
        }
    }
}

fn cable_options(resolved: &Resolved) -> verbs::Options {
    let plain = verbs::Options::default();
    verbs::Options {
        transport: resolved.verbs_transport,
        sums: resolved.verbs_checksum,
        degrade: resolved.degrade,
        bulk_bytes: resolved.verbs_bulk.map_or(plain.bulk_bytes, |bulk| bulk.bytes),
        bulk_depth: resolved.verbs_bulk.map_or(plain.bulk_depth, |bulk| bulk.depth),
        keep_alive: resolved.verbs_keep_alive,
    }
}

/// Refuses link kinds that this machine or version does not have.
fn check_link(resolved: &Resolved) -> Result<()> {
    let reason = match resolved.link {
        LinkChoice::Auto | LinkChoice::Only(LinkKind::Tcp) => return Ok(()),
        LinkChoice::Only(LinkKind::Local) => "it joins threads of one process: use raccl::local_group",
        LinkChoice::Only(LinkKind::Shm) => "this version has no shared-memory link yet; use auto or tcp",
        LinkChoice::Only(LinkKind::Verbs) if resolved.devices.is_some() || resolved.size == 1 => {
            return Ok(());
        }
        LinkChoice::Only(LinkKind::Verbs) => {
            "nothing says which devices have cables to which ranks; set RACCL_DEVICES, or call Config::devices"
        }
    };
    let LinkChoice::Only(link) = resolved.link else { return Ok(()) };
    Err(Error::Unavailable { rank: resolved.rank, link, reason: reason.to_owned(), source: None })
}

/// Refuses what this version cannot do where going on without it would be wrong, and warns where it is only slower or less.
fn check_unused(resolved: &Resolved) -> Result<()> {
    let Resolved { rank, size, local_size, origin, .. } = resolved;
    if resolved.devices.is_some()
        && matches!(resolved.link, LinkChoice::Only(kind) if kind != LinkKind::Verbs)
    {
        tracing::warn!(rank, link = %resolved.link, "devices are named, and another link kind is asked for");
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
