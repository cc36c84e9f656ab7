//! `raccl launch` with ranks behind ssh: a stand-in that runs commands here, and a real sshd on loopback.

mod support;

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Done, pids, raccl, run, run_with_input, send, started, wait_for_lines, wait_until_dead};
use tempfile::TempDir;

/// A command in place of ssh, which writes down its arguments and runs the far end's command here.
struct StandIn {
    directory: TempDir,
}

impl StandIn {
    /// `last` runs the command, which is in `$command`.
    fn new(last: &str) -> Self {
        let directory = TempDir::new().expect("a directory");
        let script = format!(
            "#!/bin/sh\nprintf '%s\\n' \"$@\" -- >>'{}'\nfor command; do :; done\n{last}\n",
            directory.path().join("arguments").display()
        );
        write_executable(&directory.path().join("ssh"), &script);
        Self { directory }
    }

    fn raccl(&self) -> Command {
        let mut command = raccl();
        command.env("RACCL_SSH", self.directory.path().join("ssh")).arg("launch");
        command
    }

    fn arguments(&self) -> String {
        fs::read_to_string(self.directory.path().join("arguments")).expect("it ran")
    }
}

fn write_executable(path: &Path, text: &str) {
    fs::write(path, text).expect("writes");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("sets its mode");
}

#[test]
fn ssh_is_called_so_that_it_cannot_ask_and_shows_nothing() {
    let ssh = StandIn::new("exec sh -c \"$command\"");
    let script = r#"echo "$RACCL_RANK of $RACCL_SIZE at $RACCL_COORDINATOR, $RACCL_LOCAL_RANK of $RACCL_LOCAL_SIZE, $RACCL_LOG"
        cat <&"$RACCL_SECRET_FD" >&2"#;
    let done = run(ssh
        .raccl()
        .args(["--hosts", "one,me@two,one", "--port", "5000", "--env", "WORD=abracadabra", "--", "sh", "-c"])
        .args([script, "sh", "hocus pocus"])
        .env("RACCL_LOG", "debug"));
    assert_eq!(done.status, Some(0), "{done:?}");
    let expected = [
        "[0] 0 of 3 at one:5000, 0 of 2, debug",
        "[1] 1 of 3 at one:5000, 0 of 1, debug",
        "[2] 2 of 3 at one:5000, 1 of 2, debug",
    ];
    assert_eq!(done.sorted(), expected);

    let arguments = ssh.arguments();
    assert_eq!(arguments.matches("\nBatchMode=yes\n").count(), 3);
    assert_eq!((arguments.matches("\none\n").count(), arguments.matches("\nme@two\n").count()), (2, 1));
    let secret = done.stderr.lines().next().expect("a secret").split_once(' ').expect("a prefix").1;
    assert_eq!(secret.len(), 64);
    for hidden in [secret, "abracadabra", "hocus", "RACCL_"] {
        assert!(!arguments.contains(hidden), "{hidden} is on the command line: {arguments}");
    }
}

#[test]
fn every_shell_passes_arguments_variables_and_input_whole() {
    let mut tried = 0;
    for shell in ["dash", "bash", "zsh", "busybox"] {
        let Some(path) = find(shell) else { continue };
        // With and without a dd that reads whole blocks.
        for dd in ["", "case $* in *iflag*) exit 1 ;; esac\n"] {
            let directory = TempDir::new().expect("a directory");
            std::os::unix::fs::symlink(&path, directory.path().join("sh")).expect("links");
            let real = find("dd").expect("everybody has dd");
            write_executable(
                &directory.path().join("dd"),
                &format!("#!/bin/sh\n{dd}exec '{}' \"$@\"\n", real.display()),
            );
            let bin = directory.path().display();
            let ssh = StandIn::new(&format!("PATH='{bin}':$PATH; export PATH; exec sh -c \"$command\""));
            let done = run(support::echoing(ssh.raccl().args(["--hosts", "one,two"])));
            assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{shell}");
            support::assert_echoed(&done, 2);

            // A byte at a time is slow.
            let input = &support::much_input()[..if dd.is_empty() { 600_000 } else { 3_000 }];
            let script = r#"echo "$(cksum)""#;
            let done = run_with_input(ssh.raccl().args(["--hosts", "one,two", "sh", "-c", script]), input);
            assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{shell}");
            let expected = [format!("[0] {}", support::cksum(input)), format!("[1] {}", support::cksum(b""))];
            assert_eq!(done.sorted(), expected, "{shell}");
            tried += 1;
        }
    }
    assert!(tried > 0);
}

