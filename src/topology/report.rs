//! The report on this machine's RDMA devices: plain data, for people and for programs.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde::Serialize;

use super::CableLayout;
use crate::config::DeviceMatrix;

/// What the verbs library sees on this machine, and what keeps RDMA from working if something does.
///
/// Made by [`Config::device_report`](crate::Config::device_report). It is plain data that can be encoded with serde; the
/// command `raccl devices` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Whether a link can be made: at least one port is active and has an address and, where a matrix and a rank are given,
    /// so have all devices that it names for the rank.
    pub available: bool,
    /// The library that was loaded, by the name or path it was found under.
    pub library: Option<String>,
    /// Whose rules the library follows: `apple` or `linux`.
    pub provider: Option<&'static str>,
    /// The devices, in the library's order.
    pub devices: Vec<DeviceInfo>,
    /// The rank of which the matrix is looked at, if there is a matrix.
    pub rank: Option<usize>,
    /// The cables of the matrix, if there is one; of the rank alone where it is known.
    pub cables: Vec<MatrixCable>,
    /// The shape that the cables of the whole matrix make.
    pub layout: Option<CableLayout>,
    /// What is in the way, the most general first.
    pub problems: Vec<Problem>,
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name, such as `rdma_en5`.
    pub name: String,
    /// The network interface that it belongs to, if that is known.
    pub interface: Option<String>,
    /// Whether it has a port by which peers can be reached.
    pub usable: bool,
    /// What it has of everything, if the library tells.
    pub limits: Option<DeviceLimits>,
    /// Its ports, as far as it could be asked.
    pub ports: Vec<PortInfo>,
}

/// What a device has, counted over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeviceLimits {
    /// Queue pairs. On Apple's driver one fewer can be used.
    pub queue_pairs: usize,
    /// Protection domains.
    pub domains: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Entries of a completion queue.
    pub completions: usize,
    /// Memory regions.
    pub regions: usize,
    /// Work requests of a queue. Apple counts in frames of 4 KiB.
    pub work_requests: usize,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it can carry messages now.
    pub active: bool,
    /// Its state in words, such as `active` or `down`.
    pub state: String,
    /// The path MTU in use, in bytes.
    pub mtu: u32,
    /// The largest message, in bytes.
    pub max_message: u32,
    /// The addresses that it has.
    pub gids: Vec<GidInfo>,
}

/// An entry of a port's table of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GidInfo {
    /// Where it stands in the table.
    pub index: u8,
    /// The address.
    pub gid: Ipv6Addr,
    /// The IPv4 address that it stands for; one such entry is needed.
    pub ipv4: Option<Ipv4Addr>,
}

/// A cable of the device matrix, seen from one of its ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MatrixCable {
    /// The rank at this end.
    pub rank: usize,
    /// Its device.
    pub device: String,
    /// The rank at the other end.
    pub peer: usize,
    /// The other end's device.
    pub peer_device: String,
    /// Whether the device is here and usable; `None` where nothing says that this machine is `rank`'s.
    pub usable: Option<bool>,
}

/// Something that keeps RDMA, or one device, from working.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// What kind of problem it is.
    pub kind: ProblemKind,
    /// The device that has it, or none if it is the machine's.
    pub device: Option<String>,
    /// What is wrong, in words.
    pub reason: String,
    /// What would remove it, in the order in which to try.
    pub remedies: Vec<Remedy>,
}

/// What can keep RDMA from working.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProblemKind {
    /// No verbs library can be loaded.
    NoLibrary,
    /// The library lists no device.
    NoDevices,
    /// RDMA is switched off on this machine.
    Disabled,
    /// A port has no cable, or the other end is asleep.
    PortDown,
    /// The port's network interface is a member of a bridge, so it has no address of its own.
    Bridged,
    /// The port's network interface has no IPv4 address.
    NoAddress,
    /// The interface has an IPv4 address which the port does not show yet.
    AddressPending,
    /// The library refused a call.
    Failed,
    /// The matrix names a device that is not here.
    UnknownDevice,
}

/// Something to try.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Remedy {
    /// What it does.
    pub what: String,
    /// The command that does it, if a command does.
    pub command: Option<String>,
}

