//! The `RACCL_*` names of the environment.
#![forbid(unsafe_code)]

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    io,
    os::fd::RawFd,
    path::{Path, PathBuf},
};

use super::{
    Bulk, Config, LinkChoice, Origin, SecretSource, VerbsTransport, file, launcher, parse,
    setting::{Setting, refuse},
};
use crate::error::Result;

/// The most ranks that a group can be said to have; a larger number is a mistake.
pub(super) const MOST_RANKS: usize = 65536;

/// The most TCP sockets between two ranks.
pub(super) const MOST_SOCKETS: usize = 16;

impl Config {
    /// Reads the process's environment.
    ///
    /// First the `RACCL_*` names count, which `raccl launch` sets:
    ///
    /// | name | meaning |
    /// |---|---|
    /// | `RACCL_RANK`, `RACCL_SIZE` | [`Config::rank`], [`Config::size`] |
    /// | `RACCL_LOCAL_RANK`, `RACCL_LOCAL_SIZE` | the same among the ranks of this machine |
    /// | `RACCL_COORDINATOR` | [`Config::coordinator`] |
    /// | `RACCL_SECRET_FILE` | [`Config::secret_file`] |
    /// | `RACCL_SECRET_FD` | number of an inherited descriptor to read the secret from, once in a process |
    /// | `RACCL_INSECURE`, `RACCL_ENCRYPT` | [`Config::insecure`], [`Config::encrypt`]: `1` or `0` |
    /// | `RACCL_LINK` | [`Config::link`]: `auto`, `shm`, `verbs`, `tcp`, `local` |
    /// | `RACCL_INTERFACE` | [`Config::interfaces`], separated by commas |
    /// | `RACCL_SOCKETS` | [`Config::sockets`] |
    /// | `RACCL_DEVICES` | [`Config::devices`] |
    /// | `RACCL_VERBS_LIBRARY` | [`Config::verbs_library`] |
    /// | `RACCL_VERBS_TRANSPORT` | [`Config::verbs_transport`]: `uc` or `rc` |
    /// | `RACCL_VERBS_CHECKSUM` | [`Config::verbs_checksum`]: `1` or `0` |
    /// | `RACCL_DEGRADE` | [`Config::degrade`]: `1` or `0` |
    /// | `RACCL_VERBS_BULK` | [`Config::verbs_bulk`]: `64K*8` |
    /// | `RACCL_VERBS_KEEP_ALIVE` | [`Config::verbs_keep_alive`]: `20s`, `0` |
    /// | `RACCL_SIGNALS` | [`Config::signals`]: `1` or `0` |
    /// | `RACCL_TIMEOUT`, `RACCL_LATE_TIMEOUT`, `RACCL_CONNECT_TIMEOUT` | [`Config::timeout`] and its like: `30s`, `250ms`, `0` |
    /// | `RACCL_ALGORITHM` | [`Config::algorithm`] |
    /// | `RACCL_JOB` | [`Config::job`] |
    /// | `RACCL_TRACE` | [`Config::trace`] |
    /// | `RACCL_LOG` | a filter for log messages, read by programs and not by the library |
    ///
    /// Where these are missing, those of MLX and JACCL count, name by name: `JACCL_RANK` or `MLX_RANK`,
    /// `JACCL_COORDINATOR` or `MLX_JACCL_COORDINATOR`, `JACCL_IBV_DEVICES` or `MLX_IBV_DEVICES`, `JACCL_RING` or
    /// `MLX_JACCL_RING`, `MLX_HOSTFILE`, `MLX_WORLD_SIZE`, `NCCL_HOST_IP` with `NCCL_PORT`.
    ///
    /// If there is no rank and no size by then, they are taken together from the first of these that has both:
    ///
    /// 1. torchrun, known by `TORCHELASTIC_RUN_ID`: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`. While torchrun's own
    ///    store listens at that port (`TORCHELASTIC_USE_AGENT_STORE` is `True`), rank 0 listens at the next one.
    /// 2. Open MPI: `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE`. It says no address. When all ranks are on one machine,
    ///    they meet through a file in the user's runtime directory; otherwise give one with `mpirun -x RACCL_COORDINATOR`.
    /// 3. MPICH and Intel MPI: `PMI_RANK`, `PMI_SIZE`; addresses are exchanged through the launcher at `PMI_FD` or
    ///    `PMI_PORT`, by one group of the process. A program that uses such an MPI library too has to give a coordinator.
    /// 4. Slurm, in a step that `srun` started: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`. Rank 0 listens on
    ///    the first node of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, at a port from 20000 to 31999 that is computed from
    ///    the numbers of the job and the step.
    /// 5. `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` as other launchers set them.
    ///
    /// The order is that of what usually runs inside what: `srun` starts `mpirun`, and either starts `torchrun`. With nothing
    /// set at all it is a group of one. An empty variable counts as missing. A malformed one is an error; an unknown
    /// `RACCL_*` name is a warning.
    ///
    /// ```
    /// let config = raccl::Config::from_env()?;
    /// println!("{}", config.explain());
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn from_env() -> Result<Config> {
        Config::from_vars(env::vars_os())
    }