/// A program of the search path.
fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

#[test]
fn a_rank_that_stops_reading_goes_on() {
    let ssh = StandIn::new("sh -c \"$command\"");
    let script = "head -c 3; exec 0<&-; sleep 0.3; echo; echo alive";
    let done =
        run_with_input(ssh.raccl().args(["--hosts", "one", "sh", "-c", script]), &support::much_input());
    assert_eq!(done.status, Some(0), "{done:?}");
    assert!(done.stdout.ends_with("[0] alive\n"), "{done:?}");
}

#[test]
fn a_script_that_is_cut_short_runs_nothing() {
    let ssh = StandIn::new("head -c 1500 | sh -c \"$command\"; exit 9");
    let done = run(ssh.raccl().args(["--hosts", "one", "--", "echo", "ran"]));
    assert_eq!((done.status, done.stdout.as_str()), (Some(1), ""), "{done:?}");
    assert!(done.stderr.starts_with("raccl: cannot start rank 0 on one: "), "{done:?}");
}

#[test]
fn loopback_needs_no_ssh() {
    let ssh = StandIn::new("echo used >&2; exit 1");
    let done = run(ssh.raccl().args([
        "--hosts",
        "localhost,127.0.0.1",
        "--",
        "sh",
        "-c",
        "echo $RACCL_COORDINATOR",
    ]));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""));
    assert!(done.stdout.lines().all(|line| line[4..].starts_with("127.0.0.1:")), "{done:?}");
    // Both kinds in one job.
    let ssh = StandIn::new("exec sh -c \"$command\"");
    let hosts = ["--hosts", "localhost,other", "--coordinator", "10.1.2.3:99"];
    let done = run(ssh.raccl().args(hosts).args(["--", "sh", "-c", "echo $RACCL_COORDINATOR"]));
    assert_eq!(done.sorted(), ["[0] 10.1.2.3:99", "[1] 10.1.2.3:99"]);
    assert_eq!(ssh.arguments().matches("BatchMode=yes").count(), 1);
}

