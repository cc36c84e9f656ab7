//! The form of plans, and which send belongs to which receive.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::{
    super::{Action, After, Leaf, Plan, Span, Step},
    Fault, Kind,
    memory::Memory,
};
use crate::reduce::Repr;

/// Where messages of a stream end: a step of a rank, and which of its leaves if it is a fold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct End {
    pub(super) rank: usize,
    pub(super) step: usize,
    pub(super) leaf: usize,
}

/// The two ends of each stream.
#[derive(Debug)]
pub(super) struct Matching {
    /// By sending (rank, step).
    pub(super) receiver: HashMap<(usize, usize), End>,
    /// By receiving end.
    pub(super) sender: HashMap<End, (usize, usize)>,
}

/// Checks each plan by itself.
pub(super) fn check(plans: &[Plan], memories: &[Memory]) -> Result<(), Fault> {
    for (rank, (plan, memory)) in plans.iter().zip(memories).enumerate() {
        if plan.chunk != plans[0].chunk {
            return Fault::new(Kind::Form, format!("rank {rank}: another chunk size than rank 0's"));
        }
        for (index, step) in plan.steps.iter().enumerate() {
            let fault =
                |text: &str| Fault::new(Kind::Form, format!("rank {rank}, step {index} {step:?}: {text}"));
            let len = step.action.len();
            for after in &step.after {
                match *after {
                    After::Whole(earlier) | After::Stream(earlier) if earlier >= index => {
                        return fault("waits for itself or a later step");
                    }
                    After::Stream(earlier) if plan.steps[earlier].action.len() != len => {
                        return fault("streams behind a step of another length");
                    }
                    After::Whole(_) | After::Stream(_) => {}
                }
            }
            for span in step.action.spans() {
                if span.len() != len {
                    return fault("its spans differ in length");
                }
                if let Err(text) = check_span(span, memory) {
                    return fault(text);
                }
            }
            if step.action.peers().any(|(peer, _)| peer >= plans.len() || peer == rank) {
                return fault("its peer does not exist or is this rank");
            }
            check_result(&step.action, memory).or_else(fault)?;
        }
    }
    Ok(())
}

impl Matching {
    pub(super) fn new(plans: &[Plan]) -> Result<Matching, Fault> {
        // By pair of ranks, in order: the sending steps with what they send, the receiving ends with what they expect.
        type Ordered<T> = HashMap<(usize, usize), Vec<T>>;
        let mut sends: Ordered<(usize, &Span)> = HashMap::new();
        let mut receives: Ordered<(End, usize, Repr)> = HashMap::new();
        for (rank, plan) in plans.iter().enumerate() {
            for (step, Step { action, .. }) in plan.steps.iter().enumerate() {
                if let Action::Send { to, from } = action {
                    sends.entry((rank, *to)).or_default().push((step, from));
                }
                for (leaf, (peer, repr)) in action.sources().enumerate() {
                    if let Some(repr) = repr {
                        let end = End { rank, step, leaf };
                        receives.entry((peer, rank)).or_default().push((end, action.len(), repr));
                    }
                }
            }
        }
        let mut matching = Matching { receiver: HashMap::new(), sender: HashMap::new() };
        for from in 0..plans.len() {
            for to in 0..plans.len() {
                let sends = sends.remove(&(from, to)).unwrap_or_default();
                let receives = receives.remove(&(from, to)).unwrap_or_default();
                let fault =
                    |text: String| Fault::new(Kind::Matching, format!("from rank {from} to {to}: {text}"));
                if sends.len() != receives.len() {
                    return fault(format!("{} sends meet {} receives", sends.len(), receives.len()));
                }
                for (stream, ((step, span), (end, len, repr))) in sends.into_iter().zip(receives).enumerate()
                {
                    if span.len() != len {
                        return fault(format!(
                            "stream {stream} has {} elements, {len} are expected",
                            span.len()
                        ));
                    }
                    if span.repr != repr {
                        return fault(format!("stream {stream} is {:?}, {repr:?} is expected", span.repr));
                    }
                    matching.receiver.insert((from, step), end);
                    matching.sender.insert(end, (from, step));
                }
            }
        }
        Ok(matching)
    }
}

