//! Which algorithm runs: a pure function of inputs that all ranks agreed on, so that all ranks choose alike.
#![forbid(unsafe_code)]

use std::{fmt, time::Duration};

use super::{Algorithm, Cabling, Cost, Shape, Tuning, cost};

/// What was chosen and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) algorithm: Algorithm,
    pub(crate) reason: Reason,
    /// For [`super::Plan::chunk`].
    pub(crate) chunk: usize,
}

/// Why an algorithm was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// No other algorithm can do it over these cables.
    OnlyOne,
    /// The cost model says so.
    Cheapest,
    /// The override string says so.
    Override,
    /// The cost model says so, after the override string named an algorithm that cannot do it.
    OverrideImpossible(Algorithm),
}

/// A choice with all that could have been chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Explanation {
    pub(crate) choice: Choice,
    /// The fastest first.
    pub(crate) candidates: Vec<Candidate>,
}

/// An algorithm that could run, and what the cost model predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) algorithm: Algorithm,
    pub(crate) cost: Cost,
    pub(crate) predicted: Duration,
}

/// Chooses the algorithm for a shape. Does not look at `rank` or `in_place`.
pub(crate) fn choose(shape: &Shape, tuning: &Tuning) -> Choice {
    let mut cheapest: Option<(u64, Algorithm)> = None;
    let mut count = 0;
    for (algorithm, cost) in possible(shape, tuning) {
        let time = cost.picoseconds(tuning);
        count += 1;
        if cheapest.is_none_or(|(least, _)| time < least) {
            cheapest = Some((time, algorithm));
        }
    }
    let (_, cheapest) = cheapest.expect("every operation has an algorithm on every cabling");
    let (algorithm, reason) = match tuning.overrides.wanted(shape) {
        Some(wanted) if possible(shape, tuning).any(|(algorithm, _)| algorithm == wanted) => {
            (wanted, Reason::Override)
        }
        Some(wanted) if shape.size > 1 => (cheapest, Reason::OverrideImpossible(wanted)),
        _ if count == 1 => (cheapest, Reason::OnlyOne),
        _ => (cheapest, Reason::Cheapest),
    };
    Choice { algorithm, reason, chunk: usize::try_from(tuning.chunk).unwrap_or(usize::MAX) }
}

/// What [`choose`] chooses, and between what.
pub(crate) fn explain(shape: &Shape, tuning: &Tuning) -> Explanation {
    let mut candidates: Vec<Candidate> = possible(shape, tuning)
        .map(|(algorithm, cost)| {
            let predicted = Duration::from_nanos(cost.picoseconds(tuning).div_ceil(1000));
            Candidate { algorithm, cost, predicted }
        })
        .collect();
    candidates.sort_by_key(|candidate| candidate.cost.picoseconds(tuning));
    Explanation { choice: choose(shape, tuning), candidates }
}

