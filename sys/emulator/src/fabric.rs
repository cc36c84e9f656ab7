//! What all processes of an emulation share: the state of devices and cables.
//!
//! One file, `fabric`, beside the description: a header, then a [`DeviceState`] for each device, then a
//! [`CableState`] for each cable. Everything in it is an atomic that is good at any moment, so a process that dies
//! in between leaves nothing locked.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::mapping::{Mapping, Shared, now};
use crate::spec::{DeviceInfo, Fault, Resource, Spec, SpecError, Verb};

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

/// A device.
#[repr(C, align(128))]
pub(crate) struct DeviceState {
    /// How many of each resource processes have now.
    pub(crate) live: [AtomicU32; Resource::COUNT],
    /// How many of each are taken by nobody.
    pub(crate) leaked: [AtomicU32; Resource::COUNT],
    /// How many of each there ever were.
    pub(crate) made: [AtomicU64; Resource::COUNT],
    /// What programs did wrong.
    pub(crate) mistakes: [AtomicU64; Mistake::COUNT],
    /// The number of the last queue pair.
    pub(crate) last_number: AtomicU32,
    /// 1 where the port was switched off.
    pub(crate) port_down: AtomicU32,
    /// Where the IPv4-mapped GID stands; [`NO_GID`]: nowhere.
    pub(crate) gid_index: AtomicU32,
    /// How many calls are set to fail, so that the rest of the time nothing is looked up.
    failing: AtomicU32,
    /// When the IPv4-mapped GID appears.
    pub(crate) gid_from: AtomicU64,
    fails: [Failing; Verb::COUNT],
    owners: [Owner; OWNERS],
}

// SAFETY: atomics alone.
unsafe impl Shared for DeviceState {}

/// The value of [`DeviceState::gid_index`] for no entry.
pub(crate) const NO_GID: u32 = u32::MAX;

/// What a program can do wrong without being told at once by a real driver. Tests look at the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Mistake {
    EarlyReuse,
    Overrun,
    FrameMismatch,
    FreedOutOfOrder,
    CompletionQueueTooSmall,
    BadMemory,
}

impl Mistake {
    pub(crate) const COUNT: usize = Mistake::BadMemory as usize + 1;
}

/// A call that is set to fail: `skip` times not yet, then `times` times.
#[repr(C)]
struct Failing {
    skip: AtomicU32,
    times: AtomicU32,
    errno: AtomicI32,
}

const OWNERS: usize = 64;

/// What one open context has, so that it can be taken back when its process is killed.
#[repr(C)]
struct Owner {
    /// The process; 0: nobody.
    pid: AtomicU32,
    counts: [AtomicU32; Resource::COUNT],
    /// When the process started, which tells it from a later one of the same number.
    started: AtomicU64,
}

/// A cable.
#[repr(C, align(128))]
pub(crate) struct CableState {
    /// It carries nothing from here.
    pub(crate) down_from: AtomicU64,
    /// Until here; [`FOR_EVER`]: it is cut.
    pub(crate) down_until: AtomicU64,
    /// What each end sends.
    pub(crate) directions: [Direction; 2],
}

// SAFETY: atomics alone.
unsafe impl Shared for CableState {}

/// A time that does not come.
pub(crate) const FOR_EVER: u64 = u64::MAX;

/// One direction of a cable.
#[repr(C, align(128))]
pub(crate) struct Direction {
    /// Until when it is busy with what has been sent.
    pub(crate) free_at: AtomicU64,
    /// How many messages have been posted.
    pub(crate) posted: AtomicU64,
    /// How many faults are set.
    pub(crate) armed: AtomicU32,
    pub(crate) traps: [Trap; TRAPS],
}

const TRAPS: usize = 16;

/// A fault that waits for a message.
///
/// `kind` is stored last by whoever sets it, and taken by a compare-and-swap by whoever posts the message, so that it
/// goes off once.
#[repr(C)]
pub(crate) struct Trap {
    kind: AtomicU32,
    message: AtomicU64,
    /// For how long, or how often.
    argument: AtomicU64,
}

