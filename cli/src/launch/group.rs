//! Process groups. Every rank leads one, so that what its program starts is ended with it.

use std::collections::HashSet;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions};

/// How long processes have between the request to end and SIGKILL.
pub(super) const GRACE: Duration = Duration::from_millis(1500);

/// Between two looks at whether a group is gone.
const LOOK: Duration = Duration::from_millis(10);

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

/// Whether anybody is left, after those that wait for us to reap them.
fn is_alive(group: Pid) -> bool {
    // Zombies of others count as living, on Linux, which is why we adopt all orphans.
    while let Ok(Some(_)) = rustix::process::waitpgid(group, WaitOptions::NOHANG) {}
    rustix::process::test_kill_process_group(group).is_ok()
}

/// Makes this process the parent of all orphans among its descendants, where that is possible, instead of
/// the system's first process, which may be slow to reap.
pub(super) fn adopt_orphans() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    Ok(())
}
