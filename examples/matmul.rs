//! A block matrix product: C = A * B, rows of A and C divided among the ranks, blocks of B going around the ring.
//!
//! Each rank starts with its rows of A and its rows of B. In every step it multiplies with the block of B that it has and
//! passes that block on: `MPI_Sendrecv_replace` in MPI; here the non-blocking send and receive of a scope overlap with the
//! multiplication. The parts of C are put together by `MPI_Allgatherv`. Usage: `matmul [N]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/release/examples/matmul 1024
//! ```

use std::{error::Error, ops::Range, time::Instant};

use raccl::{Communicator, Config};

fn main() -> Result<(), Box<dyn Error>> {
    let n: usize = std::env::args().nth(1).map_or(Ok(240), |n| n.parse())?;
    let comm = Config::from_env()?.connect()?;
    let (a, b) = (matrix(n, 1), matrix(n, 2));

    comm.barrier()?;
    let begin = Instant::now();
    let c = multiply(&comm, &a, &b, n)?;
    let parallel = begin.elapsed();

    if comm.rank() == 0 {
        let begin = Instant::now();
        let mut serial = vec![0.0; n * n];
        multiply_add(&a, &b, &mut serial, n, 0..n);
        let speed_up = begin.elapsed().as_secs_f64() / parallel.as_secs_f64();
        let worst = c.iter().zip(&serial).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        if c.len() != serial.len() || worst > 1e-9 * n as f64 {
            return Err(format!("the products differ by up to {worst}").into());
        }
        println!("answer: {:.6}", c.iter().sum::<f64>());
        println!("speed-up {speed_up:.2} on {} ranks", comm.size());
        println!("ok");
    }
    comm.close()?;
    Ok(())
}

/// The whole product on every rank.
fn multiply(comm: &Communicator, a: &[f64], b: &[f64], n: usize) -> Result<Vec<f64>, raccl::Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let rows = |rank: usize| rank * n / size..(rank + 1) * n / size;
    let (right, left) = ((rank + 1) % size, (rank + size - 1) % size);
    let mine = rows(rank);
    let mut c = vec![0.0; mine.len() * n];
    let mut block = b[mine.start * n..mine.end * n].to_vec();
    for step in 0..size {
        // The block in hand began its journey `step` ranks to the left.
        let owner = (rank + size - step) % size;
        let next = rows((owner + size - 1) % size);
        let mut incoming = vec![0.0; next.len() * n];
        comm.scope(|scope| {
            let last = step + 1 == size;
            let moving = if last {
                None
            } else {
                Some((scope.recv(&mut incoming, left, 0)?, scope.send(&block, right, 0)?))
            };
            multiply_add(&a[mine.start * n..mine.end * n], &block, &mut c, n, rows(owner));
            if let Some((recv, send)) = moving {
                recv.wait()?;
                send.wait()?;
            }
            Ok(())
        })?;
        block = incoming;
    }
    let counts: Vec<usize> = (0..size).map(|rank| rows(rank).len() * n).collect();
    let mut whole = vec![0.0; n * n];
    comm.all_gather_v_into(&c, &mut whole, &counts)?;
    Ok(whole)
}

/// Adds to `c` the product of the columns `inner` of the rows `a` with the rows `inner` of B, which `block` holds.
fn multiply_add(a: &[f64], block: &[f64], c: &mut [f64], n: usize, inner: Range<usize>) {
    for (a_row, c_row) in a.chunks_exact(n).zip(c.chunks_exact_mut(n)) {
        for (factor, b_row) in a_row[inner.clone()].iter().zip(block.chunks_exact(n)) {
            for (sum, x) in c_row.iter_mut().zip(b_row) {
                *sum += factor * x;
            }
        }
    }
}

/// Numbers between -1 and 1 that every rank makes alike.
fn matrix(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..n * n).map(|_| next()).collect()
}
