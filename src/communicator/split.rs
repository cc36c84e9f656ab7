//! Communicators made of others.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Communicator;
use crate::{
    engine::{
        Shared,
        call::{Call, CallKind},
        refuse_inside,
    },
    error::Result,
};

impl Communicator {
    /// Splits the communicator: ranks that give the same `color` form a new communicator, ordered by `key` and, where keys are
    /// equal, by their rank here. A rank that gives `None` gets none. All ranks call it. The new communicators use the
    /// links of this one.
    ///
    /// # Errors
    /// As [`barrier`](Communicator::barrier).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let row = comm.split(Some(comm.rank() as u64 / 4), 0)?.expect("every rank has a color");
    /// row.barrier()?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Communicator>> {
        /// A rank's wishes on the wire: has a color, color, key, the number it brings along.
        type Wish = [u64; 4];
        refuse_inside("split", self.rank())?;
        let engine = self.engine();
        let split = engine.begin_split()?;
        let mut wishes: Vec<Wish> = vec![[0; 4]; self.size()];
        let number = u64::from(split.number);
        wishes[self.rank()] = [u64::from(color.is_some()), color.unwrap_or(0), key.cast_unsigned(), number];
        let call = Call::new(CallKind::Split, size_of::<Wish>(), wishes.len());
        self.gather(call, None, &mut wishes, vec![1; self.size()])?;

        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<usize> =
            (0..self.size()).filter(|&rank| wishes[rank][0] != 0 && wishes[rank][1] == color).collect();
        // The first of them leads; this rank is one of them, so there is a first. What is no number is refused below.
        let leader = members.first().copied().unwrap_or(self.rank());
        let id = u32::try_from(wishes[leader][3]).unwrap_or(u32::MAX);
        let leader = self.inner.shared.members[leader];
        members.sort_by_key(|&rank| (wishes[rank][2].cast_signed(), rank));
        let members: Box<[usize]> = members.into_iter().map(|rank| self.inner.shared.members[rank]).collect();
        let planner = self.inner.planner.sibling(&members);
        let shared = Arc::new(Shared::new(id, engine.size, members, engine.rank));
        engine.register(Arc::clone(&shared), leader)?;
        let engine = Arc::clone(&self.inner.engine);
        let lineage = Arc::clone(&self.inner.lineage);
        Ok(Some(Communicator::new(engine, shared, planner, lineage, self.timeouts)))
    }

    /// A communicator of the same ranks whose calls and messages are separate from this one's: what a library uses that is
    /// handed a communicator. All ranks call it.
    ///
    /// # Errors
    /// As [`barrier`](Communicator::barrier).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mine = comm.duplicate()?;
    /// assert_eq!((mine.rank(), mine.size()), (comm.rank(), comm.size()));
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn duplicate(&self) -> Result<Communicator> {
        let copy = self.split(Some(0), 0)?;
        // Every rank gave a color.
        copy.ok_or_else(|| self.invalid("duplicate", "the split returned no communicator".to_owned()))
    }
}
