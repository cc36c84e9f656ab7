//! The job secret: 32 bytes that every rank of a job has and nobody else.
#![forbid(unsafe_code)]

use std::{
    fmt,
    fs::File,
    hint,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::Path,
};

use super::file::read_bounded;

/// A job secret. It is not shown by `Debug` and is overwritten when dropped.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret([u8; 32]);

impl Secret {
    pub(crate) fn new(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// A fresh one from the operating system's generator.
    pub(crate) fn random() -> io::Result<Secret> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Secret(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The form that [`Secret::parse`] reads, for a file or a pipe that only this user can read.
    pub(crate) fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads 64 hexadecimal digits with white space around, or exactly 32 bytes of anything. Errors never show the text.
    pub(crate) fn parse(text: &[u8]) -> Result<Secret, String> {
        if let Ok(bytes) = <[u8; 32]>::try_from(text) {
            return Ok(Secret(bytes));
        }
        let digits = text.trim_ascii();
        if digits.len() != 64 {
            let length = text.len();
            return Err(format!("expected 64 hexadecimal digits or 32 bytes, found {length} bytes"));
        }
        let mut secret = Secret([0; 32]);
        for (byte, pair) in secret.0.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = match (hex_digit(pair[0]), hex_digit(pair[1])) {
                (Some(high), Some(low)) => high << 4 | low,
                _ => return Err("expected 64 hexadecimal digits or 32 bytes".to_owned()),
            };
        }
        Ok(secret)
    }

    /// Reads a secret from a file that nobody but its owner may read.
    pub(crate) fn read_file(path: &Path) -> io::Result<Result<Secret, String>> {
        let file = File::open(path)?;
        let mode = file.metadata()?.mode();
        if mode & 0o077 != 0 {
            let mode = mode & 0o777;
            return Ok(Err(format!(
                "its mode is {mode:04o}, so others can read the secret; run chmod 600 on it and make a new secret"
            )));
        }
        let mut text = read_bounded(file, 1024)?;
        let secret = Secret::parse(&text);
        wipe(&mut text);
        Ok(secret)
    }

    /// Reads a secret from a pipe: up to the end of a line of digits or the end of the pipe, whichever comes first, so that a
    /// writing end which another process inherited does not matter.
    pub(crate) fn read_pipe(mut pipe: impl Read) -> io::Result<Result<Secret, String>> {
        let mut text = Vec::with_capacity(128);
        let mut byte = [0];
        while text.len() < 128 && !(text.len() > 64 && text.ends_with(b"\n")) {
            match pipe.read(&mut byte) {
                Ok(0) => break,
                Ok(_) => text.push(byte[0]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let secret = Secret::parse(&text);
        wipe(&mut text);
        Ok(secret)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}

/// Overwrites, and looks at the result through a fence the optimiser cannot see through, so that the writes stay.
fn wipe(bytes: &mut [u8]) {
    bytes.fill(0);
    hint::black_box(bytes);
}

fn hex_digit(digit: u8) -> Option<u8> {
    // A hexadecimal digit fits a byte.
    (digit as char).to_digit(16).map(|value| value as u8)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn secrets_round_trip(bytes: [u8; 32]) {
            let secret = Secret::new(bytes);
            let line = format!("{}\n", secret.to_hex());
            prop_assert_eq!(Secret::parse(line.as_bytes()), Ok(secret.clone()));
            prop_assert_eq!(Secret::parse(&bytes), Ok(secret.clone()));
            // What follows the line is not waited for.
            let endless = line.as_bytes().chain(io::repeat(b'x'));
            prop_assert_eq!(Secret::read_pipe(endless).unwrap(), Ok(secret.clone()));
            prop_assert_eq!(Secret::read_pipe(&bytes[..]).unwrap(), Ok(secret));
        }

        #[test]
        fn no_bytes_panic_and_none_are_shown(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Secret::read_pipe(&bytes[..]);
            if let Ok(secret) = Secret::parse(&bytes) {
                prop_assert_eq!(format!("{:?}", secret), "Secret(hidden)");
            }
        }
    }

    #[test]
    fn secret_files_must_be_private() {
        let directory = std::env::temp_dir().join(format!("raccl-secret-test-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("directory");
        let path = directory.join("secret");
        fs::write(&path, "ab".repeat(32)).expect("file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("mode");
        assert!(Secret::read_file(&path).expect("readable").expect_err("mode").contains("0640"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
        assert_eq!(Secret::read_file(&path).expect("readable"), Ok(Secret::new([0xab; 32])));
        fs::remove_dir_all(&directory).expect("clean-up");
    }

    #[test]
    fn random_secrets_differ() {
        assert_ne!(Secret::random().expect("one"), Secret::random().expect("two"));
    }
}
