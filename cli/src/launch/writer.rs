//! Our own standard output and standard error.

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};

use anstyle::{AnsiColor, Style};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Prefix colours, by rank.
const COLOURS: [AnsiColor; 6] = [
    AnsiColor::Cyan,
    AnsiColor::Green,
    AnsiColor::Yellow,
    AnsiColor::Magenta,
    AnsiColor::Blue,
    AnsiColor::BrightCyan,
];

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Stdout,
    Stderr,
}

/// Lays lines out and writes them.
pub(super) struct Writer {
    colour: [bool; 2],
    terminal: [bool; 2],
    /// Whose line stands unfinished on the terminal. Both streams are taken to be the same terminal, if they
    /// are terminals.
    inside: Option<(usize, To)>,
    failed: bool,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            colour: [colour(&io::stdout()), colour(&io::stderr())],
            terminal: [io::stdout().is_terminal(), io::stderr().is_terminal()],
            inside: None,
            failed: false,
        }
    }

    /// Whether somebody may be looking.
    pub(super) fn is_terminal(&self, to: To) -> bool {
        self.terminal[to as usize]
    }

    /// Whether the last piece stands at the end of the terminal, and was this stream's.
    pub(super) fn is_inside(&self, rank: usize, to: To) -> bool {
        self.inside == Some((rank, to))
    }

    /// Appends a line, or the rest of one, as it is to be shown.
    pub(super) fn line(&mut self, rank: usize, to: To, text: &[u8], out: &mut Vec<u8>) {
        self.begin(rank, to, out);
        out.extend_from_slice(text);
        out.push(b'\n');
        if self.is_terminal(to) {
            self.inside = None;
        }
    }

    /// Appends the beginning of a line, or more of it, for a terminal.
    pub(super) fn piece(&mut self, rank: usize, to: To, text: &[u8], out: &mut Vec<u8>) {
        self.begin(rank, to, out);
        out.extend_from_slice(text);
        self.inside = Some((rank, to));
    }

    fn begin(&self, rank: usize, to: To, out: &mut Vec<u8>) {
        if self.is_inside(rank, to) {
            return;
        }
        if self.inside.is_some() && self.is_terminal(to) {
            out.push(b'\n');
        }
        let style = match self.colour[to as usize] {
            true => Style::new().fg_color(Some(COLOURS[rank % COLOURS.len()].into())),
            false => Style::new(),
        };
        out.extend_from_slice(format!("{style}[{rank}]{style:#} ").as_bytes());
    }

    /// Writes all of it. After an error, which is returned once, everything is thrown away, so that the
    /// ranks are not kept from ending.
    pub(super) fn write(&mut self, to: To, bytes: &[u8]) -> io::Result<()> {
        if self.failed || bytes.is_empty() {
            return Ok(());
        }
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let result = match to {
            To::Stdout => write_all(stdout.as_fd(), bytes),
            To::Stderr => write_all(stderr.as_fd(), bytes),
        };
        self.failed = result.is_err();
        result
    }
}

fn colour(stream: &(impl IsTerminal + anstream::stream::RawStream)) -> bool {
    anstream::AutoStream::choice(stream) != anstream::ColorChoice::Never
}

/// Like `Write::write_all`, but also over a descriptor that somebody else made non-blocking, as programs
/// that share a terminal do.
fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = &bytes[length..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(&to, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            },
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(terminal: [bool; 2]) -> Writer {
        Writer { colour: [false; 2], terminal, inside: None, failed: false }
    }

    #[test]
    fn pieces_of_a_line_stay_together_and_apart_from_others() {
        let mut writer = writer([true; 2]);
        let mut out = Vec::new();
        writer.piece(0, To::Stdout, b"Name", &mut out);
        writer.piece(0, To::Stdout, b"? ", &mut out);
        writer.line(0, To::Stdout, b"thanks", &mut out);
        writer.piece(0, To::Stdout, b"10%", &mut out);
        writer.line(1, To::Stderr, b"other", &mut out);
        writer.line(0, To::Stdout, b"20%", &mut out);
        let text = "[0] Name? thanks\n[0] 10%\n[1] other\n[0] 20%\n";
        assert_eq!(String::from_utf8_lossy(&out), text);
    }

    #[test]
    fn a_file_does_not_see_what_happens_on_the_terminal() {
        let mut writer = writer([true, false]);
        let (mut terminal, mut file) = (Vec::new(), Vec::new());
        writer.piece(0, To::Stdout, b"Name? ", &mut terminal);
        writer.line(1, To::Stderr, b"one", &mut file);
        writer.line(0, To::Stderr, b"two", &mut file);
        writer.line(0, To::Stdout, b"x", &mut terminal);
        assert_eq!(terminal, b"[0] Name? x\n");
        assert_eq!(file, b"[1] one\n[0] two\n");
    }

    #[test]
    fn ranks_have_colours_where_there_are_colours() {
        let mut writer = Writer { colour: [true, false], ..writer([false; 2]) };
        let (mut colour, mut plain) = (Vec::new(), Vec::new());
        writer.line(1, To::Stdout, b"x", &mut colour);
        writer.line(1, To::Stderr, b"x", &mut plain);
        assert_eq!(String::from_utf8_lossy(&colour), "\u{1b}[32m[1]\u{1b}[0m x\n");
        assert_eq!(plain, b"[1] x\n");
    }
}
