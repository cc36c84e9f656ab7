//! What can go wrong, in words that say where and what to do about it.

use std::fmt;
use std::path::PathBuf;

use crate::errno::Errno;
use crate::loader::Provider;
use crate::port::{Gid, PortState};

/// Why a verbs call, or the loading of the library, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No verbs library could be loaded.
    #[error("no RDMA verbs library could be loaded: {}; {}", Listed(tried), missing_library_advice())]
    NoLibrary {
        /// Each name that was tried, in order.
        tried: Vec<Attempt>,
    },

    /// The library is there but lacks functions that nothing works without.
    #[error(
        "{} is no usable verbs library: it does not export {}; give the path of another, or update the system",
        library.display(), symbols.join(", ")
    )]
    MissingSymbols {
        /// The library.
        library: PathBuf,
        /// The functions it lacks.
        symbols: Vec<&'static str>,
    },

    /// There is no device of that name.
    #[error("there is no RDMA device {name}; {}", available_devices(available))]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The names there are.
        available: Vec<String>,
    },

    /// The port of a device is not active, so nothing can be allocated on it.
    #[error(
        "RDMA device {device}: port {port} is {state}, not active; check that the cable is plugged in at both \
         ends and that the other machine is awake and has RDMA enabled"
    )]
    PortNotActive {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: PortState,
    },

    /// The GID table has no IPv4-mapped entry, without which no peer can be addressed.
    #[error(
        "RDMA device {device}: port {port} has no IPv4-mapped GID ({}); give the interface an IPv4 address of its \
         own and take it out of any bridge, and after boot or replugging allow it a minute",
        gids_present(present)
    )]
    NoIpv4Gid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The entries there are.
        present: Vec<Gid>,
    },

    /// A verbs call failed.
    #[error("{verb} failed on RDMA device {device}{}: {errno}{}", on_port(*port), advice(verb, *errno, *provider))]
    Verb {
        /// The C function.
        verb: &'static str,
        /// The device.
        device: String,
        /// The port, where one is concerned.
        port: Option<u8>,
        /// Whose rules the library follows.
        provider: Provider,
        /// The error number.
        #[source]
        errno: Errno,
    },

    /// The library did something that its interface does not allow.
    #[error(
        "{verb} misbehaved on RDMA device {device}: {what}; the verbs library is broken or of another version"
    )]
    Protocol {
        /// The C function.
        verb: &'static str,
        /// The device.
        device: String,
        /// What it did.
        what: String,
    },

    /// A work request completed with an error.
    #[error(
        "a work request on RDMA device {device} completed with {status} (vendor error {vendor:#x}); {}",
        completion_advice(status)
    )]
    Completion {
        /// The device.
        device: String,
        /// The status by its name in the header.
        status: &'static str,
        /// The driver's own word about it.
        vendor: u32,
    },

    /// Memory could not be had from the operating system.
    #[error("cannot allocate {bytes} bytes of memory for RDMA; use fewer or smaller buffers, or free memory")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// The reason.
        #[source]
        source: std::io::Error,
    },

    /// An argument that no driver would take.
    #[error("{what}")]
    Argument {
        /// What is wrong, with the values.
        what: String,
    },
}

/// One name under which the library was looked for.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// The name or path.
    pub name: PathBuf,
    /// What the loader said.
    pub reason: String,
}

/// Attempts, one after another.
struct Listed<'a>(&'a [Attempt]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none is known for this system");
        }
        for (index, attempt) in self.0.iter().enumerate() {
            let separator = if index == 0 { "tried " } else { ", then " };
            write!(f, "{separator}{} ({})", attempt.name.display(), attempt.reason)?;
        }
        Ok(())
    }
}

fn missing_library_advice() -> &'static str {
    if cfg!(target_vendor = "apple") {
        "RDMA over Thunderbolt needs macOS 26.2 or later"
    } else {
        "install libibverbs and its providers (Debian: libibverbs1 ibverbs-providers), or give a path"
    }
}

fn available_devices(names: &[String]) -> String {
    if names.is_empty() {
        let why = if cfg!(target_vendor = "apple") {
            "it needs a Mac with Thunderbolt 5, and `rdma_ctl enable` once from macOS Recovery"
        } else {
            "load the driver of the card"
        };
        format!("there is no RDMA device at all: {why}")
    } else {
        format!("there are {}", names.join(", "))
    }
}

