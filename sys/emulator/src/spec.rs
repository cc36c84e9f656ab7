//! What is emulated: machines, cables, limits, rules and faults, as a JSON file or built in a program.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The whole of an emulation.
///
/// As JSON, with every field that has a default left out:
///
/// ```
/// let spec: raccl_emulator::Spec = serde_json::from_str(r#"{
///     "machines": 2,
///     "cables": [{
///         "ends": [{"machine": 0, "device": "rdma_en2"}, {"machine": 1, "device": "rdma_en2"}],
///         "latency_ns": 5000,
///         "bandwidth": 100000000
///     }]
/// }"#).unwrap();
/// assert_eq!(spec, raccl_emulator::Layout::mesh().latency_ns(5000).bandwidth(100_000_000).spec(2));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// How many machines there are, numbered from 0.
    pub machines: usize,
    /// The cables. A device has at most one.
    #[serde(default)]
    pub cables: Vec<Cable>,
    /// Devices that are no plain end of a cable: unplugged, late, bridged.
    #[serde(default)]
    pub devices: Vec<DeviceSettings>,
    /// What a device has of everything.
    #[serde(default)]
    pub limits: Limits,
    /// Where drivers of different versions differ.
    #[serde(default)]
    pub rules: Rules,
    /// What goes wrong, from the start. More can be injected at any time, see [`crate::Emulation::inject`].
    #[serde(default)]
    pub faults: Vec<Fault>,
}

/// A cable between two devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cable {
    /// What it joins.
    pub ends: [End; 2],
    /// How long a message is under way, once it is sent.
    #[serde(default)]
    pub latency_ns: u64,
    /// Bytes a second and direction; none: as fast as memory is.
    #[serde(default)]
    pub bandwidth: Option<u64>,
}

/// A device of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// The machine.
    pub machine: usize,
    /// The device's name, such as `rdma_en5`.
    pub device: String,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of machine {}", self.device, self.machine)
    }
}

/// How a device starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSettings {
    /// The machine.
    pub machine: usize,
    /// The device's name. One that no cable names is unplugged: its port is down.
    pub device: String,
    /// The port is down although there is a cable.
    #[serde(default)]
    pub port_down: bool,
    /// The port is a member of a bridge, so it has no IPv4 address of its own.
    #[serde(default)]
    pub bridge: bool,
    /// Where in the GID table the IPv4-mapped entry stands, below [`GID_TABLE`].
    #[serde(default = "one")]
    pub gid_index: u8,
    /// How long after the start of the emulation that entry appears.
    #[serde(default)]
    pub gid_after_ms: u64,
}

impl DeviceSettings {
    /// The settings of a device that nothing is said about.
    pub fn plain(machine: usize, device: &str) -> DeviceSettings {
        DeviceSettings {
            machine,
            device: device.into(),
            port_down: false,
            bridge: false,
            gid_index: 1,
            gid_after_ms: 0,
        }
    }
}

/// Entries of a GID table.
pub const GID_TABLE: u8 = 8;

fn one() -> u8 {
    1
}

/// What a device has, over all processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Usable queue pairs. One more is reported, as Apple's driver does.
    pub queue_pairs: u32,
    /// Protection domains.
    pub domains: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Memory regions.
    pub regions: u32,
    /// The deepest queue, in frames of 4 KiB.
    pub depth: u32,
    /// Entries of a completion queue.
    pub completions: u32,
    /// Bytes of a message.
    pub message_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            queue_pairs: 10,
            domains: 11,
            completion_queues: 11,
            regions: 100,
            depth: 8192,
            completions: 65536,
            message_bytes: 4095 * 4096,
        }
    }
}

/// Where drivers differ, or reports about them do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rules {
    /// Compare a message with itself between post and completion; a difference is an error completion of the send.
    pub check_reuse: bool,
    /// What `ibv_post_recv` does when the queue is full.
    pub overrun: Overrun,
    /// Queues are never deeper than this, whatever is asked for. Only `ibv_query_qp` tells.
    pub adjust_depth: Option<u32>,
    /// A queue pair stops receiving once receives of more frames than this are posted at once, where they are of
    /// several frames each.
    pub unreliable_beyond: Option<u32>,
    /// A queue pair on which nothing has been sent or received for so long sends nothing any more.
    pub idle_death_ms: Option<u64>,
    /// `ibv_reg_mr` refuses every right but to write locally.
    pub local_write_only: bool,
    /// What a killed process held stays taken for ever. Otherwise the next process that opens the device gets it.
    pub leak_when_killed: bool,
    /// `ibv_query_device` and `ibv_query_qp` work.
    pub queries: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            check_reuse: true,
            overrun: Overrun::Stall,
            adjust_depth: None,
            unreliable_beyond: None,
            idle_death_ms: None,
            local_write_only: false,
            leak_when_killed: true,
            queries: true,
        }
    }
}

/// What happens to a receive for which the queue has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overrun {
    /// It is taken, and the queue pair never receives again.
    Stall,
    /// It is refused with -12.
    Refuse,
}

