//! Reading the files that settings name, with a bound on their length.
#![forbid(unsafe_code)]

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// The longest file that is read: far above any real cluster's, far below what would hurt.
pub(crate) const LONGEST_FILE: u64 = 16 << 20;

/// Reads a whole text file of at most [`LONGEST_FILE`] bytes.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let bytes = read_bounded(File::open(path)?, LONGEST_FILE)?;
    String::from_utf8(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the file is not UTF-8 text"))
}

/// Reads to the end, and fails when there is more than `longest`.
pub(crate) fn read_bounded(source: impl Read, longest: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte beyond the bound tells a file of just that length from a longer one.
    source.take(longest + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > longest {
        let reason = format!("the file has more than the {longest} bytes that are read");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_files_end() {
        let error = read_bounded(io::repeat(b'['), 100).expect_err("endless");
        assert!(error.to_string().contains("more than the 100 bytes"));
        assert_eq!(read_bounded(io::repeat(b'[').take(100), 100).expect("just fits").len(), 100);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn devices_are_read_within_bounds() {
        assert!(read_text(Path::new("/dev/zero")).is_err());
    }
}
