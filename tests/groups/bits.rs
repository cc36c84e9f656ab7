//! The same bits on every rank, whatever carries them.

use half::bf16;
use num_complex::Complex;
use raccl::{Avg, ByteCommunicator, Collective, Communicator, DType, Fractional, Operation, ReduceOp, Sum};

use crate::support::{
    LINKS, Links, bytes, configured_group, group, hash,
    oracle::{Summed, columns},
    random::Sample,
};

/// Elements a rank; more and less than what is sent ahead, than a chunk, than there are ranks.
const COUNTS: [usize; 5] = [1, 5, 1000, 4097, 70_001];

/// What all-reduce runs beside its own choice. All of them keep the tree, on any number of ranks.
const KEEP_THE_TREE: [&str; 4] = ["one_shot", "two_shot", "recursive_doubling", "recursive_halving"];

/// A type with everything that the tests of bits need.
trait Kind: Sample + Summed + Fractional {}

impl Kind for f32 {}
impl Kind for bf16 {}
impl Kind for Complex<f32> {}

fn input<T: Kind>(rank: usize, count: usize) -> Vec<T> {
    T::samples((rank * 1_000_003 + count) as u64, count)
}

/// The hashes that every rank must see, in the order in which [`all_ways`] returns them.
fn expected<T: Kind>(size: usize) -> Vec<u64> {
    let mut hashes = Vec::new();
    for count in COUNTS {
        let inputs: Vec<Vec<T>> = (0..size).map(|rank| input(rank, count)).collect();
        hashes.push(hash(bytes(&columns(&inputs, T::sum))));
        hashes.push(hash(bytes(&columns(&inputs, T::mean))));
    }
    hashes
}

/// Reduces in every way that there is, checks that all give the same bits, and returns a hash of each result.
fn all_ways<T: Kind>(comm: &Communicator) -> Vec<u64> {
    let mut hashes = Vec::new();
    for count in COUNTS {
        hashes.push(ways::<T, _>(comm, count, Sum, ReduceOp::Sum));
        hashes.push(ways::<T, _>(comm, count, Avg, ReduceOp::Avg));
    }
    return hashes;

    fn ways<T: Kind, O: Operation<T>>(comm: &Communicator, count: usize, operation: O, op: ReduceOp) -> u64 {
        let mine: Vec<T> = input(comm.rank(), count);
        let mut result = mine.clone();
        comm.all_reduce(&mut result, &operation).unwrap();
        let result = bytes(&result);

        let mut output = vec![T::zeroed(); count];
        comm.all_reduce_into(&mine, &mut output, &operation).unwrap();
        assert!(bytes(&output) == result, "in place and into differ");

        // As bytes at odd addresses, another one on every rank and for input and output.
        let (from, to) = (1 + comm.rank() % 3, 3 + comm.rank() % 5);
        let mut buffer = vec![0; from];
        buffer.extend_from_slice(bytes(&mine));
        let mut output = vec![0; to + result.len()];
        let plain: &dyn ByteCommunicator = comm;
        plain.all_reduce_into(&buffer[from..], &mut output[to..], T::DTYPE, op).unwrap();
        assert!(&output[to..] == result, "other bits at odd addresses");
        plain.all_reduce(&mut buffer[from..], T::DTYPE, op).unwrap();
        assert!(&buffer[from..] == result, "other bits at odd addresses, in place");
        hash(result)
    }
}

/// Hashes of all types' results on every rank of a group.
fn hashes(links: Links, size: usize, algorithm: Option<&'static str>) -> Vec<(Vec<u64>, Vec<u64>, Vec<u64>)> {
    configured_group(
        links,
        size,
        move |config| match algorithm {
            Some(algorithm) => config.algorithm(format!("all_reduce:{algorithm}")),
            None => config,
        },
        move |comm| {
            if let Some(algorithm) = algorithm {
                let chosen = comm.explain(Collective::AllReduce, 4000).algorithm;
                assert_eq!(chosen.name(), algorithm);
            }
            (all_ways::<f32>(&comm), all_ways::<bf16>(&comm), all_ways::<Complex<f32>>(&comm))
        },
    )
}

fn oracle(size: usize) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
    (expected::<f32>(size), expected::<bf16>(size), expected::<Complex<f32>>(size))
}

