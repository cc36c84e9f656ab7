//! The shapes that cables make.

use std::fmt;

use serde::Serialize;

use super::Topology;
use crate::config::DeviceMatrix;

/// The shape that the cables between the ranks of a communicator make, in the order of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CableLayout {
    /// No pair has a cable of its own: ranks share memory or a network.
    None,
    /// Every pair has a cable of its own.
    Mesh,
    /// Each rank has cables to the next and the last to the first. Collectives go around it, in both directions.
    Ring,
    /// Each rank has cables to the next. Collectives go along it, in both directions.
    Line,
    /// Every pair is joined, but several through one device, as behind a switch.
    Switched,
    /// Some pairs have cables, and in the order of the ranks they make none of these shapes.
    Partial,
}

impl CableLayout {
    /// The layout of a device matrix.
    ///
    /// ```
    /// use raccl::{CableLayout, DeviceMatrix};
    ///
    /// let line = DeviceMatrix::parse(r#"[[null, "a", null], ["a", null, "b"], [null, "b", null]]"#).unwrap();
    /// assert_eq!(CableLayout::of(&line), CableLayout::Line);
    /// ```
    pub fn of(matrix: &DeviceMatrix) -> CableLayout {
        Topology::of_cables(matrix).layout(&(0..matrix.size()).collect::<Vec<_>>())
    }

    /// The name that reports use, such as `ring`.
    ///
    /// ```
    /// assert_eq!(raccl::CableLayout::Ring.name(), "ring");
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            CableLayout::None => "none",
            CableLayout::Mesh => "mesh",
            CableLayout::Ring => "ring",
            CableLayout::Line => "line",
            CableLayout::Switched => "switched",
            CableLayout::Partial => "partial",
        }
    }
}

impl fmt::Display for CableLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
