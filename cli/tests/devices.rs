//! `raccl devices` over the software driver: real processes that load it as they would load the system's library.

mod support;

use std::path::{Path, PathBuf};

use raccl_emulator::{DeviceSettings, Emulation, Fault, Layout, Spec, Verb, find_library};
use serde_json::{Value, json};
use support::{Done, raccl, run};
use tempfile::TempDir;

/// The emulator as a verbs library.
fn library() -> PathBuf {
    find_library(Path::new(env!("CARGO_BIN_EXE_raccl"))).expect("cargo builds it for the tests")
}

/// `raccl devices` on a machine of an emulation.
fn devices(emulation: &Emulation, machine: usize, arguments: &[&str]) -> Done {
    run(raccl()
        .arg("devices")
        .args(arguments)
        .envs(emulation.environment(machine))
        .env("RACCL_VERBS_LIBRARY", library()))
}

/// Its report as JSON.
fn report(emulation: &Emulation, machine: usize, arguments: &[&str]) -> Value {
    let done = devices(emulation, machine, &[&["--json"], arguments].concat());
    assert_eq!(
        (done.status, done.stderr.as_str(), done.stdout.lines().count()),
        (Some(0), "", 1),
        "{done:?}"
    );
    serde_json::from_str(&done.stdout).expect("JSON")
}

/// The kinds of the problems with their devices.
fn problems(report: &Value) -> Vec<(&str, Option<&str>)> {
    let problems = report["problems"].as_array().expect("a list");
    problems.iter().map(|one| (one["kind"].as_str().expect("a name"), one["device"].as_str())).collect()
}

fn emulate(spec: &Spec) -> Emulation {
    Emulation::create(spec).expect("the spec is good")
}

fn with_device(settings: DeviceSettings) -> Spec {
    Spec { devices: vec![settings], ..Layout::mesh().spec(2) }
}

#[test]
fn devices_ports_addresses_and_limits_are_reported() {
    let emulation = emulate(&Layout::mesh().cables(2).spec(3));
    let report = report(&emulation, 1, &[]);
    assert_eq!((&report["available"], &report["provider"]), (&json!(true), &json!("apple")));
    assert_eq!(problems(&report), []);
    let devices = report["devices"].as_array().expect("a list");
    assert_eq!(devices.len(), 4);
    for (number, device) in devices.iter().enumerate() {
        assert_eq!(device["name"], format!("rdma_en{}", number + 2));
        assert_eq!(device["interface"], format!("en{}", number + 2));
        assert_eq!((&device["usable"], &device["limits"]["queue_pairs"]), (&json!(true), &json!(11)));
        let port = &device["ports"][0];
        assert_eq!(
            (&port["number"], &port["state"], &port["mtu"]),
            (&json!(1), &json!("active"), &json!(4096))
        );
        assert_eq!(port["gids"].as_array().expect("a list").len(), 3);
        assert!(port["gids"][1]["ipv4"].as_str().is_some_and(|ip| ip.starts_with("10.")), "{port}");
    }
    assert!(emulation.books().live.is_zero(), "the command leaves nothing on a device");

    let done = self::devices(&emulation, 1, &["--check"]);
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    assert!(done.stdout.contains("RDMA is available: 4 of 4 devices usable"), "{done:?}");
    assert!(
        done.stdout.lines().any(|line| line.starts_with("rdma_en5  en5") && line.contains("active")),
        "{done:?}"
    );
}

#[test]
fn the_cables_of_a_rank_are_compared_with_the_devices() {
    let emulation = emulate(&Layout::line().cables(2).spec(3));
    let matrix = emulation.spec().device_matrix().to_string();
    let everything = report(&emulation, 1, &["--matrix", &matrix]);
    assert_eq!(everything["cables"].as_array().map(Vec::len), Some(4), "each cable once");
    assert_eq!(
        everything["cables"][3],
        json!({
            "rank": 1, "device": "rdma_en5", "peer": 2, "peer_device": "rdma_en3", "usable": null
        })
    );
    let own = report(&emulation, 1, &["--matrix", &matrix, "--rank", "1"]);
    let usable: Vec<&Value> =
        own["cables"].as_array().expect("a list").iter().map(|cable| &cable["usable"]).collect();
    assert_eq!(usable, vec![&json!(true); 4]);
    assert_eq!(own["available"], true);

    // This machine has what rank 0 has and not what rank 1 has.
    let done = devices(&emulation, 0, &["--matrix", &matrix, "--rank", "1", "--check"]);
    assert_eq!(done.status, Some(1), "{done:?}");
    assert!(
        done.stdout.contains("rank 1 reaches rank 2 by rdma_en4, but this machine has rdma_en2, rdma_en3"),
        "{done:?}"
    );
    assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
}

#[test]
fn the_matrix_and_the_rank_come_from_the_environment_too() {
    let emulation = emulate(&Layout::ring().spec(3));
    let directory = TempDir::new().expect("a directory");
    let file = directory.path().join("cables.json");
    std::fs::write(&file, emulation.spec().device_matrix().to_string()).expect("writable");
    let mut command = raccl();
    command.args(["devices", "--json"]).envs(emulation.environment(2)).env("RACCL_VERBS_LIBRARY", library());
    let done = run(command.env("RACCL_DEVICES", &file).env("RACCL_RANK", "2"));
    let report: Value = serde_json::from_str(&done.stdout).expect("JSON");
    assert_eq!(
        (&report["rank"], report["cables"].as_array().map(Vec::len)),
        (&json!(2), Some(2)),
        "{done:?}"
    );
}