    /// Reads the given variables as [`Config::from_env`] reads the process's.
    ///
    /// ```
    /// let config = raccl::Config::from_vars([("RACCL_RANK", "3"), ("RACCL_SIZE", "4"), ("RACCL_COORDINATOR", "a:7000")])?;
    /// assert_eq!(config.origin(), raccl::Origin::Raccl);
    ///
    /// let error = raccl::Config::from_vars([("RACCL_SIZE", "four")]).unwrap_err();
    /// assert!(error.to_string().contains(r#"RACCL_SIZE is "four": expected a number of ranks"#));
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn from_vars<K, V>(vars: impl IntoIterator<Item = (K, V)>) -> Result<Config>
    where
        K: Into<OsString>,
        V: Into<OsString>,
    {
        let vars = vars.into_iter().map(|(name, value)| (name.into(), value.into()));
        from_environment(&Environment::new(vars), &file::read_text)
    }
}

/// How files are read; a parameter, so that tests need none.
pub(super) type ReadFile<'a> = &'a dyn Fn(&Path) -> io::Result<String>;

pub(super) fn from_environment(environment: &Environment, read_file: ReadFile<'_>) -> Result<Config> {
    let mut config = Config::new();
    config.warnings = environment.unknown_names();
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    read_raccl(environment, &mut config)?;
    if config.rank.is_some() || config.size.is_some() {
        config.origin = Origin::Raccl;
    }
    launcher::complete(environment, read_file, &mut config)?;
    Ok(config)
}

