//! What all processes of an emulation share: the state of devices and cables.
//!
//! One file, `fabric`, beside the description: a header, then a [`DeviceState`] for each device, then a
//! [`CableState`] for each cable. Everything in it is an atomic that is good at any moment, so a process that dies
//! in between leaves nothing locked.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cable_state::{CableState, FOR_EVER, Harm};
use crate::device_state::{DeviceState, NO_GID};
use crate::mapping::{Mapping, Shared, now};
use crate::spec::{DeviceInfo, Fault, GID_TABLE, Spec, SpecError};

/// An emulation as one process sees it.
pub(crate) struct Fabric {
    pub(crate) spec: Spec,
    pub(crate) devices: Vec<DeviceInfo>,
    pub(crate) folder: PathBuf,
    mapping: Mapping,
}

/// Begins the file. Written before the file has its name, so whoever opens it sees all of it.
#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    /// Of the description's text: all processes have to have read the same.
    digest: AtomicU64,
    /// When the emulation began.
    epoch: AtomicU64,
}

// SAFETY: atomics alone.
unsafe impl Shared for Header {}

/// "racclem" and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"racclem\x01");

impl Fabric {
    /// Opens the emulation of a description, making its shared file if this is the first process.
    pub(crate) fn open(spec_file: &Path) -> io::Result<Fabric> {
        let place =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", spec_file.display()));
        let text = fs::read_to_string(spec_file).map_err(place)?;
        let invalid = |error: String| place(io::Error::new(io::ErrorKind::InvalidData, error));
        let spec: Spec = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        spec.check().map_err(|error| invalid(error.to_string()))?;
        let folder = spec_file.parent().map(Path::to_path_buf).unwrap_or_default();
        let file = folder.join("fabric");
        let devices = spec.device_infos();
        let digest = digest(text.as_bytes());
        let mapping = match Mapping::open(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make(&spec, &devices, digest, &file)?;
                Mapping::open(&file)?
            }
            other => other?,
        };
        let fabric = Fabric { spec, devices, folder, mapping };
        let wrong = |what: &str| {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", file.display())))
        };
        if fabric.mapping.len() != fabric.len() || fabric.header().magic.load(Ordering::Acquire) != MAGIC {
            return wrong("it is no file of this version of the emulator; delete it");
        }
        if fabric.header().digest.load(Ordering::Relaxed) != digest {
            return wrong("it belongs to a description that has been changed since; delete it");
        }
        Ok(fabric)
    }

    pub(crate) fn device(&self, device: usize) -> &DeviceState {
        self.mapping.at(size_of::<Header>() + device * size_of::<DeviceState>())
    }

    pub(crate) fn cable(&self, cable: usize) -> &CableState {
        let devices = self.devices.len() * size_of::<DeviceState>();
        self.mapping.at(size_of::<Header>() + devices + cable * size_of::<CableState>())
    }

    /// The device of that name.
    pub(crate) fn find(&self, machine: usize, name: &str) -> Option<usize> {
        self.devices.iter().position(|info| info.settings.machine == machine && info.settings.device == name)
    }

    /// The device at the other end of a device's cable.
    pub(crate) fn opposite(&self, device: usize) -> Option<usize> {
        let (cable, end) = self.devices[device].cable?;
        let other = &self.spec.cables[cable].ends[1 - end];
        self.find(other.machine, &other.device)
    }

    /// Whether a device's port is active.
    pub(crate) fn port_active(&self, device: usize) -> bool {
        let Some((cable, _)) = self.devices[device].cable else { return false };
        self.device(device).port_down.load(Ordering::Relaxed) == 0 && !self.cable(cable).is_down(now())
    }

    /// Does what a fault says.
    pub(crate) fn inject(&self, fault: &Fault) -> Result<(), SpecError> {
        match fault {
            Fault::Cut { cable, message } => self.outage(*cable, *message, Harm::Cut, 0),
            Fault::Flap { cable, message, for_ms } => {
                self.outage(*cable, *message, Harm::Flap, for_ms.saturating_mul(1_000_000))
            }
            Fault::Lose { cable, end, message, every } => {
                self.arm(*cable, *end, *message, Harm::Lose, every.unwrap_or(0))
            }
            Fault::Corrupt { cable, end, message, every } => {
                self.arm(*cable, *end, *message, Harm::Corrupt, every.unwrap_or(0))
            }
            Fault::Stall { cable, end, message } => self.arm(*cable, *end, *message, Harm::Stall, 0),
            Fault::PortDown { machine, device } => {
                self.named(*machine, device)?.port_down.store(1, Ordering::Relaxed);
                Ok(())
            }
            Fault::PortUp { machine, device } => {
                self.named(*machine, device)?.port_down.store(0, Ordering::Relaxed);
                Ok(())
            }
            Fault::Gid { machine, device, index } => {
                let state = self.named(*machine, device)?;
                if let Some(index) = index.filter(|index| *index >= GID_TABLE) {
                    return Err(SpecError(format!("a GID table has no entry {index}; it has {GID_TABLE}")));
                }
                state.gid_from.store(0, Ordering::Relaxed);
                state.gid_index.store(index.map_or(NO_GID, u32::from), Ordering::Relaxed);
                Ok(())
            }
            Fault::Leak { machine, device, resource, count } => {
                let state = self.named(*machine, device)?;
                state.leaked[*resource as usize].fetch_add(*count, Ordering::Relaxed);
                Ok(())
            }
            Fault::Fail { machine, device, verb, errno, skip, times } => {
                self.named(*machine, device)?.fail(*verb, *errno, *skip, *times);
                Ok(())
            }
        }
    }

    fn named(&self, machine: usize, device: &str) -> Result<&DeviceState, SpecError> {
        match self.find(machine, device) {
            Some(index) => Ok(self.device(index)),
            None => Err(SpecError(format!("there is no device {device} of machine {machine}"))),
        }
    }

    fn outage(&self, cable: usize, message: Option<u64>, harm: Harm, length: u64) -> Result<(), SpecError> {
        match message {
            Some(message) => self.arm(cable, 0, message, harm, length),
            None => {
                self.known(cable)?.go_down(harm, length, now());
                Ok(())
            }
        }
    }

    fn arm(
        &self,
        cable: usize,
        end: usize,
        message: u64,
        harm: Harm,
        argument: u64,
    ) -> Result<(), SpecError> {
        let direction = self
            .known(cable)?
            .directions
            .get(end)
            .ok_or_else(|| SpecError(format!("a cable has no end {end}; it has 0 and 1")))?;
        direction.arm(message, harm, argument)
    }

    fn known(&self, cable: usize) -> Result<&CableState, SpecError> {
        if cable < self.spec.cables.len() {
            Ok(self.cable(cable))
        } else {
            Err(SpecError(format!("there is no cable {cable}; there are {}", self.spec.cables.len())))
        }
    }

    fn header(&self) -> &Header {
        self.mapping.at(0)
    }

    fn len(&self) -> usize {
        length(&self.spec, &self.devices)
    }
}