/// The algorithms that can do it over the cables there are.
fn possible(shape: &Shape, tuning: &Tuning) -> impl Iterator<Item = (Algorithm, Cost)> {
    let cabled = |algorithm: Algorithm| match tuning.cabling {
        Cabling::Shared | Cabling::Mesh => true,
        // On so few ranks everyone is a neighbour.
        Cabling::Ring => shape.size <= 3 || algorithm.runs_on_a_ring(),
        Cabling::Line => shape.size <= 2 || algorithm.runs_on_a_line(),
    };
    let algorithms = Algorithm::ALL.into_iter().filter(move |&algorithm| cabled(algorithm));
    algorithms.filter_map(|algorithm| Some((algorithm, cost(shape, algorithm, tuning)?)))
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::OnlyOne => f.write_str("only one possible"),
            Reason::Cheapest => f.write_str("cheapest"),
            Reason::Override => f.write_str("override"),
            Reason::OverrideImpossible(wanted) => {
                write!(f, "cheapest; the override {wanted} is not possible here")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{
            Collective, make,
            tests::{case, shape},
        },
        *,
    };

    fn all_reduce(bytes: usize, size: usize) -> Shape {
        shape(Collective::AllReduce { count: bytes / 4 }, size)
    }

    /// The first size in KiB at which two-shot is chosen.
    fn switch_to_two_shot(size: usize, tuning: &Tuning) -> usize {
        (1..4096)
            .find(|kib| choose(&all_reduce(kib << 10, size), tuning).algorithm == Algorithm::TwoShot)
            .expect("two-shot is best for large messages")
    }

    fn tunings() -> [Tuning; 7] {
        [
            Tuning::tcp_on_one_machine(4, 2),
            Tuning::tcp_between_machines(),
            Tuning::threads(3, 2),
            Tuning::shared_memory(2, 2),
            Tuning::thunderbolt(Cabling::Mesh, 1),
            Tuning::thunderbolt(Cabling::Ring, 1),
            Tuning::thunderbolt(Cabling::Line, 1),
        ]
    }

    proptest! {
        #[test]
        fn what_is_chosen_can_be_planned_and_all_ranks_choose_alike(
            (size, collective) in case(),
            tuning in 0..7usize,
            acc_size in prop_oneof![Just(2usize), Just(4)],
            overridden in any::<bool>(),
            ordered in any::<bool>(),
        ) {
            let mut tuning = tunings()[tuning].clone();
            if overridden {
                tuning.overrides = "all_reduce:ring;broadcast:chain;all_gather:0-1k=line".parse().expect("well formed");
            }
            let shape = |rank, in_place| Shape { collective: collective.clone(), rank, size, in_place, raw_size: 2, acc_size, ordered };
            let choice = choose(&shape(0, false), &tuning);
            for rank in 0..size {
                prop_assert_eq!(choose(&shape(rank, rank % 2 == 1), &tuning), choice);
                prop_assert!(make(&shape(rank, false), choice.algorithm).is_some());
            }
        }

        #[test]
        fn there_is_a_cost_exactly_when_there_is_a_plan(
            (size, collective) in case(),
            tuning in 0..7usize,
            ordered in any::<bool>(),
        ) {
            let shape = Shape { ordered, ..shape(collective, size) };
            for algorithm in Algorithm::ALL {
                let cost = cost(&shape, algorithm, &tunings()[tuning]);
                prop_assert_eq!(cost.is_some(), make(&shape, algorithm).is_some(), "{}", algorithm);
            }
        }

        #[test]
        fn no_tuning_makes_the_choice_panic(
            (size, collective) in case(),
            speeds in any::<[u64; 5]>(),
            factor in prop_oneof![Just(1usize), Just(1 << 40), Just(usize::MAX / 64)],
        ) {
            let [latency_ns, message_ns, byte_ps, fold_ps, chunk] = speeds;
            let large = |count: usize| count.saturating_mul(factor) / size.max(1);
            let collective = match collective {
                Collective::AllReduce { count } => Collective::AllReduce { count: large(count) },
                Collective::AllGather { counts } => Collective::AllGather { counts: counts.into_iter().map(large).collect() },
                Collective::ReduceScatter { counts } => Collective::ReduceScatter { counts: counts.into_iter().map(large).collect() },
                Collective::Broadcast { root, count } => Collective::Broadcast { root, count: large(count) },
                Collective::Barrier => Collective::Barrier,
            };
            for tuning in tunings() {
                let tuning = Tuning { latency_ns, message_ns, byte_ps, fold_ps, chunk, ..tuning };
                explain(&shape(collective.clone(), size), &tuning);
            }
        }
    }

    #[test]
    fn on_a_mesh_two_shot_begins_where_the_two_formulas_cross() {
        // a / (b (1 - 2/p) + g (p - 1)(1 - 1/p)) with 4.2 us, 9.4 GB/s and 0.05 ns a byte: 41, 25 and 11 KB.
        let tuning = Tuning { message_ns: 0, byte_ps: 106, ..Tuning::thunderbolt(Cabling::Mesh, 1) };
        for (size, kilobytes) in [(3, 41.0), (4, 25.0), (8, 11.0)] {
            let switch = switch_to_two_shot(size, &tuning) as f64 * 1.024;
            assert!((switch - kilobytes).abs() <= 2.0, "{size} ranks: {switch} KB");
        }
    }

    #[test]
    fn on_one_machine_the_switch_is_where_it_was_measured() {
        let on_two_cores = |ranks| switch_to_two_shot(ranks, &Tuning::tcp_on_one_machine(ranks, 2));
        assert!((128..=256).contains(&on_two_cores(2)), "{} KiB", on_two_cores(2));
        let crowded = Tuning::tcp_on_one_machine(4, 2);
        let chosen = |bytes| choose(&all_reduce(bytes, 4), &crowded).algorithm;
        assert_eq!([chosen(8), chosen(32 << 10)], [Algorithm::RecursiveDoubling; 2]);
        assert_eq!(chosen(1 << 20), Algorithm::RecursiveHalving);
        let in_memory = |ranks| switch_to_two_shot(ranks, &Tuning::shared_memory(ranks, 2));
        assert!((3..=8).contains(&in_memory(2)), "{} KiB", in_memory(2));
        assert!((3..=8).contains(&in_memory(4)), "{} KiB", in_memory(4));
    }

    #[test]
    fn each_cabling_gets_what_suits_it() {
        let chosen = |cabling, size, bytes| {
            choose(&all_reduce(bytes, size), &Tuning::thunderbolt(cabling, 1)).algorithm
        };
        assert_eq!(chosen(Cabling::Mesh, 4, 1 << 10), Algorithm::OneShot);
        assert_eq!(chosen(Cabling::Mesh, 4, 16 << 20), Algorithm::TwoShot);
        assert_eq!(chosen(Cabling::Ring, 3, 16 << 20), Algorithm::TwoShot);
        assert_eq!(chosen(Cabling::Ring, 4, 1 << 10), Algorithm::Relay);
        assert_eq!(chosen(Cabling::Ring, 4, 16 << 20), Algorithm::BidirectionalRing);
        assert_eq!(chosen(Cabling::Ring, 6, 16 << 20), Algorithm::BidirectionalRing);
        assert_eq!(chosen(Cabling::Line, 3, 1 << 10), Algorithm::Line);
        assert_eq!(chosen(Cabling::Line, 2, 16 << 20), Algorithm::TwoShot);
        let many = Tuning::tcp_between_machines();
        assert_eq!(choose(&all_reduce(8, 64), &many).algorithm, Algorithm::RecursiveDoubling);
        assert_eq!(
            choose(&shape(Collective::Broadcast { root: 0, count: 2 }, 64), &many).algorithm,
            Algorithm::Binomial
        );
    }

    #[test]
    fn an_override_is_taken_when_it_is_possible_and_reported_when_not() {
        let mut tuning = Tuning::thunderbolt(Cabling::Ring, 1);
        tuning.overrides = "all_reduce:0-4k=ring,4k-=two_shot".parse().expect("well formed");
        let choice = choose(&all_reduce(1 << 10, 6), &tuning);
        assert_eq!((choice.algorithm, choice.reason), (Algorithm::Ring, Reason::Override));
        let choice = choose(&all_reduce(1 << 20, 6), &tuning);
        assert_eq!(choice.reason, Reason::OverrideImpossible(Algorithm::TwoShot));
        assert_eq!(choice.algorithm, Algorithm::BidirectionalRing);
        assert!(choice.reason.to_string().contains("two_shot"));
    }

    #[test]
    fn an_explanation_names_all_candidates_with_the_chosen_one_first() {
        for tuning in tunings() {
            for bytes in [0, 4 << 10, 4 << 20] {
                let explanation = explain(&all_reduce(bytes, 6), &tuning);
                assert_eq!(explanation.candidates[0].algorithm, explanation.choice.algorithm);
                assert!(explanation.candidates.is_sorted_by_key(|candidate| candidate.predicted));
                let only_one = explanation.candidates.len() == 1;
                assert_eq!(explanation.choice.reason == Reason::OnlyOne, only_one);
            }
        }
    }
}
