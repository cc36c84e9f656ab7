//! Emulated cables between ranks: of processes, each of which is a machine, and of the threads of one process that is all
//! machines.

use std::env;
use std::path::{Path, PathBuf};

use raccl::{Config, LinkKind};
use raccl_emulator::{Emulation, SPEC_VARIABLE, find_library};

/// Says in the environment that groups of threads are joined by the cables of the emulation there, not by sockets.
pub(crate) const OVER_CABLES: &str = "RACCL_TEST_OVER_CABLES";

/// Says beside it that these cables stand in for each other.
pub(crate) const DEGRADE: &str = "RACCL_TEST_OVER_CABLES_DEGRADE";

/// Joins a group by cables instead of sockets, as many for a pair, if this process is to do so. Ranks beyond the machines of the
/// emulation have none.
pub(crate) fn plug(config: Config, size: usize, cables: usize) -> Config {
    if env::var_os(OVER_CABLES).is_none() {
        return config;
    }
    let spec = env::var_os(SPEC_VARIABLE).expect("whoever wants cables says which");
    let names = Emulation::attach(Path::new(&spec)).unwrap().spec().device_names();
    let entry = |i: usize, j: usize| -> Vec<String> {
        let names = names.get(i).and_then(|row| row.get(j)).into_iter().flatten();
        names.take(cables).map(|device| format!("m{i}.{device}")).collect()
    };
    let rows = (0..size).map(|i| (0..size).map(|j| entry(i, j)).collect::<Vec<_>>()).collect::<Vec<_>>();
    config
        .link(LinkKind::Verbs)
        .devices(serde_json::to_string(&rows).unwrap())
        .verbs_library(library())
        .degrade(env::var_os(DEGRADE).is_some())
        .connect_timeout(super::HANG)
}

/// Where cargo has built the emulator.
pub(crate) fn library() -> PathBuf {
    find_library(&env::current_exe().unwrap()).expect("cargo builds it for the tests")
}

/// What a process needs in its environment to be one machine of an emulation, and to use its cables.
pub(crate) fn machine(emulation: &Emulation, rank: usize) -> Vec<(String, String)> {
    let mut variables: Vec<(String, String)> =
        emulation.environment(rank).into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    variables.extend([
        ("RACCL_LINK".to_owned(), "verbs".to_owned()),
        ("RACCL_VERBS_LIBRARY".to_owned(), library().display().to_string()),
        ("RACCL_DEVICES".to_owned(), emulation.spec().device_matrix().to_string()),
    ]);
    variables
}
