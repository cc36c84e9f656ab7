//! Vectors of 512 bits, as x86-64 processors with AVX-512 F, BW, DQ and VL have them.

use std::arch::x86_64::*;

use super::formats::{Buffer, Format};
use super::job::Job;
use super::registers;
use super::vector::{Lanewise, Vector};

/// Odd 16-bit lanes.
const ODD: __mmask32 = 0xaaaa_aaaa;

// SAFETY: each intrinsic accesses as much memory as the trait says.
unsafe impl Vector for __m512 {
    const LANES: usize = 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
    unsafe fn run<F: Format<Vector = Self>, O: Lanewise>(job: &Job<'_>) {
        // SAFETY: the caller's promises are the same ones; the instruction set is enabled here.
        unsafe { registers::run::<F, O>(job) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(value: f32) -> Self {
        _mm512_set1_ps(value)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the caller's promise.
        unsafe { _mm512_storeu_ps(to, self) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: writable and aligned by the caller's promise.
        unsafe { _mm512_stream_ps(to, self) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(self, other: Self) -> Self {
        _mm512_add_ps(self, other)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(self, other: Self) -> Self {
        _mm512_mul_ps(self, other)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn div(self, other: Self) -> Self {
        _mm512_div_ps(self, other)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn minimum(self, other: Self) -> Self {
        // See the scalar definition: the two orders differ for zeros and for NaN only.
        _mm512_or_ps(_mm512_min_ps(self, other), _mm512_min_ps(other, self))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn maximum(self, other: Self) -> Self {
        let (x, y) = (_mm512_max_ps(self, other), _mm512_max_ps(other, self));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self, other);
        _mm512_mask_or_ps(_mm512_and_ps(x, y), nan, x, y)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f16(from: *const u8) -> [Self; 2] {
        // SAFETY: readable by the caller's promise.
        let halves = unsafe { _mm512_loadu_si512(from.cast()) };
        let (low, high) = (_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves));
        [_mm512_cvtph_ps(low), _mm512_cvtph_ps(high)]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_f16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_f16(pair);
        // SAFETY: writable by the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn stream_f16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_f16(pair);
        // SAFETY: writable and aligned by the caller's promise.
        unsafe { _mm512_stream_si512(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bf16(from: *const u8) -> [Self; 2] {
        // SAFETY: readable by the caller's promise.
        let halves = unsafe { _mm512_loadu_si512(from.cast()) };
        let even = _mm512_slli_epi32::<16>(halves);
        let odd = _mm512_and_si512(halves, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn store_bf16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_bf16(pair);
        // SAFETY: writable by the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn stream_bf16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_bf16(pair);
        // SAFETY: writable and aligned by the caller's promise.
        unsafe { _mm512_stream_si512(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_spread(from: *const f32) -> [Self; 2] {
        // SAFETY: readable by the caller's promise.
        let low = unsafe { _mm512_loadu_ps(from) };
        // SAFETY: two vectors are readable by the caller's promise.
        let from = unsafe { from.add(Self::LANES) };
        // SAFETY: as above.
        let high = unsafe { _mm512_loadu_ps(from) };
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn gather([even, odd]: [Self; 2]) -> [Self; 2] {
        let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        [_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)]
    }

    // By masks: what is written in small pieces cannot be read back as a whole before it has reached the cache.

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn fill(buffer: &mut Buffer, from: *const u8, bytes: usize) {
        for (line, out) in buffer.0.chunks_exact_mut(LINE).enumerate() {
            let from = from.wrapping_add(line * LINE).cast();
            // SAFETY: of the line, only bytes that the caller promises are read.
            let value = unsafe { _mm512_maskz_loadu_epi8(first(bytes.saturating_sub(line * LINE)), from) };
            // SAFETY: a line of the buffer.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), value) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn drain(buffer: &Buffer, to: *mut u8, bytes: usize) {
        for (line, value) in buffer.0.chunks_exact(LINE).enumerate() {
            let to = to.wrapping_add(line * LINE).cast();
            // SAFETY: a line of the buffer.
            let value = unsafe { _mm512_loadu_si512(value.as_ptr().cast()) };
            // SAFETY: of the line, only bytes that the caller promises are written.
            unsafe { _mm512_mask_storeu_epi8(to, first(bytes.saturating_sub(line * LINE)), value) }
        }
    }
}

/// Bytes of a vector.
const LINE: usize = 64;

/// The mask of the first lanes, of all if there are fewer.
fn first(lanes: usize) -> __mmask64 {
    if lanes < LINE { (1 << lanes) - 1 } else { !0 }
}

/// Rounds to nearest even. The instruction keeps denormals whatever the mode of the processor.
#[inline]
#[target_feature(enable = "avx512f")]
fn narrow_f16([low, high]: [__m512; 2]) -> __m512i {
    let low = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
    let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// Rounds to nearest even, as the scalar definition does; not by the instruction for it, which flushes denormals.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn narrow_bf16([even, odd]: [__m512; 2]) -> __m512i {
    let (even, odd) = (settle_nan(even), settle_nan(odd));
    // The halves that stay, and those that are cut off, of all values in order.
    let upper = _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(even), ODD, odd);
    let lower = _mm512_mask_mov_epi16(even, ODD, _mm512_slli_epi32::<16>(odd));
    // Up when what is cut off is more than half a unit, or half of one and `upper` is odd.
    let odd = _mm512_and_si512(upper, _mm512_set1_epi16(1));
    let up = _mm512_cmpgt_epu16_mask(_mm512_adds_epu16(lower, odd), _mm512_set1_epi16(i16::MIN));
    _mm512_mask_add_epi16(upper, up, upper, _mm512_set1_epi16(1))
}

/// Makes every NaN the one from which rounding carries nothing into the sign.
#[inline]
#[target_feature(enable = "avx512f")]
fn settle_nan(value: __m512) -> __m512i {
    // For quiet and signalling NaN "the default NaN", for all else "as it was".
    let table = _mm512_set1_epi32(0x33);
    _mm512_castps_si512(_mm512_fixupimm_ps::<0>(value, value, table))
}
