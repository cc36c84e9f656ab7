//! A plan with everything that the engine looks up while it runs it.
#![forbid(unsafe_code)]

use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use super::run::Run;
use crate::{
    plan::{Action, After, Algorithm, Buffer, Leaf, Plan, Span},
    reduce::Repr,
};

/// Bytes from a peer above which its operation waits for a grant once the budget is used up, so the receiver must say
/// that it has entered.
pub(crate) const GRANT_THRESHOLD: u64 = 64 << 10;

/// A plan made ready; shared by all runs of the same shape.
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    /// Elements that each step moves.
    pub(crate) lengths: Vec<usize>,
    /// For each step that sends: which stream to that peer it is.
    pub(crate) streams: Vec<u32>,
    /// For each peer: where its streams go, in their order.
    pub(crate) endpoints: Vec<Vec<Endpoint>>,
    /// For each peer: bytes that it will send.
    pub(crate) inbound: Vec<u64>,
    /// Elements that a step moves at a time.
    pub(crate) chunk: usize,
    /// Where each scratch buffer begins in the workspace.
    pub(crate) scratch: Vec<usize>,
    /// For each folding step, for each of its peers' leaves, where its landing begins.
    pub(crate) landings: Vec<Vec<Landing>>,
    /// Bytes of scratch and landings together.
    pub(crate) workspace: usize,
    /// A run between two uses.
    pub(crate) spare: Mutex<Option<Box<Run>>>,
}

/// The receiving end of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endpoint {
    pub(crate) step: usize,
    /// Which of the step's peers' leaves (0 for a plain receive).
    pub(crate) leaf: usize,
    pub(crate) repr: Repr,
}

/// Where a received operand of a fold is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Landing {
    /// At this offset of the workspace.
    Workspace(usize),
    /// In the fold's result itself, which is folded in place.
    Result,
}

impl Prepared {
    /// `sizes` gives the bytes of an element of a representation, `ranks` the communicator's size.
    pub(crate) fn new(
        plan: Plan,
        ranks: usize,
        in_place: bool,
        sizes: impl Fn(Repr) -> usize,
    ) -> Arc<Prepared> {
        let mut workspace = 0;
        let mut room = |bytes: usize| {
            let at = workspace;
            workspace += bytes.next_multiple_of(64);
            at
        };
        let scratch = plan.scratch.iter().map(|s| room(s.len * sizes(s.repr))).collect();
        let lengths: Vec<usize> = plan.steps.iter().map(|step| length(&step.action)).collect();
        let mut sent = vec![0; ranks];
        let mut streams = Vec::new();
        let mut endpoints = vec![Vec::new(); ranks];
        let mut inbound = vec![0; ranks];
        let mut landings = Vec::new();
        for (index, step) in plan.steps.iter().enumerate() {
            let mut stream = 0;
            let mut landing = Vec::new();
            let mut expect = |from: usize, leaf: usize, repr: Repr| {
                endpoints[from].push(Endpoint { step: index, leaf, repr });
                inbound[from] += (lengths[index] * sizes(repr)) as u64;
            };
            match &step.action {
                Action::Send { to, .. } => {
                    stream = sent[*to];
                    sent[*to] += 1;
                }
                Action::Recv { from, into } => expect(*from, 0, into.repr),
                Action::RecvFold { leaves, into, .. } => {
                    let peers = leaves.iter().filter_map(|leaf| match leaf {
                        Leaf::Peer { rank, repr } => Some((*rank, *repr)),
                        Leaf::Local(_) => None,
                    });
                    for (leaf, (rank, repr)) in peers.enumerate() {
                        expect(rank, leaf, repr);
                        let fits = leaf == 0
                            && !in_place
                            && step.after.is_empty()
                            && lands_in_result(leaves, into, repr);
                        landing.push(if fits {
                            Landing::Result
                        } else {
                            Landing::Workspace(room(lengths[index] * sizes(repr)))
                        });
                    }
                }
                Action::Copy { .. } => {}
            }
            streams.push(stream);
            landings.push(landing);
        }
        let chunk = (plan.chunk / sizes(Repr::Raw).max(1)).max(1);
        Arc::new(Prepared {
            lengths,
            streams,
            endpoints,
            inbound,
            chunk,
            scratch,
            landings,
            workspace,
            spare: Mutex::new(None),
            plan,
        })
    }

    /// A plan without steps, which stands in where there is none.
    pub(crate) fn nothing() -> Arc<Prepared> {
        static NOTHING: LazyLock<Arc<Prepared>> = LazyLock::new(|| {
            let plan =
                Plan { algorithm: Algorithm::Direct, steps: Vec::new(), scratch: Vec::new(), chunk: 1 };
            Prepared::new(plan, 0, false, |_| 1)
        });
        Arc::clone(&NOTHING)
    }

    /// How far a step may go, given how far the others are: `None` while it must not even start.
    pub(crate) fn allowed(
        &self,
        step: usize,
        done: impl Fn(usize) -> usize,
        finished: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let mut limit = self.lengths[step];
        for after in &self.plan.steps[step].after {
            match *after {
                After::Whole(other) if !finished(other) => return None,
                After::Stream(other) if limit == 0 && !finished(other) => return None,
                After::Stream(other) => limit = limit.min(done(other)),
                After::Whole(_) => {}
            }
        }
        Some(limit)
    }
}

/// Elements that an action moves.
fn length(action: &Action) -> usize {
    match action {
        Action::Send { from: span, .. } | Action::Recv { into: span, .. } => span_length(span),
        Action::RecvFold { into, .. } | Action::Copy { into, .. } => span_length(into),
    }
}

pub(crate) fn span_length(span: &Span) -> usize {
    span.ranges.iter().map(|range| range.len()).sum()
}

/// Out of place, the user's output is nobody's operand before this fold writes it, so one operand can be received there.
fn lands_in_result(leaves: &[Leaf], into: &Span, repr: Repr) -> bool {
    into.buffer == Buffer::Output
        && into.repr == repr
        && into.ranges.len() == 1
        && leaves.iter().all(|leaf| !matches!(leaf, Leaf::Local(span) if span.buffer == Buffer::Output))
}
