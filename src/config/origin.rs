//! Who told this process its rank.
#![forbid(unsafe_code)]

use std::fmt;

/// Where a configuration has its rank and size from.
///
/// ```
/// use raccl::{Config, Origin};
///
/// let config = Config::from_vars([("RANK", "1"), ("WORLD_SIZE", "4")]).unwrap();
/// assert_eq!(config.origin(), Origin::Torchrun);
/// assert_eq!(config.origin().to_string(), "torchrun");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// Nobody did: a group of one, or what the builder's calls say.
    Builder,
    /// `RACCL_RANK` and `RACCL_SIZE`, which `raccl launch` sets.
    Raccl,
    /// The variables of MLX or JACCL, which `mlx.launch` sets.
    Mlx,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// A PMI launcher: the `mpirun` of MPICH or of Intel MPI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
    /// `torchrun`, or anything else that sets its variables.
    Torchrun,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Origin::Builder => "builder",
            Origin::Raccl => "raccl",
            Origin::Mlx => "MLX",
            Origin::OpenMpi => "Open MPI",
            Origin::Pmi => "PMI",
            Origin::Slurm => "Slurm",
            Origin::Torchrun => "torchrun",
        })
    }
}
