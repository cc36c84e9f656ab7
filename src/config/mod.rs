//! What the user wants: the builder, the environment, hostfiles. Everything here only reads and checks; nothing runs.
//!
//! [`Config`] collects settings from builder calls or from the environment ([`environment`], [`launcher`]); [`Config::resolve`]
//! checks them against each other and gives the plain values of [`Resolved`] to the rooms below.
#![forbid(unsafe_code)]

mod cables;
mod devices;
mod environment;
mod explain;
mod file;
pub mod hostfile;
mod interfaces;
mod launcher;
mod link_choice;
mod origin;
pub mod parse;
mod pmi;
mod resolve;
mod secret;
mod setting;

use std::{
    error::Error as StdError, net::TcpListener, os::fd::RawFd, path::PathBuf, result::Result as StdResult,
    time::Duration,
};

pub(crate) use self::{
    cables::Bulk,
    resolve::{Rendezvous, Resolved},
    secret::Secret,
};
pub use self::{cables::VerbsTransport, devices::DeviceMatrix, link_choice::LinkChoice, origin::Origin};
use self::{launcher::Meeting, setting::Setting};

/// How a process joins a group: its rank, how the ranks find each other, which links they use, how long they wait.
///
/// A new configuration is a group of one. Programs that a launcher starts take everything from the environment with
/// [`Config::from_env`]; programs that know better say so with the calls below, which replace what the environment said.
///
/// ```
/// use std::time::Duration;
/// use raccl::{Config, LinkKind};
///
/// let config = Config::new()
///     .rank(1)
///     .size(4)
///     .coordinator("node1:7000")
///     .link(LinkKind::Tcp)
///     .timeout(Duration::from_secs(5));
/// println!("{}", config.explain());
/// ```
///
/// Calls never fail; settings that cannot be, or contradict each other, are errors when the group is joined.
#[must_use = "a configuration does nothing until a group is joined with it"]
pub struct Config {
    origin: Origin,
    warnings: Vec<String>,
    rank: Option<Setting<usize>>,
    size: Option<Setting<usize>>,
    local_size: Option<Setting<usize>>,
    local_rank: Option<Setting<usize>>,
    coordinator: Option<Setting<String>>,
    listener: Option<TcpListener>,
    exchange: Option<Exchange>,
    /// What the launcher offers for meeting, used if the three above are empty.
    meeting: Meeting,
    link: Setting<LinkChoice>,
    interfaces: Setting<Vec<String>>,
    sockets: Option<Setting<usize>>,
    timeout: Setting<Duration>,
    late_timeout: Setting<Duration>,
    connect_timeout: Setting<Duration>,
    algorithm: Option<Setting<String>>,
    secret: Option<Setting<SecretSource>>,
    insecure: Setting<bool>,
    encrypt: Setting<bool>,
    devices: Option<Setting<String>>,
    prefer_ring: Setting<bool>,
    verbs_library: Option<Setting<PathBuf>>,
    verbs_transport: Option<Setting<VerbsTransport>>,
    verbs_checksum: Setting<bool>,
    degrade: Setting<bool>,
    signals: Setting<bool>,
    verbs_bulk: Option<Setting<StdResult<Bulk, String>>>,
    verbs_keep_alive: Setting<Duration>,
    job: Option<Setting<String>>,
    trace: Option<Setting<PathBuf>>,
}

/// Gives every rank's bytes, in the order of ranks, for this rank's.
pub(crate) type Exchange =
    Box<dyn FnOnce(Vec<u8>) -> StdResult<Vec<Vec<u8>>, Box<dyn StdError + Send + Sync>> + Send>;

/// Where the secret comes from.
#[derive(Clone)]
enum SecretSource {
    Bytes(Secret),
    File(PathBuf),
    Descriptor(RawFd),
}

