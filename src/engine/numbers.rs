//! Numbers of communicators: the same on all members, and never given twice.
//!
//! Several communicators may be split at the same time, by threads that meet in another order on every rank, so no common
//! counter can number what they make. Instead every rank has numbers of its own: its rank in the upper bits, a counter in the
//! lower. A new communicator takes the number that its leader brought along; which member leads is a function of the split.
#![forbid(unsafe_code)]

use std::ops::RangeInclusive;

/// What a rank knows about the numbers of communicators.
pub(crate) struct Numbers {
    world: usize,
    rank: usize,
    /// The next counter of our own.
    next: u64,
    /// By leader: counters below this have been made here, or never will be unless a split is under way.
    known: Vec<u64>,
    /// Calls of split that have begun and not ended.
    splitting: u32,
}

impl Numbers {
    pub(crate) fn new(world: usize, rank: usize) -> Numbers {
        // Number 0 is the communicator of the whole group, with rank 0 as its leader.
        Numbers { world, rank, next: 1, known: vec![0; world], splitting: 0 }
    }

    /// Begins a split and brings along a number; `None` if all have been used.
    pub(crate) fn begin_split(&mut self) -> Option<u32> {
        let counter = self.next;
        if counter >= 1 << self.bits() {
            return None;
        }
        self.next += 1;
        self.splitting += 1;
        // Rank and counter together have 32 bits.
        Some(((self.rank as u64) << self.bits() | counter) as u32)
    }

    /// Ends a split.
    pub(crate) fn end_split(&mut self) {
        self.splitting -= 1;
    }

    /// A communicator has been made here.
    pub(crate) fn made(&mut self, number: u32) {
        let (leader, counter) = self.parts(number);
        if let Some(known) = self.known.get_mut(leader) {
            *known = (*known).max(counter + 1);
        }
    }

    /// True if a communicator that is not there was there once; false if it may still be made here.
    ///
    /// A message for a number below another of the same leader that was made here can only be for a split that this rank has
    /// entered: no split ends anywhere before all have entered it. If none is under way, the communicator has been dropped.
    pub(crate) fn is_over(&self, number: u32) -> bool {
        let (leader, counter) = self.parts(number);
        self.splitting == 0 && self.known.get(leader).is_some_and(|&known| counter < known)
    }

    /// All numbers that [are over](Numbers::is_over), one range a leader.
    pub(crate) fn over(&self) -> impl Iterator<Item = RangeInclusive<u32>> {
        let known = self.known.iter().enumerate().filter(|&(_, &known)| self.splitting == 0 && known > 0);
        // Rank and counter together have 32 bits.
        known.map(|(leader, known)| {
            let first = (leader as u64) << self.bits();
            first as u32..=(first | (known - 1)) as u32
        })
    }

    /// True if `leader` may have brought this number along.
    pub(crate) fn belongs_to(&self, number: u32, leader: usize) -> bool {
        self.parts(number).0 == leader
    }

    fn parts(&self, number: u32) -> (usize, u64) {
        let number = u64::from(number);
        ((number >> self.bits()) as usize, number & ((1 << self.bits()) - 1))
    }

    /// Bits of the counter.
    fn bits(&self) -> u32 {
        // A group has far fewer than 2^31 ranks: each has a socket to every other.
        32 - self.world.next_power_of_two().trailing_zeros().min(31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_never_bring_the_same_number() {
        for world in [1, 2, 3, 4, 1024] {
            let mut seen = std::collections::HashSet::from([0]);
            for rank in 0..world {
                let mut numbers = Numbers::new(world, rank);
                for _ in 0..50 {
                    assert!(seen.insert(numbers.begin_split().unwrap()));
                }
            }
        }
    }

    #[test]
    fn numbers_end_before_they_repeat() {
        let mut numbers = Numbers::new(1024, 1023);
        numbers.next = (1 << 22) - 1;
        assert_eq!(numbers.begin_split(), Some(u32::MAX));
        assert_eq!(numbers.begin_split(), None);
    }

    #[test]
    fn a_number_is_over_when_a_later_one_is_known_and_no_split_is_under_way() {
        let mut leader = Numbers::new(3, 2);
        let (first, second) = (leader.begin_split().unwrap(), leader.begin_split().unwrap());
        let mut numbers = Numbers::new(3, 0);
        assert!(!numbers.is_over(first));
        numbers.begin_split().unwrap();
        numbers.begin_split().unwrap();
        numbers.made(second);
        numbers.end_split();
        assert!(!numbers.is_over(first), "its split is still under way");
        numbers.end_split();
        assert!(numbers.is_over(first));
        assert!(!numbers.is_over(second + 1));
        assert!(!numbers.is_over(u32::MAX), "of a rank that does not exist");
    }

    #[test]
    fn the_ranges_of_numbers_that_are_over_hold_those_and_no_others() {
        let mut numbers = Numbers::new(3, 1);
        assert_eq!(numbers.over().count(), 0);
        let mut other = Numbers::new(3, 2);
        let made: Vec<u32> = (0..5).filter_map(|_| other.begin_split()).collect();
        numbers.made(made[3]);
        numbers.made(0);
        let all = made.iter().flat_map(|&number| [number - 1, number, number + 1]).chain([0, 1, u32::MAX]);
        for number in all {
            let over = numbers.over().any(|range| range.contains(&number));
            assert_eq!(over, numbers.is_over(number), "{number:#x}");
        }
        numbers.begin_split().unwrap();
        assert_eq!(numbers.over().count(), 0, "a split is under way");
    }
}
