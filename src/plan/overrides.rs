//! The override string: which algorithm to take for which operation and size, whatever the cost model says.
//!
//! ```text
//! all_reduce:0-32k=one_shot,32k-=two_shot;broadcast:chain
//! ```
//! Operations are separated by `;`, their rules by `,`. A rule is `FROM-TO=ALGORITHM` for sizes from FROM up to but not
//! including TO (no TO: any size), or just `ALGORITHM` for all sizes. Sizes are bytes with an optional k, m or g (1024). Sizes
//! without a rule are left to the cost model, and so is everything in an empty string or `auto`.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Algorithm, Collective, Shape};

/// More rules than this are a mistake, or an attack.
const MOST_RULES: usize = 256;

/// A parsed override string.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Overrides {
    /// Rules of one operation do not overlap.
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Rule {
    operation: Operation,
    from: u64,
    /// Exclusive; `None` means any size.
    to: Option<u64>,
    algorithm: Algorithm,
}

/// Which piece of an override string is wrong, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{piece:?}: {reason}")]
pub(crate) struct OverrideError {
    piece: String,
    reason: String,
}

impl Overrides {
    /// The algorithm that is prescribed for a shape.
    pub(crate) fn wanted(&self, shape: &Shape) -> Option<Algorithm> {
        let (operation, bytes) = (Operation::of(&shape.collective), shape.bytes());
        let rule = self.rules.iter().find(|rule| {
            rule.operation == operation && rule.from <= bytes && rule.to.is_none_or(|to| bytes < to)
        });
        rule.map(|rule| rule.algorithm)
    }
}

impl FromStr for Overrides {
    type Err = OverrideError;

    fn from_str(text: &str) -> Result<Overrides, OverrideError> {
        let mut rules = Vec::new();
        if text.trim() == "auto" {
            return Ok(Overrides { rules });
        }
        for piece in text.split(';').map(str::trim).filter(|piece| !piece.is_empty()) {
            let Some((operation, list)) = piece.split_once(':') else {
                return fail(
                    piece,
                    "expected OPERATION:RULES, such as all_reduce:0-32k=one_shot,32k-=two_shot",
                );
            };
            let operation = Operation::parse(operation.trim())?;
            for piece in list.split(',').map(str::trim) {
                let rule = Rule::parse(operation, piece)?;
                if rules.iter().any(|other| rule.overlaps(other)) {
                    return fail(
                        piece,
                        format!("another rule of {} has sizes in common with it", operation.name()),
                    );
                }
                if rules.len() == MOST_RULES {
                    return fail(piece, format!("more than {MOST_RULES} rules"));
                }
                rules.push(rule);
            }
        }
        Ok(Overrides { rules })
    }
}

impl fmt::Display for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut previous = None;
        for rule in &self.rules {
            match previous {
                Some(operation) if operation == rule.operation => f.write_str(",")?,
                Some(_) => write!(f, ";{}:", rule.operation.name())?,
                None => write!(f, "{}:", rule.operation.name())?,
            }
            let to = rule.to.map(Size).map(|size| size.to_string()).unwrap_or_default();
            write!(f, "{}-{to}={}", Size(rule.from), rule.algorithm)?;
            previous = Some(rule.operation);
        }
        Ok(())
    }
}

impl TryFrom<String> for Overrides {
    type Error = OverrideError;

    fn try_from(text: String) -> Result<Overrides, OverrideError> {
        text.parse()
    }
}

impl From<Overrides> for String {
    fn from(overrides: Overrides) -> String {
        overrides.to_string()
    }
}

impl Rule {
    fn parse(operation: Operation, piece: &str) -> Result<Rule, OverrideError> {
        let (from, to, name) = match piece.split_once('=') {
            None => (0, None, piece),
            Some((sizes, name)) => {
                let Some((from, to)) = sizes.split_once('-') else {
                    return fail(piece, "expected sizes as FROM-TO or FROM-, such as 4k-1m");
                };
                let to = match to.trim() {
                    "" => None,
                    to => Some(Size::parse(to)?.0),
                };
                (Size::parse(from.trim())?.0, to, name.trim())
            }
        };
        if to.is_some_and(|to| to <= from) {
            return fail(piece, "the sizes are empty: TO is not included and has to be above FROM");
        }
        let known = operation.algorithms();
        match known.iter().find(|algorithm| algorithm.name() == name) {
            Some(&algorithm) => Ok(Rule { operation, from, to, algorithm }),
            None => {
                let names: Vec<&str> = known.iter().map(|algorithm| algorithm.name()).collect();
                fail(name, format!("no algorithm of {}; it has {}", operation.name(), names.join(", ")))
            }
        }
    }

