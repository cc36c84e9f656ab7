//! Sorting numbers that no single rank has all of.
//!
//! Each rank sorts its own and offers a few samples; `MPI_Allgather` of the samples gives everyone the same splitters; each
//! rank then sends every other its share (`MPI_Alltoallv` in MPI; here non-blocking sends and receives, after the lengths were
//! gathered), and merges what it got. Usage: `sample_sort [NUMBERS PER RANK]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/release/examples/sample_sort 5000000
//! ```

use std::{error::Error, time::Instant};

use raccl::{Communicator, Config};

fn main() -> Result<(), Box<dyn Error>> {
    let count: usize = std::env::args().nth(1).map_or(Ok(100_000), |count| count.parse())?;
    let comm = Config::from_env()?.connect()?;
    let mine = numbers(comm.rank(), count);

    comm.barrier()?;
    let begin = Instant::now();
    let sorted = sort(&comm, mine)?;
    comm.barrier()?;
    let parallel = begin.elapsed();

    // Put everything together to compare it with a serial sort; a real program would leave the parts where they are.
    let mut counts = vec![0; comm.size()];
    comm.all_gather_into(&[sorted.len()], &mut counts)?;
    let mut whole = vec![0; counts.iter().sum()];
    comm.all_gather_v_into(&sorted, &mut whole, &counts)?;
    if comm.rank() == 0 {
        let mut expected: Vec<u64> = (0..comm.size()).flat_map(|rank| numbers(rank, count)).collect();
        let begin = Instant::now();
        expected.sort_unstable();
        let speed_up = begin.elapsed().as_secs_f64() / parallel.as_secs_f64();
        if whole != expected {
            return Err("the parts put together are not the sorted numbers".into());
        }
        let mixed = whole
            .iter()
            .enumerate()
            .fold(0_u64, |sum, (i, x)| sum.wrapping_add(x.wrapping_mul(i as u64 + 1)));
        println!("answer: {mixed:016x}");
        println!("speed-up {speed_up:.2} on {} ranks, parts of {counts:?}", comm.size());
        println!("ok");
    }
    comm.close()?;
    Ok(())
}

/// This rank's part of all numbers in order: no number on a lower rank is larger.
fn sort(comm: &Communicator, mut mine: Vec<u64>) -> Result<Vec<u64>, raccl::Error> {
    let size = comm.size();
    mine.sort_unstable();

    // As many samples as ranks, evenly from the sorted numbers; a rank without numbers offers the largest there is.
    let sample = |i: usize| mine.get((2 * i + 1) * mine.len() / (2 * size)).copied().unwrap_or(u64::MAX);
    let samples: Vec<u64> = (0..size).map(sample).collect();
    let mut all = vec![0; size * size];
    comm.all_gather_into(&samples, &mut all)?;
    all.sort_unstable();
    let splitters: Vec<u64> = (1..size).map(|i| all[i * size]).collect();

    // Where each rank's share begins and ends, and who sends how much to whom.
    let mut bounds = vec![0];
    bounds.extend(splitters.iter().map(|splitter| mine.partition_point(|x| x < splitter)));
    bounds.push(mine.len());
    let sending: Vec<usize> = bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut lengths = vec![0; size * size];
    comm.all_gather_into(&sending, &mut lengths)?;

    let mut parts: Vec<Vec<u64>> =
        (0..size).map(|from| vec![0; lengths[from * size + comm.rank()]]).collect();
    comm.scope(|scope| {
        for (from, part) in parts.iter_mut().enumerate() {
            let _ = scope.recv(part, from, 0)?;
        }
        for to in 0..size {
            let _ = scope.send(&mine[bounds[to]..bounds[to + 1]], to, 0)?;
        }
        Ok(())
    })?;
    let mut sorted = parts.concat();
    sorted.sort_unstable();
    Ok(sorted)
}

/// The numbers that a rank begins with.
fn numbers(rank: usize, count: usize) -> Vec<u64> {
    let mut state = rank as u64 * 0x0001_0000_0001 + 12_345;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..count).map(next).collect()
}
