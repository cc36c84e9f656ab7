//! Which communicators there are: made by a split, known by their number, forgotten when their last handle is dropped.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{
    Engine, Shared,
    core::{Core, Group},
    health::Failure,
    reentry,
};
use crate::{
    error::{Error, Result},
    link::LinkKind,
};

impl Engine {
    /// Makes a communicator known, whose number world rank `leader` brought along.
    pub(crate) fn register(&self, shared: Arc<Shared>, leader: usize) -> Result<()> {
        let mut core = self.core.lock();
        self.forget_dropped(&mut core);
        let id = shared.id;
        if !core.numbers.belongs_to(id, leader) || core.communicators.contains_key(&id) {
            let link = self.link(leader).unwrap_or(LinkKind::Local);
            let reason = format!("it numbers a communicator {id}, which it may not");
            return self.check(&mut core, Err(Failure::Protocol { peer: leader, link, reason }), "split");
        }
        core.communicators.insert(id, Group::new(shared, self.size));
        core.numbers.made(id);
        let result = core.leave_limbo(id, &self.lines());
        self.check(&mut core, result, "split")?;
        self.stir(&core);
        Ok(())
    }

    /// Begins a split: the number that it takes if we lead what comes out of it. Ends when the value is dropped.
    pub(crate) fn begin_split(&self) -> Result<Split<'_>> {
        let number = self.core.lock().numbers.begin_split().ok_or_else(|| Error::InvalidArgument {
            operation: "split",
            rank: self.rank,
            reason:
                "this rank has made millions of communicators, and no number is left; form the group anew"
                    .to_owned(),
        })?;
        Ok(Split { engine: self, number })
    }

    /// Forgets a communicator; what still comes for it is dropped. Inside a user-defined operation that has to wait.
    pub(crate) fn unregister(&self, id: u32) {
        self.dropped.lock().push(id);
        if !reentry::is_inside() {
            self.forget_dropped(&mut self.core.lock());
        }
    }

    fn forget_dropped(&self, core: &mut Core) {
        let dropped = std::mem::take(&mut *self.dropped.lock());
        core.communicators.retain(|id, _| !dropped.contains(id));
        core.reports.retain(|(id, _), _| !dropped.contains(id));
    }
}

/// A split under way.
pub(crate) struct Split<'a> {
    engine: &'a Engine,
    /// The number that this rank brings along.
    pub(crate) number: u32,
}

impl Drop for Split<'_> {
    fn drop(&mut self) {
        let core = &mut *self.engine.core.lock();
        core.numbers.end_split();
        // What came for a communicator that was dropped before this split ended.
        core.numbers.over().for_each(|numbers| drop(core.limbo.take(numbers)));
    }
}
