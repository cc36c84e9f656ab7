//! Addresses as users write them, resolved and listened on.
#![forbid(unsafe_code)]

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    str::FromStr,
    sync::mpsc,
    thread,
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};

/// Connections that may wait to be accepted: all ranks call at the same moment.
const BACKLOG: i32 = 1024;

/// `host:port`, where host is a name, an IPv4 address or a bracketed IPv6 address, which may have a scope
/// (`[fe80::1%en5]:7000`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    host: String,
    port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                rest.split_once("]:").ok_or("an address in brackets is written [2001:db8::1]:7000")?
            }
            None => text.rsplit_once(':').ok_or("the port is missing; write host:port")?,
        };
        if !text.starts_with('[') && host.contains(':') {
            return Err("an IPv6 address needs brackets before its port, as in [2001:db8::1]:7000".to_owned());
        }
        if host.is_empty() {
            return Err("the host is missing; write host:port".to_owned());
        }
        match port.parse() {
            Ok(0) => Err("port 0 cannot be found by other ranks; give a number from 1 to 65535".to_owned()),
            Ok(port) => Ok(Address { host: host.to_owned(), port }),
            Err(_) => Err(format!("{port:?} is no port; give a number from 1 to 65535")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Address {
    /// All addresses that the host has, within `patience`.
    pub(crate) fn resolve(&self, patience: Duration) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        // The system's resolver cannot be given a deadline, so it gets a thread that is left behind if it takes too long.
        let (answer, answered) = mpsc::channel();
        let query = (self.host.clone(), self.port);
        thread::Builder::new().name("raccl-resolve".into()).spawn(move || {
            let found = (query.0.as_str(), query.1).to_socket_addrs().map(Vec::from_iter);
            // Nobody listens any more if it took too long.
            let _ = answer.send(found);
        })?;
        let mut found = answered.recv_timeout(patience).map_err(|_| {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the name {} was not resolved in time", self.host),
            )
        })??;
        let mut seen = Vec::new();
        found.retain(|address| !seen.contains(address) && (seen.push(*address), true).1);
        if found.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("the name {} has no address", self.host),
            ));
        }
        Ok(found)
    }

    /// Listens on every address of the host that belongs to this machine; on loopback ones only, unless `any` is allowed.
    pub(crate) fn listen(&self, patience: Duration, any: bool) -> io::Result<Vec<TcpListener>> {
        let mut resolved = self.resolve(patience)?;
        resolved.retain(|address| any || address.ip().is_loopback());
        if resolved.is_empty() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, super::ONLY_LOOPBACK));
        }
        let mut listeners = Vec::new();
        let mut foreign = Vec::new();
        for &address in &resolved {
            match listen(address) {
                Ok(listener) => listeners.push(listener),
                Err(error) if is_not_ours(&error) => foreign.push(address.ip().to_string()),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    let text = format!(
                        "port {} of {} is taken by another program (or by an earlier run that still ends); \
                         choose another port on every rank",
                        self.port,
                        address.ip()
                    );
                    return Err(io::Error::new(error.kind(), text));
                }
                Err(error) => {
                    return Err(io::Error::new(error.kind(), format!("cannot listen on {address}: {error}")));
                }
            }
        }
        if listeners.is_empty() {
            let text = format!(
                "{} is not an address of this machine, where rank 0 runs (it stands for {})",
                self.host,
                foreign.join(", ")
            );
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
        }
        if self.host == "localhost" {
            // Other programs may resolve the name to the other family first.
            for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
                let address = SocketAddr::new(ip, self.port);
                if !resolved.contains(&address) {
                    match listen(address) {
                        Ok(listener) => listeners.push(listener),
                        Err(error) => tracing::debug!(%address, %error, "not listening there too"),
                    }
                }
            }
        }
        Ok(listeners)
    }

    /// A host name of this machine may stand for a loopback address in its own tables, where no other machine can call.
    pub(crate) fn hides_behind_loopback(&self, listeners: &[TcpListener]) -> bool {
        self.host != "localhost"
            && self.host.parse::<IpAddr>().is_err()
            && listeners.iter().all(|l| l.local_addr().is_ok_and(|address| address.ip().is_loopback()))
    }
}

/// A non-blocking listener. IPv6 sockets take IPv6 calls only, so that both families can be listened on side by side.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Connections of an earlier run that are still winding up must not keep the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Makes a stream fit for non-blocking frames of a few bytes.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    #[cfg(target_vendor = "apple")]
    socket2::SockRef::from(stream).set_nosigpipe(true)?;
    Ok(())
}

/// Addresses by which this machine is known when nobody says: loopback, and where its default routes leave from.
pub(crate) fn own_addresses() -> Vec<IpAddr> {
    // Connecting a datagram socket sends nothing; it only looks up the route. The destinations are documentation addresses.
    let routes = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
    let leaving = routes.into_iter().filter_map(|(from, to)| {
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip())
    });
    let mut addresses: Vec<IpAddr> = leaving.filter(|ip| !ip.is_unspecified()).collect();
    addresses.push(Ipv4Addr::LOCALHOST.into());
    addresses
}

fn is_not_ours(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn resolve(text: &str) -> Vec<SocketAddr> {
        text.parse::<Address>().unwrap().resolve(PATIENCE).unwrap()
    }

    #[test]
    fn addresses_are_read_as_users_write_them() {
        for text in ["mac-1.local:7000", "10.0.0.1:1", "[::1]:65535", "[fe80::1%en5]:7000"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!(resolve("10.0.0.1:7"), ["10.0.0.1:7".parse().unwrap()]);
        assert_eq!(resolve("[::1]:7"), ["[::1]:7".parse().unwrap()]);
        assert!(resolve("localhost:7").iter().all(|a| a.ip().is_loopback() && a.port() == 7));
    }

    #[test]
    fn malformed_addresses_say_what_is_wrong() {
        for (text, part) in [
            ("host", "port is missing"),
            (":7", "host is missing"),
            ("host:", "no port"),
            ("host:0", "port 0"),
            ("host:70000", "no port"),
            ("::1:7000", "brackets"),
            ("[::1]", "brackets"),
            ("[]:1", "host is missing"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_scope_of_a_link_local_address_is_kept() {
        let [SocketAddr::V6(address)] = resolve("[fe80::1%lo]:7")[..] else { panic!("one IPv6 address") };
        assert_eq!(address.scope_id(), 1);
    }

    #[test]
    fn both_loopback_families_are_listened_on_for_localhost() {
        let free = listen("127.0.0.1:0".parse().unwrap()).unwrap().local_addr().unwrap().port();
        let listeners =
            format!("localhost:{free}").parse::<Address>().unwrap().listen(PATIENCE, true).unwrap();
        let v6 = listen("[::1]:0".parse().unwrap()).is_ok();
        assert_eq!(listeners.len(), 1 + usize::from(v6));
    }

    #[test]
    fn a_taken_port_and_a_foreign_address_are_named() {
        let taken = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let text = taken.local_addr().unwrap().to_string();
        let error = text.parse::<Address>().unwrap().listen(PATIENCE, true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(
            error.to_string().contains(&format!("port {}", taken.local_addr().unwrap().port())),
            "{error}"
        );
        let error = "192.0.2.1:7000".parse::<Address>().unwrap().listen(PATIENCE, true).unwrap_err();
        assert!(error.to_string().contains("192.0.2.1 is not an address of this machine"), "{error}");
    }
}
