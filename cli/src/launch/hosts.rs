//! Which machines run ranks: `--hosts`, and the two forms of `--hostfile`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

/// Longest hostfile that is read.
const LONGEST_FILE: u64 = 16 << 20;
/// Most ranks of one job.
const MOST_RANKS: usize = 65_536;

/// The machines of a job, one entry a rank.
#[derive(Debug, PartialEq)]
pub(super) struct Hosts {
    /// The host of each rank, as ssh is given it.
    pub(super) ranks: Vec<String>,
    /// The address of the first host, where the file has one.
    pub(super) address: Option<String>,
    /// The matrix of RDMA devices, where the file has one.
    pub(super) devices: Option<Value>,
    /// `K=V` of the file.
    pub(super) environment: Vec<String>,
}

impl Hosts {
    /// From `a,b,c`.
    pub(super) fn from_list(list: &str) -> anyhow::Result<Self> {
        Self::of(list.split(',').map(|host| (host.trim(), 1)))
    }

    /// From a file: `host` or `host slots=N` a line, or what `mlx.launch` reads.
    pub(super) fn from_file(path: &Path) -> anyhow::Result<Self> {
        let what = || format!("cannot use the hostfile {}", path.display());
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(LONGEST_FILE + 1).read_to_string(&mut text))
            .with_context(what)?;
        if text.len() as u64 > LONGEST_FILE {
            return Err(anyhow!("it is longer than {} MiB", LONGEST_FILE >> 20).context(what()));
        }
        let parsed = if looks_like_json(&text) { Self::from_json(&text) } else { Self::from_lines(&text) };
        parsed.with_context(what)
    }

    /// Only so many ranks, in the order of the hosts.
    pub(super) fn limit(&mut self, ranks: usize) -> anyhow::Result<()> {
        let slots = self.ranks.len();
        ensure!(
            ranks <= slots,
            "{ranks} ranks asked for, but the hosts have {slots} slots; add hosts or slots=N"
        );
        self.ranks.truncate(ranks);
        if let Some(Value::Array(rows)) = &mut self.devices {
            rows.truncate(ranks);
            rows.iter_mut().filter_map(Value::as_array_mut).for_each(|row| row.truncate(ranks));
        }
        Ok(())
    }

    fn of<'a>(hosts: impl IntoIterator<Item = (&'a str, usize)>) -> anyhow::Result<Self> {
        let mut ranks = Vec::new();
        for (host, slots) in hosts {
            check(host)?;
            ensure!(ranks.len() + slots <= MOST_RANKS, "more than {MOST_RANKS} ranks");
            ranks.extend(std::iter::repeat_n(host.to_owned(), slots));
        }
        ensure!(!ranks.is_empty(), "no host in it");
        Ok(Self { ranks, address: None, devices: None, environment: Vec::new() })
    }

    fn from_lines(text: &str) -> anyhow::Result<Self> {
        let mut hosts = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            let Some(host) = words.next() else { continue };
            let mut slots = None;
            for word in words {
                let count = word.strip_prefix("slots=").and_then(|count| count.parse().ok());
                match (count, slots) {
                    (Some(1..=MOST_RANKS), None) => slots = count,
                    _ => bail!(
                        "line {}: `{word}` is not slots=N, once, with N from 1 to {MOST_RANKS}",
                        number + 1
                    ),
                }
            }
            check(host).with_context(|| format!("line {}", number + 1))?;
            hosts.push((host, slots.unwrap_or(1)));
        }
        Self::of(hosts)
    }

    fn from_json(text: &str) -> anyhow::Result<Self> {
        let value: Value = serde_json::from_str(text).context("it begins like JSON but is not")?;
        let file = match value {
            Value::Object(_) => serde_json::from_value(value).context("not what mlx.launch reads")?,
            list => {
                ensure!(
                    !list.as_array().is_some_and(|list| list.iter().any(Value::is_array)),
                    "it lists addresses, as MLX_HOSTFILE does; a launcher needs {{\"ssh\": \"HOST\", \"ips\": [..]}} for each rank"
                );
                MlxFile {
                    hosts: serde_json::from_value(list).context("not what mlx.launch reads")?,
                    envs: Vec::new(),
                }
            }
        };
        let mut hosts = Self::of(file.hosts.iter().map(|host| (host.ssh.as_str(), 1)))?;
        hosts.address = file.hosts.first().and_then(|host| host.ips.first().cloned());
        hosts.environment = file.envs;
        let ranks = file.hosts.len();
        if file.hosts.iter().any(|host| !host.rdma.is_empty()) {
            for (rank, host) in file.hosts.iter().enumerate() {
                let entries = host.rdma.len();
                ensure!(
                    entries == ranks,
                    "`rdma` of host {rank} ({}) has {entries} entries for {ranks} hosts",
                    host.ssh
                );
            }
            hosts.devices =
                Some(Value::Array(file.hosts.into_iter().map(|host| Value::Array(host.rdma)).collect()));
        }
        Ok(hosts)
    }
}

