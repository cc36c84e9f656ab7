//! All plans of all algorithms, proved for random shapes.
#![forbid(unsafe_code)]

use proptest::prelude::*;

use super::{
    parts::{self, all_parts, part},
    verify::{Expression, Expressions, Fault, Kind, verify},
    *,
};

/// A shape of f32 elements for rank 0.
pub(super) fn shape(collective: Collective, size: usize) -> Shape {
    Shape { collective, rank: 0, size, in_place: false, raw_size: 4, acc_size: 4, ordered: false }
}

fn shapes(
    collective: &Collective,
    size: usize,
    in_place: impl Fn(usize) -> bool,
    acc_size: usize,
) -> Vec<Shape> {
    let shape = |rank| Shape {
        collective: collective.clone(),
        rank,
        size,
        in_place: in_place(rank),
        raw_size: 2,
        acc_size,
        ordered: false,
    };
    (0..size).map(shape).collect()
}

/// The plans of all ranks; `None` if the algorithm cannot do it.
fn plans(shapes: &[Shape], algorithm: Algorithm, chunk: usize) -> Option<Vec<Plan>> {
    let plans: Vec<Option<Plan>> = shapes.iter().map(|shape| make(shape, algorithm)).collect();
    assert!(
        plans.iter().all(Option::is_some) || plans.iter().all(Option::is_none),
        "all ranks agree on whether {algorithm:?} can do it"
    );
    let plans: Option<Vec<Plan>> = plans.into_iter().collect();
    plans.map(|plans| plans.into_iter().map(|plan| Plan { chunk, ..plan }).collect())
}

fn prove(shapes: &[Shape], algorithm: Algorithm, plans: &[Plan]) -> Result<(), Fault> {
    verify(shapes, plans, |expressions, element| promise(&shapes[0], algorithm, expressions, element))
}

/// What the documentation promises for an output element.
fn promise(shape: &Shape, algorithm: Algorithm, expressions: &mut Expressions, element: usize) -> Expression {
    let size = shape.size;
    let owner =
        |parts: &[Range<usize>]| parts.iter().position(|part| part.contains(&element)).expect("an owner");
    let (owner, part) = match &shape.collective {
        Collective::Barrier => unreachable!("a barrier has no elements"),
        Collective::Broadcast { root, .. } => return expressions.input(*root),
        Collective::AllGather { counts } => {
            let owner = owner(&all_parts(counts));
            return expressions.input(owner);
        }
        Collective::AllReduce { count } => {
            let parts: Vec<_> = (0..size).map(|rank| part(*count, size, rank)).collect();
            let owner = owner(&parts);
            (owner, parts[owner].clone())
        }
        Collective::ReduceScatter { counts } => {
            let parts = all_parts(counts);
            let owner = owner(&parts);
            (owner, parts[owner].clone())
        }
    };
    if size == 1 {
        return expressions.input(0);
    }
    let mut from = |rank: usize| expressions.input(rank % size);
    let value = match algorithm {
        Algorithm::Ring if size > 4 => {
            let around: Vec<_> = (owner + 1..=owner + size).map(&mut from).collect();
            expressions.chain(&around)
        }
        Algorithm::BidirectionalRing if size > 4 => {
            let even = size.is_multiple_of(2);
            let half = parts::part(part.len(), 2, 0).len();
            let in_second_half = even && part.len() >= 1024 && element - part.start >= half;
            let below = if even && !in_second_half { size / 2 } else { (size - 1) / 2 };
            let below: Vec<_> = (owner + size - below..owner + size).map(&mut from).collect();
            let above: Vec<_> = (owner + 1..owner + size - below.len()).rev().map(&mut from).collect();
            sides(expressions, &below, Some(owner), &above)
        }
        Algorithm::Line if size > 4 => {
            // All-reduce folds everything in the middle.
            let (low, high) = match shape.collective {
                Collective::AllReduce { .. } => ((size - 1) / 2, size / 2),
                _ => (owner, owner),
            };
            let below: Vec<_> = (0..low + usize::from(low < high)).map(&mut from).collect();
            let above: Vec<_> = (low + 1..size).rev().map(&mut from).collect();
            sides(expressions, &below, (low == high).then_some(low), &above)
        }
        _ => {
            let all: Vec<_> = (0..size).map(from).collect();
            expressions.tree(&all)
        }
    };
    expressions.finished(value)
}