/// The value of [`Trap::kind`] for one that is free.
const FREE: u32 = 0;
/// The value while it is being set.
const BEING_SET: u32 = u32::MAX;

/// What happens to a message that is being posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Harm {
    Lose = 1,
    Corrupt = 2,
    Stall = 3,
    Cut = 4,
    Flap = 5,
}

impl Harm {
    const ALL: [Harm; 5] = [Harm::Lose, Harm::Corrupt, Harm::Stall, Harm::Cut, Harm::Flap];
}

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
                let state = self.named(*machine, device)?;
                let fails = &state.fails[*verb as usize];
                fails.errno.store(*errno, Ordering::Relaxed);
                fails.skip.store(*skip, Ordering::Relaxed);
                if fails.times.swap(*times, Ordering::Release) == 0 && *times > 0 {
                    state.failing.fetch_add(1, Ordering::Release);
                }
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

impl CableState {
    /// Whether it carries nothing at that time.
    #[inline]
    pub(crate) fn is_down(&self, time: u64) -> bool {
        let from = self.down_from.load(Ordering::Acquire);
        from <= time && time < self.down_until.load(Ordering::Relaxed)
    }

    /// The outage that a time is in or before: from when until when.
    #[inline]
    pub(crate) fn outage(&self) -> (u64, u64) {
        let from = self.down_from.load(Ordering::Acquire);
        (from, self.down_until.load(Ordering::Relaxed))
    }

    /// Stops carrying anything.
    pub(crate) fn go_down(&self, harm: Harm, length: u64, now: u64) {
        if harm == Harm::Flap && self.down_until.load(Ordering::Relaxed) == FOR_EVER && self.is_down(now) {
            // Cut already.
            return;
        }
        let until = if harm == Harm::Flap { now.saturating_add(length) } else { FOR_EVER };
        self.down_until.store(until, Ordering::Relaxed);
        self.down_from.store(now, Ordering::Release);
    }
}

