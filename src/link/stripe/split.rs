//! Where a payload is cut.
#![forbid(unsafe_code)]

use std::ops::Range;

/// Payloads are cut at multiples of this, so that no two lanes write to one cache line of the destination.
const ALIGNMENT: u64 = 64;

/// A payload is cut if every lane gets about this much of it or more.
const WORTH_A_LANE: u64 = 64 << 10;

/// How payloads are divided among lanes. Both sides of a link must be built with the same weights.
#[derive(Debug, Clone)]
pub(crate) struct Split {
    /// `ends[i]`: the weights of lanes 0 to i together.
    ends: Vec<u64>,
    threshold: u64,
}

impl Split {
    /// Lanes that get payload in proportion to their weights (their bandwidths, say). There must be a lane, and not all weights
    /// may be 0.
    pub(crate) fn new(weights: &[u32]) -> Split {
        let ends: Vec<u64> = weights
            .iter()
            .scan(0, |sum, &weight| {
                *sum += u64::from(weight);
                Some(*sum)
            })
            .collect();
        assert!(ends.last().is_some_and(|&total| total > 0), "a link needs a lane that carries something");
        let threshold = if ends.len() == 1 { u64::MAX } else { WORTH_A_LANE * ends.len() as u64 };
        Split { ends, threshold }
    }

    /// Whether a payload of this length is cut at all.
    pub(crate) fn applies(&self, length: u64) -> bool {
        length >= self.threshold
    }

    /// The part of a payload that travels on `lane`. The parts of all lanes follow one another and make up the whole.
    pub(crate) fn part(&self, length: u64, lane: usize) -> Range<u64> {
        if !self.applies(length) {
            return if lane == 0 { 0..length } else { length..length };
        }
        let begin = if lane == 0 { 0 } else { self.cut(length, lane - 1) };
        begin..self.cut(length, lane)
    }

    /// Where the part of `lane` ends.
    fn cut(&self, length: u64, lane: usize) -> u64 {
        let total = self.ends[self.ends.len() - 1];
        let end = self.ends[lane];
        if end == total {
            return length;
        }
        // At most `length`, because `end` is less than `total`.
        let exact = (u128::from(length) * u128::from(end) / u128::from(total)) as u64;
        exact - exact % ALIGNMENT
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(split: &Split, lanes: usize, length: u64) -> Vec<Range<u64>> {
        (0..lanes).map(|lane| split.part(length, lane)).collect()
    }

    #[test]
    fn one_lane_carries_everything() {
        for length in [0, 1, 1 << 20, u64::MAX] {
            assert_eq!(Split::new(&[3]).part(length, 0), 0..length);
        }
    }

    #[test]
    fn small_payloads_stay_on_lane_0() {
        let split = Split::new(&[1, 1]);
        let limit = 128 << 10;
        assert_eq!(parts(&split, 2, limit - 1), [0..limit - 1, limit - 1..limit - 1]);
        assert_eq!(parts(&split, 2, limit), [0..limit / 2, limit / 2..limit]);
    }

    proptest! {
        #[test]
        fn the_parts_are_the_whole_in_order(
            mut weights in prop::collection::vec(0u32.., 1..9),
            length in prop_oneof![0u64..(4 << 20), any::<u64>()],
        ) {
            weights[0] = weights[0].max(1);
            let split = Split::new(&weights);
            let mut at = 0;
            for part in parts(&split, weights.len(), length) {
                prop_assert_eq!(part.start, at);
                prop_assert!(part.end >= part.start);
                at = part.end;
            }
            prop_assert_eq!(at, length);
        }

        #[test]
        fn every_cut_is_aligned_and_every_share_is_fair(
            mut weights in prop::collection::vec(0u32..1000, 2..9),
            length in 0u64..(1 << 50),
        ) {
            weights[0] = weights[0].max(1);
            let split = Split::new(&weights);
            let total: u64 = weights.iter().copied().map(u64::from).sum();
            prop_assume!(split.applies(length));
            for (part, &weight) in parts(&split, weights.len(), length).iter().zip(&weights) {
                prop_assert!(part.start % ALIGNMENT == 0 || part.start == length);
                let fair = length as u128 * u128::from(weight) / u128::from(total);
                let got = u128::from(part.end - part.start);
                prop_assert!(got.abs_diff(fair) <= 2 * u128::from(ALIGNMENT));
            }
        }
    }
}
