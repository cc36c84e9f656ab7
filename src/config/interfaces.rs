//! From what the user calls an interface to the addresses it stands for.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use super::parse;
use crate::os::interfaces::Interface;

/// The addresses, with port 0, that `names` stand for on a machine with these interfaces. Each name is an address, an
/// interface's name or a network in the form `address/bits`.
pub(super) fn addresses(names: &[String], machine: &[Interface]) -> Result<Vec<SocketAddr>, String> {
    let mut found: Vec<SocketAddr> = Vec::new();
    for name in names {
        for address in addresses_of(name.trim(), machine)? {
            if !found.contains(&address) {
                found.push(address);
            }
        }
    }
    Ok(found)
}

fn addresses_of(name: &str, machine: &[Interface]) -> Result<Vec<SocketAddr>, String> {
    if let Some((network, bits)) = name.split_once('/') {
        let inside = network_test(network, bits)
            .ok_or_else(|| format!("{:?} is no network such as 10.0.0.0/24", parse::shorten(name)))?;
        return found(name, machine, |interface| inside(interface.address.ip()));
    }
    if let Some((ip, scope)) = parse::scoped_address(name) {
        return literal(name, ip, scope, machine);
    }
    found(name, machine, |interface| interface.name == name)
}

fn literal(
    name: &str,
    ip: IpAddr,
    scope: Option<&str>,
    machine: &[Interface],
) -> Result<Vec<SocketAddr>, String> {
    let IpAddr::V6(v6) = ip else { return Ok(vec![SocketAddr::new(ip, 0)]) };
    let scope = match scope.map(|scope| (scope, scope.parse())) {
        None => 0,
        Some((_, Ok(number))) => number,
        Some((interface, Err(_))) => {
            let scopes = machine.iter().filter(|one| one.name == interface).filter_map(scope_of);
            scopes.max().ok_or_else(|| missing(interface, machine))?
        }
    };
    if v6.is_unicast_link_local() && scope == 0 {
        return Err(format!("{name} is a link-local address; say on which interface, as in {name}%en5"));
    }
    Ok(vec![SocketAddrV6::new(v6, 0, 0, scope).into()])
}

fn scope_of(interface: &Interface) -> Option<u32> {
    match interface.address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => Some(v6.scope_id()),
        _ => None,
    }
}

/// The machine's addresses that are asked for, those that every peer can use first: IPv4, IPv6, link-local IPv6.
fn found(
    name: &str,
    machine: &[Interface],
    wanted: impl Fn(&Interface) -> bool,
) -> Result<Vec<SocketAddr>, String> {
    let wanted = machine.iter().filter(|interface| wanted(interface));
    let mut addresses: Vec<SocketAddr> = wanted.map(|interface| interface.address).collect();
    addresses.sort_by_key(|address| match address {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(v6) => 1 + u8::from(v6.ip().is_unicast_link_local()),
    });
    if addresses.is_empty() { Err(missing(name, machine)) } else { Ok(addresses) }
}

fn missing(name: &str, machine: &[Interface]) -> String {
    let known = machine.iter().map(|interface| format!("{} {}", interface.name, interface.address.ip()));
    let known = known.collect::<Vec<_>>().join(", ");
    format!("this machine has nothing called {:?} that is up; it has {known}", parse::shorten(name))
}

fn network_test(network: &str, bits: &str) -> Option<impl Fn(IpAddr) -> bool> {
    let network: IpAddr = network.parse().ok()?;
    let bits: u32 = bits.parse().ok()?;
    let longest = if network.is_ipv4() { 32 } else { 128 };
    if bits > longest {
        return None;
    }
    let prefix = move |ip: IpAddr| match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()).checked_shr(32 - bits.min(32)).unwrap_or(0),
        IpAddr::V6(v6) => v6.to_bits().checked_shr(128 - bits).unwrap_or(0),
    };
    Some(move |ip: IpAddr| ip.is_ipv4() == network.is_ipv4() && prefix(ip) == prefix(network))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn machine() -> Vec<Interface> {
        let v6 = |text: &str, scope| SocketAddrV6::new(text.parse().expect("v6"), 0, 0, scope).into();
        let v4 = |text: &str| SocketAddr::new(text.parse().expect("v4"), 0);
        [
            ("lo", v4("127.0.0.1")),
            ("en5", v6("fe80::5", 5)),
            ("en5", v6("fd00::5", 0)),
            ("en5", v4("10.0.0.5")),
            ("en6", v4("10.0.1.6")),
        ]
        .map(|(name, address)| Interface { name: name.to_owned(), address, mask: None })
        .to_vec()
    }

    fn look_up(names: &[&str]) -> Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        Ok(addresses(&names, &machine())?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn names_addresses_and_networks_give_addresses_once() {
        assert_eq!(
            look_up(&["en5"]),
            Ok(vec!["10.0.0.5:0".into(), "[fd00::5]:0".into(), "[fe80::5%5]:0".into()])
        );
        assert_eq!(look_up(&["10.0.0.5", "10.0.0.0/24"]), Ok(vec!["10.0.0.5:0".into()]));
        assert_eq!(look_up(&["10.0.0.0/8"]), Ok(vec!["10.0.0.5:0".into(), "10.0.1.6:0".into()]));
        assert_eq!(look_up(&["0.0.0.0/0"]).map(|all| all.len()), Ok(3));
        assert_eq!(look_up(&["fd00::/64"]), Ok(vec!["[fd00::5]:0".into()]));
        assert_eq!(look_up(&["fe80::9%en5"]), Ok(vec!["[fe80::9%5]:0".into()]));
        assert_eq!(look_up(&["fe80::9%7"]), Ok(vec!["[fe80::9%7]:0".into()]));
    }

    #[test]
    fn what_is_not_there_is_refused_with_what_is() {
        assert!(look_up(&["en7"]).expect_err("none").contains("en6 10.0.1.6"));
        assert!(look_up(&["192.168.0.0/16"]).is_err());
        assert!(look_up(&["10.0.0.0/33"]).is_err());
        assert!(look_up(&["fe80::9"]).expect_err("no scope").contains("fe80::9%en5"));
        assert!(look_up(&["fe80::9%en6"]).is_err());
    }

    proptest! {
        #[test]
        fn no_name_panics(name in any::<String>(), near in "[0-9a-f:.]{1,12}[%/]?[a-z0-9]{0,4}") {
            let _ = look_up(&[&name]);
            let _ = look_up(&[&near]);
        }
    }
}
