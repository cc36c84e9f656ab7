//! How cables are used, for those who have to say.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::parse;

/// How a queue pair of RDMA verbs treats messages that are lost.
///
/// ```
/// use raccl::VerbsTransport;
///
/// assert_eq!("uc".parse(), Ok(VerbsTransport::Uc));
/// assert_eq!(VerbsTransport::Rc.to_string(), "rc");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerbsTransport {
    /// Unreliable connected: a lost message is noticed by the library and is an error. All that Apple has, and its default.
    Uc,
    /// Reliable connected: lost messages are repeated by the device. The default on Linux.
    Rc,
}

impl fmt::Display for VerbsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            VerbsTransport::Uc => "uc",
            VerbsTransport::Rc => "rc",
        })
    }
}

impl FromStr for VerbsTransport {
    type Err = String;

    fn from_str(text: &str) -> Result<VerbsTransport, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "uc" => Ok(VerbsTransport::Uc),
            "rc" => Ok(VerbsTransport::Rc),
            _ => Err("expected uc or rc".to_owned()),
        }
    }
}

/// Bulk packets: how long one is, and how many are under way at a time in each direction of a cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bulk {
    pub(crate) bytes: usize,
    pub(crate) depth: u32,
}

impl Bulk {
    /// Checks what was asked for.
    pub(super) fn new(bytes: u64, depth: u64) -> Result<Bulk, String> {
        const FRAME: u64 = 4096;
        // The longest message that Apple's driver takes has 4095 frames.
        let fits = bytes.is_multiple_of(FRAME) && (2 * FRAME..=4095 * FRAME).contains(&bytes);
        if !fits || !(2..=64).contains(&depth) || !depth.is_power_of_two() || bytes * depth > 64 << 20 {
            return Err("expected a size that is a multiple of 4K from 8K to 16380K, and a depth of 2, 4, 8, 16, 32 or 64, such as \
                        64K*8, at most 64M together"
                .to_owned());
        }
        // Both are small by now.
        Ok(Bulk { bytes: bytes as usize, depth: depth as u32 })
    }
}

impl FromStr for Bulk {
    type Err = String;

    fn from_str(text: &str) -> Result<Bulk, String> {
        let (bytes, depth) = text.split_once('*').unwrap_or((text, "8"));
        let depth =
            depth.trim().parse().map_err(|_| "expected a size and a depth, such as 64K*8".to_owned())?;
        Bulk::new(parse::size(bytes)?, depth)
    }
}

impl fmt::Display for Bulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}K*{}", self.bytes >> 10, self.depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_has_whole_frames_and_a_depth() {
        assert_eq!("64K*4".parse(), Ok(Bulk { bytes: 65536, depth: 4 }));
        assert_eq!("8k * 2".parse(), Ok(Bulk { bytes: 8192, depth: 2 }));
        assert_eq!("512K".parse::<Bulk>().map(|bulk| bulk.to_string()), Ok("512K*8".to_owned()));
        for wrong in
            ["", "4K*4", "10000*4", "16M*4", "64K*1", "64K*3", "64K*128", "8M*16", "64K*x", "64Q*4", "64K*-4"]
        {
            assert!(wrong.parse::<Bulk>().is_err(), "{wrong}");
        }
    }
}
