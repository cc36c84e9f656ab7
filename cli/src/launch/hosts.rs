//! Which machines run ranks: `--hosts`, and `--hostfile` in the forms that the library reads.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use raccl::hostfile::{self, Host};
use raccl::parse::Endpoint;
use serde_json::{Value, json};

/// Longest hostfile that is read.
const LONGEST_FILE: u64 = 16 << 20;

/// The machines of a job.
#[derive(Debug)]
pub(super) struct Hosts {
    hosts: Vec<Host>,
    /// The host of each rank, as an index.
    ranks: Vec<usize>,
    /// `K=V` for all ranks.
    pub(super) environment: Vec<String>,
}

impl Hosts {
    /// From `a,b,c`, with as many ranks, or fewer.
    pub(super) fn from_list(list: &str, ranks: Option<usize>) -> anyhow::Result<Self> {
        let host = |name: &str| Host::new(name.trim()).map_err(|reason| anyhow!("--hosts: {reason}"));
        let hosts = list.split(',').map(host).collect::<anyhow::Result<_>>()?;
        Self::new(hosts, ranks, Vec::new())
    }

    /// From a file, with a rank a slot, or fewer.
    pub(super) fn from_file(path: &Path, ranks: Option<usize>) -> anyhow::Result<Self> {
        let what = || format!("cannot use the hostfile {}", path.display());
        let text = read(path).with_context(what)?;
        let hosts = hostfile::parse(&text).map_err(|reason| anyhow!(reason)).with_context(what)?;
        // The matrix is looked at now, since ranks would complain about a variable that the user has not set.
        hostfile::devices(&hosts).map_err(|reason| anyhow!(reason)).with_context(what)?;
        let environment = variables(&text).with_context(what)?;
        Self::new(hosts, ranks, environment)
    }

    fn new(hosts: Vec<Host>, wanted: Option<usize>, environment: Vec<String>) -> anyhow::Result<Self> {
        let slots = hosts.iter().enumerate();
        let mut ranks: Vec<_> =
            slots.flat_map(|(index, host)| std::iter::repeat_n(index, host.slots)).collect();
        if let Some(wanted) = wanted {
            let slots = ranks.len();
            ensure!(
                wanted <= slots,
                "{wanted} ranks asked for, but the hosts have {slots} slots; add hosts or slots=N"
            );
            ranks.truncate(wanted);
        }
        Ok(Self { hosts, ranks, environment })
    }

    /// Where ssh finds the machine of each rank.
    pub(super) fn ranks(&self) -> impl ExactSizeIterator<Item = &str> {
        self.ranks.iter().map(|&host| self.hosts[host].ssh.as_str())
    }

    /// Where rank 0 will listen: the wanted `HOST` or `HOST:PORT`, or else the best that is known of the first
    /// machine. `port` is used where the text has none.
    pub(super) fn coordinator(&self, wanted: Option<&str>, port: u16) -> anyhow::Result<Endpoint> {
        let Some(wanted) = wanted else {
            let first = &self.hosts[0];
            let address = first.ips.first().map_or(first.name(), String::as_str);
            if is_here(address) {
                bail!(
                    "the others cannot reach rank 0 at {address}; name the first host as they see it, or give --coordinator HOST"
                );
            }
            return Endpoint::new(address, port).map_err(|reason| anyhow!(reason));
        };
        // An IPv6 address without brackets has no port either.
        let bare = wanted.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(wanted);
        let endpoint = Endpoint::new(bare, port).or_else(|_| wanted.parse());
        endpoint.map_err(|reason| anyhow!("--coordinator {wanted}: {reason}"))
    }

    /// The matrix of RDMA devices between ranks, in the form of `RACCL_DEVICES`, where the file has one between
    /// hosts.
    pub(super) fn devices(&self) -> Option<Value> {
        if self.hosts.iter().all(|host| host.rdma.is_empty()) {
            return None;
        }
        let cables = |from: usize, to: usize| self.hosts[from].rdma.get(to).map_or(&[][..], Vec::as_slice);
        let row = |&from: &usize| self.ranks.iter().map(|&to| json!(cables(from, to))).collect();
        Some(Value::Array(self.ranks.iter().map(row).collect()))
    }
}

/// Whether a host means this machine whoever asks, so that ranks start without ssh.
pub(super) fn is_here(host: &str) -> bool {
    matches!(host, "localhost" | "127.0.0.1" | "::1")
}

fn read(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(LONGEST_FILE + 1).read_to_string(&mut text)?;
    ensure!(text.len() as u64 <= LONGEST_FILE, "it is longer than {} MiB", LONGEST_FILE >> 20);
    Ok(text)
}

