//! From settings to the plain values that the rooms below work with: files are read, contradictions found.
#![forbid(unsafe_code)]

use std::{
    fmt,
    net::{SocketAddr, TcpListener},
    os::fd::RawFd,
    path::{Path, PathBuf},
    sync::{Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::{
    Bulk, Config, DeviceMatrix, Exchange, LinkChoice, Origin, Secret, SecretSource, VerbsTransport,
    environment::{MOST_RANKS, MOST_SOCKETS, endpoint},
    file, interfaces,
    launcher::{Meeting, Met},
    parse::LONGEST_DURATION,
    setting::{Setting, refuse, refuse_because},
};
use crate::{error::Result, os};

/// What a group is formed and run with. Everything is consistent.
pub(crate) struct Resolved {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// How many ranks of the group this machine has, if the launcher says it.
    pub(crate) local_size: Option<usize>,
    pub(crate) origin: Origin,
    pub(crate) rendezvous: Rendezvous,
    /// What rank 0 has published for its peers; to be kept until the group is formed.
    pub(crate) published: Option<Published>,
    pub(crate) link: LinkChoice,
    /// Where to listen, with port 0; empty for the address by which the coordinator is reached.
    pub(crate) interfaces: Vec<SocketAddr>,
    /// TCP sockets a pair, if the user says it.
    pub(crate) sockets: Option<usize>,
    /// `None` is no limit, here and below.
    pub(crate) timeout: Option<Duration>,
    pub(crate) late_timeout: Option<Duration>,
    /// What is left of the time for forming the group.
    pub(crate) connect_timeout: Duration,
    /// The override string for the choice of algorithms.
    pub(crate) overrides: Option<String>,
    pub(crate) secret: Option<Secret>,
    pub(crate) insecure: bool,
    pub(crate) encrypt: bool,
    pub(crate) devices: Option<DeviceMatrix>,
    pub(crate) prefer_ring: bool,
    pub(crate) verbs_library: Option<PathBuf>,
    pub(crate) verbs_transport: Option<VerbsTransport>,
    pub(crate) verbs_checksum: bool,
    pub(crate) degrade: bool,
    pub(crate) signals: bool,
    pub(crate) verbs_bulk: Option<Bulk>,
    pub(crate) verbs_keep_alive: Option<Duration>,
    pub(crate) job: Option<String>,
    pub(crate) trace: Option<PathBuf>,
}

/// How the ranks find each other.
pub(crate) enum Rendezvous {
    /// There is nobody to find.
    Alone,
    /// Rank 0 listens at this `host:port`.
    Coordinator(String),
    /// This is rank 0, and it listens already.
    Listener(TcpListener),
    /// The bytes of all ranks are exchanged by this.
    Exchange(Exchange),
}

/// Something that rank 0 made for its peers to find and that goes away when this is dropped.
pub(crate) type Published = super::launcher::Published;

impl Config {
    /// Checks the settings and reads the files that they name. Ranks that a launcher started without an
    /// address wait here for each other.
    pub(crate) fn resolve(mut self) -> Result<Resolved> {
        let deadline = Instant::now() + self.checked_connect_timeout()?;
        self.ask_launcher(deadline)?;
        let (rank, size) = self.place()?;
        let sockets = self.checked_sockets()?;
        let job = self.checked_job()?;
        let verbs_bulk = self.checked_bulk()?;
        let devices = self.read_devices(size)?;
        let interfaces = self.find_interfaces()?;
        let mut secret = self.secret.as_ref().map(|source| read_secret(source, deadline)).transpose()?;
        let Met { rendezvous, published, secret: met_secret } =
            meet(self.listener, self.exchange, self.coordinator, self.meeting, (rank, size), deadline)?;
        if secret.is_none() && !self.insecure.value {
            secret = met_secret;
        }
        if self.encrypt.value && secret.is_none() && size > 1 {
            return Err(self
                .encrypt
                .refuse("encryption needs a job secret; set RACCL_SECRET_FILE, or call Config::secret"));
        }
        Ok(Resolved {
            rank,
            size,
            local_size: self.local_size.map(|local| local.value),
            origin: self.origin,
            rendezvous,
            published,
            link: self.link.value,
            interfaces,
            sockets,
            timeout: limit(self.timeout.value),
            late_timeout: limit(self.late_timeout.value),
            // Waiting for rank 0 has used some of it up; what follows gets a moment in any case.
            connect_timeout: deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(100)),
            overrides: self.algorithm.map(|overrides| overrides.value),
            secret,
            insecure: self.insecure.value,
            encrypt: self.encrypt.value,
            devices,
            prefer_ring: self.prefer_ring.value,
            verbs_library: self.verbs_library.map(|path| path.value),
            verbs_transport: self.verbs_transport.map(|transport| transport.value),
            verbs_checksum: self.verbs_checksum.value,
            degrade: self.degrade.value,
            signals: self.signals.value,
            verbs_bulk,
            verbs_keep_alive: limit(self.verbs_keep_alive.value),
            job,
            trace: self.trace.map(|path| path.value),
        })
    }

    /// Gets the size from a launcher that has to be asked for it.
    fn ask_launcher(&mut self, deadline: Instant) -> Result<()> {
        if let (Some(rank), None, Meeting::Pmi(launcher)) = (&self.rank, &self.size, &mut self.meeting) {
            let size = launcher.ask_size(rank.value, deadline)?;
            self.size = size.map(|size| Setting::new("PMI_PORT", size));
        }
        Ok(())
    }

    /// Rank and size, which must both be there or both be missing.
    fn place(&self) -> Result<(usize, usize)> {
        match (&self.rank, &self.size) {
            (Some(rank), Some(size)) => {
                if size.value == 0 || size.value > MOST_RANKS {
                    return Err(size.refuse(format!("a group has from 1 to {MOST_RANKS} ranks")));
                }
                if rank.value >= size.value {
                    let last = size.value - 1;
                    return Err(rank.refuse(format!(
                        "{} says {}, so the ranks are 0 to {last}",
                        size.name, size.value
                    )));
                }
                Ok((rank.value, size.value))
            }
            (Some(rank), None) => Err(rank.refuse(
                "nothing says how many ranks there are; set RACCL_SIZE as well, or call Config::size",
            )),
            (None, Some(size)) => Err(size.refuse(
                "nothing says which of the ranks this process is; set RACCL_RANK as well, or call Config::rank",
            )),
            (None, None) => match &self.coordinator {
                Some(coordinator) => Err(coordinator.refuse(
                    "a coordinator makes no sense for a group of one; set RACCL_RANK and RACCL_SIZE as well, or use a launcher",
                )),
                None => Ok((0, 1)),
            },
        }
    }

    fn checked_connect_timeout(&self) -> Result<Duration> {
        let setting = &self.connect_timeout;
        if setting.value.is_zero() {
            return Err(refuse(
                setting.name,
                "0",
                "forming a group has to end; give it a long time instead, such as 24h",
            ));
        }
        Ok(setting.value.min(LONGEST_DURATION))
    }

    fn checked_sockets(&self) -> Result<Option<usize>> {
        match &self.sockets {
            Some(sockets) if !(1..=MOST_SOCKETS).contains(&sockets.value) => {
                Err(sockets.refuse(format!("a pair of ranks has from 1 to {MOST_SOCKETS} sockets")))
            }
            sockets => Ok(sockets.as_ref().map(|sockets| sockets.value)),
        }
    }

    fn checked_job(&self) -> Result<Option<String>> {
        const LONGEST: usize = 128;
        match &self.job {
            Some(job) if job.value.len() > LONGEST || job.value.chars().any(char::is_control) => {
                Err(job.refuse(format!("a job's name has at most {LONGEST} bytes and no control characters")))
            }
            job => Ok(job.as_ref().map(|job| job.value.clone())),
        }
    }

    /// Checks the settings against each other and reads the files that they name, all but the secret.
    pub(crate) fn check_settings(&self) -> Result<()> {
        self.checked_connect_timeout()?;
        let (_, size) = self.place()?;
        self.checked_sockets()?;
        self.checked_job()?;
        self.checked_bulk()?;
        self.read_devices(size)?;
        self.find_interfaces()?;
        Ok(())
    }

    /// The override string, as it was given.
    pub(crate) fn overrides(&self) -> Option<&str> {
        self.algorithm.as_ref().map(|overrides| overrides.value.as_str())
    }

    /// What concerns RDMA devices on this machine, whether or not the rest makes a group: the matrix, the rank, the library.
    pub(crate) fn device_settings(&self) -> Result<(Option<DeviceMatrix>, Option<usize>, Option<&Path>)> {
        let matrix = self.read_matrix()?;
        let rank = self.rank.as_ref();
        if let (Some(matrix), Some(rank)) = (&matrix, rank)
            && rank.value >= matrix.size()
        {
            let rows = matrix.size();
            return Err(rank.refuse(format!("the device matrix is for {rows} ranks, counted from 0")));
        }
        let library = self.verbs_library.as_ref().map(|path| path.value.as_path());
        Ok((matrix, rank.map(|rank| rank.value), library))
    }

    fn read_matrix(&self) -> Result<Option<DeviceMatrix>> {
        let Some(devices) = &self.devices else { return Ok(None) };
        let text = if devices.value.trim_start().starts_with('[') {
            devices.value.clone()
        } else {
            file::read_text(Path::new(&devices.value)).map_err(|error| {
                refuse_because(devices.name, &devices.value, "the file cannot be read", error)
            })?
        };
        DeviceMatrix::parse(&text).map(Some).map_err(|reason| devices.refuse(reason))
    }

    fn checked_bulk(&self) -> Result<Option<Bulk>> {
        let Some(bulk) = &self.verbs_bulk else { return Ok(None) };
        match &bulk.value {
            Ok(good) => Ok(Some(*good)),
            Err(reason) => Err(refuse(bulk.name, "given", reason)),
        }
    }

    fn read_devices(&self, size: usize) -> Result<Option<DeviceMatrix>> {
        let (Some(devices), Some(matrix)) = (&self.devices, self.read_matrix()?) else { return Ok(None) };
        if matrix.size() != size {
            let rows = matrix.size();
            return Err(devices.refuse(format!("the matrix is for {rows} ranks, but the group has {size}")));
        }
        if self.prefer_ring.value {
            matrix.check_ring().map_err(|reason| {
                devices.refuse(format!("{} wants a ring: {reason}", self.prefer_ring.name))
            })?;
        }
        Ok(Some(matrix))
    }

    fn find_interfaces(&self) -> Result<Vec<SocketAddr>> {
        let names = &self.interfaces.value;
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let shown = names.join(",");
        let machine = os::interfaces::list().map_err(|error| {
            refuse_because(self.interfaces.name, &shown, "this machine's interfaces cannot be listed", error)
        })?;
        interfaces::addresses(names, &machine).map_err(|reason| refuse(self.interfaces.name, &shown, reason))
    }
}

impl fmt::Debug for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolved").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

/// Decides how the ranks find each other. What the user says goes before what the launcher offers.
fn meet(
    listener: Option<TcpListener>,
    exchange: Option<Exchange>,
    coordinator: Option<Setting<String>>,
    meeting: Meeting,
    (rank, size): (usize, usize),
    deadline: Instant,
) -> Result<Met> {
    if exchange.is_some() && (coordinator.is_some() || listener.is_some()) {
        let (name, value) = match &coordinator {
            Some(coordinator) => (coordinator.name, coordinator.value.as_str()),
            None => ("Config::listener", "given"),
        };
        return Err(refuse(name, value, "Config::exchange is given as well; use one of them"));
    }
    if rank != 0 && listener.is_some() {
        return Err(refuse(
            "Config::listener",
            "given",
            format!("only rank 0 listens for the others; this is rank {rank}"),
        ));
    }
    let coordinator =
        coordinator.map(|given| endpoint(&given.value).map_err(|reason| given.refuse(reason))).transpose()?;
    let rendezvous = match (exchange, listener, coordinator) {
        _ if size == 1 => Rendezvous::Alone,
        (Some(exchange), _, _) => Rendezvous::Exchange(exchange),
        (None, Some(listener), _) => Rendezvous::Listener(listener),
        (None, None, Some(coordinator)) => Rendezvous::Coordinator(coordinator),
        (None, None, None) => return meeting.meet(rank, size, deadline),
    };
    meeting.dismiss(rank)?;
    Ok(Met::from(rendezvous))
}

fn limit(duration: Duration) -> Option<Duration> {
    (!duration.is_zero()).then(|| duration.min(LONGEST_DURATION))
}

fn read_secret(source: &Setting<SecretSource>, deadline: Instant) -> Result<Secret> {
    let name = source.name;
    match &source.value {
        SecretSource::Bytes(secret) => Ok(secret.clone()),
        SecretSource::File(path) => {
            let shown = path.display().to_string();
            Secret::read_file(path)
                .map_err(|error| refuse_because(name, &shown, "the secret cannot be read", error))?
                .map_err(|reason| refuse(name, &shown, reason))
        }
        SecretSource::Descriptor(descriptor) => read_descriptor(name, *descriptor, deadline),
    }
}

/// Reads the secret from an inherited descriptor. It can be read only once, so it is kept for later groups of the process.
fn read_descriptor(name: &str, descriptor: RawFd, deadline: Instant) -> Result<Secret> {
    static READ: Mutex<Option<(RawFd, Secret)>> = Mutex::new(None);

    // A thread that panicked here has left the value whole.
    let mut read = READ.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some((from, secret)) = &*read
        && *from == descriptor
    {
        return Ok(secret.clone());
    }
    let shown = descriptor.to_string();
    let failed = |error| refuse_because(name, &shown, "the secret cannot be read", error);
    let pipe = os::inherit::take(descriptor, os::inherit::Kind::Readable).map_err(failed)?;
    let (sender, receiver) = mpsc::channel();
    // Reading has no deadline of its own, so a thread does it, which ends when the pipe does.
    thread::Builder::new()
        .name("raccl-secret".to_owned())
        .spawn(move || {
            // The receiver is gone if it was too late.
            let _ = sender.send(Secret::read_pipe(std::fs::File::from(pipe)));
        })
        .map_err(failed)?;
    let secret = receiver
        .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        .map_err(|_| {
            refuse(name, &shown, "no secret came before the connect timeout; does the launcher write it?")
        })?
        .map_err(failed)?
        .map_err(|reason| refuse(name, &shown, reason))?;
    *read = Some((descriptor, secret.clone()));
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::AsRawFd};

    use proptest::prelude::*;

    use super::*;
    use crate::Error;

    fn reason(config: Config) -> String {
        match config.resolve() {
            Err(error @ Error::Config { .. }) => error.to_string(),
            Err(other) => panic!("another error: {other}"),
            Ok(resolved) => panic!("resolved: {resolved:?}"),
        }
    }

    fn pair(rank: usize) -> Config {
        Config::new().rank(rank).size(2).coordinator("127.0.0.1:7000")
    }

    #[test]
    fn nothing_is_a_group_of_one_with_documented_defaults() {
        let resolved = Config::new().resolve().expect("resolved");
        assert_eq!((resolved.rank, resolved.size), (0, 1));
        assert!(matches!(resolved.rendezvous, Rendezvous::Alone));
        assert_eq!(resolved.timeout, Some(Duration::from_secs(30)));
        assert_eq!(resolved.late_timeout, Some(Duration::from_secs(300)));
        assert!(resolved.connect_timeout <= Duration::from_secs(60));
        assert!(resolved.connect_timeout > Duration::from_secs(50));
        assert_eq!(resolved.link, LinkChoice::Auto);
    }

    #[test]
    fn contradictions_are_errors_that_name_both_sides() {
        let wrong =
            Config::from_vars([("RACCL_RANK", "4"), ("RACCL_SIZE", "4"), ("RACCL_COORDINATOR", "a:1")]);
        let text = reason(wrong.expect("config"));
        assert_eq!(text, r#"configuration: RACCL_RANK is "4": RACCL_SIZE says 4, so the ranks are 0 to 3"#);
        assert!(reason(Config::new().rank(0)).contains("Config::size"));
        assert!(reason(Config::new().size(2)).contains("Config::rank"));
        assert!(reason(Config::new().rank(0).size(0)).contains("from 1 to"));
        assert!(reason(Config::new().rank(0).size(usize::MAX)).contains("from 1 to"));
        assert!(reason(Config::new().coordinator("a:1")).contains("RACCL_RANK"));
        assert!(reason(Config::new().rank(0).size(2)).contains("coordinator"));
        assert!(reason(pair(0).exchange(|mine| Ok(vec![mine]))).contains("Config::exchange"));
        assert!(reason(pair(0).coordinator("a")).contains("host:port"));
        assert!(reason(pair(0).sockets(0)).contains("1 to 16"));
        assert!(reason(pair(0).connect_timeout(Duration::ZERO)).contains("has to end"));
        assert!(reason(pair(0).encrypt(true)).contains("secret"));
        assert!(reason(pair(0).job("a\nb")).contains("control"));
        assert!(reason(pair(0).interfaces(["no-such-0"])).contains("127.0.0.1"));
        assert!(reason(pair(0).devices("[[null]]")).contains("for 1 ranks"));
        assert!(reason(pair(0).devices("[[null, 1]]")).contains("no device name"));
        assert!(reason(pair(0).devices("/nonexistent/x.json")).contains("cannot be read"));
        assert!(reason(pair(0).secret_file("/nonexistent/secret")).contains("cannot be read"));
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        assert!(reason(pair(1).listener(listener)).contains("only rank 0"));
    }

    #[test]
    fn rank_0_may_bring_its_listener_beside_the_coordinator() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
        let resolved = pair(0).listener(listener).resolve().expect("resolved");
        assert!(matches!(resolved.rendezvous, Rendezvous::Listener(_)));
        let resolved = pair(1).resolve().expect("resolved");
        assert!(matches!(resolved.rendezvous, Rendezvous::Coordinator(at) if at == "127.0.0.1:7000"));
    }

    #[test]
    fn zero_is_no_limit_and_too_long_is_cut() {
        let resolved =
            pair(0).timeout(Duration::ZERO).late_timeout(Duration::MAX).connect_timeout(Duration::MAX);
        let resolved = resolved.resolve().expect("resolved");
        assert_eq!(resolved.timeout, None);
        assert_eq!(resolved.late_timeout, Some(LONGEST_DURATION));
        assert!(resolved.connect_timeout <= LONGEST_DURATION);
    }

    #[test]
    fn a_ring_is_asked_of_the_devices() {
        let line = r#"[[null, "a", null], ["a", null, "b"], [null, "b", null]]"#;
        let config = || Config::new().rank(0).size(3).coordinator("a:1").devices(line);
        assert!(config().resolve().is_ok());
        assert!(reason(config().prefer_ring(true)).contains("Config::prefer_ring wants a ring"));
    }

    #[test]
    fn the_secret_of_a_descriptor_is_read_once_and_kept() {
        let (reader, mut writer) = std::io::pipe().expect("pipe");
        let line = format!("{}\n", "5a".repeat(32));
        writer.write_all(line.as_bytes()).expect("write");
        let number = reader.as_raw_fd().to_string();
        for _ in 0..2 {
            let config = Config::from_vars([("RACCL_SECRET_FD", &number)]).expect("config");
            let secret = config.resolve().expect("resolved").secret.expect("secret");
            assert_eq!(secret, Secret::new([0x5a; 32]));
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let config = pair(0).secret([0x5a; 32]);
        assert!(config.explain().contains("secret: given"));
        let shown = format!("{config:?}") + &format!("{:?}", config.resolve().expect("resolved"));
        assert!(!shown.contains("5a") && !shown.contains("90, 90"), "{shown}");
    }

    proptest! {
        #[test]
        fn no_place_panics(rank: Option<usize>, size: Option<usize>, coordinator: Option<String>) {
            let mut config = Config::new();
            if let Some(rank) = rank {
                config = config.rank(rank);
            }
            if let Some(size) = size {
                config = config.size(size);
            }
            if let Some(coordinator) = coordinator {
                config = config.coordinator(coordinator);
            }
            if let Ok(resolved) = config.resolve() {
                prop_assert!(resolved.rank < resolved.size);
            }
        }
    }
}