impl Config {
    /// A group of one with the default settings.
    ///
    /// ```
    /// let config = raccl::Config::new();
    /// assert!(config.explain().starts_with("a group of one"));
    /// ```
    pub fn new() -> Config {
        Config {
            origin: Origin::Builder,
            warnings: Vec::new(),
            rank: None,
            size: None,
            local_size: None,
            local_rank: None,
            coordinator: None,
            listener: None,
            exchange: None,
            meeting: Meeting::None,
            link: Setting::default(LinkChoice::Auto),
            interfaces: Setting::default(Vec::new()),
            sockets: None,
            timeout: Setting::default(Duration::from_secs(30)),
            late_timeout: Setting::default(Duration::from_secs(300)),
            connect_timeout: Setting::default(Duration::from_secs(60)),
            algorithm: None,
            secret: None,
            insecure: Setting::default(false),
            encrypt: Setting::default(false),
            devices: None,
            prefer_ring: Setting::default(false),
            verbs_library: None,
            verbs_transport: None,
            verbs_checksum: Setting::default(false),
            degrade: Setting::default(false),
            signals: Setting::default(true),
            verbs_bulk: None,
            verbs_keep_alive: Setting::default(Duration::from_secs(20)),
            job: None,
            trace: None,
        }
    }

    /// Which rank this process is, counted from 0. Needs [`Config::size`] too.
    ///
    /// ```
    /// let config = raccl::Config::new().rank(0).size(2).coordinator("localhost:7000");
    /// ```
    pub fn rank(mut self, rank: usize) -> Config {
        self.rank = Some(Setting::new("Config::rank", rank));
        self
    }

    /// How many ranks the group has. Needs [`Config::rank`] too.
    ///
    /// ```
    /// let config = raccl::Config::new().rank(1).size(2).coordinator("localhost:7000");
    /// ```
    pub fn size(mut self, size: usize) -> Config {
        self.size = Some(Setting::new("Config::size", size));
        self
    }

    /// Where rank 0 listens and every other rank finds it, as `host:port`; an IPv6 address goes into brackets.
    ///
    /// ```
    /// let config = raccl::Config::new().rank(1).size(2).coordinator("[fe80::1%en5]:7000");
    /// ```
    pub fn coordinator(mut self, endpoint: impl Into<String>) -> Config {
        self.coordinator = Some(Setting::new("Config::coordinator", endpoint.into()));
        self
    }

    /// Rank 0 only: a listener that is bound already, to be used instead of binding the coordinator's port. With port 0 the
    /// system picks a free one, so that tests and launchers need not guess.
    ///
    /// ```
    /// let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    /// let address = listener.local_addr().unwrap();
    /// let rank_0 = raccl::Config::new().rank(0).size(2).listener(listener);
    /// let rank_1 = raccl::Config::new().rank(1).size(2).coordinator(address.to_string());
    /// ```
    pub fn listener(mut self, listener: TcpListener) -> Config {
        self.listener = Some(listener);
        self
    }

