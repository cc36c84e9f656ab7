//! The fold as it is defined.

use std::num::NonZeroU32;

use half::{bf16, f16};
use num_complex::Complex;

use super::super::{DType, ReduceOp, Repr};

/// A number as the oracle computes with it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Signed(i64),
    Unsigned(u64),
    Single(f32),
    Double(f64),
    ComplexSingle(Complex<f32>),
    ComplexDouble(Complex<f64>),
}

/// The fold as it is defined, one element at a time.
pub(super) fn oracle(dtype: DType, op: ReduceOp, values: &[Value], finish: Option<NonZeroU32>) -> Value {
    let n = values.len();
    let q = (0..).map(|k| 1 << k).take_while(|q| *q <= n).last().unwrap();
    let r = n - q;
    let mut nodes: Vec<Value> = (0..q)
        .map(|i| if i < r { combined(dtype, op, values[2 * i], values[2 * i + 1]) } else { values[i + r] })
        .collect();
    while nodes.len() > 1 {
        nodes = nodes.chunks(2).map(|pair| combined(dtype, op, pair[0], pair[1])).collect();
    }
    match finish.filter(|_| op == ReduceOp::Avg) {
        Some(ranks) => divided(nodes[0], ranks.get()),
        None => nodes[0],
    }
}

fn combined(dtype: DType, op: ReduceOp, left: Value, right: Value) -> Value {
    use Value::*;
    match (left, right) {
        (Signed(a), Signed(b)) => {
            let wide = match op {
                ReduceOp::Sum => a.wrapping_add(b),
                ReduceOp::Prod => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::BitAnd => a & b,
                ReduceOp::BitOr => a | b,
                ReduceOp::BitXor => a ^ b,
                _ => unreachable!(),
            };
            Signed(match dtype {
                DType::I8 => wide as i8 as i64,
                DType::I16 => wide as i16 as i64,
                DType::I32 => wide as i32 as i64,
                _ => wide,
            })
        }
        (Unsigned(a), Unsigned(b)) => {
            let wide = match op {
                ReduceOp::Sum => a.wrapping_add(b),
                ReduceOp::Prod => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::BitAnd => a & b,
                ReduceOp::BitOr => a | b,
                ReduceOp::BitXor => a ^ b,
                _ => unreachable!(),
            };
            let bits = 8 * dtype.size();
            Unsigned(if bits < 64 { wide & ((1 << bits) - 1) } else { wide })
        }
        (Single(a), Single(b)) => Single(match op {
            ReduceOp::Sum | ReduceOp::Avg => a + b,
            ReduceOp::Prod => a * b,
            ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
            ReduceOp::Min => {
                if a.total_cmp(&b).is_lt() {
                    a
                } else {
                    b
                }
            }
            ReduceOp::Max => {
                if a.total_cmp(&b).is_gt() {
                    a
                } else {
                    b
                }
            }
            _ => unreachable!(),
        }),
        (Double(a), Double(b)) => Double(match op {
            ReduceOp::Sum | ReduceOp::Avg => a + b,
            ReduceOp::Prod => a * b,
            ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
            ReduceOp::Min => {
                if a.total_cmp(&b).is_lt() {
                    a
                } else {
                    b
                }
            }
            ReduceOp::Max => {
                if a.total_cmp(&b).is_gt() {
                    a
                } else {
                    b
                }
            }
            _ => unreachable!(),
        }),
        (ComplexSingle(a), ComplexSingle(b)) => ComplexSingle(match op {
            ReduceOp::Sum | ReduceOp::Avg => Complex::new(a.re + b.re, a.im + b.im),
            ReduceOp::Prod => Complex::new(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re),
            _ => unreachable!(),
        }),
        (ComplexDouble(a), ComplexDouble(b)) => ComplexDouble(match op {
            ReduceOp::Sum | ReduceOp::Avg => Complex::new(a.re + b.re, a.im + b.im),
            ReduceOp::Prod => Complex::new(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re),
            _ => unreachable!(),
        }),
        _ => unreachable!("values of one type"),
    }
}

fn divided(value: Value, ranks: u32) -> Value {
    let (single, double) = (ranks as f32, f64::from(ranks));
    match value {
        Value::Single(x) => Value::Single(x / single),
        Value::Double(x) => Value::Double(x / double),
        Value::ComplexSingle(z) => Value::ComplexSingle(Complex::new(z.re / single, z.im / single)),
        Value::ComplexDouble(z) => Value::ComplexDouble(Complex::new(z.re / double, z.im / double)),
        Value::Signed(_) | Value::Unsigned(_) => unreachable!("integers have no averages"),
    }
}

pub(super) fn read(dtype: DType, repr: Repr, bytes: &[u8]) -> Value {
    fn pod<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> T {
        bytemuck::pod_read_unaligned(bytes)
    }
    match dtype {
        DType::I8 => Value::Signed(pod::<i8>(bytes).into()),
        DType::I16 => Value::Signed(pod::<i16>(bytes).into()),
        DType::I32 => Value::Signed(pod::<i32>(bytes).into()),
        DType::I64 => Value::Signed(pod(bytes)),
        DType::U8 => Value::Unsigned(pod::<u8>(bytes).into()),
        DType::U16 => Value::Unsigned(pod::<u16>(bytes).into()),
        DType::U32 => Value::Unsigned(pod::<u32>(bytes).into()),
        DType::U64 => Value::Unsigned(pod(bytes)),
        DType::F16 if repr == Repr::Raw => Value::Single(pod::<f16>(bytes).to_f32()),
        DType::Bf16 if repr == Repr::Raw => Value::Single(pod::<bf16>(bytes).to_f32()),
        DType::F16 | DType::Bf16 | DType::F32 => Value::Single(pod(bytes)),
        DType::F64 => Value::Double(pod(bytes)),
        DType::C32 => Value::ComplexSingle(pod(bytes)),
        DType::C64 => Value::ComplexDouble(pod(bytes)),
    }
}

/// Whether the bytes of one element are those of the value, or a NaN where the value has one.
pub(super) fn is(dtype: DType, repr: Repr, bytes: &[u8], expected: Value) -> bool {
    fn single(got: f32, expected: f32) -> bool {
        got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
    }
    fn double(got: f64, expected: f64) -> bool {
        got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
    }
    match (read(dtype, repr, bytes), expected) {
        (Value::Signed(a), Value::Signed(b)) => a == b,
        (Value::Unsigned(a), Value::Unsigned(b)) => a == b,
        (Value::Single(a), Value::Single(b)) => {
            let rounded = match dtype {
                DType::F16 if repr == Repr::Raw => f16::from_f32(b).to_f32(),
                DType::Bf16 if repr == Repr::Raw => bf16::from_f32(b).to_f32(),
                _ => b,
            };
            single(a, rounded)
        }
        (Value::Double(a), Value::Double(b)) => double(a, b),
        (Value::ComplexSingle(a), Value::ComplexSingle(b)) => single(a.re, b.re) && single(a.im, b.im),
        (Value::ComplexDouble(a), Value::ComplexDouble(b)) => double(a.re, b.re) && double(a.im, b.im),
        _ => false,
    }
}
