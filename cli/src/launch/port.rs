//! The port where rank 0 will listen.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;

use anyhow::Context;

/// Below the ports that systems give to outgoing connections, so that no such connection takes the port
/// between our choice and rank 0's use of it, and above those that services have.
const PORTS: Range<u16> = 20_000..30_000;

/// Ports that are tried before the system is asked for any.
const TRIES: usize = 64;

/// Checks that a wanted port is free on loopback, or finds one.
pub(super) fn on_loopback(wanted: Option<u16>) -> anyhow::Result<u16> {
    if let Some(port) = wanted {
        let place = || format!("port {port} on 127.0.0.1 cannot be rank 0's; give another with --port");
        return free(port).with_context(place);
    }
    for _ in 0..TRIES {
        if let Ok(port) = free(random()?) {
            return Ok(port);
        }
    }
    free(0).context("no free port on 127.0.0.1")
}

/// A port that is as good as any.
pub(super) fn random() -> anyhow::Result<u16> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(io::Error::other).context("no random bytes for a port")?;
    let span = u32::from(PORTS.end - PORTS.start);
    // Below 10 000, so it fits.
    Ok(PORTS.start + (u32::from_le_bytes(bytes) % span) as u16)
}

fn free(port: u16) -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_named_and_a_free_one_is_found() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listens");
        let port = taken.local_addr().expect("has an address").port();
        let error = on_loopback(Some(port)).expect_err("taken");
        assert!(format!("{error:#}").contains(&port.to_string()), "{error:#}");
        assert_ne!(on_loopback(None).expect("finds one"), port);
    }
}
