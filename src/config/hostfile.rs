//! Files that list the hosts of a group: the plain form, and the JSON of `mlx.launch`.
//!
//! The plain form has one host a line: where `ssh` finds it, then what is known about it.
//!
//! ```text
//! # the desk
//! mac1.local          slots=2
//! me@mac2.local       ip=10.0.0.2,10.0.1.2
//! ```
//!
//! The JSON form is a list, or an object with the list as `hosts`:
//!
//! ```text
//! [{"ssh": "mac1.local", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en5"]},
//!  {"ssh": "mac2.local", "ips": ["10.0.0.2"], "rdma": ["rdma_en4", null]}]
//! ```
#![forbid(unsafe_code)]

use std::path::Path;

use serde_json::Value;

use super::{
    devices::{self, DeviceMatrix},
    environment::MOST_RANKS,
    file,
    parse::{self, Endpoint, shorten},
    setting::{refuse, refuse_because},
};
use crate::error::Result;

/// One host of a hostfile.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Host {
    /// Where `ssh` finds it: `host` or `user@host`, never beginning with a dash.
    pub ssh: String,
    /// Its addresses, the best first; names are allowed.
    pub ips: Vec<String>,
    /// Its devices towards each host of the file, or nothing: entry j lists those that reach host j.
    pub rdma: Vec<Vec<String>>,
    /// How many ranks it runs, at least 1.
    pub slots: usize,
}

impl Host {
    /// A host of which only the name is known.
    ///
    /// ```
    /// let host = raccl::hostfile::Host::new("me@mac1.local").unwrap();
    /// assert_eq!(host.slots, 1);
    /// assert!(raccl::hostfile::Host::new("-oProxyCommand=x").is_err());
    /// ```
    pub fn new(ssh: &str) -> std::result::Result<Host, String> {
        let (user, host) = ssh.split_once('@').map_or((None, ssh), |(user, host)| (Some(user), host));
        parse::check_host(host)?;
        // What begins with a dash would be an option of ssh.
        if let Some(user) = user
            && (user.starts_with('-') || parse::check_host(&format!("u{user}")).is_err())
        {
            return Err(format!("{:?} is no user name", shorten(user)));
        }
        Ok(Host { ssh: ssh.to_owned(), ips: Vec::new(), rdma: Vec::new(), slots: 1 })
    }

    /// The name or address without the user.
    ///
    /// ```
    /// assert_eq!(raccl::hostfile::Host::new("me@mac1.local").unwrap().name(), "mac1.local");
    /// ```
    pub fn name(&self) -> &str {
        self.ssh.split_once('@').map_or(&self.ssh, |(_, host)| host)
    }
}

/// Reads a hostfile of either form.
///
/// ```
/// let path = std::env::temp_dir().join("raccl-doc-hostfile");
/// std::fs::write(&path, "mac1\nmac2 slots=2\n")?;
/// let hosts = raccl::hostfile::read(&path)?;
/// assert_eq!(hosts[1].slots, 2);
///
/// let error = raccl::hostfile::read("/nonexistent/hosts").unwrap_err();
/// assert!(error.to_string().contains("/nonexistent/hosts"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read(path: impl AsRef<Path>) -> Result<Vec<Host>> {
    let path = path.as_ref();
    let shown = path.display().to_string();
    let text = file::read_text(path)
        .map_err(|error| refuse_because("the hostfile", &shown, "the file cannot be read", error))?;
    parse(&text).map_err(|reason| refuse("the hostfile", &shown, reason))
}

/// Reads the text of a hostfile of either form: JSON if it begins with `[` or `{`.
///
/// ```
/// let plain = raccl::hostfile::parse("mac1 slots=2 ip=10.0.0.1").unwrap();
/// let json = raccl::hostfile::parse(r#"[{"ssh": "mac1", "slots": 2, "ips": ["10.0.0.1"]}]"#).unwrap();
/// assert_eq!(plain, json);
/// ```
pub fn parse(text: &str) -> std::result::Result<Vec<Host>, String> {
    let hosts =
        if text.trim_start().starts_with(['[', '{']) { parse_json(text)? } else { parse_plain(text)? };
    if hosts.is_empty() {
        return Err("it lists no host".to_owned());
    }
    let ranks = hosts.iter().map(|host| host.slots).sum::<usize>();
    if ranks > MOST_RANKS {
        return Err(format!("its hosts have {ranks} slots together; a group has at most {MOST_RANKS} ranks"));
    }
    Ok(hosts)
}

