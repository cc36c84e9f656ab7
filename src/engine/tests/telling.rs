//! Peers that never stop telling where they are, and ranks that tell of a failure before they are gone.

use std::{sync::atomic::AtomicU64, thread, time::Duration};

use super::{super::health::STATUSES, *};
use crate::bootstrap::watcher::Status;

fn status(sequence: u64) -> Status {
    Status { comm: 0, sequence, signature: [1; 24] }
}

#[test]
fn of_what_a_peer_tells_without_end_the_last_is_kept_and_nobody_listens_for_longer() {
    let (engine, _peers) = among(3);
    engine.health.status(2, status(0));
    (0..1000).for_each(|sequence| engine.health.status(1, status(sequence)));
    assert!(!engine.health.wait_news(Instant::now()), "there is more to hear, but the time is up");
    let kept = engine.health.take_statuses();
    let expected = (1000 - STATUSES as u64..1000).map(|sequence| (1, status(sequence)));
    assert_eq!(kept, [(2, status(0))].into_iter().chain(expected).collect::<Vec<_>>());
}

#[test]
fn the_first_difference_is_looked_for_in_bounded_time_whatever_a_peer_tells() {
    let (engine, _peers) = among(2);
    // Only a search that does not end takes so long.
    let hung = Instant::now() + Duration::from_secs(60);
    let (told, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) && Instant::now() < hung {
                    engine.health.status(1, status(told.fetch_add(1, Ordering::Relaxed)));
                }
            });
        }
        let mut core = engine.core.lock();
        let failure = Failure::Diverged { peer: 1, comm: 0, sequence: 3, call: "a barrier".to_owned() };
        engine.fail(&mut core, failure, "barrier");
        over.store(true, Ordering::Relaxed);
        assert!(core.reports.len() <= 1);
    });
    assert!(Instant::now() < hung, "a peer that tells more and more was listened to for ever");
    assert!(told.into_inner() > STATUSES as u64);
    let error = engine.health.error("barrier").unwrap();
    assert!(matches!(&error, Error::Mismatch { peer: 1, sequence: 3, .. }), "{error}");
}

#[test]
fn a_rank_that_leaves_has_told_its_failure_whoever_was_about_to() {
    let (mut engine, _peers) = among(2);
    let other =
        Arc::new(Health::new(1, Arc::new(Waker::new().unwrap()), [const { None }; 2].into_iter().collect()));
    let watcher: Arc<dyn Watcher> = other.clone();
    let own = Arc::clone(&engine.health) as Arc<dyn Watcher>;
    engine.control = Control::local(0, own, vec![None, Some(Arc::downgrade(&watcher))]);
    engine.health.fail(Failure::Aborted);
    // As the monitor does, which is kept from going on.
    assert!(engine.health.announce().is_some());
    engine.leave().unwrap_err();
    let error = other.error("barrier").unwrap();
    assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
}
