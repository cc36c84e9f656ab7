//! Input that cannot be: one clear line, the right status, no panic, and an end within the time for forming a group.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use support::{Done, raccl, run};
use tempfile::TempDir;

/// A rank that looks for its group, as if a launcher had started it.
fn rank(variables: &[(&str, &str)]) -> Command {
    let mut command = raccl();
    command.args(["bench", "barrier", "--iters", "2"]).envs(variables.iter().copied());
    command
}

/// Checks the status and that standard error is one line with all the words.
fn assert_refused(done: &Done, status: i32, words: &[&str]) {
    assert_eq!((done.status, done.stderr.lines().count()), (Some(status), 1), "{words:?}: {done:?}");
    assert!(words.iter().all(|word| done.stderr.contains(word)), "{words:?}: {done:?}");
    assert!(done.stderr.starts_with("raccl: ") && !done.stderr.contains("panicked"), "{done:?}");
    assert_eq!(done.stdout, "", "{done:?}");
}

#[test]
fn a_malformed_variable_is_named_with_its_value() {
    for (name, value) in [
        ("RACCL_RANK", "one"),
        ("RACCL_SIZE", "-2"),
        ("RACCL_COORDINATOR", "nowhere"),
        ("RACCL_LINK", "carrier-pigeon"),
        ("RACCL_TIMEOUT", "soon"),
        ("RACCL_LATE_TIMEOUT", "30"),
        ("RACCL_CONNECT_TIMEOUT", "0"),
        ("RACCL_ALGORITHM", "all_reduce:0-32k=magic"),
        ("RACCL_SECRET_FD", "x"),
        ("RACCL_INSECURE", "perhaps"),
        ("RACCL_INTERFACE", "no-such-interface0"),
    ] {
        let mut variables = vec![("RACCL_RANK", "0"), ("RACCL_SIZE", "1")];
        variables.retain(|(known, _)| *known != name);
        variables.push((name, value));
        assert_refused(&run(&mut rank(&variables)), 2, &[name, value]);
        // The command that starts ranks says it once, and not once for each.
        if !["RACCL_RANK", "RACCL_SIZE"].contains(&name) {
            let mut command = raccl();
            command.args(["bench", "barrier", "-n", "3", "--iters", "2"]).env(name, value);
            assert_refused(&run(&mut command), 2, &[name, value]);
        }
    }
    let mut command = raccl();
    command.args(["bench", "barrier"]).env("RACCL_JOB", OsStr::from_bytes(b"\xff"));
    assert_refused(&run(&mut command), 2, &["RACCL_JOB", "UTF-8"]);
}

#[test]
fn variables_that_contradict_each_other_are_a_usage_error() {
    for (variables, words) in [
        (&[("RACCL_RANK", "2"), ("RACCL_SIZE", "2")][..], &["RACCL_RANK", "0 to 1"][..]),
        (&[("RACCL_RANK", "0")], &["RACCL_SIZE"]),
        (&[("RACCL_SIZE", "2")], &["RACCL_RANK"]),
        (&[("RACCL_COORDINATOR", "127.0.0.1:7")], &["RACCL_COORDINATOR", "group of one"]),
        (&[("RACCL_SECRET_FD", "9"), ("RACCL_SECRET_FILE", "/x")], &["one of them only"]),
    ] {
        assert_refused(&run(&mut rank(variables)), 2, words);
    }
}

#[test]
fn a_matrix_that_is_missing_malformed_or_for_another_group_is_named() {
    let directory = TempDir::new().expect("a directory");
    let file = directory.path().join("cables.json");
    fs::write(&file, "[[null, \"a\"], [\"b\"").expect("writable");
    let file = file.to_str().expect("text");
    for (matrix, words) in [
        ("/no/such/cables.json", &["/no/such/cables.json", "No such file"][..]),
        (file, &["not JSON"]),
        ("[[null, \"a\"]]", &["row 0 has 2 entries"]),
        ("[[null, \"a\"], [null, null]]", &["rank 0 has 1 cable to rank 1"]),
        ("[[null, \"a\", \"b\"], [\"a\", null, \"b\"], [\"a\", \"b\", null]]", &["3 ranks", "has 2"]),
    ] {
        for arguments in [&["-n", "2"][..], &[]] {
            let mut command = rank(&[("RACCL_DEVICES", matrix)]);
            if arguments.is_empty() {
                command.envs([
                    ("RACCL_RANK", "0"),
                    ("RACCL_SIZE", "2"),
                    ("RACCL_COORDINATOR", "127.0.0.1:1"),
                ]);
            }
            let done = run(command.args(arguments));
            assert_refused(&done, 2, &[&["RACCL_DEVICES"], words].concat());
        }
    }
}