fn read_raccl(environment: &Environment, config: &mut Config) -> Result<()> {
    config.rank = environment.rank("RACCL_RANK")?;
    config.size = environment.ranks("RACCL_SIZE")?;
    config.local_rank = environment.rank("RACCL_LOCAL_RANK")?;
    config.local_size = environment.ranks("RACCL_LOCAL_SIZE")?;
    config.coordinator = environment.parsed("RACCL_COORDINATOR", endpoint)?;
    config.secret = read_secret(environment)?;
    overwrite(&mut config.insecure, environment.parsed("RACCL_INSECURE", parse::boolean)?);
    overwrite(&mut config.encrypt, environment.parsed("RACCL_ENCRYPT", parse::boolean)?);
    overwrite(&mut config.link, environment.parsed("RACCL_LINK", str::parse::<LinkChoice>)?);
    let interfaces = |text: &str| Ok(parse::list(text).map(str::to_owned).collect());
    overwrite(&mut config.interfaces, environment.parsed("RACCL_INTERFACE", interfaces)?);
    config.sockets = environment.parsed("RACCL_SOCKETS", sockets)?;
    config.devices = environment.parsed("RACCL_DEVICES", text)?;
    config.verbs_library = environment.path("RACCL_VERBS_LIBRARY");
    config.verbs_transport = environment.parsed("RACCL_VERBS_TRANSPORT", str::parse::<VerbsTransport>)?;
    overwrite(&mut config.verbs_checksum, environment.parsed("RACCL_VERBS_CHECKSUM", parse::boolean)?);
    overwrite(&mut config.degrade, environment.parsed("RACCL_DEGRADE", parse::boolean)?);
    overwrite(&mut config.signals, environment.parsed("RACCL_SIGNALS", parse::boolean)?);
    overwrite(&mut config.verbs_keep_alive, environment.parsed("RACCL_VERBS_KEEP_ALIVE", parse::duration)?);
    config.verbs_bulk = environment.parsed("RACCL_VERBS_BULK", |text| text.parse::<Bulk>().map(Ok))?;
    overwrite(&mut config.timeout, environment.parsed("RACCL_TIMEOUT", parse::duration)?);
    overwrite(&mut config.late_timeout, environment.parsed("RACCL_LATE_TIMEOUT", parse::duration)?);
    overwrite(&mut config.connect_timeout, environment.parsed("RACCL_CONNECT_TIMEOUT", parse::duration)?);
    config.algorithm = environment.parsed("RACCL_ALGORITHM", text)?;
    config.job = environment.parsed("RACCL_JOB", text)?;
    config.trace = environment.path("RACCL_TRACE");
    Ok(())
}

fn read_secret(environment: &Environment) -> Result<Option<Setting<SecretSource>>> {
    let file = environment.path("RACCL_SECRET_FILE");
    let descriptor = environment.descriptor("RACCL_SECRET_FD")?;
    match (file, descriptor) {
        (Some(_), Some(descriptor)) => {
            Err(descriptor
                .refuse("RACCL_SECRET_FILE is set as well; the secret can come from one of them only"))
        }
        (Some(file), None) => Ok(Some(Setting::new(file.name, SecretSource::File(file.value)))),
        (None, Some(descriptor)) => {
            Ok(Some(Setting::new(descriptor.name, SecretSource::Descriptor(descriptor.value))))
        }
        (None, None) => Ok(None),
    }
}

fn overwrite<T>(setting: &mut Setting<T>, given: Option<Setting<T>>) {
    if let Some(given) = given {
        *setting = given;
    }
}

/// The variables, with readers that give errors which show name, value and what is expected.
pub(super) struct Environment {
    vars: BTreeMap<OsString, OsString>,
}