/// The JSON form. What else is in it concerns MLX.
#[derive(Deserialize)]
struct MlxFile {
    hosts: Vec<MlxHost>,
    #[serde(default)]
    envs: Vec<String>,
}

#[derive(Deserialize)]
struct MlxHost {
    ssh: String,
    #[serde(default)]
    ips: Vec<String>,
    #[serde(default)]
    rdma: Vec<Value>,
}

/// `{`, or `[` before something that is not the beginning of an IPv6 address.
fn looks_like_json(text: &str) -> bool {
    let text = text.trim_start();
    match text.strip_prefix('[') {
        Some(rest) => rest.trim_start().starts_with(['{', '[', ']', '"']),
        None => text.starts_with('{'),
    }
}

/// Refuses what ssh would take for something other than a host.
fn check(host: &str) -> anyhow::Result<()> {
    ensure!(!host.is_empty(), "a host without a name");
    ensure!(!host.starts_with('-'), "`{host}` is an option, not a host");
    ensure!(!host.contains(|c: char| c.is_whitespace() || c.is_control()), "{host:?} is not a host");
    Ok(())
}

/// The part of a host that names the machine: without `user@`, and without what an `ssh://` address has more.
pub(super) fn machine(host: &str) -> &str {
    let (host, url) = match host.strip_prefix("ssh://") {
        Some(rest) => (rest, true),
        None => (host, false),
    };
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None if url => host.split_once(':').map_or(host, |(host, _)| host),
        None => host,
    }
}

/// Splits `HOST`, `HOST:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`. More than one colon outside of brackets is an
/// IPv6 address without a port.
pub(super) fn host_and_port(text: &str) -> anyhow::Result<(&str, Option<u16>)> {
    let port = |text: &str| match text.parse() {
        Ok(port @ 1..) => Ok(Some(port)),
        _ => Err(anyhow!("`{text}` is not a port")),
    };
    let (host, port) = match (text.strip_prefix('['), text.split_once(':')) {
        (Some(rest), _) => {
            let (address, rest) = rest.split_once(']').with_context(|| format!("no `]` in `{text}`"))?;
            match rest.strip_prefix(':') {
                Some(rest) => (address, port(rest)?),
                None if rest.is_empty() => (address, None),
                None => bail!("`{rest}` after the address in `{text}`"),
            }
        }
        (None, Some((host, rest))) if !rest.contains(':') => (host, port(rest)?),
        (None, _) => (text, None),
    };
    check(host)?;
    Ok((host, port))
}

