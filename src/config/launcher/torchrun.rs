//! torchrun's variables, which other launchers set as well.
#![forbid(unsafe_code)]

use super::{Launched, Meeting};
use crate::{
    config::{
        Origin,
        environment::Environment,
        parse::{Endpoint, check_host},
        setting::Setting,
    },
    error::Result,
};

/// Reads them if torchrun itself set them.
pub(super) fn read_elastic(environment: &Environment) -> Result<Option<Launched>> {
    if environment.has("TORCHELASTIC_RUN_ID") { read_plain(environment) } else { Ok(None) }
}

/// Reads them whoever set them.
pub(super) fn read_plain(environment: &Environment) -> Result<Option<Launched>> {
    // The names are so plain that anybody may use them for something else; only the pair counts.
    if !environment.has("RANK") || !environment.has("WORLD_SIZE") {
        return Ok(None);
    }
    let (rank, size) = (environment.rank("RANK")?, environment.ranks("WORLD_SIZE")?);
    let (Some(rank), Some(size)) = (rank, size) else { return Ok(None) };
    let host = environment.parsed("MASTER_ADDR", |host| check_host(host).map(|()| host.to_owned()))?;
    let port = environment.port("MASTER_PORT")?;
    let store_listens = environment.lossy("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
    let meeting = match (host, port) {
        (Some(host), Some(port)) => {
            let port = if store_listens { neighbour(port.value) } else { port.value };
            let endpoint = Endpoint { host: host.value, port };
            Meeting::Coordinator(Setting::new(host.name, endpoint.to_string()))
        }
        _ => Meeting::Missing("MASTER_ADDR and MASTER_PORT are not both set".to_owned()),
    };
    // Distinguishes the processes of a restarted run from those of the run before.
    let job = environment.lossy("TORCHELASTIC_RUN_ID").map(|id| {
        let restarts = environment.lossy("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        Setting::new("TORCHELASTIC_RUN_ID", format!("torchrun-{id}-{restarts}"))
    });
    Ok(Some(Launched {
        origin: Origin::Torchrun,
        rank,
        size: Some(size),
        local_rank: environment.rank("LOCAL_RANK")?,
        local_size: environment.ranks("LOCAL_WORLD_SIZE")?,
        job,
        meeting,
    }))
}

/// The port beside the one that torchrun's store has.
fn neighbour(port: u16) -> u16 {
    port.checked_add(1).unwrap_or(port - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const TORCHRUN: [(&str, &str); 7] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "::1"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];

    #[test]
    fn the_store_keeps_its_port() {
        let text = Config::from_vars(TORCHRUN).expect("config").explain();
        assert!(text.contains("coordinator: [::1]:29501 (MASTER_ADDR)"), "{text}");
        let text = Config::from_vars(TORCHRUN[..6].iter().copied()).expect("config").explain();
        assert!(text.contains("coordinator: [::1]:29500 (MASTER_ADDR)"), "{text}");
        assert_eq!(neighbour(65535), 65534);
    }

    #[test]
    fn torchrun_runs_inside_others_and_others_inside_plain_names() {
        let openmpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")];
        let origin = |elastic: &[(&'static str, &'static str)]| {
            let vars = TORCHRUN.iter().chain(&openmpi).chain(elastic).copied();
            Config::from_vars(vars).expect("config").origin()
        };
        assert_eq!(origin(&[("TORCHELASTIC_RUN_ID", "none")]), Origin::Torchrun);
        assert_eq!(origin(&[]), Origin::OpenMpi);
    }

    #[test]
    fn a_rank_alone_is_somebody_elses() {
        let config = Config::from_vars([("RANK", "general"), ("MASTER_PORT", "x")]).expect("config");
        assert_eq!(config.origin(), Origin::Builder);
    }

    #[test]
    fn a_missing_address_is_an_error() {
        let config = Config::from_vars([("RANK", "0"), ("WORLD_SIZE", "2")]).expect("config");
        let error = config.resolve().expect_err("no address").to_string();
        assert!(error.contains("MASTER_ADDR") && error.contains("RACCL_COORDINATOR"), "{error}");
    }
}
