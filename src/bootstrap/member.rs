//! Every other rank reports to rank 0.
#![forbid(unsafe_code)]

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::{
    Met, ONLY_LOOPBACK, Settings,
    address::{Address, listen},
    advertised,
    channel::{Channel, Pass},
    dialer::{Answer, Dialer, Trouble},
    door::Door,
    failure,
    keys::Place as Claim,
    listen_on, malformed,
    message::{Hello, Message, Roster, Waiting, frame_limit},
    report::Ranks,
    wait::Wait,
};
use crate::{Error, Result};

/// Names are resolved anew this often while nobody answers.
const STALE: Duration = Duration::from_secs(2);
/// How long rank 0 is given to say that its time is over, which says more than ours being over.
const GRACE: Duration = Duration::from_secs(1);

/// Calls rank 0 until it answers, and waits for the roster.
pub(super) fn meet(settings: &Settings, own: Hello, address: &Address, deadline: Instant) -> Result<Met> {
    let rank = settings.rank;
    let named = listen_on(settings)?;
    let mut place = Place { settings, own, named: named.len(), listeners: named };
    let (channel, reached, waiting) = reach(&mut place, address, deadline)?;
    let mut rank0 = RankZero { rank, name: format!("rank 0 at {reached}"), channel };
    let (roster, deadline) = match waiting {
        First::Roster(roster) => (roster, deadline),
        First::Waiting(waiting) => rank0.wait_for_roster(settings, waiting, deadline)?,
    };
    let deadline = deadline.max(Instant::now() + roster.remaining.min(settings.connect_timeout));
    let Place { listeners, .. } = place;
    let keys = settings.group_keys(&roster.nonce);
    let door = Door::new(listeners, settings.size * (1 + settings.sockets), keys)
        .map_err(|error| failure(rank, "the listener cannot be used", Some(error.into())))?;
    let mut controls: Vec<Option<Channel>> = (0..settings.size).map(|_| None).collect();
    controls[0] = Some(rank0.channel);
    Ok(Met { reached: Some(reached), ..Met::new(settings, roster, deadline, door, controls) })
}

/// Where this rank can be reached by higher ones.
struct Place<'a> {
    settings: &'a Settings,
    own: Hello,
    listeners: Vec<TcpListener>,
    /// How many of the listeners, from the front, the user asked for.
    named: usize,
}

impl Place<'_> {
    /// The hello for a connection to rank 0: its own end is an address that others can reach too, most likely.
    fn hello(&mut self, stream: &TcpStream) -> io::Result<Vec<u8>> {
        let mut own = stream.local_addr()?;
        let known =
            self.listeners.iter().any(|l| l.local_addr().is_ok_and(|address| address.ip() == own.ip()));
        if !known {
            own.set_port(0);
            self.listeners.push(listen(own)?);
        }
        self.own.member = advertised(self.settings, &self.listeners, self.named).map_err(io::Error::other)?;
        Ok(Message::Hello(self.own.clone()).encode())
    }
}

enum First {
    Waiting(Waiting),
    Roster(Roster),
}

fn reach(
    place: &mut Place<'_>,
    address: &Address,
    deadline: Instant,
) -> Result<(Channel, SocketAddr, First)> {
    let settings = place.settings;
    let (rank, size) = (settings.rank, settings.size);
    let pass = settings.job_keys().map(|job| Pass { place: Claim::Lobby, key: job.lobby() });
    let mut dialer = Dialer::new(Vec::new(), frame_limit(size), pass);
    let mut resolved: Option<Instant> = None;
    let mut trouble: Option<Trouble> = None;
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Err(unreachable(settings, address, trouble));
        }
        if resolved.is_none_or(|at| at + STALE <= now) && dialer.is_resting() {
            resolved = Some(now);
            match address.resolve(deadline - now) {
                Ok(found) => dialer.set_candidates(permitted(settings, address, found)?),
                Err(error) => {
                    trouble = Some(Trouble { text: error.to_string(), source: Some(error) });
                }
            }
        }
        let answer = dialer.step(now, &mut |stream, _attempt| place.hello(stream)).map_err(|broken| {
            failure(
                rank,
                format!("rank 0 at {address} answered, but {broken}"),
                broken.into_io().map(Into::into),
            )
        })?;
        if let Some(Answer { channel, address: reached, frame }) = answer {
            match Message::decode(&frame, size) {
                Ok(Message::Waiting(waiting)) => return Ok((channel, reached, First::Waiting(waiting))),
                Ok(Message::Roster(roster)) => return Ok((channel, reached, First::Roster(roster))),
                Ok(Message::Refused { reason }) => {
                    return Err(failure(
                        rank,
                        format!("rank 0 at {reached} refused this rank: {reason}"),
                        None,
                    ));
                }
                Ok(Message::Failed { reason, .. }) => return Err(failure(rank, reason, None)),
                Ok(other) => dialer.reject(
                    now,
                    reached,
                    format!("a {} where rank 0's answer is expected", other.name()),
                ),
                Err(malformed) => dialer.reject(now, reached, malformed.to_string()),
            }
        }
        trouble = dialer.last_trouble().or(trouble);
        let mut wait = Wait::until(deadline);
        if let Some(at) = resolved.filter(|_| dialer.is_resting()) {
            wait.alarm(at + STALE);
        }
        dialer.interest(&mut wait);
        wait.sleep().map_err(|error| failure(rank, "cannot wait for a socket", Some(error.into())))?;
    }
}

