//! The plain loops of [`blocks`](super::blocks), compiled once for each instruction set.

use std::num::NonZeroU32;

use bytemuck::Pod;

use super::arithmetic::{Combine, Half};
use super::blocks::{HalfLoops, Loops};

/// An instruction set for which the loops are compiled.
pub(super) trait Compiled {
    /// The loops of an operation on values.
    fn plain<T: Pod, O: Combine<T>>() -> &'static Loops;

    /// The loops of an operation on halves.
    fn halves<H: Half + Pod, O: Combine<f32>>() -> &'static Loops;
}

macro_rules! compile {
    ($(#[$meta:meta])* $set:ident $(, $feature:literal)?) => {
        $(#[$meta])*
        pub(super) struct $set;

        const _: () = {
            /// # Safety
            ///
            /// As for [`Loops::combine`], on a processor that has the instruction set.
            $(#[target_feature(enable = $feature)])?
            unsafe fn combine<T: Pod, O: Combine<T>>(left: *const u8, right: *const u8, out: *mut u8, count: usize) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { combine_all::<T, O>(left, right, out, count) }
            }

            /// # Safety
            ///
            /// As for [`Loops::append`], on a processor that has the instruction set.
            $(#[target_feature(enable = $feature)])?
            unsafe fn append<T: Pod, O: Combine<T>>(right: *const u8, out: *mut u8, count: usize) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { append_all::<T, O>(right, out, count) }
            }

            /// # Safety
            ///
            /// As for [`Loops::divide`], on a processor that has the instruction set.
            $(#[target_feature(enable = $feature)])?
            unsafe fn divide<T: Pod, O: Combine<T>>(divisor: NonZeroU32, out: *mut u8, count: usize) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { divide_all::<T, O>(divisor, out, count) }
            }

            /// # Safety
            ///
            /// As for [`HalfLoops::widen`], on a processor that has the instruction set.
            $(#[target_feature(enable = $feature)])?
            unsafe fn widen<H: Half + Pod>(from: *const u8, out: *mut u8, count: usize) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { widen_all::<H>(from, out, count) }
            }

            /// # Safety
            ///
            /// As for [`HalfLoops::narrow`], on a processor that has the instruction set.
            $(#[target_feature(enable = $feature)])?
            unsafe fn narrow<H: Half + Pod>(from: *const u8, out: *mut u8, count: usize) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { narrow_all::<H>(from, out, count) }
            }

            const fn loops<T: Pod, O: Combine<T>>(half: Option<HalfLoops>) -> Loops {
                Loops {
                    size: size_of::<T>(),
                    combine: combine::<T, O>,
                    append: append::<T, O>,
                    divide: if O::AVERAGES { Some(divide::<T, O>) } else { None },
                    half,
                }
            }

            impl Compiled for $set {
                fn plain<T: Pod, O: Combine<T>>() -> &'static Loops {
                    const { &loops::<T, O>(None) }
                }

                fn halves<H: Half + Pod, O: Combine<f32>>() -> &'static Loops {
                    const {
                        let half = HalfLoops { size: size_of::<H>(), widen: widen::<H>, narrow: narrow::<H> };
                        &loops::<f32, O>(Some(half))
                    }
                }
            }
        };
    };
}

compile! {
    /// What every processor of the target has.
    Baseline
}

#[cfg(target_arch = "x86_64")]
compile! {
    /// x86-64 with AVX2.
    Avx2, "avx2"
}

#[cfg(target_arch = "x86_64")]
compile! {
    /// x86-64 with AVX-512, for its 64-bit integers.
    Avx512, "avx512f,avx512bw,avx512dq,avx512vl"
}

#[inline(always)]
unsafe fn combine_all<T: Pod, O: Combine<T>>(left: *const u8, right: *const u8, out: *mut u8, count: usize) {
    for index in 0..count {
        // SAFETY: the index is inside the caller's values.
        let left = unsafe { get(left, index) };
        // SAFETY: as above.
        let right = unsafe { get(right, index) };
        // SAFETY: as above.
        unsafe { put(out, index, O::combine(left, right)) }
    }
}

#[inline(always)]
unsafe fn append_all<T: Pod, O: Combine<T>>(right: *const u8, out: *mut u8, count: usize) {
    for index in 0..count {
        // SAFETY: the index is inside the caller's values.
        let left = unsafe { get(out, index) };
        // SAFETY: as above.
        let right = unsafe { get(right, index) };
        // SAFETY: as above.
        unsafe { put(out, index, O::combine(left, right)) }
    }
}

#[inline(always)]
unsafe fn divide_all<T: Pod, O: Combine<T>>(divisor: NonZeroU32, out: *mut u8, count: usize) {
    for index in 0..count {
        // SAFETY: the index is inside the caller's values.
        let sum = unsafe { get(out, index) };
        // SAFETY: as above.
        unsafe { put(out, index, O::divide(sum, divisor)) }
    }
}

#[inline(always)]
unsafe fn widen_all<H: Half + Pod>(from: *const u8, out: *mut u8, count: usize) {
    for index in 0..count {
        // SAFETY: the index is inside the caller's halves.
        let half: H = unsafe { get(from, index) };
        // SAFETY: the index is inside the caller's values.
        unsafe { put(out, index, half.widen()) }
    }
}

#[inline(always)]
unsafe fn narrow_all<H: Half + Pod>(from: *const u8, out: *mut u8, count: usize) {
    for index in 0..count {
        // SAFETY: the index is inside the caller's values.
        let wide = unsafe { get(from, index) };
        // SAFETY: the index is inside the caller's halves.
        unsafe { put(out, index, H::narrow(wide)) }
    }
}

/// # Safety
///
/// `base` is valid for reads of more than `index` elements, at any alignment.
#[inline(always)]
unsafe fn get<T: Pod>(base: *const u8, index: usize) -> T {
    // SAFETY: the element is inside what the caller promises.
    let element = unsafe { base.cast::<T>().add(index) };
    // SAFETY: as above; any bytes are a `T`, which is `Pod`.
    unsafe { element.read_unaligned() }
}

/// # Safety
///
/// `base` is valid for writes of more than `index` elements, at any alignment.
#[inline(always)]
unsafe fn put<T: Pod>(base: *mut u8, index: usize, value: T) {
    // SAFETY: the element is inside what the caller promises.
    let element = unsafe { base.cast::<T>().add(index) };
    // SAFETY: as above.
    unsafe { element.write_unaligned(value) }
}
