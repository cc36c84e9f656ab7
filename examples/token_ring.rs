//! A token goes around a ring of ranks, and every rank adds its number to it.
//!
//! `MPI_Send` and `MPI_Recv` between neighbours: the order in which ranks call them keeps the ring from deadlocking, whatever
//! the token's size. Usage: `token_ring [LAPS]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/debug/examples/token_ring 1000
//! ```

use std::{error::Error, time::Instant};

use raccl::Config;

/// The tag of the token, as in MPI; messages match by source and tag.
const TOKEN: u64 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let laps: u64 = std::env::args().nth(1).map_or(Ok(200), |laps| laps.parse())?;
    let comm = Config::from_env()?.connect()?;
    let (rank, size) = (comm.rank(), comm.size());
    let (right, left) = ((rank + 1) % size, (rank + size - 1) % size);

    let begin = Instant::now();
    let mut token = [0_u64];
    for lap in 0..laps {
        // Rank 0 starts each lap; the others wait for the token first.
        if rank != 0 || lap > 0 {
            comm.recv(&mut token, left, TOKEN)?;
        }
        token[0] += rank as u64;
        comm.send(&token, right, TOKEN)?;
    }
    if rank == 0 {
        // The last lap ends here. A message to oneself waits in the group of one.
        comm.recv(&mut token, left, TOKEN)?;
        let elapsed = begin.elapsed();
        let expected = laps * (0..size as u64).sum::<u64>();
        if token[0] != expected {
            return Err(format!("the token is worth {}, not {expected}", token[0]).into());
        }
        println!("answer: {}", token[0]);
        println!(
            "{:.2} us from rank to rank",
            elapsed.as_secs_f64() * 1e6 / (laps * size as u64).max(1) as f64
        );
        println!("ok");
    }
    comm.close()?;
    Ok(())
}
