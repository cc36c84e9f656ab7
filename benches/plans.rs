//! The time to choose an algorithm and to make a plan: what the first call of a shape pays once.
//!
//! `cargo bench --bench plans`

// The room has no public door, so it is compiled into the benchmark; of the rest of the library it needs one type.
#![allow(dead_code, unused_imports, unreachable_pub, missing_docs)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

#[path = "../src/plan/mod.rs"]
mod plan;

mod reduce {
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub(crate) enum Repr {
        Raw,
        Acc,
    }
}

use plan::{Algorithm, Cabling, Collective, Shape, Tuning, choose, make};

fn shape(collective: Collective, size: usize) -> Shape {
    // bf16, whose partial results are wider.
    Shape { collective, rank: size / 2, size, in_place: true, raw_size: 2, acc_size: 4, ordered: false }
}

fn making(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("make");
    let count = 1_000_003;
    for (algorithm, sizes) in [
        (Algorithm::OneShot, [2, 4, 8]),
        (Algorithm::TwoShot, [2, 4, 8]),
        (Algorithm::RecursiveDoubling, [2, 8, 64]),
        (Algorithm::RecursiveHalving, [2, 8, 64]),
        (Algorithm::BidirectionalRing, [4, 8, 64]),
        (Algorithm::Ring, [4, 8, 64]),
    ] {
        for size in sizes {
            let shape = shape(Collective::AllReduce { count }, size);
            group.bench_function(BenchmarkId::new(algorithm.name(), size), |bencher| {
                bencher.iter(|| make(black_box(&shape), algorithm));
            });
        }
    }
    group.finish();
}

fn choosing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("choose");
    let tuning = Tuning::thunderbolt(Cabling::Mesh, 1);
    for size in [2, 8, 64] {
        for (name, collective) in [
            ("all_reduce", Collective::AllReduce { count: 1_000_003 }),
            ("all_gather", Collective::AllGather { counts: vec![1000; size] }),
        ] {
            let shape = shape(collective, size);
            group.bench_function(BenchmarkId::new(name, size), |bencher| {
                bencher.iter(|| choose(black_box(&shape), &tuning));
            });
        }
    }
    group.finish();
}

criterion_group!(plans, making, choosing);
criterion_main!(plans);
