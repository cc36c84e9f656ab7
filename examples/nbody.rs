//! Bodies that attract each other: every rank moves its own, and needs the positions of all.
//!
//! `MPI_Allgatherv` of the positions before every step, with parts of unequal length; the total energy by `MPI_Allreduce`.
//! A position is a plain struct that bytemuck knows: what `MPI_Type_create_struct` is for. Usage: `nbody [BODIES] [STEPS]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/release/examples/nbody 4000 10
//! ```

use std::{error::Error, ops::Range, time::Instant};

use raccl::{Communicator, Config, Sum};

/// x, y, z and mass.
type Body = [f64; 4];

const STEP: f64 = 1e-3;
/// Keeps close encounters finite.
const SOFTENING: f64 = 1e-2;

fn main() -> Result<(), Box<dyn Error>> {
    let bodies: usize = std::env::args().nth(1).map_or(Ok(400), |bodies| bodies.parse())?;
    let steps: usize = std::env::args().nth(2).map_or(Ok(5), |steps| steps.parse())?;
    let comm = Config::from_env()?.connect()?;
    let alone = Config::new().connect()?;

    comm.barrier()?;
    let begin = Instant::now();
    let (positions, energy) = simulate(&comm, bodies, steps)?;
    let parallel = begin.elapsed();

    if comm.rank() == 0 {
        // The same code in a group of one is the serial program.
        let begin = Instant::now();
        let (expected, serial_energy) = simulate(&alone, bodies, steps)?;
        let speed_up = begin.elapsed().as_secs_f64() / parallel.as_secs_f64();
        if positions != expected {
            return Err("the positions differ from the serial run".into());
        }
        // The sum over ranks rounds in another order than the sum over bodies.
        if (energy - serial_energy).abs() > 1e-9 * serial_energy.abs() {
            return Err(format!("the energy is {energy}, serial {serial_energy}").into());
        }
        println!("answer: {energy:.9}");
        println!("speed-up {speed_up:.2} on {} ranks", comm.size());
        println!("ok");
    }
    comm.close()?;
    Ok(())
}

/// All positions and the kinetic energy after `steps` steps.
fn simulate(comm: &Communicator, count: usize, steps: usize) -> Result<(Vec<Body>, f64), raccl::Error> {
    let share = |rank: usize| rank * count / comm.size()..(rank + 1) * count / comm.size();
    let counts: Vec<usize> = (0..comm.size()).map(|rank| share(rank).len()).collect();
    let mine = share(comm.rank());
    let mut all: Vec<Body> = (0..count).map(body).collect();
    let mut velocities = vec![[0.0; 3]; mine.len()];
    for _ in 0..steps {
        advance(&mut all, mine.clone(), &mut velocities);
        // In place: this rank's part of `all` is what it contributes.
        comm.all_gather_v(&mut all, &counts)?;
    }
    let kinetic = velocities.iter().zip(&all[mine]).map(|(v, body)| {
        let square: f64 = v.iter().map(|x| x * x).sum();
        0.5 * body[3] * square
    });
    let mut energy = [kinetic.sum::<f64>()];
    comm.all_reduce(&mut energy, Sum)?;
    Ok((all, energy[0]))
}

/// Moves the bodies in `mine` by one step.
fn advance(all: &mut [Body], mine: Range<usize>, velocities: &mut [[f64; 3]]) {
    for (index, velocity) in mine.clone().zip(velocities.iter_mut()) {
        let here = all[index];
        for there in &*all {
            let distance: [f64; 3] = std::array::from_fn(|axis| there[axis] - here[axis]);
            let square: f64 = distance.iter().map(|x| x * x).sum::<f64>() + SOFTENING;
            let pull = there[3] / (square * square.sqrt());
            for (v, x) in velocity.iter_mut().zip(distance) {
                *v += STEP * pull * x;
            }
        }
    }
    for (body, velocity) in all[mine].iter_mut().zip(velocities) {
        for (x, v) in body.iter_mut().zip(velocity) {
            *x += STEP * *v;
        }
    }
}

/// A body somewhere in the unit cube; the same on every rank.
fn body(index: usize) -> Body {
    let mut state = index as u64 + 1;
    std::array::from_fn(|_| {
        state =
            (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9).wrapping_add(0x9E37_79B9_7F4A_7C15);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    })
}
