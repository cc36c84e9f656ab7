//! From an engine's parts to the communicator of all its ranks.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::{Communicator, planner::Planner};
use crate::{
    engine::{Engine, Parts, Shared, Timeouts},
    error::Result,
    plan::Tuning,
};

/// Starts an engine and makes the communicator of all its ranks.
pub(super) fn assemble(parts: Parts, tuning: Arc<Tuning>, timeouts: Timeouts) -> Result<Communicator> {
    let (rank, size) = (parts.rank, parts.senders.len());
    let engine = Arc::new(Engine::new(parts));
    let shared = Arc::new(Shared::new(0, size, (0..size).collect(), rank));
    engine.register(Arc::clone(&shared), 0)?;
    Ok(Communicator::new(engine, shared, Planner::new(tuning), timeouts))
}
