//! Random numbers that a seed repeats.

use half::bf16;
use num_complex::Complex;

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A seed that differs from run to run, to be printed.
    pub(crate) fn fresh_seed() -> u64 {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.next().to_ne_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    /// A float whose sums round: any sign, exponents far apart, no NaN.
    pub(crate) fn float(&mut self) -> f32 {
        let bits = self.next();
        let mantissa = (bits >> 40) as f32 / 16_777_216.0 + 0.5;
        let exponent = ((bits >> 8) % 25) as i32 - 12;
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        sign * mantissa * 2.0_f32.powi(exponent)
    }
}

/// Types that the tests fill with random values.
pub(crate) trait Sample: raccl::Number {
    fn sample(random: &mut Random) -> Self;

    fn samples(seed: u64, count: usize) -> Vec<Self> {
        let mut random = Random::new(seed);
        (0..count).map(|_| Self::sample(&mut random)).collect()
    }
}

impl Sample for f32 {
    fn sample(random: &mut Random) -> f32 {
        random.float()
    }
}

impl Sample for f64 {
    fn sample(random: &mut Random) -> f64 {
        f64::from(random.float()) * 1.000_000_000_1 + f64::from(random.float()) * 1e-9
    }
}

impl Sample for bf16 {
    fn sample(random: &mut Random) -> bf16 {
        bf16::from_f32(random.float())
    }
}

impl Sample for Complex<f32> {
    fn sample(random: &mut Random) -> Complex<f32> {
        Complex::new(random.float(), random.float())
    }
}

impl Sample for i32 {
    fn sample(random: &mut Random) -> i32 {
        random.next() as i32
    }
}

impl Sample for u64 {
    fn sample(random: &mut Random) -> u64 {
        random.next()
    }
}