    fn overlaps(&self, other: &Rule) -> bool {
        self.operation == other.operation
            && other.to.is_none_or(|to| self.from < to)
            && self.to.is_none_or(|to| other.from < to)
    }
}

/// The operations without their arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Operation {
    Barrier,
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
}

impl Operation {
    const ALL: [Operation; 5] = [
        Operation::Barrier,
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::Broadcast,
    ];

    fn of(collective: &Collective) -> Operation {
        match collective {
            Collective::Barrier => Operation::Barrier,
            Collective::AllReduce { .. } => Operation::AllReduce,
            Collective::AllGather { .. } => Operation::AllGather,
            Collective::ReduceScatter { .. } => Operation::ReduceScatter,
            Collective::Broadcast { .. } => Operation::Broadcast,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Operation::Barrier => "barrier",
            Operation::AllReduce => "all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
        }
    }

    fn parse(name: &str) -> Result<Operation, OverrideError> {
        match Operation::ALL.into_iter().find(|operation| operation.name() == name) {
            Some(operation) => Ok(operation),
            None => {
                let names: Vec<&str> = Operation::ALL.into_iter().map(Operation::name).collect();
                fail(name, format!("no operation; known are {}", names.join(", ")))
            }
        }
    }

    /// What can run it on some number of ranks.
    fn algorithms(self) -> &'static [Algorithm] {
        use Algorithm::{
            BidirectionalRing, Binomial, Chain, Direct, Dissemination, Line, OneShot, RecursiveDoubling,
            RecursiveHalving, Relay, Ring, TwoShot,
        };
        match self {
            Operation::Barrier => &[Dissemination, BidirectionalRing, Line],
            Operation::AllReduce => {
                &[OneShot, TwoShot, RecursiveDoubling, RecursiveHalving, Relay, BidirectionalRing, Line, Ring]
            }
            Operation::AllGather => &[Direct, RecursiveDoubling, BidirectionalRing, Line, Ring],
            Operation::ReduceScatter => &[Direct, RecursiveHalving, BidirectionalRing, Line, Ring],
            Operation::Broadcast => &[Direct, Binomial, Chain, Relay, BidirectionalRing, Line],
        }
    }
}

/// A number of bytes, written with the largest unit that divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size(u64);

const UNITS: [(char, u64); 3] = [('g', 1 << 30), ('m', 1 << 20), ('k', 1 << 10)];