/// Of the addresses that a name stands for, those that may be called.
fn permitted(settings: &Settings, address: &Address, mut found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>> {
    if !settings.allows_any_address() {
        found.retain(|address| address.ip().is_loopback());
        if found.is_empty() {
            let what = "the coordinator's address";
            return Err(malformed(what, &address.to_string(), ONLY_LOOPBACK.to_owned()));
        }
    }
    Ok(found)
}

fn unreachable(settings: &Settings, address: &Address, trouble: Option<Trouble>) -> Error {
    let within = settings.connect_timeout;
    let mut reason = format!("cannot reach rank 0 at {address} within {within:?}");
    let mut source = None;
    if let Some(trouble) = trouble {
        reason += &format!(" (last attempt: {})", trouble.text);
        source = trouble.source.map(Into::into);
    }
    reason +=
        "; is rank 0 running, is this its address, and does a firewall or another network stand between?";
    failure(settings.rank, reason, source)
}

struct RankZero {
    rank: usize,
    name: String,
    channel: Channel,
}

impl RankZero {
    fn wait_for_roster(
        &mut self,
        settings: &Settings,
        mut waiting: Waiting,
        deadline: Instant,
    ) -> Result<(Roster, Instant)> {
        // From here on rank 0's clock counts, so that all give up together and know why.
        let allowed = |waiting: &Waiting| {
            deadline.max(Instant::now() + waiting.remaining.min(settings.connect_timeout)) + GRACE
        };
        let mut until = allowed(&waiting);
        loop {
            let name = &self.name;
            self.channel.flush();
            match self.channel.receive() {
                Ok(Some(frame)) => match Message::decode(&frame, settings.size) {
                    Ok(Message::Waiting(news)) => {
                        until = until.min(allowed(&news));
                        waiting = news;
                    }
                    Ok(Message::Roster(roster)) => return Ok((roster, deadline)),
                    Ok(Message::Failed { reason, .. }) => return Err(failure(self.rank, reason, None)),
                    Ok(other) => {
                        let reason = format!("{name} sent a {} where the roster is expected", other.name());
                        return Err(failure(self.rank, reason, None));
                    }
                    Err(malformed) => {
                        return Err(failure(
                            self.rank,
                            format!("{name} sent a {malformed}"),
                            Some(crate::Cause::new(malformed)),
                        ));
                    }
                },
                Ok(None) => {
                    let now = Instant::now();
                    if now >= until {
                        let missing = Ranks { named: &waiting.missing, count: waiting.count };
                        let reason = format!("{name} still waits for {missing}; start every rank");
                        return Err(failure(self.rank, reason, None));
                    }
                    let mut wait = Wait::until(until);
                    wait.readable(self.channel.stream());
                    if self.channel.unsent() {
                        wait.writable(self.channel.stream());
                    }
                    wait.sleep()
                        .map_err(|e| failure(self.rank, "cannot wait for a socket", Some(e.into())))?;
                }
                Err(broken) => {
                    let reason = format!(
                        "lost {name} before all ranks had arrived: {broken}; see what rank 0 reports"
                    );
                    return Err(failure(self.rank, reason, broken.into_io().map(Into::into)));
                }
            }
        }
    }
}
