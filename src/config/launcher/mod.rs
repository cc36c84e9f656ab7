//! What other launchers say: MLX's and JACCL's, Open MPI's, PMI's, Slurm's and torchrun's variables, and how their ranks meet.
#![forbid(unsafe_code)]

mod job_file;
mod mlx;
mod openmpi;
mod pmi;
#[cfg(test)]
mod real;
mod slurm;
mod torchrun;

use std::time::Instant;

pub(super) use self::job_file::{JobFile, Published};
use super::{
    Config, Origin, Rendezvous, Secret,
    environment::{Environment, ReadFile},
    setting::{Setting, refuse},
};
use crate::error::Result;

/// Fills in what the `RACCL_*` names left open. [`Config::from_env`] documents the order.
pub(super) fn complete(
    environment: &Environment,
    read_file: ReadFile<'_>,
    config: &mut Config,
) -> Result<()> {
    mlx::complete(environment, read_file, config)?;
    if config.rank.is_some() || config.size.is_some() {
        return Ok(());
    }
    let readers = [torchrun::read_elastic, openmpi::read, pmi::read, slurm::read, torchrun::read_plain];
    for reader in readers {
        if let Some(launched) = reader(environment)? {
            launched.apply(config);
            break;
        }
    }
    Ok(())
}

/// What a launcher says about this process.
struct Launched {
    origin: Origin,
    rank: Setting<usize>,
    /// Missing only if the launcher has to be asked.
    size: Option<Setting<usize>>,
    local_rank: Option<Setting<usize>>,
    local_size: Option<Setting<usize>>,
    job: Option<Setting<String>>,
    meeting: Meeting,
}

impl Launched {
    fn apply(self, config: &mut Config) {
        config.origin = self.origin;
        config.rank = Some(self.rank);
        config.size = self.size;
        config.local_rank = config.local_rank.take().or(self.local_rank);
        config.local_size = config.local_size.take().or(self.local_size);
        config.job = config.job.take().or(self.job);
        config.meeting = self.meeting;
    }
}

/// What a launcher offers for ranks to meet.
pub(super) enum Meeting {
    /// Nothing.
    None,
    /// Rank 0 listens at this `host:port`.
    Coordinator(Setting<String>),
    /// All ranks are on one machine and know a name for a file that no other job knows.
    JobFile(JobFile),
    /// The launcher exchanges bytes between the ranks.
    Pmi(pmi::Launcher),
    /// Nothing, and this is why and what to do.
    Missing(String),
}

impl Meeting {
    /// What to call it, its value, and where that is from.
    pub(super) fn explain(&self) -> Option<(&'static str, String, &'static str)> {
        match self {
            Meeting::None => None,
            Meeting::Coordinator(coordinator) => {
                Some(("coordinator", coordinator.value.clone(), coordinator.name))
            }
            Meeting::JobFile(file) => {
                Some(("addresses", file.to_string(), "from the launcher's names for the job"))
            }
            Meeting::Pmi(launcher) => {
                Some(("addresses", format!("exchanged through {launcher}"), "from the launcher"))
            }
            Meeting::Missing(reason) => Some(("addresses", reason.clone(), "missing")),
        }
    }

    /// Takes leave of a launcher that was spoken to already, because the ranks meet in another way.
    pub(super) fn dismiss(self, rank: usize) -> Result<()> {
        match self {
            Meeting::Pmi(launcher) => launcher.dismiss(rank),
            Meeting::None | Meeting::Coordinator(_) | Meeting::JobFile(_) | Meeting::Missing(_) => Ok(()),
        }
    }

    /// Does what has to be done before the group can be formed.
    pub(super) fn meet(self, rank: usize, size: usize, deadline: Instant) -> Result<Met> {
        match self {
            Meeting::None => Err(missing(&format!("nothing says how the {size} ranks find each other"))),
            Meeting::Missing(reason) => Err(missing(&reason)),
            Meeting::Coordinator(coordinator) => Ok(Met::from(Rendezvous::Coordinator(coordinator.value))),
            Meeting::Pmi(launcher) => launcher.meet(rank, size, deadline),
            Meeting::JobFile(file) if rank == 0 => {
                let (listener, published, secret) = file.publish()?;
                let (rendezvous, published) = (Rendezvous::Listener(listener), Some(published));
                Ok(Met { rendezvous, published, secret: Some(secret) })
            }
            Meeting::JobFile(file) => {
                let (address, secret) = file.find(rank, deadline)?;
                Ok(Met { secret: Some(secret), ..Met::from(Rendezvous::Coordinator(address)) })
            }
        }
    }
}

/// How the ranks meet, and what came with it.
pub(super) struct Met {
    pub(super) rendezvous: Rendezvous,
    pub(super) published: Option<Published>,
    /// A secret that only the ranks of this job have.
    pub(super) secret: Option<Secret>,
}

impl From<Rendezvous> for Met {
    fn from(rendezvous: Rendezvous) -> Met {
        Met { rendezvous, published: None, secret: None }
    }
}

fn missing(reason: &str) -> crate::error::Error {
    let advice = "say where rank 0 listens, as host:port, or call Config::coordinator";
    refuse("RACCL_COORDINATOR", "", format!("{reason}; {advice}"))
}
