//! Writing past the cache.
//!
//! A plain store first reads the line that it is going to overwrite. Where an output is too large to stay in
//! the cache, whole lines are written by non-temporal stores instead. On processors without such stores that
//! Rust can name (Arm's hardware recognises streams of whole lines by itself) all stores are plain.

/// Bytes of a cache line, and the alignment that non-temporal stores of every width are content with.
pub(super) const LINE: usize = 64;

/// Outputs of at least this size are written past the cache.
const STREAM_FROM: usize = 2 << 20;

/// Whether an output of this many bytes is better written past the cache.
pub(super) fn pays(output: usize) -> bool {
    cfg!(target_arch = "x86_64") && output >= STREAM_FROM
}

/// Splits `count` elements of `size` bytes at `dst`: how many lie before the first line that starts with an
/// element, and how many of the rest fill whole lines.
#[inline]
pub(super) fn split(dst: *const u8, count: usize, size: usize) -> (usize, usize) {
    let head = dst.addr().wrapping_neg() % LINE;
    if !head.is_multiple_of(size) || head / size >= count {
        return (0, 0);
    }
    let head = head / size;
    let per_line = LINE / size;
    (head, (count - head) / per_line * per_line)
}

/// Makes the stores past the cache visible before all later ones.
#[inline]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE, which has the instruction, is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
}

/// Stores one line past the cache.
///
/// # Safety
///
/// `to` is valid for a write of a line and aligned to one.
#[inline(always)]
pub(super) unsafe fn store_line(line: [u8; LINE], to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_stream_si128};
        // SAFETY: both are 64 plain bytes.
        let parts: [__m128i; 4] = unsafe { std::mem::transmute(line) };
        for (index, part) in parts.into_iter().enumerate() {
            // SAFETY: four parts are one line.
            let to = unsafe { to.cast::<__m128i>().add(index) };
            // SAFETY: writable and aligned by the caller's promise; SSE2 is part of x86-64.
            unsafe { _mm_stream_si128(to, part) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: writable by the caller's promise.
    unsafe {
        to.cast::<[u8; LINE]>().write(line)
    }
}

/// Copies bytes that are a piece of an output of `output` bytes in all.
///
/// # Safety
///
/// `src` is valid for reads and `dst` for writes of `bytes`, and they do not overlap.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize, output: usize) {
    if pays(output) {
        // SAFETY: the caller's promises are the same ones.
        unsafe { copy_past_cache(src, dst, bytes) };
        fence();
    } else {
        // SAFETY: the caller's promise.
        unsafe { dst.copy_from_nonoverlapping(src, bytes) }
    }
}

/// Copies whole lines past the cache; the caller has to [`fence`] when it is done.
///
/// # Safety
///
/// As for [`copy`].
pub(super) unsafe fn copy_past_cache(src: *const u8, dst: *mut u8, bytes: usize) {
    let (head, body) = split(dst, bytes, 1);
    // SAFETY: the caller's promise; `head` is at most `bytes`.
    unsafe { dst.copy_from_nonoverlapping(src, head) };
    for at in (head..head + body).step_by(LINE) {
        // SAFETY: `at` is inside the caller's bytes.
        let from = unsafe { src.add(at) };
        // SAFETY: a whole line from `at` on is inside the caller's bytes; arrays of bytes have no alignment.
        let line = unsafe { from.cast::<[u8; LINE]>().read() };
        // SAFETY: as for `from`.
        let to = unsafe { dst.add(at) };
        // SAFETY: `split` starts the body at a line.
        unsafe { store_line(line, to) }
    }
    let done = head + body;
    // SAFETY: `done` is at most `bytes`.
    let from = unsafe { src.add(done) };
    // SAFETY: as above.
    let to = unsafe { dst.add(done) };
    // SAFETY: the caller's promise, for what is left.
    unsafe { to.copy_from_nonoverlapping(from, bytes - done) }
}
