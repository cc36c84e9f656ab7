//! Survivors that go on as a smaller group.

use std::{env, thread, time::Duration};

use raccl::{Communicator, Config, Error, Sum};

use crate::{
    fleet::{Fleet, now, say},
    kills::{BOUND, Times, lost, seed},
    operations::Operations,
    support::{Links, child, group, random::Random, setting},
};

/// Operations after each shrink.
const OPERATIONS: usize = 30;

#[test]
fn survivors_shrink_and_go_on() {
    const NAME: &str = "shrinks::survivors_shrink_and_go_on";
    if let Some(config) = child(NAME) {
        return survive(config);
    }
    let (shrinks, seed) = (setting("RACCL_TEST_SHRINKS", 8), seed());
    let mut times = Times::new();
    for seed in seed..seed + shrinks as u64 {
        shrink(NAME, false, seed, 1, &mut times);
    }
    times.show("from the death of a rank to the first result of the group without it");
}

#[test]
fn survivors_shrink_and_go_on_over_cables() {
    const NAME: &str = "shrinks::survivors_shrink_and_go_on_over_cables";
    if let Some(config) = child(NAME) {
        return survive(config);
    }
    let (shrinks, seed) = (setting("RACCL_TEST_SHRINKS", 6), seed());
    let mut times = Times::new();
    for seed in seed..seed + shrinks as u64 {
        shrink(NAME, true, seed, 1 + seed as usize % 2, &mut times);
    }
    times.show(
        "over cables, from the death of one or two ranks to the first result of the group without them",
    );
}

#[test]
fn a_death_while_survivors_shrink_is_survived_too() {
    const NAME: &str = "shrinks::a_death_while_survivors_shrink_is_survived_too";
    if let Some(config) = child(NAME) {
        return survive(config);
    }
    let (shrinks, seed) = (setting("RACCL_TEST_DOUBLE_SHRINKS", 6), seed());
    let mut times = Times::new();
    for seed in seed..seed + shrinks as u64 {
        shrink(NAME, false, seed, 2, &mut times);
    }
    times.show("from the first of two deaths to the first result of the group without them");
}

fn shrink(name: &str, cabled: bool, seed: u64, deaths: usize, times: &mut Times) {
    let mut random = Random::new(seed);
    let size = deaths + 1 + random.below(4);
    let first = random.below(size);
    let second = (first + 1 + random.below(size - 1)) % size;
    let delay = Duration::from_micros(random.below(20_000) as u64);
    // A shrink takes a few milliseconds.
    let between = Duration::from_micros(random.below(8000) as u64);
    let victims = &[first, second][..deaths];
    println!("seed {seed}: ranks {victims:?} of {size} after {delay:?}, {between:?} apart");
    let secret = random.below(2) == 0;
    let variables = [
        ("RACCL_TEST_SEED", seed.to_string()),
        ("RACCL_TEST_SOCKETS", (1 + random.below(2)).to_string()),
        ("RACCL_TEST_LEFT", (size - deaths).to_string()),
        ("RACCL_TEST_SECRET", secret.to_string()),
    ];
    let mut fleet = match cabled {
        true => Fleet::start_cabled(&mut random, name, size, &variables),
        false => Fleet::start(name, size, &variables),
    };
    fleet.wait_for("joined", &(0..size).collect::<Vec<_>>());
    thread::sleep(delay);
    let at = fleet.kill(first);
    if deaths > 1 {
        thread::sleep(between);
        fleet.kill(second);
    }
    let ends = fleet.finish(BOUND);
    let survivors = ends.iter().enumerate().filter(|(rank, _)| !victims.contains(rank));
    for (place, (rank, end)) in survivors.enumerate() {
        let story = format!("seed {seed}, rank {rank}, killed {victims:?}");
        end.assert_well(&story);
        let expected = format!("{place} of {}", size - deaths);
        assert_eq!(end.heard("became rank"), Some(expected.as_str()), "{story}: {end:#?}");
        times.add(end.heard("went on at").unwrap().parse::<u64>().unwrap().saturating_sub(at));
    }
}

