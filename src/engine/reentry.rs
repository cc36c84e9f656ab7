//! Calls from inside a user-defined operation.
//!
//! Such an operation runs under the engine's lock, so a call that takes the lock would wait for ever for the thread that makes
//! it. Every call asks here first and is refused instead, also if it is for a communicator of another group: two threads, each
//! in an operation of one group and calling the other, would wait for each other.
#![forbid(unsafe_code)]

use std::cell::Cell;

use crate::error::{Error, Result};

thread_local! {
    /// This thread runs a user-defined operation, and holds the lock of an engine.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread runs a user-defined operation.
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// Runs a user-defined operation, which may panic.
pub(crate) fn inside<R>(operation: impl FnOnce() -> R) -> R {
    struct Outside;
    impl Drop for Outside {
        fn drop(&mut self) {
            INSIDE.set(false);
        }
    }
    INSIDE.set(true);
    let _outside = Outside;
    operation()
}

/// Refuses a call from inside a user-defined operation.
pub(crate) fn refuse_inside(operation: &'static str, rank: usize) -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let reason = "it was called inside a user-defined operation (Custom), while the group of that operation is locked; let \
                  the operation combine its two values only, and call this before or after the reduction";
    Err(Error::InvalidArgument { operation, rank, reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn a_thread_is_inside_until_its_operation_ends_however_it_ends() {
        assert!(inside(|| refuse_inside("send", 0)).is_err());
        assert!(refuse_inside("send", 0).is_ok());
        assert!(catch_unwind(|| inside(|| panic!("boom"))).is_err());
        assert!(refuse_inside("send", 0).is_ok());
        inside(|| std::thread::spawn(|| assert!(!is_inside())).join().unwrap());
    }
}
