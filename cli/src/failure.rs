//! Why the command ends with a status other than 0, and which one.

use std::fmt::Display;
use std::io::{self, Write};

/// Status of a command line that cannot be carried out as it stands.
const USAGE: u8 = 2;
/// Status of a run that was started, or could have been, and failed.
const FAILED: u8 = 1;

/// An error together with the exit status it gives the command.
#[derive(Debug)]
pub(crate) struct Failure {
    status: u8,
    error: anyhow::Error,
}

impl Failure {
    /// The user has to change the command line, or a file that it names.
    pub(crate) fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self { status: USAGE, error: error.into() }
    }

    /// A failure that hands on somebody else's exit status.
    pub(crate) fn with_status(status: u8, error: impl Into<anyhow::Error>) -> Self {
        Self { status, error: error.into() }
    }

    /// The status for the shell.
    pub(crate) fn status(&self) -> u8 {
        self.status
    }

    /// Writes the error and its causes to standard error, in one line.
    pub(crate) fn report(&self) {
        say(line(&self.error));
    }
}

/// The error and its causes, but for those that the text has already.
fn line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    // A cause may be a program's own words.
    text.replace('\n', " ")
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { status: FAILED, error }
    }
}

/// One line of the command's own on standard error.
pub(crate) fn say(message: impl Display) {
    let line = format!("raccl: {message}\n");
    // When standard error is gone there is nobody left to tell; the exit status still speaks.
    let _ = io::stderr().lock().write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_cause_that_the_text_has_already_is_not_said_again() {
        let error = anyhow!("port 7 is taken").context("cannot listen: port 7 is taken").context("no group");
        assert_eq!(line(&error), "no group: cannot listen: port 7 is taken");
        assert_eq!(line(&anyhow!("two\nlines").context("outer")), "outer: two lines");
    }
}
