//! A core of its own for each rank, so that figures do not depend on where the scheduler happens to put them.

use std::env;

/// Keeps this rank on one core if its machine has one for each of its ranks and the system knows how. What runs several
/// threads a rank would suffer from it; a measurement has one.
pub(super) fn take() {
    let number = |name| env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    if let (Some(rank), Some(ranks)) = (number("RACCL_LOCAL_RANK"), number("RACCL_LOCAL_SIZE"))
        && rank < ranks
    {
        bind(rank, ranks);
    }
}

#[cfg(target_os = "linux")]
fn bind(rank: usize, ranks: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    // Of two hyperthreads of a core, which have neighbouring numbers on some machines and distant ones on others, nothing is
    // known here; spreading the ranks evenly is right where they are neighbours, and no worse elsewhere.
    if ranks <= cores.len() {
        let mut own = CpuSet::new();
        own.set(cores[rank * (cores.len() / ranks)]);
        // A refusal leaves the rank where the scheduler wants it, as without us.
        let _ = sched_setaffinity(None, &own);
    }
}

#[cfg(not(target_os = "linux"))]
fn bind(_rank: usize, _ranks: usize) {}