impl DeviceReport {
    /// Adds the cables of a matrix and, if it is known which rank this machine has, whether its devices are here and usable.
    pub(crate) fn add_matrix(&mut self, matrix: &DeviceMatrix, rank: Option<usize>) {
        self.rank = rank;
        self.layout = Some(CableLayout::of(matrix));
        for one in 0..matrix.size() {
            for other in 0..matrix.size() {
                let wanted = rank.map_or(one < other, |rank| one == rank);
                let ends = matrix.cables(one, other).iter().zip(matrix.cables(other, one));
                for (device, peer_device) in ends.filter(|_| wanted) {
                    let usable =
                        rank.map(|_| self.devices.iter().any(|here| here.usable && here.name == *device));
                    self.cables.push(MatrixCable {
                        rank: one,
                        device: device.clone(),
                        peer: other,
                        peer_device: peer_device.clone(),
                        usable,
                    });
                }
            }
        }
        self.available &= self.cables.iter().all(|cable| cable.usable != Some(false));
        if rank.is_some() && self.library.is_some() {
            self.add_missing();
        }
    }

    /// Adds the problem of each device that the cables need and that is not here.
    fn add_missing(&mut self) {
        let there: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let mut missing: Vec<&MatrixCable> =
            self.cables.iter().filter(|cable| !there.contains(&cable.device.as_str())).collect();
        missing.dedup_by_key(|cable| &cable.device);
        let problems: Vec<Problem> = missing
            .into_iter()
            .map(|MatrixCable { rank, device, peer, .. }| Problem {
                kind: ProblemKind::UnknownDevice,
                device: Some(device.clone()),
                reason: format!(
                    "the matrix says that rank {rank} reaches rank {peer} by {device}, but this machine has {}",
                    if there.is_empty() { "no device".to_owned() } else { there.join(", ") }
                ),
                remedies: vec![Remedy::hint(
                    "correct the device matrix (RACCL_DEVICES), or look whether the ranks run on the machines it was \
                     written for",
                )],
            })
            .collect();
        self.problems.extend(problems);
    }
}

impl Remedy {
    /// Something that no command does.
    pub(crate) fn hint(what: impl Into<String>) -> Remedy {
        Remedy { what: what.into(), command: None }
    }

    /// A command and what it does.
    pub(crate) fn run(command: impl Into<String>, what: impl Into<String>) -> Remedy {
        Remedy { what: what.into(), command: Some(command.into()) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.device {
            write!(f, "{device}: ")?;
        }
        f.write_str(&self.reason)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.command {
            Some(command) => write!(f, "{command}   # {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(names: &[&str]) -> DeviceReport {
        let device = |name: &&str| DeviceInfo {
            name: (*name).to_owned(),
            interface: None,
            usable: true,
            limits: None,
            ports: Vec::new(),
        };
        DeviceReport {
            available: true,
            library: Some("lib".to_owned()),
            provider: Some("apple"),
            devices: names.iter().map(device).collect(),
            rank: None,
            cables: Vec::new(),
            layout: None,
            problems: Vec::new(),
        }
    }

    fn matrix() -> DeviceMatrix {
        DeviceMatrix::parse(r#"[[null, ["a", "b"], null], [["c", "d"], null, "e"], [null, "f", null]]"#)
            .expect("well formed")
    }

    #[test]
    fn without_a_rank_every_cable_is_listed_once() {
        let mut report = report(&[]);
        report.add_matrix(&matrix(), None);
        let ends: Vec<(usize, &str, usize, &str)> = report
            .cables
            .iter()
            .map(|cable| (cable.rank, cable.device.as_str(), cable.peer, cable.peer_device.as_str()))
            .collect();
        assert_eq!(ends, [(0, "a", 1, "c"), (0, "b", 1, "d"), (1, "e", 2, "f")]);
        assert!(report.cables.iter().all(|cable| cable.usable.is_none()) && report.problems.is_empty());
    }

    #[test]
    fn with_a_rank_its_own_cables_are_checked() {
        let mut report = report(&["c", "d"]);
        report.add_matrix(&matrix(), Some(1));
        let usable: Vec<Option<bool>> = report.cables.iter().map(|cable| cable.usable).collect();
        assert_eq!(usable, [Some(true), Some(true), Some(false)]);
        assert!(!report.available);
        assert_eq!(report.problems.len(), 1);
        let text = report.problems[0].to_string();
        assert!(
            text.contains("rank 1 reaches rank 2 by e") && text.contains("this machine has c, d"),
            "{text}"
        );
    }
}
