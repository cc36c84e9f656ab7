//! Predicts the time of an operation by running the plans of all ranks on a model of the machine.
//!
//! The model: a rank is one processor that does one thing at a time: it starts messages (each takes `message_ns`) and folds
//! (`fold_ps` for each byte of each operand but the first). With own links, each ordered pair of ranks has a wire of its own;
//! with shared cabling, a rank has one wire out and one wire in for all its messages. A wire carries one message at a time, in
//! the order in which they are started, at `byte_ps` a byte; `latency_ns` after its first byte has left, a message begins to
//! arrive. Links hold everything that was sent; copies and receives cost nothing. Time is counted in picoseconds.
#![forbid(unsafe_code)]

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use super::{Action, After, Algorithm, Cabling, Leaf, Plan, Shape, Tuning, make};
use crate::reduce::Repr;

/// The predicted time until the last rank is done, in picoseconds; `None` when the algorithm cannot do it, or needs a cable
/// that is not there. `shape.rank` does not matter.
pub(crate) fn simulate(shape: &Shape, algorithm: Algorithm, tuning: &Tuning) -> Option<u64> {
    let mut machine = Machine::new(shape, tuning);
    // One plan at a time is turned into what the simulation needs of it: with thousands of ranks, plans are large together.
    for rank in 0..shape.size {
        let plan = make(&Shape { rank, ..shape.clone() }, algorithm)?;
        machine.add(rank, &plan)?;
    }
    machine.connect();
    Some(machine.run())
}

/// Indices of steps count over all ranks.
struct Machine<'a> {
    tuning: &'a Tuning,
    size: usize,
    /// Elements of a chunk.
    chunk: usize,
    raw_size: u64,
    acc_size: u64,
    steps: Vec<Step>,
    /// For each step the steps that wait for it.
    followers: Vec<Vec<Follower>>,
    /// Sending and receiving rank of each stream with the step that sends it, and with the step that receives it.
    sends: Vec<(u32, u32, u32)>,
    receives: Vec<(u32, u32, u32)>,
    /// For each chunk of each step: how much has to happen before it can be handled, and when the last of it happens.
    waiting: Vec<(u32, u64)>,
    /// Until when each rank's processor and each wire is busy.
    processor: Vec<u64>,
    wires: HashMap<(u32, u32), u64>,
    ports_in: Vec<u64>,
    events: BinaryHeap<Reverse<Event>>,
    end: u64,
}

/// What the simulation needs of a step.
struct Step {
    rank: u32,
    elements: usize,
    chunks: u32,
    /// Chunks that are done.
    done: u32,
    /// Where its chunks begin in [`Machine::waiting`].
    first: usize,
    work: Work,
}

enum Work {
    Send {
        to: u32,
        repr: Repr,
        /// The step that receives it.
        receiver: u32,
    },
    Fold {
        operands: u64,
    },
    /// A receive or a copy.
    Free,
}

struct Follower {
    step: u32,
    whole: bool,
}

/// Something that happens to a chunk of a step, ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: u64,
    what: What,
    step: u32,
    chunk: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// The first byte of what a sending step sends reaches the receiver's only wire.
    Arrives,
    /// Nothing more has to happen before it can be handled.
    Ready,
}