/// Whether a host means this machine whoever asks, so that ranks start without ssh.
pub(super) fn is_here(host: &str) -> bool {
    matches!(host, "localhost" | "127.0.0.1" | "::1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(hosts: anyhow::Result<Hosts>) -> Vec<String> {
        hosts.expect("good").ranks
    }

    fn error(hosts: anyhow::Result<Hosts>) -> String {
        format!("{:#}", hosts.expect_err("bad"))
    }

    #[test]
    fn lists_and_lines() {
        assert_eq!(names(Hosts::from_list("a, me@b,::1")), ["a", "me@b", "::1"]);
        assert!(error(Hosts::from_list("a,,b")).contains("without a name"));
        assert!(error(Hosts::from_list("a,-oProxyCommand=x")).contains("option"));
        assert!(error(Hosts::from_list("a b")).contains("not a host"));

        let text = "# four ranks\n\n a slots=2 # two here\nb\n\tme@c\tslots=1\n";
        assert_eq!(names(Hosts::from_lines(text)), ["a", "a", "b", "me@c"]);
        assert!(error(Hosts::from_lines("")).contains("no host"));
        for bad in [
            "a slots=0",
            "a slots=x",
            "a b",
            "a slots=1 slots=2",
            "a slots=99999999999999999999999",
            "a slots=70000",
        ] {
            assert!(error(Hosts::from_lines(&format!("ok\n{bad}"))).contains("line 2"), "{bad}");
        }
    }

    #[test]
    fn the_form_of_mlx() {
        let list = r#"[{"ssh": "m1", "ips": ["10.0.0.1", "10.0.1.1"], "rdma": [null, "rdma_en5"]},
                       {"ssh": "m2", "ips": ["10.0.0.2"], "rdma": [["rdma_en4"], null]}]"#;
        let object = format!(r#"{{"backend": "jaccl", "envs": ["A=1"], "hosts": {list}}}"#);
        assert!(looks_like_json(list) && looks_like_json(&object));
        let hosts = Hosts::from_json(&object).expect("good");
        assert_eq!(hosts.ranks, ["m1", "m2"]);
        assert_eq!(hosts.address.as_deref(), Some("10.0.0.1"));
        assert_eq!(hosts.environment, ["A=1"]);
        let devices = hosts.devices.expect("a matrix").to_string();
        assert_eq!(devices, r#"[[null,"rdma_en5"],[["rdma_en4"],null]]"#);
        let mut hosts = Hosts::from_json(list).expect("good");
        hosts.limit(1).expect("fewer");
        assert_eq!(hosts.devices.expect("a matrix").to_string(), "[[null]]");

        assert_eq!(names(Hosts::from_json(r#"[{"ssh": "m1"}]"#)), ["m1"]);
        for (bad, words) in [
            ("[{", "not"),
            ("{}", "hosts"),
            ("[]", "no host"),
            (r#"[{"ips": []}]"#, "ssh"),
            (r#"[{"ssh": "a", "rdma": [null, "x"]}, {"ssh": "b"}]"#, "0 entries for 2"),
            (r#"[["10.0.0.1:5000"]]"#, "MLX_HOSTFILE"),
            (r#"[{"ssh": "-x"}]"#, "option"),
            (r#"{"hosts": 3}"#, "mlx.launch"),
        ] {
            assert!(error(Hosts::from_json(bad)).contains(words), "{bad}: {}", error(Hosts::from_json(bad)));
        }
        assert!(!looks_like_json("[::1] slots=2\n"));
    }

    #[test]
    fn ranks_are_at_most_the_slots() {
        let mut hosts = Hosts::from_list("a,b").expect("good");
        assert!(hosts.limit(3).is_err());
        hosts.limit(1).expect("fewer");
        assert_eq!(hosts.ranks, ["a"]);
    }

    #[test]
    fn coordinators() {
        for (text, host, port) in [
            ("a", "a", None),
            ("a:5000", "a", Some(5000)),
            ("10.0.0.1:1", "10.0.0.1", Some(1)),
            ("fe80::1%en0", "fe80::1%en0", None),
            ("[::1]", "::1", None),
            ("[fe80::1%en0]:65535", "fe80::1%en0", Some(65535)),
        ] {
            assert_eq!(host_and_port(text).expect(text), (host, port));
        }
        for bad in ["", ":5", "a:", "a:0", "a:65536", "a:x", "[::1", "[::1]x", "[]:4", "-a", "a b"] {
            assert!(host_and_port(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn machines_of_hosts() {
        for (host, name) in [
            ("a", "a"),
            ("me@a", "a"),
            ("me@::1", "::1"),
            ("[::1]", "::1"),
            ("ssh://me@a:22", "a"),
            ("ssh://a", "a"),
            ("ssh://[fe80::1]:22", "fe80::1"),
        ] {
            assert_eq!(machine(host), name);
        }
    }
}
