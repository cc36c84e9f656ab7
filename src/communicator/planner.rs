//! Choosing and keeping plans.
#![forbid(unsafe_code)]

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use crate::{
    engine::Prepared,
    plan::{self, Collective, Plan, Shape, Tuning},
    reduce::Repr,
    topology::Topology,
};

/// Plans kept at a time. A program that makes more different calls in turn plans them anew, which takes microseconds.
const KEPT: usize = 256;

/// Chooses plans by what the group agreed on, and keeps those it has made.
pub(super) struct Planner {
    topology: Arc<Topology>,
    /// For the ranks of this communicator.
    tuning: Tuning,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    plans: HashMap<Shape, Arc<Prepared>>,
    last: Option<(Shape, Arc<Prepared>)>,
}

impl Planner {
    /// A planner for a communicator of these ranks of the group, in its order.
    pub(super) fn new(topology: Arc<Topology>, members: &[usize]) -> Planner {
        let tuning = topology.tuning(members);
        Planner { topology, tuning, kept: Mutex::default() }
    }

    /// A planner for another communicator of the same group. Its ranks may be cabled in another way than this one's.
    pub(super) fn sibling(&self, members: &[usize]) -> Planner {
        Planner::new(Arc::clone(&self.topology), members)
    }

    #[cfg(test)]
    pub(super) fn set_chunk(&mut self, bytes: u64) {
        self.tuning.chunk = bytes;
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn plan(
        &self,
        collective: Collective,
        rank: usize,
        size: usize,
        in_place: bool,
        raw_size: usize,
        acc_size: usize,
        ordered: bool,
    ) -> Arc<Prepared> {
        let shape = Shape { collective, rank, size, in_place, raw_size, acc_size, ordered };
        let mut kept = self.kept.lock();
        if let Some((last, plan)) = &kept.last
            && *last == shape
        {
            return Arc::clone(plan);
        }
        let prepared = match kept.plans.get(&shape) {
            Some(prepared) => Arc::clone(prepared),
            None => {
                let sizes = |repr| match repr {
                    Repr::Raw => raw_size,
                    Repr::Acc => acc_size,
                };
                let prepared = Prepared::new(self.make(&shape), size, in_place, sizes);
                if kept.plans.len() >= KEPT {
                    kept.plans.clear();
                }
                kept.plans.insert(shape.clone(), Arc::clone(&prepared));
                prepared
            }
        };
        kept.last = Some((shape, Arc::clone(&prepared)));
        prepared
    }

    /// How the ranks of the group are joined.
    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// What this communicator chooses by.
    pub(super) fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    fn make(&self, shape: &Shape) -> Plan {
        let choice = plan::choose(shape, &self.tuning);
        let Some(mut plan) = plan::make(shape, choice.algorithm) else {
            // `choose` only names algorithms that `make` accepts, which its tests prove.
            unreachable!("{} was chosen for {shape:?} and cannot be planned", choice.algorithm);
        };
        plan.chunk = choice.chunk;
        plan
    }
}
