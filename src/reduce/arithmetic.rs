//! What the operations do with two numbers. This is the definition; every kernel gives these bits.
#![forbid(unsafe_code)]

use std::num::NonZeroU32;

use half::{bf16, f16};
use num_complex::Complex;

/// The operation of `Sum` and `Avg`.
pub(super) struct Add;
/// The operation of `Prod`.
pub(super) struct Multiply;
/// The operation of `Min`.
pub(super) struct Minimum;
/// The operation of `Max`.
pub(super) struct Maximum;
/// The operation of `BitAnd`.
pub(super) struct And;
/// The operation of `BitOr`.
pub(super) struct Or;
/// The operation of `BitXor`.
pub(super) struct Xor;

/// An operation on numbers of type `T`.
pub(super) trait Combine<T> {
    /// Whether results can be divided to make averages.
    const AVERAGES: bool = false;

    fn combine(left: T, right: T) -> T;

    fn divide(sum: T, _divisor: NonZeroU32) -> T {
        sum
    }
}

/// A half in memory, whose value is an f32.
pub(super) trait Half {
    fn widen(self) -> f32;

    /// Rounds to the nearest, ties to even. A NaN stays one.
    fn narrow(wide: f32) -> Self;
}

macro_rules! integers {
    ($($integer:ty),*) => { $(
        impl Combine<$integer> for Add {
            #[inline(always)]
            fn combine(left: $integer, right: $integer) -> $integer {
                left.wrapping_add(right)
            }
        }

        impl Combine<$integer> for Multiply {
            #[inline(always)]
            fn combine(left: $integer, right: $integer) -> $integer {
                left.wrapping_mul(right)
            }
        }

        impl Combine<$integer> for Minimum {
            #[inline(always)]
            fn combine(left: $integer, right: $integer) -> $integer {
                left.min(right)
            }
        }

        impl Combine<$integer> for Maximum {
            #[inline(always)]
            fn combine(left: $integer, right: $integer) -> $integer {
                left.max(right)
            }
        }
    )* };
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! floats {
    ($($float:ty),*) => { $(
        impl Combine<$float> for Add {
            const AVERAGES: bool = true;

            #[inline(always)]
            fn combine(left: $float, right: $float) -> $float {
                left + right
            }

            #[inline(always)]
            fn divide(sum: $float, divisor: NonZeroU32) -> $float {
                sum / (divisor.get() as $float)
            }
        }

        impl Combine<$float> for Multiply {
            #[inline(always)]
            fn combine(left: $float, right: $float) -> $float {
                left * right
            }
        }

        impl Combine<$float> for Minimum {
            #[inline(always)]
            fn combine(left: $float, right: $float) -> $float {
                // Both orders of comparison give the same number, but for zeros of both signs and for NaN: there
                // they give one of the two each, and `|` of the bits is -0, or a NaN.
                let x = if left < right { left } else { right };
                let y = if right < left { right } else { left };
                <$float>::from_bits(x.to_bits() | y.to_bits())
            }
        }

        impl Combine<$float> for Maximum {
            #[inline(always)]
            fn combine(left: $float, right: $float) -> $float {
                // As for the minimum, with `&` of the bits for +0; which alone could make a number out of a NaN.
                let x = if left > right { left } else { right };
                let y = if right > left { right } else { left };
                let nan = left.is_nan() | right.is_nan();
                let (x, y) = (x.to_bits(), y.to_bits());
                <$float>::from_bits(if nan { x | y } else { x & y })
            }
        }

        impl Combine<Complex<$float>> for Multiply {
            #[inline(always)]
            fn combine(x: Complex<$float>, y: Complex<$float>) -> Complex<$float> {
                Complex::new(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)
            }
        }
    )* };
}

floats!(f32, f64);

// Bits do not care for the type.

impl Combine<u8> for And {
    #[inline(always)]
    fn combine(left: u8, right: u8) -> u8 {
        left & right
    }
}

impl Combine<u8> for Or {
    #[inline(always)]
    fn combine(left: u8, right: u8) -> u8 {
        left | right
    }
}

impl Combine<u8> for Xor {
    #[inline(always)]
    fn combine(left: u8, right: u8) -> u8 {
        left ^ right
    }
}

impl Half for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        // Just below half a unit of what stays, or half of it where that makes an odd number even.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // The carry could take a NaN to infinity, and cutting its tail could do so too.
        let quiet = bits >> 16 | 0x40;
        bf16::from_bits((if wide.is_nan() { quiet } else { rounded }) as u16)
    }
}

impl Half for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        // Not `to_f32`, which asks for the processor's abilities each time.
        self.to_f32_const()
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        Self::from_f32_const(wide)
    }
}
