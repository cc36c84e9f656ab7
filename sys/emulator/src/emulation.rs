//! An emulation as a program that sets one up sees it: made, handed to processes, disturbed, counted.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::device_state::{Mistake, started};
use crate::fabric::Fabric;
use crate::spec::{Fault, Resource, Spec, SpecError};
use crate::{MACHINE_VARIABLE, SPEC_VARIABLE};

/// An emulation that is there.
///
/// ```
/// use raccl_emulator::{Emulation, Fault, Layout};
///
/// let emulation = Emulation::create(&Layout::mesh().spec(2)).unwrap();
/// // Processes started with these variables, that load the emulator, are machine 1.
/// assert_eq!(emulation.environment(1)[1], ("RACCL_EMULATOR_MACHINE", "1".into()));
/// emulation.inject(&Fault::Cut { cable: 0, message: None }).unwrap();
/// assert_eq!(emulation.books().live.queue_pairs, 0);
/// ```
pub struct Emulation {
    fabric: Fabric,
    spec_file: PathBuf,
    /// Whether its folder goes with it.
    owned: bool,
}

impl Emulation {
    /// Makes an emulation in a new folder in memory, which is removed when this object is dropped. Processes that use
    /// it go on, but cannot make queue pairs any more.
    pub fn create(spec: &Spec) -> io::Result<Emulation> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        remove_leftovers(&base);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = base.join(format!("{FOLDER}{}-{count}", std::process::id()));
        if folder.exists() {
            // Of an earlier process of the same number, which did not come to remove it.
            fs::remove_dir_all(&folder)?;
        }
        let mut emulation = Emulation::create_in(&folder, spec)?;
        emulation.owned = true;
        Ok(emulation)
    }

    /// Makes an emulation in a folder that stays. Shared memory is as fast as the file system the folder is in.
    pub fn create_in(folder: &Path, spec: &Spec) -> io::Result<Emulation> {
        spec.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        fs::create_dir_all(folder)?;
        let spec_file = folder.join("spec.json");
        fs::write(&spec_file, serde_json::to_string_pretty(spec)?)?;
        Emulation::attach(&spec_file)
    }

    /// Joins an emulation by its description's file, making its shared file beside it if nobody has yet.
    pub fn attach(spec_file: &Path) -> io::Result<Emulation> {
        Ok(Emulation { fabric: Fabric::open(spec_file)?, spec_file: spec_file.into(), owned: false })
    }

    /// The description.
    pub fn spec(&self) -> &Spec {
        &self.fabric.spec
    }

    /// The description's file.
    pub fn spec_file(&self) -> &Path {
        &self.spec_file
    }

    /// What a process needs in its environment to be that machine.
    pub fn environment(&self, machine: usize) -> [(&'static str, String); 2] {
        [(SPEC_VARIABLE, self.spec_file.display().to_string()), (MACHINE_VARIABLE, machine.to_string())]
    }

    /// What a process needs to be all machines at once: devices are named `m0.rdma_en2` and so on.
    pub fn environment_of_all(&self) -> [(&'static str, String); 2] {
        [(SPEC_VARIABLE, self.spec_file.display().to_string()), (MACHINE_VARIABLE, "all".into())]
    }

    /// Makes something go wrong.
    pub fn inject(&self, fault: &Fault) -> Result<(), SpecError> {
        self.fabric.inject(fault)
    }

    /// How many messages the given end of a cable has posted.
    pub fn messages(&self, cable: usize, end: usize) -> u64 {
        self.fabric.cable(cable).directions[end].posted.load(Ordering::Relaxed)
    }

    /// What all devices together have in their books.
    pub fn books(&self) -> Books {
        (0..self.fabric.devices.len()).map(|device| self.books_at(device)).fold(Books::default(), Books::plus)
    }

    /// What one device has in its books; `None` when there is no such device.
    pub fn books_of(&self, machine: usize, device: &str) -> Option<Books> {
        Some(self.books_at(self.fabric.find(machine, device)?))
    }

    fn books_at(&self, device: usize) -> Books {
        let state = self.fabric.device(device);
        let counts = |numbers: [u64; Resource::COUNT]| Counts {
            contexts: numbers[Resource::Contexts as usize],
            domains: numbers[Resource::Domains as usize],
            queue_pairs: numbers[Resource::QueuePairs as usize],
            completion_queues: numbers[Resource::CompletionQueues as usize],
            regions: numbers[Resource::Regions as usize],
        };
        let mistake = |mistake: Mistake| state.mistakes[mistake as usize].load(Ordering::Relaxed);
        Books {
            live: counts(std::array::from_fn(|index| state.live[index].load(Ordering::Relaxed).into())),
            leaked: counts(std::array::from_fn(|index| state.leaked[index].load(Ordering::Relaxed).into())),
            made: counts(std::array::from_fn(|index| state.made[index].load(Ordering::Relaxed))),
            mistakes: Mistakes {
                early_reuse: mistake(Mistake::EarlyReuse),
                overruns: mistake(Mistake::Overrun),
                frame_mismatches: mistake(Mistake::FrameMismatch),
                freed_out_of_order: mistake(Mistake::FreedOutOfOrder),
                completion_queue_too_small: mistake(Mistake::CompletionQueueTooSmall),
                bad_memory: mistake(Mistake::BadMemory),
            },
        }
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        if self.owned
            && let Some(folder) = self.spec_file.parent()
            && let Err(error) = fs::remove_dir_all(folder)
        {
            eprintln!("raccl-emulator: cannot remove {}: {error}", folder.display());
        }
    }
}

/// Begins the name of an emulation's folder; the process and a count follow.
const FOLDER: &str = "raccl-emulator-";

/// Removes folders of processes that were killed. One that changed within the hour is left alone: process numbers
/// are not the same in every container.
fn remove_leftovers(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process =
            name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.split_once('-')?.0.parse().ok());
        let age = entry.metadata().and_then(|data| data.modified()).ok().and_then(|time| time.elapsed().ok());
        if process.is_some_and(|process| started(process).is_none())
            && age.is_some_and(|age| age > Duration::from_secs(3600))
        {
            // It may be another user's, or another process is at it.
            let _refused = fs::remove_dir_all(entry.path());
        }
    }
}