/// A rank that works, and shrinks until only as many as expected are left.
fn survive(config: Config) {
    let number = |name| env::var(name).unwrap().parse::<usize>().unwrap();
    let left = number("RACCL_TEST_LEFT");
    let mut config = config.sockets(number("RACCL_TEST_SOCKETS"));
    if env::var("RACCL_TEST_SECRET").unwrap() == "true" {
        config = config.secret([5; 32]).encrypt(true);
    }
    let mut comm = config.connect().unwrap();
    say("joined");
    let mut seed = seed();
    while comm.size() > left {
        let mut operations = Operations::new(seed, 30_000);
        let error = loop {
            if let Err(error) = operations.next(&comm) {
                break error;
            }
        };
        say(&format!("{error}"));
        let shrunk = comm.shrink().unwrap();
        assert!(comm.barrier().is_err(), "the old group is usable");
        assert!(matches!(comm.shrink(), Err(Error::InvalidArgument { .. })), "shrunk twice");
        comm = shrunk;
        seed += 1_000_000;
    }
    let mut operations = Operations::new(left as u64, 30_000);
    operations.next(&comm).unwrap();
    say(&format!("went on at {}", now()));
    (0..OPERATIONS).for_each(|_| operations.next(&comm).unwrap());
    comm.barrier().unwrap();
    say(&format!("became rank {} of {}", comm.rank(), comm.size()));
    comm.close().unwrap();
}

#[test]
fn a_rank_that_comes_too_late_is_told_that_it_is_excluded() {
    const NAME: &str = "shrinks::a_rank_that_comes_too_late_is_told_that_it_is_excluded";
    if let Some(config) = child(NAME) {
        let comm = config.late_timeout(Duration::from_millis(1500)).connect().unwrap();
        comm.barrier().unwrap();
        say("joined");
        let error = loop {
            if let Err(error) = comm.barrier() {
                break error;
            }
        };
        assert_eq!(lost(&error), Some(3), "{error}");
        match comm.shrink() {
            Ok(comm) => {
                check_sum(&comm);
                say(&format!("became rank {} of {}", comm.rank(), comm.size()));
                // Whoever was left out must hear of it from somebody.
                thread::sleep(Duration::from_secs(1));
                comm.close().unwrap();
            }
            Err(error) => {
                let Error::Excluded { rank: 1, .. } = error else { panic!("{error}") };
                assert!(matches!(comm.shrink(), Err(Error::Excluded { .. })));
                say("excluded");
            }
        }
        return;
    }
    let mut fleet = Fleet::start(NAME, 4, &[]);
    fleet.wait_for("joined", &[0, 1, 2, 3]);
    fleet.signal(1, "STOP");
    fleet.kill(3);
    fleet.wait_for("became rank", &[0, 2]);
    fleet.signal(1, "CONT");
    let ends = fleet.finish(BOUND);
    for (rank, expected) in [(0, "became rank 0 of 2"), (1, "excluded"), (2, "became rank 1 of 2")] {
        ends[rank].assert_well(&format!("rank {rank}"));
        assert!(ends[rank].heard(expected).is_some(), "rank {rank}: {:#?}", ends[rank]);
    }
}

fn check_sum(comm: &Communicator) {
    let mut values = vec![comm.rank() as u64 + 1; 1000];
    comm.all_reduce(&mut values, Sum).unwrap();
    let size = comm.size() as u64;
    assert!(values.iter().all(|&value| value == size * (size + 1) / 2));
}

/// Again and again, down to a group of one.
#[test]
fn groups_shrink_rank_by_rank_to_one() {
    for links in [Links::Local, Links::Tcp(2)] {
        let places = group(links, 5, |mut comm| {
            let name = comm.rank();
            // Rank 2 leaves first, then whoever has that place, or the last one.
            loop {
                check_sum(&comm);
                // Whoever comes through this knows that all have their sums.
                let all = comm.barrier();
                if comm.rank() == 2.min(comm.size() - 1) && comm.size() > 1 {
                    all.unwrap();
                    return (name, comm.size());
                }
                if comm.size() == 1 {
                    return (name, 1);
                }
                while comm.barrier().is_ok() {}
                comm = comm.shrink().unwrap();
            }
        });
        assert_eq!(places, [(0, 1), (1, 2), (2, 5), (3, 4), (4, 3)]);
    }
}

#[test]
fn a_group_that_has_not_failed_can_be_made_anew() {
    for links in [Links::Local, Links::Tcp(1)] {
        group(links, 3, |comm| {
            check_sum(&comm);
            // Whoever comes through this knows that all have their sums; others may be ended in it.
            let _ = comm.barrier();
            let again = comm.shrink().unwrap();
            assert_eq!((again.rank(), again.size()), (comm.rank(), 3));
            assert!(matches!(comm.barrier(), Err(Error::Aborted { .. })));
            drop(comm);
            check_sum(&again);
            let half = again.split(Some(u64::from(again.rank() == 0)), 0).unwrap().unwrap();
            check_sum(&half);
            drop(half);
            again.close().unwrap();
        });
    }
}
