//! Which ranks stand for the nodes of the canonical tree.
//!
//! With q the largest power of two not above p and r = p - q, leaf i of the tree is `x[2i] + x[2i+1]` for i < r and `x[i + r]`
//! otherwise; then neighbours combine at strides 1, 2, 4. An algorithm for powers of two honours the tree on any number of
//! ranks when each leaf has one rank that stands for it: in a pair the even rank gives its elements to the odd one first and
//! gets the result last.
#![forbid(unsafe_code)]

use super::Shape;

/// What a rank is in an algorithm for powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Stands for this leaf of the tree.
    Stands(usize),
    /// Has given its elements to the rank above.
    Gave,
}

/// The leaves of the tree over `size` ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leaves {
    /// The number of leaves, a power of two.
    pub(super) count: usize,
    /// The first so many leaves are pairs of ranks.
    pub(super) pairs: usize,
}

impl Leaves {
    pub(super) fn new(size: usize) -> Leaves {
        let count = 1 << size.ilog2();
        Leaves { count, pairs: size - count }
    }

    pub(super) fn role(self, rank: usize) -> Role {
        match rank {
            _ if rank >= 2 * self.pairs => Role::Stands(rank - self.pairs),
            _ if rank % 2 == 1 => Role::Stands(rank / 2),
            _ => Role::Gave,
        }
    }

    /// The rank that stands for a leaf.
    pub(super) fn rank(self, leaf: usize) -> usize {
        if self.is_pair(leaf) { 2 * leaf + 1 } else { leaf + self.pairs }
    }

    /// True when the leaf is a partial result over two ranks.
    pub(super) fn is_pair(self, leaf: usize) -> bool {
        leaf < self.pairs
    }
}

impl Shape {
    /// True when a partial result fits into a user's buffer.
    pub(super) fn partials_are_raw(&self) -> bool {
        self.raw_size == self.acc_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_leaf_has_one_rank_and_pairs_are_neighbours() {
        for size in 1..70 {
            let leaves = Leaves::new(size);
            assert_eq!(leaves.count + leaves.pairs, size);
            for leaf in 0..leaves.count {
                let rank = leaves.rank(leaf);
                assert_eq!(leaves.role(rank), Role::Stands(leaf));
                assert_eq!(leaves.is_pair(leaf), rank > 0 && leaves.role(rank - 1) == Role::Gave);
            }
            let gave = (0..size).filter(|&rank| leaves.role(rank) == Role::Gave).count();
            assert_eq!(gave, leaves.pairs);
        }
    }
}