#[test]
fn hostfiles_give_hosts_slots_address_devices_and_variables() {
    let ssh = StandIn::new("exec sh -c \"$command\"");
    let file = ssh.directory.path().join("hosts");
    let script = r#"echo "$RACCL_RANK $RACCL_LOCAL_RANK $RACCL_COORDINATOR $RACCL_DEVICES $WORD""#;
    let launch = |text: &str, more: &[&str]| {
        fs::write(&file, text).expect("writes");
        let mut command = ssh.raccl();
        command
            .arg("--hostfile")
            .arg(&file)
            .args(["--port", "7"])
            .args(more)
            .args(["--", "sh", "-c", script]);
        run(&mut command)
    };
    let done = launch("one slots=2 # first\n\ntwo\n", &[]);
    assert_eq!(done.sorted(), ["[0] 0 0 one:7  ", "[1] 1 1 one:7  ", "[2] 2 0 one:7  "], "{done:?}");
    let done = launch("one slots=2\ntwo\n", &["-n", "2"]);
    assert_eq!(done.sorted(), ["[0] 0 0 one:7  ", "[1] 1 1 one:7  "], "{done:?}");
    let mlx = r#"{"envs": ["WORD=it's"], "hosts": [
        {"ssh": "one", "ips": ["fd00::1"], "rdma": [null, "rdma_en2"]},
        {"ssh": "two", "ips": ["fd00::2"], "rdma": ["rdma_en3", null]}]}"#;
    let done = launch(mlx, &[]);
    let rest = r#"[fd00::1]:7 [[[],["rdma_en2"]],[["rdma_en3"],[]]] it's"#;
    assert_eq!(done.sorted(), [format!("[0] 0 0 {rest}"), format!("[1] 1 0 {rest}")], "{done:?}");

    for (text, more, words) in [
        ("one slots=none\n", &[][..], "line 1"),
        ("# nobody\n", &[], "no host"),
        ("[{]", &[], "JSON"),
        ("one\n", &["-n", "2"], "1 slots"),
        ("one\n", &["--env", "a.b=1"], "a.b"),
        (r#"{"envs": ["RACCL_RANK=1"], "hosts": [{"ssh": "one"}]}"#, &[], "RACCL_RANK"),
    ] {
        let done = launch(text, more);
        assert_eq!((done.status, done.stderr.lines().count()), (Some(2), 1), "{done:?}");
        assert!(done.stderr.contains(words), "{done:?}");
    }
    fs::remove_file(&file).expect("removes");
    let done = run(ssh.raccl().arg("--hostfile").arg(&file).arg("true"));
    assert_eq!((done.status, done.stderr.lines().count()), (Some(2), 1), "{done:?}");
}

#[test]
fn an_ssh_that_is_missing_or_fails_is_said_in_one_line() {
    for (ssh, status, words) in [
        ("/no/such/ssh", 1, &["rank 0 on one", "/no/such/ssh", "No such file"][..]),
        ("", 2, &["RACCL_SSH"]),
        ("'open", 2, &["RACCL_SSH"]),
        ("sh -c 'echo no way >&2; exit 255'", 1, &["cannot start rank 0 on one", "no way", "ssh one true"]),
        ("false", 1, &["cannot start rank 0 on one"]),
    ] {
        let done = run(raccl().args(["launch", "--hosts", "one", "true"]).env("RACCL_SSH", ssh));
        assert_eq!((done.status, done.stderr.lines().count()), (Some(status), 1), "{done:?}");
        assert!(words.iter().all(|word| done.stderr.contains(word)), "{done:?}");
    }
    let hosts = ["launch", "--hosts", "localhost,other", "true"];
    let done = run(raccl().args(hosts));
    assert_eq!((done.status, done.stderr.lines().count()), (Some(2), 1), "{done:?}");
    assert!(done.stderr.contains("--coordinator"), "{done:?}");
}

/// A real sshd on loopback, with a key that lets us in, and the ssh configuration for it: the hosts `one`,
/// `two` and `three`, and `closed`, where nobody listens.
struct Sshd {
    directory: TempDir,
    process: Child,
}

