//! The engine between two threads: what a call costs beside the wire.
//!
//! `cargo bench --bench engine`. Both ranks run the same number of calls; the first one's time counts.

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use raccl::{Communicator, Sum, local_group};

criterion_group!(engine, collectives, messages);
criterion_main!(engine);

fn collectives(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("local");
    group.sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    group.bench_function("barrier", |bencher| {
        bencher
            .iter_custom(|calls| both(calls, |comm, calls| (0..calls).for_each(|_| comm.barrier().unwrap())));
    });
    for bytes in [8, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20] {
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new("all_reduce", bytes), |bencher| {
            bencher.iter_custom(|calls| {
                both(calls, |comm, calls| {
                    let (input, mut output) = (vec![1.0_f32; bytes / 4], vec![0.0; bytes / 4]);
                    for _ in 0..calls {
                        comm.all_reduce_into(black_box(&input), &mut output, Sum).unwrap();
                    }
                    black_box(output);
                })
            });
        });
    }
    group.finish();
}

fn messages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("local");
    group.sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for bytes in [8, 4 << 10, 256 << 10] {
        group.bench_function(BenchmarkId::new("ping_pong", bytes), |bencher| {
            bencher.iter_custom(|calls| {
                both(calls, |comm, calls| {
                    let mut buffer = vec![0_u8; bytes];
                    for _ in 0..calls {
                        if comm.rank() == 0 {
                            comm.send(&buffer, 1, 0).unwrap();
                            comm.recv(&mut buffer, 1, 0).unwrap();
                        } else {
                            comm.recv(&mut buffer, 0, 0).unwrap();
                            comm.send(&buffer, 0, 0).unwrap();
                        }
                    }
                })
            });
        });
    }
    group.finish();
}

/// Runs `body` on both ranks; the time of rank 0 from a barrier to its end.
fn both(calls: u64, body: impl Fn(&Communicator, u64) + Sync) -> Duration {
    let mut group = local_group(2).unwrap();
    let (one, zero) = (group.remove(1), group.remove(0));
    let body = &body;
    thread::scope(|threads| {
        threads.spawn(move || {
            one.barrier().unwrap();
            body(&one, calls);
        });
        zero.barrier().unwrap();
        let begin = Instant::now();
        body(&zero, calls);
        begin.elapsed()
    })
}
