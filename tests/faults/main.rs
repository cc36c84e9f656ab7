//! What happens to a group when processes die or stop, networks misbehave, and groups come and go.
//!
//! Everything random follows from a seed, which is printed. `RACCL_TEST_SEED` repeats it; the counts have names of their own
//! (`RACCL_TEST_KILLS` and so on), so that a long run is a matter of the environment.

#[path = "../support/mod.rs"]
mod support;

mod aborts;
mod cycles;
mod degrade;
mod fleet;
mod kills;
mod lent;
mod operations;
mod pauses;
mod proxy;
mod shrinks;
mod signals;
mod vanish;
