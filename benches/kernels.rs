//! Folds beside copies of the same traffic, in GB/s of bytes read plus bytes written.
//!
//! `cargo bench --bench kernels`, or `cargo bench --bench kernels -- '2_sources/.*/67108864'` for one size.
//!
//! `memcpy` is the platform's copy; `copy` is the library's own, a fold of one source, which writes past the cache
//! what does not fit into it. Copies read as much as they write; a fold of n sources writes one byte for n that it
//! reads.

// The room has no public door to partial results and single instruction sets, so it is compiled into the benchmark.
#![allow(dead_code, unused_imports, unreachable_pub, missing_docs)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

#[path = "../src/reduce/mod.rs"]
mod reduce;

use reduce::{DType, ReduceOp, Reducer, Repr, Source};

/// Bytes of the result.
const SIZES: [usize; 6] = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20];

/// Memory that starts at a page, as large buffers of programs do.
struct Pages {
    memory: Vec<u8>,
    start: usize,
}

impl Pages {
    const PAGE: usize = 4096;

    /// Small f32 and halves, so that nothing overflows and no denormal slows down the processor.
    fn new(bytes: usize) -> Self {
        let memory: Vec<u8> = [0x80, 0x3f].into_iter().cycle().take(bytes + Self::PAGE).collect();
        let start = memory.as_ptr().align_offset(Self::PAGE);
        Self { memory, start }
    }

    fn as_ptr(&self) -> *const u8 {
        self.memory[self.start..].as_ptr()
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory[self.start..].as_mut_ptr()
    }
}

fn folds(criterion: &mut Criterion) {
    for count in [2, 4] {
        let largest = SIZES[SIZES.len() - 1];
        let pages: Vec<Pages> = (0..count).map(|_| Pages::new(largest)).collect();
        let sources: Vec<Source> = pages.iter().map(|pages| Source::raw(pages.as_ptr())).collect();
        let mut output = Pages::new(largest);
        let from = Pages::new(largest * (count + 1) / 2);
        let mut to = Pages::new(largest * (count + 1) / 2);

        let mut group = criterion.benchmark_group(format!("{count}_sources"));
        group
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(1))
            .sample_size(20);
        for size in SIZES {
            let traffic = size * (count + 1);
            group.throughput(Throughput::BytesDecimal(traffic as u64));
            for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F64] {
                let reducer = Reducer::builtin(dtype, ReduceOp::Sum).expect("numbers have sums");
                let elements = size / dtype.size();
                group.bench_function(BenchmarkId::new(dtype.name(), size), |bencher| {
                    let into = output.as_mut_ptr();
                    // SAFETY: all buffers are at least as large as the largest size and apart from each other.
                    bencher.iter(|| unsafe {
                        reducer.fold(black_box(&sources), into, Repr::Raw, None, elements)
                    });
                });
            }
            group.bench_function(BenchmarkId::new("f32_in_place", size), |bencher| {
                let reducer = Reducer::builtin(DType::F32, ReduceOp::Sum).expect("numbers have sums");
                let into = output.as_mut_ptr();
                let mut sources = sources.clone();
                sources[0] = Source::raw(into);
                // SAFETY: as above, but for the first source, which is the destination.
                bencher
                    .iter(|| unsafe { reducer.fold(black_box(&sources), into, Repr::Raw, None, size / 4) });
            });
            group.bench_function(BenchmarkId::new("memcpy", size), |bencher| {
                let (from, to) = (from.as_ptr(), to.as_mut_ptr());
                // SAFETY: half of the traffic fits into both buffers.
                bencher
                    .iter(|| unsafe { black_box(from).copy_to_nonoverlapping(black_box(to), traffic / 2) });
            });
            group.bench_function(BenchmarkId::new("copy", size), |bencher| {
                // A fold of one source is a copy.
                let reducer = Reducer::builtin(DType::U8, ReduceOp::Sum).expect("numbers have sums");
                let (from, to) = ([Source::raw(from.as_ptr())], to.as_mut_ptr());
                // SAFETY: as above.
                bencher.iter(|| unsafe { reducer.fold(black_box(&from), to, Repr::Raw, None, traffic / 2) });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, folds);
criterion_main!(benches);
