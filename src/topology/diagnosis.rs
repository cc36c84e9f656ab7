//! From what was seen to what is in the way: pure functions, one for each thing that can be looked at.

use raccl_sys::{Error, Provider};

use super::report::{PortInfo, Problem, ProblemKind, Remedy};

/// What the system says about the network interface behind a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct InterfaceFacts {
    /// Its name, if it is known.
    pub(super) name: Option<String>,
    /// Whether it has an IPv4 address of its own; `None` if it cannot be found.
    pub(super) has_ipv4: Option<bool>,
    /// The bridge that it is a member of.
    pub(super) bridge: Option<String>,
}

/// No library.
pub(super) fn no_library(error: &Error, apple: bool) -> Problem {
    let remedies = if apple {
        vec![
            Remedy::run("sw_vers -productVersion", "has to print 26.2 or later"),
            Remedy::run("softwareupdate --list", "lists the updates there are"),
        ]
    } else {
        vec![Remedy::run(
            "sudo apt install libibverbs1 ibverbs-providers",
            "installs the library and its drivers on Debian and Ubuntu",
        )]
    };
    Problem { kind: ProblemKind::NoLibrary, device: None, reason: error.to_string(), remedies }
}

/// A library and no device. `enabled`: what the system says of its switch, if it says something.
pub(super) fn no_devices(provider: Provider, enabled: Option<bool>) -> Problem {
    let enable = Remedy::hint(
        "to enable it: shut down, hold the power button until the startup options appear, choose Options, open \
         Utilities > Terminal, run `rdma_ctl enable`, restart",
    );
    let problem =
        |kind, reason: &str, remedies| Problem { kind, device: None, reason: reason.to_owned(), remedies };
    match (provider, enabled) {
        (Provider::Apple, Some(false)) => problem(
            ProblemKind::Disabled,
            "RDMA over Thunderbolt is disabled on this Mac; it has to be enabled once, from macOS Recovery",
            vec![enable, Remedy::run("rdma_ctl status", "has to print enabled afterwards")],
        ),
        (Provider::Apple, _) => problem(
            ProblemKind::NoDevices,
            "the verbs library is there but lists no RDMA device: this Mac has no Thunderbolt 5 port, or RDMA over \
             Thunderbolt is not enabled on it",
            vec![
                Remedy::run("rdma_ctl status", "has to print enabled"),
                enable,
                Remedy::run(
                    "system_profiler SPThunderboltDataType",
                    "says whether the ports are Thunderbolt 5",
                ),
            ],
        ),
        (Provider::Linux, _) => problem(
            ProblemKind::NoDevices,
            "the verbs library is there but lists no RDMA device: there is no card, or its kernel driver is not loaded",
            vec![
                Remedy::run("ls /sys/class/infiniband", "lists the devices that the kernel has"),
                Remedy::run("lspci | grep -iE 'mellanox|infiniband|rdma'", "lists cards that could be one"),
                Remedy::run(
                    "sudo modprobe rdma_rxe && sudo rdma link add rxe0 type rxe netdev eth0",
                    "makes a device in software on interface eth0",
                ),
            ],
        ),
    }
}

/// A call that the library refused.
pub(super) fn failed(device: Option<&str>, error: &Error) -> Problem {
    Problem {
        kind: ProblemKind::Failed,
        device: device.map(str::to_owned),
        reason: error.to_string(),
        remedies: Vec::new(),
    }
}

/// What keeps a port from being used, if something does.
pub(super) fn port(
    device: &str,
    port: &PortInfo,
    interface: &InterfaceFacts,
    provider: Provider,
) -> Option<Problem> {
    let apple = provider == Provider::Apple;
    let name = interface.name.as_deref().unwrap_or("the interface");
    let problem =
        |kind, reason, remedies| Some(Problem { kind, device: Some(device.to_owned()), reason, remedies });
    if !port.active {
        let mut remedies = vec![Remedy::hint(
            "plug the cable in at both ends (a Thunderbolt 5 cable, directly between the machines), and see that the \
             other machine is awake and has RDMA enabled",
        )];
        remedies.push(if apple {
            Remedy::run("system_profiler SPThunderboltDataType", "shows what is plugged into which port")
        } else {
            Remedy::run(format!("sudo ip link set {name} up"), "switches the interface on")
        });
        return problem(ProblemKind::PortDown, format!("port {} is {}", port.number, port.state), remedies);
    }
    if port.gids.iter().any(|gid| gid.ipv4.is_some()) {
        return None;
    }
    let has = match port.gids.as_slice() {
        [] => "its table of addresses is empty".to_owned(),
        gids => format!(
            "it has only {}",
            gids.iter().map(|gid| gid.gid.to_string()).collect::<Vec<_>>().join(", ")
        ),
    };
    let number = port.number;
    let lacks = format!("port {number} is active but has no IPv4 address for RDMA ({has})");
    let mut remedies = Vec::new();
    if let Some(bridge) = &interface.bridge {
        remedies.push(leave_bridge(name, bridge, apple));
        remedies.push(set_address(name, apple));
        return problem(
            ProblemKind::Bridged,
            format!("{lacks}: {name} is a member of {bridge}, and only the bridge has an address"),
            remedies,
        );
    }
    if interface.has_ipv4 == Some(true) {
        remedies.push(Remedy::hint(
            "after boot or replugging it can take some minutes: ask again; then plug the cable out and in",
        ));
        return problem(
            ProblemKind::AddressPending,
            format!("{lacks}, although {name} has one: the driver has not taken it over yet"),
            remedies,
        );
    }
    if apple {
        remedies.push(Remedy::run(
            "ifconfig bridge0 | grep member",
            format!(
                "lists {name} if it is a member of the Thunderbolt bridge; then the next command takes it out"
            ),
        ));
        remedies.push(leave_bridge(name, "bridge0", apple));
    }
    remedies.push(set_address(name, apple));
    problem(ProblemKind::NoAddress, format!("{lacks}: {name} needs one of its own"), remedies)
}