/// What comes from below, in order; the own elements; what comes from above, the furthest first.
fn sides(
    expressions: &mut Expressions,
    below: &[Expression],
    own: Option<usize>,
    above: &[Expression],
) -> Expression {
    let below = (!below.is_empty()).then(|| expressions.chain(below));
    let own = own.map(|rank| expressions.input(rank));
    let above = above
        .split_first()
        .map(|(&last, nearer)| nearer.iter().fold(last, |sum, &rank| expressions.combined(rank, sum)));
    let operands: Vec<Expression> = below.into_iter().chain(own).chain(above).collect();
    expressions.chain(&operands)
}

/// Lengths that matter: none, around the number of ranks, and enough for several chunks.
fn length(size: usize) -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), Just(size - 1), Just(size), Just(size + 1), 0..3 * size, 40..90usize]
}

fn counts(size: usize) -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        prop::collection::vec(0..7usize, size),
        prop::collection::vec(prop_oneof![Just(0), 0..20usize], size),
        (0..6usize).prop_map(move |count| vec![count; size]),
    ]
}

fn collective(size: usize) -> impl Strategy<Value = Collective> {
    prop_oneof![
        1 => Just(Collective::Barrier),
        4 => length(size).prop_map(|count| Collective::AllReduce { count }),
        2 => counts(size).prop_map(|counts| Collective::AllGather { counts }),
        3 => counts(size).prop_map(|counts| Collective::ReduceScatter { counts }),
        2 => (0..size, length(size)).prop_map(|(root, count)| Collective::Broadcast { root, count }),
    ]
}

pub(super) fn case() -> impl Strategy<Value = (usize, Collective)> {
    prop_oneof![4 => 1..=9usize, 1 => 1..=33usize].prop_flat_map(|size| (Just(size), collective(size)))
}

proptest! {
    #[test]
    fn every_algorithm_keeps_its_promise(
        (size, collective) in case(),
        in_place in any::<[bool; 33]>(),
        all_alike in any::<bool>(),
        acc_size in prop_oneof![Just(2usize), Just(4)],
        chunk in 1..40usize,
    ) {
        let shapes = shapes(&collective, size, |rank| in_place[if all_alike { 0 } else { rank }], acc_size);
        for (algorithm, plans) in all_plans(&shapes, chunk) {
            prop_assert_eq!(prove(&shapes, algorithm, &plans), Ok(()), "{:?}", algorithm);
        }
    }
}

#[test]
fn large_parts_are_cut_and_aligned_without_harm() {
    let uneven = |size: usize| (0..size).map(|rank| 1500 * (rank % 3)).collect::<Vec<usize>>();
    for (size, collective) in [
        (2, Collective::AllReduce { count: 10_000 }),
        (3, Collective::AllReduce { count: 12_500 }),
        (6, Collective::AllReduce { count: 6500 }),
        (4, Collective::AllGather { counts: uneven(4) }),
        (6, Collective::AllGather { counts: uneven(6) }),
        (6, Collective::ReduceScatter { counts: uneven(6) }),
        (2, Collective::Broadcast { root: 1, count: 9001 }),
    ] {
        for (in_place, acc_size) in [(false, 4), (true, 2)] {
            let shapes = shapes(&collective, size, |_| in_place, acc_size);
            for (algorithm, plans) in all_plans(&shapes, 2000) {
                assert_eq!(prove(&shapes, algorithm, &plans), Ok(()), "{algorithm:?} for {collective:?}");
            }
        }
    }
}

#[test]
fn operations_on_nothing_exchange_the_same_messages_as_on_something() {
    let messages = |plans: &[Plan]| -> Vec<(usize, usize)> {
        let of_rank = |(rank, plan): (usize, &Plan)| {
            let to = plan.steps.iter().filter_map(|step| match step.action {
                Action::Send { to, .. } => Some(to),
                _ => None,
            });
            to.map(|to| (rank, to)).collect::<Vec<_>>()
        };
        plans.iter().enumerate().flat_map(of_rank).collect()
    };
    for size in 2..10 {
        for (nothing, something) in [
            (Collective::AllReduce { count: 0 }, Collective::AllReduce { count: 100 }),
            (
                Collective::AllGather { counts: vec![0; size] },
                Collective::AllGather { counts: vec![3; size] },
            ),
            (
                Collective::ReduceScatter { counts: vec![0; size] },
                Collective::ReduceScatter { counts: vec![3; size] },
            ),
            (Collective::Broadcast { root: 1, count: 0 }, Collective::Broadcast { root: 1, count: 100 }),
        ] {
            let nothing = all_plans(&shapes(&nothing, size, |_| false, 4), 64);
            let something = all_plans(&shapes(&something, size, |_| false, 4), 64);
            assert_eq!(nothing.len(), something.len());
            for ((algorithm, nothing), (_, something)) in nothing.iter().zip(&something) {
                assert_eq!(messages(nothing), messages(something), "{algorithm:?} on {size} ranks");
            }
        }
    }
}

