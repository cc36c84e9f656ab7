//! The algorithms by name.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The algorithms, by the names that `RACCL_ALGORITHM` and `explain` use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Algorithm {
    /// Nothing to exchange: a group of one.
    Local,
    /// Everyone sends everything to everyone and folds locally.
    OneShot,
    /// Direct reduce-scatter, then direct all-gather.
    TwoShot,
    /// Directly from or to every rank.
    Direct,
    /// Flags to ranks at doubling distance (barrier).
    Dissemination,
    /// Exchange with partners at doubling distance.
    RecursiveDoubling,
    /// Recursive halving, then recursive doubling (Rabenseifner).
    RecursiveHalving,
    /// A binomial tree from the root.
    Binomial,
    /// A chain from the root, pipelined in chunks.
    Chain,
    /// Passed on by the neighbours on a ring, in both directions, and folded locally.
    Relay,
    /// Around a ring in both directions at once.
    BidirectionalRing,
    /// Along a line in both directions at once.
    Line,
    /// Around a ring in one direction.
    Ring,
}

impl Algorithm {
    /// All of them. Of two that cost the same, the one named first is chosen.
    pub(crate) const ALL: [Algorithm; 13] = [
        Algorithm::Local,
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::Direct,
        Algorithm::Dissemination,
        Algorithm::RecursiveDoubling,
        Algorithm::RecursiveHalving,
        Algorithm::Binomial,
        Algorithm::Chain,
        Algorithm::Relay,
        Algorithm::BidirectionalRing,
        Algorithm::Line,
        Algorithm::Ring,
    ];

    /// The name that settings and reports use.
    ///
    /// ```
    /// assert_eq!(raccl::Algorithm::TwoShot.name(), "two_shot");
    /// assert_eq!("two_shot".parse(), Ok(raccl::Algorithm::TwoShot));
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Local => "local",
            Algorithm::OneShot => "one_shot",
            Algorithm::TwoShot => "two_shot",
            Algorithm::Direct => "direct",
            Algorithm::Dissemination => "dissemination",
            Algorithm::RecursiveDoubling => "recursive_doubling",
            Algorithm::RecursiveHalving => "recursive_halving",
            Algorithm::Binomial => "binomial",
            Algorithm::Chain => "chain",
            Algorithm::Relay => "relay",
            Algorithm::BidirectionalRing => "bidirectional_ring",
            Algorithm::Line => "line",
            Algorithm::Ring => "ring",
        }
    }

    /// True when every message goes to a neighbour on the ring of all ranks.
    pub(crate) fn runs_on_a_ring(self) -> bool {
        use Algorithm::{BidirectionalRing, Chain, Relay, Ring};
        self.runs_on_a_line() || matches!(self, Ring | BidirectionalRing | Relay | Chain)
    }

    /// True when every message goes to a neighbour on the line from rank 0 to the last.
    pub(crate) fn runs_on_a_line(self) -> bool {
        matches!(self, Algorithm::Local | Algorithm::Line)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(text: &str) -> Result<Algorithm, String> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == text).ok_or_else(|| {
            let known: Vec<&str> = Algorithm::ALL.into_iter().map(Algorithm::name).collect();
            format!("{text:?} is no algorithm; known are {}", known.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_algorithms() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
            let json = serde_json::to_string(&algorithm).expect("a name is JSON");
            assert_eq!(json, format!("\"{algorithm}\""));
        }
        assert!("two-shot".parse::<Algorithm>().is_err_and(|error| error.contains("two_shot")));
    }
}