impl Environment {
    pub(super) fn new(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Environment {
        Environment { vars: vars.into_iter().collect() }
    }

    /// Whether the variable is set, be it empty.
    pub(super) fn has(&self, name: &str) -> bool {
        self.vars.contains_key(OsStr::new(name))
    }

    /// The value of a variable that is set and not empty.
    fn raw(&self, name: &str) -> Option<&OsStr> {
        self.vars.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    pub(super) fn parsed<T>(
        &self,
        name: &'static str,
        read: impl Fn(&str) -> std::result::Result<T, String>,
    ) -> Result<Option<Setting<T>>> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let refused = |reason: String| refuse(name, &raw.to_string_lossy(), reason);
        let value = raw.to_str().ok_or_else(|| refused("it is not UTF-8 text".to_owned()))?;
        Ok(Some(Setting::new(name, read(value).map_err(refused)?)))
    }

    pub(super) fn path(&self, name: &'static str) -> Option<Setting<PathBuf>> {
        self.raw(name).map(|path| Setting::new(name, PathBuf::from(path)))
    }

    /// A variable's text if it is there and is text; for names that only tell things apart.
    pub(super) fn lossy(&self, name: &str) -> Option<String> {
        self.raw(name).map(|value| value.to_string_lossy().into_owned())
    }

    pub(super) fn rank(&self, name: &'static str) -> Result<Option<Setting<usize>>> {
        self.parsed(name, |text| {
            number(text, 0..=MOST_RANKS - 1).ok_or_else(|| "expected a rank, a number from 0".to_owned())
        })
    }

    pub(super) fn ranks(&self, name: &'static str) -> Result<Option<Setting<usize>>> {
        self.parsed(name, |text| {
            number(text, 1..=MOST_RANKS)
                .ok_or_else(|| format!("expected a number of ranks from 1 to {MOST_RANKS}"))
        })
    }

    /// The number of an inherited file descriptor.
    pub(super) fn descriptor(&self, name: &'static str) -> Result<Option<Setting<RawFd>>> {
        self.parsed(name, |text| match text.parse() {
            Ok(descriptor @ 3..=1_000_000) => Ok(descriptor),
            _ => Err("expected the number of an open file descriptor, above 2".to_owned()),
        })
    }

    pub(super) fn port(&self, name: &'static str) -> Result<Option<Setting<u16>>> {
        self.parsed(name, |text| match text.parse() {
            Ok(port @ 1..) => Ok(port),
            _ => Err("expected a port from 1 to 65535".to_owned()),
        })
    }

    /// A warning for every name that looks like ours and is not.
    fn unknown_names(&self) -> Vec<String> {
        const MOST_WARNINGS: usize = 20;
        let names = self.vars.keys().filter_map(|name| name.to_str());
        let ours = names.filter(|name| name.starts_with("RACCL_"));
        let foreign = |name: &&str| PREFIXES_OF_OTHERS.iter().any(|prefix| name.starts_with(prefix));
        let unknown = ours.filter(|name| !NAMES.contains(name) && !foreign(name));
        let warning = |name: &str| {
            let short = parse::shorten(name);
            match nearest(name) {
                Some(known) => format!("the environment variable {short} is not known; is {known} meant?"),
                None => {
                    format!("the environment variable {short} is not known; known are {}", NAMES.join(", "))
                }
            }
        };
        unknown.take(MOST_WARNINGS).map(warning).collect()
    }
}

/// Every name that means something.
const NAMES: [&str; 27] = [
    "RACCL_ALGORITHM",
    "RACCL_CONNECT_TIMEOUT",
    "RACCL_COORDINATOR",
    "RACCL_DEGRADE",
    "RACCL_DEVICES",
    "RACCL_ENCRYPT",
    "RACCL_INSECURE",
    "RACCL_INTERFACE",
    "RACCL_JOB",
    "RACCL_LATE_TIMEOUT",
    "RACCL_LINK",
    "RACCL_LOCAL_RANK",
    "RACCL_LOCAL_SIZE",
    "RACCL_LOG",
    "RACCL_RANK",
    "RACCL_SECRET_FD",
    "RACCL_SECRET_FILE",
    "RACCL_SIGNALS",
    "RACCL_SIZE",
    "RACCL_SOCKETS",
    "RACCL_TIMEOUT",
    "RACCL_TRACE",
    "RACCL_VERBS_BULK",
    "RACCL_VERBS_CHECKSUM",
    "RACCL_VERBS_KEEP_ALIVE",
    "RACCL_VERBS_LIBRARY",
    "RACCL_VERBS_TRANSPORT",
];

/// The beginnings of names that other parts of the project read: the command, the software driver, the checks and tests.
const PREFIXES_OF_OTHERS: [&str; 5] =
    ["RACCL_BINDINGS_", "RACCL_EMULATOR_", "RACCL_SSH", "RACCL_TEST_", "RACCL_VERBS_INCLUDE"];

/// The known name that is most like `name`, if one is at all.
fn nearest(name: &str) -> Option<&'static str> {
    const LONGEST: usize = 64;
    if name.len() > LONGEST {
        return None;
    }
    let distances = NAMES.iter().map(|known| (edit_distance(name.as_bytes(), known.as_bytes()), *known));
    // What differs in more than a third of what follows the prefix is not a slip of the finger.
    let likely =
        distances.filter(|(distance, known)| *distance <= (known.len() - "RACCL_".len()).div_ceil(3));
    likely.min().map(|(_, known)| known)
}

