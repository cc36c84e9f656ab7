//! Which addresses can be reached without a router.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ptr::NonNull,
};

/// Whether `peer` is on the network of one of this machine's interfaces. False when the interfaces cannot be listed.
pub(crate) fn on_a_local_network(peer: IpAddr) -> bool {
    let peer = peer.to_canonical();
    if peer.is_loopback() {
        return true;
    }
    match networks() {
        Ok(networks) => networks.iter().any(|&(address, mask)| same_network(address, peer, mask)),
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

/// Address and mask of every interface.
fn networks() -> std::io::Result<Vec<(IpAddr, IpAddr)>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: getifaddrs writes the head of a list that it allocated to `first`.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let list = List(first);
    let mut networks = Vec::new();
    let mut next = NonNull::new(list.0);
    while let Some(entry) = next {
        // SAFETY: the list is well formed and lives until `list` is dropped.
        let entry = unsafe { entry.as_ref() };
        let address = ip_of(entry.ifa_addr);
        let mask = ip_of(entry.ifa_netmask);
        networks.extend(address.zip(mask));
        next = NonNull::new(entry.ifa_next);
    }
    Ok(networks)
}

struct List(*mut libc::ifaddrs);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the head came from getifaddrs and is freed only here.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

/// The IP address in a socket address that getifaddrs returned; `None` for null and for other families.
fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and getifaddrs returns at least a family.
    let family = unsafe { (*address).sa_family };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that this is a sockaddr_in.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is a sockaddr_in6.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
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
        let loopback = networks().unwrap().into_iter().find(|(address, _)| *address == ip("127.0.0.1"));
        assert_eq!(loopback, Some((ip("127.0.0.1"), ip("255.0.0.0"))));
    }

    #[test]
    fn a_documentation_address_is_not_local() {
        assert!(!on_a_local_network(ip("203.0.113.9")));
    }
}