impl<'a> Machine<'a> {
    fn new(shape: &Shape, tuning: &'a Tuning) -> Machine<'a> {
        let raw_size = shape.raw_size.max(1);
        Machine {
            tuning,
            size: shape.size,
            chunk: usize::try_from(tuning.chunk).unwrap_or(usize::MAX).div_euclid(raw_size).max(1),
            raw_size: raw_size as u64,
            acc_size: shape.acc_size as u64,
            steps: Vec::new(),
            followers: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
            waiting: Vec::new(),
            processor: vec![0; shape.size],
            wires: HashMap::new(),
            ports_in: vec![0; shape.size],
            events: BinaryHeap::new(),
            end: 0,
        }
    }

    /// Takes over a rank's plan; `None` if a cable is missing.
    fn add(&mut self, rank: usize, plan: &Plan) -> Option<()> {
        let base = self.steps.len() as u32;
        for (index, step) in plan.steps.iter().enumerate() {
            let index = base + index as u32;
            let mut peers_awaited = 0;
            let (elements, work) = match &step.action {
                Action::Send { to, from } => {
                    if !self.is_cabled(rank, *to) {
                        return None;
                    }
                    self.sends.push((rank as u32, *to as u32, index));
                    (from.len(), Work::Send { to: *to as u32, repr: from.repr, receiver: u32::MAX })
                }
                Action::Recv { from, into } => {
                    peers_awaited = 1;
                    self.receives.push((*from as u32, rank as u32, index));
                    (into.len(), Work::Free)
                }
                Action::RecvFold { leaves, into, .. } => {
                    for leaf in leaves {
                        if let Leaf::Peer { rank: from, .. } = leaf {
                            peers_awaited += 1;
                            self.receives.push((*from as u32, rank as u32, index));
                        }
                    }
                    (into.len(), Work::Fold { operands: leaves.len() as u64 })
                }
                Action::Copy { into, .. } => (into.len(), Work::Free),
            };
            for after in &step.after {
                let (earlier, whole) = match *after {
                    After::Whole(earlier) => (earlier, true),
                    After::Stream(earlier) => (earlier, false),
                };
                self.followers[base as usize + earlier].push(Follower { step: index, whole });
            }
            let chunks = elements.div_ceil(self.chunk).max(1) as u32;
            let first = self.waiting.len();
            // Chunks go in order, so each but the first waits for the one before it.
            let waits = peers_awaited + step.after.len() as u32;
            self.waiting.extend((0..chunks).map(|chunk| (waits + u32::from(chunk > 0), 0)));
            self.steps.push(Step { rank: rank as u32, elements, chunks, done: 0, first, work });
            self.followers.push(Vec::new());
        }
        Some(())
    }

    fn is_cabled(&self, one: usize, other: usize) -> bool {
        let apart = one.abs_diff(other);
        match self.tuning.cabling {
            Cabling::Shared | Cabling::Mesh => true,
            Cabling::Ring => apart == 1 || apart == self.size - 1,
            Cabling::Line => apart == 1,
        }
    }

    /// Tells each sending step which step receives what it sends.
    fn connect(&mut self) {
        // Indices grow with the order of the steps, so streams of a pair keep their order.
        self.sends.sort_unstable();
        self.receives.sort_by_key(|&(from, to, _)| (from, to));
        for (&(_, _, send), &(_, _, receive)) in self.sends.iter().zip(&self.receives) {
            if let Work::Send { receiver, .. } = &mut self.steps[send as usize].work {
                *receiver = receive;
            }
        }
    }

    fn run(mut self) -> u64 {
        for step in 0..self.steps.len() {
            if self.waiting[self.steps[step].first].0 == 0 {
                self.events.push(Reverse(Event { at: 0, what: What::Ready, step: step as u32, chunk: 0 }));
            }
        }
        while let Some(Reverse(Event { at, what, step, chunk })) = self.events.pop() {
            match what {
                What::Arrives => self.arrive(at, step, chunk),
                What::Ready => self.handle(at, step, chunk),
            }
        }
        debug_assert!(self.steps.iter().all(|step| step.done == step.chunks), "a plan without deadlock ends");
        self.end
    }

    /// Handles a chunk for which nothing more has to happen.
    fn handle(&mut self, now: u64, index: u32, chunk: u32) {
        let step = &self.steps[index as usize];
        let rank = step.rank;
        let elements =
            (step.elements - (chunk as usize * self.chunk).min(step.elements)).min(self.chunk) as u64;
        let processor = &mut self.processor[rank as usize];
        // When the next chunk may be handled, and when this one is done.
        let (next, done) = match step.work {
            Work::Free => (now, now),
            Work::Fold { operands } => {
                *processor =
                    now.max(*processor) + elements * self.raw_size * (operands - 1) * self.tuning.fold_ps;
                (*processor, *processor)
            }
            Work::Send { to, receiver, .. } => {
                *processor = now.max(*processor) + self.tuning.message_ns * 1000;
                let started = *processor;
                let time = self.wire_time(index, chunk);
                let shared = self.tuning.cabling == Cabling::Shared;
                let wire = self.wires.entry((rank, if shared { rank } else { to })).or_default();
                let left = started.max(*wire);
                let sent = left + time;
                *wire = sent;
                let arrives = left + self.tuning.latency_ns * 1000;
                if shared {
                    self.events.push(Reverse(Event { at: arrives, what: What::Arrives, step: index, chunk }));
                } else {
                    self.count_down(arrives + time, receiver, chunk);
                }
                (started, sent)
            }
        };
        if chunk + 1 < self.steps[index as usize].chunks {
            self.count_down(next, index, chunk + 1);
        }
        self.finish(done, index, chunk);
    }

    /// A message begins to arrive at a rank with one wire for all of them.
    fn arrive(&mut self, now: u64, index: u32, chunk: u32) {
        let Work::Send { to, receiver, .. } = self.steps[index as usize].work else { return };
        let there = now.max(self.ports_in[to as usize]) + self.wire_time(index, chunk);
        self.ports_in[to as usize] = there;
        self.count_down(there, receiver, chunk);
    }

    fn elements(&self, index: u32, chunk: u32) -> u64 {
        let elements = self.steps[index as usize].elements;
        (elements - (chunk as usize * self.chunk).min(elements)).min(self.chunk) as u64
    }

    /// How long a wire needs for what a sending step sends.
    fn wire_time(&self, index: u32, chunk: u32) -> u64 {
        let size = match self.steps[index as usize].work {
            Work::Send { repr: Repr::Acc, .. } => self.acc_size,
            _ => self.raw_size,
        };
        self.elements(index, chunk) * size * self.tuning.byte_ps
    }

    /// A chunk is done: whoever waited for it may go on.
    fn finish(&mut self, now: u64, index: u32, chunk: u32) {
        self.end = self.end.max(now);
        let step = &mut self.steps[index as usize];
        step.done += 1;
        let complete = step.done == step.chunks;
        let followers = std::mem::take(&mut self.followers[index as usize]);
        for follower in &followers {
            if !follower.whole {
                self.count_down(now, follower.step, chunk);
            } else if complete {
                for chunk in 0..self.steps[follower.step as usize].chunks {
                    self.count_down(now, follower.step, chunk);
                }
            }
        }
        if !complete {
            self.followers[index as usize] = followers;
        }
    }

    /// One thing less has to happen before a chunk can be handled.
    fn count_down(&mut self, now: u64, step: u32, chunk: u32) {
        let (waiting, ready) = &mut self.waiting[self.steps[step as usize].first + chunk as usize];
        *waiting -= 1;
        *ready = now.max(*ready);
        if *waiting == 0 {
            self.events.push(Reverse(Event { at: *ready, what: What::Ready, step, chunk }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Collective, cost, explain, tests::shape},
        *,
    };

    const MEGABYTE: usize = 1 << 20;

    /// A chunk that nothing exceeds, so that no step overlaps with the next.
    const WHOLE: u64 = 1 << 40;

    fn collectives(size: usize, bytes: usize) -> [Collective; 5] {
        let parts = vec![bytes / 4 / size; size];
        [
            Collective::Barrier,
            Collective::AllReduce { count: bytes / 4 },
            Collective::AllGather { counts: parts.clone() },
            Collective::ReduceScatter { counts: parts },
            Collective::Broadcast { root: 0, count: bytes / 4 },
        ]
    }

    /// The simulated time by the predicted one, for all sizes.
    fn ratios(
        algorithm: Algorithm,
        tuning: &Tuning,
        collective: impl Fn(usize, usize) -> Collective,
    ) -> Vec<f64> {
        let mut ratios = Vec::new();
        for size in [2, 3, 4, 5, 6, 7, 8, 12, 16, 17] {
            for bytes in [0, 4 << 10, 256 << 10, 16 * MEGABYTE] {
                let shape = shape(collective(size, bytes), size);
                let Some(cost) = cost(&shape, algorithm, tuning) else { continue };
                let Some(simulated) = simulate(&shape, algorithm, tuning) else { continue };
                ratios.push(simulated as f64 / cost.picoseconds(tuning) as f64);
            }
        }
        assert!(!ratios.is_empty());
        ratios
    }

    fn all_reduce(_: usize, bytes: usize) -> Collective {
        Collective::AllReduce { count: bytes / 4 }
    }

    #[test]
    fn one_exchange_takes_what_its_parts_take() {
        // 1000 ns latency, 100 ns a message, 10 ps and 3 ps a byte.
        let model = |cabling, chunk| {
            let fast =
                Tuning { latency_ns: 1000, message_ns: 100, byte_ps: 10, fold_ps: 3, ..Tuning::default() };
            Tuning { cabling, chunk, ..fast }
        };
        let shape = |size| shape(Collective::AllReduce { count: 250_000 }, size);
        let one_shot =
            |size, cabling, chunk| simulate(&shape(size), Algorithm::OneShot, &model(cabling, chunk));
        // A megabyte to one peer, and folded.
        assert_eq!(one_shot(2, Cabling::Mesh, WHOLE), Some(100_000 + 1_000_000 + 10_000_000 + 3_000_000));
        // The second message starts later, on a link of its own or after the first.
        assert_eq!(one_shot(3, Cabling::Mesh, WHOLE), Some(200_000 + 1_000_000 + 10_000_000 + 6_000_000));
        assert_eq!(one_shot(3, Cabling::Shared, WHOLE), Some(100_000 + 1_000_000 + 20_000_000 + 6_000_000));
        // In ten chunks only the last one's folding comes after the transfer.
        assert_eq!(one_shot(2, Cabling::Mesh, 100_000), Some(100_000 + 1_000_000 + 10_000_000 + 300_000));
    }

    #[test]
    fn the_formulas_are_the_simulation_when_nothing_overlaps() {
        use Algorithm::{OneShot, RecursiveDoubling, RecursiveHalving, Ring, TwoShot};
        for cabling in [Cabling::Mesh, Cabling::Shared] {
            let tuning = Tuning { message_ns: 0, chunk: WHOLE, ..Tuning::thunderbolt(cabling, 1) };
            for algorithm in [OneShot, TwoShot, RecursiveDoubling, RecursiveHalving] {
                for ratio in ratios(algorithm, &tuning, all_reduce) {
                    assert!((0.93..1.07).contains(&ratio), "{algorithm} on {cabling:?}: {ratio}");
                }
            }
        }
        let tuning = Tuning { message_ns: 0, chunk: WHOLE, ..Tuning::thunderbolt(Cabling::Ring, 1) };
        for ratio in ratios(Ring, &tuning, all_reduce) {
            assert!((0.9..1.05).contains(&ratio), "ring: {ratio}");
        }
        // Its two directions share a processor, which the formula does not let overlap with the cables.
        for ratio in ratios(Algorithm::BidirectionalRing, &tuning, all_reduce) {
            assert!((0.7..1.05).contains(&ratio), "bidirectional ring: {ratio}");
        }
    }

    #[test]
    fn overlap_makes_everything_faster_than_predicted_if_anything() {
        for cabling in [Cabling::Mesh, Cabling::Ring, Cabling::Line] {
            let tuning = Tuning { message_ns: 0, ..Tuning::thunderbolt(cabling, 1) };
            for algorithm in Algorithm::ALL.into_iter().filter(|&algorithm| algorithm != Algorithm::Local) {
                let runs_here = match cabling {
                    Cabling::Ring => algorithm.runs_on_a_ring(),
                    Cabling::Line => algorithm.runs_on_a_line(),
                    Cabling::Mesh | Cabling::Shared => true,
                };
                for index in (0..5).filter(|_| runs_here) {
                    let example = shape(collectives(8, 64)[index].clone(), 8);
                    if cost(&example, algorithm, &tuning).is_none() {
                        continue;
                    }
                    for ratio in
                        ratios(algorithm, &tuning, |size, bytes| collectives(size, bytes)[index].clone())
                    {
                        assert!(
                            (0.2..1.1).contains(&ratio),
                            "{algorithm} {:?} {cabling:?}: {ratio}",
                            example.collective
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn the_choice_is_close_to_the_best_that_the_simulation_finds() {
        for tuning in [
            Tuning::thunderbolt(Cabling::Mesh, 1),
            Tuning::thunderbolt(Cabling::Ring, 1),
            Tuning::thunderbolt(Cabling::Line, 1),
            Tuning::tcp_between_machines(),
        ] {
            for size in [2, 3, 4, 5, 8, 13] {
                for bytes in [0, 8 << 10, 128 << 10, 4 * MEGABYTE] {
                    for collective in collectives(size, bytes) {
                        let shape = shape(collective, size);
                        let explanation = explain(&shape, &tuning);
                        let time =
                            |algorithm| simulate(&shape, algorithm, &tuning).expect("a candidate can run");
                        let chosen = time(explanation.choice.algorithm);
                        for candidate in explanation.candidates {
                            let other = time(candidate.algorithm);
                            let (chosen_name, name) = (explanation.choice.algorithm, candidate.algorithm);
                            assert!(
                                chosen <= other + other / 5,
                                "{shape:?} {tuning:?}: {chosen_name} takes {chosen}, {name} {other}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_missing_cable_is_noticed() {
        let shape = shape(Collective::AllReduce { count: 100 }, 5);
        let on = |cabling, algorithm| simulate(&shape, algorithm, &Tuning::thunderbolt(cabling, 1)).is_some();
        assert!(on(Cabling::Mesh, Algorithm::OneShot) && !on(Cabling::Ring, Algorithm::OneShot));
        assert!(on(Cabling::Ring, Algorithm::Ring) && !on(Cabling::Line, Algorithm::Ring));
        assert!(on(Cabling::Line, Algorithm::Line) && !on(Cabling::Line, Algorithm::Binomial));
    }

    #[test]
    fn two_thousand_ranks_are_simulated() {
        let tuning = Tuning::tcp_between_machines();
        let time = |collective, algorithm| {
            simulate(&shape(collective, 2000), algorithm, &tuning).map(|time| time / 1_000_000)
        };
        let latency_us = tuning.latency_ns / 1000;
        let barrier = time(Collective::Barrier, Algorithm::Dissemination).expect("can run");
        assert!((11 * latency_us..12 * latency_us + 30).contains(&barrier), "{barrier} us");
        let doubling =
            time(Collective::AllReduce { count: 1000 }, Algorithm::RecursiveDoubling).expect("can run");
        assert!((12 * latency_us..24 * latency_us).contains(&doubling), "{doubling} us");
        let chain = time(Collective::Broadcast { root: 7, count: 1000 }, Algorithm::Chain).expect("can run");
        assert!(chain > 1999 * latency_us, "{chain} us");
    }
}
