//! Vectors of 256 bits, as x86-64 processors with AVX2 and F16C have them.

use std::arch::x86_64::*;

use super::formats::Format;
use super::job::Job;
use super::registers;
use super::vector::{Lanewise, Vector};

// SAFETY: each intrinsic accesses as much memory as the trait says.
unsafe impl Vector for __m256 {
    const LANES: usize = 8;

    #[target_feature(enable = "avx2,f16c")]
    unsafe fn run<F: Format<Vector = Self>, O: Lanewise>(job: &Job<'_>) {
        // SAFETY: the caller's promises are the same ones; the instruction set is enabled here.
        unsafe { registers::run::<F, O>(job) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat(value: f32) -> Self {
        _mm256_set1_ps(value)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the caller's promise.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: writable and aligned by the caller's promise.
        unsafe { _mm256_stream_ps(to, self) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add(self, other: Self) -> Self {
        _mm256_add_ps(self, other)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn mul(self, other: Self) -> Self {
        _mm256_mul_ps(self, other)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn div(self, other: Self) -> Self {
        _mm256_div_ps(self, other)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn minimum(self, other: Self) -> Self {
        // See the scalar definition: the two orders differ for zeros and for NaN only.
        _mm256_or_ps(_mm256_min_ps(self, other), _mm256_min_ps(other, self))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn maximum(self, other: Self) -> Self {
        let (x, y) = (_mm256_max_ps(self, other), _mm256_max_ps(other, self));
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self, other);
        _mm256_blendv_ps(_mm256_and_ps(x, y), _mm256_or_ps(x, y), nan)
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load_f16(from: *const u8) -> [Self; 2] {
        // SAFETY: readable by the caller's promise.
        let halves = unsafe { _mm256_loadu_si256(from.cast()) };
        let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn store_f16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_f16(pair);
        // SAFETY: writable by the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn stream_f16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_f16(pair);
        // SAFETY: writable and aligned by the caller's promise.
        unsafe { _mm256_stream_si256(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_bf16(from: *const u8) -> [Self; 2] {
        // SAFETY: readable by the caller's promise.
        let halves = unsafe { _mm256_loadu_si256(from.cast()) };
        let even = _mm256_slli_epi32::<16>(halves);
        let odd = _mm256_and_si256(halves, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store_bf16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_bf16(pair);
        // SAFETY: writable by the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn stream_bf16(pair: [Self; 2], to: *mut u8) {
        let halves = narrow_bf16(pair);
        // SAFETY: writable and aligned by the caller's promise.
        unsafe { _mm256_stream_si256(to.cast(), halves) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_spread(from: *const f32) -> [Self; 2] {
        // SAFETY: readable by the caller's promise.
        let low = unsafe { _mm256_loadu_ps(from) };
        // SAFETY: two vectors are readable by the caller's promise.
        let from = unsafe { from.add(Self::LANES) };
        // SAFETY: as above.
        let high = unsafe { _mm256_loadu_ps(from) };
        // In each 128 bits two lanes of the low vector, then two of the high one.
        let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(low, high));
        let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
        [
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(even)),
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(odd)),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn gather([even, odd]: [Self; 2]) -> [Self; 2] {
        // Lanes 0, 1, 4, 5 of each, and 2, 3, 6, 7.
        let (outer, inner) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
        [_mm256_permute2f128_ps::<0x20>(outer, inner), _mm256_permute2f128_ps::<0x31>(outer, inner)]
    }
}

/// Rounds to nearest even. The instruction keeps denormals whatever the mode of the processor.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_f16([low, high]: [__m256; 2]) -> __m256i {
    let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
    let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
    _mm256_set_m128i(high, low)
}

#[inline]
#[target_feature(enable = "avx2")]
fn narrow_bf16([even, odd]: [__m256; 2]) -> __m256i {
    let even = _mm256_srli_epi32::<16>(round_bf16(even));
    _mm256_blend_epi16::<0b1010_1010>(even, round_bf16(odd))
}

/// Rounds to nearest even in the upper 16 bits of each lane, as the scalar definition does.
#[inline]
#[target_feature(enable = "avx2")]
fn round_bf16(wide: __m256) -> __m256i {
    let bits = _mm256_castps_si256(wide);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide));
    _mm256_blendv_epi8(rounded, quiet, nan)
}
