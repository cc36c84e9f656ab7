//! The secret by which the ranks of one job know each other.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

/// Bytes in a secret.
const LENGTH: usize = 32;

/// A fresh random secret for every job. It travels through pipes and sockets that only the ranks hold,
/// never on a command line and never in an environment.
#[derive(Clone)]
pub(crate) struct Secret([u8; LENGTH]);

impl Secret {
    /// A new one from the system's random source.
    pub(crate) fn new() -> io::Result<Self> {
        let mut secret = Self::blank();
        getrandom::fill(&mut secret.0).map_err(io::Error::other)?;
        Ok(secret)
    }

    /// Zeros, to be filled from the launcher.
    pub(super) fn blank() -> Self {
        Self([0; LENGTH])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// The form in which ranks read it, without the newline at its end.
    pub(super) fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A pipe that holds the secret as a line and nothing else, open for the programs this process becomes.
    pub(super) fn into_pipe(self) -> io::Result<OwnedFd> {
        let (read, write) = rustix::pipe::pipe()?;
        let line = self.to_hex() + "\n";
        // An empty pipe has room for that, so this neither blocks nor stops half-way.
        let written = rustix::io::write(&write, line.as_bytes())?;
        if written == line.len() { Ok(read) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    #[test]
    fn a_pipe_holds_the_secret_and_then_ends() {
        let secret = Secret::new().expect("random bytes");
        let digits = secret.to_hex();
        assert_eq!(digits.len(), 2 * LENGTH);
        let mut read = String::new();
        File::from(secret.into_pipe().expect("a pipe")).read_to_string(&mut read).expect("reads");
        assert_eq!(read, format!("{digits}\n"));
    }

    #[test]
    fn secrets_differ_and_do_not_show() {
        let (one, two) = (Secret::new().expect("random"), Secret::new().expect("random"));
        assert_ne!(one.bytes(), two.bytes());
        assert_eq!(format!("{one:?}"), "Secret(..)");
    }
}
