//! `raccl launch` with ranks on this machine.

mod support;

use std::collections::BTreeSet;
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::Child;
#[cfg(target_os = "linux")]
use std::{fs::File, io::Write, process::Command};

use rustix::process::Signal;
use support::{HEX, launch, pids, raccl, run, run_with_input, send, started, wait_until_dead};

#[test]
fn every_rank_learns_its_place() {
    let done = run(&mut launch(4, r#"echo "$RACCL_RANK of $RACCL_SIZE at $RACCL_COORDINATOR""#));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""));
    let lines = done.sorted();
    let coordinator = lines[0].rsplit(' ').next().expect("words");
    assert!(coordinator.starts_with("127.0.0.1:"), "{coordinator}");
    let expected: Vec<_> = (0..4).map(|rank| format!("[{rank}] {rank} of 4 at {coordinator}")).collect();
    assert_eq!(lines, expected);
}

#[test]
fn arguments_and_variables_arrive_byte_for_byte() {
    let mut command = raccl();
    let done = run(support::echoing(command.args(["launch", "-n", "2"])));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""));
    support::assert_echoed(&done, 2);
}

#[test]
fn link_and_timeout_reach_the_environment() {
    let mut command = raccl();
    command.args(["launch", "-n", "1", "--link", "tcp", "--timeout", "1.5s", "--", "sh", "-c"]);
    let done = run(command
        .arg("echo $RACCL_LINK $RACCL_TIMEOUT ${RACCL_SECRET_FILE-none}")
        .env("RACCL_SECRET_FILE", "/an/older/one"));
    assert_eq!(done.stdout, "[0] tcp 1.5s none\n");
}

#[test]
fn the_secret_is_fresh_shared_and_out_of_sight() {
    let script = format!(
        r#"{HEX}
        hex <&"$RACCL_SECRET_FD"
        cat /proc/$$/environ /proc/$$/cmdline /proc/$PPID/cmdline 2>/dev/null | hex"#
    );
    let mut secrets = BTreeSet::new();
    for _ in 0..2 {
        let done = run(&mut launch(3, &script));
        assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""));
        let mut job = BTreeSet::new();
        for rank in 0..3 {
            let prefix = format!("[{rank}] ");
            let lines: Vec<_> = done.stdout.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
            let [secret, visible] = lines[..] else { panic!("{lines:?}") };
            assert!(secret.ends_with("0a"), "a line and then the end");
            let digits: Vec<u8> = secret.as_bytes().chunks(2).map(unhex).collect();
            assert!(digits.len() == 65 && digits[..64].iter().all(u8::is_ascii_hexdigit), "64 digits");
            assert!(!visible.contains(&secret[..secret.len() - 2]));
            assert!(
                !visible.contains(std::str::from_utf8(&digits[..64]).expect("digits")),
                "not as bytes either"
            );
            job.insert(secret.to_owned());
        }
        assert_eq!(job.len(), 1, "the ranks of one job share it");
        secrets.extend(job);
    }
    assert_eq!(secrets.len(), 2, "two jobs do not");
}

fn unhex(pair: &[u8]) -> u8 {
    u8::from_str_radix(std::str::from_utf8(pair).expect("digits"), 16).expect("a byte")
}

#[test]
fn input_goes_to_rank_0_alone() {
    let script = r#"echo "$RACCL_RANK read $(cksum)""#;
    let input = support::much_input();
    let done = run_with_input(&mut launch(3, script), &input);
    assert_eq!(done.status, Some(0));
    let (all, nothing) = (support::cksum(&input), support::cksum(b""));
    let expected =
        [format!("[0] 0 read {all}"), format!("[1] 1 read {nothing}"), format!("[2] 2 read {nothing}")];
    assert_eq!(done.sorted(), expected);
}

#[test]
fn lines_never_mix() {
    // Each rank writes lines of its own letter, in many small pieces, on both streams.
    let script = r#"
        case $RACCL_RANK in 0) c=a ;; 1) c=b ;; *) c=c ;; esac
        i=0
        while [ $i -lt 60 ]; do
            printf %s $c; printf %s $c$c$c; printf %s\\n $c
            printf %s $c >&2; printf %s\\n $c$c$c$c >&2
            i=$((i + 1))
        done"#;
    let mut command = launch(3, script);
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    command.stdout(writer.try_clone().expect("again")).stderr(writer);
    let mut child = command.spawn().expect("starts");
    drop(command);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("text");
    assert!(child.wait().expect("ends").success());
    let mut counts = [0; 3];
    for line in text.lines() {
        let rank = ["[0] aaaaa", "[1] bbbbb", "[2] ccccc"].iter().position(|&good| good == line);
        counts[rank.unwrap_or_else(|| panic!("a mixed line: {line}"))] += 1;
    }
    assert_eq!(counts, [120; 3]);
}

