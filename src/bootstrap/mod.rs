//! How ranks find each other, and the control connections that watch them.
//!
//! ```text
//! Meeting::Coordinator   every rank says hello to rank 0 (lobby, member), which sends everyone the roster
//! Meeting::Exchange      the user's all-gather carries the hellos (exchange), every rank makes the roster itself
//!                        then each pair is connected, the higher rank calling the lower one (mesh),
//!                        and nobody goes on before everybody is ready
//! ```
//! From then on the control connections, one a pair, are watched by the process's monitor ([`control`]).
#![forbid(unsafe_code)]

pub(crate) mod address;
pub(crate) mod alarm;
mod candidates;
pub(crate) mod channel;
pub(crate) mod control;
mod council;
mod dialer;
mod door;
pub(crate) mod event;
mod exchange;
mod frames;
pub(crate) mod keys;
mod lobby;
mod member;
mod mesh;
pub(crate) mod message;
mod monitor;
pub(crate) mod reform;
mod report;
mod wait;
pub(crate) mod watcher;
pub(crate) mod wire;

use std::{
    fmt, io,
    io::Read,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use address::Address;
use channel::Channel;
use council::Past;
use door::Door;
use keys::{GroupKeys, JobKeys};
use message::{BLOB_LIMIT, Hello, Member, Roster, SIZE_LIMIT, SOCKETS_LIMIT, STRANGER_FRAME_LIMIT};
use reform::Charter;

use crate::{Cause, Error, Result, config::Secret, noise::Session};

/// What a rank knows before it meets the others.
pub(crate) struct Settings {
    pub(crate) rank: usize,
    /// At least 2.
    pub(crate) size: usize,
    /// Keeps apart the groups that are started on one machine.
    pub(crate) job: String,
    pub(crate) meeting: Meeting,
    /// Addresses of this machine that the other ranks shall use; empty means the one that leads to rank 0.
    pub(crate) bind: Vec<IpAddr>,
    /// Data sockets of each pair, at least 1.
    pub(crate) sockets: usize,
    /// For everything from the start to the last connection.
    pub(crate) connect_timeout: Duration,
    /// Names and values of settings that must be equal on all ranks.
    pub(crate) digest: Vec<(String, String)>,
    /// Rank 0's is given to everybody.
    pub(crate) blob: Vec<u8>,
    /// Equal on the ranks of one machine, and on no others.
    pub(crate) host: u128,
    /// The cores that this process may use, a bit each.
    pub(crate) cores: Vec<u64>,
    /// Every connection proves it. Without it only loopback addresses are listened on or called, unless `insecure`.
    pub(crate) secret: Option<Secret>,
    /// Everybody on the network is trusted. Has no effect with a secret.
    pub(crate) insecure: bool,
}

impl Settings {
    fn allows_any_address(&self) -> bool {
        self.secret.is_some() || self.insecure
    }

    fn job_keys(&self) -> Option<JobKeys> {
        self.secret.clone().map(JobKeys::new)
    }

    /// What the connections of the group with this nonce have to prove.
    fn group_keys(&self, nonce: &[u8; 32]) -> Option<Arc<GroupKeys>> {
        self.job_keys().map(|job| Arc::new(job.group(nonce)))
    }
}

/// How the ranks meet.
pub(crate) enum Meeting {
    /// Rank 0 listens at this address (`host:port`, `[2001:db8::1]:port`, `[fe80::1%en5]:port`).
    Coordinator(String),
    /// Rank 0 only: it listens here.
    Listener(TcpListener),
    /// The user's own way to give every rank's bytes to every rank.
    Exchange(Exchange),
}

/// An all-gather of one blob a rank; the result is in rank order.
pub(crate) type Exchange =
    Box<dyn FnOnce(Vec<u8>) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> + Send>;

/// A formed group.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) rank: usize,
    #[cfg(test)]
    pub(crate) size: usize,
    /// Not 0; tells this group's messages from those of another.
    pub(crate) epoch: u32,
    /// Rank 0 drew it; known to the members alone.
    #[cfg(test)]
    pub(crate) nonce: [u8; 32],
    /// Rank 0's.
    pub(crate) blob: Vec<u8>,
    /// Of each rank.
    pub(crate) hosts: Vec<u128>,
    /// How many cores each rank's machine has for all its ranks together. At least 1.
    pub(crate) cores: Vec<usize>,
    /// To each peer, non-blocking, in the same order at both ends; none to oneself.
    pub(crate) data: Vec<Vec<TcpStream>>,
    /// What the two ends of each of these have agreed upon in proving the job secret; without a secret there is nothing.
    pub(crate) sessions: Vec<Vec<Session>>,
    /// The control connections, to be given to [`control::Control::start`].
    pub(crate) control: Connections,
    /// What it takes to form a group of those who are left, should it fail.
    pub(crate) charter: Charter,
}