/// The matrix of devices for one rank on each host, in the order of the file; `None` if no host lists devices.
///
/// ```
/// use raccl::hostfile;
///
/// let hosts = r#"[{"ssh": "a", "rdma": [null, "rdma_en5"]}, {"ssh": "b", "rdma": ["rdma_en4", null]}]"#;
/// let matrix = hostfile::devices(&hostfile::parse(hosts).unwrap()).unwrap().unwrap();
/// assert_eq!(matrix.cables(0, 1), ["rdma_en5"]);
/// ```
pub fn devices(hosts: &[Host]) -> std::result::Result<Option<DeviceMatrix>, String> {
    if hosts.iter().all(|host| host.rdma.is_empty()) {
        return Ok(None);
    }
    DeviceMatrix::from_rows(hosts.iter().map(|host| host.rdma.clone()).collect()).map(Some)
}

/// Reads the form that `MLX_HOSTFILE` has: a JSON list with one list of `ip:port` a rank.
pub(super) fn parse_ring(text: &str) -> std::result::Result<Vec<Vec<Endpoint>>, String> {
    const EXPECTED: &str = r#"expected a JSON list with one list of "ip:port" a rank"#;
    let Value::Array(ranks) = json(text)? else { return Err(EXPECTED.to_owned()) };
    if ranks.len() > MOST_RANKS {
        return Err(format!("it has {} ranks; a group has at most {MOST_RANKS}", ranks.len()));
    }
    let endpoint = |rank: usize, value: &Value| match value {
        Value::String(text) => {
            text.parse::<Endpoint>().map_err(|reason| format!("rank {rank}: {:?}: {reason}", shorten(text)))
        }
        other => Err(format!("rank {rank}: {}: {EXPECTED}", shorten(&other.to_string()))),
    };
    let row = |(rank, row): (usize, &Value)| match row {
        Value::Array(entries) if !entries.is_empty() => {
            entries.iter().map(|entry| endpoint(rank, entry)).collect()
        }
        Value::Array(_) => Err(format!("rank {rank} has no address")),
        _ => Err(format!("rank {rank}: {EXPECTED}")),
    };
    ranks.iter().enumerate().map(row).collect()
}

fn parse_plain(text: &str) -> std::result::Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let content = line.split('#').next().unwrap_or_default();
        let mut words = content.split_whitespace();
        let Some(ssh) = words.next() else { continue };
        let host = plain_host(ssh, words).map_err(|reason| format!("line {}: {reason}", index + 1))?;
        if hosts.len() == MOST_RANKS {
            return Err(format!("it has more than {MOST_RANKS} hosts"));
        }
        hosts.push(host);
    }
    Ok(hosts)
}

fn plain_host<'a>(ssh: &str, words: impl Iterator<Item = &'a str>) -> std::result::Result<Host, String> {
    let mut host = Host::new(ssh)?;
    for word in words {
        match word.split_once('=') {
            Some(("slots", count)) => host.slots = slots(count.parse().ok())?,
            Some(("ip", addresses)) => {
                for address in parse::list(addresses) {
                    parse::check_host(address)?;
                    host.ips.push(address.to_owned());
                }
            }
            _ => return Err(format!("{:?} is not known; expected slots=N or ip=ADDRESS,...", shorten(word))),
        }
    }
    Ok(host)
}