#[test]
fn a_last_line_without_a_newline_is_shown_and_an_endless_one_is_cut() {
    let done = run(&mut launch(2, "printf 'no newline'; printf oops >&2"));
    assert_eq!(done.sorted(), ["[0] no newline", "[1] no newline"]);
    assert!(done.stderr.contains("[0] oops\n") && done.stderr.contains("[1] oops\n"));

    let done = run(&mut launch(1, "head -c 3000000 /dev/zero | tr '\\0' x"));
    assert_eq!(done.stdout.lines().map(|line| line.len() - "[0] ".len()).sum::<usize>(), 3_000_000);
    assert_eq!(done.stdout.lines().count(), 3);
}

#[test]
fn a_rank_that_fails_takes_the_others_along() {
    let (directory, script) = pids();
    let wait =
        format!("while [ $(wc -l <'{}/pids') -lt 6 ]; do sleep 0.01; done\n", directory.path().display());
    for (end, status, message) in [
        ("exit 3", 3, "raccl: rank 1 exited with status 3\n"),
        ("kill -KILL $$", 137, "raccl: rank 1 was killed by signal 9 (SIGKILL)\n"),
        ("kill -SEGV $$", 139, "raccl: rank 1 was killed by signal 11 (SIGSEGV)\n"),
    ] {
        let done = run(&mut launch(3, &format!("{script}{wait}[ $RACCL_RANK = 1 ] && {end}; sleep 600")));
        assert_eq!((done.status, done.stderr.as_str()), (Some(status), message));
        for pid in started(directory.path(), 3) {
            assert!(support::is_dead(pid.parse().expect("a number")), "process {pid} is left");
        }
        std::fs::remove_file(directory.path().join("pids")).expect("removes");
    }
}

#[test]
fn a_good_end_leaves_no_process_behind() {
    let (directory, script) = pids();
    let done = run(&mut launch(2, &script));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""));
    for pid in started(directory.path(), 2) {
        assert!(support::is_dead(pid.parse().expect("a number")), "process {pid} is left");
    }
}

#[test]
fn output_before_a_failure_is_not_lost() {
    let script = "if [ $RACCL_RANK = 1 ]; then echo why >&2; exit 4; fi; trap 'echo told; exit' TERM; sleep 600 & wait";
    let done = run(&mut launch(2, script));
    assert_eq!(done.status, Some(4));
    assert_eq!(done.stderr, "[1] why\nraccl: rank 1 exited with status 4\n");
}

/// A launcher whose ranks are all up, and the numbers of their processes.
fn running(ranks: usize, directory: &Path, script: &str) -> (Child, Vec<String>) {
    let child = launch(ranks, &format!("{script}wait; sleep 600")).spawn().expect("starts");
    (child, started(directory, ranks))
}

#[test]
fn a_signal_to_the_launcher_ends_every_rank() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (directory, script) = pids();
        let (child, pids) = running(3, directory.path(), &script);
        send(&child, signal);
        let done: support::Done = child.wait_with_output().expect("ends").into();
        assert_eq!(done.status, Some(status), "{done:?}");
        for pid in pids {
            assert!(support::is_dead(pid.parse().expect("a number")), "process {pid} is left");
        }
    }
}

#[test]
fn a_killed_launcher_leaves_no_process_behind() {
    let (directory, script) = pids();
    let (mut child, pids) = running(3, directory.path(), &script);
    send(&child, Signal::KILL);
    child.wait().expect("ends");
    for pid in pids {
        wait_until_dead(&pid);
    }
}

#[test]
fn emulated_cables_are_there_for_the_ranks_and_gone_after_them() {
    let script = r#"echo "$RACCL_EMULATOR_MACHINE $RACCL_LINK $RACCL_DEVICES $RACCL_EMULATOR_SPEC"; ls "$RACCL_VERBS_LIBRARY" >&2"#;
    let done =
        run(raccl().args(["launch", "-n", "2", "--emulate", "mesh,cables=2", "--", "sh", "-c", script]));
    assert_eq!(done.status, Some(0), "{done:?}");
    let devices = r#"[[null,["rdma_en2","rdma_en3"]],[["rdma_en2","rdma_en3"],null]]"#;
    for (rank, line) in done.sorted().into_iter().enumerate() {
        let spec = line
            .strip_prefix(&format!("[{rank}] {rank} verbs {devices} "))
            .unwrap_or_else(|| panic!("{line}"));
        assert!(!Path::new(spec).exists(), "{spec} is left");
    }
    // Also when the launcher cannot remove them itself.
    let (directory, script) = pids();
    let file = directory.path().join("spec");
    let script = format!("echo \"$RACCL_EMULATOR_SPEC\" >'{}'; {script} sleep 600", file.display());
    let mut child = raccl()
        .args(["launch", "-n", "1", "--emulate", "mesh", "--", "sh", "-c", &script])
        .spawn()
        .expect("starts");
    started(directory.path(), 1);
    let spec = std::fs::read_to_string(file).expect("written");
    assert!(Path::new(spec.trim()).exists());
    send(&child, Signal::KILL);
    child.wait().expect("ends");
    support::wait_until("the end of the emulation", || (!Path::new(spec.trim()).exists()).then_some(()));
}

