//! `raccl devices`: what RDMA sees here, and what is in its way.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};

use anyhow::{Context, anyhow};
use raccl::{Config, DeviceInfo, DeviceReport, PortInfo};

use crate::args::DevicesArgs;
use crate::failure::{Failure, say};

/// Runs the command.
pub(crate) fn run(args: DevicesArgs) -> Result<(), Failure> {
    let mut config = Config::from_env().map_err(Failure::usage)?;
    config.warnings().iter().for_each(say);
    if let Some(matrix) = args.matrix {
        config = config.devices(matrix);
    }
    if let Some(rank) = args.rank {
        config = config.rank(rank);
    }
    if let Some(library) = args.library {
        config = config.verbs_library(library);
    }
    let report = config.device_report().map_err(Failure::usage)?;
    let text = if args.json {
        let mut line = serde_json::to_string(&report).context("cannot encode the report")?;
        line.push('\n');
        line
    } else {
        // Writing to a string does not fail.
        Table(&report).to_string()
    };
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write the report")?;
    if args.check && !report.available {
        let first = report.problems.first().map_or("no port is usable".into(), ToString::to_string);
        return Err(anyhow!(first).context("RDMA is not available").into());
    }
    Ok(())
}

/// The report for people.
struct Table<'a>(&'a DeviceReport);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        match (&report.library, report.provider) {
            (Some(library), Some(provider)) => writeln!(f, "library  {library} ({provider})")?,
            _ => writeln!(f, "library  none")?,
        }
        if !report.devices.is_empty() {
            f.write_char('\n')?;
            rows(
                f,
                &[
                    "device",
                    "interface",
                    "port",
                    "state",
                    "mtu",
                    "address",
                    "gid",
                    "qp",
                    "pd",
                    "mr",
                    "message",
                ],
                |add| {
                    for device in &report.devices {
                        device_rows(device, add);
                    }
                },
            )?;
            other_gids(f, &report.devices)?;
        }
        if let Some(layout) = report.layout {
            writeln!(f, "\ncables of the matrix (layout: {layout})")?;
            rows(f, &["rank", "device", "peer", "its device", "usable here"], |add| {
                for cable in &report.cables {
                    let usable = cable.usable.map_or("-", |usable| if usable { "yes" } else { "NO" });
                    add(vec![
                        cable.rank.to_string(),
                        cable.device.clone(),
                        cable.peer.to_string(),
                        cable.peer_device.clone(),
                        usable.into(),
                    ]);
                }
            })?;
        }
        f.write_char('\n')?;
        let usable = report.devices.iter().filter(|device| device.usable).count();
        match (report.available, report.problems.len()) {
            (true, 0) => {
                writeln!(f, "RDMA is available: {usable} of {} devices usable", report.devices.len())?
            }
            (true, _) => writeln!(
                f,
                "RDMA is available on {usable} of {} devices; of the others:",
                report.devices.len()
            )?,
            (false, _) => writeln!(f, "RDMA is NOT available:")?,
        }
        for problem in &report.problems {
            writeln!(f, "\n  {problem}")?;
            for remedy in &problem.remedies {
                writeln!(f, "    - {remedy}")?;
            }
        }
        Ok(())
    }
}

/// A line for each port, or one for a device that could not be asked for its ports.
fn device_rows(device: &DeviceInfo, add: &mut dyn FnMut(Vec<String>)) {
    let interface = device.interface.clone().unwrap_or_else(|| "-".into());
    let limit = |value: fn(&raccl::DeviceLimits) -> usize| {
        device.limits.as_ref().map_or("-".into(), |limits| value(limits).to_string())
    };
    let limits = [limit(|l| l.queue_pairs), limit(|l| l.domains), limit(|l| l.regions)];
    let row = |port: [String; 5], message: String| {
        let mut row = vec![device.name.clone(), interface.clone()];
        row.extend(port);
        row.extend(limits.clone());
        row.push(message);
        row
    };
    for port in &device.ports {
        let (address, index) = match port.gids.iter().find(|gid| gid.ipv4.is_some()) {
            Some(gid) => (gid.ipv4.map_or("-".into(), |ip| ip.to_string()), gid.index.to_string()),
            None => ("none".into(), "-".into()),
        };
        let words = [port.number.to_string(), port.state.clone(), port.mtu.to_string(), address, index];
        add(row(words, port.max_message.to_string()));
    }
    if device.ports.is_empty() {
        add(row(["-".into(), "unknown".into(), "-".into(), "-".into(), "-".into()], "-".into()));
    }
}

/// All GIDs, for those who compare tables.
fn other_gids(f: &mut fmt::Formatter<'_>, devices: &[DeviceInfo]) -> fmt::Result {
    let ports = devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    for (device, port) in ports.filter(|(_, port)| !port.gids.is_empty()) {
        writeln!(f, "{} port {}: {}", device.name, port.number, gids(port))?;
    }
    Ok(())
}

fn gids(port: &PortInfo) -> String {
    port.gids.iter().map(|gid| format!("gid {} {}", gid.index, gid.gid)).collect::<Vec<_>>().join(", ")
}

/// Writes rows of equal columns under their heads.
fn rows(
    f: &mut fmt::Formatter<'_>,
    heads: &[&str],
    fill: impl FnOnce(&mut dyn FnMut(Vec<String>)),
) -> fmt::Result {
    let mut rows = vec![heads.iter().map(|&head| head.to_owned()).collect::<Vec<_>>()];
    fill(&mut |row| rows.push(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            write!(line, "{cell:<width$}  ")?;
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}
