//! Runs the real command with small programs for `sh`.
#![allow(dead_code, reason = "every test program uses a part of it")]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

/// Much longer than anything here takes; what is still waited for then never comes.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// `raccl`, without what the environment of the test says about ranks.
pub(crate) fn raccl() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_raccl"));
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"RACCL_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `raccl launch -n RANKS -- sh -c SCRIPT sh`.
pub(crate) fn launch(ranks: usize, script: &str) -> Command {
    let mut command = raccl();
    command.args(["launch", "-n", &ranks.to_string(), "--", "sh", "-c", script, "sh"]);
    command
}

/// What a finished command left.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    /// The lines of the standard output, sorted, since ranks run side by side.
    pub(crate) fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Done {
    command.output().expect("the command starts").into()
}

/// Runs a command to its end with something to read.
pub(crate) fn run_with_input(command: &mut Command, input: &[u8]) -> Done {
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the command starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    let writer = thread::spawn(move || stdin.write_all(&input));
    let done = child.wait_with_output().expect("the command ends").into();
    // A program that does not read its input makes this fail, which the caller sees in what is missing.
    let _ = writer.join().expect("no panic");
    done
}

/// Waits until `path` holds a whole number of lines, at least `lines`.
pub(crate) fn wait_for_lines(path: &Path, lines: usize) -> Vec<String> {
    wait_until(&format!("{lines} lines in {}", path.display()), || {
        let text = fs::read_to_string(path).unwrap_or_default();
        (text.lines().count() >= lines && text.ends_with('\n'))
            .then(|| text.lines().map(String::from).collect())
    })
}

/// Waits until a process is gone. One that nobody has reaped yet is gone too.
pub(crate) fn wait_until_dead(pid: &str) {
    let pid: i32 = pid.trim().parse().expect("a process number");
    wait_until(&format!("the end of process {pid}"), || is_dead(pid).then_some(()));
}

/// Whether a process is gone.
pub(crate) fn is_dead(pid: i32) -> bool {
    let zombie = fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")));
    zombie || test_kill_process(Pid::from_raw(pid).expect("positive")).is_err()
}

/// Looks until there is something.
pub(crate) fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "still waiting for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Lower-case hexadecimal digits, as the scripts' `od` writes them.
pub(crate) fn hex(bytes: impl AsRef<OsStr>) -> String {
    bytes.as_ref().as_encoded_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Defines `hex` for scripts: its standard input as hexadecimal digits and a newline.
pub(crate) const HEX: &str = "hex() { od -An -v -tx1 | tr -d ' \\n'; echo; }\n";

/// Values that a careless launcher mangles.
fn values() -> Vec<OsString> {
    let values: [&[u8]; 14] = [
        b"",
        b" ",
        b"two words",
        b"it's \"quoted\"",
        b"$HOME `id` $(id) ${x}",
        b"back\\slash \\n \\",
        b"new\nline\n",
        b"tab\there",
        b"not utf-8: \xff\xfe\x80",
        b"*?[a]~ ; & | < > ! # % =",
        b"--",
        b"-n",
        b"'",
        "\u{e9}\u{4e16}".as_bytes(),
    ];
    values.iter().map(|bytes| OsString::from_vec(bytes.to_vec())).collect()
}

/// Adds such values as variables and arguments, and a program that shows them.
pub(crate) fn echoing(command: &mut Command) -> &mut Command {
    let mut script = String::from(HEX);
    script.push_str("for argument; do printf %s \"$argument\" | hex; done\n");
    for (index, value) in values().iter().enumerate() {
        let mut variable = OsString::from(format!("V{index}="));
        variable.push(value);
        command.arg("--env").arg(variable);
        script.push_str(&format!("printf %s \"$V{index}\" | hex\n"));
    }
    command.args(["--", "sh", "-c", &script, "sh"]).args(values())
}

/// Checks that every rank showed them.
pub(crate) fn assert_echoed(done: &Done, ranks: usize) {
    for rank in 0..ranks {
        let prefix = format!("[{rank}] ");
        let lines: Vec<_> = done.stdout.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let expected: Vec<_> = values().iter().chain(&values()).map(hex).collect();
        assert_eq!(lines, expected);
    }
}

/// More input than pipes and sockets hold, with every byte in it.
pub(crate) fn much_input() -> Vec<u8> {
    (0..150_000_u32).flat_map(u32::to_le_bytes).collect()
}

/// What `cksum` prints for an input.
pub(crate) fn cksum(input: &[u8]) -> String {
    let mut command = Command::new("cksum");
    run_with_input(command.stdout(Stdio::piped()), input).stdout.trim().to_owned()
}

/// A directory where scripts write their process numbers, and the script's part that does it: its own, and
/// that of a child which would live for long and is deaf to gentle words.
pub(crate) fn pids() -> (TempDir, String) {
    let directory = TempDir::new().expect("a directory");
    let file = directory.path().join("pids");
    let script = format!(
        "sh -c 'trap \"\" TERM INT HUP; while :; do sleep 1; done' >/dev/null 2>&1 & echo $! >>'{0}'; echo $$ >>'{0}'\n",
        file.display()
    );
    (directory, script)
}

/// The numbers of all processes that [`pids`] started for so many ranks.
pub(crate) fn started(directory: &Path, ranks: usize) -> Vec<String> {
    wait_for_lines(&directory.join("pids"), 2 * ranks)
}

/// Sends a signal to a command that runs.
pub(crate) fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id() as i32).expect("a process number");
    kill_process(pid, signal).expect("sends");
}
