//! Collectives of every length: none, fewer elements than ranks, uneven parts, elements without bytes.

use bytemuck::{Pod, Zeroable};
use raccl::{BitOr, Communicator, Custom, Error, Max, Min, Prod, Sum};

use crate::support::{
    Links, group,
    oracle::{columns, tree},
    random::{Random, Sample},
};

const BOTH: [Links; 2] = [Links::Local, Links::Tcp(2)];

#[test]
fn a_million_and_three_floats_on_seven_ranks() {
    for links in BOTH {
        group(links, 7, |comm| {
            let count = 1_000_003;
            let mut values: Vec<f32> = (0..count).map(|i| (i % 1000 + comm.rank()) as f32).collect();
            comm.all_reduce(&mut values, Sum).unwrap();
            let wrong = (0..count).find(|&i| values[i] != (7 * (i % 1000) + 21) as f32);
            assert_eq!(wrong, None);
        });
    }
}

#[test]
fn fewer_elements_than_ranks_and_none_at_all() {
    for links in BOTH {
        group(links, 8, |comm| {
            for count in 0..4 {
                for _ in 0..3 {
                    let mut values: Vec<i64> = (0..count).map(|i| i + comm.rank() as i64).collect();
                    comm.all_reduce(&mut values, Sum).unwrap();
                    let expected: Vec<i64> = (0..count).map(|i| 8 * i + 28).collect();
                    assert_eq!(values, expected);
                    let input = values.clone();
                    comm.all_reduce_into(&input, &mut values, Max).unwrap();
                    assert_eq!(values, expected);
                }
            }
        });
    }
}

#[test]
fn every_algorithm_does_every_length() {
    let algorithms = [
        ("one_shot", "direct", "direct"),
        ("two_shot", "direct", "direct"),
        ("recursive_doubling", "recursive_halving", "recursive_doubling"),
        ("recursive_halving", "recursive_halving", "recursive_doubling"),
        ("ring", "ring", "ring"),
        ("bidirectional_ring", "bidirectional_ring", "bidirectional_ring"),
        ("line", "line", "line"),
    ];
    for (reduce, scatter, gather) in algorithms {
        for size in [2, 3, 4, 5, 8] {
            let configure = move |config: raccl::Config| {
                config.algorithm(format!("all_reduce:{reduce};reduce_scatter:{scatter};all_gather:{gather}"))
            };
            crate::support::configured_group(Links::Tcp(1), size, configure, move |comm| {
                for count in [0, 1, size - 1, size, size + 1, 1023, 100_000] {
                    let inputs: Vec<Vec<u64>> =
                        (0..size).map(|rank| u64::samples((rank + count) as u64, count)).collect();
                    let expected = columns(&inputs, |values| tree(values, u64::wrapping_add));
                    let mut values = inputs[comm.rank()].clone();
                    comm.all_reduce(&mut values, Sum).unwrap();
                    assert!(values == expected, "{count} in place");
                    values.fill(0);
                    comm.all_reduce_into(&inputs[comm.rank()], &mut values, Sum).unwrap();
                    assert!(values == expected, "{count} into");
                    uneven(&comm, count as u64);
                }
            });
        }
    }
}

#[test]
fn parts_may_be_uneven_and_empty() {
    for links in BOTH {
        for size in [1, 2, 3, 5, 8] {
            group(links, size, |comm| {
                for seed in 0..12 {
                    uneven(&comm, seed);
                }
            });
        }
    }
}

/// Gathers and scatters parts of random lengths, in all forms.
fn uneven(comm: &Communicator, seed: u64) {
    let (rank, size) = (comm.rank(), comm.size());
    let mut random = Random::new(seed);
    let longest = [1, 2, 10, 1000, 30_000][random.below(5)];
    let mut counts: Vec<usize> =
        (0..size).map(|_| if random.below(3) == 0 { 0 } else { random.below(longest + 1) }).collect();
    if random.below(6) == 0 {
        // Everything from one rank.
        let owner = random.below(size);
        counts.iter_mut().enumerate().filter(|(at, _)| *at != owner).for_each(|(_, count)| *count = 0);
    }
    let total: usize = counts.iter().sum();
    let begin: usize = counts[..rank].iter().sum();
    let own = begin..begin + counts[rank];

    let all: Vec<i32> = Sample::samples(seed, total);
    let mut gathered = vec![0; total];
    comm.all_gather_v_into(&all[own.clone()], &mut gathered, &counts).unwrap();
    assert!(gathered == all, "gathered into, {counts:?}");
    gathered.fill(0);
    gathered[own.clone()].copy_from_slice(&all[own.clone()]);
    comm.all_gather_v(&mut gathered, &counts).unwrap();
    assert!(gathered == all, "gathered in place, {counts:?}");

    let inputs: Vec<Vec<i32>> = (0..size).map(|rank| Sample::samples(seed + rank as u64, total)).collect();
    let expected = columns(&inputs, |values| tree(values, i32::wrapping_mul));
    let mut part = vec![0; counts[rank]];
    comm.reduce_scatter_v_into(&inputs[rank], &mut part, &counts, Prod).unwrap();
    assert!(part == expected[own.clone()], "scattered into, {counts:?}");
    let mut buffer = inputs[rank].clone();
    let part = comm.reduce_scatter_v(&mut buffer, &counts, Prod).unwrap();
    assert!(*part == expected[own], "scattered in place, {counts:?}");
}