/// A connection to each peer; `None` for oneself.
#[derive(Debug)]
pub(crate) struct Connections {
    channels: Vec<Option<Channel>>,
    past: Vec<Past>,
}

/// Forms the group: returns when every rank is connected with every other, or with the first cause why that failed.
pub(crate) fn join(mut settings: Settings) -> Result<Joined> {
    let Settings { rank, size, sockets, .. } = settings;
    check(&settings)?;
    // A year is as good as for ever, and can be added to a clock.
    settings.connect_timeout = settings.connect_timeout.min(Duration::from_secs(365 * 24 * 3600));
    let start = Instant::now();
    let deadline = start + settings.connect_timeout;
    let formed = mesh::connect(meet(settings, deadline)?)?;
    tracing::debug!(rank, size, sockets, elapsed = ?start.elapsed(), "the group has formed");
    Ok(formed)
}

/// What a rank knows once it has met the others, and before it is connected with all of them.
struct Met {
    rank: usize,
    sockets: usize,
    roster: Roster,
    deadline: Instant,
    /// Takes the calls of higher ranks.
    door: Door,
    /// Those that exist: with rank 0 if it was met there.
    controls: Vec<Option<Channel>>,
    /// Where rank 0 was met: whatever it says of itself, this leads to it.
    reached: Option<SocketAddr>,
    /// Only loopback addresses are called.
    loopback_only: bool,
    charter: Charter,
}

impl Met {
    fn new(
        settings: &Settings,
        roster: Roster,
        deadline: Instant,
        door: Door,
        controls: Vec<Option<Channel>>,
    ) -> Met {
        let Settings { rank, sockets, .. } = *settings;
        Met {
            rank,
            sockets,
            roster,
            deadline,
            door,
            controls,
            reached: None,
            loopback_only: !settings.allows_any_address(),
            charter: Charter::new(settings),
        }
    }
}

fn meet(mut settings: Settings, deadline: Instant) -> Result<Met> {
    let rank = settings.rank;
    let own = Hello {
        job: settings.job.clone(),
        rank,
        size: settings.size,
        settings: settings.digest.clone(),
        member: Member { host: settings.host, cores: settings.cores.clone(), ..Member::default() },
    };
    let meeting = std::mem::replace(&mut settings.meeting, Meeting::Coordinator(String::new()));
    match meeting {
        Meeting::Exchange(exchange) => exchange::meet(&settings, own, exchange, deadline),
        Meeting::Listener(listener) if rank == 0 => lead(&settings, own, vec![listener], deadline),
        Meeting::Listener(_) => {
            Err(failure(rank, "only rank 0 can be given a listener; give others its address", None))
        }
        Meeting::Coordinator(text) => {
            let address: Address =
                text.parse().map_err(|reason| malformed("the coordinator's address", &text, reason))?;
            if rank == 0 {
                let patience = deadline.saturating_duration_since(Instant::now());
                let listeners = address.listen(patience, settings.allows_any_address()).map_err(|error| {
                    failure(0, format!("rank 0 cannot listen at {address}: {error}"), Some(error.into()))
                })?;
                if address.hides_behind_loopback(&listeners) {
                    tracing::warn!(
                        %address,
                        "this name stands for a loopback address on this machine, where ranks of other machines cannot call"
                    );
                }
                lead(&settings, own, listeners, deadline)
            } else {
                member::meet(&settings, own, &address, deadline)
            }
        }
    }
}

/// Rank 0's part.
fn lead(settings: &Settings, own: Hello, mut listeners: Vec<TcpListener>, deadline: Instant) -> Result<Met> {
    let named = listen_on(settings)?;
    let named_count = named.len();
    listeners.splice(0..0, named);
    let member = advertised(settings, &listeners, named_count)?;
    let nonce =
        draw_nonce().map_err(|error| failure(0, "no random numbers from the system", Some(error.into())))?;
    let keys = settings.group_keys(&nonce);
    let door = Door::new(listeners, settings.size * (2 + settings.sockets), keys)
        .map_err(|error| failure(0, "rank 0 cannot use its listener", Some(error.into())))?;
    let gathered = lobby::gather(settings, door, own, deadline)?;
    let lobby::Gathered { door, mut channels, mut members } = gathered;
    members[0] = member;
    let deadline = mesh_deadline(settings, deadline);
    let remaining = deadline.saturating_duration_since(Instant::now());
    let roster = Roster { nonce, remaining, blob: settings.blob.clone(), members };
    let frame = message::Message::Roster(roster.clone()).encode();
    channels.iter_mut().flatten().for_each(|channel| channel.send(&frame));
    Ok(Met::new(settings, roster, deadline, door, channels))
}

