//! From an engine's parts to the communicator of all its ranks.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{Communicator, planner::Planner, shrink::Lineage};
use crate::{
    engine::{Engine, Parts, Shared, Timeouts},
    error::Result,
    topology::Topology,
};

/// Starts an engine and makes the communicator of all its ranks.
pub(super) fn assemble(
    parts: Parts,
    topology: Arc<Topology>,
    timeouts: Timeouts,
    lineage: Lineage,
) -> Result<Communicator> {
    let (rank, size) = (parts.rank, parts.senders.len());
    let engine = Arc::new(Engine::new(parts));
    let members: Box<[usize]> = (0..size).collect();
    let planner = Planner::new(topology, &members);
    let shared = Arc::new(Shared::new(0, size, members, rank));
    engine.register(Arc::clone(&shared), 0)?;
    Ok(Communicator::new(engine, shared, planner, Arc::new(lineage), timeouts))
}