#[test]
fn equal_parts_of_every_length() {
    for links in BOTH {
        group(links, 6, |comm| {
            let (rank, size) = (comm.rank(), comm.size());
            for part in [0, 1, 2, 999, 40_000] {
                let all: Vec<u64> = Sample::samples(part as u64, part * size);
                let mut gathered = vec![0; all.len()];
                comm.all_gather_into(&all[rank * part..][..part], &mut gathered).unwrap();
                assert!(gathered == all);
                let mut gathered = vec![0; all.len()];
                gathered[rank * part..][..part].copy_from_slice(&all[rank * part..][..part]);
                comm.all_gather(&mut gathered).unwrap();
                assert!(gathered == all);
                let mut buffer = all.clone();
                let mine = comm.reduce_scatter(&mut buffer, BitOr).unwrap();
                assert!(*mine == all[rank * part..][..part]);
            }
        });
    }
}

#[test]
fn every_root_broadcasts_every_length() {
    for (size, algorithm) in
        [(2, "auto"), (3, "auto"), (5, "binomial"), (5, "chain"), (6, "direct"), (7, "relay"), (8, "auto")]
    {
        let configure = move |config: raccl::Config| match algorithm {
            "auto" => config,
            _ => config.algorithm(format!("broadcast:{algorithm}")),
        };
        crate::support::configured_group(Links::Tcp(1), size, configure, move |comm| {
            for root in 0..comm.size() {
                for count in [0, 1, 1000, 16_384, 16_385, 300_000] {
                    let data: Vec<u32> = (0..count).map(|i| (i * 31 + root) as u32).collect();
                    let mut buffer = if comm.rank() == root { data.clone() } else { vec![0; count] };
                    comm.broadcast(&mut buffer, root).unwrap();
                    assert!(buffer == data, "{count} from {root}");
                }
            }
        });
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Zeroable, Pod)]
#[repr(C)]
struct Nothing;

#[test]
fn elements_without_bytes_move_too() {
    for links in BOTH {
        group(links, 3, |comm| {
            let mut buffer = vec![Nothing; 6];
            comm.broadcast(&mut buffer, 1).unwrap();
            comm.all_gather(&mut buffer).unwrap();
            comm.all_gather_into(&[Nothing; 2], &mut buffer).unwrap();
            comm.all_gather_v(&mut buffer, &[1, 0, 5]).unwrap();
            comm.all_reduce(&mut buffer, Custom::new(|_: &Nothing, _: &Nothing| Nothing)).unwrap();
            let fold = Custom::new(|_: &Nothing, _: &Nothing| Nothing);
            assert_eq!(comm.reduce_scatter(&mut buffer, fold).unwrap().len(), 2);
            let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            comm.send_recv(&[Nothing; 4], right, &mut buffer, left, 7).unwrap();
        });
    }
}

#[test]
fn ranks_that_disagree_about_elements_without_bytes_learn_of_it() {
    for links in BOTH {
        group(links, 3, |comm| {
            let mut values = vec![Nothing; if comm.rank() == 0 { 1 } else { 2 }];
            let error = comm.broadcast(&mut values, 0).and_then(|()| comm.barrier());
            assert!(matches!(error, Err(Error::Mismatch { .. })), "{error:?}");
        });
    }
}

#[test]
fn a_group_of_one_does_everything() {
    let comm = raccl::Config::new().connect().unwrap();
    let mut values = [3_i32, -1, 4];
    comm.barrier().unwrap();
    comm.all_reduce(&mut values, Min).unwrap();
    comm.all_gather(&mut values).unwrap();
    comm.broadcast(&mut values, 0).unwrap();
    assert_eq!(*comm.reduce_scatter(&mut values, Sum).unwrap(), [3, -1, 4]);
    let mut mean = [1.0_f32, 2.0];
    comm.all_reduce(&mut mean, raccl::Avg).unwrap();
    assert_eq!(mean, [1.0, 2.0]);
    uneven(&comm, 3);
    let mut received = [0; 4];
    assert_eq!(comm.send_recv(&values, 0, &mut received, 0, 1).unwrap(), 3);
    assert_eq!(received, [3, -1, 4, 0]);
    let same = comm.duplicate().unwrap();
    assert_eq!((same.rank(), same.size()), (0, 1));
    same.close().unwrap();
    comm.close().unwrap();
}

#[test]
fn wrong_arguments_are_refused_here_and_harm_nobody() {
    group(Links::Local, 3, |comm| {
        let refused = |result: raccl::Result<()>, words: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        };
        // Only some ranks, so that whatever was sent would be noticed.
        if comm.rank() != 1 {
            let mut five = [0_u8; 5];
            refused(comm.all_gather(&mut five), "5 elements does not divide into 3");
            refused(comm.reduce_scatter(&mut five, Sum).map(|_| ()), "does not divide");
            refused(comm.all_gather_v(&mut five, &[1, 4]), "2 counts for 3 ranks");
            refused(comm.all_gather_v(&mut five, &[1, 4, 1]), "add up to 6");
            refused(comm.all_gather_v(&mut five, &[usize::MAX, 4, 2]), "more than memory holds");
            refused(comm.broadcast(&mut five, 3), "no rank 3");
            refused(comm.send(&five, 3, 0), "no rank 3");
            refused(comm.recv(&mut five, usize::MAX, 0).map(|_| ()), "no rank");
            refused(comm.all_reduce_into(&five, &mut [0; 4], Sum), "4 elements instead of 5");
            refused(comm.all_gather_into(&five, &mut [0; 14]), "14 elements instead of 15");
            refused(comm.reduce_scatter_into(&[0; 14], &mut five, Sum), "14 elements instead of 15");
            refused(comm.link(3).map(|_| ()), "no rank 3");
        }
        let mut value = [comm.rank()].map(|rank| rank as u32);
        comm.all_reduce(&mut value, Sum).unwrap();
        assert_eq!(value, [3]);
    });
}
