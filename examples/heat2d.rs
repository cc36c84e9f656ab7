//! Heat spreading over a square plate, with halo exchange.
//!
//! The ranks form a grid (`MPI_Dims_create`, `MPI_Cart_create` in MPI), each has a rectangle of the plate and swaps its edges
//! with its neighbours before every step: rows go as they are, columns are packed first (MPI has `MPI_Type_vector` for that).
//! All eight transfers are in flight at once. `MPI_Allreduce` finds the largest change. Usage: `heat2d [N] [STEPS]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/release/examples/heat2d 1000 500
//! ```

use std::{error::Error, ops::Range, time::Instant};

use raccl::{Communicator, Config, Max};

/// How much of the difference to its neighbours a point takes over in a step; stable below a quarter.
const RATE: f64 = 0.2;

fn main() -> Result<(), Box<dyn Error>> {
    let n: usize = std::env::args().nth(1).map_or(Ok(96), |n| n.parse())?;
    let steps: usize = std::env::args().nth(2).map_or(Ok(100), |steps| steps.parse())?;
    let comm = Config::from_env()?.connect()?;

    comm.barrier()?;
    let begin = Instant::now();
    let (mine, change) = simulate(&comm, n, steps)?;
    let parallel = begin.elapsed();

    // Every rank checks its own part against the whole plate, computed alone.
    let begin = Instant::now();
    let mut whole = Part::new(n, 0..n, 0..n);
    for _ in 0..steps {
        whole.step();
    }
    let serial = begin.elapsed();
    let mut worst = [0.0_f64];
    for row in mine.rows.clone() {
        for column in mine.columns.clone() {
            let difference =
                mine.at(row - mine.rows.start, column - mine.columns.start) - whole.at(row, column);
            worst[0] = worst[0].max(difference.abs());
        }
    }
    comm.all_reduce(&mut worst, Max)?;
    if worst[0] != 0.0 {
        return Err(format!("the plates differ by {}", worst[0]).into());
    }
    if comm.rank() == 0 {
        println!("answer: {change:.12}");
        println!("speed-up {:.2} on {} ranks", serial.as_secs_f64() / parallel.as_secs_f64(), comm.size());
        println!("ok");
    }
    comm.close()?;
    Ok(())
}

/// This rank's part after `steps` steps, and the largest change anywhere in the last one.
fn simulate(comm: &Communicator, n: usize, steps: usize) -> Result<(Part, f64), raccl::Error> {
    let (down, across) = grid(comm.size());
    let (row, column) = (comm.rank() / across, comm.rank() % across);
    let share = |index: usize, parts: usize| index * n / parts..(index + 1) * n / parts;
    let mut part = Part::new(n, share(row, down), share(column, across));
    let neighbour = |there: bool, offset: isize| there.then(|| comm.rank().wrapping_add_signed(offset));
    let across_step = across as isize;
    // Above, below, left, right.
    let neighbours = [
        neighbour(row > 0, -across_step),
        neighbour(row + 1 < down, across_step),
        neighbour(column > 0, -1),
        neighbour(column + 1 < across, 1),
    ];
    let mut change = [0.0];
    for _ in 0..steps {
        let edges = [0, 1, 2, 3].map(|side| part.edge(side));
        let mut halos = edges.clone();
        comm.scope(|scope| {
            for ((neighbour, edge), halo) in neighbours.iter().zip(&edges).zip(&mut halos) {
                if let Some(peer) = *neighbour {
                    // The scope waits for all of them; one message a neighbour and step, so no tags are needed.
                    let _ = scope.recv(halo, peer, 0)?;
                    let _ = scope.send(edge, peer, 0)?;
                }
            }
            Ok(())
        })?;
        for (side, halo) in halos.iter().enumerate().filter(|&(side, _)| neighbours[side].is_some()) {
            part.set_halo(side, halo);
        }
        change[0] = part.step();
    }
    comm.all_reduce(&mut change, Max)?;
    Ok((part, change[0]))
}

/// The most square grid of so many ranks: rows, columns.
fn grid(size: usize) -> (usize, usize) {
    let down = (1..=size).rev().find(|&down| size.is_multiple_of(down) && down * down <= size).unwrap_or(1);
    (down, size / down)
}

/// A rectangle of the plate with a border of one point around it.
struct Part {
    rows: Range<usize>,
    columns: Range<usize>,
    width: usize,
    points: Vec<f64>,
}

impl Part {
    /// The plate is cold, with a hot square off its middle; outside it is 0 degrees for ever.
    fn new(n: usize, rows: Range<usize>, columns: Range<usize>) -> Part {
        let width = columns.len() + 2;
        let mut part = Part { points: vec![0.0; width * (rows.len() + 2)], rows, columns, width };
        for row in part.rows.clone().filter(|row| (n / 4..n / 2).contains(row)) {
            for column in part.columns.clone().filter(|column| (n / 3..n / 2).contains(column)) {
                let index = (row - part.rows.start + 1) * width + column - part.columns.start + 1;
                part.points[index] = 100.0;
            }
        }
        part
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.points[(row + 1) * self.width + column + 1]
    }

    /// Indices of the points just inside (`inset` 1) or outside (0) a side, from its beginning to its end.
    fn side(&self, side: usize, inset: usize) -> Vec<usize> {
        let (height, width) = (self.rows.len() + 2, self.width);
        match side {
            0 => (1..width - 1).map(|column| inset * width + column).collect(),
            1 => (1..width - 1).map(|column| (height - 1 - inset) * width + column).collect(),
            2 => (1..height - 1).map(|row| row * width + inset).collect(),
            _ => (1..height - 1).map(|row| row * width + width - 1 - inset).collect(),
        }
    }

    fn edge(&self, side: usize) -> Vec<f64> {
        self.side(side, 1).into_iter().map(|index| self.points[index]).collect()
    }

    fn set_halo(&mut self, side: usize, values: &[f64]) {
        for (index, value) in self.side(side, 0).into_iter().zip(values) {
            self.points[index] = *value;
        }
    }

    /// One step in time; returns the largest change of a point.
    fn step(&mut self) -> f64 {
        let (old, width) = (self.points.clone(), self.width);
        let mut change = 0.0_f64;
        for row in 1..=self.rows.len() {
            for index in row * width + 1..(row + 1) * width - 1 {
                let around = old[index - width] + old[index + width] + old[index - 1] + old[index + 1];
                self.points[index] = old[index] + RATE * (around - 4.0 * old[index]);
                change = change.max((self.points[index] - old[index]).abs());
            }
        }
        change
    }
}
