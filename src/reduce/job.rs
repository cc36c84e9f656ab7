//! What a kernel is asked to do.

use std::num::NonZeroU32;
use std::ops::Range;

use super::reducer::{Repr, Source};

/// One fold, or a piece of one.
pub(super) struct Job<'a> {
    pub(super) sources: &'a [Source],
    pub(super) dst: *mut u8,
    pub(super) to: Repr,
    /// Divide the result by this.
    pub(super) divisor: Option<NonZeroU32>,
    /// Which elements, counted in units of the kernel: a complex sum, say, is a real sum of twice as many.
    pub(super) range: Range<usize>,
    /// Write past the cache. Then no source is where the destination is.
    pub(super) stream: bool,
}
