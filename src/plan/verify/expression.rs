//! Values as expressions over ranks, each kept once, so that equal expressions have equal names.
#![forbid(unsafe_code)]

use std::collections::HashMap;

/// The name of an expression in an [`Expressions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::plan) struct Expression(u32);

/// All expressions of one proof. An expression speaks of one element; which one is kept beside it.
#[derive(Debug, Default)]
pub(in crate::plan) struct Expressions {
    terms: Vec<Term>,
    names: HashMap<Term, Expression>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Term {
    /// The element as this rank passed it in.
    Input(usize),
    /// Two operands in this order.
    Combined(Expression, Expression),
    /// A final value: divided for Avg, rounded.
    Finished(Expression),
}

impl Expressions {
    pub(in crate::plan) fn input(&mut self, rank: usize) -> Expression {
        self.name(Term::Input(rank))
    }

    pub(in crate::plan) fn combined(&mut self, left: Expression, right: Expression) -> Expression {
        self.name(Term::Combined(left, right))
    }

    pub(in crate::plan) fn finished(&mut self, value: Expression) -> Expression {
        self.name(Term::Finished(value))
    }

    /// The canonical tree over the operands: those beyond a power of two are combined with their neighbours first, then
    /// neighbours combine until one is left.
    pub(in crate::plan) fn tree(&mut self, operands: &[Expression]) -> Expression {
        let mut whole = 1;
        while whole * 2 <= operands.len() {
            whole *= 2;
        }
        let (doubled, single) = operands.split_at(2 * (operands.len() - whole));
        let mut level: Vec<Expression> =
            doubled.chunks_exact(2).map(|pair| self.combined(pair[0], pair[1])).collect();
        level.extend_from_slice(single);
        while level.len() > 1 {
            level = level.chunks_exact(2).map(|pair| self.combined(pair[0], pair[1])).collect();
        }
        level[0]
    }

    /// The operands combined from left to right.
    pub(in crate::plan) fn chain(&mut self, operands: &[Expression]) -> Expression {
        let (&first, rest) = operands.split_first().expect("a chain has at least one operand");
        rest.iter().fold(first, |left, &right| self.combined(left, right))
    }

    /// The ranks whose elements are in an expression, from left to right.
    pub(in crate::plan) fn inputs(&self, value: Expression) -> Vec<usize> {
        match self.terms[value.0 as usize] {
            Term::Input(rank) => vec![rank],
            Term::Combined(left, right) => [self.inputs(left), self.inputs(right)].concat(),
            Term::Finished(inner) => self.inputs(inner),
        }
    }

    /// True for what must not be folded again, nor kept as a partial result.
    pub(super) fn is_finished(&self, value: Expression) -> bool {
        matches!(self.terms[value.0 as usize], Term::Finished(_))
    }

    /// True for what the raw representation can hold: an input or a final value.
    pub(super) fn is_raw(&self, value: Expression) -> bool {
        matches!(self.terms[value.0 as usize], Term::Finished(_) | Term::Input(_))
    }

    /// The expression in words, for messages.
    pub(super) fn show(&self, value: Expression) -> String {
        match self.terms[value.0 as usize] {
            Term::Input(rank) => format!("x{rank}"),
            Term::Combined(left, right) => format!("({} + {})", self.show(left), self.show(right)),
            Term::Finished(inner) => format!("finish({})", self.show(inner)),
        }
    }

    fn name(&mut self, term: Term) -> Expression {
        *self.names.entry(term).or_insert_with(|| {
            self.terms.push(term);
            Expression(u32::try_from(self.terms.len() - 1).expect("fewer than 2^32 expressions"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(count: usize) -> String {
        let mut expressions = Expressions::default();
        let inputs: Vec<_> = (0..count).map(|rank| expressions.input(rank)).collect();
        let tree = expressions.tree(&inputs);
        expressions.show(tree)
    }

    #[test]
    fn the_tree_is_the_promised_one() {
        assert_eq!(shown(1), "x0");
        assert_eq!(shown(2), "(x0 + x1)");
        assert_eq!(shown(3), "((x0 + x1) + x2)");
        assert_eq!(shown(4), "((x0 + x1) + (x2 + x3))");
        assert_eq!(shown(5), "(((x0 + x1) + x2) + (x3 + x4))");
        assert_eq!(shown(6), "(((x0 + x1) + (x2 + x3)) + (x4 + x5))");
        assert_eq!(shown(7), "(((x0 + x1) + (x2 + x3)) + ((x4 + x5) + x6))");
    }
}
