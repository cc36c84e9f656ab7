//! Asking the verbs library and the system what there is.

use std::{collections::HashSet, path::Path};

use raccl_sys::{Context, Error, Library, PortState, Provider};

use super::{
    diagnosis::{self, InterfaceFacts},
    report::{DeviceInfo, DeviceLimits, DeviceReport, GidInfo, PortInfo, Problem},
};
use crate::{config::Config, error::Result as ConfigResult, os};

impl Config {
    /// Asks the verbs library of this configuration (or the system's) which RDMA devices there are, and finds out what keeps
    /// RDMA from working if something does. With a device matrix, its cables are compared with the devices. Opens devices for
    /// a moment and allocates nothing on them.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if the device matrix cannot be read or does not have the rank. That there is no
    /// library or no device is no error but a [`Problem`] of the report.
    ///
    /// ```
    /// let report = raccl::Config::new().verbs_library("/nowhere/librdma.dylib").device_report()?;
    /// assert!(!report.available);
    /// assert_eq!(report.problems[0].kind, raccl::ProblemKind::NoLibrary);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn device_report(&self) -> ConfigResult<DeviceReport> {
        let (matrix, rank, library) = self.device_settings()?;
        let mut report = DeviceReport::survey(library);
        if let Some(matrix) = matrix {
            report.add_matrix(&matrix, rank);
        }
        Ok(report)
    }
}

impl DeviceReport {
    /// Asks the library at `path`, or the system's own.
    fn survey(path: Option<&Path>) -> DeviceReport {
        let mut report = DeviceReport {
            available: false,
            library: None,
            provider: None,
            devices: Vec::new(),
            rank: None,
            cables: Vec::new(),
            layout: None,
            problems: Vec::new(),
        };
        let library = match Library::load(path) {
            Ok(library) => library,
            Err(error) => {
                report.problems.push(diagnosis::no_library(&error, cfg!(target_vendor = "apple")));
                return report;
            }
        };
        report.library = Some(library.name().display().to_string());
        report.provider = Some(match library.provider() {
            Provider::Apple => "apple",
            Provider::Linux => "linux",
        });
        let devices = match library.devices() {
            Ok(devices) if devices.is_empty() => {
                report.problems.push(diagnosis::no_devices(library.provider(), os::rdma::is_enabled()));
                return report;
            }
            Ok(devices) => devices,
            Err(error) => {
                report.problems.push(diagnosis::failed(None, &error));
                return report;
            }
        };
        let with_ipv4 = interfaces_with_ipv4();
        for device in devices.iter() {
            let interface = interface(device.name(), library.provider(), with_ipv4.as_ref());
            let mut info = DeviceInfo {
                name: device.name().to_owned(),
                interface: interface.name.clone(),
                usable: false,
                limits: None,
                ports: Vec::new(),
            };
            match device.open().and_then(|context| ask(&context, &mut info)) {
                Ok(()) => {}
                Err(error) => report.problems.push(diagnosis::failed(Some(device.name()), &error)),
            }
            let problems: Vec<Option<Problem>> = info
                .ports
                .iter()
                .map(|port| diagnosis::port(device.name(), port, &interface, library.provider()))
                .collect();
            info.usable = problems.iter().any(Option::is_none);
            report.problems.extend(problems.into_iter().flatten());
            report.devices.push(info);
        }
        report.available = report.devices.iter().any(|device| device.usable);
        report
    }
}

/// Asks an open device for its limits and ports. What was learnt before an error stays in `info`.
fn ask(context: &Context, info: &mut DeviceInfo) -> Result<(), Error> {
    let limits = context.limits();
    // Not every driver can tell; one port is what a Thunderbolt device has.
    let ports = limits.as_ref().ok().and_then(|limits| limits.map(|limits| limits.ports)).unwrap_or(1);
    if let Ok(Some(limits)) = limits {
        info.limits = Some(DeviceLimits {
            queue_pairs: limits.queue_pairs,
            domains: limits.domains,
            completion_queues: limits.completion_queues,
            completions: limits.completions,
            regions: limits.regions,
            work_requests: limits.work_requests,
        });
    }
    for number in 1..=u8::try_from(ports.max(1)).unwrap_or(u8::MAX) {
        let port = context.port(number)?;
        let state = port.state();
        let gids = context.gids(number)?.into_iter().map(|entry| GidInfo {
            index: entry.index,
            gid: entry.gid.0.into(),
            ipv4: entry.gid.ipv4(),
        });
        info.ports.push(PortInfo {
            number,
            active: matches!(state, PortState::Active | PortState::ActiveDefer),
            state: state.to_string(),
            mtu: port.active_mtu(),
            max_message: port.max_message(),
            gids: gids.collect(),
        });
    }
    Ok(())
}

/// What the system says about the interface behind a device.
fn interface(device: &str, provider: Provider, with_ipv4: Option<&HashSet<String>>) -> InterfaceFacts {
    let name = match provider {
        Provider::Apple => device.strip_prefix("rdma_").map(str::to_owned),
        Provider::Linux => os::rdma::interface_of(device),
    };
    // On the system whose driver it is, the interface is there; a stand-in's is not, and says nothing.
    let exists = name.as_deref().is_some_and(os::rdma::interface_exists);
    InterfaceFacts {
        has_ipv4: with_ipv4
            .filter(|_| exists)
            .map(|list| name.as_ref().is_some_and(|name| list.contains(name))),
        bridge: name.as_deref().filter(|_| exists).and_then(os::rdma::bridge_of),
        name,
    }
}

/// The interfaces that have an IPv4 address; `None` when the system does not say.
fn interfaces_with_ipv4() -> Option<HashSet<String>> {
    match os::interfaces::list() {
        Ok(list) => Some(list.into_iter().filter(|one| one.address.is_ipv4()).map(|one| one.name).collect()),
        Err(error) => {
            tracing::debug!(%error, "the network interfaces cannot be listed");
            None
        }
    }
}
