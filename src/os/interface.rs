//! Which addresses can be reached without a router.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::interfaces::{self, Interface};

/// Whether `peer` is on the network of one of this machine's interfaces. False when the interfaces cannot be listed.
pub(crate) fn on_a_local_network(peer: IpAddr) -> bool {
    let peer = peer.to_canonical();
    if peer.is_loopback() {
        return true;
    }
    let reaches = |interface: &Interface| {
        interface.mask.is_some_and(|mask| same_network(interface.address.ip(), peer, mask))
    };
    match interfaces::list() {
        Ok(interfaces) => interfaces.iter().any(reaches),
        Err(error) => {
            tracing::debug!(%error, "the network interfaces cannot be listed");
            false
        }
    }
}

fn same_network(a: IpAddr, b: IpAddr, mask: IpAddr) -> bool {
    match (a, b, mask) {
        (IpAddr::V4(a), IpAddr::V4(b), IpAddr::V4(mask)) => {
            mask != Ipv4Addr::UNSPECIFIED && (a.to_bits() ^ b.to_bits()) & mask.to_bits() == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b), IpAddr::V6(mask)) => {
            mask != Ipv6Addr::UNSPECIFIED && (a.to_bits() ^ b.to_bits()) & mask.to_bits() == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_mask_decides_who_is_a_neighbour() {
        assert!(same_network(ip("10.1.2.3"), ip("10.1.9.9"), ip("255.255.0.0")));
        assert!(!same_network(ip("10.1.2.3"), ip("10.2.2.3"), ip("255.255.0.0")));
        assert!(same_network(ip("fe80::1"), ip("fe80::2"), ip("ffff:ffff:ffff:ffff::")));
        assert!(!same_network(ip("fe80::1"), ip("fd80::2"), ip("ffff:ffff:ffff:ffff::")));
        assert!(!same_network(ip("10.1.2.3"), ip("fe80::2"), ip("255.255.0.0")));
    }

    #[test]
    fn an_empty_mask_makes_nobody_a_neighbour() {
        assert!(!same_network(ip("10.1.2.3"), ip("10.1.2.4"), ip("0.0.0.0")));
    }

    #[test]
    fn loopback_is_local_and_found_among_the_interfaces() {
        assert!(on_a_local_network(ip("127.0.0.1")));
        assert!(on_a_local_network(ip("::1")));
        assert!(on_a_local_network(ip("::ffff:127.0.0.1")));
        let interfaces = interfaces::list().unwrap();
        let loopback = interfaces.iter().find(|interface| interface.address.ip() == ip("127.0.0.1"));
        assert_eq!(loopback.and_then(|interface| interface.mask), Some(ip("255.0.0.0")));
    }

    #[test]
    fn a_documentation_address_is_not_local() {
        assert!(!on_a_local_network(ip("203.0.113.9")));
    }
}