/// Something that goes wrong.
///
/// Message numbers count what is posted on a cable in one direction, by all queue pairs, from the moment of the
/// injection on: 0 is the next one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "kind")]
pub enum Fault {
    /// The cable carries nothing any more; ports at both ends go down. Messages under way are lost.
    Cut {
        /// Its place in [`Spec::cables`].
        cable: usize,
        /// When: with that message of its first end.
        #[serde(default)]
        message: Option<u64>,
    },
    /// The cable carries nothing for a time. Messages under way are lost, those posted wait.
    Flap {
        /// Its place in [`Spec::cables`].
        cable: usize,
        /// When: with that message of its first end.
        #[serde(default)]
        message: Option<u64>,
        /// For how long.
        for_ms: u64,
    },
    /// A message does not arrive; its sender sees success.
    Lose {
        /// Its place in [`Spec::cables`].
        cable: usize,
        /// Which end sends, 0 or 1.
        end: usize,
        /// Which message.
        message: u64,
        /// Also every so many messages afterwards.
        #[serde(default)]
        every: Option<u64>,
    },
    /// A bit of a message is flipped on the way.
    Corrupt {
        /// Its place in [`Spec::cables`].
        cable: usize,
        /// Which end sends, 0 or 1.
        end: usize,
        /// Which message.
        message: u64,
        /// Also every so many messages afterwards.
        #[serde(default)]
        every: Option<u64>,
    },
    /// From that message on, its queue pair sends nothing although receives are posted.
    Stall {
        /// Its place in [`Spec::cables`].
        cable: usize,
        /// Which end sends, 0 or 1.
        end: usize,
        /// Which message.
        message: u64,
    },
    /// A port goes down.
    PortDown {
        /// The machine.
        machine: usize,
        /// The device.
        device: String,
    },
    /// A port comes up again.
    PortUp {
        /// The machine.
        machine: usize,
        /// The device.
        device: String,
    },
    /// The IPv4-mapped GID moves, or goes away.
    Gid {
        /// The machine.
        machine: usize,
        /// The device.
        device: String,
        /// Where to.
        index: Option<u8>,
    },
    /// Some of a device's resources are taken by nobody, as killed processes leave them.
    Leak {
        /// The machine.
        machine: usize,
        /// The device.
        device: String,
        /// Which.
        resource: Resource,
        /// How many more than before.
        count: u32,
    },
    /// A call fails.
    Fail {
        /// The machine.
        machine: usize,
        /// The device.
        device: String,
        /// Which call.
        verb: Verb,
        /// With which number. Where the call returns a number, it returns this one, negative ones too.
        errno: i32,
        /// How often it still works before.
        #[serde(default)]
        skip: u32,
        /// How often it fails.
        #[serde(default = "once")]
        times: u32,
    },
}

fn once() -> u32 {
    1
}

/// What devices have few of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(usize)]
pub enum Resource {
    /// Open contexts.
    Contexts,
    /// Protection domains.
    Domains,
    /// Queue pairs.
    QueuePairs,
    /// Completion queues.
    CompletionQueues,
    /// Memory regions.
    Regions,
}

impl Resource {
    pub(crate) const COUNT: usize = Resource::Regions as usize + 1;
}

/// A call that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(usize)]
#[allow(missing_docs)] // Each is the C function of its name.
pub enum Verb {
    IbvOpenDevice,
    IbvCloseDevice,
    IbvQueryDevice,
    IbvQueryPort,
    IbvQueryGid,
    IbvAllocPd,
    IbvDeallocPd,
    IbvRegMr,
    IbvDeregMr,
    IbvCreateCq,
    IbvDestroyCq,
    IbvPollCq,
    IbvCreateQp,
    IbvQueryQp,
    IbvModifyQp,
    IbvDestroyQp,
    IbvPostSend,
    IbvPostRecv,
}

impl Verb {
    pub(crate) const COUNT: usize = Verb::IbvPostRecv as usize + 1;
}

/// A device with everything said about it.
#[derive(Debug, Clone)]
pub(crate) struct DeviceInfo {
    pub(crate) settings: DeviceSettings,
    /// The cable and which of its ends this is.
    pub(crate) cable: Option<(usize, usize)>,
}

impl Spec {
    /// The devices a rank reaches another by, as MLX's device matrix: entry `[i][j]` holds the names of the devices
    /// of machine `i` whose cables go to machine `j`.
    pub fn device_names(&self) -> Vec<Vec<Vec<String>>> {
        let mut matrix = vec![vec![Vec::new(); self.machines]; self.machines];
        for Cable { ends: [a, b], .. } in &self.cables {
            matrix[a.machine][b.machine].push(a.device.clone());
            matrix[b.machine][a.machine].push(b.device.clone());
        }
        matrix
    }

