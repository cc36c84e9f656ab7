//! Cables that die while a group goes on over those that are left.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use raccl::{Communicator, Config, Result};
use raccl_emulator::{Emulation, Fault, Layout, Verb};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::{
    fleet::{End, Fleet, chain, say},
    kills::BOUND,
    operations::Operations,
    support::{child, random::Random, setting},
};

/// A file in a rank's environment: when it is there, the group has seen enough.
const ENOUGH: &str = "RACCL_TEST_ENOUGH";

#[test]
fn a_group_goes_on_as_long_as_each_pair_has_a_cable() {
    const NAME: &str = "degrade::a_group_goes_on_as_long_as_each_pair_has_a_cable";
    if let Some(config) = child(NAME) {
        return live(config);
    }
    let cycles = setting("RACCL_TEST_DEGRADES", 5);
    let seed = setting("RACCL_TEST_SEED", Random::fresh_seed() as usize % 1_000_000);
    for cycle in 0..cycles {
        println!("seed {} cycle {cycle}: RACCL_TEST_SEED={} repeats it as the first", seed, seed + cycle);
        survive(NAME, (seed + cycle) as u64);
    }
}

#[test]
fn the_death_of_a_pairs_last_cable_is_an_error_that_names_the_link() {
    const NAME: &str = "degrade::the_death_of_a_pairs_last_cable_is_an_error_that_names_the_link";
    if let Some(config) = child(NAME) {
        return live(config);
    }
    let cycles = setting("RACCL_TEST_DEGRADES", 5).div_ceil(4);
    let seed = setting("RACCL_TEST_SEED", Random::fresh_seed() as usize % 1_000_000);
    for cycle in 0..cycles {
        println!("seed {} cycle {cycle}: RACCL_TEST_SEED={} repeats it as the first", seed, seed + cycle);
        fail(NAME, (seed + cycle) as u64, true);
    }
}

#[test]
fn without_the_setting_the_first_death_is_an_error_that_names_the_link() {
    const NAME: &str = "degrade::without_the_setting_the_first_death_is_an_error_that_names_the_link";
    if let Some(config) = child(NAME) {
        return live(config);
    }
    let seed = setting("RACCL_TEST_SEED", Random::fresh_seed() as usize % 1_000_000);
    println!("seed {seed}");
    fail(NAME, seed as u64, false);
}

/// Machines with several cables a pair, and ranks that make calls there until they are told that it is enough.
struct Scene {
    story: String,
    random: Random,
    emulation: Emulation,
    fleet: Fleet,
    enough: PathBuf,
    size: usize,
    cables: usize,
    began: Instant,
}

impl Scene {
    fn new(name: &str, seed: u64, degrade: bool, timeout: u32) -> Scene {
        let mut random = Random::new(seed);
        let (size, cables) = (2 + random.below(3), 2 + random.below(2));
        let mut spec = Layout::mesh().cables(cables).latency_ns(2000).spec(size);
        // Packets of both lengths, or short ones alone.
        spec.limits.queue_pairs = if random.below(4) == 0 { 1 } else { 10 };
        let bulk = ["64K*8", "16K*2", "256K*4"][random.below(3)];
        let emulation = Emulation::create(&spec).unwrap();
        let enough = emulation.spec_file().with_file_name("enough");
        let variables = [
            ("RACCL_TEST_SEED", seed.to_string()),
            (ENOUGH, enough.display().to_string()),
            ("RACCL_DEGRADE", u8::from(degrade).to_string()),
            ("RACCL_VERBS_CHECKSUM", "1".to_owned()),
            ("RACCL_VERBS_BULK", bulk.to_owned()),
            ("RACCL_TIMEOUT", format!("{timeout}s")),
            ("RACCL_LATE_TIMEOUT", format!("{timeout}s")),
        ];
        let mut fleet = Fleet::start_on(Some(&emulation), name, size, &variables);
        let all: Vec<usize> = (0..size).collect();
        fleet.wait_for("up", &all);
        let pairs = spec.limits.queue_pairs;
        let story = format!(
            "{size} ranks with {cables} cables a pair, bulk {bulk}, queue pairs {pairs}, seed {seed}"
        );
        Scene { story, random, emulation, fleet, enough, size, cables, began: Instant::now() }
    }