fn leave_bridge(name: &str, bridge: &str, apple: bool) -> Remedy {
    let command = if apple {
        format!("sudo ifconfig {bridge} deletem {name}")
    } else {
        format!("sudo ip link set {name} nomaster")
    };
    Remedy::run(command, format!("takes {name} out of the bridge"))
}

/// Each cable is a network of its own, so that its two ends find each other over it and over nothing else.
fn set_address(name: &str, apple: bool) -> Remedy {
    let what =
        "gives it an address; the other end of the cable gets 192.168.100.2, other cables another network";
    let command = if apple {
        format!("sudo ifconfig {name} inet 192.168.100.1 netmask 255.255.255.252")
    } else {
        format!("sudo ip address add 192.168.100.1/30 dev {name}")
    };
    Remedy::run(command, what)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::{super::report::GidInfo, *};

    fn a_port(active: bool, gids: &[&str]) -> PortInfo {
        let gid = |(index, text): (usize, &&str)| {
            let gid: Ipv6Addr = text.parse().expect("an address");
            GidInfo { index: index as u8, gid, ipv4: gid.to_ipv4_mapped() }
        };
        PortInfo {
            number: 1,
            active,
            state: if active { "active" } else { "down" }.to_owned(),
            mtu: 4096,
            max_message: 1 << 24,
            gids: gids.iter().enumerate().map(gid).collect(),
        }
    }

    fn behind(has_ipv4: Option<bool>, bridge: Option<&str>) -> InterfaceFacts {
        InterfaceFacts { name: Some("en5".to_owned()), has_ipv4, bridge: bridge.map(str::to_owned) }
    }

    fn commands(problem: &Problem) -> Vec<&str> {
        problem.remedies.iter().filter_map(|remedy| remedy.command.as_deref()).collect()
    }

    #[test]
    fn a_port_with_a_mapped_address_has_no_problem_wherever_it_stands() {
        for gids in [
            &["fe80::1", "::ffff:10.0.0.1"][..],
            &["::ffff:10.0.0.1"],
            &["fe80::1", "fe80::2", "::ffff:10.0.0.1"],
        ] {
            assert_eq!(port("rdma_en5", &a_port(true, gids), &behind(None, None), Provider::Apple), None);
        }
    }

    #[test]
    fn each_way_to_lack_an_address_has_its_own_name_and_remedy() {
        let lacking = a_port(true, &["fe80::1"]);
        for (facts, kind, command) in [
            (behind(Some(false), Some("bridge0")), ProblemKind::Bridged, "sudo ifconfig bridge0 deletem en5"),
            (behind(Some(false), None), ProblemKind::NoAddress, "sudo ifconfig en5 inet 192.168.100.1"),
            (behind(None, None), ProblemKind::NoAddress, "ifconfig bridge0 | grep member"),
        ] {
            let problem = port("rdma_en5", &lacking, &facts, Provider::Apple).expect("a problem");
            assert_eq!(problem.kind, kind);
            assert!(commands(&problem).iter().any(|one| one.starts_with(command)), "{problem:?}");
            assert!(problem.reason.contains("fe80::1"), "{problem}");
        }
        let pending =
            port("rdma_en5", &lacking, &behind(Some(true), None), Provider::Apple).expect("a problem");
        assert_eq!(pending.kind, ProblemKind::AddressPending);
        let linux =
            port("mlx5_0", &lacking, &behind(Some(false), Some("br0")), Provider::Linux).expect("a problem");
        assert_eq!(commands(&linux)[0], "sudo ip link set en5 nomaster");
    }

    #[test]
    fn a_port_that_is_down_is_said_to_be_down_whatever_else_it_lacks() {
        for provider in [Provider::Apple, Provider::Linux] {
            let problem =
                port("rdma_en5", &a_port(false, &[]), &behind(Some(false), Some("bridge0")), provider)
                    .expect("a problem");
            assert_eq!(problem.kind, ProblemKind::PortDown);
            assert!(problem.to_string().starts_with("rdma_en5: port 1 is down"), "{problem}");
        }
    }

    #[test]
    fn no_devices_and_disabled_are_told_apart_where_the_system_says_so() {
        let kinds = [Some(false), Some(true), None].map(|enabled| no_devices(Provider::Apple, enabled).kind);
        assert_eq!(kinds, [ProblemKind::Disabled, ProblemKind::NoDevices, ProblemKind::NoDevices]);
        for enabled in [Some(false), None] {
            let problem = no_devices(Provider::Apple, enabled);
            assert!(problem.remedies.iter().any(|remedy| remedy.what.contains("rdma_ctl enable")));
        }
        assert!(commands(&no_devices(Provider::Linux, None)).iter().any(|one| one.contains("modprobe")));
    }
}
