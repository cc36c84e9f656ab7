//! Process groups. Every rank leads one, so that what its program starts is ended with it.

use std::collections::HashSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// How long processes have between the request to end and SIGKILL.
pub(super) const GRACE: Duration = Duration::from_millis(1500);

/// Between two looks at whether a group is gone.
const LOOK: Duration = Duration::from_millis(20);

/// Sends a signal to every process of a group.
pub(super) fn signal(group: Pid, signal: Signal) {
    // The only errors are that nobody is left, or (macOS) that only a zombie is.
    let _ = rustix::process::kill_process_group(group, signal);
}

/// Takes the groups without living processes out of the set, until none is left or the time is up.
pub(super) fn wait_until_gone(groups: &mut HashSet<Pid>, deadline: Instant) {
    loop {
        groups.retain(|&group| is_alive(group));
        if groups.is_empty() || Instant::now() >= deadline {
            return;
        }
        thread::sleep(LOOK);
    }
}

/// Whether anybody in a group is left.
fn is_alive(group: Pid) -> bool {
    rustix::process::test_kill_process_group(group).is_ok() && !has_only_zombies(group)
}

/// Whether those that are left are dead and only wait for their parent. The parent of orphans is the system's
/// first process, which in a container may take its time.
fn has_only_zombies(group: Pid) -> bool {
    // Other systems do not count zombies.
    if !cfg!(target_os = "linux") {
        return false;
    }
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    let number = group.as_raw_nonzero().to_string();
    !processes.flatten().any(|process| {
        // A process that ends meanwhile has no file any more.
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // The name, in parentheses, may hold anything: after it come the state, the parent and the group.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let (state, _, in_group) = (fields.next(), fields.next(), fields.next());
        in_group == Some(&number) && !matches!(state, Some("Z" | "X"))
    })
}
