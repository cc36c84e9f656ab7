//! Vectors of 128 bits, as every 64-bit Arm processor has them.

use std::arch::aarch64::*;

use super::formats::Format;
use super::job::Job;
use super::registers;
use super::vector::{Lanewise, Vector};

// SAFETY: each intrinsic accesses as much memory as the trait says.
unsafe impl Vector for float32x4_t {
    const LANES: usize = 4;

    #[target_feature(enable = "neon")]
    unsafe fn run<F: Format<Vector = Self>, O: Lanewise>(job: &Job<'_>) {
        // SAFETY: the caller's promises are the same ones; the instruction set is enabled here.
        unsafe { registers::run::<F, O>(job) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(value: f32) -> Self {
        vdupq_n_f32(value)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the caller's promise.
        unsafe { vld1q_f32(from) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the caller's promise.
        unsafe { vst1q_f32(to, self) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn stream(self, to: *mut f32) {
        // SAFETY: the caller promises more than `store` asks.
        unsafe { self.store(to) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(self, other: Self) -> Self {
        vaddq_f32(self, other)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mul(self, other: Self) -> Self {
        vmulq_f32(self, other)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn div(self, other: Self) -> Self {
        vdivq_f32(self, other)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn minimum(self, other: Self) -> Self {
        // The instruction propagates NaN and orders zeros.
        vminq_f32(self, other)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn maximum(self, other: Self) -> Self {
        vmaxq_f32(self, other)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_f16(from: *const u8) -> [Self; 2] {
        // SAFETY: readable by the caller's promise; a load of bytes has no alignment.
        let halves = unsafe { vld1q_u8(from) };
        let halves = vreinterpretq_f16_u8(halves);
        [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store_f16([low, high]: [Self; 2], to: *mut u8) {
        let halves = vcvt_high_f16_f32(vcvt_f16_f32(low), high);
        let bytes = vreinterpretq_u8_f16(halves);
        // SAFETY: writable by the caller's promise; a store of bytes has no alignment.
        unsafe { vst1q_u8(to, bytes) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn stream_f16(pair: [Self; 2], to: *mut u8) {
        // SAFETY: the caller promises more than `store_f16` asks.
        unsafe { Self::store_f16(pair, to) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_bf16(from: *const u8) -> [Self; 2] {
        // SAFETY: readable by the caller's promise; a load of bytes has no alignment.
        let halves = unsafe { vld1q_u8(from) };
        let halves = vreinterpretq_u16_u8(halves);
        [
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(halves))),
            vreinterpretq_f32_u32(vshll_high_n_u16::<16>(halves)),
        ]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store_bf16([low, high]: [Self; 2], to: *mut u8) {
        let halves = vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(round_bf16(low)), round_bf16(high));
        let bytes = vreinterpretq_u8_u16(halves);
        // SAFETY: writable by the caller's promise; a store of bytes has no alignment.
        unsafe { vst1q_u8(to, bytes) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn stream_bf16(pair: [Self; 2], to: *mut u8) {
        // SAFETY: the caller promises more than `store_bf16` asks.
        unsafe { Self::store_bf16(pair, to) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_spread(from: *const f32) -> [Self; 2] {
        // The lanes of `load_bf16` are in the order of memory.
        // SAFETY: readable by the caller's promise.
        let low = unsafe { vld1q_f32(from) };
        // SAFETY: two vectors are readable by the caller's promise.
        let from = unsafe { from.add(Self::LANES) };
        // SAFETY: as above.
        let high = unsafe { vld1q_f32(from) };
        [low, high]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn gather(pair: [Self; 2]) -> [Self; 2] {
        pair
    }
}

/// Rounds to nearest even in the upper 16 bits of each lane, as the scalar definition does.
#[inline]
#[target_feature(enable = "neon")]
fn round_bf16(wide: float32x4_t) -> uint32x4_t {
    let bits = vreinterpretq_u32_f32(wide);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
    vbslq_u32(vceqq_f32(wide, wide), rounded, quiet)
}