fn length(spec: &Spec, devices: &[DeviceInfo]) -> usize {
    size_of::<Header>()
        + devices.len() * size_of::<DeviceState>()
        + spec.cables.len() * size_of::<CableState>()
}

/// Makes the shared file under another name and gives it its own when it is complete. Another process may be first.
fn make(spec: &Spec, devices: &[DeviceInfo], digest: u64, file: &Path) -> io::Result<()> {
    let draft = file.with_file_name(format!("fabric.{}", std::process::id()));
    let _leftover = fs::remove_file(&draft);
    let mapping = Mapping::create(&draft, length(spec, devices))?;
    let folder = file.parent().map(Path::to_path_buf).unwrap_or_default();
    let fabric = Fabric { spec: spec.clone(), devices: devices.to_vec(), folder, mapping };
    let epoch = now();
    for (index, DeviceInfo { settings, .. }) in devices.iter().enumerate() {
        let state = fabric.device(index);
        state.port_down.store(settings.port_down.into(), Ordering::Relaxed);
        state
            .gid_index
            .store(if settings.bridge { NO_GID } else { settings.gid_index.into() }, Ordering::Relaxed);
        state.gid_from.store(epoch + settings.gid_after_ms.saturating_mul(1_000_000), Ordering::Relaxed);
    }
    for cable in 0..spec.cables.len() {
        fabric.cable(cable).down_from.store(FOR_EVER, Ordering::Relaxed);
    }
    for fault in &spec.faults {
        fabric.inject(fault).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    }
    fabric.header().digest.store(digest, Ordering::Relaxed);
    fabric.header().epoch.store(epoch, Ordering::Relaxed);
    fabric.header().magic.store(MAGIC, Ordering::Release);
    let linked = fs::hard_link(&draft, file);
    fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// FNV-1a: tells descriptions apart, nothing more.
fn digest(text: &[u8]) -> u64 {
    text.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
