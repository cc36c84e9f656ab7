//! What is on record of the last calls: asked for, in errors, and in traces.

use std::{env, fs, mem, path::PathBuf, sync::mpsc, thread, time::Duration};

use raccl::{Communicator, Error, FlightState, Sum};
use serde_json::Value;

use crate::support::{Links, group, launch};

/// Most of what joins ranks.
const LINKS: [Links; 2] = [Links::Local, Links::Tcp(2)];

#[test]
fn the_last_calls_are_on_record_in_order() {
    for links in LINKS {
        group(links, 3, |comm| {
            comm.barrier().unwrap();
            comm.all_reduce(&mut [1.0_f32; 1000], Sum).unwrap();
            let row = comm.duplicate().unwrap();
            row.broadcast(&mut [7_u8; 3], 2).unwrap();
            let record = comm.flight_record();
            assert_eq!(record.rank, comm.rank());
            let calls: Vec<(Option<u64>, &str)> =
                record.calls.iter().map(|call| (call.sequence, call.call.as_str())).collect();
            let kinds =
                ["barrier", "all_reduce(sum of 1000 f32", "split", "broadcast(3 x 1 bytes from root 2"];
            assert_eq!(calls.len(), kinds.len(), "{record}");
            for ((sequence, call), (expected, kind)) in calls.iter().zip([0, 1, 2, 0].into_iter().zip(kinds))
            {
                assert!(*sequence == Some(expected) && call.starts_with(kind), "{record}");
            }
            assert!(record.calls.iter().all(|call| call.state == FlightState::Done && call.peers.is_empty()));
            assert_eq!(record.calls[0].communicator, 0);
            assert_ne!(record.calls[3].communicator, 0);
            assert!(record.calls.iter().all(|call| call.algorithm.is_some()));
        });
    }
}

#[test]
fn no_more_than_the_last_calls_are_kept() {
    group(Links::Local, 2, |comm| {
        for _ in 0..100 {
            comm.barrier().unwrap();
        }
        let record = comm.flight_record();
        let sequences: Vec<u64> = record.calls.iter().filter_map(|call| call.sequence).collect();
        assert!((8..100).contains(&sequences.len()), "{record}");
        assert!(
            sequences.iter().rev().copied().eq((0..sequences.len() as u64).map(|back| 99 - back)),
            "{record}"
        );
        assert_eq!(record.to_string().lines().count(), 1 + sequences.len());
    });
}

#[test]
fn a_call_in_flight_shows_whom_it_waits_for() {
    for links in LINKS {
        let (seen, go) = mpsc::channel();
        let go = std::sync::Mutex::new(go);
        group(links, 2, move |comm| {
            if comm.rank() == 1 {
                go.lock().unwrap().recv().unwrap();
                comm.all_gather_into(&[1_u32; 300], &mut [0; 600]).unwrap();
                return;
            }
            thread::scope(|threads| {
                let waiting = threads.spawn(|| comm.all_gather_into(&[0_u32; 300], &mut [0; 600]));
                let flying = loop {
                    let record = comm.flight_record();
                    if let Some(call) =
                        record.calls.into_iter().find(|call| call.state == FlightState::InFlight)
                    {
                        break call;
                    }
                    thread::yield_now();
                };
                let [peer] = flying.peers[..] else { panic!("{flying}") };
                assert_eq!((peer.rank, peer.entered, peer.received), (1, false, (0, 1200)), "{flying}");
                assert_eq!((peer.link, peer.sent.1), (comm.link(1).unwrap(), 1200), "{flying}");
                seen.send(()).unwrap();
                waiting.join().unwrap().unwrap();
            });
            assert!(comm.flight_record().calls.iter().all(|call| call.state == FlightState::Done));
        });
    }
}

/// The error's text has the last calls of the rank that got it.
fn has_record(error: &Error, comm: &Communicator, calls: &[&str]) {
    let text = error.to_string();
    let begin =
        text.find(&format!("last calls of rank {}: ", comm.rank())).unwrap_or_else(|| panic!("{text}"));
    assert!(calls.iter().all(|call| text[begin..].contains(call)), "{calls:?}: {text}");
}