#[test]
fn a_port_that_is_down_is_named_with_what_to_do() {
    let emulation = emulate(&Layout::mesh().cables(2).spec(2));
    emulation.inject(&Fault::PortDown { machine: 0, device: "rdma_en3".into() }).expect("a device");
    let report = report(&emulation, 0, &[]);
    assert_eq!(problems(&report), [("port_down", Some("rdma_en3"))]);
    assert_eq!((&report["available"], &report["devices"][1]["usable"]), (&json!(true), &json!(false)));
    let done = devices(&emulation, 0, &[]);
    assert!(
        done.stdout.contains("rdma_en3: port 1 is down") && done.stdout.contains("system_profiler"),
        "{done:?}"
    );

    let matrix = emulation.spec().device_matrix().to_string();
    let own = self::report(&emulation, 0, &["--matrix", &matrix, "--rank", "0"]);
    assert_eq!((&own["available"], &own["cables"][1]["usable"]), (&json!(false), &json!(false)));
}

#[test]
fn an_address_that_is_late_or_hidden_by_a_bridge_is_asked_for() {
    let plain = || DeviceSettings::plain(0, "rdma_en2");
    for settings in
        [DeviceSettings { gid_after_ms: 3_600_000, ..plain() }, DeviceSettings { bridge: true, ..plain() }]
    {
        let emulation = emulate(&with_device(settings));
        let done = devices(&emulation, 0, &["--check"]);
        assert_eq!(done.status, Some(1), "{done:?}");
        for words in [
            "has no IPv4 address for RDMA",
            "fe80::",
            "ifconfig bridge0 | grep member",
            "sudo ifconfig bridge0 deletem en2",
            "sudo ifconfig en2 inet",
        ] {
            assert!(done.stdout.contains(words), "{words}: {done:?}");
        }
        assert_eq!(problems(&report(&emulation, 0, &[])), [("no_address", Some("rdma_en2"))]);
    }
}

#[test]
fn an_address_that_has_moved_is_found() {
    let emulation =
        emulate(&with_device(DeviceSettings { gid_index: 6, ..DeviceSettings::plain(0, "rdma_en2") }));
    let report = report(&emulation, 0, &[]);
    assert_eq!(
        (&report["available"], &report["devices"][0]["ports"][0]["gids"][2]["index"]),
        (&json!(true), &json!(6))
    );
}

#[test]
fn a_machine_without_devices_hears_how_to_enable_them() {
    let mut command = raccl();
    let done = run(command.args(["devices"]).env("RACCL_VERBS_LIBRARY", library()));
    assert_eq!(done.status, Some(0), "{done:?}");
    for words in ["RDMA is NOT available", "lists no RDMA device", "rdma_ctl enable", "startup options"] {
        assert!(done.stdout.contains(words), "{words}: {done:?}");
    }
    assert_eq!(run(command.arg("--check")).status, Some(1));
}

#[test]
fn a_library_that_is_not_there_is_a_finding_and_no_failure() {
    let done = run(raccl().args(["devices", "--library", "/nowhere/librdma.dylib"]));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    assert!(
        done.stdout.contains("library  none") && done.stdout.contains("/nowhere/librdma.dylib"),
        "{done:?}"
    );
    let done = run(raccl().args(["devices", "--check", "--json", "--library", "/nowhere/librdma.dylib"]));
    let report: Value = serde_json::from_str(&done.stdout).expect("JSON");
    assert_eq!((done.status, problems(&report)), (Some(1), vec![("no_library", None)]));
}

#[test]
fn calls_that_the_driver_refuses_are_reported_and_the_other_devices_still_shown() {
    let emulation = emulate(&Layout::mesh().cables(2).spec(2));
    for (verb, name) in [
        (Verb::IbvOpenDevice, "ibv_open_device"),
        (Verb::IbvQueryPort, "ibv_query_port"),
        (Verb::IbvQueryGid, "ibv_query_gid"),
    ] {
        let fault = Fault::Fail { machine: 0, device: "rdma_en2".into(), verb, errno: 5, skip: 0, times: 1 };
        emulation.inject(&fault).expect("a device");
        let report = report(&emulation, 0, &[]);
        assert_eq!(problems(&report), [("failed", Some("rdma_en2"))]);
        assert!(report["problems"][0]["reason"].as_str().is_some_and(|text| text.contains(name)), "{report}");
        assert_eq!(report["devices"][1]["usable"], true);
    }
    // A driver that cannot tell its limits can be used all the same.
    let fault = Fault::Fail {
        machine: 0,
        device: "rdma_en2".into(),
        verb: Verb::IbvQueryDevice,
        errno: 102,
        skip: 0,
        times: 1,
    };
    emulation.inject(&fault).expect("a device");
    let report = report(&emulation, 0, &[]);
    assert_eq!(
        (&report["devices"][0]["usable"], &report["devices"][0]["limits"]),
        (&json!(true), &Value::Null)
    );
}

#[test]
fn a_matrix_that_cannot_be_is_a_usage_error_in_one_line() {
    for (arguments, words) in [
        (&["--matrix", "[[null, \"a\"]]"][..], "row 0 has 2 entries"),
        (&["--matrix", "/no/such/file"], "/no/such/file"),
        (&["--matrix", "[[null, \"a\"], [\"b\", null]]", "--rank", "2"], "for 2 ranks"),
        (&["--rank", "x"], "--rank"),
    ] {
        let done = run(raccl().arg("devices").args(arguments));
        assert_eq!((done.status, done.stdout.as_str()), (Some(2), ""), "{arguments:?}: {done:?}");
        assert!(done.stderr.contains(words) && !done.stderr.contains("panicked"), "{arguments:?}: {done:?}");
    }
}
