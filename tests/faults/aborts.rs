//! Aborting from a signal handler.

use std::{sync::OnceLock, thread, time::Duration};

use raccl::{AbortHandle, Config, Error};

use crate::{
    fleet::{Fleet, now, say},
    kills::{BOUND, Times, seed},
    operations::Operations,
    support::{child, random::Random, setting},
};

static HANDLE: OnceLock<AbortHandle> = OnceLock::new();

extern "C" fn on_signal(_signal: libc::c_int) {
    if let Some(handle) = HANDLE.get() {
        handle.abort();
    }
}

#[test]
fn a_signal_handler_ends_every_call_on_every_rank() {
    const NAME: &str = "aborts::a_signal_handler_ends_every_call_on_every_rank";
    if let Some(config) = child(NAME) {
        return work(config);
    }
    let (aborts, seed) = (setting("RACCL_TEST_ABORTS", 6), seed());
    let mut times = Times::new();
    for seed in seed..seed + aborts as u64 {
        let mut random = Random::new(seed);
        let size = 2 + random.below(3);
        let (by, delay) = (random.below(size), Duration::from_micros(random.below(30_000) as u64));
        // Where that rank is in no call at all, the others must hear of it all the same.
        let idle = random.below(2) == 0;
        println!("seed {seed}: rank {by} of {size} after {delay:?}, in no call: {idle}");
        let idle = if idle { by.to_string() } else { String::new() };
        let variables = [("RACCL_TEST_SEED", seed.to_string()), ("RACCL_TEST_IDLE", idle)];
        let mut fleet = Fleet::start(NAME, size, &variables);
        fleet.wait_for("joined", &(0..size).collect::<Vec<_>>());
        thread::sleep(delay);
        let at = now();
        fleet.signal(by, "USR1");
        for (rank, end) in fleet.finish(BOUND).iter().enumerate() {
            end.assert_well(&format!("seed {seed}, rank {rank}"));
            assert_eq!(
                end.heard("aborted by"),
                Some(by.to_string().as_str()),
                "seed {seed}, rank {rank}: {end:#?}"
            );
            times.add(end.heard("at").unwrap().parse::<u64>().unwrap().saturating_sub(at));
        }
    }
    times.show("from the signal to the error on every rank");
}

fn work(config: Config) {
    let idle = std::env::var("RACCL_TEST_IDLE").unwrap();
    let comm = config.connect().unwrap();
    HANDLE.set(comm.abort_handle()).unwrap();
    let handler: extern "C" fn(libc::c_int) = on_signal;
    // SAFETY: the handler stores to atomics and writes to a descriptor, which a signal handler may.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    // Nobody is signalled before all are ready for it.
    comm.barrier().unwrap();
    say("joined");
    if idle == comm.rank().to_string() {
        // Ends early when the signal comes, but must not end before.
        let begin = std::time::Instant::now();
        while begin.elapsed() < Duration::from_millis(500) {
            thread::sleep(Duration::from_millis(100));
        }
    }
    let mut operations = Operations::new(seed(), 50_000);
    let error = loop {
        if let Err(error) = operations.next(&comm) {
            break error;
        }
    };
    say(&format!("at {}", now()));
    match error {
        Error::Aborted { by, .. } => say(&format!("aborted by {by}")),
        other => say(&format!("another error: {other:?}")),
    }
    assert!(matches!(comm.barrier(), Err(Error::Aborted { .. })));
}
