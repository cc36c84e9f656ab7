//! What a reduction must give, to the last bit, written from the definition of the fold tree and not from the library.

use half::bf16;
use num_complex::Complex;

/// Combines values of all ranks: with `q` the largest power of two not above their number `p` and `r = p - q`, leaf `i` is
/// `x[2i] + x[2i+1]` for `i < r` and `x[i + r]` otherwise; then neighbours combine at strides 1, 2, 4.
pub(crate) fn tree<V: Copy>(values: &[V], combine: impl Fn(V, V) -> V) -> V {
    let mut leaves = 1;
    while leaves * 2 <= values.len() {
        leaves *= 2;
    }
    let pairs = values.len() - leaves;
    let mut nodes: Vec<V> = (0..leaves)
        .map(|leaf| match leaf < pairs {
            true => combine(values[2 * leaf], values[2 * leaf + 1]),
            false => values[leaf + pairs],
        })
        .collect();
    while nodes.len() > 1 {
        nodes = nodes.chunks(2).map(|pair| combine(pair[0], pair[1])).collect();
    }
    nodes[0]
}

/// A type with the sum that the library promises for it.
pub(crate) trait Summed: Copy {
    /// The sum over ranks of one element.
    fn sum(values: &[Self]) -> Self;

    /// The mean over ranks of one element.
    fn mean(values: &[Self]) -> Self;
}

impl Summed for f32 {
    fn sum(values: &[f32]) -> f32 {
        tree(values, |a, b| a + b)
    }

    fn mean(values: &[f32]) -> f32 {
        f32::sum(values) / values.len() as f32
    }
}

impl Summed for f64 {
    fn sum(values: &[f64]) -> f64 {
        tree(values, |a, b| a + b)
    }

    fn mean(values: &[f64]) -> f64 {
        f64::sum(values) / values.len() as f64
    }
}

/// Accumulated in f32, rounded once.
impl Summed for bf16 {
    fn sum(values: &[bf16]) -> bf16 {
        bf16::from_f32(widened(values))
    }

    fn mean(values: &[bf16]) -> bf16 {
        bf16::from_f32(widened(values) / values.len() as f32)
    }
}

fn widened(values: &[bf16]) -> f32 {
    let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
    f32::sum(&values)
}

impl Summed for Complex<f32> {
    fn sum(values: &[Complex<f32>]) -> Complex<f32> {
        tree(values, |a, b| Complex::new(a.re + b.re, a.im + b.im))
    }

    fn mean(values: &[Complex<f32>]) -> Complex<f32> {
        let sum = Complex::<f32>::sum(values);
        Complex::new(sum.re / values.len() as f32, sum.im / values.len() as f32)
    }
}

/// Applies a reduction of one element to all elements of all ranks' buffers.
pub(crate) fn columns<V: Copy>(inputs: &[Vec<V>], reduce: impl Fn(&[V]) -> V) -> Vec<V> {
    let mut column = Vec::with_capacity(inputs.len());
    (0..inputs[0].len())
        .map(|index| {
            column.clear();
            column.extend(inputs.iter().map(|input| input[index]));
            reduce(&column)
        })
        .collect()
}
