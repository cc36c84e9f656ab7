//! The two directions of a lane, as striping has them.
#![deny(clippy::unwrap_used)]

use std::{os::fd::RawFd, sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{keeper, lane::Lane};
use crate::{
    link::{HEADER_BYTES, LinkError, stripe},
    os::IoVec,
};

/// How long the last packets may take to leave.
const PATIENCE: Duration = Duration::from_secs(1);

/// All cables of a link, until they are released.
pub(crate) struct Cables(Mutex<Vec<Arc<Lane>>>);

impl Cables {
    pub(super) fn new(lanes: Vec<Arc<Lane>>) -> Cables {
        Cables(Mutex::new(lanes))
    }

    /// Packets sent so far through each.
    pub(crate) fn sent(&self) -> Vec<u64> {
        self.0.lock().iter().map(|lane| lane.packets_sent()).collect()
    }

    /// Packets that have arrived so far through each, as far as can be told without waiting for anybody.
    pub(crate) fn arrived(&self) -> Vec<u64> {
        self.0.lock().iter().map(|lane| lane.packets_arrived()).collect()
    }

    /// Lets go of them. If the link's two directions have done so before, the devices are free again when this returns.
    pub(crate) fn release(&self) {
        self.0.lock().clear();
        keeper::settle();
    }
}

/// Where bytes go into a cable. The peer sees the end of the stream when it is shut down.
pub(crate) struct Outlet(Arc<Lane>);

impl Outlet {
    pub(super) fn new(lane: Arc<Lane>) -> Outlet {
        Outlet(lane)
    }
}

impl stripe::Outlet for Outlet {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        // SAFETY: the caller keeps the pieces valid.
        unsafe { self.0.write(pieces) }
    }

    fn shutdown(&mut self) {
        if let Err(error) = self.0.end(PATIENCE) {
            tracing::debug!(cable = self.0.cable(), %error, "the peer may not see the end of the stream");
        }
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

/// Where bytes come out of a cable.
pub(crate) struct Inlet(Arc<Lane>);

impl Inlet {
    pub(super) fn new(lane: Arc<Lane>) -> Inlet {
        Inlet(lane)
    }
}

impl stripe::Inlet for Inlet {
    // Reading costs no system call, and what is read ahead is copied twice; a small message comes with its header all the same.
    const READ_AHEAD: usize = HEADER_BYTES + 192;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        // SAFETY: the caller keeps the pieces valid.
        unsafe { self.0.read(pieces) }
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}