#[test]
fn the_messages_do_not_depend_on_who_is_in_place() {
    for size in 2..10 {
        for collective in [
            Collective::AllReduce { count: 30 },
            Collective::AllGather { counts: vec![3; size] },
            Collective::ReduceScatter { counts: vec![3; size] },
        ] {
            for acc_size in [2, 4] {
                let mixed = shapes(&collective, size, |rank| rank % 3 == 0, acc_size);
                for (algorithm, plans) in all_plans(&mixed, 8) {
                    assert_eq!(prove(&mixed, algorithm, &plans), Ok(()), "{algorithm:?} for {collective:?}");
                }
            }
        }
    }
}

#[test]
fn operations_that_need_it_are_folded_in_the_order_of_the_ranks() {
    for size in 2..18 {
        for collective in
            [Collective::AllReduce { count: 40 }, Collective::ReduceScatter { counts: vec![3; size] }]
        {
            let shape = Shape { ordered: true, ..shape(collective, size) };
            for algorithm in Algorithm::ALL.into_iter().filter(|&algorithm| make(&shape, algorithm).is_some())
            {
                let mut expressions = Expressions::default();
                for element in 0..40.min(3 * size) {
                    let value = promise(&shape, algorithm, &mut expressions, element);
                    let ranks: Vec<usize> = (0..size).collect();
                    assert_eq!(expressions.inputs(value), ranks, "{algorithm} on {size} ranks");
                }
            }
        }
    }
}

#[test]
fn plans_grow_with_the_ranks_and_not_with_the_bytes() {
    for size in [2usize, 9, 33, 200] {
        let collectives = |count: usize| {
            [
                Collective::Barrier,
                Collective::AllReduce { count },
                Collective::AllGather { counts: vec![count; size] },
                Collective::ReduceScatter { counts: vec![count; size] },
                Collective::Broadcast { root: 0, count },
            ]
        };
        for (small, large) in collectives(1 << 20).into_iter().zip(collectives(1 << 40)) {
            for algorithm in Algorithm::ALL {
                let make = |collective: &Collective| {
                    make(&shapes(collective, size, |_| false, 4)[size / 2], algorithm)
                };
                let (small, large) = (make(&small), make(&large));
                assert_eq!(
                    small.as_ref().map(|plan| plan.steps.len()),
                    large.as_ref().map(|plan| plan.steps.len())
                );
                assert!(
                    large.is_none_or(|plan| plan.steps.len() <= 8 * size),
                    "{algorithm:?} on {size} ranks"
                );
            }
        }
    }
}

#[test]
fn rings_and_lines_use_only_the_cables_of_neighbours() {
    for size in 2..12 {
        for collective in [
            Collective::Barrier,
            Collective::AllReduce { count: 100 },
            Collective::AllGather { counts: vec![3; size] },
            Collective::ReduceScatter { counts: vec![3; size] },
            Collective::Broadcast { root: 1, count: 100 },
        ] {
            for (algorithm, plans) in all_plans(&shapes(&collective, size, |_| false, 4), 64) {
                for (rank, plan) in plans.iter().enumerate() {
                    for step in &plan.steps {
                        let Action::Send { to, .. } = step.action else { continue };
                        let (apart, around) = (rank.abs_diff(to), size - rank.abs_diff(to));
                        if algorithm.runs_on_a_line() {
                            assert_eq!(apart, 1, "{algorithm:?}");
                        } else if algorithm.runs_on_a_ring() {
                            assert_eq!(apart.min(around), 1, "{algorithm:?}");
                        }
                    }
                }
            }
        }
    }
}

/// The plans of all algorithms that can do it.
fn all_plans(shapes: &[Shape], chunk: usize) -> Vec<(Algorithm, Vec<Plan>)> {
    Algorithm::ALL
        .into_iter()
        .filter_map(|algorithm| Some((algorithm, plans(shapes, algorithm, chunk)?)))
        .collect()
}