    /// The cables of a random pair, in random order.
    fn pair(&mut self) -> Vec<usize> {
        let one = self.random.below(self.size);
        let other = (one + 1 + self.random.below(self.size - 1)) % self.size;
        let joins = |&cable: &usize| {
            let ends = &self.emulation.spec().cables[cable].ends;
            let machines = [ends[0].machine, ends[1].machine];
            machines.contains(&one) && machines.contains(&other)
        };
        let mut cables: Vec<usize> = (0..self.emulation.spec().cables.len()).filter(joins).collect();
        assert_eq!(cables.len(), self.cables);
        for last in (1..cables.len()).rev() {
            cables.swap(last, self.random.below(last + 1));
        }
        cables
    }

    /// Harms a cable; whether it dies of that for certain.
    fn harm(&mut self, cable: usize) -> bool {
        let random = &mut self.random;
        let end = random.below(2);
        let message = random.below(150) as u64;
        let at = &self.emulation.spec().cables[cable].ends[end];
        let (machine, device) = (at.machine, at.device.clone());
        let verbs = [Verb::IbvPostSend, Verb::IbvPostRecv, Verb::IbvPollCq];
        let fault = match random.below(8) {
            0 => Fault::Cut { cable, message: None },
            1 => Fault::Cut { cable, message: Some(message) },
            2 | 3 => Fault::Lose { cable, end, message, every: None },
            4 => Fault::Corrupt { cable, end, message, every: None },
            5 => Fault::PortDown { machine, device },
            6 => Fault::Flap { cable, message: Some(message), for_ms: 1 + random.below(600) as u64 },
            _ => {
                let verb = verbs[random.below(verbs.len())];
                Fault::Fail { machine, device, verb, errno: 5, skip: message as u32, times: 1 }
            }
        };
        self.story += &format!(", {fault:?}");
        self.emulation.inject(&fault).unwrap();
        !matches!(fault, Fault::Flap { .. })
    }

    /// Waits until both ends of a cable have warned of its death.
    fn wait_for_warnings(&mut self, cable: usize) {
        let names = self.emulation.spec().device_names();
        let ends = self.emulation.spec().cables[cable].ends.clone();
        for (here, there) in [(0, 1), (1, 0)] {
            let (here, there) = (&ends[here], &ends[there]);
            let of_pair = &names[here.machine][there.machine];
            let index = of_pair.iter().position(|name| *name == here.device).unwrap();
            let cable = format!("warned cable={index} from {} of rank {} ", here.device, here.machine);
            self.fleet.wait_for(&cable, &[here.machine]);
        }
    }

    /// Lets the ranks come to an end, and looks at what they leave.
    fn end(self) -> (String, Vec<End>) {
        fs::write(&self.enough, "").unwrap();
        let ends = self.fleet.finish(10 * BOUND);
        let books = self.emulation.books();
        let said = || ends.iter().map(|end| format!("{:#?}\n{}", end.said, end.errors)).collect::<String>();
        assert!(books.live.is_zero(), "{}: {books:?} is left\n{}", self.story, said());
        assert_eq!(books.mistakes, Default::default(), "{}\n{}", self.story, said());
        println!("{} ({:?})", self.story, self.began.elapsed());
        (self.story, ends)
    }
}

