//! Random operations whose results are checked. All ranks draw the same ones from the same seed.

use std::{thread, time::Duration};

use raccl::{Communicator, Max, Result, Sum};

use crate::support::random::Random;

/// A sequence of operations.
pub(crate) struct Operations {
    random: Random,
    longest: usize,
}

impl Operations {
    /// Buffers have fewer than `longest` elements for each rank.
    pub(crate) fn new(seed: u64, longest: usize) -> Operations {
        Operations { random: Random::new(seed), longest }
    }

    /// Makes the next call, on all ranks the same. Panics if its result is wrong.
    pub(crate) fn next(&mut self, comm: &Communicator) -> Result<()> {
        let salt = self.random.next();
        let length = self.length();
        let (rank, size) = (comm.rank(), comm.size());
        let root = self.random.below(size);
        match self.random.below(12) {
            0 => comm.barrier(),
            1 => all_reduce(comm, salt, length),
            2 => {
                let mine: Vec<i64> = (0..length).map(|i| value(salt, rank, i) as i64).collect();
                let mut most = vec![0; length];
                comm.all_reduce_into(&mine, &mut most, Max)?;
                let expected = |i| (0..size).map(|from| value(salt, from, i) as i64).max();
                assert!(most.iter().enumerate().all(|(i, &v)| Some(v) == expected(i)), "wrong maximum");
                Ok(())
            }
            3 => {
                let mine: Vec<u16> = (0..length).map(|i| value(salt, rank, i) as u16).collect();
                let mut all = vec![0; length * size];
                comm.all_gather_into(&mine, &mut all)?;
                let expected = |i: usize| value(salt, i / length, i % length) as u16;
                assert!(all.iter().enumerate().all(|(i, &v)| v == expected(i)), "wrong gathering");
                Ok(())
            }
            4 => all_gather_v(comm, salt, length),
            5 => reduce_scatter(comm, salt, length),
            6 => {
                let mut values = match rank == root {
                    true => (0..length).map(|i| value(salt, root, i)).collect(),
                    false => vec![0; length],
                };
                comm.broadcast(&mut values, root)?;
                assert!(
                    values.iter().enumerate().all(|(i, &v)| v == value(salt, root, i)),
                    "wrong broadcast"
                );
                Ok(())
            }
            7 => ring(comm, salt, length),
            8 => one_message(comm, salt, length, root),
            9 => {
                let half = comm.split(Some((rank % 2) as u64), 0)?;
                half.map_or(Ok(()), |half| all_reduce(&half, salt, length))
            }
            10 => at_once(comm, salt, length),
            _ => {
                // Ranks compute, and not equally long.
                thread::sleep(Duration::from_micros(value(salt, rank, 0) % 3000));
                Ok(())
            }
        }
    }

    /// Every order of magnitude is as likely as every other, and zero is possible.
    fn length(&mut self) -> usize {
        let bits = usize::BITS - self.longest.leading_zeros();
        let most = 1 << self.random.below(bits as usize);
        self.random.below(most + 1).min(self.longest)
    }
}

/// What `rank` contributes as element `index` of the call with this salt.
fn value(salt: u64, rank: usize, index: usize) -> u64 {
    let mixed = salt ^ (rank as u64) << 48 ^ index as u64;
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 7
}

fn sum(salt: u64, size: usize, index: usize) -> u32 {
    (0..size).map(|rank| value(salt, rank, index) as u32).fold(0, u32::wrapping_add)
}

/// Checks one sum of all ranks.
pub(crate) fn all_reduce(comm: &Communicator, salt: u64, length: usize) -> Result<()> {
    let mut values: Vec<u32> = (0..length).map(|i| value(salt, comm.rank(), i) as u32).collect();
    comm.all_reduce(&mut values, Sum)?;
    let size = comm.size();
    assert!(values.iter().enumerate().all(|(i, &v)| v == sum(salt, size, i)), "wrong sum");
    Ok(())
}

fn counts(salt: u64, size: usize, length: usize) -> Vec<usize> {
    (0..size).map(|rank| value(salt, rank, 77) as usize % (length + 1)).collect()
}

fn all_gather_v(comm: &Communicator, salt: u64, length: usize) -> Result<()> {
    let counts = counts(salt, comm.size(), length);
    let owned = counts.iter().enumerate().flat_map(|(rank, &count)| (0..count).map(move |i| (rank, i)));
    let expected: Vec<u32> = owned.map(|(rank, i)| value(salt, rank, i) as u32).collect();
    let mine: Vec<u32> = (0..counts[comm.rank()]).map(|i| value(salt, comm.rank(), i) as u32).collect();
    let mut all = vec![0; expected.len()];
    comm.all_gather_v_into(&mine, &mut all, &counts)?;
    assert!(all == expected, "wrong uneven gathering");
    Ok(())
}

fn reduce_scatter(comm: &Communicator, salt: u64, length: usize) -> Result<()> {
    let counts = counts(salt, comm.size(), length);
    let before: usize = counts[..comm.rank()].iter().sum();
    let total: usize = counts.iter().sum();
    let mine: Vec<u32> = (0..total).map(|i| value(salt, comm.rank(), i) as u32).collect();
    let mut part = vec![0; counts[comm.rank()]];
    comm.reduce_scatter_v_into(&mine, &mut part, &counts, Sum)?;
    let size = comm.size();
    assert!(part.iter().enumerate().all(|(i, &v)| v == sum(salt, size, before + i)), "wrong part of a sum");
    Ok(())
}

fn ring(comm: &Communicator, salt: u64, length: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let mine: Vec<u64> = (0..length).map(|i| value(salt, rank, i)).collect();
    let mut theirs = vec![0; length];
    let count = comm.send_recv(&mine, next, &mut theirs, last, salt)?;
    assert_eq!(count, length);
    assert!(theirs.iter().enumerate().all(|(i, &v)| v == value(salt, last, i)), "wrong message in the ring");
    Ok(())
}

fn one_message(comm: &Communicator, salt: u64, length: usize, to: usize) -> Result<()> {
    let from = (to + 1) % comm.size();
    if comm.rank() == from {
        let mine: Vec<u64> = (0..length).map(|i| value(salt, from, i)).collect();
        comm.send(&mine, to, 3)?;
    }
    if comm.rank() == to {
        let mut theirs = vec![0; length];
        assert_eq!(comm.recv(&mut theirs, from, 3)?, length);
        assert!(theirs.iter().enumerate().all(|(i, &v)| v == value(salt, from, i)), "wrong message");
    }
    Ok(())
}

/// A sum and messages in flight at the same time.
fn at_once(comm: &Communicator, salt: u64, length: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut values: Vec<u32> = (0..length).map(|i| value(salt, rank, i) as u32).collect();
    let mine: Vec<u64> = (0..length).map(|i| value(salt, rank, i)).collect();
    let mut theirs = vec![0; length];
    comm.scope(|scope| {
        let recv = scope.recv(&mut theirs, last, 9)?;
        let reduce = scope.all_reduce(&mut values, &Sum)?;
        let send = scope.send(&mine, next, 9)?;
        assert_eq!(recv.wait()?, length);
        reduce.wait()?;
        send.wait()
    })?;
    assert!(values.iter().enumerate().all(|(i, &v)| v == sum(salt, size, i)), "wrong sum in a scope");
    assert!(theirs.iter().enumerate().all(|(i, &v)| v == value(salt, last, i)), "wrong message in a scope");
    Ok(())
}
