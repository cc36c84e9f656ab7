//! Communicators made of others.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Communicator;
use crate::{
    engine::{
        Shared,
        call::{Call, CallKind},
    },
    error::{Error, Result},
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
        /// A rank's wishes on the wire: has a color, color, key, next free number.
        type Wish = [u64; 4];
        let engine = self.engine();
        let mut wishes: Vec<Wish> = vec![[0; 4]; self.size()];
        let next = u64::from(engine.next_communicator());
        wishes[self.rank()] = [u64::from(color.is_some()), color.unwrap_or(0), key.cast_unsigned(), next];
        let call = Call::new(CallKind::Split, size_of::<Wish>(), wishes.len());
        self.gather(call, None, &mut wishes, vec![1; self.size()])?;

        let mut colors: Vec<u64> = wishes.iter().filter(|wish| wish[0] != 0).map(|wish| wish[1]).collect();
        colors.sort_unstable();
        colors.dedup();
        let base = wishes.iter().map(|wish| wish[3]).max().unwrap_or(0);
        let end = u32::try_from(base + colors.len() as u64).map_err(|_| Error::InvalidArgument {
            operation: "split",
            rank: self.rank(),
            reason: "the group has made four thousand million communicators; start it again".to_owned(),
        })?;
        let Some(color) = color else {
            engine.skip_communicators(end);
            return Ok(None);
        };
        let mut members: Vec<usize> =
            (0..self.size()).filter(|&rank| wishes[rank][0] != 0 && wishes[rank][1] == color).collect();
        members.sort_by_key(|&rank| (wishes[rank][2].cast_signed(), rank));
        let members: Box<[usize]> = members.into_iter().map(|rank| self.inner.shared.members[rank]).collect();
        // The color is one of them, and `end` fits, so this does.
        let index = colors.iter().position(|&other| other == color).unwrap_or(0) as u64;
        let id = (base + index) as u32;
        let shared = Arc::new(Shared::new(id, engine.size, members, engine.rank));
        engine.register(Arc::clone(&shared), end)?;
        let engine = Arc::clone(&self.inner.engine);
        Ok(Some(Communicator::new(engine, shared, self.inner.planner.sibling(), self.timeouts)))
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