/// All cables but one of one pair or two die.
fn survive(name: &str, seed: u64) {
    let mut scene = Scene::new(name, seed, true, 60);
    let (mut harmed, mut certain, mut late) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..1 + scene.random.below(2) {
        let pair = scene.pair();
        if pair.iter().any(|cable| harmed.contains(cable)) {
            continue;
        }
        for &cable in &pair[1..] {
            harmed.push(cable);
            if scene.random.below(4) == 0 {
                late.push(cable);
            } else if scene.harm(cable) {
                certain.push(cable);
            }
            // At once, or when the group has recovered.
            if scene.random.below(2) == 0 {
                certain.drain(..).for_each(|cable| scene.wait_for_warnings(cable));
            }
        }
    }
    certain.into_iter().for_each(|cable| scene.wait_for_warnings(cable));
    // While the group comes to its end.
    late.into_iter().for_each(|cable| _ = scene.harm(cable));
    let (story, ends) = scene.end();
    for end in &ends {
        end.assert_well(&story);
        assert!(end.heard("closed").is_some(), "{story}: {end:#?}");
    }
}

/// All cables of a pair die, or one that nothing stands in for.
fn fail(name: &str, seed: u64, degrade: bool) {
    let mut scene = Scene::new(name, seed, degrade, 10);
    for cable in scene.pair() {
        // A flap may pass unnoticed.
        while !scene.harm(cable) {}
        if !degrade {
            break;
        }
    }
    let all: Vec<usize> = (0..scene.size).collect();
    scene.fleet.wait_for("failed", &all);
    let (story, ends) = scene.end();
    for end in &ends {
        end.assert_well(&story);
        let error = end.heard("failed").unwrap_or_default();
        assert!(error.contains("verbs") || error.contains("cable"), "{story}: {error}");
    }
    let names_it = |end: &End| end.heard("failed").is_some_and(|error| error.contains("through a cable"));
    assert!(ends.iter().any(names_it), "{story}: {ends:#?}");
}

/// A rank: makes calls and checks them, until rank 0 finds that it is enough or something has failed.
fn live(config: Config) {
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let seed = setting("RACCL_TEST_SEED", 0) as u64;
    let enough = env::var_os(ENOUGH).unwrap();
    let comm = config.connect().unwrap();
    say("up");
    match use_until(&comm, seed, Path::new(&enough)) {
        Ok(()) => {
            comm.close().unwrap();
            say("closed");
        }
        Err(error) => say(&format!("failed {}", chain(&error))),
    }
}

fn use_until(comm: &Communicator, seed: u64, enough: &Path) -> Result<()> {
    let mut operations = Operations::new(seed, 30_000);
    let mut turn = 0;
    loop {
        for _ in 0..4 {
            operations.next(comm)?;
        }
        // So much that every cable of every pair carries some of it.
        turn += 1;
        for step in 1..comm.size() {
            exchange(comm, step, turn)?;
        }
        let mut is_enough = [u8::from(comm.rank() == 0 && enough.exists())];
        comm.broadcast(&mut is_enough, 0)?;
        if is_enough == [1] {
            return comm.barrier();
        }
    }
}

/// Sends a large message to the rank that is so many steps ahead.
fn exchange(comm: &Communicator, step: usize, turn: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let (to, from) = ((rank + step) % size, (rank + size - step) % size);
    let value =
        |rank: usize, index: usize| (index as u64).wrapping_mul(0x9E37_79B9) ^ (rank + 7 * turn) as u64;
    let length = 60_000 + 1009 * turn % 10_000;
    let mine: Vec<u64> = (0..length).map(|index| value(rank, index)).collect();
    let mut theirs = vec![0; length];
    comm.send_recv(&mine, to, &mut theirs, from, 1)?;
    assert!(theirs.iter().enumerate().all(|(index, &found)| found == value(from, index)), "wrong exchange");
    Ok(())
}

/// Says each warning of the library to the test.
struct Warnings;

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        say(&format!("warned {}", fields.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Fields(String);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // The cable stands in front.
        let text = format!("{field}={value:?} ");
        if field.name() == "cable" { self.0.insert_str(0, &text) } else { self.0 += &text }
    }
}
