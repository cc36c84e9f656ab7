//! How elements are divided among ranks.
#![forbid(unsafe_code)]

use std::ops::Range;

/// Large divisions start each part at a multiple of this many elements: a whole cache line of the smallest elements, so that
/// no two parts share a line when the buffer is aligned.
const GRAIN: usize = 64;

/// Part `index` of `count` elements in `parts` parts, as equal as can be. Large parts begin at multiples of [`GRAIN`].
/// Depends on its arguments alone, never on the type of the elements.
pub(super) fn part(count: usize, parts: usize, index: usize) -> Range<usize> {
    debug_assert!(index < parts);
    let grain = if count / parts >= 64 * GRAIN { GRAIN } else { 1 };
    let grains = count.div_ceil(grain);
    let start = |index: usize| {
        let before = grains / parts * index + index.min(grains % parts);
        before.saturating_mul(grain).min(count)
    };
    start(index)..start(index + 1)
}

/// The range of `counts[index]` elements when all parts lie one after the other.
pub(super) fn part_of(counts: &[usize], index: usize) -> Range<usize> {
    let start = counts[..index].iter().sum();
    start..start + counts[index]
}

/// The ranges of all parts when they lie one after the other.
pub(super) fn all_parts(counts: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    counts
        .iter()
        .map(|&count| {
            let range = start..start + count;
            start = range.end;
            range
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_cover_everything_once_and_are_nearly_equal(count in 0usize..2_000_000, parts in 1usize..70) {
            let mut end = 0;
            for index in 0..parts {
                let range = part(count, parts, index);
                prop_assert_eq!(range.start, end);
                prop_assert!(range.end >= range.start);
                prop_assert!(range.len().abs_diff(count / parts) <= GRAIN.max(count / parts / 32));
                end = range.end;
            }
            prop_assert_eq!(end, count);
        }
    }

    #[test]
    fn small_parts_differ_by_one_at_most() {
        assert_eq!((0..4).map(|index| part(6, 4, index).len()).collect::<Vec<_>>(), [2, 2, 1, 1]);
        assert_eq!((0..4).map(|index| part(3, 4, index).len()).collect::<Vec<_>>(), [1, 1, 1, 0]);
    }

    #[test]
    fn the_largest_counts_do_not_overflow() {
        assert_eq!(part(usize::MAX, 1, 0), 0..usize::MAX);
        assert_eq!(part(usize::MAX, 3, 2).end, usize::MAX);
    }

    #[test]
    fn uneven_parts_lie_one_after_the_other() {
        let counts = [3, 0, 5];
        assert_eq!(all_parts(&counts), [0..3, 3..3, 3..8]);
        for index in 0..3 {
            assert_eq!(part_of(&counts, index), all_parts(&counts)[index]);
        }
    }
}