/// How many insertions, deletions, replacements and swaps of neighbours lead from one to the other.
fn edit_distance(a: &[u8], b: &[u8]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 0..a.len() {
        let mut row = vec![i + 1];
        for j in 0..b.len() {
            let replaced = last[j] + usize::from(a[i] != b[j]);
            let mut best = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j] {
                best = best.min(before_last[j - 1] + 1);
            }
            row.push(best);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

fn number(text: &str, allowed: std::ops::RangeInclusive<usize>) -> Option<usize> {
    text.parse().ok().filter(|number| allowed.contains(number))
}

pub(super) fn endpoint(text: &str) -> std::result::Result<String, String> {
    text.parse::<parse::Endpoint>().map(|endpoint| endpoint.to_string())
}

pub(super) fn text(text: &str) -> std::result::Result<String, String> {
    Ok(text.to_owned())
}

fn sockets(text: &str) -> std::result::Result<usize, String> {
    number(text, 1..=MOST_SOCKETS)
        .ok_or_else(|| format!("expected a number of sockets from 1 to {MOST_SOCKETS}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use proptest::prelude::*;

    use super::*;
    use crate::error::Error;

    fn refused(name: &str, value: &str) -> (String, String) {
        match Config::from_vars([(name, value)]) {
            Err(Error::Config { what, value, .. }) => (what, value),
            other => panic!("{name}={value}: {other:?}"),
        }
    }

    #[test]
    fn nothing_set_is_a_group_of_one() {
        let config = Config::from_vars([("PATH", "/bin"), ("HOME", "/root")]).expect("config");
        assert_eq!(config.origin(), Origin::Builder);
        assert!(config.warnings().is_empty());
        assert!(config.explain().starts_with("a group of one"));
    }

    #[test]
    fn malformed_values_are_shown_with_their_name() {
        for (name, value) in [
            ("RACCL_RANK", "-1"),
            ("RACCL_RANK", "65536"),
            ("RACCL_SIZE", "0"),
            ("RACCL_SIZE", "99999999999999999999"),
            ("RACCL_COORDINATOR", "node1"),
            ("RACCL_LINK", "udp"),
            ("RACCL_INSECURE", "perhaps"),
            ("RACCL_ENCRYPT", "2"),
            ("RACCL_SOCKETS", "17"),
            ("RACCL_TIMEOUT", "30"),
            ("RACCL_LATE_TIMEOUT", "soon"),
            ("RACCL_CONNECT_TIMEOUT", "-1s"),
            ("RACCL_SECRET_FD", "1"),
            ("MLX_RANK", "x"),
        ] {
            assert_eq!(refused(name, value), (name.to_owned(), value.to_owned()));
        }
    }

    #[test]
    fn values_that_are_not_text_are_refused_unless_they_are_paths() {
        let bytes = OsString::from_vec(vec![b'/', 0xff]);
        let error = Config::from_vars([("RACCL_JOB", bytes.clone())]).expect_err("not text");
        assert!(error.to_string().contains("not UTF-8"), "{error}");
        let config = Config::from_vars([("RACCL_TRACE", bytes.clone())]).expect("config");
        assert_eq!(config.trace.expect("trace").value, PathBuf::from(bytes));
    }

    #[test]
    fn empty_values_count_as_missing() {
        let config = Config::from_vars(NAMES.map(|name| (name, ""))).expect("config");
        assert!(config.explain().starts_with("a group of one"), "{config:?}");
    }

    #[test]
    fn misspelt_names_are_warned_about_with_the_nearest() {
        for (wrong, right) in [
            ("RACCL_TIMOUT", "RACCL_TIMEOUT"),
            ("RACCL_CORDINATOR", "RACCL_COORDINATOR"),
            ("RACCL_INTERFACES", "RACCL_INTERFACE"),
            ("RACCL_RNAK", "RACCL_RANK"),
            ("RACCL_WORLD_SIZES", "known are"),
            ("RACCL_", "known are"),
        ] {
            let config = Config::from_vars([(wrong, "1")]).expect("config");
            assert_eq!(config.warnings().len(), 1);
            assert!(config.warnings()[0].contains(right), "{:?}", config.warnings());
        }
    }

    #[test]
    fn distances_count_swaps_as_one() {
        assert_eq!(edit_distance(b"rank", b"rnak"), 1);
        assert_eq!(edit_distance(b"", b"abc"), 3);
        assert_eq!(edit_distance(b"kitten", b"sitting"), 3);
    }

    #[test]
    fn a_secret_comes_from_one_place() {
        let both = [("RACCL_SECRET_FILE", "/x"), ("RACCL_SECRET_FD", "5")];
        assert!(Config::from_vars(both).expect_err("both").to_string().contains("one of them only"));
    }

    /// Every name that is looked at, ours and others'.
    const ALL_NAMES: [&str; 24] = [
        "JACCL_RANK",
        "MLX_RANK",
        "JACCL_COORDINATOR",
        "MLX_JACCL_COORDINATOR",
        "MLX_IBV_DEVICES",
        "MLX_HOSTFILE",
        "MLX_WORLD_SIZE",
        "JACCL_RING",
        "NCCL_HOST_IP",
        "NCCL_PORT",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_FD",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "SLURM_JOB_NODELIST",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ];

    proptest! {
        #[test]
        fn no_environment_panics(
            ours in proptest::collection::vec((0..NAMES.len(), value()), 0..8),
            others in proptest::collection::vec((0..ALL_NAMES.len(), value()), 0..8),
            strange in proptest::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 0..4),
            file in any::<String>(),
        ) {
            let ours = ours.into_iter().map(|(name, value)| (NAMES[name].into(), value));
            let others = others.into_iter().map(|(name, value)| (ALL_NAMES[name].into(), value));
            let strange = strange.into_iter().map(|(name, value)| (OsString::from_vec(name), OsString::from_vec(value)));
            let environment = Environment::new(ours.chain(others).chain(strange));
            match from_environment(&environment, &|_| Ok(file.clone())) {
                Ok(config) => {
                    let _ = config.explain();
                }
                Err(Error::Config { what, .. }) => prop_assert!(environment.has(&what), "{}", what),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }

        #[test]
        fn no_name_panics(name in "RACCL_.{0,80}") {
            // One warning, unless the name is known by chance.
            let environment = Environment::new([(OsString::from(&name), OsString::from("1"))]);
            let known = NAMES.contains(&name.as_str()) || PREFIXES_OF_OTHERS.iter().any(|prefix| name.starts_with(prefix));
            prop_assert_eq!(environment.unknown_names().len(), usize::from(!known));
        }
    }

    fn value() -> impl Strategy<Value = OsString> {
        prop_oneof![
            any::<Vec<u8>>().prop_map(OsString::from_vec),
            "[0-9]{1,3}".prop_map(OsString::from),
            "[a-z0-9.:,\\[\\]-]{0,20}".prop_map(OsString::from),
        ]
    }

    #[test]
    fn every_name_that_is_read_is_known() {
        let code = include_str!("environment.rs").split("mod tests").next().unwrap();
        let is_name = |text: &&str| text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        let quoted = code.split('"').skip(1).step_by(2).filter(|text| text.starts_with("RACCL_"));
        let names = quoted.filter(is_name).filter(|name| !PREFIXES_OF_OTHERS.contains(name));
        let names: Vec<&str> = names.filter(|&name| name != "RACCL_").collect();
        assert!(names.len() > NAMES.len() + 20, "each name is listed once and read once: {names:?}");
        for name in names {
            assert!(NAMES.contains(&name), "{name} is read and not known");
        }
    }
}
