//! The few system calls that no crate wraps the way the library needs them.

mod host;
pub(crate) mod inherit;
mod interface;
pub(crate) mod interfaces;
mod poll;
pub(crate) mod rdma;
mod silence;
mod socket;
pub(crate) mod termination;
pub(crate) mod user;
mod waker;

pub(crate) use host::{available_cores, host_id, own_cores};
pub(crate) use poll::{PollFd, poll};
pub(crate) use silence::silence;
pub(crate) use socket::{IoVec, LARGEST_TRANSFER, receive, send, tune};
pub(crate) use waker::Waker;
