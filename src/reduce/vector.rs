//! What the kernels ask of a vector of f32.

use std::num::NonZeroU32;

use super::arithmetic::{Add, Maximum, Minimum, Multiply};
use super::formats::{Buffer, Format};
use super::job::Job;

/// A vector register of f32.
///
/// # Safety
///
/// Implementors access no more memory than each function says.
///
/// Every function needs the vector's instruction set: it is called, inlined, from entry functions that enable
/// it, and those only on processors that have it. Memory need not be aligned unless a function says so.
pub(super) unsafe trait Vector: Copy {
    /// Values of a vector.
    const LANES: usize;

    /// Enables the instruction set and [carries out](super::registers::run) a job there.
    ///
    /// # Safety
    ///
    /// As for [`Reducer::fold`](super::Reducer::fold), with the units of `F`, and the processor has the
    /// instruction set.
    unsafe fn run<F: Format<Vector = Self>, O: Lanewise>(job: &Job<'_>);

    /// # Safety
    ///
    /// The processor has the instruction set.
    unsafe fn splat(value: f32) -> Self;

    /// # Safety
    ///
    /// `LANES` values are readable, and the processor has the instruction set.
    unsafe fn load(from: *const f32) -> Self;

    /// # Safety
    ///
    /// `LANES` values are writable, and the processor has the instruction set.
    unsafe fn store(self, to: *mut f32);

    /// Stores past the cache.
    ///
    /// # Safety
    ///
    /// As for `store`; `to` is aligned to the size of the vector.
    unsafe fn stream(self, to: *mut f32);

    /// # Safety
    ///
    /// The processor has the instruction set; so for the next four.
    unsafe fn add(self, other: Self) -> Self;

    /// # Safety
    ///
    /// As for `add`.
    unsafe fn mul(self, other: Self) -> Self;

    /// # Safety
    ///
    /// As for `add`.
    unsafe fn div(self, other: Self) -> Self;

    /// NaN if either is; -0 is below +0.
    ///
    /// # Safety
    ///
    /// As for `add`.
    unsafe fn minimum(self, other: Self) -> Self;

    /// NaN if either is; -0 is below +0.
    ///
    /// # Safety
    ///
    /// As for `add`.
    unsafe fn maximum(self, other: Self) -> Self;

    /// # Safety
    ///
    /// `2 * LANES` halves are readable, and the processor has the instruction set.
    unsafe fn load_f16(from: *const u8) -> [Self; 2];

    /// # Safety
    ///
    /// `2 * LANES` halves are writable, and the processor has the instruction set.
    unsafe fn store_f16(pair: [Self; 2], to: *mut u8);

    /// # Safety
    ///
    /// As for `store_f16`; `to` is aligned to the size of the vector.
    unsafe fn stream_f16(pair: [Self; 2], to: *mut u8);

    /// Loads halves in whatever order of lanes is cheap.
    ///
    /// # Safety
    ///
    /// `2 * LANES` halves are readable, and the processor has the instruction set.
    unsafe fn load_bf16(from: *const u8) -> [Self; 2];

    /// Rounds and stores halves from the order of `load_bf16`.
    ///
    /// # Safety
    ///
    /// `2 * LANES` halves are writable, and the processor has the instruction set.
    unsafe fn store_bf16(pair: [Self; 2], to: *mut u8);

    /// # Safety
    ///
    /// As for `store_bf16`; `to` is aligned to the size of the vector.
    unsafe fn stream_bf16(pair: [Self; 2], to: *mut u8);

    /// Loads values into the order of `load_bf16`.
    ///
    /// # Safety
    ///
    /// `2 * LANES` values are readable, and the processor has the instruction set.
    unsafe fn load_spread(from: *const f32) -> [Self; 2];

    /// The values of a pair in the order of `load_bf16`, put back in the order of memory.
    ///
    /// # Safety
    ///
    /// The processor has the instruction set.
    unsafe fn gather(pair: [Self; 2]) -> [Self; 2];

    /// Loads the first bytes of a buffer.
    ///
    /// # Safety
    ///
    /// `bytes` are readable and not more than the buffer has, and the processor has the instruction set.
    #[inline(always)]
    unsafe fn fill(buffer: &mut Buffer, from: *const u8, bytes: usize) {
        // SAFETY: readable by the caller's promise; the buffer is large enough and our own.
        unsafe { from.copy_to_nonoverlapping(buffer.0.as_mut_ptr(), bytes) }
    }

    /// Stores the first bytes of a buffer.
    ///
    /// # Safety
    ///
    /// `bytes` are writable and not more than the buffer has, and the processor has the instruction set.
    #[inline(always)]
    unsafe fn drain(buffer: &Buffer, to: *mut u8, bytes: usize) {
        // SAFETY: writable by the caller's promise; the buffer is large enough and our own.
        unsafe { to.copy_from_nonoverlapping(buffer.0.as_ptr(), bytes) }
    }
}

/// An operation on vectors, lane by lane.
pub(super) trait Lanewise {
    /// # Safety
    ///
    /// The processor has the vector's instruction set.
    unsafe fn combine<V: Vector>(left: V, right: V) -> V;

    /// Divides a result, where the operation is one that has averages.
    ///
    /// # Safety
    ///
    /// The processor has the vector's instruction set.
    #[inline(always)]
    unsafe fn divide<V: Vector>(value: V, _divisor: NonZeroU32) -> V {
        value
    }
}

impl Lanewise for Add {
    #[inline(always)]
    unsafe fn combine<V: Vector>(left: V, right: V) -> V {
        // SAFETY: the caller's promise is the same one.
        unsafe { left.add(right) }
    }

    #[inline(always)]
    unsafe fn divide<V: Vector>(value: V, divisor: NonZeroU32) -> V {
        // SAFETY: the caller's promise is the same one.
        let divisor = unsafe { V::splat(divisor.get() as f32) };
        // SAFETY: as above.
        unsafe { value.div(divisor) }
    }
}

impl Lanewise for Multiply {
    #[inline(always)]
    unsafe fn combine<V: Vector>(left: V, right: V) -> V {
        // SAFETY: the caller's promise is the same one.
        unsafe { left.mul(right) }
    }
}

impl Lanewise for Minimum {
    #[inline(always)]
    unsafe fn combine<V: Vector>(left: V, right: V) -> V {
        // SAFETY: the caller's promise is the same one.
        unsafe { left.minimum(right) }
    }
}

impl Lanewise for Maximum {
    #[inline(always)]
    unsafe fn combine<V: Vector>(left: V, right: V) -> V {
        // SAFETY: the caller's promise is the same one.
        unsafe { left.maximum(right) }
    }
}
