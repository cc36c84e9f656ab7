//! The C interface itself: structures, constants and the types of the functions.
//!
//! Structures come from `infiniband/verbs.h` by way of bindgen (`ci/bindings`). Apple's header has the same
//! values; `tests/layout.rs` compares both. Declared here by hand are the objects of which a caller may know only
//! the first fields: what follows those differs between systems.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_void};
use std::marker::{PhantomData, PhantomPinned};

pub use crate::bindings::*;

/// A structure of which the library hands out pointers and nothing else is known.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _bytes: [u8; 0],
            // Neither `Send`, `Sync` nor `Unpin`: those are for whoever holds the pointer to promise.
            _marker: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque! {
    /// An address handle. Unused: only connected queue pairs are.
    ibv_ah
    /// A completion channel. Unused: completions are polled.
    ibv_comp_channel
    /// A device in the list.
    ibv_device
    /// A memory window. Unused.
    ibv_mw
    /// A shared receive queue. Unused.
    ibv_srq
}

/// A function of the operations table that this crate never calls.
pub type unused_operation = unsafe extern "C" fn();
/// Takes completions off a queue; returns how many, or a negative number.
pub type poll_cq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
/// Posts a list of sends.
pub type post_send = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
/// Posts a list of receives.
pub type post_recv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// The operations that the C header reaches through the context instead of through an exported function.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ibv_context_ops {
    /// Eleven operations that are exported too, or unused.
    pub before_poll: [Option<unused_operation>; 11],
    /// `ibv_poll_cq`.
    pub poll_cq: Option<poll_cq>,
    /// Thirteen more.
    pub between: [Option<unused_operation>; 13],
    /// `ibv_post_send`.
    pub post_send: Option<post_send>,
    /// `ibv_post_recv`.
    pub post_recv: Option<post_recv>,
    /// The last five.
    pub after: [Option<unused_operation>; 5],
}

/// The first fields of an open device.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_context {
    /// The device that was opened.
    pub device: *mut ibv_device,
    /// The operations table.
    pub ops: ibv_context_ops,
}

/// The first fields of a completion queue.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_cq {
    /// The open device.
    pub context: *mut ibv_context,
    /// Null.
    pub channel: *mut ibv_comp_channel,
}

/// The first fields of a queue pair.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_qp {
    /// The open device.
    pub context: *mut ibv_context,
    /// The caller's own word.
    pub qp_context: *mut c_void,
    /// The protection domain.
    pub pd: *mut ibv_pd,
    /// Where sends complete.
    pub send_cq: *mut ibv_cq,
    /// Where receives complete.
    pub recv_cq: *mut ibv_cq,
    /// Null.
    pub srq: *mut ibv_srq,
    /// The driver's own number.
    pub handle: u32,
    /// The number by which the peer addresses it.
    pub qp_num: u32,
    /// The state as the library last saw it.
    pub state: ibv_qp_state,
    /// The transport.
    pub qp_type: ibv_qp_type,
}

/// `ibv_get_device_list`
pub type get_device_list = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
/// `ibv_free_device_list`
pub type free_device_list = unsafe extern "C" fn(*mut *mut ibv_device);
/// `ibv_get_device_name`
pub type get_device_name = unsafe extern "C" fn(*mut ibv_device) -> *const c_char;
/// `ibv_open_device`
pub type open_device = unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context;
/// `ibv_close_device`
pub type close_device = unsafe extern "C" fn(*mut ibv_context) -> c_int;
/// `ibv_query_device`
pub type query_device = unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
/// `ibv_query_port`
pub type query_port = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
/// `ibv_query_gid`
pub type query_gid = unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
/// `ibv_alloc_pd`
pub type alloc_pd = unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd;
/// `ibv_dealloc_pd`
pub type dealloc_pd = unsafe extern "C" fn(*mut ibv_pd) -> c_int;
/// `ibv_reg_mr`
pub type reg_mr = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
/// `ibv_dereg_mr`
pub type dereg_mr = unsafe extern "C" fn(*mut ibv_mr) -> c_int;
/// `ibv_create_cq`
pub type create_cq =
    unsafe extern "C" fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
/// `ibv_destroy_cq`
pub type destroy_cq = unsafe extern "C" fn(*mut ibv_cq) -> c_int;
/// `ibv_create_qp`
pub type create_qp = unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
/// `ibv_modify_qp`
pub type modify_qp = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
/// `ibv_query_qp`
pub type query_qp =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
/// `ibv_destroy_qp`
pub type destroy_qp = unsafe extern "C" fn(*mut ibv_qp) -> c_int;

/// `raccl_verbs_provider`: what a library that stands in for a system's exports to say whose rules it follows.
pub type provider = unsafe extern "C" fn() -> c_int;
/// What [`provider`] returns for Apple's rules and error numbers.
pub const PROVIDER_APPLE: c_int = 1;
