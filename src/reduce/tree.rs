//! The order in which values are folded: one tree over ranks, a function of their number alone.
//!
//! With `q` the largest power of two not above `n` and `r = n - q`, leaf `i` of `q` is `x[2i] + x[2i+1]` for
//! `i < r` and `x[i + r]` otherwise; then neighbours combine at strides 1, 2, 4 and so on. Five values:
//!
//! ```text
//!         x0 x1   x2   x3   x4
//!          \ /     |    |    |
//! leaves    +      |    |    |       q = 4, r = 1
//!            \    /      \  /
//! stride 1     +          +
//!                \      /
//! stride 2          +
//! ```
//!
//! Algorithms that exchange only values of this tree's nodes agree bit by bit, whatever they send to whom.
#![forbid(unsafe_code)]

/// The shape of the tree over a number of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    leaves: usize,
    pairs: usize,
}

impl Tree {
    /// The tree over `n >= 1` values.
    pub(crate) const fn over(n: usize) -> Self {
        assert!(n > 0, "a fold of nothing has no value");
        let leaves = 1 << n.ilog2();
        Self { leaves, pairs: n - leaves }
    }

    /// The number of leaves: the largest power of two that is not above the number of values.
    pub(crate) const fn leaves(self) -> usize {
        self.leaves
    }

    /// What leaf `index` is made of.
    pub(crate) const fn leaf(self, index: usize) -> Leaf {
        if index < self.pairs { Leaf::Pair(2 * index, 2 * index + 1) } else { Leaf::One(index + self.pairs) }
    }

    /// How many nodes are completed by value `index`, for who takes values in order and keeps unfinished nodes on
    /// a stack: so often the value, or what came of it, is combined with the node that was there last.
    pub(crate) const fn merges(self, index: usize) -> u32 {
        if index >= 2 * self.pairs {
            (index - self.pairs).trailing_ones()
        } else if index % 2 == 1 {
            1 + (index / 2).trailing_ones()
        } else {
            0
        }
    }
}

/// What a leaf is made of, by index of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaf {
    /// A single value.
    One(usize),
    /// Two neighbouring values.
    Pair(usize, usize),
}

/// Folds `n >= 1` values, asking for each once, in order.
pub(crate) fn fold<V>(n: usize, mut value: impl FnMut(usize) -> V, mut combine: impl FnMut(V, V) -> V) -> V {
    let tree = Tree::over(n);
    node(tree, tree.leaves(), 0, &mut value, &mut combine)
}

/// The node above the `width` leaves from `first` on.
fn node<V>(
    tree: Tree,
    width: usize,
    first: usize,
    value: &mut impl FnMut(usize) -> V,
    combine: &mut impl FnMut(V, V) -> V,
) -> V {
    if width > 1 {
        let half = width / 2;
        let left = node(tree, half, first, value, combine);
        let right = node(tree, half, first + half, value, combine);
        return combine(left, right);
    }
    match tree.leaf(first) {
        Leaf::One(i) => value(i),
        Leaf::Pair(i, j) => {
            let left = value(i);
            let right = value(j);
            combine(left, right)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(n: usize) -> String {
        fold(n, |i| i.to_string(), |a, b| format!("({a} {b})"))
    }

    #[test]
    fn small_trees_are_the_ones_of_the_definition() {
        assert_eq!(spelled(1), "0");
        assert_eq!(spelled(2), "(0 1)");
        assert_eq!(spelled(3), "((0 1) 2)");
        assert_eq!(spelled(4), "((0 1) (2 3))");
        assert_eq!(spelled(5), "(((0 1) 2) (3 4))");
        assert_eq!(spelled(6), "(((0 1) (2 3)) (4 5))");
        assert_eq!(spelled(7), "(((0 1) (2 3)) ((4 5) 6))");
        assert_eq!(spelled(8), "(((0 1) (2 3)) ((4 5) (6 7)))");
    }

    #[test]
    fn a_stack_that_merges_as_told_builds_the_tree() {
        for n in 1..=70 {
            let tree = Tree::over(n);
            let mut stack = Vec::new();
            for index in 0..n {
                let mut node = index.to_string();
                for _ in 0..tree.merges(index) {
                    node = format!("({} {node})", stack.pop().unwrap());
                }
                stack.push(node);
            }
            assert_eq!(stack, [spelled(n)], "{n} values");
        }
    }

    #[test]
    fn the_tree_is_the_one_that_strides_over_leaves_build() {
        for n in 1..=70 {
            let tree = Tree::over(n);
            let mut nodes: Vec<String> = (0..tree.leaves())
                .map(|leaf| match tree.leaf(leaf) {
                    Leaf::One(i) => i.to_string(),
                    Leaf::Pair(i, j) => format!("({i} {j})"),
                })
                .collect();
            let mut stride = 1;
            while stride < nodes.len() {
                for left in (0..nodes.len()).step_by(2 * stride) {
                    nodes[left] = format!("({} {})", nodes[left], nodes[left + stride]);
                }
                stride *= 2;
            }
            assert_eq!(spelled(n), nodes[0], "{n} values");
        }
    }
}
