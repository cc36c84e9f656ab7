//! Ranks that are stopped for a while and continued: nothing is lost by that.

use std::{thread, time::Duration};

use raccl::Config;

use crate::{
    fleet::{Fleet, say},
    kills::{BOUND, seed},
    operations::Operations,
    support::{child, random::Random, setting},
};

/// Operations of each group.
const OPERATIONS: usize = 150;

#[test]
fn a_rank_that_is_stopped_and_continued_loses_nothing() {
    const NAME: &str = "pauses::a_rank_that_is_stopped_and_continued_loses_nothing";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    pauses(NAME, false);
}

#[test]
fn a_rank_that_is_stopped_and_continued_loses_nothing_over_cables() {
    const NAME: &str = "pauses::a_rank_that_is_stopped_and_continued_loses_nothing_over_cables";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    pauses(NAME, true);
}

fn pauses(name: &str, cabled: bool) {
    let (pauses, seed) = (setting("RACCL_TEST_PAUSES", 6), seed());
    let mut longest = Duration::ZERO;
    for seed in seed..seed + pauses as u64 {
        let mut random = Random::new(seed);
        let size = 2 + random.below(4);
        let victim = random.below(size);
        let delay = Duration::from_micros(random.below(60_000) as u64);
        // Now and then longer than the control connections take to notice a machine that is gone.
        let pause =
            Duration::from_millis(if random.below(12) == 0 { 4500 } else { random.below(600) as u64 });
        println!("seed {seed}: rank {victim} of {size} stopped after {delay:?} for {pause:?}");
        let variables = [("RACCL_TEST_SEED", seed.to_string())];
        let mut fleet = match cabled {
            true => Fleet::start_cabled(&mut random, name, size, &variables),
            false => Fleet::start(name, size, &variables),
        };
        fleet.wait_for("joined", &(0..size).collect::<Vec<_>>());
        thread::sleep(delay);
        fleet.signal(victim, "STOP");
        thread::sleep(pause);
        fleet.signal(victim, "CONT");
        longest = longest.max(pause);
        for (rank, end) in fleet.finish(BOUND).iter().enumerate() {
            end.assert_well(&format!("seed {seed}, rank {rank}"));
            assert!(end.heard("done").is_some(), "seed {seed}, rank {rank}: {end:#?}");
        }
    }
    println!("{pauses} pauses, the longest {longest:?}");
}

fn work(config: Config) {
    let comm = config.connect().unwrap();
    say("joined");
    let mut operations = Operations::new(seed(), 60_000);
    for _ in 0..OPERATIONS {
        operations.next(&comm).unwrap();
    }
    // Nobody leaves before all have said it.
    comm.barrier().unwrap();
    say("done");
    comm.close().unwrap();
}
