//! What the system knows about RDMA devices that the verbs library does not say.
#![forbid(unsafe_code)]

#[cfg(target_vendor = "apple")]
pub(crate) use apple::*;
#[cfg(not(target_vendor = "apple"))]
pub(crate) use linux::*;

/// From Linux's files in `/sys/class`.
#[cfg(not(target_vendor = "apple"))]
mod linux {
    use std::{fs, path::Path};

    /// Linux has no switch for all of RDMA.
    pub(crate) fn is_enabled() -> Option<bool> {
        None
    }

    /// The network interface that an RDMA device belongs to.
    pub(crate) fn interface_of(device: &str) -> Option<String> {
        let name = plain(device)?;
        let file = format!("/sys/class/infiniband/{name}/ports/1/gid_attrs/ndevs/0");
        let text = fs::read_to_string(file).ok()?;
        Some(text.trim().to_owned()).filter(|name| !name.is_empty())
    }

    /// Whether there is a network interface of that name.
    pub(crate) fn interface_exists(name: &str) -> bool {
        plain(name).is_some_and(|name| Path::new("/sys/class/net").join(name).exists())
    }

    /// The bridge that a network interface is a member of.
    pub(crate) fn bridge_of(interface: &str) -> Option<String> {
        let master = fs::read_link(format!("/sys/class/net/{}/master", plain(interface)?)).ok()?;
        let name = master.file_name()?.to_str()?;
        Path::new("/sys/class/net").join(name).join("bridge").exists().then(|| name.to_owned())
    }

    /// A name that is one part of a path.
    fn plain(name: &str) -> Option<&str> {
        (!name.contains('/') && name != "." && name != ".." && !name.is_empty()).then_some(name)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn loopback_is_there_and_in_no_bridge() {
            assert!(interface_exists("lo"));
            assert_eq!(bridge_of("lo"), None);
            for name in ["", ".", "..", "lo/..", "no such interface"] {
                assert!(!interface_exists(name), "{name}");
            }
        }
    }
}

/// From macOS's tools and interface flags.
#[cfg(target_vendor = "apple")]
mod apple {
    use std::process::Command;

    use super::super::interfaces;

    /// What the system's own tool says of its switch; `None` if there is no such tool or it says something else.
    pub(crate) fn is_enabled() -> Option<bool> {
        let output = Command::new("rdma_ctl").arg("status").output().ok()?;
        match String::from_utf8_lossy(&output.stdout).trim() {
            "enabled" => Some(true),
            "disabled" => Some(false),
            _ => None,
        }
    }

    /// The network interface that an RDMA device belongs to.
    pub(crate) fn interface_of(device: &str) -> Option<String> {
        device.strip_prefix("rdma_").map(str::to_owned)
    }

    /// Whether there is a network interface of that name.
    pub(crate) fn interface_exists(name: &str) -> bool {
        interfaces::flags().is_ok_and(|list| list.iter().any(|(known, _)| known == name))
    }

    /// The bridge that a network interface is a member of: a bridge makes its members listen to everything, which on a
    /// Thunderbolt interface nothing else does.
    pub(crate) fn bridge_of(interface: &str) -> Option<String> {
        let flags = interfaces::flags().ok()?;
        let listens = |bits: libc::c_uint| bits & libc::IFF_PROMISC as libc::c_uint != 0;
        flags.iter().find(|(name, bits)| name == interface && listens(*bits))?;
        flags.iter().map(|(name, _)| name).find(|name| name.starts_with("bridge")).cloned()
    }
}