    /// The same as the JSON file that MLX users have: `null`, a name, or an array of names.
    ///
    /// ```
    /// let spec: raccl_emulator::Spec = raccl_emulator::Layout::line().spec(3);
    /// assert_eq!(
    ///     spec.device_matrix().to_string(),
    ///     r#"[[null,"rdma_en2",null],["rdma_en2",null,"rdma_en3"],[null,"rdma_en2",null]]"#
    /// );
    /// ```
    pub fn device_matrix(&self) -> serde_json::Value {
        let cell = |names: &Vec<String>| match names.as_slice() {
            [] => serde_json::Value::Null,
            [name] => name.clone().into(),
            names => names.into(),
        };
        self.device_names().iter().map(|row| row.iter().map(cell).collect::<serde_json::Value>()).collect()
    }

    /// Whether it makes sense; the error says what does not.
    pub fn check(&self) -> Result<(), SpecError> {
        let bad = |what: String| Err(SpecError(what));
        if self.machines > MOST || self.cables.len() > MOST || self.devices.len() > MOST {
            return bad(format!("there are more than {MOST} machines, cables or devices"));
        }
        let mut used = HashSet::new();
        for (number, cable) in self.cables.iter().enumerate() {
            for end in &cable.ends {
                self.check_device(end.machine, &end.device)?;
                if !used.insert(end) {
                    return bad(format!("cable {number}: {end} has a cable already"));
                }
            }
            if cable.ends[0].machine == cable.ends[1].machine {
                return bad(format!("cable {number}: both ends are on machine {}", cable.ends[0].machine));
            }
            if cable.bandwidth == Some(0) {
                return bad(format!("cable {number}: a bandwidth of 0 would never deliver"));
            }
        }
        let mut told = HashSet::new();
        for settings in &self.devices {
            self.check_device(settings.machine, &settings.device)?;
            if !told.insert((settings.machine, &settings.device)) {
                return bad(format!(
                    "{} of machine {} is described twice",
                    settings.device, settings.machine
                ));
            }
            if settings.gid_index >= GID_TABLE {
                return bad(format!("gid_index {} is not below {GID_TABLE}", settings.gid_index));
            }
        }
        if self.limits.depth == 0 || self.limits.depth > 1 << 16 {
            return bad(format!("limits.depth is {}, which is not in 1 to 65536", self.limits.depth));
        }
        Ok(())
    }

    /// All devices, by machine and name.
    pub(crate) fn device_infos(&self) -> Vec<DeviceInfo> {
        let mut infos: Vec<DeviceInfo> = self
            .devices
            .iter()
            .map(|settings| DeviceInfo { settings: settings.clone(), cable: None })
            .collect();
        for (number, cable) in self.cables.iter().enumerate() {
            for (end, End { machine, device }) in cable.ends.iter().enumerate() {
                let known = infos
                    .iter_mut()
                    .find(|info| info.settings.machine == *machine && info.settings.device == *device);
                match known {
                    Some(info) => info.cable = Some((number, end)),
                    None => infos.push(DeviceInfo {
                        settings: DeviceSettings::plain(*machine, device),
                        cable: Some((number, end)),
                    }),
                }
            }
        }
        infos.sort_by(|a, b| {
            (a.settings.machine, &a.settings.device).cmp(&(b.settings.machine, &b.settings.device))
        });
        infos
    }

    fn check_device(&self, machine: usize, device: &str) -> Result<(), SpecError> {
        if machine >= self.machines {
            return Err(SpecError(format!("there is no machine {machine}; there are {}", self.machines)));
        }
        if device.is_empty() || device.contains(['\0', '/']) {
            return Err(SpecError(format!("{device:?} is no name for a device")));
        }
        Ok(())
    }
}

/// More machines, cables or devices than this are a mistake.
const MOST: usize = 4096;

/// Why a description is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecError(pub(crate) String);

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpecError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;

    #[test]
    fn impossible_cabling_is_refused() {
        let mut spec = Layout::mesh().spec(2);
        spec.cables.push(spec.cables[0].clone());
        assert!(spec.check().unwrap_err().to_string().contains("has a cable already"));
        let mut spec = Layout::mesh().spec(2);
        spec.cables[0].ends[1].machine = 2;
        assert!(spec.check().unwrap_err().to_string().contains("no machine 2"));
        let mut spec = Layout::mesh().spec(2);
        spec.cables[0].ends[1] = End { machine: 0, device: "rdma_en9".into() };
        assert!(spec.check().unwrap_err().to_string().contains("both ends"));
    }

    #[test]
    fn a_spec_survives_json() {
        let mut spec = Layout::mesh().cables(2).latency_ns(7).spec(3);
        spec.devices.push(DeviceSettings { bridge: true, ..DeviceSettings::plain(1, "rdma_en9") });
        spec.faults.push(Fault::Fail {
            machine: 0,
            device: "rdma_en2".into(),
            verb: Verb::IbvAllocPd,
            errno: -12,
            skip: 1,
            times: 2,
        });
        let text = serde_json::to_string(&spec).unwrap();
        assert!(text.contains("ibv_alloc_pd"));
        assert_eq!(serde_json::from_str::<Spec>(&text).unwrap(), spec);
    }
}