#[test]
fn a_reader_that_goes_away_ends_the_job() {
    let mut child = launch(2, "while :; do echo again; done").spawn().expect("starts");
    let mut first = [0; 10];
    child.stdout.take().expect("piped").read_exact(&mut first).expect("reads");
    let done: support::Done = child.wait_with_output().expect("ends").into();
    assert_eq!(done.status, Some(141), "{done:?}");
    assert!(done.stderr.contains("cannot write what the ranks print"), "{done:?}");
}

#[test]
fn what_cannot_be_started_is_said_in_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("listens");
    let port = taken.local_addr().expect("an address").port().to_string();
    for (arguments, status, words) in [
        (&["-n", "2", "--", "no-such-program"][..], 2, &["no-such-program", "No such file"][..]),
        (&["-n", "2", "--", "/etc/passwd"], 2, &["/etc/passwd", "Permission denied"]),
        (&["-n", "2", "--cwd", "/no/such", "--", "true"], 2, &["/no/such", "No such file"]),
        (&["-n", "2", "--cwd", "/etc/passwd", "--", "true"], 2, &["/etc/passwd", "not a directory"]),
        (&["-n", "2", "--port", &port, "--", "true"], 1, &[&port, "in use"]),
    ] {
        let done = run(raccl().arg("launch").args(arguments));
        assert_eq!(done.status, Some(status), "{done:?}");
        assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
        assert!(words.iter().all(|word| done.stderr.contains(word)), "{done:?}");
    }
}

#[test]
fn wrong_usage_has_status_2() {
    for arguments in [
        &[][..],
        &["launch"],
        &["launch", "-n", "2"],
        &["launch", "-n", "0", "true"],
        &["launch", "-n", "two", "true"],
        &["launch", "-n", "2", "--link", "pigeon", "true"],
        &["launch", "-n", "2", "--timeout", "soon", "true"],
        &["launch", "-n", "2", "--env", "=1", "true"],
        &["launch", "-n", "2", "--env", "RACCL_RANK=1", "true"],
        &["launch", "-n", "2", "--port", "0", "true"],
        &["lunch", "-n", "2", "true"],
    ] {
        let done = run(raccl().args(arguments));
        assert_eq!(done.status, Some(2), "{arguments:?}: {done:?}");
        assert!(!done.stderr.is_empty() && !done.stderr.contains("panicked"), "{done:?}");
    }
}

/// A pseudo-terminal: our side, and the programs' side.
#[cfg(target_os = "linux")]
fn terminal() -> (File, File) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
    grantpt(&ours).expect("grants");
    unlockpt(&ours).expect("unlocks");
    let name = ptsname(&ours, Vec::new()).expect("a name").into_string().expect("in ASCII");
    let theirs = File::options().read(true).write(true).open(name).expect("opens");
    (File::from(ours), theirs)
}

#[test]
#[cfg(target_os = "linux")]
fn on_a_terminal_questions_show_answers_arrive_and_control_c_ends_the_job() {
    let (mut ours, theirs) = terminal();
    // In a session of its own, whose terminal it is.
    let mut command = Command::new("setsid");
    command.args(["--ctty", "--wait", env!("CARGO_BIN_EXE_raccl"), "launch", "-n", "2", "--", "sh", "-c"]);
    command
        .arg(r#"[ $RACCL_RANK = 1 ] || { printf 'Name? '; read -r name; echo "Hello, $name"; }; sleep 600"#);
    command
        .stdin(theirs.try_clone().expect("again"))
        .stdout(theirs.try_clone().expect("again"))
        .stderr(theirs);
    command.env("TERM", "xterm").env_remove("NO_COLOR");
    let mut child = command.spawn().expect("setsid is there");
    drop(command);

    let mut seen = String::new();
    let mut wait_for = |ours: &mut File, words: &str| {
        let mut buffer = [0; 1000];
        while !seen.contains(words) {
            let length = ours.read(&mut buffer).unwrap_or_else(|error| panic!("{error} after {seen:?}"));
            seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    };
    wait_for(&mut ours, "\u{1b}[36m[0]\u{1b}[0m Name? ");
    ours.write_all(b"Ada\n").expect("writes");
    wait_for(&mut ours, "Hello, Ada\r\n");
    ours.write_all(b"\x03").expect("writes");
    wait_for(&mut ours, "raccl: ended every rank on signal 2 (SIGINT)\r\n");
    assert_eq!(child.wait().expect("ends").code(), Some(130));
}
