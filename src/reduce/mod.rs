//! Reducing elements: types, operations and the kernels that carry them out.
//!
//! The kernels know nothing of ranks or of transport. They fold any number of sources in memory, in the order
//! of one fixed [tree](tree) over them, to exactly the bits that a plain scalar program in that order gives:
//! nothing is contracted or reassociated, denormals are kept, and f16 and bf16 are computed in f32 and rounded
//! once, to nearest even. Only which NaN a NaN is may differ.

mod arithmetic;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod custom;
mod dispatch;
mod dtype;
mod formats;
mod job;
mod local;
mod loops;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operation;
mod reducer;
mod registers;
mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
mod vector;

pub use dtype::{DType, Element, Fractional, Integer, Number, Ordered, ParseDTypeError};
pub use local::reduce_local;
pub use operation::{
    Avg, BitAnd, BitOr, BitXor, Custom, Max, Min, Operation, ParseReduceOpError, Prod, ReduceOp, Sum,
};
pub use reducer::Reducer;

pub(crate) use reducer::{Repr, Source};