/// What processes have, had and did, by a device's count.
///
/// A process that is killed leaves what it had in the count of the living, as it does on the real driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Books {
    /// What processes have now.
    pub live: Counts,
    /// What a [`Fault::Leak`] took.
    pub leaked: Counts,
    /// What there ever was.
    pub made: Counts,
    /// What programs did wrong.
    pub mistakes: Mistakes,
}

/// A number for each resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Open devices.
    pub contexts: u64,
    /// Protection domains.
    pub domains: u64,
    /// Queue pairs.
    pub queue_pairs: u64,
    /// Completion queues.
    pub completion_queues: u64,
    /// Memory regions.
    pub regions: u64,
}

/// What a real driver does not tell the program that does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Mistakes {
    /// Sends whose bytes were changed before they had completed.
    pub early_reuse: u64,
    /// Receives posted beyond the depth.
    pub overruns: u64,
    /// Messages that met a receive of another number of frames, or too short a one.
    pub frame_mismatches: u64,
    /// Objects freed before others that have to go first.
    pub freed_out_of_order: u64,
    /// Work posted for which the completion queue might not have had a place.
    pub completion_queue_too_small: u64,
    /// Work posted with memory that is not registered.
    pub bad_memory: u64,
}

impl Books {
    fn plus(self, other: Books) -> Books {
        Books {
            live: self.live.plus(other.live),
            leaked: self.leaked.plus(other.leaked),
            made: self.made.plus(other.made),
            mistakes: self.mistakes.plus(other.mistakes),
        }
    }
}

impl Counts {
    fn plus(self, other: Counts) -> Counts {
        Counts {
            contexts: self.contexts + other.contexts,
            domains: self.domains + other.domains,
            queue_pairs: self.queue_pairs + other.queue_pairs,
            completion_queues: self.completion_queues + other.completion_queues,
            regions: self.regions + other.regions,
        }
    }

    /// Whether there is nothing.
    pub fn is_zero(&self) -> bool {
        *self == Counts::default()
    }
}

impl Mistakes {
    fn plus(self, other: Mistakes) -> Mistakes {
        Mistakes {
            early_reuse: self.early_reuse + other.early_reuse,
            overruns: self.overruns + other.overruns,
            frame_mismatches: self.frame_mismatches + other.frame_mismatches,
            freed_out_of_order: self.freed_out_of_order + other.freed_out_of_order,
            completion_queue_too_small: self.completion_queue_too_small + other.completion_queue_too_small,
            bad_memory: self.bad_memory + other.bad_memory,
        }
    }
}

/// Finds the emulator's library near a program: beside it, in the folder above, or in their `deps`, where cargo
/// builds it. The error lists where it is not.
pub fn find_library(program: &Path) -> io::Result<PathBuf> {
    let name = if cfg!(target_vendor = "apple") { "libraccl_emulator.dylib" } else { "libraccl_emulator.so" };
    let folders = program.ancestors().skip(1).take(2);
    let places: Vec<PathBuf> =
        folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]).collect();
    if let Some(found) = places.iter().find(|place| place.is_file()) {
        return Ok(found.clone());
    }
    let list: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("the emulator's library is in none of {}; build package raccl-emulator", list.join(", ")),
    ))
}
