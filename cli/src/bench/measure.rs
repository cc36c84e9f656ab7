//! One size of one operation: timed in batches, timed call by call, and verified.

use std::time::{Duration, Instant};

use raccl::{ByteCommunicator, Communicator, DType, ReduceOp, Result};

use super::buffer::Buffer;
use super::operation::Operation;
use super::pattern::{Pattern, Tile, poison};

/// Batches of back-to-back calls. One more before them warms up.
const BATCHES: usize = 9;

/// A batch of the default number of calls is not made longer than this.
const LONGEST_BATCH: Duration = Duration::from_millis(250);

/// Calls that are timed one by one, at least and at most.
const SINGLE: (u64, u64) = (9, 1000);

/// What every message has as its tag.
const TAG: u64 = 0;

/// What is measured, on one rank of a group.
pub(super) struct Bench<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) operation: Operation,
    pub(super) dtype: DType,
    pub(super) reduce: ReduceOp,
    /// Calls in a batch, if the user says so.
    pub(super) iterations: Option<u64>,
    /// Calls before the batches, if the user says so.
    pub(super) warmup: Option<u64>,
    pub(super) check: bool,
    /// RDMA devices know the buffers.
    pub(super) registered: bool,
}

/// The figures of one size. Times are in microseconds; what is of one rank is of rank 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) bytes: u64,
    pub(super) batch_median: f64,
    pub(super) batch_min: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
    /// Wrong elements on all ranks, if they were checked.
    pub(super) wrong: Option<u64>,
}

/// The buffers of one size.
struct Case<'a> {
    bench: &'a Bench<'a>,
    input: &'a mut Buffer,
    output: &'a mut Buffer,
    in_length: usize,
    out_length: usize,
}

impl Bench<'_> {
    /// Bytes of the buffers for sizes up to `bytes`.
    pub(super) fn buffers(&self, bytes: u64) -> anyhow::Result<(Buffer, Buffer)> {
        let bytes = usize::try_from(bytes)?;
        let (input, output) = self.operation.buffers(bytes, self.comm.size());
        let make = |length| match self.registered {
            true => Buffer::registered(self.comm, length),
            false => Buffer::new(length),
        };
        Ok((make(input)?, make(output)?))
    }

    /// Measures one size. All ranks call it, and all get rank 0's times.
    pub(super) fn run(&self, bytes: u64, input: &mut Buffer, output: &mut Buffer) -> Result<Figures> {
        // Buffers of that length have been made.
        let (in_length, out_length) = self.operation.buffers(bytes as usize, self.comm.size());
        let mut case = Case { bench: self, input, output, in_length, out_length };
        let (pattern, rank) = (self.pattern(), self.comm.rank());
        case.prepare(&pattern.input(rank));
        let expected = self.check.then(|| case.expected(&pattern));

        let iterations = self.agree_on_iterations(bytes, &mut case)?;
        case.batch(self.warmup.unwrap_or(iterations))?;
        let mut batches = [0.0; BATCHES];
        for batch in &mut batches {
            self.comm.barrier()?;
            let start = Instant::now();
            case.batch(iterations)?;
            *batch = microseconds(start.elapsed()) / iterations as f64;
        }
        batches.sort_by(f64::total_cmp);
        let singles = self.one_by_one(iterations, &mut case)?;
        let wrong = expected.map(|expected| case.verify(&expected)).transpose()?;
        let at = |part: f64| singles[((singles.len() - 1) as f64 * part).round() as usize];
        Ok(Figures {
            bytes,
            batch_median: batches[BATCHES / 2],
            batch_min: batches[0],
            p50: at(0.5),
            p99: at(0.99),
            max: at(1.0),
            wrong,
        })
    }

    fn pattern(&self) -> Pattern {
        let reduce = self.operation.reduces().then_some(self.reduce);
        Pattern { dtype: self.dtype, reduce, ranks: self.comm.size() }
    }

    /// The calls of a batch: as many as the user wants, or a number by size, and fewer on slow links.
    fn agree_on_iterations(&self, bytes: u64, case: &mut Case<'_>) -> Result<u64> {
        case.batch(1)?;
        self.comm.barrier()?;
        let start = Instant::now();
        case.batch(1)?;
        let most = match bytes {
            0..=4_096 => 2000,
            4_097..=262_144 => 200,
            262_145..=4_194_304 => 20,
            _ => 4,
        };
        let fit = LONGEST_BATCH.as_nanos() / start.elapsed().as_nanos().max(1);
        let mut agreed = [u64::try_from(fit).unwrap_or(most).clamp(1, most)];
        self.comm.broadcast(&mut agreed, 0)?;
        Ok(self.iterations.unwrap_or(agreed[0]))
    }

    /// Times calls one by one, each after a barrier; the time of a call is that of its slowest rank.
    fn one_by_one(&self, iterations: u64, case: &mut Case<'_>) -> Result<Vec<f64>> {
        let calls = iterations.clamp(SINGLE.0, SINGLE.1);
        let mut times = Vec::new();
        for _ in 0..calls {
            self.comm.barrier()?;
            let start = Instant::now();
            case.call()?;
            times.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        self.comm.all_reduce(&mut times, raccl::Max)?;
        let mut times: Vec<_> = times.into_iter().map(|time| time as f64 / 1e3).collect();
        times.sort_by(f64::total_cmp);
        Ok(times)
    }
}

