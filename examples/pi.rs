//! Pi by the area under 4 / (1 + x^2), every rank adding up its share of the strips.
//!
//! The classic of MPI courses: `MPI_Bcast` of the number of strips from rank 0, `MPI_Allreduce` (MPI's version uses
//! `MPI_Reduce`) of the partial sums. Usage: `pi [STRIPS]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/release/examples/pi 100000000
//! ```

use std::{error::Error, f64::consts::PI, time::Instant};

use raccl::{Config, Sum};

fn main() -> Result<(), Box<dyn Error>> {
    let comm = Config::from_env()?.connect()?;
    // Only rank 0 looks at the arguments, as if it alone had read them from a terminal.
    let mut strips = [0_u64];
    if comm.rank() == 0 {
        strips[0] = std::env::args().nth(1).map_or(Ok(4_000_000), |strips| strips.parse())?;
    }
    comm.broadcast(&mut strips, 0)?;

    comm.barrier()?;
    let begin = Instant::now();
    let mut pi = [area(comm.rank() as u64, comm.size() as u64, strips[0])];
    comm.all_reduce(&mut pi, Sum)?;
    let parallel = begin.elapsed();

    if comm.rank() == 0 {
        let begin = Instant::now();
        let serial = area(0, 1, strips[0]);
        let speed_up = begin.elapsed().as_secs_f64() / parallel.as_secs_f64();
        if (pi[0] - serial).abs() > 1e-9 || (pi[0] - PI).abs() > 1e-6 {
            return Err(format!("{} instead of {serial} (serial) and {PI}", pi[0]).into());
        }
        println!("answer: {:.9}", pi[0]);
        println!("speed-up {speed_up:.2} on {} ranks", comm.size());
        println!("ok");
    }
    comm.close()?;
    Ok(())
}

/// The area of every `step`-th strip from `first` on.
fn area(first: u64, step: u64, strips: u64) -> f64 {
    let width = 1.0 / strips as f64;
    let height = |strip: u64| {
        let x = (strip as f64 + 0.5) * width;
        4.0 / (1.0 + x * x)
    };
    (first..strips).step_by(step as usize).map(height).sum::<f64>() * width
}