/// A group that was completed in the last moment still gets the time to connect.
fn mesh_deadline(settings: &Settings, deadline: Instant) -> Instant {
    deadline.max(Instant::now() + settings.connect_timeout.min(Duration::from_secs(5)))
}

fn check(settings: &Settings) -> Result<()> {
    let Settings { rank, size, sockets, .. } = *settings;
    let wrong = |what: &str, value: String, reason: String| Err(malformed(what, &value, reason));
    if !(2..=SIZE_LIMIT).contains(&size) {
        return wrong("the size", size.to_string(), format!("a group to join has 2 to {SIZE_LIMIT} ranks"));
    }
    if rank >= size {
        return wrong(
            "the rank",
            rank.to_string(),
            format!("ranks are 0 to {} in a group of {size}", size - 1),
        );
    }
    if !(1..=SOCKETS_LIMIT).contains(&sockets) {
        return wrong(
            "the number of sockets",
            sockets.to_string(),
            format!("a pair has 1 to {SOCKETS_LIMIT}"),
        );
    }
    if settings.blob.len() > BLOB_LIMIT {
        let reason = format!("at most {BLOB_LIMIT} bytes can be given to every rank");
        return wrong("the tuning table", format!("{} bytes", settings.blob.len()), reason);
    }
    let named = settings.digest.iter().map(|(name, value)| name.len() + value.len() + 8);
    let words = settings.job.len() + named.sum::<usize>();
    if words > STRANGER_FRAME_LIMIT / 2 || settings.digest.len() > message::SETTINGS_LIMIT {
        let reason = format!("job name and settings may have {} bytes together", STRANGER_FRAME_LIMIT / 2);
        return wrong("the job name and the settings", format!("{words} bytes"), reason);
    }
    let long = settings.digest.iter().flat_map(|(name, value)| [name, value]).chain([&settings.job]);
    if let Some(text) = long.into_iter().find(|text| text.len() > message::STRING_LIMIT) {
        return wrong(
            "a setting",
            text.clone(),
            format!("it is longer than {} bytes", message::STRING_LIMIT),
        );
    }
    if settings.bind.len() >= message::ADDRESS_LIMIT {
        let reason = format!("at most {} addresses can be named", message::ADDRESS_LIMIT - 1);
        return wrong("the interface", format!("{} addresses", settings.bind.len()), reason);
    }
    for ip in &settings.bind {
        if !ip.is_loopback() && !settings.allows_any_address() {
            return wrong("the interface", ip.to_string(), ONLY_LOOPBACK.to_owned());
        }
    }
    Ok(())
}

const ONLY_LOOPBACK: &str = "without a job secret only loopback addresses are allowed; give every rank the secret, \
                             or set RACCL_INSECURE=1 if everyone on the network may be trusted";

/// Listeners at the addresses that the user named.
fn listen_on(settings: &Settings) -> Result<Vec<TcpListener>> {
    let listen = |&ip: &IpAddr| {
        address::listen((ip, 0).into()).map_err(|error| {
            let reason = format!("cannot listen on {ip}: {error}; is it an address of this machine?");
            failure(settings.rank, reason, Some(error.into()))
        })
    };
    settings.bind.iter().map(listen).collect()
}

/// What others are told of this rank.
fn advertised(settings: &Settings, listeners: &[TcpListener], named: usize) -> Result<Member> {
    let mut addresses = Vec::new();
    for listener in listeners {
        let address = listener
            .local_addr()
            .map_err(|error| failure(settings.rank, "a listener without an address", Some(error.into())))?;
        if !address.ip().is_loopback() && !settings.allows_any_address() {
            return Err(malformed("the listener's address", &address.to_string(), ONLY_LOOPBACK.to_owned()));
        }
        addresses.push(address);
    }
    addresses.truncate(message::ADDRESS_LIMIT);
    let named = named.min(addresses.len());
    Ok(Member { host: settings.host, cores: settings.cores.clone(), addresses, named })
}

fn draw_nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

fn failure(rank: usize, reason: impl Into<String>, source: Option<Cause>) -> Error {
    Error::Bootstrap { rank, reason: reason.into(), source }
}

fn malformed(what: &str, value: &str, reason: String) -> Error {
    let shown = wire::shortened(value, 200);
    let value = if shown.len() < value.len() { format!("{shown}...") } else { value.to_owned() };
    Error::Config { what: what.to_owned(), value, reason, source: None }
}

impl fmt::Debug for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Meeting::Coordinator(address) => f.debug_tuple("Coordinator").field(address).finish(),
            Meeting::Listener(listener) => f.debug_tuple("Listener").field(listener).finish(),
            Meeting::Exchange(_) => f.write_str("Exchange"),
        }
    }
}

#[cfg(test)]
mod tests;
