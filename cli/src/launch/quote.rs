//! Words for a shell, and words from a variable.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Appends a word in single quotes, in which a shell takes every byte as it is.
pub(super) fn push_quoted(script: &mut Vec<u8>, word: &OsStr) {
    script.push(b'\'');
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => script.extend_from_slice(br"'\''"),
            byte => script.push(byte),
        }
    }
    script.push(b'\'');
}

/// Splits a command into words at white space, with single quotes, double quotes and backslashes as a shell
/// has them, and nothing else of a shell. `None` when a quote is not closed.
pub(super) fn split(command: &OsStr) -> Option<Vec<OsString>> {
    let mut words = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut quote = None;
    let mut bytes = command.as_bytes().iter().copied();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (None, b' ' | b'\t' | b'\n') => words.extend(word.take().map(OsString::from_vec)),
            (None, b'\'' | b'"') => {
                quote = Some(byte);
                word.get_or_insert_default();
            }
            (Some(open), byte) if open == byte => quote = None,
            (None | Some(b'"'), b'\\') => word.get_or_insert_default().push(bytes.next()?),
            (_, byte) => word.get_or_insert_default().push(byte),
        }
    }
    words.extend(word.map(OsString::from_vec));
    quote.is_none().then_some(words)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_quoted_is_one_word(words: Vec<Vec<u8>>) {
            let words: Vec<_> = words.into_iter().map(OsString::from_vec).collect();
            let mut script = Vec::new();
            for word in &words {
                push_quoted(&mut script, word);
                script.push(b' ');
            }
            prop_assert_eq!(split(OsStr::from_bytes(&script)), Some(words));
        }

        #[test]
        fn no_command_panics(command: Vec<u8>) {
            let _ = split(OsStr::from_bytes(&command));
        }
    }

    #[test]
    fn a_shell_gives_back_what_was_quoted() {
        for word in [
            &b""[..],
            b"plain",
            b"it's",
            b"'",
            b"''\\''",
            b"$HOME `id` \"x\" \\",
            b"two\nlines\n.",
            b"\xff\x80 \x01\x7f",
            b"-n",
            b"!1 ~ # * ? [a]",
        ] {
            let mut script = b"printf %s ".to_vec();
            push_quoted(&mut script, OsStr::from_bytes(word));
            let output = Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)).output().expect("runs");
            assert_eq!(output.stdout, word);
        }
    }

    #[test]
    fn commands_split_into_words() {
        for (command, words) in [
            ("ssh", &["ssh"][..]),
            (" ssh  -p 22 ", &["ssh", "-p", "22"]),
            ("'/a dir/ssh' -F \"my config\"", &["/a dir/ssh", "-F", "my config"]),
            (r"a\ b '' x'y'z", &["a b", "", "xyz"]),
            ("", &[]),
        ] {
            assert_eq!(split(OsStr::new(command)).expect(command), words);
        }
        assert_eq!(split(OsStr::new("'open")), None);
        assert_eq!(split(OsStr::new("open\\")), None);
    }
}
