//! Where the messages of a plan land: in the caller's buffer, in the workspace, or in a store until their step may write.

use super::{
    prepare::{Endpoint, Landing},
    run::Run,
};
use crate::{
    plan::{Action, Leaf},
    reduce::Repr,
};

/// Where a message's payload goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    from: usize,
    step: usize,
    leaf: usize,
    offset: usize,
    elements: usize,
    bytes: usize,
    /// Where to put it; null: it must be kept and handed to [`Run::deliver`].
    pub(crate) pointer: *mut u8,
}

// SAFETY: as for `Run`, whose place it is.
unsafe impl Send for Place {}

/// A message that came before its step was allowed to write it.
pub(super) struct Early {
    pub(super) place: Place,
    bytes: Vec<u8>,
}

impl Run {
    /// Where a message of stream `stream` with `length` bytes goes; the error is what the peer did wrong.
    pub(crate) fn accept(&mut self, from: usize, stream: u32, length: u64) -> Result<Place, String> {
        let Some(&Endpoint { step, leaf, repr }) = self.prepared.endpoints[from].get(stream as usize) else {
            return Err(format!("{} has no stream {stream}", self.operation));
        };
        let size = self.size(repr);
        let room = self.prepared.lengths[step] - self.steps[step].arrived[leaf].accepted;
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if !bytes.is_multiple_of(size) || bytes / size > room {
            return Err(format!(
                "{} expects at most {room} elements of {size} bytes, {length} bytes came",
                self.operation
            ));
        }
        let arrived = &mut self.steps[step].arrived[leaf];
        if bytes == 0 && (room > 0 || arrived.begun) {
            return Err(format!("{} has no use for an empty message", self.operation));
        }
        let offset = arrived.accepted;
        let elements = bytes / size;
        arrived.accepted += elements;
        arrived.begun = true;
        self.peers[from].granted = true;
        let pointer = self.landing(step, leaf, offset, elements);
        Ok(Place { from, step, leaf, offset, elements, bytes, pointer })
    }

    /// The payload of an accepted message is where its place said.
    pub(crate) fn arrived(&mut self, place: &Place) {
        let arrived = &mut self.steps[place.step].arrived[place.leaf];
        arrived.elements += place.elements;
        arrived.heard = true;
        self.peers[place.from].bytes += place.bytes as u64;
        self.moved = true;
    }

    /// The payload of an accepted message is in `bytes`.
    pub(crate) fn deliver(&mut self, place: Place, bytes: Vec<u8>) {
        debug_assert_eq!(place.bytes, bytes.len());
        self.moved = true;
        self.early.push(Early { place, bytes });
        self.place_early();
    }

    /// Where `elements` received elements go; null if not in one piece or not yet.
    fn landing(&self, step: usize, leaf: usize, offset: usize, elements: usize) -> *mut u8 {
        let (span, landing) = match &self.prepared.plan.steps[step].action {
            Action::Recv { into, .. } => {
                let open =
                    self.allowed(&self.prepared, step).is_some_and(|allowed| offset + elements <= allowed);
                let waiting = self.early.iter().any(|early| early.place.step == step);
                if !open || waiting {
                    return std::ptr::null_mut();
                }
                (into, Landing::Result)
            }
            Action::RecvFold { into, .. } => (into, self.prepared.landings[step][leaf]),
            _ => return std::ptr::null_mut(),
        };
        match landing {
            Landing::Workspace(at) => {
                let repr = self.leaf_repr(step, leaf);
                self.workspace(at + offset * self.size(repr))
            }
            Landing::Result => match self.locate(span, offset) {
                (pointer, contiguous) if contiguous >= elements => pointer,
                _ => std::ptr::null_mut(),
            },
        }
    }

    fn leaf_repr(&self, step: usize, leaf: usize) -> Repr {
        let Action::RecvFold { leaves, .. } = &self.prepared.plan.steps[step].action else {
            return Repr::Raw;
        };
        let mut peers = leaves.iter().filter_map(|leaf| match leaf {
            Leaf::Peer { repr, .. } => Some(*repr),
            Leaf::Local(_) => None,
        });
        peers.nth(leaf).unwrap_or(Repr::Raw)
    }

    /// Copies stored messages to their places, in order, as far as their steps are allowed.
    pub(super) fn place_early(&mut self) {
        let mut early = std::mem::take(&mut self.early);
        let mut blocked = Vec::new();
        early.retain(|Early { place, bytes }| {
            let key = (place.step, place.leaf);
            if blocked.contains(&key) || !self.place(place, bytes) {
                blocked.push(key);
                return true;
            }
            self.arrived(place);
            false
        });
        self.early = early;
    }

    /// Copies one stored message to its place; false if its step may not write yet.
    fn place(&self, place: &Place, bytes: &[u8]) -> bool {
        let action = &self.prepared.plan.steps[place.step].action;
        let size = match action {
            Action::Recv { into, .. } => self.size(into.repr),
            _ => self.size(self.leaf_repr(place.step, place.leaf)),
        };
        let (span, fixed) = match action {
            Action::Recv { into, .. } => {
                if self
                    .allowed(&self.prepared, place.step)
                    .is_none_or(|allowed| place.offset + place.elements > allowed)
                {
                    return false;
                }
                (into, None)
            }
            Action::RecvFold { into, .. } => match self.prepared.landings[place.step][place.leaf] {
                Landing::Workspace(at) => (into, Some(self.workspace(at + place.offset * size))),
                Landing::Result => (into, None),
            },
            _ => return true,
        };
        let mut copied = 0;
        while copied < place.elements {
            let (target, count) = match fixed {
                Some(target) => (target, place.elements),
                None => self.locate(span, place.offset + copied),
            };
            let count = count.min(place.elements - copied);
            let source = bytes[copied * size..].as_ptr();
            // SAFETY: `accept` checked that the elements fit the span, and the target lies in the run's buffers.
            unsafe { std::ptr::copy_nonoverlapping(source, target, count * size) };
            copied += count;
        }
        true
    }
}
