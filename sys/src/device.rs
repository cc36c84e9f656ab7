//! Devices: listing them, opening one, asking what it can do.

use std::ffi::CStr;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi;
use crate::errno::{self, Errno};
use crate::error::Error;
use crate::loader::{Library, Provider};
use crate::port::{Gid, GidEntry, Port, PortState};

/// The devices of this machine.
///
/// Cheap to clone. Devices made of it keep it alive.
#[derive(Debug, Clone)]
pub struct DeviceList {
    shared: Arc<List>,
}

impl DeviceList {
    pub(crate) fn of(library: &Library) -> Result<DeviceList, Error> {
        let mut count = 0;
        errno::clear();
        // SAFETY: `count` is writable for the call.
        let raw = unsafe { (library.functions().get_device_list)(&mut count) };
        if raw.is_null() {
            return match Errno::last(library.provider()) {
                // Where the kernel has no verbs at all, there are no devices; that is no failure.
                None => Ok(DeviceList {
                    shared: Arc::new(List { raw, names: Vec::new(), library: library.clone() }),
                }),
                Some(errno) if errno.is("ENOSYS") => Ok(DeviceList {
                    shared: Arc::new(List { raw, names: Vec::new(), library: library.clone() }),
                }),
                Some(errno) => Err(Error::Verb {
                    verb: "ibv_get_device_list",
                    device: "(all)".into(),
                    port: None,
                    provider: library.provider(),
                    errno,
                }),
            };
        }
        let mut list = List { raw, names: Vec::new(), library: library.clone() };
        for index in 0..usize::try_from(count).unwrap_or(0) {
            list.names.push(list.read_name(index)?);
        }
        Ok(DeviceList { shared: Arc::new(list) })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.shared.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shared.names.is_empty()
    }

    /// Their names, in the library's order.
    pub fn names(&self) -> &[String] {
        &self.shared.names
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = Device> + '_ {
        (0..self.len()).map(|index| Device { list: self.shared.clone(), index })
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Result<Device, Error> {
        match self.shared.names.iter().position(|known| known == name) {
            Some(index) => Ok(Device { list: self.shared.clone(), index }),
            None => Err(Error::UnknownDevice { name: name.into(), available: self.shared.names.clone() }),
        }
    }
}

/// The array that the library made. Freed when the last device of it has been closed.
#[derive(Debug)]
struct List {
    raw: *mut *mut abi::ibv_device,
    names: Vec<String>,
    library: Library,
}

// SAFETY: the array is never written after it was made, and verbs may be called from any thread.
unsafe impl Send for List {}
// SAFETY: as above.
unsafe impl Sync for List {}

impl List {
    /// The pointer at `index`, which is below the count that the library gave.
    fn device(&self, index: usize) -> *mut abi::ibv_device {
        // SAFETY: the array has as many entries as the library counted, and `index` is one of them.
        let entry = unsafe { self.raw.add(index) };
        // SAFETY: as above; the array lives as long as `self`.
        unsafe { *entry }
    }

    fn read_name(&self, index: usize) -> Result<String, Error> {
        let broken = |what: &str| Error::Protocol {
            verb: "ibv_get_device_name",
            device: format!("number {index}"),
            what: what.into(),
        };
        let device = self.device(index);
        if device.is_null() {
            return Err(broken("the list holds a null pointer"));
        }
        // SAFETY: the device comes from the list, which is not freed.
        let name = unsafe { (self.library.functions().get_device_name)(device) };
        if name.is_null() {
            return Err(broken("it returned a null pointer"));
        }
        // SAFETY: a device's name is a C string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(name) };
        Ok(name.to_string_lossy().into_owned())
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the library made the array; every device and open context of it holds this list, so none is
            // left.
            unsafe { (self.library.functions().free_device_list)(self.raw) };
        }
    }
}

/// A device of the list, not opened yet.
#[derive(Debug, Clone)]
pub struct Device {
    list: Arc<List>,
    index: usize,
}

impl Device {
    /// Its name, such as `rdma_en5` for the port behind network interface `en5`.
    pub fn name(&self) -> &str {
        &self.list.names[self.index]
    }

