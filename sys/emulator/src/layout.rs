//! Regular cabling, from one line.
#![forbid(unsafe_code)]

use std::str::FromStr;
use std::time::Duration;

use crate::spec::{Cable, End, Limits, Rules, Spec, SpecError};

/// Which machines are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Every two.
    Mesh,
    /// Each to the next, and the last to the first.
    Ring,
    /// Each to the next.
    Line,
}

/// A regular description in one line, such as `mesh,cables=2,latency=20us,bandwidth=100M`.
///
/// ```
/// use raccl_emulator::{Layout, Shape};
///
/// let layout: Layout = "ring,latency=20us,bandwidth=1.5G".parse().unwrap();
/// assert_eq!(layout.shape, Shape::Ring);
/// assert_eq!((layout.cables, layout.latency_ns, layout.bandwidth), (1, 20_000, Some(1_500_000_000)));
/// assert_eq!(layout.spec(4).cables.len(), 4);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Which machines are joined.
    pub shape: Shape,
    /// By how many cables each.
    pub cables: usize,
    /// How long a message is under way.
    pub latency_ns: u64,
    /// Bytes a second, cable and direction.
    pub bandwidth: Option<u64>,
}

impl Layout {
    /// Every two machines by a cable.
    pub fn mesh() -> Layout {
        Layout { shape: Shape::Mesh, cables: 1, latency_ns: 0, bandwidth: None }
    }

    /// Each machine to the next, and the last to the first. Two machines are joined once.
    pub fn ring() -> Layout {
        Layout { shape: Shape::Ring, ..Layout::mesh() }
    }

    /// Each machine to the next.
    pub fn line() -> Layout {
        Layout { shape: Shape::Line, ..Layout::mesh() }
    }

    /// Several cables between two machines instead of one.
    #[must_use]
    pub fn cables(self, cables: usize) -> Layout {
        Layout { cables, ..self }
    }

    /// How long messages are under way.
    #[must_use]
    pub fn latency_ns(self, latency_ns: u64) -> Layout {
        Layout { latency_ns, ..self }
    }

    /// Bytes a second, cable and direction.
    #[must_use]
    pub fn bandwidth(self, bandwidth: u64) -> Layout {
        Layout { bandwidth: Some(bandwidth), ..self }
    }

    /// The description for that many machines. Devices are `rdma_en2`, `rdma_en3` and so on.
    pub fn spec(&self, machines: usize) -> Spec {
        let mut next_device = vec![2; machines];
        let mut plug = |machine: usize| {
            let device = format!("rdma_en{}", next_device[machine]);
            next_device[machine] += 1;
            End { machine, device }
        };
        let mut cables = Vec::new();
        for (a, b) in self.pairs(machines) {
            for _ in 0..self.cables {
                let ends = [plug(a), plug(b)];
                cables.push(Cable { ends, latency_ns: self.latency_ns, bandwidth: self.bandwidth });
            }
        }
        Spec {
            machines,
            cables,
            devices: Vec::new(),
            limits: Limits::default(),
            rules: Rules::default(),
            faults: Vec::new(),
        }
    }

    fn pairs(&self, machines: usize) -> Vec<(usize, usize)> {
        let next = (1..machines).map(|machine| (machine - 1, machine));
        match self.shape {
            Shape::Mesh => (0..machines).flat_map(|a| (a + 1..machines).map(move |b| (a, b))).collect(),
            Shape::Ring if machines > 2 => next.chain([(0, machines - 1)]).collect(),
            Shape::Ring | Shape::Line => next.collect(),
        }
    }
}

impl FromStr for Layout {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Layout, SpecError> {
        let mut words = text.split(',');
        let mut layout = match words.next().unwrap_or_default() {
            "mesh" => Layout::mesh(),
            "ring" => Layout::ring(),
            "line" => Layout::line(),
            other => return Err(SpecError(format!("{other:?} is none of mesh, ring, line"))),
        };
        for word in words {
            let bad = |wants: &str| SpecError(format!("{word:?}: {wants}"));
            match word.split_once('=') {
                Some(("cables", value)) => {
                    layout.cables = value
                        .parse()
                        .ok()
                        .filter(|cables| (1..=16).contains(cables))
                        .ok_or_else(|| bad("wants a number from 1 to 16"))?;
                }
                Some(("latency", value)) => {
                    let latency = parse_duration(value)
                        .ok_or_else(|| bad("wants a time such as 500ns, 20us or 1ms"))?;
                    layout.latency_ns = u64::try_from(latency.as_nanos())
                        .map_err(|_| bad("that is longer than anyone waits"))?;
                }
                Some(("bandwidth", value)) => {
                    let bandwidth = parse_bandwidth(value)
                        .ok_or_else(|| bad("wants bytes a second such as 100M or 9.2G, and not 0"))?;
                    layout.bandwidth = Some(bandwidth);
                }
                _ => return Err(bad("is none of cables=, latency=, bandwidth=")),
            }
        }
        Ok(layout)
    }
}

/// A number with a unit of time.
fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = split_unit(text)?;
    let seconds = match unit {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number * seconds).ok()
}

/// A number with a decimal suffix.
fn parse_bandwidth(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text)?;
    let factor = match unit {
        "" => 1.0,
        "K" | "k" => 1e3,
        "M" | "m" => 1e6,
        "G" | "g" => 1e9,
        _ => return None,
    };
    let bytes = number * factor;
    // The upper bound keeps the conversion exact and is far above any cable.
    (1.0..=1e15).contains(&bytes).then_some(bytes as u64)
}

/// Splits what is a number of digits and points from what follows.
fn split_unit(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    number.is_finite().then_some((number, &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_join_the_right_machines() {
        let pairs = |layout: Layout, machines| layout.pairs(machines);
        assert_eq!(pairs(Layout::mesh(), 3), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!(pairs(Layout::ring(), 4), [(0, 1), (1, 2), (2, 3), (0, 3)]);
        assert_eq!(pairs(Layout::ring(), 2), [(0, 1)]);
        assert_eq!(pairs(Layout::line(), 3), [(0, 1), (1, 2)]);
        assert_eq!(pairs(Layout::mesh(), 1), []);
        assert_eq!(pairs(Layout::ring(), 0), []);
    }

    #[test]
    fn several_cables_have_devices_of_their_own() {
        let spec = Layout::ring().cables(2).spec(3);
        spec.check().unwrap();
        let matrix = spec.device_names();
        assert_eq!(matrix[0][1], ["rdma_en2", "rdma_en3"]);
        assert_eq!(matrix[0][2], ["rdma_en4", "rdma_en5"]);
        assert!(matrix[0][0].is_empty());
    }

    #[test]
    fn malformed_layouts_are_refused_with_their_words() {
        for (text, part) in [
            ("star", "star"),
            ("mesh,cables=0", "cables=0"),
            ("mesh,latency=5", "latency=5"),
            ("mesh,latency=.s", "latency=.s"),
            ("mesh,bandwidth=0", "bandwidth=0"),
            ("mesh,bandwidth=1T", "bandwidth=1T"),
            ("mesh,colour=red", "colour=red"),
            ("mesh,", "\"\""),
        ] {
            let error = text.parse::<Layout>().unwrap_err();
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }
}
