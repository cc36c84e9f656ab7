//! Open MPI's variables.
#![forbid(unsafe_code)]

use super::{JobFile, Launched, Meeting};
use crate::{
    config::{Origin, environment::Environment, setting::Setting},
    error::Result,
};

pub(super) fn read(environment: &Environment) -> Result<Option<Launched>> {
    let rank = environment.rank("OMPI_COMM_WORLD_RANK")?;
    let size = environment.ranks("OMPI_COMM_WORLD_SIZE")?;
    let (Some(rank), Some(size)) = (rank, size) else { return Ok(None) };
    let local_rank = environment.rank("OMPI_COMM_WORLD_LOCAL_RANK")?;
    let local_size = environment.ranks("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let meeting = match &local_size {
        Some(local) if local.value == size.value => match job_file(environment) {
            Some(file) => Meeting::JobFile(file),
            None => Meeting::Missing(
                "Open MPI gives no address, and this version no name for the job; pass -x RACCL_COORDINATOR=host:port to mpirun"
                    .to_owned(),
            ),
        },
        _ => Meeting::Missing(
            "Open MPI gives no address, and the ranks are on several machines; pass -x RACCL_COORDINATOR=host:port to mpirun"
                .to_owned(),
        ),
    };
    // Every version since 2 sets this; it differs between jobs that run at the same time.
    let job = environment
        .lossy("PMIX_NAMESPACE")
        .map(|name| Setting::new("PMIX_NAMESPACE", format!("openmpi-{name}")));
    Ok(Some(Launched {
        origin: Origin::OpenMpi,
        rank,
        size: Some(size),
        local_rank,
        local_size,
        job,
        meeting,
    }))
}

/// A file named after everything that tells this job from others on the machine. The numbers of jobs come from process ids
/// and repeat, so the address of the job's daemon and its random key, where there is one, are part of it.
fn job_file(environment: &Environment) -> Option<JobFile> {
    const NAMES: [&str; 7] = [
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_precondition_transports",
        "PMIX_SERVER_URI41",
        "PMIX_SERVER_URI4",
        "PMIX_SERVER_URI3",
        "PMIX_SERVER_URI2",
    ];
    let parts: Vec<Option<String>> = NAMES.iter().map(|name| environment.lossy(name)).collect();
    parts.iter().any(Option::is_some).then(|| JobFile::new(environment, &parts))
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Origin};

    #[test]
    fn ranks_on_one_machine_meet_in_a_file_others_need_an_address() {
        let vars = |local| {
            [
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", local),
                ("PMIX_NAMESPACE", "754581505"),
            ]
        };
        let config = Config::from_vars(vars("2")).expect("config");
        assert_eq!(config.origin(), Origin::OpenMpi);
        assert_eq!(config.local_rank(), Some(1));
        assert!(config.explain().contains("addresses: a file raccl-"), "{}", config.explain());
        let error =
            Config::from_vars(vars("1")).expect("config").resolve().expect_err("two machines").to_string();
        assert!(error.contains("-x RACCL_COORDINATOR"), "{error}");
        let given = Config::from_vars(vars("1")).expect("config").coordinator("node1:7000");
        assert!(given.resolve().is_ok());
    }
}
