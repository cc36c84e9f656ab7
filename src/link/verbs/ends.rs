//! The two directions of a stream, as striping has them, whether it has a cable of its own or shares several.
#![deny(clippy::unwrap_used)]

use std::{os::fd::RawFd, sync::Arc};

use parking_lot::Mutex;

use super::{bundle::Bundle, keeper, lane::Lane};
use crate::{
    link::{HEADER_BYTES, LinkError, stripe},
    os::IoVec,
};

/// What carries the streams of a link.
#[derive(Clone)]
pub(super) enum Carrier {
    /// Each stream has its lane.
    Lanes(Vec<Arc<Lane>>),
    /// They share all cables.
    Bundle(Arc<Bundle>),
}

impl Carrier {
    /// The directions of all streams, of which there are so many.
    pub(super) fn ends(&self, streams: usize) -> (Vec<Outlet>, Vec<Inlet>) {
        let end = |stream: usize| match self {
            Carrier::Lanes(lanes) => End::Lane(Arc::clone(&lanes[stream])),
            Carrier::Bundle(bundle) => End::Stream { bundle: Arc::clone(bundle), stream, deaths: 0 },
        };
        (0..streams).map(|stream| (Outlet(end(stream)), Inlet(end(stream)))).unzip()
    }
}

/// All cables of a link, until they are released.
pub(crate) struct Cables(Mutex<Carrier>);

impl Cables {
    pub(super) fn new(carrier: Carrier) -> Cables {
        Cables(Mutex::new(carrier))
    }

    /// How much has been sent so far through each: packets, or bytes of each stream where they share the cables.
    pub(crate) fn sent(&self) -> Vec<u64> {
        match &*self.0.lock() {
            Carrier::Lanes(lanes) => lanes.iter().map(|lane| lane.packets_sent()).collect(),
            Carrier::Bundle(bundle) => bundle.sent(),
        }
    }

    /// How much has arrived so far through each, as far as can be told without waiting for anybody.
    pub(crate) fn arrived(&self) -> Vec<u64> {
        match &*self.0.lock() {
            Carrier::Lanes(lanes) => lanes.iter().map(|lane| lane.packets_arrived()).collect(),
            Carrier::Bundle(bundle) => bundle.arrived(),
        }
    }

    /// Bytes that were sent from where they were, and received where they were wanted.
    pub(crate) fn uncopied(&self) -> (u64, u64) {
        match &*self.0.lock() {
            Carrier::Lanes(lanes) => {
                let each = lanes.iter().map(|lane| lane.uncopied());
                each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
            }
            Carrier::Bundle(_) => (0, 0),
        }
    }

    /// Moves along what has not arrived because a cable has died.
    pub(crate) fn tend(&self) {
        if let Carrier::Bundle(bundle) = &*self.0.lock()
            && let Err(error) = bundle.tend()
        {
            // Whoever waits for the bytes learns that they do not come.
            tracing::debug!(cable = bundle.cable(0), %error, "what is under way is lost");
        }
    }

    /// The peer is leaving, or the group has failed: what happens to cables is no news any more.
    pub(crate) fn leave(&self) {
        if let Carrier::Bundle(bundle) = &*self.0.lock() {
            bundle.leave();
        }
    }

    /// Lets go of them. If the link's two directions have done so before, the devices are free again when this returns.
    pub(crate) fn release(&self) {
        *self.0.lock() = Carrier::Lanes(Vec::new());
        keeper::settle();
    }
}

/// One stream.
enum End {
    Lane(Arc<Lane>),
    Stream {
        bundle: Arc<Bundle>,
        stream: usize,
        /// The dead cables that whoever sends knows of.
        deaths: u32,
    },
}

/// Where bytes of a stream go in. The peer sees its end when it is shut down.
pub(crate) struct Outlet(End);

impl stripe::Outlet for Outlet {
    unsafe fn write(&mut self, pieces: &[IoVec]) -> Result<usize, LinkError> {
        match &self.0 {
            // SAFETY: the caller keeps the pieces valid.
            End::Lane(lane) => unsafe { lane.write(pieces) },
            // SAFETY: the same.
            End::Stream { bundle, stream, deaths } => unsafe { bundle.write(*stream, *deaths, pieces) },
        }
    }

    fn unsettled(&mut self) -> Result<u64, LinkError> {
        match &self.0 {
            End::Lane(lane) => lane.unsettled(),
            End::Stream { .. } => Ok(0),
        }
    }

    fn revoke(&mut self) {
        if let End::Lane(lane) = &self.0 {
            lane.revoke_sends();
        }
    }

    fn in_turn(&mut self) -> bool {
        let End::Stream { bundle, deaths, .. } = &mut self.0 else { return false };
        *deaths = bundle.deaths();
        *deaths > 0
    }

    fn shutdown(&mut self) -> bool {
        let (ended, cable) = match &self.0 {
            End::Lane(lane) => (lane.end(), lane.cable()),
            End::Stream { bundle, stream, .. } => (bundle.end(*stream), bundle.cable(*stream)),
        };
        ended.unwrap_or_else(|error| {
            tracing::debug!(cable, %error, "the peer may not see the end of the stream");
            true
        })
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

/// Where bytes of a stream come out.
pub(crate) struct Inlet(End);

impl stripe::Inlet for Inlet {
    // Reading costs no system call, and what is read ahead is copied twice; a small message comes with its header all the same.
    const READ_AHEAD: usize = HEADER_BYTES + 192;

    unsafe fn read(&mut self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        match &self.0 {
            // SAFETY: the caller keeps the pieces valid.
            End::Lane(lane) => unsafe { lane.read(pieces, false) },
            // SAFETY: the same.
            End::Stream { bundle, stream, .. } => unsafe { bundle.read(*stream, pieces) },
        }
    }

    unsafe fn read_lasting(&mut self, pieces: &[IoVec]) -> Result<stripe::Read, LinkError> {
        match &self.0 {
            // SAFETY: the caller keeps the pieces valid, the first for longer.
            End::Lane(lane) => unsafe { lane.read(pieces, true) },
            // SAFETY: the same.
            End::Stream { bundle, stream, .. } => unsafe { bundle.read(*stream, pieces) },
        }
    }

    fn revoke(&mut self) {
        if let End::Lane(lane) = &self.0 {
            lane.revoke_receives();
        }
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}