    /// Opens it. This works, on Apple's driver, for a port that is down too: look at [`Context::active_port`] before
    /// anything is allocated.
    pub fn open(&self) -> Result<Context, Error> {
        let library = &self.list.library;
        errno::clear();
        // SAFETY: the device is of the list, which is alive.
        let raw = unsafe { (library.functions().open_device)(self.list.device(self.index)) };
        if raw.is_null() {
            return Err(Error::Verb {
                verb: "ibv_open_device",
                device: self.name().into(),
                port: None,
                provider: library.provider(),
                errno: Errno::last(library.provider()).unwrap_or(Errno::new(library.provider(), 0)),
            });
        }
        let open = Open { raw, device: self.clone(), failures: Failures::default() };
        // SAFETY: a context that the library made begins with these fields.
        let ops = unsafe { &raw const (*raw).ops };
        // SAFETY: as above; nothing writes the table while it is read.
        let ops = unsafe { ops.read() };
        if ops.poll_cq.is_none() || ops.post_send.is_none() || ops.post_recv.is_none() {
            return Err(Error::Protocol {
                verb: "ibv_open_device",
                device: self.name().into(),
                what: "its operations table lacks poll_cq, post_send or post_recv".into(),
            });
        }
        Ok(Context { shared: Arc::new(open) })
    }
}

/// An open device.
///
/// Cheap to clone. It is closed when the last clone and everything made of it are gone.
#[derive(Debug, Clone)]
pub struct Context {
    pub(crate) shared: Arc<Open>,
}

impl Context {
    /// The name of the device.
    pub fn name(&self) -> &str {
        self.shared.device.name()
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.shared.device.list.library
    }

    /// Whose rules the device follows.
    pub fn provider(&self) -> Provider {
        self.library().provider()
    }

    /// What the device can do; `None` where the library cannot tell.
    pub fn limits(&self) -> Result<Option<DeviceLimits>, Error> {
        let Some(query) = self.library().functions().query_device else {
            return Ok(None);
        };
        let mut answer = Roomy::<abi::ibv_device_attr>::zeroed();
        errno::clear();
        // SAFETY: the context is open and the answer has room for more than any version of the structure.
        let status = unsafe { query(self.shared.raw, answer.as_mut_ptr()) };
        self.check("ibv_query_device", None, status)?;
        Ok(Some(DeviceLimits::of(answer.get())))
    }

    /// What the device says of a port. Ports are counted from 1.
    pub fn port(&self, port: u8) -> Result<Port, Error> {
        let mut answer = Roomy::<abi::ibv_port_attr>::zeroed();
        errno::clear();
        // SAFETY: the context is open and the answer has room for more than any version of the structure.
        let status =
            unsafe { (self.library().functions().query_port)(self.shared.raw, port, answer.as_mut_ptr()) };
        self.check("ibv_query_port", Some(port), status)?;
        Ok(Port(*answer.get()))
    }

    /// The same, and an error where the port is not active.
    pub fn active_port(&self, port: u8) -> Result<Port, Error> {
        let answer = self.port(port)?;
        match answer.state() {
            PortState::Active | PortState::ActiveDefer => Ok(answer),
            state => Err(Error::PortNotActive { device: self.name().into(), port, state }),
        }
    }

    /// One entry of a port's GID table.
    pub fn gid(&self, port: u8, index: u8) -> Result<Gid, Error> {
        let mut gid = abi::ibv_gid { raw: [0; 16] };
        errno::clear();
        // SAFETY: the context is open and `gid` is writable for the call.
        let status =
            unsafe { (self.library().functions().query_gid)(self.shared.raw, port, index.into(), &mut gid) };
        self.check("ibv_query_gid", Some(port), status)?;
        // SAFETY: every view of the union is made of plain bytes.
        Ok(Gid(unsafe { gid.raw }))
    }

