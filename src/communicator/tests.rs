//! Groups of threads.
use super::*;
use crate::{Sum, local_group};

fn run<R: Send>(size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let group = local_group(size).unwrap();
    let body = &body;
    std::thread::scope(|threads| {
        let ranks: Vec<_> = group.into_iter().map(|comm| threads.spawn(move || body(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn all_reduce_adds() {
    for size in 1..6 {
        for count in [0, 1, 3, 1000, 100_000, 1_000_003] {
            run(size, |comm| {
                let input: Vec<f32> = (0..count).map(|i| (i % 100 + comm.rank()) as f32).collect();
                let mut output = vec![0.0; count];
                comm.all_reduce_into(&input, &mut output, Sum).unwrap();
                let expected = |i: usize| (size * (i % 100) + size * (size - 1) / 2) as f32;
                assert!((0..count).all(|i| output[i] == expected(i)));
                let mut buffer = input;
                comm.all_reduce(&mut buffer, Sum).unwrap();
                assert!(buffer == output);
                comm.barrier().unwrap();
                let row = comm.split(Some(comm.rank() as u64 % 2), 0).unwrap().unwrap();
                row.barrier().unwrap();
                let mut all = vec![0; comm.size()];
                comm.all_gather_into(&[comm.rank()], &mut all).unwrap();
                assert_eq!(all, (0..size).collect::<Vec<_>>());
            });
        }
    }
}