impl Action {
    /// The number of elements of the step.
    pub(super) fn len(&self) -> usize {
        match self {
            Action::Send { from, .. } => from.len(),
            Action::Recv { into, .. } | Action::RecvFold { into, .. } | Action::Copy { into, .. } => {
                into.len()
            }
        }
    }

    /// The local spans that are read.
    pub(super) fn reads(&self) -> Vec<&Span> {
        match self {
            Action::Send { from, .. } | Action::Copy { from, .. } => vec![from],
            Action::Recv { .. } => vec![],
            Action::RecvFold { leaves, .. } => leaves
                .iter()
                .filter_map(|leaf| match leaf {
                    Leaf::Local(span) => Some(span),
                    Leaf::Peer { .. } => None,
                })
                .collect(),
        }
    }

    /// The local span that is written.
    pub(super) fn write(&self) -> Option<&Span> {
        match self {
            Action::Send { .. } => None,
            Action::Recv { into, .. } | Action::RecvFold { into, .. } | Action::Copy { into, .. } => {
                Some(into)
            }
        }
    }

    fn spans(&self) -> impl Iterator<Item = &Span> {
        self.reads().into_iter().chain(self.write())
    }

    /// For each leaf, the peer and what is received from it; `None` for local leaves. A receive has one leaf.
    fn sources(&self) -> impl Iterator<Item = (usize, Option<Repr>)> {
        let list = match self {
            Action::Recv { from, into } => vec![(*from, Some(into.repr))],
            Action::RecvFold { leaves, .. } => leaves
                .iter()
                .map(|leaf| match leaf {
                    Leaf::Peer { rank, repr } => (*rank, Some(*repr)),
                    Leaf::Local(_) => (usize::MAX, None),
                })
                .collect(),
            Action::Send { .. } | Action::Copy { .. } => vec![],
        };
        list.into_iter()
    }

    /// The peers that the step exchanges messages with.
    fn peers(&self) -> impl Iterator<Item = (usize, Option<Repr>)> {
        let to = match self {
            Action::Send { to, .. } => Some((*to, None)),
            _ => None,
        };
        self.sources().filter(|(_, repr)| repr.is_some()).chain(to)
    }

    /// The leaves that come from peers.
    pub(super) fn peer_leaves(&self) -> impl Iterator<Item = usize> {
        self.sources().enumerate().filter(|(_, (_, repr))| repr.is_some()).map(|(leaf, _)| leaf)
    }
}

fn check_span(span: &Span, memory: &Memory) -> Result<(), &'static str> {
    let place = memory.place(span.buffer).ok_or("a span names a buffer that does not exist")?;
    if place.repr != span.repr {
        return Err("a span has another representation than its buffer");
    }
    let mut end = 0;
    for range in &span.ranges {
        if range.is_empty() || range.start < end || range.end > place.len {
            return Err("a range is empty, out of order or out of bounds");
        }
        end = range.end;
    }
    Ok(())
}

/// Checks that what a step writes agrees with what it reads.
fn check_result(action: &Action, memory: &Memory) -> Result<(), &'static str> {
    let Some(into) = action.write() else { return Ok(()) };
    let target = memory.locate(into, 0..into.len());
    for source in action.reads() {
        let source = memory.locate(source, 0..source.len());
        let folds = matches!(action, Action::RecvFold { .. });
        let overlap = source.0 == target.0
            && source.1.iter().any(|a| target.1.iter().any(|b| a.start < b.end && b.start < a.end));
        if overlap && !(folds && source == target) {
            return Err("it writes over what it reads");
        }
    }
    match action {
        Action::Copy { from, into } if from.repr != into.repr => Err("a copy changes the representation"),
        Action::RecvFold { leaves, .. } if !leaves.iter().any(|leaf| matches!(leaf, Leaf::Peer { .. })) => {
            Err("it receives nothing")
        }
        Action::RecvFold { into, finish, .. } => match (finish, into.repr) {
            (true, Repr::Acc) => Err("a final value is kept as a partial one"),
            (false, Repr::Raw) if !memory.shape.partials_are_raw() => Err("a partial value is rounded"),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}