#[test]
fn errors_that_end_a_group_show_the_last_calls() {
    for links in LINKS {
        group(links, 2, |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 0 {
                let hasty = comm.with_late_timeout(Duration::from_millis(50));
                let error = hasty.all_reduce(&mut [1.0_f32; 9], Sum).unwrap_err();
                assert!(matches!(error, Error::Timeout { peer: 1, .. }), "{error}");
                let flying = "IN FLIGHT, rank 1 over ";
                has_record(
                    &error,
                    &comm,
                    &["#0 barrier", "done", "#1 all_reduce(sum of 9 f32", flying, "bytes received"],
                );
                // It stays what it was when the group failed.
                let again = comm.barrier().unwrap_err();
                has_record(&again, &comm, &["#1 all_reduce"]);
            }
            // Nobody leaves before all have seen what they are to see.
            comm
        });
        group(links, 2, |comm| {
            let error = match comm.rank() {
                0 => comm.barrier().unwrap_err(),
                _ => comm.broadcast(&mut [1_u8; 5], 1).and_then(|()| comm.barrier()).unwrap_err(),
            };
            let Error::Mismatch { detail, .. } = &error else { panic!("{error}") };
            assert!(!detail.is_empty());
            has_record(&error, &comm, &["#0 "]);
        });
        group(links, 2, |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 0 {
                comm.close().unwrap();
            } else {
                let error = comm.all_reduce(&mut [1], Sum).unwrap_err();
                let Error::PeerLost { peer: 0, detail, .. } = &error else { panic!("{error}") };
                assert!(detail.contains("#1 all_reduce"), "{error}");
                has_record(&error, &comm, &["#0 barrier"]);
            }
        });
    }
}

/// Where the ranks of a test put their traces.
fn folder(name: &str) -> PathBuf {
    env::temp_dir().join(format!("raccl-test-{name}-{}", std::process::id()))
}

fn events(folder: &std::path::Path, rank: usize) -> Vec<Value> {
    let text = fs::read_to_string(folder.join(format!("trace.rank{rank}.json"))).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn each_rank_writes_a_trace_of_its_calls() {
    let folder = folder("trace");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("trace.json");
    let variables = [("RACCL_TRACE", path.to_str().unwrap())];
    let ranks = launch("flight::each_rank_writes_a_trace_of_its_calls", 2, &variables, |config| {
        let comm = config.connect().unwrap();
        comm.barrier().unwrap();
        comm.all_reduce(&mut [1_i64; 50], Sum).unwrap();
        let peer = 1 - comm.rank();
        let mut one = [0_u16; 4];
        if comm.rank() == 0 {
            comm.send(&[5_u16; 4], peer, 77).unwrap();
        } else {
            comm.recv(&mut one, peer, 77).unwrap();
        }
        comm.close().unwrap();
    });
    if ranks.is_empty() {
        return;
    }
    for rank in 0..2 {
        let events = events(&folder, rank);
        let names: Vec<&str> = events.iter().filter_map(|event| event["name"].as_str()).collect();
        let message = ["send", "recv"][rank];
        assert_eq!(names, ["process_name", "barrier", "all_reduce", message], "{events:?}");
        for event in &events[1..] {
            assert_eq!((&event["ph"], &event["pid"]), (&Value::from("X"), &Value::from(rank)));
            assert!(event["ts"].as_f64().unwrap() > 0.0 && event["dur"].as_f64().unwrap() >= 0.0);
            assert_eq!(event["args"]["failed"], false);
        }
        assert_eq!(events[2]["args"]["sequence"], 1);
        assert!(events[2]["args"]["algorithm"].is_string() && events[2]["args"]["bytes"].as_u64() > Some(0));
        assert!(events[3]["args"]["call"].as_str().unwrap().contains("tag 77"));
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_trace_is_whole_when_a_process_ends_by_an_error() {
    let folder = folder("failed-trace");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("trace.json");
    let variables = [("RACCL_TRACE", path.to_str().unwrap())];
    let ranks = launch("flight::a_trace_is_whole_when_a_process_ends_by_an_error", 2, &variables, |config| {
        let comm = config.connect().unwrap();
        comm.barrier().unwrap();
        let result = match comm.rank() {
            0 => comm.broadcast(&mut [0_u8; 1 << 20], 0).and_then(|()| comm.barrier()),
            _ => comm.all_reduce(&mut [0.0_f64; 4], Sum).and_then(|()| comm.barrier()),
        };
        assert!(matches!(result, Err(Error::Mismatch { .. })), "{result:?}");
        // Nothing is dropped, as when the process exits in the middle of its work.
        mem::forget(comm);
    });
    if ranks.is_empty() {
        return;
    }
    for rank in 0..2 {
        let events = events(&folder, rank);
        assert_eq!(events[1]["name"], "barrier", "{events:?}");
        let failed = |event: &Value| event["args"]["failed"] == true;
        assert!(!failed(&events[1]) && events.iter().any(failed), "{events:?}");
    }
    fs::remove_dir_all(folder).unwrap();
}
