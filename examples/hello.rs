//! Hello from every rank, and a first sum.
//!
//! What an MPI program does with `MPI_Init`, `MPI_Comm_rank`, `MPI_Comm_size`, `MPI_Allreduce` and `MPI_Finalize`.
//!
//! ```sh
//! cargo build --examples
//! cargo run --release -- launch -n 4 -- target/debug/examples/hello
//! mpirun -n 4 target/debug/examples/hello
//! ```

use std::error::Error;

use raccl::{Config, Sum};

fn main() -> Result<(), Box<dyn Error>> {
    // MPI_Init: everything comes from the environment that the launcher made. Without a launcher: a group of one.
    let comm = Config::from_env()?.connect()?;
    println!("hello from rank {} of {}", comm.rank(), comm.size());

    // MPI_Allreduce with MPI_SUM, in place.
    let mut sum = [comm.rank() as u64 + 1];
    comm.all_reduce(&mut sum, Sum)?;

    let size = comm.size() as u64;
    if sum[0] != size * (size + 1) / 2 {
        return Err(format!("the ranks from 1 to {size} add up to {}", sum[0]).into());
    }
    if comm.rank() == 0 {
        println!("answer: {}", sum[0]);
        println!("ok");
    }
    // MPI_Finalize. Dropping the communicator does the same, but says nothing about errors.
    comm.close()?;
    Ok(())
}