impl Sshd {
    /// `None`, with a printed reason, only if there is no sshd on this machine.
    fn start() -> Option<Self> {
        let Some(sshd) = ["/usr/sbin/sshd", "/usr/bin/sshd", "/usr/local/sbin/sshd"]
            .into_iter()
            .find(|path| Path::new(path).exists())
        else {
            println!("skipped: there is no sshd on this machine (Debian: openssh-server)");
            return None;
        };
        let directory = TempDir::new().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        for key in ["host", "user"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(path(key))
                .status();
            assert!(made.expect("ssh-keygen comes with ssh").success());
        }
        let free = |listener: &TcpListener| listener.local_addr().expect("an address").port();
        let (first, second) = (
            TcpListener::bind("127.0.0.1:0").expect("listens"),
            TcpListener::bind("127.0.0.1:0").expect("listens"),
        );
        let (port, closed) = (free(&first), free(&second));
        drop((first, second));
        let user =
            String::from_utf8(Command::new("id").arg("-un").output().expect("id").stdout).expect("a name");
        let user = user.trim();
        if user == "root" {
            // What sshd wants of its surroundings when it is root; the system's start-up makes it otherwise.
            fs::create_dir_all("/run/sshd").expect("the directory that sshd confines itself to");
        }
        fs::write(
            path("sshd_config"),
            format!(
                "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
                 StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPermitRootLogin yes\n",
                path("host").display(),
                path("user.pub").display()
            ),
        )
        .expect("writes");
        let common = format!(
            "  HostName 127.0.0.1\n  User {user}\n  IdentityFile {}\n  IdentitiesOnly yes\n  IdentityAgent none\n  \
             StrictHostKeyChecking accept-new\n  UserKnownHostsFile {}\n",
            path("user").display(),
            path("known").display()
        );
        let config =
            format!("Host one two three\n  Port {port}\n{common}Host closed\n  Port {closed}\n{common}");
        fs::write(path("ssh_config"), config).expect("writes");
        let log = fs::File::create(path("log")).expect("a log");
        let process = Command::new(sshd)
            .args(["-D", "-e", "-f"])
            .arg(path("sshd_config"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("again"))
            .stderr(log)
            .spawn()
            .expect("sshd starts");
        let sshd = Self { directory, process };
        let end = Instant::now() + support::LONG;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "sshd does not listen: {}", sshd.log());
            thread::sleep(Duration::from_millis(10));
        }
        Some(sshd)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// `raccl launch --hosts HOSTS -- sh -c SCRIPT`, through ssh processes that write down their numbers.
    fn launch(&self, hosts: &str, script: &str) -> Command {
        let mut command = self.raccl();
        command.args(["--hosts", hosts, "--", "sh", "-c", script, "sh"]);
        command
    }

    fn raccl(&self) -> Command {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let wrapper = path("ssh");
        write_executable(
            Path::new(&wrapper),
            &format!("#!/bin/sh\necho $$ >>'{}'\nexec ssh \"$@\"\n", path("clients")),
        );
        let mut command = raccl();
        command.env("RACCL_SSH", format!("'{wrapper}' -F '{}'", path("ssh_config"))).arg("launch");
        command
    }

    /// The numbers of the ssh processes that were started.
    fn clients(&self, count: usize) -> Vec<String> {
        wait_for_lines(&self.directory.path().join("clients"), count)
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        send(&self.process, Signal::TERM);
        self.process.wait().expect("sshd ends");
    }
}

#[test]
fn a_real_sshd_passes_everything_whole() {
    let Some(sshd) = Sshd::start() else { return };
    let done = run(support::echoing(sshd.raccl().args(["--hosts", "one,two"])));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{}", sshd.log());
    support::assert_echoed(&done, 2);

    let script = r#"echo "$RACCL_RANK of $RACCL_SIZE reads $(cksum) in $PWD""#;
    let input = support::much_input();
    let done = run_with_input(&mut sshd.launch("one,two,one", script), &input);
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{}", sshd.log());
    let here = std::env::current_dir().expect("a directory");
    let line = |rank: usize, input: &[u8]| {
        format!("[{rank}] {rank} of 3 reads {} in {}", support::cksum(input), here.display())
    };
    assert_eq!(done.sorted(), [line(0, &input), line(1, b""), line(2, b"")]);
}

#[test]
fn more_ranks_on_one_host_than_sshd_takes_at_once() {
    let Some(sshd) = Sshd::start() else { return };
    let done = run(&mut sshd.launch(&["one"; 14].join(","), "echo $RACCL_LOCAL_RANK"));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{}", sshd.log());
    assert_eq!(done.stdout.lines().count(), 14);
}

#[test]
fn the_secret_is_out_of_sight_at_the_far_end() {
    let Some(sshd) = Sshd::start() else { return };
    let script = r#"
        secret=$(mktemp); cat <&"$RACCL_SECRET_FD" >"$secret"; wc -c <"$secret"
        cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | grep -c -a -F -f "$secret"
        rm "$secret""#;
    let done = run(&mut sshd.launch("one", script));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{}", sshd.log());
    assert_eq!(done.stdout.split_whitespace().collect::<Vec<_>>(), ["[0]", "65", "[0]", "0"]);
}