impl Case<'_> {
    /// Fills the buffers with what this rank contributes.
    fn prepare(&mut self, mine: &Tile) {
        let (operation, rank) = (self.bench.operation, self.bench.comm.rank());
        mine.fill(self.input.first_mut(self.in_length), 0);
        let output = self.output.first_mut(self.out_length);
        poison(output);
        if operation == Operation::Broadcast && rank == 0 {
            mine.fill(output, 0);
        }
    }

    /// One call of the operation.
    fn call(&mut self) -> Result<()> {
        let Bench { comm, operation, dtype, reduce, .. } = *self.bench;
        let (input, output) = (self.input.first(self.in_length), self.output.first_mut(self.out_length));
        let comm: &dyn ByteCommunicator = comm;
        match (operation, comm.rank()) {
            (Operation::AllReduce, _) => comm.all_reduce_into(input, output, dtype, reduce),
            (Operation::AllGather, _) => comm.all_gather_into(input, output, dtype),
            (Operation::ReduceScatter, _) => comm.reduce_scatter_into(input, output, dtype, reduce),
            (Operation::Broadcast, _) => comm.broadcast(output, dtype, 0),
            (Operation::Barrier, _) => comm.barrier(),
            (Operation::SendRecv, 0) => comm.send(input, 1, TAG),
            (Operation::SendRecv, 1) => comm.recv(output, 0, TAG).map(drop),
            (Operation::PingPong, 0) => {
                comm.send(input, 1, TAG)?;
                comm.recv(output, 1, TAG).map(drop)
            }
            (Operation::PingPong, 1) => {
                comm.recv(output, 0, TAG)?;
                comm.send(input, 0, TAG)
            }
            (Operation::SendRecv | Operation::PingPong, _) => Ok(()),
        }
    }

    /// Calls back to back. A batch of sends ends when the last has arrived.
    fn batch(&mut self, calls: u64) -> Result<()> {
        for _ in 0..calls {
            self.call()?;
        }
        let comm: &dyn ByteCommunicator = self.bench.comm;
        match (self.bench.operation, comm.rank()) {
            (Operation::SendRecv, 0) => comm.recv(&mut [], 1, TAG).map(drop),
            (Operation::SendRecv, 1) => comm.send(&[], 0, TAG),
            _ => Ok(()),
        }
    }

    /// What has to be in the output, as parts of it.
    fn expected(&self, pattern: &Pattern) -> Vec<Part> {
        let Bench { comm, operation, dtype, .. } = *self.bench;
        let (rank, ranks) = (comm.rank(), comm.size());
        let whole = |tile: Tile, first: usize| vec![Part { at: 0, length: self.out_length, tile, first }];
        match operation {
            Operation::AllReduce => whole(pattern.reduced(), 0),
            Operation::ReduceScatter => whole(pattern.reduced(), rank * self.out_length / dtype.size()),
            Operation::Broadcast => whole(pattern.input(0), 0),
            Operation::AllGather => {
                let length = self.in_length;
                let part = |rank| Part { at: rank * length, length, tile: pattern.input(rank), first: 0 };
                (0..ranks).map(part).collect()
            }
            Operation::SendRecv if rank == 1 => whole(pattern.input(0), 0),
            Operation::PingPong if rank < 2 => whole(pattern.input(1 - rank), 0),
            Operation::SendRecv | Operation::PingPong | Operation::Barrier => Vec::new(),
        }
    }

    /// Looks at every element after the timed calls, and again after one that has to write them all. Returns
    /// the wrong ones of all ranks.
    fn verify(&mut self, expected: &[Part]) -> Result<u64> {
        let mut wrong = [self.count_wrong(expected)];
        let is_source = self.bench.operation == Operation::Broadcast && self.bench.comm.rank() == 0;
        if !is_source {
            poison(self.output.first_mut(self.out_length));
        }
        self.call()?;
        wrong[0] += self.count_wrong(expected);
        self.bench.comm.all_reduce(&mut wrong, raccl::Sum)?;
        Ok(wrong[0])
    }

    fn count_wrong(&self, expected: &[Part]) -> u64 {
        let output = self.output.first(self.out_length);
        expected
            .iter()
            .map(|part| part.tile.count_wrong(&output[part.at..part.at + part.length], part.first))
            .sum()
    }
}

/// What has to be in a part of the output.
struct Part {
    at: usize,
    length: usize,
    tile: Tile,
    /// The index of its first element in the pattern.
    first: usize,
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