impl Size {
    fn parse(text: &str) -> Result<Size, OverrideError> {
        let lower = text.to_ascii_lowercase();
        let unit = UNITS.iter().find(|(letter, _)| lower.ends_with(*letter));
        let (digits, factor) = match unit {
            Some((_, factor)) => (&lower[..lower.len() - 1], *factor),
            None => (lower.as_str(), 1),
        };
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.parse::<u64>().ok().filter(|_| is_number);
        match number.and_then(|number| number.checked_mul(factor)) {
            Some(bytes) => Ok(Size(bytes)),
            None => fail(text, "no size; expected digits with an optional k, m or g, below 2^64 bytes"),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((letter, factor)) => write!(f, "{}{letter}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

fn fail<T>(piece: &str, reason: impl Into<String>) -> Result<T, OverrideError> {
    // What is wrong may be as long as an environment variable.
    let piece = piece.chars().take(80).collect();
    Err(OverrideError { piece, reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::tests::shape, *};

    fn all_reduce(bytes: usize) -> Shape {
        Shape { raw_size: 1, acc_size: 1, ..shape(Collective::AllReduce { count: bytes }, 4) }
    }

    #[test]
    fn rules_apply_from_their_first_size_up_to_their_last() {
        let overrides: Overrides =
            "all_reduce:0-32k=one_shot,32K-1m=two_shot;broadcast:chain".parse().expect("well formed");
        assert_eq!(overrides.wanted(&all_reduce(0)), Some(Algorithm::OneShot));
        assert_eq!(overrides.wanted(&all_reduce((32 << 10) - 1)), Some(Algorithm::OneShot));
        assert_eq!(overrides.wanted(&all_reduce(32 << 10)), Some(Algorithm::TwoShot));
        assert_eq!(overrides.wanted(&all_reduce(1 << 20)), None);
        assert_eq!(overrides.wanted(&shape(Collective::Barrier, 4)), None);
        let broadcast = shape(Collective::Broadcast { root: 0, count: 7 }, 4);
        assert_eq!(overrides.wanted(&broadcast), Some(Algorithm::Chain));
        assert_eq!(overrides.to_string(), "all_reduce:0-32k=one_shot,32k-1m=two_shot;broadcast:0-=chain");
    }

    #[test]
    fn nothing_and_auto_prescribe_nothing() {
        for text in ["", " ", "auto", ";", " ; "] {
            assert_eq!(text.parse(), Ok(Overrides::default()), "{text:?}");
        }
    }

    #[test]
    fn errors_name_the_piece_and_what_is_known() {
        for (text, piece, reason) in [
            ("all_reduce", "all_reduce", "OPERATION:RULES"),
            ("allreduce:one_shot", "allreduce", "all_reduce"),
            ("all_reduce:0-32k=two-shot", "two-shot", "one_shot, two_shot"),
            ("broadcast:one_shot", "one_shot", "binomial"),
            ("all_reduce:32k=one_shot", "32k=one_shot", "FROM-TO"),
            ("all_reduce:32k-4k=one_shot", "32k-4k=one_shot", "empty"),
            ("all_reduce:4k-4k=one_shot", "4k-4k=one_shot", "empty"),
            ("all_reduce:x-4k=one_shot", "x", "digits"),
            ("all_reduce:-4k=one_shot", "", "digits"),
            ("all_reduce:0-+4=one_shot", "+4", "digits"),
            ("all_reduce:0-99999999999g=one_shot", "99999999999g", "2^64"),
            ("all_reduce:0-4k=one_shot,2k-8k=two_shot", "2k-8k=two_shot", "in common"),
            ("all_reduce:one_shot;all_reduce:two_shot", "two_shot", "in common"),
            ("all_reduce:", "", "one_shot"),
            ("barrier:0-\u{1F980}=direct", "\u{1F980}", "digits"),
        ] {
            let error = text.parse::<Overrides>().expect_err(text);
            assert_eq!(error.piece, piece, "{text:?}");
            assert!(error.reason.contains(reason), "{text:?}: {error}");
        }
        let many = (0..300).map(|i| format!("{i}-{}=one_shot", i + 1)).collect::<Vec<_>>().join(",");
        assert!(format!("all_reduce:{many}").parse::<Overrides>().is_err());
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_back(
            bounds in prop::collection::btree_set(any::<u64>().prop_map(|n| n >> (n % 60)), 0..6),
            open in any::<bool>(),
            picks in prop::collection::vec((0..5usize, 0..8usize), 6),
        ) {
            let bounds: Vec<u64> = bounds.into_iter().collect();
            let mut rules = Vec::new();
            for (index, pair) in bounds.windows(2).enumerate() {
                let operation = Operation::ALL[picks[index].0];
                let algorithms = operation.algorithms();
                let algorithm = algorithms[picks[index].1 % algorithms.len()];
                let to = if open && index + 2 == bounds.len() { None } else { Some(pair[1]) };
                rules.push(Rule { operation, from: pair[0], to, algorithm });
            }
            let overrides = Overrides { rules };
            prop_assert_eq!(overrides.to_string().parse(), Ok(overrides));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "[a-z_0-9:;,=kKmg \\-\u{e9}]{0,40}|.{0,40}") {
            if let Ok(overrides) = text.parse::<Overrides>() {
                prop_assert_eq!(overrides.to_string().parse(), Ok(overrides));
            }
        }
    }
}