impl Direction {
    /// Sets a fault for a message to come.
    fn arm(&self, message: u64, harm: Harm, argument: u64) -> Result<(), SpecError> {
        let message = self.posted.load(Ordering::Relaxed).saturating_add(message);
        let free = self.traps.iter().find(|trap| {
            trap.kind.compare_exchange(FREE, BEING_SET, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let trap =
            free.ok_or_else(|| SpecError(format!("a cable takes {TRAPS} faults in wait, and has them")))?;
        trap.message.store(message, Ordering::Relaxed);
        trap.argument.store(argument, Ordering::Relaxed);
        trap.kind.store(harm as u32, Ordering::Release);
        self.armed.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Counts a message that is being posted; returns the first fault that it sets off, with its argument.
    #[inline]
    pub(crate) fn count(&self) -> Option<(Harm, u64)> {
        let number = self.posted.fetch_add(1, Ordering::Relaxed);
        if self.armed.load(Ordering::Acquire) == 0 { None } else { self.spring(number) }
    }

    #[cold]
    fn spring(&self, number: u64) -> Option<(Harm, u64)> {
        for trap in &self.traps {
            let kind = trap.kind.load(Ordering::Acquire);
            let Some(harm) = Harm::ALL.into_iter().find(|harm| *harm as u32 == kind) else { continue };
            let message = trap.message.load(Ordering::Relaxed);
            if message > number {
                continue;
            }
            let argument = trap.argument.load(Ordering::Relaxed);
            if matches!(harm, Harm::Lose | Harm::Corrupt) && argument > 0 {
                // It stays; whoever moves it on has it.
                let next = number.saturating_add(argument);
                if trap.message.compare_exchange(message, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
                {
                    return Some((harm, argument));
                }
            } else if trap.kind.compare_exchange(kind, FREE, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                self.armed.fetch_sub(1, Ordering::Release);
                return Some((harm, argument));
            }
        }
        None
    }
}

impl DeviceState {
    /// Takes one of a resource that there are `limit` of. `false` when they are used up.
    pub(crate) fn take(&self, resource: Resource, limit: u32, owner: Option<usize>) -> bool {
        let leaked = self.leaked[resource as usize].load(Ordering::Relaxed);
        let live = &self.live[resource as usize];
        let taken = live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
            (live.saturating_add(leaked) < limit).then_some(live + 1)
        });
        if taken.is_ok() {
            self.made[resource as usize].fetch_add(1, Ordering::Relaxed);
            if let Some(owner) = owner {
                self.owners[owner].counts[resource as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
        taken.is_ok()
    }

    /// Gives one back.
    pub(crate) fn give(&self, resource: Resource, owner: Option<usize>) {
        self.live[resource as usize].fetch_sub(1, Ordering::Relaxed);
        if let Some(owner) = owner {
            self.owners[owner].counts[resource as usize].fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A place for what a context of this process will take; `None` when there are too many contexts.
    pub(crate) fn own(&self) -> Option<usize> {
        let pid = std::process::id();
        let place = self.owners.iter().position(|owner| {
            owner.pid.compare_exchange(0, pid, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        self.owners[place].started.store(started(pid).unwrap_or(0), Ordering::Release);
        Some(place)
    }

    /// Gives the place back.
    pub(crate) fn disown(&self, place: usize) {
        let owner = &self.owners[place];
        // First, or the next process to have the place could be taken for one that is gone.
        owner.started.store(0, Ordering::Relaxed);
        owner.pid.store(0, Ordering::Release);
    }

    /// Takes back what processes had that are gone.
    pub(crate) fn reclaim(&self) {
        for owner in &self.owners {
            let pid = owner.pid.load(Ordering::Acquire);
            let start = owner.started.load(Ordering::Acquire);
            // A start of 0 is one that is not known yet, or not on this system.
            let same = started(pid).is_some_and(|now| start == 0 || now == start);
            if pid == 0 || same {
                continue;
            }
            // Whoever takes the dead process's number out does the rest.
            if owner.pid.compare_exchange(pid, BEING_SET, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                for (count, live) in owner.counts.iter().zip(&self.live) {
                    live.fetch_sub(count.swap(0, Ordering::Relaxed), Ordering::Relaxed);
                }
                owner.started.store(0, Ordering::Relaxed);
                owner.pid.store(0, Ordering::Release);
            }
        }
    }

    /// The number with which a call is set to fail this time.
    #[inline]
    pub(crate) fn injected(&self, verb: Verb) -> Option<i32> {
        if self.failing.load(Ordering::Acquire) == 0 { None } else { self.inject(verb) }
    }

    #[cold]
    fn inject(&self, verb: Verb) -> Option<i32> {
        let fails = &self.fails[verb as usize];
        if fails.times.load(Ordering::Acquire) == 0 {
            return None;
        }
        let less = |count: u32| count.checked_sub(1);
        if fails.skip.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return None;
        }
        match fails.times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Err(_) => return None,
            Ok(1) => {
                self.failing.fetch_sub(1, Ordering::Relaxed);
            }
            Ok(_) => {}
        }
        Some(fails.errno.load(Ordering::Relaxed))
    }

    pub(crate) fn mistake(&self, mistake: Mistake) {
        self.mistakes[mistake as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// When a process started, in whatever unit; `None` when there is no such process.
pub(crate) fn started(pid: u32) -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may contain anything; the 22nd field is the 20th behind it.
        let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
        // A process that has ended but that its parent has not waited for yet is gone.
        if fields.next()? == "Z" {
            return None;
        }
        fields.nth(18)?.parse().ok()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let pid = libc::pid_t::try_from(pid).ok()?;
        // SAFETY: signal 0 is never delivered; only the process's existence is checked.
        let status = unsafe { libc::kill(pid, 0) };
        (status == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)).then_some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_started_and_no_process_has_not() {
        assert!(started(std::process::id()).is_some());
        assert_eq!(started(u32::MAX), None);
    }
}
