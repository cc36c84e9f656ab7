//! Which kernel carries out an operation, and on which instruction set.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::OnceLock;

use bytemuck::Pod;
use half::{bf16, f16};
use num_complex::Complex;

use super::arithmetic::{Add, And, Combine, Half, Maximum, Minimum, Multiply, Or, Xor};
use super::blocks::{self, Loops};
use super::dtype::DType;
use super::formats::{Bf16s, F16s, Format, Singles};
use super::job::Job;
use super::loops::{self, Compiled};
use super::operation::ReduceOp;
use super::reducer::{Repr, Source};
use super::registers;
use super::stream;
use super::vector::Vector;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// What every processor of the target has.
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Advanced SIMD.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// Every level that this processor can run, the best one last.
    pub(super) fn available() -> Vec<Level> {
        let mut levels = vec![Level::Baseline];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("f16c") {
                levels.push(Level::Avx2);
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    levels.push(Level::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        levels.push(Level::Neon);
        levels
    }

    /// The best level that this processor can run.
    pub(super) fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Level::available().last().copied().unwrap_or(Level::Baseline))
    }
}

/// A kernel, ready to be called.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    body: Body,
    /// Units of the kernel in an element: a complex sum, say, is a real sum of two.
    units: usize,
}

#[derive(Clone, Copy)]
enum Body {
    /// And the bytes of a raw element; values are f32.
    Registers(unsafe fn(&Job<'_>), usize),
    Blocks(&'static Loops),
}

impl Kernel {
    /// # Safety
    ///
    /// As for [`Reducer::fold`](super::Reducer::fold), on a processor that has the kernel's instruction set.
    pub(super) unsafe fn fold(
        self,
        sources: &[Source],
        dst: *mut u8,
        to: Repr,
        divisor: Option<NonZeroU32>,
        count: usize,
        output: usize,
    ) {
        assert!(sources.len() <= registers::MAX_SOURCES, "{} sources in one fold", sources.len());
        let count = count * self.units;
        let run = |range: Range<usize>, stream: bool| {
            let job = Job { sources, dst, to, divisor, range, stream };
            match self.body {
                // SAFETY: the caller's promises are the same ones; streams start where they may.
                Body::Registers(run, _) => unsafe { run(&job) },
                // SAFETY: as above.
                Body::Blocks(loops) => unsafe { blocks::run(loops, &job) },
            }
        };
        // What was just read for the fold is in the cache already and only has to be changed there.
        let in_place = || sources.iter().any(|source| source.ptr == dst.cast_const());
        if !stream::pays(output) || in_place() {
            return run(0..count, false);
        }
        let (head, body) = stream::split(dst, count, self.size(to));
        run(0..head, false);
        run(head..head + body, true);
        stream::fence();
        run(head + body..count, false);
    }

    /// Bytes of a unit.
    fn size(self, repr: Repr) -> usize {
        match self.body {
            Body::Registers(_, raw) if repr == Repr::Raw => raw,
            Body::Registers(..) => size_of::<f32>(),
            Body::Blocks(loops) => loops.size(repr),
        }
    }

    fn units(self, units: usize) -> Self {
        Self { units, ..self }
    }
}

/// The kernel of an operation for an instruction set that the processor has, or `None` where the operation
/// means nothing for the type.
pub(super) fn kernel(level: Level, dtype: DType, op: ReduceOp) -> Option<Kernel> {
    match level {
        Level::Baseline => in_blocks::<loops::Baseline>(dtype, op),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => in_registers::<std::arch::x86_64::__m256>(dtype, op)
            .or_else(|| in_blocks::<loops::Avx2>(dtype, op)),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => in_registers::<std::arch::x86_64::__m512>(dtype, op)
            .or_else(|| in_blocks::<loops::Avx512>(dtype, op)),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => in_registers::<std::arch::aarch64::float32x4_t>(dtype, op)
            .or_else(|| in_blocks::<loops::Baseline>(dtype, op)),
    }
}

/// The kernel in registers, which there is for what is computed in f32.
fn in_registers<V: Vector>(dtype: DType, op: ReduceOp) -> Option<Kernel> {
    match dtype {
        DType::F16 => in_registers_of::<F16s<V>>(op),
        DType::Bf16 => in_registers_of::<Bf16s<V>>(op),
        DType::F32 => in_registers_of::<Singles<V>>(op),
        // Part by part.
        DType::C32 if matches!(op, ReduceOp::Sum | ReduceOp::Avg) => {
            in_registers_of::<Singles<V>>(op).map(|kernel| kernel.units(2))
        }
        _ => None,
    }
}

fn in_registers_of<F: Format>(op: ReduceOp) -> Option<Kernel> {
    let run = match op {
        ReduceOp::Sum | ReduceOp::Avg => F::Vector::run::<F, Add>,
        ReduceOp::Prod => F::Vector::run::<F, Multiply>,
        ReduceOp::Min => F::Vector::run::<F, Minimum>,
        ReduceOp::Max => F::Vector::run::<F, Maximum>,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::Custom => return None,
    };
    Some(Kernel { body: Body::Registers(run, F::SIZE), units: 1 })
}

/// The kernel in blocks, which there is for every operation.
fn in_blocks<I: Compiled>(dtype: DType, op: ReduceOp) -> Option<Kernel> {
    match dtype {
        DType::I8 => signed::<I, i8, u8>(op),
        DType::I16 => signed::<I, i16, u16>(op),
        DType::I32 => signed::<I, i32, u32>(op),
        DType::I64 => signed::<I, i64, u64>(op),
        DType::U8 => unsigned::<I, u8>(op),
        DType::U16 => unsigned::<I, u16>(op),
        DType::U32 => unsigned::<I, u32>(op),
        DType::U64 => unsigned::<I, u64>(op),
        DType::F16 => half::<I, f16>(op),
        DType::Bf16 => half::<I, bf16>(op),
        DType::F32 => real::<I, f32>(op),
        DType::F64 => real::<I, f64>(op),
        DType::C32 => complex::<I, f32>(op),
        DType::C64 => complex::<I, f64>(op),
    }
}

fn signed<I: Compiled, T: Pod, U: Pod>(op: ReduceOp) -> Option<Kernel>
where
    Minimum: Combine<T> + Combine<U>,
    Maximum: Combine<T> + Combine<U>,
    Add: Combine<U>,
    Multiply: Combine<U>,
{
    match op {
        ReduceOp::Min => blocks_of(I::plain::<T, Minimum>()),
        ReduceOp::Max => blocks_of(I::plain::<T, Maximum>()),
        // The others do not care for the sign.
        _ => unsigned::<I, U>(op),
    }
}

fn unsigned<I: Compiled, T: Pod>(op: ReduceOp) -> Option<Kernel>
where
    Add: Combine<T>,
    Multiply: Combine<T>,
    Minimum: Combine<T>,
    Maximum: Combine<T>,
{
    let bits = |kernel: Option<Kernel>| kernel.map(|kernel| kernel.units(size_of::<T>()));
    match op {
        ReduceOp::Sum => blocks_of(I::plain::<T, Add>()),
        ReduceOp::Prod => blocks_of(I::plain::<T, Multiply>()),
        ReduceOp::Min => blocks_of(I::plain::<T, Minimum>()),
        ReduceOp::Max => blocks_of(I::plain::<T, Maximum>()),
        ReduceOp::BitAnd => bits(blocks_of(I::plain::<u8, And>())),
        ReduceOp::BitOr => bits(blocks_of(I::plain::<u8, Or>())),
        ReduceOp::BitXor => bits(blocks_of(I::plain::<u8, Xor>())),
        ReduceOp::Avg | ReduceOp::Custom => None,
    }
}

fn half<I: Compiled, H: Half + Pod>(op: ReduceOp) -> Option<Kernel> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => blocks_of(I::halves::<H, Add>()),
        ReduceOp::Prod => blocks_of(I::halves::<H, Multiply>()),
        ReduceOp::Min => blocks_of(I::halves::<H, Minimum>()),
        ReduceOp::Max => blocks_of(I::halves::<H, Maximum>()),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::Custom => None,
    }
}

fn real<I: Compiled, T: Pod>(op: ReduceOp) -> Option<Kernel>
where
    Add: Combine<T>,
    Multiply: Combine<T>,
    Minimum: Combine<T>,
    Maximum: Combine<T>,
{
    match op {
        ReduceOp::Sum | ReduceOp::Avg => blocks_of(I::plain::<T, Add>()),
        ReduceOp::Prod => blocks_of(I::plain::<T, Multiply>()),
        ReduceOp::Min => blocks_of(I::plain::<T, Minimum>()),
        ReduceOp::Max => blocks_of(I::plain::<T, Maximum>()),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::Custom => None,
    }
}

fn complex<I: Compiled, T: Pod>(op: ReduceOp) -> Option<Kernel>
where
    Complex<T>: Pod,
    Add: Combine<T>,
    Multiply: Combine<Complex<T>>,
{
    match op {
        // Part by part.
        ReduceOp::Sum | ReduceOp::Avg => blocks_of(I::plain::<T, Add>()).map(|kernel| kernel.units(2)),
        ReduceOp::Prod => blocks_of(I::plain::<Complex<T>, Multiply>()),
        _ => None,
    }
}

fn blocks_of(loops: &'static Loops) -> Option<Kernel> {
    Some(Kernel { body: Body::Blocks(loops), units: 1 })
}