    /// The entries of a port's GID table that are not empty.
    ///
    /// An entry that the driver says is not there counts as empty.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, Error> {
        let mut entries = Vec::new();
        for index in 0..self.port(port)?.gid_count() {
            // The count is at most 256, see `Port::gid_count`.
            let index = index as u8;
            match self.gid(port, index) {
                Ok(gid) if gid.is_zero() => {}
                Ok(gid) => entries.push(GidEntry { index, gid }),
                Err(Error::Verb { errno, .. }) if errno.is("ENODATA") => {}
                Err(error) => return Err(error),
            }
        }
        Ok(entries)
    }

    /// The first IPv4-mapped entry of a port's GID table, wherever it stands.
    ///
    /// It can be missing for minutes after boot or after a cable was plugged in: ask again until a deadline.
    pub fn ipv4_gid(&self, port: u8) -> Result<GidEntry, Error> {
        let entries = self.gids(port)?;
        match entries.iter().find(|entry| entry.gid.ipv4().is_some()) {
            Some(entry) => Ok(*entry),
            None => Err(Error::NoIpv4Gid {
                device: self.name().into(),
                port,
                present: entries.into_iter().map(|entry| entry.gid).collect(),
            }),
        }
    }

    /// What went wrong while objects of this device were freed. The handle stays good after all of them are gone.
    pub fn failures(&self) -> Failures {
        self.shared.failures.clone()
    }

    /// The error of a call that returned `status`, unless that is 0.
    pub(crate) fn check(&self, verb: &'static str, port: Option<u8>, status: i32) -> Result<(), Error> {
        if status == 0 {
            Ok(())
        } else {
            Err(self.error(verb, port, Errno::of_status(self.provider(), status)))
        }
    }

    /// The error of a call that returned a null pointer.
    pub(crate) fn null_error(&self, verb: &'static str) -> Error {
        self.error(verb, None, Errno::last(self.provider()).unwrap_or(Errno::new(self.provider(), 0)))
    }

    fn error(&self, verb: &'static str, port: Option<u8>, errno: Errno) -> Error {
        Error::Verb { verb, device: self.name().into(), port, provider: self.provider(), errno }
    }

    /// Keeps the error of a freeing call that returned `status`, unless that is 0.
    pub(crate) fn freed(&self, verb: &'static str, status: i32) {
        if let Err(error) = self.check(verb, None, status) {
            self.shared.failures.push(error);
        }
    }
}

/// The pointer that opening gave. Closed when dropped.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) raw: *mut abi::ibv_context,
    device: Device,
    failures: Failures,
}

// SAFETY: verbs may be called on a context from any thread, at the same time.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl Drop for Open {
    fn drop(&mut self) {
        let library = &self.device.list.library;
        errno::clear();
        // SAFETY: the context is open, and everything made of it holds it, so nothing is left.
        let status = unsafe { (library.functions().close_device)(self.raw) };
        if status != 0 {
            self.failures.push(Error::Verb {
                verb: "ibv_close_device",
                device: self.device.name().into(),
                port: None,
                provider: library.provider(),
                errno: Errno::of_status(library.provider(), status),
            });
        }
    }
}

/// What a device can do, counted over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Bytes of a memory region.
    pub region_bytes: u64,
    /// Work requests of a queue. Apple counts in frames of 4 KiB.
    pub work_requests: usize,
    /// Ports.
    pub ports: usize,
}

impl DeviceLimits {
    fn of(attributes: &abi::ibv_device_attr) -> DeviceLimits {
        let count = |value: i32| usize::try_from(value).unwrap_or(0);
        DeviceLimits {
            queue_pairs: count(attributes.max_qp),
            domains: count(attributes.max_pd),
            completion_queues: count(attributes.max_cq),
            completions: count(attributes.max_cqe),
            regions: count(attributes.max_mr),
            region_bytes: attributes.max_mr_size,
            work_requests: count(attributes.max_qp_wr),
            ports: attributes.phys_port_cnt.into(),
        }
    }
}

/// Errors of freeing, which a destructor has nobody to return to.
///
/// On Apple's driver what could not be freed stays lost until the machine restarts, so whoever shuts down looks here.
#[derive(Debug, Clone, Default)]
pub struct Failures {
    errors: Arc<Mutex<Vec<Error>>>,
}

impl Failures {
    /// More are not kept: one fault tends to repeat.
    const KEPT: usize = 32;

    /// Takes the errors so far.
    pub fn take(&self) -> Vec<Error> {
        std::mem::take(&mut self.errors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, error: Error) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() < Failures::KEPT {
            errors.push(error);
        }
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let list: Vec<_> = errors.iter().map(Error::to_string).collect();
        f.write_str(&list.join("; "))
    }
}

/// Room for an answer and for what a newer version of its structure may add.
#[repr(C)]
struct Roomy<T> {
    answer: MaybeUninit<T>,
    spare: [u64; 64],
}

/// A structure of integers alone, for which zero bytes are a value.
trait Plain: Copy {}
impl Plain for abi::ibv_port_attr {}
impl Plain for abi::ibv_device_attr {}

impl<T: Plain> Roomy<T> {
    fn zeroed() -> Self {
        Roomy { answer: MaybeUninit::zeroed(), spare: [0; 64] }
    }

    /// A pointer by which the whole room may be written.
    fn as_mut_ptr(&mut self) -> *mut T {
        (&raw mut *self).cast()
    }

    fn get(&self) -> &T {
        // SAFETY: it was zeroed, which is a value of `T`, and the library writes only integers.
        unsafe { self.answer.assume_init_ref() }
    }
}
