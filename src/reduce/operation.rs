//! The operations: as types for typed calls, and as names at run time.

use std::fmt;
use std::str::FromStr;

use super::custom::CustomFold;
use super::dtype::{Element, Fractional, Integer, Number, Ordered};
use super::reducer::Reducer;

/// An operation that can reduce elements of type `T`.
///
/// Sealed: the built-in operations implement it for the types on which they mean something, so that a pair
/// without meaning does not compile, and [`Custom`] for every [`Element`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot reduce elements of type `{T}`",
    label = "no such reduction",
    note = "the operations are `Sum`, `Prod`, `Min`, `Max`, `Avg`, `BitAnd`, `BitOr`, `BitXor` and `Custom::new(|a, b| ...)`"
)]
pub trait Operation<T: Element>: sealed::Sealed {
    /// The kernel that carries the operation out.
    fn reducer(&self) -> Reducer<'_>;
}

/// `a + b`. Integers wrap; f16 and bf16 are summed in f32 and rounded once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum;

/// `a * b`. Integers wrap; f16 and bf16 are multiplied in f32 and rounded once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prod;

/// The smaller of `a` and `b`. A NaN on any rank makes the result NaN; -0 is below +0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Min;

/// The larger of `a` and `b`. A NaN on any rank makes the result NaN; +0 is above -0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Max;

/// The sum divided by the number of ranks, for floating-point and complex numbers.
///
/// f16 and bf16 are divided in f32, before the one rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Avg;

/// `a & b`, for integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitAnd;

/// `a | b`, for integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitOr;

/// `a ^ b`, for integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitXor;

/// A caller's own operation on any [`Element`].
///
/// The function is given the value of lower ranks on the left and of higher ranks on the right. It need not be
/// commutative, but it is taken to be associative: which neighbours are combined first follows the fold tree.
/// Every rank must pass a function that computes the same; this is the one thing about a call that ranks cannot
/// check of each other.
///
/// While the function runs in a collective call, the group is locked, so it cannot use the library: every call on a
/// communicator, of whatever group, returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) there.
/// [`abort`](crate::Communicator::abort) and dropping a communicator are allowed. It must not wait for another
/// thread that makes such a call either. Any thread of the rank that waits in a call may be the one that runs it.
///
/// ```
/// use raccl::{Custom, reduce_local};
///
/// // The function composition x -> a * x + b, which does not commute.
/// let after = Custom::new(|f: &[f64; 2], g: &[f64; 2]| [f[0] * g[0], f[1] * g[0] + g[1]]);
/// let mut out = [[0.0, 0.0]];
/// reduce_local(&after, &[&[[2.0, 0.0]], &[[1.0, 3.0]]], &mut out);
/// assert_eq!(out, [[2.0, 3.0]]);
/// ```
#[derive(Clone, Copy)]
pub struct Custom<F>(F);

impl<F> Custom<F> {
    /// An operation out of an associative function of the left and the right value.
    pub const fn new<T>(function: F) -> Self
    where
        T: Element,
        F: Fn(&T, &T) -> T + Send + Sync,
    {
        Self(function)
    }
}

impl<F> fmt::Debug for Custom<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Custom").finish_non_exhaustive()
    }
}

/// An operation, named at run time.
///
/// The numeric codes are part of the wire format: they never change.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// [`Sum`]
    Sum = 1,
    /// [`Prod`]
    Prod,
    /// [`Min`]
    Min,
    /// [`Max`]
    Max,
    /// [`Avg`]
    Avg,
    /// [`BitAnd`]
    BitAnd,
    /// [`BitOr`]
    BitOr,
    /// [`BitXor`]
    BitXor,
    /// [`Custom`]: it has a code and a name to be shown, but cannot be asked for by name
    Custom,
}

impl ReduceOp {
    /// Every operation that can be asked for by name, in the order of the codes.
    pub const BUILTIN: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// The name by which [`FromStr`] knows it: `sum`, `bit_and`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Avg => "avg",
            ReduceOp::BitAnd => "bit_and",
            ReduceOp::BitOr => "bit_or",
            ReduceOp::BitXor => "bit_xor",
            ReduceOp::Custom => "custom",
        }
    }

    /// The code that stands for it on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The operation of a code, or `None` when this version knows no such operation.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::BUILTIN.into_iter().chain([ReduceOp::Custom]).find(|op| op.code() == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = ParseReduceOpError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::BUILTIN
            .into_iter()
            .find(|op| op.name() == name)
            .ok_or_else(|| ParseReduceOpError { name: name.to_owned() })
    }
}

/// A name that is no built-in [`ReduceOp`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown reduction `{name}`; use one of sum, prod, min, max, avg, bit_and, bit_or, bit_xor")]
pub struct ParseReduceOpError {
    name: String,
}

mod sealed {
    /// Keeps [`Operation`](super::Operation) to this module's operations.
    pub trait Sealed {}
}

macro_rules! operations {
    ($($operation:ident for $class:ident;)*) => { $(
        impl sealed::Sealed for $operation {}
        impl<T: $class> Operation<T> for $operation {
            fn reducer(&self) -> Reducer<'_> {
                Reducer::of::<T>(ReduceOp::$operation)
            }
        }
    )* };
}

operations! {
    Sum for Number;
    Prod for Number;
    Min for Ordered;
    Max for Ordered;
    Avg for Fractional;
    BitAnd for Integer;
    BitOr for Integer;
    BitXor for Integer;
}

impl<F> sealed::Sealed for Custom<F> {}

impl<T, F> Operation<T> for Custom<F>
where
    T: Element,
    F: Fn(&T, &T) -> T + Send + Sync,
{
    fn reducer(&self) -> Reducer<'_> {
        Reducer::custom(CustomFold::new(&self.0))
    }
}

impl<O: sealed::Sealed> sealed::Sealed for &O {}

impl<T: Element, O: Operation<T>> Operation<T> for &O {
    fn reducer(&self) -> Reducer<'_> {
        (**self).reducer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_are_read_back_as_the_operation_they_were_written_from() {
        for (index, op) in ReduceOp::BUILTIN.into_iter().enumerate() {
            assert_eq!(usize::from(op.code()), index + 1, "codes are dense and in order");
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        assert_eq!(ReduceOp::from_code(ReduceOp::Custom.code()), Some(ReduceOp::Custom));
        assert_eq!(ReduceOp::from_code(0), None);
        assert_eq!(ReduceOp::from_code(ReduceOp::Custom.code() + 1), None);
    }

    #[test]
    fn a_function_cannot_be_asked_for_by_name() {
        let message = "custom".parse::<ReduceOp>().unwrap_err().to_string();
        assert!(message.contains("`custom`"), "{message}");
        for op in ReduceOp::BUILTIN {
            assert!(message.contains(op.name()), "{op} is missing in: {message}");
        }
    }
}