/// The variables that the object form of `mlx.launch` can have as `envs`. The text has been found good before.
fn variables(text: &str) -> anyhow::Result<Vec<String>> {
    let Ok(Value::Object(mut file)) = serde_json::from_str(text) else { return Ok(Vec::new()) };
    match file.remove("envs") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(list) => serde_json::from_value(list).context("\"envs\" has to be a list of \"K=V\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str, ranks: Option<usize>) -> anyhow::Result<Hosts> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("writes");
        Hosts::from_file(file.path(), ranks)
    }

    fn ranks(hosts: anyhow::Result<Hosts>) -> Vec<String> {
        hosts.expect("good").ranks().map(String::from).collect()
    }

    #[test]
    fn ranks_fill_slots_in_order() {
        assert_eq!(ranks(Hosts::from_list("a, me@b,a", None)), ["a", "me@b", "a"]);
        assert_eq!(ranks(Hosts::from_list("a,b", Some(1))), ["a"]);
        assert!(Hosts::from_list("a,b", Some(3)).expect_err("too many").to_string().contains("2 slots"));
        for bad in ["", "a,,b", "a,-oProxyCommand=x", "a b"] {
            assert!(Hosts::from_list(bad, None).is_err(), "{bad}");
        }
        assert_eq!(ranks(file("a slots=2 # two\n\nb\n", None)), ["a", "a", "b"]);
        assert_eq!(ranks(file("a slots=2 # two\n\nb\n", Some(1))), ["a"]);
    }

    #[test]
    fn devices_between_hosts_become_devices_between_ranks() {
        let text = r#"{"envs": ["A=1"], "hosts": [
            {"ssh": "m1", "ips": ["10.0.0.1"], "slots": 2, "rdma": [null, ["x", "y"]]},
            {"ssh": "m2", "rdma": [["z", "w"], null]}]}"#;
        let hosts = file(text, None).expect("good");
        let matrix = hosts.devices().expect("a matrix").to_string();
        assert_eq!(matrix, r#"[[[],[],["x","y"]],[[],[],["x","y"]],[["z","w"],["z","w"],[]]]"#);
        raccl::DeviceMatrix::parse(&matrix).expect("what ranks read");
        assert_eq!(hosts.environment, ["A=1"]);
        assert_eq!(file(text, Some(1)).expect("good").devices().expect("a matrix").to_string(), "[[[]]]");
        assert!(file("a\nb", None).expect("good").devices().is_none());
    }

    #[test]
    fn the_coordinator_is_the_best_address_of_the_first_host() {
        let of = |hosts: &Hosts, wanted| hosts.coordinator(wanted, 7).map(|endpoint| endpoint.to_string());
        let hosts = Hosts::from_list("me@a,b", None).expect("good");
        for (wanted, expected) in [
            (None, "a:7"),
            (Some("c"), "c:7"),
            (Some("c:9"), "c:9"),
            (Some("10.0.0.1"), "10.0.0.1:7"),
            (Some("fe80::1%en0"), "[fe80::1%en0]:7"),
            (Some("[::1]"), "[::1]:7"),
            (Some("[::1]:9"), "[::1]:9"),
        ] {
            assert_eq!(of(&hosts, wanted).expect("good"), expected);
        }
        for bad in ["", ":5", "a:", "a:0", "a:65536", "a:x", "[::1", "[::1]x", "-a", "a b"] {
            assert!(of(&hosts, Some(bad)).is_err(), "{bad}");
        }
        assert_eq!(of(&file("a ip=fd00::1", None).expect("good"), None).expect("good"), "[fd00::1]:7");
        assert!(of(&Hosts::from_list("localhost,b", None).expect("good"), None).is_err());
    }

    #[test]
    fn wrong_files_say_which_and_why() {
        for (text, words) in [
            ("a slots=0", "line 1"),
            ("[{", "JSON"),
            (r#"[["10.0.0.1:5000"]]"#, "host 0"),
            (r#"{"envs": 3, "hosts": [{"ssh": "a"}]}"#, "envs"),
            (r#"[{"ssh": "a", "rdma": [null, "x"]}, {"ssh": "b", "rdma": [null, null]}]"#, "cable"),
        ] {
            let error = format!("{:#}", file(text, None).expect_err(text));
            assert!(error.starts_with("cannot use the hostfile /") && error.contains(words), "{error}");
        }
        assert!(Hosts::from_file(Path::new("/no/such"), None).is_err());
        assert!(Hosts::from_file(Path::new("/dev/zero"), None).is_err(), "endless");
    }
}
