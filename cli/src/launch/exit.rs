//! How a rank ended, and what that means for the job.

use anyhow::anyhow;

use super::job::Place;
use super::rank::{Rank, on_host};
use crate::failure::Failure;

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// With this status.
    Status(i32),
    /// By this signal.
    Signal(i32),
    /// Its ssh ended, by that signal if it was one, and did not say how the rank did.
    Lost(Option<i32>),
    /// The far machine has no such program.
    NoProgram,
    /// The far machine has no such directory.
    NoDirectory,
}

impl Exit {
    /// How likely it is the cause, when several ranks end at the same time; 0 for none. A rank whose peer is
    /// lost leaves with an error, so signals and unusual statuses are nearer to the cause.
    pub(super) fn gravity(self) -> u8 {
        match self {
            Exit::Status(0) => 0,
            Exit::Status(1) => 1,
            Exit::Status(_) => 2,
            Exit::Signal(_) | Exit::Lost(_) => 3,
            Exit::NoProgram | Exit::NoDirectory => 4,
        }
    }

    /// What ends the job.
    pub(super) fn failure(self, rank: &Rank, place: &Place, program: &str) -> Failure {
        let number = rank.number();
        let on = on_host(place);
        match self {
            Exit::Status(status) => {
                let mut text = format!("rank {number}{on} exited with status {status}");
                // A far shell reports a signal so, and cannot say whether it was one.
                let signal = status - 128;
                if let (Place::Ssh(_), true) = (place, (1..=64).contains(&signal)) {
                    text.push_str(&format!(", which stands for {}", signal_name(signal)));
                }
                Failure::with_status(status as u8, anyhow!(text))
            }
            Exit::Signal(signal) => {
                let text = format!("rank {number}{on} was killed by {}", signal_name(signal));
                Failure::with_status(of_signal(signal), anyhow!(text))
            }
            Exit::Lost(signal) => {
                let what = if rank.has_started() { "lost" } else { "cannot start" };
                let how = signal.map(|signal| format!("its ssh was killed by {}", signal_name(signal)));
                let how = how.or_else(|| last_lines(rank.last_words())).unwrap_or("its ssh ended".into());
                let host = on.trim_start_matches(" on ");
                let advice = match (rank.has_started(), signal) {
                    (false, None) => format!("; does `ssh {host} true` work?"),
                    _ => String::new(),
                };
                let status = signal.map_or(1, of_signal);
                Failure::with_status(status, anyhow!("{what} rank {number}{on}: {how}{advice}"))
            }
            Exit::NoProgram => Failure::usage(anyhow!(
                "cannot start `{program}` as rank {number}{on}: there is no such program"
            )),
            Exit::NoDirectory => Failure::usage(anyhow!(
                "cannot start rank {number}{on}: there is no such directory to run in"
            )),
        }
    }
}

/// The status that a shell gives for a signal.
pub(super) fn of_signal(signal: i32) -> u8 {
    128_u8.wrapping_add(signal as u8)
}

/// A signal as people look it up.
pub(super) fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}

/// The end of a text, in one line.
fn last_lines(text: &str) -> Option<String> {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(3)..];
    (!last.is_empty()).then(|| last.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_one_line() {
        assert_eq!(last_lines(" \n\n"), None);
        assert_eq!(last_lines("a\r\n\nb\nc\nd\n").as_deref(), Some("b; c; d"));
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(signal_name(9), "signal 9 (SIGKILL)");
        assert_eq!(of_signal(15), 143);
    }
}
