//! One operation on one element type, ready to run over memory.

use std::fmt;
use std::num::NonZeroU32;

use super::custom::CustomFold;
use super::dispatch::{self, Kernel, Level};
use super::dtype::{DType, Number};
use super::operation::ReduceOp;
use super::stream;

/// How an operation reduces its elements: what [`Operation`](super::Operation) hands to the library.
///
/// It is opaque: pass operations, not reducers.
#[derive(Clone, Copy)]
pub struct Reducer<'a> {
    kind: Kind<'a>,
    /// Every output counts as at least so many bytes when the way of writing it is chosen; 0 but in tests.
    output: usize,
}

#[derive(Clone, Copy)]
enum Kind<'a> {
    Builtin { dtype: DType, op: ReduceOp, kernel: Kernel },
    Custom(CustomFold<'a>),
}

/// How elements lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Repr {
    /// As the caller's type.
    Raw,
    /// As values that are still being folded: f32 for f16 and bf16, the same as raw for all other types.
    Acc,
}

/// Elements to fold, at any alignment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) ptr: *const u8,
    pub(crate) repr: Repr,
}

impl Source {
    /// Elements of the caller's type.
    pub(crate) fn raw(ptr: *const u8) -> Self {
        Self { ptr, repr: Repr::Raw }
    }
}

impl Reducer<'static> {
    /// The reducer of a built-in operation, or `None` where the operation means nothing for the type.
    pub(crate) fn builtin(dtype: DType, op: ReduceOp) -> Option<Self> {
        Self::builtin_at(Level::best(), dtype, op)
    }

    /// As [`builtin`](Self::builtin), with the kernels of one instruction set.
    pub(super) fn builtin_at(level: Level, dtype: DType, op: ReduceOp) -> Option<Self> {
        let kernel = dispatch::kernel(level, dtype, op)?;
        Some(Self { kind: Kind::Builtin { dtype, op, kernel }, output: 0 })
    }

    /// The reducer of an operation that the type's traits say it has.
    pub(super) fn of<T: Number>(op: ReduceOp) -> Self {
        // The class traits and `dispatch::kernel` are two spellings of one table; a test compares them.
        Self::builtin(T::DTYPE, op).expect("the type's class has this operation")
    }
}

impl<'a> Reducer<'a> {
    pub(super) fn custom(fold: CustomFold<'a>) -> Self {
        Self { kind: Kind::Custom(fold), output: 0 }
    }

    /// The same reducer as if the whole output had `bytes`, so that small ones are written past the cache too.
    #[cfg(test)]
    pub(crate) fn for_output_of(self, bytes: usize) -> Self {
        Self { output: bytes, ..self }
    }

    /// The code of the element type, 0 for a custom operation.
    pub(crate) fn dtype_code(&self) -> u8 {
        match self.kind {
            Kind::Builtin { dtype, .. } => dtype.code(),
            Kind::Custom(_) => 0,
        }
    }

    /// The operation's name.
    pub(crate) fn op(&self) -> ReduceOp {
        match self.kind {
            Kind::Builtin { op, .. } => op,
            Kind::Custom(_) => ReduceOp::Custom,
        }
    }

    /// Bytes of one element of the caller's type.
    pub(crate) fn raw_size(&self) -> usize {
        match self.kind {
            Kind::Builtin { dtype, .. } => dtype.size(),
            Kind::Custom(fold) => fold.size(),
        }
    }

    /// Bytes of one element of a partial result.
    pub(crate) fn acc_size(&self) -> usize {
        match self.kind {
            Kind::Builtin { dtype: DType::F16 | DType::Bf16, .. } => size_of::<f32>(),
            _ => self.raw_size(),
        }
    }

    /// Bytes of one element in a representation.
    pub(crate) fn size(&self, repr: Repr) -> usize {
        match repr {
            Repr::Raw => self.raw_size(),
            Repr::Acc => self.acc_size(),
        }
    }

    /// Folds the sources, of which there is at least one, in the canonical [tree](super::tree) over them, and
    /// writes `count` elements in representation `to`.
    ///
    /// `finish` says that this is the result of that many ranks, which `Avg` divides by; with `None` it is a
    /// partial one. A custom operation is the caller's code: when it panics, the panic passes through and `dst`
    /// holds some new and some old elements.
    ///
    /// # Safety
    ///
    /// - Each source is valid for reads, and `dst` for writes, of `count` elements in its representation, at
    ///   any alignment.
    /// - `dst` may be exactly the start of sources with elements of the same size. It overlaps no other source.
    /// - Nothing writes to a source meanwhile, and nothing touches `dst`. No reference to any of them is made.
    pub(crate) unsafe fn fold(
        &self,
        sources: &[Source],
        dst: *mut u8,
        to: Repr,
        finish: Option<NonZeroU32>,
        count: usize,
    ) {
        assert!(!sources.is_empty(), "a fold needs at least one source");
        let divisor = finish.filter(|_| self.op() == ReduceOp::Avg);
        if let [source] = sources
            && divisor.is_none()
            && self.size(source.repr) == self.size(to)
        {
            // SAFETY: of the same size, so source and destination are the same memory or do not overlap; both
            // are valid for `count` elements by the caller's promise.
            return unsafe { self.copy(source.ptr, dst, count * self.size(to)) };
        }
        match self.kind {
            Kind::Custom(fold) => {
                // SAFETY: the caller's promises are the same ones.
                unsafe { fold.fold(sources, dst, count) }
            }
            Kind::Builtin { kernel, .. } => {
                let output = self.output.max(count * self.size(to));
                // SAFETY: the caller's promises are the same ones; `dispatch::kernel` gave a kernel that this
                // processor can run.
                unsafe { kernel.fold(sources, dst, to, divisor, count, output) }
            }
        }
    }

    /// # Safety
    ///
    /// `src` is valid for reads and `dst` for writes of `bytes`; they are equal or do not overlap.
    unsafe fn copy(&self, src: *const u8, dst: *mut u8, bytes: usize) {
        if src != dst.cast_const() {
            // SAFETY: they do not overlap, since they are not equal; valid by the caller's promise.
            unsafe { stream::copy(src, dst, bytes, self.output.max(bytes)) }
        }
    }
}

impl fmt::Debug for Reducer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Reducer");
        match self.kind {
            Kind::Builtin { dtype, op, .. } => out.field("dtype", &dtype).field("op", &op),
            Kind::Custom(fold) => out.field("op", &ReduceOp::Custom).field("size", &fold.size()),
        };
        out.finish()
    }
}