/// Shapes on which every algorithm has something to go wrong.
fn telling_shapes() -> Vec<Vec<Shape>> {
    let mut list = Vec::new();
    for size in [2, 3, 4, 5, 6] {
        for collective in [
            Collective::Barrier,
            Collective::AllReduce { count: 8 * size + 1 },
            Collective::AllGather { counts: (0..size).map(|rank| 5 + rank % 2).collect() },
            Collective::ReduceScatter { counts: (0..size).map(|rank| 5 + rank % 2).collect() },
            Collective::Broadcast { root: size - 2, count: 11 },
        ] {
            for (in_place, acc_size) in [(false, 2), (false, 4), (true, 2), (true, 4)] {
                list.push(shapes(&collective, size, |_| in_place, acc_size));
            }
        }
    }
    list
}

/// Proves that no plan survives any one of the changes that `change` makes to a step.
fn assert_all_rejected(change: impl Fn(&Step) -> Vec<Step>) {
    for shapes in telling_shapes() {
        for (algorithm, plans) in all_plans(&shapes, 6) {
            for (rank, plan) in plans.iter().enumerate() {
                for (index, step) in plan.steps.iter().enumerate() {
                    for changed in change(step) {
                        let mut broken = plans.clone();
                        broken[rank].steps[index] = changed.clone();
                        let verdict = prove(&shapes, algorithm, &broken);
                        assert!(
                            verdict.is_err(),
                            "{algorithm:?} for {:?}, rank {rank}, step {index}: {step:?} may be {changed:?}",
                            shapes[rank]
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_dependency_is_needed() {
    assert_all_rejected(|step| {
        let without = |index| {
            let mut after = step.after.clone();
            after.remove(index);
            Step { after, ..step.clone() }
        };
        (0..step.after.len()).map(without).collect()
    });
}

#[test]
fn a_fold_in_another_order_is_noticed() {
    assert_all_rejected(|step| {
        let Action::RecvFold { leaves, into, finish } = &step.action else { return vec![] };
        let swapped = |index: usize| {
            let mut leaves = leaves.clone();
            leaves.swap(index - 1, index);
            Step { action: Action::RecvFold { leaves, into: into.clone(), finish: *finish }, ..step.clone() }
        };
        (1..leaves.len()).map(swapped).collect()
    });
}

#[test]
fn a_value_rounded_too_early_or_never_is_noticed() {
    assert_all_rejected(|step| match &step.action {
        Action::RecvFold { leaves, into, finish } => {
            let action = Action::RecvFold { leaves: leaves.clone(), into: into.clone(), finish: !finish };
            vec![Step { action, ..step.clone() }]
        }
        _ => vec![],
    });
}

#[test]
fn a_message_to_the_wrong_rank_or_of_the_wrong_elements_is_noticed() {
    assert_all_rejected(|step| {
        let Action::Send { to, from } = &step.action else { return vec![] };
        let send = |to: usize, from: Span| Step { action: Action::Send { to, from }, ..step.clone() };
        let mut changed = vec![send(to + 1, from.clone())];
        if let Some(range) = from.ranges.first() {
            // One element less, and all one place further down.
            let mut shorter = from.clone();
            shorter.ranges[0].start += 1;
            shorter.ranges.retain(|range| !range.is_empty());
            changed.push(send(*to, shorter));
            if range.start > 0 {
                let mut shifted = from.clone();
                shifted.ranges[0] = range.start - 1..range.end - 1;
                changed.push(send(*to, shifted));
            }
        }
        changed
    });
}

#[test]
fn a_missing_message_is_noticed() {
    for shapes in telling_shapes() {
        for (algorithm, plans) in all_plans(&shapes, 6) {
            for rank in 0..plans.len() {
                // The last step is nobody's dependency.
                let mut broken = plans.clone();
                let Some(last) = broken[rank].steps.pop() else { continue };
                assert!(
                    prove(&shapes, algorithm, &broken).is_err(),
                    "{algorithm:?}, rank {rank} without {last:?}"
                );
            }
        }
    }
}

/// Two ranks, each with the given steps for a broadcast of 4 elements from rank 0.
fn proof_of(first: Vec<Step>, second: Vec<Step>, scratch: Vec<Scratch>) -> Result<(), Kind> {
    let shapes = shapes(&Collective::Broadcast { root: 0, count: 4 }, 2, |_| true, 4);
    let plan = |steps| Plan { algorithm: Algorithm::Direct, steps, scratch: scratch.clone(), chunk: 4 };
    prove(&shapes, Algorithm::Direct, &[plan(first), plan(second)]).map_err(|fault| fault.kind)
}

fn step(action: Action, after: &[After]) -> Step {
    Step { action, after: after.to_vec() }
}

#[test]
fn each_kind_of_fault_is_told_from_the_others() {
    let data = || Span::output(0..4);
    let send = |to| step(Action::Send { to, from: data() }, &[]);
    let recv = |from| step(Action::Recv { from, into: data() }, &[]);
    assert_eq!(proof_of(vec![send(1)], vec![recv(0)], vec![]), Ok(()));
    assert_eq!(proof_of(vec![send(1)], vec![], vec![]), Err(Kind::Matching));
    assert_eq!(proof_of(vec![send(2)], vec![recv(0)], vec![]), Err(Kind::Form));

    // Out of bounds, and a dependency on a later step.
    let outside = step(Action::Recv { from: 0, into: Span::output(1..5) }, &[]);
    assert_eq!(proof_of(vec![send(1)], vec![outside], vec![]), Err(Kind::Form));
    let early = step(Action::Recv { from: 0, into: data() }, &[After::Whole(0)]);
    assert_eq!(proof_of(vec![send(1)], vec![early], vec![]), Err(Kind::Form));

    // Nothing reached rank 1, or what was never written did.
    let empty = || step(Action::Send { to: 1, from: Span::empty() }, &[]);
    let hear = || step(Action::Recv { from: 0, into: Span::empty() }, &[]);
    assert_eq!(proof_of(vec![empty()], vec![hear()], vec![]), Err(Kind::Value));
    let scratch = vec![Scratch { repr: Repr::Raw, len: 4 }];
    let unwritten = step(Action::Send { to: 1, from: Span::new(Buffer::Scratch(0), Repr::Raw, 0..4) }, &[]);
    assert_eq!(proof_of(vec![unwritten], vec![recv(0)], scratch), Err(Kind::Value));

    // Two messages for the same memory, in no order.
    assert_eq!(proof_of(vec![send(1), send(1)], vec![recv(0), recv(0)], vec![]), Err(Kind::Race));
    let in_order = vec![recv(0), step(Action::Recv { from: 0, into: data() }, &[After::Whole(0)])];
    assert_eq!(proof_of(vec![send(1), send(1)], in_order, vec![]), Ok(()));
}

#[test]
fn everyone_receiving_before_sending_is_a_deadlock() {
    let steps = |peer| {
        let recv = step(Action::Recv { from: peer, into: Span::empty() }, &[]);
        vec![recv, step(Action::Send { to: peer, from: Span::empty() }, &[After::Whole(0)])]
    };
    let shapes = shapes(&Collective::Barrier, 2, |_| false, 4);
    let plan = |steps| Plan { algorithm: Algorithm::Direct, steps, scratch: vec![], chunk: 4 };
    let verdict = prove(&shapes, Algorithm::Direct, &[plan(steps(1)), plan(steps(0))]);
    assert_eq!(verdict.map_err(|fault| fault.kind), Err(Kind::Deadlock));
}

#[test]
fn a_receive_that_waits_for_the_own_send_is_a_deadlock_on_links_that_hold_nothing() {
    // Each sends, and takes the other's message only when its own was taken.
    let steps = |peer| {
        let send = step(Action::Send { to: peer, from: Span::empty() }, &[]);
        vec![send, step(Action::Recv { from: peer, into: Span::empty() }, &[After::Whole(0)])]
    };
    let shapes = shapes(&Collective::Barrier, 2, |_| false, 4);
    let plan = |steps| Plan { algorithm: Algorithm::Direct, steps, scratch: vec![], chunk: 4 };
    let verdict = prove(&shapes, Algorithm::Direct, &[plan(steps(1)), plan(steps(0))]);
    assert_eq!(verdict.map_err(|fault| fault.kind), Err(Kind::Deadlock));
}

#[test]
fn a_barrier_that_does_not_wait_is_noticed() {
    let shapes = shapes(&Collective::Barrier, 2, |_| false, 4);
    let send = step(Action::Send { to: 1, from: Span::empty() }, &[]);
    let recv = step(Action::Recv { from: 0, into: Span::empty() }, &[]);
    let plan = |steps| Plan { algorithm: Algorithm::Direct, steps, scratch: vec![], chunk: 4 };
    let verdict = prove(&shapes, Algorithm::Direct, &[plan(vec![send]), plan(vec![recv])]);
    assert_eq!(verdict.map_err(|fault| fault.kind), Err(Kind::Barrier));
}
