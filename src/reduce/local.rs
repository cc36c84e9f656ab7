//! Reductions without a group.

use std::num::NonZeroU32;

use super::dtype::Element;
use super::operation::Operation;
use super::reducer::{Repr, Source};

/// Reduces slices of this process's own memory, as MPI's `reduce_local` does.
///
/// `output` is what an all-reduce over `inputs.len()` ranks gives where rank `i` passes `inputs[i]`: the same
/// bits, on a group whose order is the fold tree. Good for checking what a distributed program computes, and
/// for reducing over the devices of one process first.
///
/// ```
/// use raccl::{Avg, Sum, reduce_local};
///
/// let mut out = [0.0f32; 2];
/// reduce_local(Sum, &[&[1.0, 2.0], &[10.0, 20.0], &[100.0, 200.0]], &mut out);
/// assert_eq!(out, [111.0, 222.0]);
/// reduce_local(Avg, &[&[1.0, 2.0], &[3.0, 4.0]], &mut out);
/// assert_eq!(out, [2.0, 3.0]);
/// ```
///
/// # Panics
///
/// If there is no input, or an input is not as long as the output.
pub fn reduce_local<T: Element>(operation: impl Operation<T>, inputs: &[&[T]], output: &mut [T]) {
    assert!(!inputs.is_empty(), "reduce_local needs at least one input");
    for (index, input) in inputs.iter().enumerate() {
        assert!(
            input.len() == output.len(),
            "input {index} of reduce_local has {} elements, the output {}",
            input.len(),
            output.len()
        );
    }
    let sources: Vec<Source> = inputs.iter().map(|input| Source::raw(input.as_ptr().cast())).collect();
    // More inputs than a `u32` counts do not fit into memory beside each other: a slice takes 16 bytes.
    let ranks = u32::try_from(inputs.len()).ok().and_then(NonZeroU32::new);
    // SAFETY: the slices are valid for their length, which is checked; the borrows keep the output apart from
    // the inputs and everything still.
    unsafe {
        operation.reducer().fold(&sources, output.as_mut_ptr().cast(), Repr::Raw, ranks, output.len());
    }
}
