//! What a plan in flight waits for.
#![forbid(unsafe_code)]

use super::{recorder::FlightPeer, run::Run};
use crate::plan::{Action, Leaf};

impl Run {
    /// The first peer that an unfinished step waits for, in world ranks, with the bytes it has sent for this operation and
    /// whether it is known to have entered.
    pub(crate) fn waits_for(&self) -> Option<(usize, u64, bool)> {
        if let Some(peer) = self.unheard {
            return Some((peer, 0, false));
        }
        let from =
            (self.first..self.steps.len()).filter(|&i| !self.steps[i].finished).find_map(|i| match &self
                .prepared
                .plan
                .steps[i]
                .action
            {
                Action::Send { to, .. } => Some(*to),
                Action::Recv { from, .. } => Some(*from),
                Action::RecvFold { leaves, .. } => {
                    let peers = leaves.iter().filter_map(|leaf| match leaf {
                        Leaf::Peer { rank, .. } => Some(*rank),
                        Leaf::Local(_) => None,
                    });
                    let state = &self.steps[i];
                    peers
                        .zip(&state.arrived)
                        .find(|(_, a)| !a.heard || a.elements < self.prepared.lengths[i])
                        .map(|(p, _)| p)
                }
                Action::Copy { .. } => None,
            })?;
        Some((self.shared.members[from], self.peers[from].bytes, self.peers[from].granted))
    }

    /// How far the run is with each peer that its plan has to do with, by world rank.
    pub(crate) fn traffic(&self) -> impl Iterator<Item = FlightPeer> + '_ {
        let mut sent = vec![(0, 0); self.peers.len()];
        let mut sends = vec![false; self.peers.len()];
        for (index, step) in self.prepared.plan.steps.iter().enumerate() {
            if let Action::Send { to, from } = &step.action {
                let bytes = |elements: usize| (elements * self.size(from.repr)) as u64;
                sends[*to] = true;
                sent[*to].0 += bytes(self.steps[index].done);
                sent[*to].1 += bytes(self.prepared.lengths[index]);
            }
        }
        let involved =
            (0..self.peers.len()).filter(move |&p| sends[p] || !self.prepared.endpoints[p].is_empty());
        involved.map(move |peer| FlightPeer {
            rank: self.shared.members[peer],
            link: None,
            entered: self.peers[peer].granted,
            received: (self.peers[peer].bytes, self.prepared.inbound[peer]),
            sent: sent[peer],
        })
    }

    /// How far the unfinished steps are, in words.
    pub(crate) fn progress(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        if let Some(peer) = self.unheard {
            let _ = write!(text, "; rank {peer} has not entered the broadcast before, as far as is known");
        }
        for i in (self.first..self.steps.len()).filter(|&i| !self.steps[i].finished) {
            let (state, length) = (&self.steps[i], self.prepared.lengths[i]);
            let what = match &self.prepared.plan.steps[i].action {
                Action::Send { to, .. } => format!("send to rank {}", self.shared.members[*to]),
                Action::Recv { from, .. } => format!("receive from rank {}", self.shared.members[*from]),
                Action::RecvFold { .. } => "fold".to_owned(),
                Action::Copy { .. } => "copy".to_owned(),
            };
            // Writing to a string cannot fail.
            let _ = write!(text, "; {what}: {}/{length} done", state.done);
            if state.issued != state.done {
                let _ = write!(text, ", {} handed over", state.issued);
            }
            for arrived in &state.arrived {
                let _ = write!(text, ", {} arrived", arrived.elements);
            }
            let _ = write!(text, ", {:?} allowed", self.allowed(&self.prepared, i));
        }
        text
    }

    /// Adds the world ranks that unfinished steps receive from to `peers`, and those they send to to `sends`.
    pub(crate) fn needs(&self, receives: &mut [bool], sends: &mut [bool]) {
        if let Some(peer) = self.unheard {
            receives[peer] = true;
            return;
        }
        for i in (self.first..self.steps.len()).filter(|&i| !self.steps[i].finished) {
            match &self.prepared.plan.steps[i].action {
                Action::Send { to, .. } => sends[self.shared.members[*to]] = true,
                Action::Recv { from, .. } => receives[self.shared.members[*from]] = true,
                Action::RecvFold { leaves, .. } => {
                    let state = &self.steps[i];
                    let mut arrived = state.arrived.iter();
                    for leaf in leaves {
                        if let Leaf::Peer { rank, .. } = leaf
                            && arrived
                                .next()
                                .is_some_and(|a| !a.heard || a.elements < self.prepared.lengths[i])
                        {
                            receives[self.shared.members[*rank]] = true;
                        }
                    }
                }
                Action::Copy { .. } => {}
            }
        }
    }
}
