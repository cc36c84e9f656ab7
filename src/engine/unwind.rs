//! What happens if the engine itself panics.
//!
//! A panic unwinds through the call that owns the buffers and frees them, while other threads could go on to move bytes in and
//! out of them. So the group ends first: no panic leaves the engine before links and operations have let go of all memory.
#![forbid(unsafe_code)]

use std::{io, thread};

use super::{Engine, health::Failure};
use crate::error::Cause;

/// Ends the group when it is dropped by a panic that began after it was made. To be made before the engine's lock is taken,
/// so that it is dropped after the lock is released.
pub(super) struct Unwind<'a> {
    engine: &'a Engine,
    operation: &'static str,
    /// Some other panic is being handled by the caller, which may well make calls meanwhile.
    before: bool,
}

impl Engine {
    pub(super) fn unwind(&self, operation: &'static str) -> Unwind<'_> {
        Unwind { engine: self, operation, before: thread::panicking() }
    }
}

impl Drop for Unwind<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.before {
            let source = Cause::new(io::Error::other("the library panicked; please report it"));
            self.engine.health.fail(Failure::System { what: "moving data", source });
            self.engine.collapse(&mut self.engine.core.lock(), self.operation);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::super::tests::alone;
    use super::*;

    #[test]
    fn a_panic_ends_the_group() {
        let engine = alone();
        let panicking = || {
            let _unwind = engine.unwind("send");
            let _core = engine.core.lock();
            panic!("boom");
        };
        assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
        let error = engine.health.error("recv").map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("moving data")));
    }

    #[test]
    fn calls_made_while_unwinding_end_nothing() {
        struct Caller<'a>(&'a Engine);
        impl Drop for Caller<'_> {
            fn drop(&mut self) {
                let _unwind = self.0.unwind("send");
            }
        }
        let engine = alone();
        let panicking = || {
            let _caller = Caller(&engine);
            panic!("boom");
        };
        assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
        assert!(engine.health.error("recv").is_none());
    }
}
