//! The tests of groups again, with emulated Thunderbolt cables where they have sockets.

use std::{
    env,
    process::{Command, Stdio},
};

use raccl_emulator::{Emulation, Layout, Spec};

use crate::support::{
    bounded,
    cables::{DEGRADE, OVER_CABLES, library},
    setting,
};

/// What is not run again: what is about processes and settings and not about links, what needs no link, and this.
const SKIPPED: [&str; 3] = ["cables::", "local", "memory"];

/// Runs tests of this program, by the beginnings of their names, in a process that is all machines of an emulation.
fn again(spec: Spec, tests: &[&str]) {
    again_with(spec, tests, &[]);
}

/// The same with more variables.
fn again_with(mut spec: Spec, tests: &[&str], variables: &[(&str, &str)]) {
    if env::var_os(OVER_CABLES).is_some() {
        return;
    }
    // Several groups at a time have the same cables.
    spec.limits.domains = 1000;
    spec.limits.completion_queues = 1000;
    let emulation = Emulation::create(&spec).unwrap();
    let output = bounded(|| {
        Command::new(env::current_exe().unwrap())
            .args(tests)
            .args(SKIPPED.iter().flat_map(|skipped| ["--skip", skipped]))
            .args(["--test-threads", "2"])
            .env(OVER_CABLES, "1")
            .envs(variables.iter().copied())
            .envs(emulation.environment_of_all())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    });
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(" 0 passed"), "no test matches {tests:?}\n{text}");
    assert!(emulation.books().live.is_zero(), "{:?} is left", emulation.books());
    assert_eq!(emulation.books().mistakes, Default::default());
    assert!(emulation.books().made.queue_pairs > 0, "no queue pair was made with {}", library().display());
}

/// Every two of five machines are joined, by three cables.
fn mesh() -> Spec {
    let mut spec = Layout::mesh().cables(3).latency_ns(2000).spec(5);
    spec.limits.queue_pairs = 1000;
    spec
}

#[test]
fn buffers_that_devices_know_are_used_where_they_are() {
    again(mesh(), &["buffers::"]);
}

#[test]
fn buffers_are_as_good_at_their_edges() {
    // One at a time, since it takes all regions.
    again(mesh(), &["regions::devices_run_out"]);
    again(mesh(), &["regions::", "--skip", "regions::devices_run_out"]);
}

#[test]
fn buffers_are_as_good_where_machines_form_a_ring_or_have_few_queue_pairs() {
    again(Layout::ring().cables(2).latency_ns(2000).spec(5), &["regions::groups_of_every_size"]);
    // Each cable has but one, and nothing is lent.
    let mut spec = Layout::mesh().spec(5);
    spec.limits.queue_pairs = 1;
    again(spec, &["regions::groups_of_every_size"]);
}

/// All of these take minutes: `RACCL_TEST_ALL=1` asks for them.
#[test]
fn bits_lengths_and_calls_are_the_same_over_cables() {
    let some = [
        "bits::ranks_may_mix",
        "bits::a_reduce_scatter",
        "lengths::parts_may_be",
        "lengths::fewer",
        "calls::",
    ];
    let all = ["bits::", "lengths::", "calls::"];
    again(mesh(), if setting("RACCL_TEST_ALL", 0) == 0 { &some } else { &all });
}

#[test]
fn messages_threads_mismatches_and_leaving_are_the_same_over_cables() {
    again(mesh(), &["messages::", "threads::", "mismatch::", "leaving::"]);
}

#[test]
fn the_same_holds_where_cables_stand_in_for_each_other() {
    let some = ["bits::ranks_may_mix", "lengths::fewer", "calls::", "messages::", "threads::", "leaving::"];
    let all = ["bits::", "lengths::", "calls::", "messages::", "threads::", "mismatch::", "leaving::"];
    let tests: &[&str] = if setting("RACCL_TEST_ALL", 0) == 0 { &some } else { &all };
    again_with(mesh(), tests, &[(DEGRADE, "1")]);
}
