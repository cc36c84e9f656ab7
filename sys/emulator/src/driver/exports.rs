//! The exported functions. Each turns pointers into references and calls what does the work.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use raccl_sys::abi;

use super::completion::{QueueObject, create_cq};
use super::device::{Context, ContextObject, DeviceObject, devices, pointer, status};
use super::memory::{Domain, DomainObject, RegionObject, alloc_pd, reg_mr};
use super::numbers::{EINVAL, set_errno};
use super::pair::{Pair, PairObject, create_qp};

/// Says that this library follows Apple's rules.
#[unsafe(no_mangle)]
pub(super) extern "C" fn raccl_verbs_provider() -> c_int {
    abi::PROVIDER_APPLE
}

/// Lists the devices of this process's machine.
///
/// # Safety
///
/// `count` is null or can be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut abi::ibv_device {
    let devices = match devices() {
        Ok(devices) => devices,
        Err(errno) => {
            set_errno(errno);
            return std::ptr::null_mut();
        }
    };
    // SAFETY: the caller's pointer is null or can be written.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = devices.len() as c_int;
    }
    let mut list: Vec<*mut DeviceObject> =
        devices.into_iter().map(|device| Box::into_raw(Box::new(device))).collect();
    list.push(std::ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

/// Frees a list and the devices of it.
///
/// # Safety
///
/// `list` is one that [`ibv_get_device_list`] returned, no device of it is open, and it is not used any more.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut abi::ibv_device) {
    let list: *mut *mut DeviceObject = list.cast();
    let mut count = 0;
    loop {
        // SAFETY: a list ends with a null pointer, which has not been seen yet.
        let place = unsafe { list.add(count) };
        // SAFETY: as above.
        let device = unsafe { place.read() };
        count += 1;
        if device.is_null() {
            break;
        }
        // SAFETY: the device was made a raw pointer by `ibv_get_device_list`, and the caller gives it up.
        drop(unsafe { Box::from_raw(device) });
    }
    // SAFETY: the list is a boxed slice of that many pointers, which the caller gives up.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, count)) });
}

/// A device's name.
///
/// # Safety
///
/// `device` is of a list that has not been freed.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_get_device_name(device: *mut abi::ibv_device) -> *const c_char {
    // SAFETY: the pointer is of a box that `ibv_get_device_list` made.
    unsafe { &*device.cast::<DeviceObject>() }.name().as_ptr()
}

/// Opens a device.
///
/// # Safety
///
/// `device` is of a list that is not freed before the context is closed.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_open_device(device: *mut abi::ibv_device) -> *mut abi::ibv_context {
    // SAFETY: the pointer is of a box that `ibv_get_device_list` made.
    pointer(unsafe { &*device.cast::<DeviceObject>() }.open()).cast()
}

/// Closes a device.
///
/// # Safety
///
/// `context` is open, and not used any more after success.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_close_device(context: *mut abi::ibv_context) -> c_int {
    // SAFETY: the caller's context is alive.
    let result = unsafe { the_context(context) }.close();
    if result.is_ok() {
        // SAFETY: the context is a box that `ibv_open_device` made, which the caller gives up.
        drop(unsafe { Box::from_raw(context.cast::<ContextObject>()) });
    }
    status(result)
}

/// What a device can do.
///
/// # Safety
///
/// `context` is open, and `into` can be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_query_device(
    context: *mut abi::ibv_context,
    into: *mut abi::ibv_device_attr,
) -> c_int {
    // SAFETY: any bytes are attributes, and the caller's can be written.
    let into = unsafe { zeroed(into) };
    // SAFETY: the caller's context is alive.
    status(unsafe { the_context(context) }.query_device(into))
}

/// The state of a port.
///
/// # Safety
///
/// `context` is open, and `into` can be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_query_port(
    context: *mut abi::ibv_context,
    port: u8,
    into: *mut abi::ibv_port_attr,
) -> c_int {
    // SAFETY: any bytes are attributes, and the caller's can be written.
    let into = unsafe { zeroed(into) };
    // SAFETY: the caller's context is alive.
    status(unsafe { the_context(context) }.query_port(port, into))
}

/// An address of a port. Fails with -1 and `errno`, as the others do not.
///
/// # Safety
///
/// `context` is open, and `into` can be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_query_gid(
    context: *mut abi::ibv_context,
    port: u8,
    index: c_int,
    into: *mut abi::ibv_gid,
) -> c_int {
    // SAFETY: the caller's context is alive.
    match unsafe { the_context(context) }.query_gid(port, index) {
        Ok(raw) => {
            // SAFETY: the caller's answer can be written.
            unsafe { into.write(abi::ibv_gid { raw }) };
            0
        }
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Allocates a protection domain.
///
/// # Safety
///
/// `context` is open.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_alloc_pd(context: *mut abi::ibv_context) -> *mut abi::ibv_pd {
    // SAFETY: the caller's context is alive.
    pointer(alloc_pd(context.cast(), unsafe { the_context(context) })).cast()
}

/// Frees a protection domain.
///
/// # Safety
///
/// `domain` is alive, and not used any more after success.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_dealloc_pd(domain: *mut abi::ibv_pd) -> c_int {
    // SAFETY: the caller's domain is alive.
    let result = unsafe { the_domain(domain) }.dealloc();
    if result.is_ok() {
        // SAFETY: the domain is a box that `ibv_alloc_pd` made, which the caller gives up.
        drop(unsafe { Box::from_raw(domain.cast::<DomainObject>()) });
    }
    status(result)
}

