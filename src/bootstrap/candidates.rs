//! Where a rank is called.
#![forbid(unsafe_code)]

use std::net::SocketAddr;

use super::message::{Member, Purpose};

/// The addresses to try for a connection, the likeliest first: those that the user named, over which data sockets are dealt,
/// then the one where the peer was met.
pub(super) fn candidates(
    own: &Member,
    peer: &Member,
    reached: Option<SocketAddr>,
    scopes: &[u32],
    purpose: Purpose,
) -> Vec<SocketAddr> {
    let (named, found) = peer.addresses.split_at(peer.named);
    let turn = match purpose {
        Purpose::Data(index) if !named.is_empty() => index % named.len(),
        _ => 0,
    };
    let in_turn = named[turn..].iter().chain(&named[..turn]).chain(&reached).chain(found);
    let mut candidates = Vec::new();
    for &address in in_turn.filter(|address| !address.ip().is_unspecified()) {
        match address {
            SocketAddr::V6(mut v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => {
                for &scope in scopes {
                    v6.set_scope_id(scope);
                    candidates.push(v6.into());
                }
            }
            _ => candidates.push(address),
        }
    }
    if own.host != peer.host {
        // Another machine's loopback address leads back to this one; but two names may stand for one machine.
        candidates.sort_by_key(|address| address.ip().is_loopback() && Some(*address) != reached);
    }
    let mut seen = Vec::new();
    candidates.retain(|address| !seen.contains(address) && (seen.push(*address), true).1);
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(host: u128, named: usize, addresses: &[&str]) -> Member {
        Member {
            host,
            named,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            cores: vec![1],
        }
    }

    fn texts(
        host: u128,
        peer: &Member,
        reached: Option<&str>,
        scopes: &[u32],
        purpose: Purpose,
    ) -> Vec<String> {
        let reached = reached.map(|text| text.parse().unwrap());
        let candidates = candidates(&member(host, 0, &[]), peer, reached, scopes, purpose);
        candidates.iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn data_sockets_are_dealt_over_the_named_addresses() {
        let peer = member(2, 2, &["10.0.0.2:1", "10.1.0.2:2", "192.168.0.2:3"]);
        let order = |purpose| texts(1, &peer, None, &[], purpose);
        assert_eq!(order(Purpose::Control)[0], "10.0.0.2:1");
        assert_eq!(order(Purpose::Data(0)), ["10.0.0.2:1", "10.1.0.2:2", "192.168.0.2:3"]);
        assert_eq!(order(Purpose::Data(1)), ["10.1.0.2:2", "10.0.0.2:1", "192.168.0.2:3"]);
        assert_eq!(order(Purpose::Data(2))[0], "10.0.0.2:1");
    }

    #[test]
    fn loopback_comes_last_between_machines() {
        let peer = member(2, 0, &["127.0.0.1:1", "10.0.0.2:1"]);
        let from = |host| texts(host, &peer, None, &[], Purpose::Control);
        assert_eq!(from(1), ["10.0.0.2:1", "127.0.0.1:1"]);
        assert_eq!(from(2), ["127.0.0.1:1", "10.0.0.2:1"]);
    }

    #[test]
    fn where_rank_0_was_met_comes_after_the_named_addresses_and_before_the_rest() {
        let peer = member(2, 1, &["10.0.0.2:1", "192.168.0.2:3", "0.0.0.0:3"]);
        let order = |reached| texts(1, &peer, Some(reached), &[], Purpose::Control);
        assert_eq!(order("127.0.0.1:9"), ["10.0.0.2:1", "127.0.0.1:9", "192.168.0.2:3"]);
        assert_eq!(order("192.168.0.2:3"), ["10.0.0.2:1", "192.168.0.2:3"]);
    }

    #[test]
    fn link_local_addresses_are_tried_on_every_own_link() {
        let peer = member(2, 0, &["[fe80::2]:1"]);
        let from = |scopes: &[u32]| texts(1, &peer, None, scopes, Purpose::Control);
        assert_eq!(from(&[3, 5]), ["[fe80::2%3]:1", "[fe80::2%5]:1"]);
        assert!(from(&[]).is_empty());
    }
}