#[test]
fn a_far_rank_that_fails_takes_the_others_along() {
    let Some(sshd) = Sshd::start() else { return };
    for (end, status, message) in [
        ("exit 3", 3, "raccl: rank 1 on two exited with status 3\n"),
        (
            "kill -KILL $$",
            137,
            "raccl: rank 1 on two exited with status 137, which stands for signal 9 (SIGKILL)\n",
        ),
    ] {
        let (directory, script) = pids();
        let wait =
            format!("while [ $(wc -l <'{}/pids') -lt 6 ]; do sleep 0.01; done\n", directory.path().display());
        let script = format!("{script}{wait}[ $RACCL_RANK = 1 ] && {{ echo why >&2; {end}; }}; sleep 600");
        let done = run(&mut sshd.launch("one,two,three", &script));
        assert_eq!(done.status, Some(status), "{done:?}");
        assert_eq!(done.stderr, format!("[1] why\n{message}"));
        for pid in started(directory.path(), 3) {
            // sshd may let go of us before the far end has ended the deaf ones.
            wait_until_dead(&pid);
        }
    }
}

#[test]
fn far_ranks_end_with_the_launcher() {
    let Some(sshd) = Sshd::start() else { return };
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let (directory, script) = pids();
        let child = sshd.launch("one,two", &format!("{script}wait; sleep 600")).spawn().expect("starts");
        let pids = started(directory.path(), 2);
        send(&child, signal);
        let done: Done = child.wait_with_output().expect("ends").into();
        let status = if signal == Signal::KILL { None } else { Some(128 + signal.as_raw()) };
        assert_eq!(done.status, status, "{done:?}");
        for pid in pids {
            wait_until_dead(&pid);
        }
    }
}

#[test]
fn far_ranks_end_with_their_ssh() {
    let Some(sshd) = Sshd::start() else { return };
    let (directory, script) = pids();
    let child = sshd.launch("one,two", &format!("{script}wait; sleep 600")).spawn().expect("starts");
    let pids = started(directory.path(), 2);
    let clients = sshd.clients(2);
    let client: i32 = clients[1].parse().expect("a number");
    rustix::process::kill_process(rustix::process::Pid::from_raw(client).expect("positive"), Signal::KILL)
        .expect("sends");
    let done: Done = child.wait_with_output().expect("ends").into();
    assert_eq!(done.status, Some(137), "{done:?}");
    let message = "its ssh was killed by signal 9 (SIGKILL)\n";
    assert!(done.stderr.starts_with("raccl: lost rank ") && done.stderr.ends_with(message), "{done:?}");
    for pid in pids {
        wait_until_dead(&pid);
    }
}

#[test]
fn what_cannot_be_started_far_away_is_said_in_one_line() {
    let Some(sshd) = Sshd::start() else { return };
    for (arguments, status, words) in [
        (
            &["--hosts", "one,two", "--", "no-such-program"][..],
            2,
            &["no-such-program", "no such program"][..],
        ),
        (&["--hosts", "one", "--cwd", "/no/such", "--", "true"], 2, &["rank 0 on one", "no such directory"]),
        (
            &["--hosts", "one,nowhere.invalid", "--", "sleep", "600"],
            1,
            &["rank 1 on nowhere.invalid", "resolve"],
        ),
        (&["--hosts", "one,closed", "--", "sleep", "600"], 1, &["rank 1 on closed", "refused"]),
    ] {
        let done = run(sshd.raccl().args(arguments));
        assert_eq!((done.status, done.stderr.lines().count()), (Some(status), 1), "{done:?} {}", sshd.log());
        assert!(words.iter().all(|word| done.stderr.contains(word)), "{done:?}");
    }
}