#[test]
fn every_link_and_number_of_sockets_gives_the_bits_of_the_tree() {
    for size in 2..=9 {
        let oracle = oracle(size);
        // Every number of sockets with some number of ranks, and every number of ranks with some sockets.
        for links in LINKS.into_iter().filter(|&links| match links {
            Links::Local => true,
            Links::Tcp(sockets) => sockets == 1 + size % 4 || size == 3,
        }) {
            for (rank, found) in hashes(links, size, None).into_iter().enumerate() {
                assert!(found == oracle, "rank {rank} of {size} over {links:?}");
            }
        }
    }
}

#[test]
fn every_algorithm_that_keeps_the_tree_gives_its_bits() {
    for size in 2..=9 {
        let oracle = oracle(size);
        for algorithm in KEEP_THE_TREE {
            for (rank, found) in hashes(Links::Tcp(1), size, Some(algorithm)).into_iter().enumerate() {
                assert!(found == oracle, "rank {rank} of {size} by {algorithm}");
            }
        }
    }
}

#[test]
fn rings_and_lines_keep_the_tree_up_to_four_ranks_and_agree_among_themselves_beyond() {
    for size in 2..=9 {
        let oracle = oracle(size);
        for algorithm in ["ring", "bidirectional_ring", "line"] {
            let found = hashes(Links::Tcp(1 + size % 2), size, Some(algorithm));
            for (rank, hashes) in found.iter().enumerate() {
                assert!(*hashes == found[0], "ranks 0 and {rank} of {size} by {algorithm}");
                assert!(size > 4 || *hashes == oracle, "rank {rank} of {size} by {algorithm}");
            }
            let again = hashes_of_rank_0(Links::Tcp(3), size, algorithm);
            assert!(again == found[0], "other bits in another run of {size} by {algorithm}");
        }
    }
}

fn hashes_of_rank_0(links: Links, size: usize, algorithm: &'static str) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
    hashes(links, size, Some(algorithm)).swap_remove(0)
}

#[test]
fn a_reduce_scatter_gives_the_parts_of_the_all_reduce() {
    for size in [2, 3, 5, 8] {
        for links in [Links::Local, Links::Tcp(2)] {
            group(links, size, move |comm| {
                for part in [1, 3, 1000, 20_011] {
                    let mine: Vec<f32> = input(comm.rank(), part * size);
                    let mut all = mine.clone();
                    comm.all_reduce(&mut all, Sum).unwrap();
                    let expected = &all[comm.rank() * part..][..part];
                    let mut output = vec![0.0; part];
                    comm.reduce_scatter_into(&mine, &mut output, Sum).unwrap();
                    assert!(bytes(&output) == bytes(expected));
                    let mut buffer = mine;
                    let output = comm.reduce_scatter(&mut buffer, Sum).unwrap();
                    assert!(bytes(output) == bytes(expected), "in place");
                }
            });
        }
    }
}

#[test]
fn ranks_may_mix_the_forms_of_one_call() {
    for size in [2, 3, 4, 7] {
        for algorithm in ["auto", "one_shot", "two_shot", "recursive_doubling", "recursive_halving", "ring"] {
            let configure = move |config: raccl::Config| match algorithm {
                "auto" => config,
                _ => config.algorithm(format!("all_reduce:{algorithm}")),
            };
            configured_group(Links::Tcp(1), size, configure, move |comm| {
                for count in [3, 1000, 50_000] {
                    let inputs: Vec<Vec<f32>> = (0..size).map(|rank| input(rank, count)).collect();
                    for shift in 0..3 {
                        let mut result = inputs[comm.rank()].clone();
                        match (comm.rank() + shift) % 3 {
                            0 => comm.all_reduce(&mut result, Sum).unwrap(),
                            1 => comm.all_reduce_into(&inputs[comm.rank()], &mut result, Sum).unwrap(),
                            _ => {
                                let raw = bytemuck::cast_slice_mut(&mut result);
                                ByteCommunicator::all_reduce(&comm, raw, DType::F32, ReduceOp::Sum).unwrap();
                            }
                        }
                        if algorithm != "ring" || size <= 4 {
                            assert!(bytes(&result) == bytes(&columns(&inputs, f32::sum)));
                        }
                    }
                }
            });
        }
    }
}
