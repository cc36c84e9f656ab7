//! Ranks that are killed in the middle of something.

use std::{env, thread, time::Duration};

use raccl::{Config, Error};

use crate::{
    fleet::{End, Fleet, now, say},
    operations::Operations,
    support::{child, random::Random, setting},
};

/// How long survivors may take to end. Detection takes a fraction of a second; this is for a machine that is busy.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

/// A seed from the environment, or a new one.
pub(crate) fn seed() -> u64 {
    // What comes after it is counted up.
    setting("RACCL_TEST_SEED", Random::fresh_seed() as usize % 1_000_000_000) as u64
}

/// Times, for the table in `docs/failure.md`.
pub(crate) struct Times(Vec<u64>);

impl Times {
    pub(crate) fn new() -> Times {
        Times(Vec::new())
    }

    pub(crate) fn add(&mut self, microseconds: u64) {
        self.0.push(microseconds);
    }

    pub(crate) fn show(mut self, what: &str) {
        self.0.sort_unstable();
        let at = |part: f64| self.0[((self.0.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
        println!(
            "{what}: {} times, median {:.1} ms, 99 % {:.1} ms, max {:.1} ms",
            self.0.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
}

#[test]
fn every_survivor_names_the_rank_that_was_killed() {
    const NAME: &str = "kills::every_survivor_names_the_rank_that_was_killed";
    if let Some(config) = child(NAME) {
        return survive(config);
    }
    kills(NAME, false, "from the death of a rank to the error on each other");
}

#[test]
fn every_survivor_names_the_rank_that_was_killed_over_cables() {
    const NAME: &str = "kills::every_survivor_names_the_rank_that_was_killed_over_cables";
    if let Some(config) = child(NAME) {
        return survive(config);
    }
    kills(NAME, true, "over cables, from the death of a rank to the error on each other");
}

fn kills(name: &str, cabled: bool, what: &str) {
    let (kills, seed) = (setting("RACCL_TEST_KILLS", 12), seed());
    let mut times = Times::new();
    for seed in seed..seed + kills as u64 {
        kill(name, cabled, seed, &mut times);
    }
    times.show(what);
}

fn kill(name: &str, cabled: bool, seed: u64, times: &mut Times) {
    let mut random = Random::new(seed);
    let (size, sockets) = (2 + random.below(4), 1 + random.below(3));
    let victim = random.below(size);
    let delay = Duration::from_micros(random.below(40_000) as u64);
    println!("seed {seed}: rank {victim} of {size} after {delay:?}, {sockets} sockets");
    let variables = [("RACCL_TEST_SEED", seed.to_string()), ("RACCL_TEST_SOCKETS", sockets.to_string())];
    let mut fleet = match cabled {
        true => Fleet::start_cabled(&mut random, name, size, &variables),
        false => Fleet::start(name, size, &variables),
    };
    fleet.wait_for("joined", &(0..size).collect::<Vec<_>>());
    thread::sleep(delay);
    let at = fleet.kill(victim);
    let ends = fleet.finish(BOUND);
    for (rank, end) in ends.iter().enumerate().filter(|&(rank, _)| rank != victim) {
        times.add(check(end, rank, victim, seed).saturating_sub(at));
    }
}

/// Checks how a survivor ended; when it had its error.
pub(crate) fn check(end: &End, rank: usize, victim: usize, seed: u64) -> u64 {
    let story = || format!("seed {seed}, rank {rank}, killed {victim}: {end:#?}");
    end.assert_well(&format!("seed {seed}, rank {rank}, killed {victim}"));
    assert_eq!(end.heard("lost"), Some(victim.to_string().as_str()), "{}", story());
    let text = end.heard("text").unwrap_or_else(|| panic!("no error; {}", story()));
    assert!(text.contains(&format!("lost rank {victim}")), "{}", story());
    end.heard("at").and_then(|at| at.parse().ok()).unwrap_or_else(|| panic!("no time; {}", story()))
}

/// A rank that works until something happens.
fn survive(config: Config) {
    let sockets = env::var("RACCL_TEST_SOCKETS").unwrap().parse().unwrap();
    let comm = config.sockets(sockets).connect().unwrap();
    say("joined");
    let mut operations = Operations::new(seed(), 100_000);
    let error = loop {
        if let Err(error) = operations.next(&comm) {
            break error;
        }
    };
    say(&format!("at {}", now()));
    report(&error);
    // Whatever is called from here on ends at once, and for the same reason.
    let again = comm.barrier().unwrap_err();
    assert_eq!(lost(&again), lost(&error), "{again}");
    let closed = comm.close().unwrap_err();
    assert_eq!(lost(&closed), lost(&error), "{closed}");
}

/// Tells the test about an error.
pub(crate) fn report(error: &Error) {
    match lost(error) {
        Some(peer) => say(&format!("lost {peer}")),
        None => say(&format!("another error: {error:?}")),
    }
    say(&format!("text {error}"));
}

pub(crate) fn lost(error: &Error) -> Option<usize> {
    match error {
        Error::PeerLost { peer, .. } => Some(*peer),
        _ => None,
    }
}
