//! Ranks as machines of their own, on emulated Thunderbolt cables.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Context;
use raccl_emulator::{Emulation, Layout, find_library};

use crate::failure::Failure;

/// The cables of a job, which are there as long as it runs.
pub(crate) struct Emulated {
    emulation: Emulation,
    library: PathBuf,
}

impl Emulated {
    /// Lays the cables between so many ranks.
    pub(super) fn new(layout: &Layout, ranks: usize) -> Result<Self, Failure> {
        let spec = layout.spec(ranks);
        spec.check().context("--emulate").map_err(Failure::usage)?;
        let program = env::current_exe().context("cannot find this executable")?;
        let library = find_library(&program).context("--emulate")?;
        let emulation = Emulation::create(&spec).context("cannot set up the emulated cables")?;
        Ok(Self { emulation, library })
    }

    /// What all ranks have in their environment unless the command line says otherwise.
    pub(super) fn defaults(&self) -> [(OsString, OsString); 3] {
        let devices = self.emulation.spec().device_matrix().to_string();
        [
            ("RACCL_LINK".into(), "verbs".into()),
            ("RACCL_VERBS_LIBRARY".into(), self.library.clone().into()),
            ("RACCL_DEVICES".into(), devices.into()),
        ]
    }

    /// Where the cables are, in memory that outlives processes.
    pub(super) fn folder(&self) -> Option<&Path> {
        self.emulation.spec_file().parent()
    }

    /// What one rank has besides.
    pub(super) fn environment(&self, rank: usize) -> [(&'static str, String); 2] {
        self.emulation.environment(rank)
    }
}
