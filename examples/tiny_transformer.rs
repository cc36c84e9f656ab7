//! A transformer of two layers, run whole, tensor-parallel and pipeline-parallel, with equal outputs.
//!
//! Tensor-parallel: each rank has some attention heads and some columns of the MLP, and the partial results of every block are
//! added up by `all_reduce` (`MPI_Allreduce`), twice a layer. Pipeline-parallel: each rank has some layers and passes
//! activations on with `send` and `recv`, one sequence after another. Ranks that the model has no heads or layers for take part
//! with nothing. The weights are seeded, so no files are needed. Usage: `tiny_transformer [SEQUENCES]`.
//!
//! ```sh
//! cargo run --release -- launch -n 4 -- target/debug/examples/tiny_transformer
//! ```

use std::{error::Error, ops::Range, time::Instant};

use raccl::{Communicator, Config, Max, Sum};

const WIDTH: usize = 64;
const HEADS: usize = 4;
const HEAD: usize = WIDTH / HEADS;
const HIDDEN: usize = 4 * WIDTH;
const LAYERS: usize = 2;
const TOKENS: usize = 24;
/// Adding up in another order changes the last bits of f32 sums of this size, and no more.
const TOLERANCE: f32 = 1e-4;

fn main() -> Result<(), Box<dyn Error>> {
    let sequences: usize = std::env::args().nth(1).map_or(Ok(4), |sequences| sequences.parse())?;
    let comm = Config::from_env()?.connect()?;
    let model: Vec<Layer> = (0..LAYERS).map(|layer| Layer::seeded(layer as u64)).collect();
    let inputs: Vec<Matrix> =
        (0..sequences).map(|i| Matrix::seeded(TOKENS, WIDTH, 1000 + i as u64, 1.0)).collect();

    let begin = Instant::now();
    let whole: Vec<Matrix> = inputs.iter().map(|input| run_whole(&model, input)).collect();
    let serial = begin.elapsed().as_secs_f64();

    comm.barrier()?;
    let begin = Instant::now();
    let tensor = inputs
        .iter()
        .map(|input| run_tensor_parallel(&comm, &model, input))
        .collect::<Result<Vec<_>, _>>()?;
    let tensor_time = begin.elapsed().as_secs_f64();

    comm.barrier()?;
    let begin = Instant::now();
    let pipeline = run_pipeline_parallel(&comm, &model, &inputs)?;
    let pipeline_time = begin.elapsed().as_secs_f64();

    let mut worst = [distance(&whole, &tensor), distance(&whole, &pipeline)];
    comm.all_reduce(&mut worst, Max)?;
    // Written so that NaN fails as well.
    if !(worst[0] <= TOLERANCE && worst[1] == 0.0) {
        return Err(
            format!("tensor-parallel differs by {}, pipeline-parallel by {}", worst[0], worst[1]).into()
        );
    }
    if comm.rank() == 0 {
        let sum: f32 = whole.iter().flat_map(|output| &output.values).map(|x| x.abs()).sum();
        println!("answer: {sum:.3}");
        println!("tensor-parallel: speed-up {:.2}, largest difference {:e}", serial / tensor_time, worst[0]);
        println!("pipeline-parallel: speed-up {:.2}, no difference", serial / pipeline_time);
        println!("ok");
    }
    comm.close()?;
    Ok(())
}

fn run_whole(model: &[Layer], input: &Matrix) -> Matrix {
    model.iter().fold(input.clone(), |x, layer| layer.apply(&x))
}

/// Every rank computes its heads and its part of the MLP; the sums are the whole blocks' outputs.
fn run_tensor_parallel(comm: &Communicator, model: &[Layer], input: &Matrix) -> Result<Matrix, raccl::Error> {
    let share = |total: usize| comm.rank() * total / comm.size()..(comm.rank() + 1) * total / comm.size();
    let mut x = input.clone();
    for layer in model {
        let mut attended = layer.attention(&x.normalised(), share(HEADS));
        comm.all_reduce(&mut attended.values, Sum)?;
        x.add(&attended);
        let mut projected = layer.mlp(&x.normalised(), share(HIDDEN));
        comm.all_reduce(&mut projected.values, Sum)?;
        x.add(&projected);
    }
    Ok(x)
}

/// Every rank applies its layers and passes the result on; while it works on one sequence, the next rank has the one before.
fn run_pipeline_parallel(
    comm: &Communicator,
    model: &[Layer],
    inputs: &[Matrix],
) -> Result<Vec<Matrix>, raccl::Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let mine = rank * LAYERS / size..(rank + 1) * LAYERS / size;
    let mut outputs = inputs.to_vec();
    for (tag, x) in outputs.iter_mut().enumerate() {
        if rank > 0 {
            comm.recv(&mut x.values, rank - 1, tag as u64)?;
        }
        *x = run_whole(&model[mine.clone()], x);
        if rank + 1 < size {
            comm.send(&x.values, rank + 1, tag as u64)?;
        }
    }
    // The last rank has the results.
    for x in &mut outputs {
        comm.broadcast(&mut x.values, size - 1)?;
    }
    Ok(outputs)
}

