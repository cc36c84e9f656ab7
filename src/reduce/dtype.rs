//! What can be moved and what can be reduced: elements, numbers and their names at run time.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use num_complex::Complex;

/// Anything that can be moved between ranks: plain bytes without padding.
///
/// Every [`bytemuck::Pod`] type is an element, a caller's own structs included.
///
/// ```
/// fn is_element<T: raccl::Element>() {}
/// is_element::<f32>();
/// is_element::<[u64; 4]>();
/// ```
pub trait Element: bytemuck::Pod + Send + Sync {}

impl<T: bytemuck::Pod + Send + Sync> Element for T {}

/// An element that the built-in operations can reduce.
///
/// Sealed: the kernels know exactly the types of [`DType`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a number that raccl can reduce",
    label = "not one of the element types of `raccl::DType`",
    note = "built-in operations take i8 to i64, u8 to u64, f16, bf16, f32, f64, Complex<f32> and Complex<f64>",
    note = "reduce any other plain type with your own function: `raccl::Custom::new(|a, b| ...)`"
)]
pub trait Number: Element + sealed::Sealed {
    /// The name of this type at run time.
    const DTYPE: DType;
}

/// Integers: the numbers with bitwise operations. Their sums and products wrap.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no bitwise operations",
    label = "not an integer",
    note = "`BitAnd`, `BitOr` and `BitXor` are for i8 to i64 and u8 to u64"
)]
pub trait Integer: Number {}

/// Numbers with an order: all but the complex ones.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no minimum or maximum",
    label = "not an ordered number",
    note = "`Min` and `Max` are for integers and real floating-point numbers"
)]
pub trait Ordered: Number {}

/// Numbers that can be divided by the number of ranks: real and complex floating-point numbers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no average",
    label = "not a floating-point or complex number",
    note = "`Avg` is for f16, bf16, f32, f64, Complex<f32> and Complex<f64>; integers have `Sum`"
)]
pub trait Fractional: Number {}

/// The type of an element, named at run time.
///
/// The numeric codes are part of the wire format: they never change.
#[non_exhaustive]
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// `i8`
    I8 = 1,
    /// `i16`
    I16,
    /// `i32`
    I32,
    /// `i64`
    I64,
    /// `u8`
    U8,
    /// `u16`
    U16,
    /// `u32`
    U32,
    /// `u64`
    U64,
    /// IEEE half precision, [`half::f16`]
    F16,
    /// The upper half of an `f32`, [`half::bf16`]
    Bf16,
    /// `f32`
    F32,
    /// `f64`
    F64,
    /// `Complex<f32>`: named, as in C and Rust, by the width of one part
    C32,
    /// `Complex<f64>`
    C64,
}

impl DType {
    /// Every type, in the order of the codes.
    pub const ALL: [DType; 14] = [
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::F16,
        DType::Bf16,
        DType::F32,
        DType::F64,
        DType::C32,
        DType::C64,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::I16 | DType::U16 | DType::F16 | DType::Bf16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 | DType::C32 => 8,
            DType::C64 => 16,
        }
    }

    /// The name by which [`FromStr`] knows it: `i8`, `bf16`, `c32`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::C32 => "c32",
            DType::C64 => "c64",
        }
    }

    /// The code that stands for it on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The type of a code, or `None` when this version knows no such type.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = ParseDTypeError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| ParseDTypeError { name: name.to_owned() })
    }
}

/// A name that is no [`DType`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown element type `{name}`; use one of i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, c32, c64"
)]
pub struct ParseDTypeError {
    name: String,
}

mod sealed {
    /// Keeps [`Number`](super::Number) to the types that the kernels know.
    pub trait Sealed {}
}

macro_rules! numbers {
    ($($type:ty => $dtype:ident: $($class:ident),+;)*) => { $(
        impl sealed::Sealed for $type {}
        impl Number for $type {
            const DTYPE: DType = DType::$dtype;
        }
        $(impl $class for $type {})+
        const _: () = assert!(DType::$dtype.size() == size_of::<$type>());
    )* };
}

numbers! {
    i8 => I8: Integer, Ordered;
    i16 => I16: Integer, Ordered;
    i32 => I32: Integer, Ordered;
    i64 => I64: Integer, Ordered;
    u8 => U8: Integer, Ordered;
    u16 => U16: Integer, Ordered;
    u32 => U32: Integer, Ordered;
    u64 => U64: Integer, Ordered;
    f16 => F16: Ordered, Fractional;
    bf16 => Bf16: Ordered, Fractional;
    f32 => F32: Ordered, Fractional;
    f64 => F64: Ordered, Fractional;
    Complex<f32> => C32: Fractional;
    Complex<f64> => C64: Fractional;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_are_read_back_as_the_type_they_were_written_from() {
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), index + 1, "codes are dense and in order");
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(DType::ALL.len() as u8 + 1), None);
    }

    #[test]
    fn the_error_for_an_unknown_name_shows_it_and_every_known_one() {
        let message = "float".parse::<DType>().unwrap_err().to_string();
        assert!(message.contains("`float`"), "{message}");
        for dtype in DType::ALL {
            assert!(message.contains(dtype.name()), "{dtype} is missing in: {message}");
        }
    }
}