/// Registers memory.
///
/// # Safety
///
/// `domain` is alive, and the memory stays mapped until it is deregistered.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_reg_mr(
    domain: *mut abi::ibv_pd,
    start: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut abi::ibv_mr {
    // SAFETY: the caller's domain is alive.
    let known = unsafe { the_domain(domain) };
    pointer(reg_mr(domain.cast(), known, start.expose_provenance(), len, access.cast_unsigned())).cast()
}

/// Deregisters memory.
///
/// # Safety
///
/// `region` is alive, and not used any more after success.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_dereg_mr(region: *mut abi::ibv_mr) -> c_int {
    let region: *mut RegionObject = region.cast();
    // SAFETY: the pointer is of a box that `ibv_reg_mr` made.
    let result = unsafe { &*region }.dereg();
    if result.is_ok() {
        // SAFETY: as above; the caller gives it up.
        drop(unsafe { Box::from_raw(region) });
    }
    status(result)
}

/// Makes a completion queue.
///
/// # Safety
///
/// `context` is open.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_create_cq(
    context: *mut abi::ibv_context,
    entries: c_int,
    _word: *mut c_void,
    channel: *mut abi::ibv_comp_channel,
    _vector: c_int,
) -> *mut abi::ibv_cq {
    // SAFETY: the caller's context is alive.
    let known = unsafe { the_context(context) };
    pointer(create_cq(context.cast(), known, entries, !channel.is_null())).cast()
}

/// Destroys a completion queue.
///
/// # Safety
///
/// `queue` is alive, and not used any more after success.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_destroy_cq(queue: *mut abi::ibv_cq) -> c_int {
    let queue: *mut QueueObject = queue.cast();
    // SAFETY: the pointer is of a box that `ibv_create_cq` made.
    let result = unsafe { &(*queue).queue }.destroy();
    if result.is_ok() {
        // SAFETY: as above; the caller gives it up.
        drop(unsafe { Box::from_raw(queue) });
    }
    status(result)
}

/// Makes a queue pair.
///
/// # Safety
///
/// `domain` is alive and so are the queues that `init` names.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_create_qp(
    domain: *mut abi::ibv_pd,
    init: *mut abi::ibv_qp_init_attr,
) -> *mut abi::ibv_qp {
    // SAFETY: the caller's attributes can be read and written.
    let Some(init) = (unsafe { init.as_mut() }) else {
        return pointer(Err(EINVAL));
    };
    // SAFETY: the caller's domain is alive.
    let known = unsafe { the_domain(domain) };
    pointer(create_qp(domain.cast(), known, init)).cast()
}

/// Changes the state of a queue pair.
///
/// # Safety
///
/// `pair` is alive, and `attributes` can be read.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_modify_qp(
    pair: *mut abi::ibv_qp,
    attributes: *mut abi::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller's attributes can be read.
    let Some(attributes) = (unsafe { attributes.as_ref() }) else { return EINVAL };
    // SAFETY: the caller's queue pair is alive.
    match unsafe { the_pair(pair) }.modify(attributes, mask.cast_unsigned()) {
        Ok(state) => {
            // SAFETY: the queue pair is alive, and its first fields are written by this call alone.
            unsafe { (*pair).state = state };
            0
        }
        Err(errno) => errno,
    }
}

/// What a queue pair is.
///
/// # Safety
///
/// `pair` is alive, and both answers can be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_query_qp(
    pair: *mut abi::ibv_qp,
    attributes: *mut abi::ibv_qp_attr,
    _mask: c_int,
    init: *mut abi::ibv_qp_init_attr,
) -> c_int {
    // SAFETY: any bytes are attributes, and the caller's can be written.
    let attributes = unsafe { zeroed(attributes) };
    // SAFETY: as above.
    let init = unsafe { zeroed(init) };
    // SAFETY: the caller's queue pair is alive.
    let result = unsafe { the_pair(pair) }.query(attributes);
    init.cap = attributes.cap;
    init.qp_type = abi::IBV_QPT_UC;
    status(result)
}

/// Destroys a queue pair.
///
/// # Safety
///
/// `pair` is alive, and not used any more after success.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn ibv_destroy_qp(pair: *mut abi::ibv_qp) -> c_int {
    // SAFETY: the caller's queue pair is alive.
    let result = unsafe { the_pair(pair) }.destroy();
    if result.is_ok() {
        // SAFETY: the queue pair is a box that `ibv_create_qp` made, which the caller gives up.
        drop(unsafe { Box::from_raw(pair.cast::<PairObject>()) });
    }
    status(result)
}

/// # Safety
///
/// `context` is open, and stays so as long as the result is used.
unsafe fn the_context<'a>(context: *mut abi::ibv_context) -> &'a Arc<Context> {
    // SAFETY: the pointer is of a box that `ibv_open_device` made.
    unsafe { &(*context.cast::<ContextObject>()).context }
}

/// # Safety
///
/// `domain` is alive, and stays so as long as the result is used.
unsafe fn the_domain<'a>(domain: *mut abi::ibv_pd) -> &'a Arc<Domain> {
    // SAFETY: the pointer is of a box that `ibv_alloc_pd` made.
    unsafe { &(*domain.cast::<DomainObject>()).domain }
}

/// # Safety
///
/// `pair` is alive, and stays so as long as the result is used.
unsafe fn the_pair<'a>(pair: *mut abi::ibv_qp) -> &'a Arc<Pair> {
    // SAFETY: the pointer is of a box that `ibv_create_qp` made.
    unsafe { &(*pair.cast::<PairObject>()).pair }
}

/// Empties a caller's answer.
///
/// # Safety
///
/// `answer` can be written, and zero bytes are a `T`.
unsafe fn zeroed<'a, T>(answer: *mut T) -> &'a mut T {
    // SAFETY: the caller promises it.
    unsafe { answer.write_bytes(0, 1) };
    // SAFETY: it was just written.
    unsafe { &mut *answer }
}