fn gids_present(present: &[Gid]) -> String {
    if present.is_empty() {
        return "its table is empty".into();
    }
    let list: Vec<_> = present.iter().map(Gid::to_string).collect();
    format!("only {}", list.join(", "))
}

fn on_port(port: Option<u8>) -> String {
    port.map(|port| format!(" port {port}")).unwrap_or_default()
}

/// What a failure of that call with that error usually means, and what to do.
fn advice(verb: &str, errno: Errno, provider: Provider) -> &'static str {
    let apple = provider == Provider::Apple;
    match (verb, errno.name().unwrap_or_default()) {
        ("ibv_create_qp", "EBUSY") => {
            ": all its queue pairs are in use, counted over every process; end other RDMA programs, and restart the \
             machine where killed ones have left theirs behind"
        }
        ("ibv_create_qp", "EOPNOTSUPP") if apple => {
            ": this driver has unreliable connected (UC) queue pairs only"
        }
        ("ibv_alloc_pd", "ENODATA") if apple => {
            ": its protection domains are used up, counted over every process, or its port is down; end other RDMA \
             programs, and restart the machine where killed ones have left theirs behind"
        }
        ("ibv_query_gid", "ENODATA") => {
            ": its GID table is empty; check that the cable is plugged in and the interface up"
        }
        ("ibv_modify_qp", "EINVAL") => {
            ": the driver refuses the address; the local GID has to be the IPv4-mapped one of this device, so look \
             whether the interface has lost its address"
        }
        ("ibv_modify_qp", "ETIMEDOUT") => {
            ": the peer's address is not reachable over this cable; check that the device matrix names the devices \
             that the cable really joins"
        }
        ("ibv_modify_qp", "EADDRNOTAVAIL") => ": the interface has lost the address of its GID; set it again",
        ("ibv_modify_qp", "ECONNREFUSED") => ": the peer refused; see that it runs and has RDMA enabled",
        (_, "EHOSTUNREACH") if apple => {
            ": the peer cannot be reached; allow this program (or its terminal) under System Settings, Privacy & \
             Security, Local Network"
        }
        (_, "EHOSTUNREACH") => ": the peer cannot be reached; check addresses and routes",
        ("ibv_reg_mr", "ENOMEM") if !apple => ": the limit on locked memory may be too low; see `ulimit -l`",
        ("ibv_reg_mr", "ENOMEM") => ": its memory regions are used up, counted over every process; use fewer",
        ("ibv_post_recv" | "ibv_post_send", "ENOMEM") => ": the queue is full; post less ahead",
        ("ibv_open_device", "EPERM" | "EACCES") => ": no permission; look at the device's access rights",
        _ => "",
    }
}

fn completion_advice(status: &str) -> &'static str {
    match status {
        "IBV_WC_LOC_LEN_ERR" => "the message does not fit the receive posted for it, in length or in frames",
        "IBV_WC_LOC_PROT_ERR" => "its memory is not registered, or no longer",
        "IBV_WC_WR_FLUSH_ERR" => "an earlier error has put the queue pair out of action",
        "IBV_WC_RETRY_EXC_ERR" => "the peer does not answer; see whether it runs and the cable is plugged in",
        "IBV_WC_RNR_RETRY_EXC_ERR" => "the peer has posted no receive",
        _ => "the queue pair cannot be used any more",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_names_device_port_number_and_remedy() {
        let error = Error::Verb {
            verb: "ibv_modify_qp",
            device: "rdma_en5".into(),
            port: Some(1),
            provider: Provider::Apple,
            errno: Errno::new(Provider::Apple, -60),
        };
        let text = error.to_string();
        for part in ["ibv_modify_qp", "rdma_en5", "port 1", "60", "ETIMEDOUT", "device matrix"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
        let source = std::error::Error::source(&error).map(|source| source.to_string());
        assert_eq!(source.as_deref(), Some("errno 60 ETIMEDOUT"));
    }

    #[test]
    fn an_unknown_device_lists_those_there_are() {
        let error = Error::UnknownDevice {
            name: "rdma_en9".into(),
            available: vec!["rdma_en2".into(), "rdma_en3".into()],
        };
        assert_eq!(error.to_string(), "there is no RDMA device rdma_en9; there are rdma_en2, rdma_en3");
    }
}
