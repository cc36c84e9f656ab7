//! Devices and open contexts.

use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use raccl_sys::abi;

use super::completion::poll_cq;
use super::memory::Table;
use super::numbers::{EBUSY, EIO, ENODATA, ENOENT, set_errno};
use super::pair::Pair;
use super::receiver::post_recv;
use super::sender::post_send;
use crate::device_state::NO_GID;
use crate::fabric::Fabric;
use crate::mapping::now;
use crate::spec::{GID_TABLE, Resource, Verb};
use crate::{MACHINE_VARIABLE, SPEC_VARIABLE};

/// What `ibv_device` points to.
#[repr(C)]
pub(super) struct DeviceObject {
    name: CString,
    fabric: Arc<Fabric>,
    device: usize,
}

/// The devices of the machine that the environment says this process is.
pub(super) fn devices() -> Result<Vec<DeviceObject>, i32> {
    let Some(spec) = std::env::var_os(SPEC_VARIABLE) else {
        // As on a machine without such ports.
        return Ok(Vec::new());
    };
    let complain = |what: String| eprintln!("raccl-emulator: {what}");
    let fabric = shared_fabric(PathBuf::from(spec)).map_err(|error| {
        complain(format!("{SPEC_VARIABLE}: {error}"));
        if error.kind() == std::io::ErrorKind::NotFound { ENOENT } else { EIO }
    })?;
    let machine = std::env::var(MACHINE_VARIABLE).unwrap_or_default();
    let only = match machine.parse::<usize>() {
        Ok(number) if number < fabric.spec.machines => Some(number),
        _ if machine == "all" => None,
        _ => {
            complain(format!(
                "{MACHINE_VARIABLE} is {machine:?}; it has to be a number below {} or \"all\"",
                fabric.spec.machines
            ));
            return Err(ENOENT);
        }
    };
    let mut devices = Vec::new();
    for (device, info) in fabric.devices.iter().enumerate() {
        let settings = &info.settings;
        let name = match only {
            Some(machine) if machine == settings.machine => settings.device.clone(),
            Some(_) => continue,
            None => format!("m{}.{}", settings.machine, settings.device),
        };
        // `Spec::check` has refused names with a zero byte.
        let name = CString::new(name).map_err(|_| EIO)?;
        devices.push(DeviceObject { name, fabric: fabric.clone(), device });
    }
    Ok(devices)
}

/// The emulation of a description, opened once.
fn shared_fabric(spec: PathBuf) -> std::io::Result<Arc<Fabric>> {
    static OPEN: Mutex<Vec<(PathBuf, Arc<Fabric>)>> = Mutex::new(Vec::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, fabric)) = open.iter().find(|(path, _)| *path == spec) {
        return Ok(fabric.clone());
    }
    let fabric = Arc::new(Fabric::open(&spec)?);
    open.push((spec, fabric.clone()));
    Ok(fabric)
}

impl DeviceObject {
    pub(super) fn name(&self) -> &CString {
        &self.name
    }

    /// Opens the device, and leaves a box to the caller.
    pub(super) fn open(&self) -> Result<*mut ContextObject, i32> {
        let state = self.fabric.device(self.device);
        if let Some(errno) = state.injected(Verb::IbvOpenDevice) {
            return Err(errno.saturating_abs());
        }
        if !self.fabric.spec.rules.leak_when_killed {
            state.reclaim();
        }
        let owner = state.own();
        if !state.take(Resource::Contexts, u32::MAX, owner) {
            return Err(EBUSY);
        }
        let context = Context {
            fabric: self.fabric.clone(),
            device: self.device,
            owner,
            held: Default::default(),
            regions: RwLock::new(Table::default()),
            pairs: Mutex::default(),
        };
        let device: *const DeviceObject = self;
        let mut ops = abi::ibv_context_ops {
            before_poll: [None; 11],
            poll_cq: Some(poll_cq),
            between: [None; 13],
            post_send: Some(post_send),
            post_recv: Some(post_recv),
            after: [None; 5],
        };
        // `ibv_req_notify_cq`, the one function among these that a header calls: there are no completion channels.
        // SAFETY: both are C functions, and a caller calls this one with the other's arguments, which it ignores.
        ops.between[0] = Some(unsafe {
            std::mem::transmute::<extern "C" fn() -> c_int, abi::unused_operation>(unsupported)
        });
        Ok(Box::into_raw(Box::new(ContextObject {
            head: abi::ibv_context { device: device.cast_mut().cast(), ops },
            _rest: [0; 16],
            context: Arc::new(context),
        })))
    }
}

extern "C" fn unsupported() -> c_int {
    super::numbers::EOPNOTSUPP
}

/// What `ibv_context` points to.
#[repr(C)]
pub(super) struct ContextObject {
    head: abi::ibv_context,
    /// What the header has behind the fields that this driver uses. Zero says that there are no extensions.
    _rest: [u64; 16],
    pub(super) context: Arc<Context>,
}

/// An open device.
pub(super) struct Context {
    pub(super) fabric: Arc<Fabric>,
    pub(super) device: usize,
    owner: Option<usize>,
    /// How many of each resource were made of this context and are left.
    held: [AtomicU32; Resource::COUNT],
    pub(super) regions: RwLock<Table>,
    pub(super) pairs: Mutex<Vec<Arc<Pair>>>,
}

impl Context {
    /// The number with which a call is set to fail this time.
    #[inline]
    pub(super) fn injected(&self, verb: Verb) -> Option<i32> {
        self.fabric.device(self.device).injected(verb)
    }