fn parse_json(text: &str) -> std::result::Result<Vec<Host>, String> {
    const EXPECTED: &str = r#"expected a list of {"ssh": "host", "ips": [...], "rdma": [...]}"#;
    let hosts = match json(text)? {
        Value::Object(mut object) => object.remove("hosts").ok_or(r#"the object has no "hosts""#)?,
        list => list,
    };
    let Value::Array(hosts) = hosts else { return Err(EXPECTED.to_owned()) };
    if hosts.len() > MOST_RANKS {
        return Err(format!("it has more than {MOST_RANKS} hosts"));
    }
    let count = hosts.len();
    let read = |(index, value): (usize, &Value)| {
        let Value::Object(fields) = value else { return Err(format!("host {index}: {EXPECTED}")) };
        json_host(fields, count).map_err(|reason| format!("host {index}: {reason}"))
    };
    hosts.iter().enumerate().map(read).collect()
}

fn json_host(fields: &serde_json::Map<String, Value>, count: usize) -> std::result::Result<Host, String> {
    let Some(Value::String(ssh)) = fields.get("ssh") else { return Err(r#""ssh" is missing"#.to_owned()) };
    let mut host = Host::new(ssh)?;
    match fields.get("ips") {
        None | Some(Value::Null) => {}
        Some(Value::Array(addresses)) => {
            for address in addresses {
                let Value::String(address) = address else {
                    return Err(r#""ips" has to list text"#.to_owned());
                };
                parse::check_host(address)?;
                host.ips.push(address.clone());
            }
        }
        Some(_) => return Err(r#""ips" has to be a list of addresses"#.to_owned()),
    }
    match fields.get("rdma") {
        None | Some(Value::Null) => {}
        Some(Value::Array(entries)) => {
            if !entries.is_empty() && entries.len() != count {
                let length = entries.len();
                return Err(format!(r#""rdma" has {length} entries, expected {count}, one for each host"#));
            }
            let entry = |(peer, entry)| {
                devices::read_entry(entry).map_err(|reason| format!(r#""rdma" entry {peer}: {reason}"#))
            };
            host.rdma = entries.iter().enumerate().map(entry).collect::<std::result::Result<_, _>>()?;
        }
        Some(_) => return Err(r#""rdma" has to be a list of devices"#.to_owned()),
    }
    if let Some(count) = fields.get("slots") {
        host.slots = slots(count.as_u64())?;
    }
    Ok(host)
}

fn slots(count: Option<u64>) -> std::result::Result<usize, String> {
    match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) if (1..=MOST_RANKS).contains(&count) => Ok(count),
        _ => Err(format!("slots has to be a number from 1 to {MOST_RANKS}")),
    }
}

fn json(text: &str) -> std::result::Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_plain_form_has_comments_slots_and_addresses() {
        let hosts = parse("# desk\n\nmac1.local slots=2 # fast\n\tme@mac2 ip=10.0.0.2,fe80::2%en5\r\n")
            .expect("hosts");
        assert_eq!(hosts.len(), 2);
        assert_eq!((hosts[0].ssh.as_str(), hosts[0].slots), ("mac1.local", 2));
        assert_eq!(hosts[1].ips, ["10.0.0.2", "fe80::2%en5"]);
        assert_eq!(devices(&hosts), Ok(None));
    }

    #[test]
    fn the_json_form_is_a_list_or_an_object() {
        let list = r#"[{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, ["x", "y"]]},
                       {"ssh": "b", "ips": [], "rdma": [["z", "w"], null]}]"#;
        let object = format!(r#"{{"backend": "jaccl", "envs": ["A=1"], "hosts": {list}}}"#);
        assert_eq!(parse(list), parse(&object));
        let matrix = devices(&parse(list).expect("hosts")).expect("valid").expect("devices");
        assert_eq!(matrix.cables(1, 0), ["z", "w"]);
    }

    #[test]
    fn wrong_files_are_refused_with_the_place() {
        for (text, place) in [
            ("", "no host"),
            ("# nothing\n", "no host"),
            ("a\n-oProxyCommand=x\n", "line 2"),
            ("-l@a", "user name"),
            ("a slots=0", "line 1: slots"),
            ("a slots=9999999999999999999999", "slots"),
            ("a port=3", "\"port=3\" is not known"),
            ("a ip=1.2.3", "line 1"),
            ("a slots=65536\nb", "65537 slots"),
            ("[", "not JSON"),
            ("{}", "hosts"),
            ("[3]", "host 0"),
            (r#"[{"ips": []}]"#, "\"ssh\" is missing"),
            (r#"[{"ssh": "a b"}]"#, "host 0"),
            (r#"[{"ssh": "a", "ips": "x"}]"#, "list of addresses"),
            (r#"[{"ssh": "a", "rdma": [null, null]}]"#, "expected 1"),
            (r#"[{"ssh": "a", "rdma": [{}]}]"#, "entry 0"),
            (r#"[{"ssh": "a", "slots": -1}]"#, "slots"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(place), "{text}: {error}");
        }
    }

    #[test]
    fn rings_list_addresses() {
        let ring = parse_ring(r#"[["10.0.0.1:5000"], ["10.0.0.2:5000", "[fd00::1]:5001"]]"#).expect("ring");
        assert_eq!(ring[1][1].to_string(), "[fd00::1]:5001");
        for bad in ["{}", "[3]", "[[]]", "[[3]]", r#"[["10.0.0.1"]]"#, "["] {
            assert!(parse_ring(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>(), near in "[\\[{]?[a-z0-9@=,#:\" \\n\\[\\]{}.-]{0,60}") {
            let _ = (parse(&text), parse(&near), parse_ring(&near));
        }

        #[test]
        fn what_is_read_is_usable(text in "([a-z@-]{1,6}( slots=[0-9]{1,3})?( ip=[0-9.,]{1,9})?\\n){0,5}") {
            if let Ok(hosts) = parse(&text) {
                prop_assert!(!hosts.is_empty());
                prop_assert!(hosts.iter().all(|host| host.slots >= 1 && !host.ssh.starts_with('-')));
                prop_assert!(hosts.iter().all(|host| !host.name().starts_with('-')));
            }
        }
    }
}