    /// A way to exchange addresses that the program has already, instead of a coordinator: an all-gather of bytes. It is
    /// called once, with this rank's bytes, and returns the bytes of all ranks in the order of ranks. The bytes are a few
    /// hundred and have no secret in them.
    ///
    /// ```
    /// use std::sync::mpsc;
    ///
    /// // Two ranks of one process that exchange over channels.
    /// let (to_1, from_0) = mpsc::channel::<Vec<u8>>();
    /// let (to_0, from_1) = mpsc::channel::<Vec<u8>>();
    /// let rank_0 = raccl::Config::new().rank(0).size(2).exchange(move |mine| {
    ///     to_1.send(mine.clone())?;
    ///     Ok(vec![mine, from_1.recv()?])
    /// });
    /// let rank_1 = raccl::Config::new().rank(1).size(2).exchange(move |mine| {
    ///     to_0.send(mine.clone())?;
    ///     Ok(vec![from_0.recv()?, mine])
    /// });
    /// ```
    pub fn exchange<F>(mut self, all_gather: F) -> Config
    where
        F: FnOnce(Vec<u8>) -> StdResult<Vec<Vec<u8>>, Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        self.exchange = Some(Box::new(all_gather));
        self
    }

    /// Which kind of link all pairs use. By default each pair takes the best it has.
    ///
    /// ```
    /// let config = raccl::Config::new().link(raccl::LinkKind::Tcp);
    /// let config = config.link(raccl::LinkChoice::Auto);
    /// ```
    pub fn link(mut self, link: impl Into<LinkChoice>) -> Config {
        self.link = Setting::new("Config::link", link.into());
        self
    }

    /// Where this rank listens for its peers: addresses, names of interfaces, or networks such as `10.0.0.0/24`, which
    /// stand for this machine's addresses in them. By default the address by which the coordinator is reached.
    ///
    /// ```
    /// let config = raccl::Config::new().interfaces(["en5", "10.0.0.0/24", "fe80::1%en6"]);
    /// ```
    pub fn interfaces<I: IntoIterator<Item: Into<String>>>(mut self, interfaces: I) -> Config {
        let interfaces = interfaces.into_iter().map(Into::into).collect();
        self.interfaces = Setting::new("Config::interfaces", interfaces);
        self
    }

    /// How many TCP sockets join a pair of ranks, from 1 to 16. By default the library chooses.
    ///
    /// ```
    /// let config = raccl::Config::new().sockets(4);
    /// ```
    pub fn sockets(mut self, sockets: usize) -> Config {
        self.sockets = Some(Setting::new("Config::sockets", sockets));
        self
    }

    /// How long an operation may wait while no byte moves before it fails with [`Error::Timeout`](crate::Error::Timeout).
    /// Zero is no limit. By default 30 seconds.
    ///
    /// ```
    /// let config = raccl::Config::new().timeout(std::time::Duration::ZERO);
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Config {
        self.timeout = Setting::new("Config::timeout", timeout);
        self
    }

    /// How long an operation may wait for a peer that is alive but has not entered it yet: it may be computing. Zero is no
    /// limit. By default 5 minutes.
    ///
    /// ```
    /// let config = raccl::Config::new().late_timeout(std::time::Duration::from_secs(3600));
    /// ```
    pub fn late_timeout(mut self, timeout: Duration) -> Config {
        self.late_timeout = Setting::new("Config::late_timeout", timeout);
        self
    }

    /// How long forming the group may take. Zero is refused: a group with a missing rank has to end. By default 60 seconds.
    ///
    /// ```
    /// let config = raccl::Config::new().connect_timeout(std::time::Duration::from_secs(5));
    /// ```
    pub fn connect_timeout(mut self, timeout: Duration) -> Config {
        self.connect_timeout = Setting::new("Config::connect_timeout", timeout);
        self
    }

    /// Overrides the choice of algorithms, by operation and range of sizes. What rank 0 says holds for all ranks.
    ///
    /// ```
    /// let config = raccl::Config::new().algorithm("all_reduce:0-32k=one_shot,32k-=two_shot");
    /// ```
    pub fn algorithm(mut self, overrides: impl Into<String>) -> Config {
        self.algorithm = Some(Setting::new("Config::algorithm", overrides.into()));
        self
    }

    /// The job secret, the same on every rank and known to nobody else. Ranks prove to each other that they have it.
    ///
    /// ```
    /// # let secret_of_this_job = [7; 32];
    /// let config = raccl::Config::new().secret(secret_of_this_job);
    /// assert!(!format!("{config:?}").contains('7'));
    /// ```
    pub fn secret(mut self, secret: [u8; 32]) -> Config {
        self.secret = Some(Setting::new("Config::secret", SecretSource::Bytes(Secret::new(secret))));
        self
    }

    /// A file with the job secret: 64 hexadecimal digits, or 32 bytes. Only its owner may have access to it (mode 0600).
    ///
    /// ```
    /// let config = raccl::Config::new().secret_file("/run/user/1000/job-secret");
    /// ```
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Config {
        self.secret = Some(Setting::new("Config::secret_file", SecretSource::File(path.into())));
        self
    }

    /// Allows a group without a secret: whoever reaches a rank's port can then join or disturb the group. Has no effect when
    /// there is a secret.
    ///
    /// ```
    /// let config = raccl::Config::new().insecure(true);
    /// ```
    pub fn insecure(mut self, insecure: bool) -> Config {
        self.insecure = Setting::new("Config::insecure", insecure);
        self
    }

    /// Encrypts the data on TCP links with keys that come from the job secret, which it needs.
    ///
    /// ```
    /// let config = raccl::Config::new().secret([7; 32]).encrypt(true);
    /// ```
    pub fn encrypt(mut self, encrypt: bool) -> Config {
        self.encrypt = Setting::new("Config::encrypt", encrypt);
        self
    }

    /// Which RDMA devices join which ranks: a [`DeviceMatrix`] as JSON text, or the path of a file with it.
    ///
    /// ```
    /// let config = raccl::Config::new().devices(r#"[[null, "rdma_en5"], ["rdma_en4", null]]"#);
    /// let config = raccl::Config::new().devices("/etc/cables.json");
    /// ```
    pub fn devices(mut self, matrix: impl Into<String>) -> Config {
        self.devices = Some(Setting::new("Config::devices", matrix.into()));
        self
    }

    /// Uses only the cables between neighbours, as a ring, even if there are more. The devices must form one.
    ///
    /// ```
    /// let config = raccl::Config::new().devices("/etc/cables.json").prefer_ring(true);
    /// ```
    pub fn prefer_ring(mut self, ring: bool) -> Config {
        self.prefer_ring = Setting::new("Config::prefer_ring", ring);
        self
    }

    /// The verbs library to load instead of the system's.
    ///
    /// ```
    /// let config = raccl::Config::new().verbs_library("/usr/local/lib/libibverbs.so.1");
    /// ```
    pub fn verbs_library(mut self, path: impl Into<PathBuf>) -> Config {
        self.verbs_library = Some(Setting::new("Config::verbs_library", path.into()));
        self
    }

    /// Which transport cables use. By default the one that the system has for it: unreliable on macOS, reliable on Linux. What
    /// rank 0 says holds for all ranks.
    ///
    /// ```
    /// let config = raccl::Config::new().verbs_transport(raccl::VerbsTransport::Uc);
    /// ```
    pub fn verbs_transport(mut self, transport: VerbsTransport) -> Config {
        self.verbs_transport = Some(Setting::new("Config::verbs_transport", transport));
        self
    }

    /// Whether everything that a cable carries has a checksum, and not only the headers and numbers by which loss is noticed. A
    /// damaged message is then an error for certain, at the cost of reading it once more on either side, and of copying what would
    /// not have to be copied otherwise ([`Communicator::allocate`](crate::Communicator::allocate)). By default not. What rank 0 says
    /// holds for all ranks.
    ///
    /// ```
    /// let config = raccl::Config::new().verbs_checksum(true);
    /// ```
    pub fn verbs_checksum(mut self, checksum: bool) -> Config {
        self.verbs_checksum = Setting::new("Config::verbs_checksum", checksum);
        self
    }

    /// Whether two ranks that are joined by several cables go on over those that are left when one dies, instead of failing. A
    /// cable dies when it loses or damages a message, when a request to its device fails, or when its port goes down; a warning
    /// in the log names it and says how many are left. Calls notice nothing but the lost speed. The death of a pair's last cable
    /// is an error as ever, and a cable that has died is not used again by this group. By default not. What rank 0 says holds for
    /// all ranks.
    ///
    /// It costs registered memory, a third more by default, for what may have to be sent again, and everything is copied there, also
    /// what is in memory that devices know ([`Communicator::allocate`](crate::Communicator::allocate)). Payloads that are damaged
    /// on the way are noticed with [`verbs_checksum`](Config::verbs_checksum) only.
    ///
    /// ```
    /// let config = raccl::Config::new().degrade(true).verbs_checksum(true);
    /// ```
    pub fn degrade(mut self, degrade: bool) -> Config {
        self.degrade = Setting::new("Config::degrade", degrade);
        self
    }

    /// How large messages go through a cable: in packets of so many bytes, a multiple of 4096, with room for so many of them,
    /// a power of two, at the receiver. A quarter of that number, and two at least, is on the cable at a time. By default 8 of
    /// 64 KiB. What rank 0 says holds for all ranks.
    ///
    /// ```
    /// let config = raccl::Config::new().verbs_bulk(512 << 10, 2);
    /// ```
    pub fn verbs_bulk(mut self, bytes: usize, depth: u32) -> Config {
        let bulk = Bulk::new(bytes as u64, depth.into());
        self.verbs_bulk = Some(Setting::new("Config::verbs_bulk", bulk));
        self
    }

    /// How long nothing may be said through a cable before the library says a word on its own, since devices are reported to give
    /// up connections that are silent for long. Zero is never. By default 20 seconds. What rank 0 says holds for all ranks.
    ///
    /// ```
    /// let config = raccl::Config::new().verbs_keep_alive(std::time::Duration::from_secs(5));
    /// ```
    pub fn verbs_keep_alive(mut self, every: Duration) -> Config {
        self.verbs_keep_alive = Setting::new("Config::verbs_keep_alive", every);
        self
    }

    /// Whether SIGTERM and SIGINT wait, a second at most, until the RDMA devices of this process are free again, because some
    /// drivers do not get back what a killed process held. By default so. While a device is open, and only then, there is a
    /// handler for each of these signals that has none yet: it ends the calls of all groups that have cables, frees the
    /// devices, and then lets the signal end the process as it would have. A second signal ends it at once. A handler of the
    /// program's own, or a signal that it ignores, stays as it is: such a program closes its groups itself, or ends them by
    /// [`Communicator::abort_handle`](crate::Communicator::abort_handle) and drops them.
    ///
    /// ```
    /// let config = raccl::Config::new().signals(false);
    /// ```
    pub fn signals(mut self, watched: bool) -> Config {
        self.signals = Setting::new("Config::signals", watched);
        self
    }

    /// A name for the job, the same on every rank. Ranks of another job that come to the same port are refused by it, and
    /// reports show it.
    ///
    /// ```
    /// let config = raccl::Config::new().job("nightly-training");
    /// ```
    pub fn job(mut self, name: impl Into<String>) -> Config {
        self.job = Some(Setting::new("Config::job", name.into()));
        self
    }

    /// A file to which a trace of all operations is written, in the format of chrome://tracing and Perfetto. With more than
    /// one rank each has its own, with the rank in its name: `trace.rank0.json` and so on. The file is valid JSON at every
    /// moment; calls of the last second are missing from it if the process is killed. Messages go a longer way while a trace
    /// is written.
    ///
    /// ```
    /// let config = raccl::Config::new().trace("trace.json");
    /// ```
    pub fn trace(mut self, path: impl Into<PathBuf>) -> Config {
        self.trace = Some(Setting::new("Config::trace", path.into()));
        self
    }

    /// Who told this process its rank and size.
    ///
    /// ```
    /// assert_eq!(raccl::Config::new().origin(), raccl::Origin::Builder);
    /// ```
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// What looks wrong in the environment but is no error, such as a misspelt name. Each was logged as well.
    ///
    /// ```
    /// let config = raccl::Config::from_vars([("RACCL_TIMOUT", "5s")]).unwrap();
    /// assert!(config.warnings()[0].contains("RACCL_TIMEOUT"));
    /// ```
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// This process's place among the ranks on its machine, if the launcher says it; good for choosing a device.
    ///
    /// ```
    /// let vars = [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
    /// assert_eq!(raccl::Config::from_vars(vars).unwrap().local_rank(), Some(1));
    /// ```
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank.as_ref().map(|setting| setting.value)
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::new()
    }
}
