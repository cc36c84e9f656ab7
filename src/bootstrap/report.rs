//! Words for what keeps a group from forming.
#![forbid(unsafe_code)]

use std::{fmt, net::SocketAddr};

use super::message::Hello;

/// "rank 3", "ranks 1 and 2", "ranks 1, 2 and 40 more".
pub(super) struct Ranks<'a> {
    pub(super) named: &'a [usize],
    /// How many there are; some may not be named.
    pub(super) count: usize,
}

impl Ranks<'_> {
    /// More than these are only counted.
    const NAMED: usize = 16;
}

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = &self.named[..self.named.len().min(Ranks::NAMED)];
        let more = self.count.saturating_sub(named.len());
        f.write_str(if self.count == 1 { "rank " } else { "ranks " })?;
        for (i, rank) in named.iter().enumerate() {
            let separator = match i {
                0 => "",
                _ if more == 0 && i + 1 == named.len() => " and ",
                _ => ", ",
            };
            write!(f, "{separator}{rank}")?;
        }
        if more > 0 {
            write!(f, " and {more} more")?;
        }
        Ok(())
    }
}

/// Addresses, separated by commas.
pub(super) struct List<'a>(pub(super) &'a [SocketAddr]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no address");
        }
        for (i, address) in self.0.iter().enumerate() {
            write!(f, "{}{address}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// What two ranks of one job were told differently, with both values.
pub(super) fn difference(one: &Hello, other: &Hello) -> Option<String> {
    let (a, b) = (one.rank, other.rank);
    if one.size != other.size {
        return Some(format!(
            "rank {a} was told a size of {}, rank {b} a size of {}; give every rank the same size",
            one.size, other.size
        ));
    }
    let value = |hello: &Hello, name: &str| {
        hello.settings.iter().find(|(n, _)| n == name).map_or("not set".to_owned(), |(_, v)| format!("{v:?}"))
    };
    let names = one.settings.iter().chain(&other.settings).map(|(name, _)| name);
    let mut differing: Vec<&String> = names.filter(|name| value(one, name) != value(other, name)).collect();
    differing.sort();
    differing.dedup();
    let parts: Vec<String> = differing
        .into_iter()
        .map(|name| {
            format!("{name} is {} on rank {a} and {} on rank {b}", value(one, name), value(other, name))
        })
        .collect();
    (!parts.is_empty()).then(|| format!("{}; give every rank the same settings", parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize, size: usize, settings: &[(&str, &str)]) -> Hello {
        let settings = settings.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        Hello { job: String::new(), rank, size, settings, member: Default::default() }
    }

    #[test]
    fn ranks_are_listed_in_words() {
        let text = |named: &[usize], count| Ranks { named, count }.to_string();
        assert_eq!(text(&[3], 1), "rank 3");
        assert_eq!(text(&[3, 5], 2), "ranks 3 and 5");
        assert_eq!(text(&[3, 5, 8], 3), "ranks 3, 5 and 8");
        assert_eq!(text(&[3, 5], 9), "ranks 3, 5 and 7 more");
        assert!(text(&(0..100).collect::<Vec<_>>(), 100).ends_with("15 and 84 more"));
    }

    #[test]
    fn differences_show_both_values_and_both_ranks() {
        let one = hello(0, 4, &[("link", "tcp"), ("same", "1")]);
        assert_eq!(difference(&one, &hello(2, 4, &[("link", "tcp"), ("same", "1")])), None);
        let text = difference(&one, &hello(2, 4, &[("link", "shm"), ("same", "1")])).unwrap();
        assert!(text.contains("link is \"tcp\" on rank 0 and \"shm\" on rank 2"), "{text}");
        let text = difference(&one, &hello(2, 4, &[("link", "tcp"), ("same", "1"), ("new", "x")])).unwrap();
        assert!(text.contains("new is not set on rank 0 and \"x\" on rank 2"), "{text}");
        let text = difference(&one, &hello(2, 5, &[])).unwrap();
        assert!(text.contains("size of 4") && text.contains("size of 5"), "{text}");
    }
}
