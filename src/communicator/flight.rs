//! The last calls of a rank.
#![forbid(unsafe_code)]

use super::Communicator;
use crate::engine::FlightRecord;

impl Communicator {
    /// The last calls of this rank on all communicators of the group, the oldest first, with the progress of those in flight.
    /// For reports of hangs: ask on every rank (from another thread if all threads wait) and see who waits for whom. Errors
    /// that end a group show the last calls too. Small messages that went out at once are not in it. Inside a user-defined
    /// operation ([`Custom`](crate::Custom)) it is empty.
    ///
    /// ```
    /// # let comm = raccl::local_group(1)?.remove(0);
    /// comm.all_reduce(&mut [1.0_f32; 8], raccl::Sum)?;
    /// comm.barrier()?;
    /// let record = comm.flight_record();
    /// println!("{record}");
    /// assert_eq!(record.calls.len(), 2);
    /// assert_eq!(record.calls[1].call, "barrier");
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn flight_record(&self) -> FlightRecord {
        self.engine().flight_record()
    }
}