#[test]
fn a_hostfile_that_is_missing_or_malformed_is_named() {
    let directory = TempDir::new().expect("a directory");
    let file = directory.path().join("hosts");
    let name = file.to_str().expect("text");
    let launch = || {
        let mut command = raccl();
        command.args(["launch", "--hostfile", name, "--", "true"]);
        command
    };
    assert_refused(&run(&mut launch()), 2, &[name, "No such file"]);
    for (text, words) in [
        ("", "host"),
        ("one slots=many\n", "slots"),
        ("one two three\n", "two"),
        ("[{\"ssh\": 7}]", "ssh"),
        ("{\"hosts\": [", "JSON"),
        ("\u{0}\u{1}", "host"),
    ] {
        fs::write(&file, text).expect("writable");
        assert_refused(&run(&mut launch()), 2, &[name, words]);
    }
}

#[test]
fn a_coordinator_whose_name_nobody_knows_is_given_up() {
    let variables = [
        ("RACCL_RANK", "1"),
        ("RACCL_SIZE", "2"),
        ("RACCL_COORDINATOR", "no-such-host.invalid:7000"),
        ("RACCL_CONNECT_TIMEOUT", "2s"),
    ];
    assert_refused(&run(&mut rank(&variables)), 1, &["rank 1", "no-such-host.invalid"]);
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = taken.local_addr().expect("has an address");
    let variables = [
        ("RACCL_RANK", "0"),
        ("RACCL_SIZE", "2"),
        ("RACCL_COORDINATOR", &address.to_string()),
        ("RACCL_CONNECT_TIMEOUT", "2s"),
    ];
    assert_refused(&run(&mut rank(&variables)), 1, &["rank 0", &address.to_string(), "is taken"]);
}

#[test]
fn a_rank_that_never_comes_is_named_when_the_time_is_up() {
    let port = TcpListener::bind("127.0.0.1:0").expect("listens").local_addr().expect("an address").port();
    let coordinator = format!("127.0.0.1:{port}");
    let start = |number: &str, size: &str| {
        run(&mut rank(&[
            ("RACCL_RANK", number),
            ("RACCL_SIZE", size),
            ("RACCL_COORDINATOR", &coordinator),
            ("RACCL_CONNECT_TIMEOUT", "1s"),
        ]))
    };
    assert_refused(&start("0", "3"), 1, &["rank 0", "ranks 1 and 2 did not arrive"]);
    assert_refused(&start("1", "2"), 1, &["rank 1", &coordinator]);
}

#[test]
fn a_rank_that_ends_before_the_group_is_formed_ends_the_job() {
    let script = r#"[ "$RACCL_RANK" = 1 ] || exec "$0" bench barrier --iters 2"#;
    let mut command = raccl();
    command.args(["launch", "-n", "2", "--env", "RACCL_CONNECT_TIMEOUT=1s", "--", "sh", "-c", script]);
    let done = run(command.arg(env!("CARGO_BIN_EXE_raccl")));
    assert_eq!(done.status, Some(1), "{done:?}");
    assert!(done.stderr.contains("rank 1") && !done.stderr.contains("panicked"), "{done:?}");
}

#[test]
fn a_program_or_an_unknown_host_that_cannot_start_is_one_line() {
    let launch = |arguments: &[&str]| run(raccl().arg("launch").args(arguments));
    assert_refused(
        &launch(&["-n", "2", "--", "/no/such/program"]),
        2,
        &["rank 0", "/no/such/program", "No such file"],
    );
    assert_refused(&launch(&["-n", "1", "--", "/"]), 2, &["rank 0", "ermission denied"]);
    assert_refused(&launch(&["--hosts", "", "--", "true"]), 2, &["host"]);
    assert_refused(&launch(&["--hosts", "a,-oProxyCommand=x", "--", "true"]), 2, &["-oProxyCommand=x"]);
    if Command::new("ssh").arg("-V").output().is_ok() {
        let done = launch(&["--hosts", "no-such-host.invalid,no-such-host.invalid", "-n", "2", "--", "true"]);
        assert_refused(&done, 1, &["cannot start rank", "no-such-host.invalid"]);
    }
}