/// The largest difference between two runs.
fn distance(left: &[Matrix], right: &[Matrix]) -> f32 {
    let pairs = left.iter().zip(right).flat_map(|(l, r)| l.values.iter().zip(&r.values));
    pairs.map(|(l, r)| (l - r).abs()).fold(0.0, |worst, x| if x > worst || x.is_nan() { x } else { worst })
}

/// The weights of a layer.
struct Layer {
    query: Matrix,
    key: Matrix,
    value: Matrix,
    output: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Layer {
    fn seeded(seed: u64) -> Layer {
        let weights = |index: u64, rows: usize, columns: usize| {
            Matrix::seeded(rows, columns, seed * 6 + index, 1.0 / (rows as f32).sqrt())
        };
        Layer {
            query: weights(0, WIDTH, WIDTH),
            key: weights(1, WIDTH, WIDTH),
            value: weights(2, WIDTH, WIDTH),
            output: weights(3, WIDTH, WIDTH),
            up: weights(4, WIDTH, HIDDEN),
            down: weights(5, HIDDEN, WIDTH),
        }
    }

    fn apply(&self, x: &Matrix) -> Matrix {
        let mut x = x.clone();
        x.add(&self.attention(&x.normalised(), 0..HEADS));
        x.add(&self.mlp(&x.normalised(), 0..HIDDEN));
        x
    }

    /// Causal self-attention with some of the heads: their share of the block's output.
    fn attention(&self, x: &Matrix, heads: Range<usize>) -> Matrix {
        let mut sum = Matrix::zero(x.rows, WIDTH);
        for head in heads {
            let columns = head * HEAD..(head + 1) * HEAD;
            let [query, key, value] = [&self.query, &self.key, &self.value]
                .map(|weights| x.times(&weights.columns(columns.clone())));
            let mut mixed = Matrix::zero(x.rows, HEAD);
            for row in 0..x.rows {
                let score = |other: usize| {
                    let dot: f32 = query.row(row).iter().zip(key.row(other)).map(|(q, k)| q * k).sum();
                    dot / (HEAD as f32).sqrt()
                };
                let scores: Vec<f32> = (0..=row).map(score).collect();
                let most = scores.iter().copied().fold(f32::MIN, f32::max);
                let weights: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f32 = weights.iter().sum();
                for (other, weight) in weights.iter().enumerate() {
                    for (sum, v) in mixed.row_mut(row).iter_mut().zip(value.row(other)) {
                        *sum += weight / total * v;
                    }
                }
            }
            sum.add(&mixed.times(&self.output.row_range(columns)));
        }
        sum
    }

    /// The MLP with some of its hidden units: their share of the block's output.
    fn mlp(&self, x: &Matrix, units: Range<usize>) -> Matrix {
        let mut hidden = x.times(&self.up.columns(units.clone()));
        // SiLU.
        hidden.values.iter_mut().for_each(|h| *h /= 1.0 + (-*h).exp());
        hidden.times(&self.down.row_range(units))
    }
}

/// Row after row.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn zero(rows: usize, columns: usize) -> Matrix {
        Matrix { rows, columns, values: vec![0.0; rows * columns] }
    }

    /// Numbers between -`scale` and `scale`, the same on every rank.
    fn seeded(rows: usize, columns: usize, seed: u64, scale: f32) -> Matrix {
        let mut state = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
        };
        Matrix { rows, columns, values: (0..rows * columns).map(next).collect() }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.columns..(row + 1) * self.columns]
    }

    fn row_range(&self, rows: Range<usize>) -> Matrix {
        let values = self.values[rows.start * self.columns..rows.end * self.columns].to_vec();
        Matrix { rows: rows.len(), columns: self.columns, values }
    }

    fn columns(&self, columns: Range<usize>) -> Matrix {
        let values = (0..self.rows).flat_map(|row| self.row(row)[columns.clone()].iter().copied()).collect();
        Matrix { rows: self.rows, columns: columns.len(), values }
    }

    fn times(&self, other: &Matrix) -> Matrix {
        let mut product = Matrix::zero(self.rows, other.columns);
        for row in 0..self.rows {
            for (inner, factor) in self.row(row).iter().enumerate() {
                for (sum, x) in product.row_mut(row).iter_mut().zip(other.row(inner)) {
                    *sum += factor * x;
                }
            }
        }
        product
    }

    fn add(&mut self, other: &Matrix) {
        self.values.iter_mut().zip(&other.values).for_each(|(x, y)| *x += y);
    }

    /// Every row scaled to a root mean square of 1.
    fn normalised(&self) -> Matrix {
        let mut normal = self.clone();
        for row in 0..normal.rows {
            let square: f32 = self.row(row).iter().map(|x| x * x).sum();
            let scale = 1.0 / (square / self.columns as f32 + 1e-6).sqrt();
            normal.row_mut(row).iter_mut().for_each(|x| *x *= scale);
        }
        normal
    }
}