    /// Takes one of a resource, or fails with `errno`.
    pub(super) fn take(&self, resource: Resource, limit: u32, errno: i32) -> Result<(), i32> {
        if !self.fabric.device(self.device).take(resource, limit, self.owner) {
            return Err(errno);
        }
        self.held[resource as usize].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Gives one back.
    pub(super) fn give(&self, resource: Resource) {
        self.held[resource as usize].fetch_sub(1, Ordering::Relaxed);
        self.fabric.device(self.device).give(resource, self.owner);
    }

    /// How many there are of this context.
    pub(super) fn held(&self, resource: Resource) -> u32 {
        self.held[resource as usize].load(Ordering::Relaxed)
    }

    /// Closes the device, unless something is left of it.
    pub(super) fn close(&self) -> Result<(), i32> {
        if let Some(errno) = self.injected(Verb::IbvCloseDevice) {
            return Err(errno);
        }
        let made_of_it =
            [Resource::QueuePairs, Resource::Regions, Resource::CompletionQueues, Resource::Domains];
        if made_of_it.into_iter().any(|resource| self.held(resource) > 0) {
            return Err(EBUSY);
        }
        let state = self.fabric.device(self.device);
        state.give(Resource::Contexts, self.owner);
        if let Some(owner) = self.owner {
            state.disown(owner);
        }
        Ok(())
    }

    pub(super) fn query_device(&self, into: &mut abi::ibv_device_attr) -> Result<(), i32> {
        if let Some(errno) = self.injected(Verb::IbvQueryDevice) {
            return Err(errno);
        }
        if !self.fabric.spec.rules.queries {
            return Err(super::numbers::EOPNOTSUPP);
        }
        let limits = &self.fabric.spec.limits;
        let number = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        into.max_mr_size = 4 << 30;
        into.page_size_cap = 16 << 10;
        // The driver keeps one for itself.
        into.max_qp = number(limits.queue_pairs.saturating_add(1));
        into.max_qp_wr = number(limits.depth);
        into.max_sge = 1;
        into.max_cq = number(limits.completion_queues);
        into.max_cqe = number(limits.completions);
        into.max_mr = number(limits.regions);
        into.max_pd = number(limits.domains);
        into.phys_port_cnt = 1;
        Ok(())
    }

    pub(super) fn query_port(&self, port: u8, into: &mut abi::ibv_port_attr) -> Result<(), i32> {
        if let Some(errno) = self.injected(Verb::IbvQueryPort) {
            return Err(errno);
        }
        if port != 1 {
            return Err(super::numbers::EINVAL);
        }
        let active = self.fabric.port_active(self.device);
        into.state = if active { abi::IBV_PORT_ACTIVE } else { abi::IBV_PORT_DOWN };
        into.max_mtu = abi::IBV_MTU_4096;
        into.active_mtu = abi::IBV_MTU_4096;
        into.gid_tbl_len = GID_TABLE.into();
        into.max_msg_sz = self.fabric.spec.limits.message_bytes;
        into.pkey_tbl_len = 1;
        into.link_layer = 2;
        Ok(())
    }

    pub(super) fn query_gid(&self, port: u8, index: i32) -> Result<[u8; 16], i32> {
        if let Some(errno) = self.injected(Verb::IbvQueryGid) {
            return Err(errno.saturating_abs());
        }
        match usize::try_from(index) {
            Ok(index) if port == 1 && index < usize::from(GID_TABLE) => {
                if self.fabric.port_active(self.device) {
                    Ok(gids(&self.fabric, self.device)[index])
                } else {
                    Err(ENODATA)
                }
            }
            _ => Err(super::numbers::EINVAL),
        }
    }
}

/// The GID table of a device as it is now; empty entries are zero.
pub(super) fn gids(fabric: &Fabric, device: usize) -> [[u8; 16]; GID_TABLE as usize] {
    let state = fabric.device(device);
    let hardware = device.to_be_bytes();
    let link_local = |kind: u8| {
        let low = hardware.last_chunk::<3>().copied().unwrap_or_default();
        [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, kind, 0x41, 0xff, 0xfe, low[0], low[1], low[2]]
    };
    let mut table = [[0; 16]; GID_TABLE as usize];
    let index = state.gid_index.load(Ordering::Relaxed);
    let mapped = (index != NO_GID && state.gid_from.load(Ordering::Relaxed) <= now())
        .then(|| address(fabric, device))
        .flatten();
    let place = match mapped {
        Some(address) => {
            let place = (index as usize).min(table.len() - 1);
            table[place] = std::net::Ipv4Addr::from(address).to_ipv6_mapped().octets();
            Some(place)
        }
        None => None,
    };
    // The hardware's address, and that of the interface, around it.
    let mut others = (0..table.len()).filter(|at| Some(*at) != place);
    for kind in [0x52, 0xaa] {
        if let Some(at) = others.next() {
            table[at] = link_local(kind);
        }
    }
    table
}

/// The IPv4 address of a device: the same network at both ends of a cable.
fn address(fabric: &Fabric, device: usize) -> Option<[u8; 4]> {
    let (cable, end) = fabric.devices[device].cable?;
    // `Spec::check` allows 4096 cables.
    let [high, low] = u16::try_from(cable).ok()?.to_be_bytes();
    Some([10, 100 + high, low, 1 + end as u8])
}

/// Hands an error number to C as a function that returns a number does.
pub(super) fn status(result: Result<(), i32>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => errno,
    }
}

/// Hands an error number to C as a function that returns a pointer does.
pub(super) fn pointer<T>(result: Result<*mut T, i32>) -> *mut T {
    result.unwrap_or_else(|errno| {
        set_errno(errno.saturating_abs());
        std::ptr::null_mut()
    })
}
