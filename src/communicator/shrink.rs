//! Going on after a failure with those who are left.
#![forbid(unsafe_code)]

use super::{
    Communicator,
    connect::{Recipe, alone, connect_again},
    roundup::Seat,
};
use crate::{
    bootstrap::reform::{Charter, Reformed, reform},
    engine::refuse_inside,
    error::Result,
};

/// Where a group came from, which is how another can follow it.
pub(super) enum Lineage {
    Alone(Recipe),
    Processes { charter: Box<Charter>, recipe: Recipe },
    Threads(Seat),
}

impl Communicator {
    /// Makes a new group of those who are left after a failure, and returns its communicator. Every rank that is left calls
    /// this, on any communicator of the group. Ranks keep their order and are numbered anew from 0.
    ///
    /// The call waits for all ranks that are still connected, even if they compute, until the
    /// [late deadline](Communicator::with_late_timeout); those that have not called by then are left out. If more ranks fail
    /// meanwhile, the new group is one without them. A group that has not failed is ended by this as by
    /// [`abort`](Communicator::abort). The old communicators are to be dropped. Splits and duplicates have to be made anew.
    /// A trace that is being written ends with the old group.
    ///
    /// If a network falls apart, each part can become a group of its own: whether a part is large enough to go on is for the
    /// program to decide, which can compare the new [`size`](Communicator::size) with the old.
    ///
    /// # Errors
    /// [`Error::Excluded`](crate::Error::Excluded) if the others have formed a group without this rank,
    /// [`Error::Bootstrap`](crate::Error::Bootstrap) if the ranks that are left cannot connect to each other,
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the group was shrunk before.
    ///
    /// ```
    /// use raccl::{Communicator, Error, Min, Result, Sum};
    ///
    /// /// Sums as often as it is told, with those who are left.
    /// fn work(mut comm: Communicator, steps: u64) -> Result<Communicator> {
    ///     let mut step = 0;
    ///     while step < steps {
    ///         let mut values = [1_u32; 8];
    ///         match comm.all_reduce(&mut values, Sum) {
    ///             Ok(()) => {
    ///                 assert_eq!(values, [comm.size() as u32; 8]);
    ///                 step += 1;
    ///             }
    ///             Err(Error::PeerLost { peer, .. }) => {
    ///                 println!("going on without rank {peer}");
    ///                 comm = comm.shrink()?;
    ///                 // Some may have finished a step that others have not.
    ///                 let mut least = [step];
    ///                 comm.all_reduce(&mut least, Min)?;
    ///                 step = least[0];
    ///             }
    ///             Err(error) => return Err(error),
    ///         }
    ///     }
    ///     Ok(comm)
    /// }
    ///
    /// let ranks: Vec<_> = raccl::local_group(3)?
    ///     .into_iter()
    ///     .map(|comm| {
    ///         // Rank 1 has enough of it after two steps, and leaves.
    ///         let steps = if comm.rank() == 1 { 2 } else { 9 };
    ///         std::thread::spawn(move || work(comm, steps).map(|comm| comm.size()))
    ///     })
    ///     .collect();
    /// let sizes: Vec<usize> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_>>()?;
    /// assert_eq!(sizes, [2, 3, 2]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn shrink(&self) -> Result<Communicator> {
        refuse_inside("shrink", self.rank())?;
        let engine = self.engine();
        engine.give_up("shrink");
        match &*self.inner.lineage {
            Lineage::Alone(recipe) => alone(recipe.clone()),
            Lineage::Threads(seat) => seat.shrink(self.timeouts.late),
            Lineage::Processes { charter, recipe } => {
                match reform(engine.control(), engine.rank, charter, self.timeouts.late)? {
                    Reformed::Group(joined) => connect_again(*joined, recipe.clone()),
                    Reformed::Alone => alone(recipe.clone()),
                }
            }
        }
    }
}
