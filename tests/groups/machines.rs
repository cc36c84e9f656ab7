//! Processes that are machines of their own, joined by emulated Thunderbolt cables.

use std::{env, fmt::Write, path::Path, sync::Barrier, thread, time::Duration};

use raccl::{Communicator, Config, Error, LinkKind, Sum};
use raccl_emulator::{Emulation, Fault, Layout, SPEC_VARIABLE, Spec};

use crate::support::{
    Meeting,
    cables::{library, machine},
    launch_each,
    random::Random,
    ranks, setting,
};

/// Runs `body` as every rank of a group, each a machine of `spec`; nothing may be left in the books afterwards, and the driver
/// may not have been used wrongly.
fn machines(name: &str, spec: &Spec, body: impl FnOnce(Communicator)) {
    let emulation = Emulation::create(spec).unwrap();
    launch_each(
        name,
        spec.machines,
        |rank| machine(&emulation, rank),
        |config| body(config.connect().unwrap()),
    );
    assert!(emulation.books().live.is_zero(), "{:?} is left", emulation.books());
    assert_eq!(emulation.books().mistakes, Default::default());
}

/// Does every kind of call, with every rank's numbers known.
pub(crate) fn every_call(comm: Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    let total = |index: usize| (0..size).map(|rank| value(rank, index)).sum::<u64>();
    for count in [1, 100, 5000, 200_000] {
        let mine: Vec<u64> = (0..count).map(|index| value(rank, index)).collect();
        let mut sum = mine.clone();
        comm.all_reduce(&mut sum, Sum).unwrap();
        assert!(sum.iter().enumerate().all(|(index, &sum)| sum == total(index)), "all_reduce of {count}");

        let mut all = vec![0; count * size];
        comm.all_gather_into(&mine, &mut all).unwrap();
        let is_right = |(at, &found): (usize, &u64)| found == value(at / count, at % count);
        assert!(all.iter().enumerate().all(is_right), "all_gather of {count}");

        let mut root = if rank == size - 1 { mine.clone() } else { vec![0; count] };
        comm.broadcast(&mut root, size - 1).unwrap();
        assert!(
            root.iter().enumerate().all(|(index, &found)| found == value(size - 1, index)),
            "broadcast of {count}"
        );

        // To a rank that may have no cable to this one, too.
        for step in 1..size {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            let mut message = vec![0; count];
            comm.send_recv(&mine, to, &mut message, from, 3).unwrap();
            assert!(
                message.iter().enumerate().all(|(index, &found)| found == value(from, index)),
                "from {from}"
            );
        }
        comm.barrier().unwrap();
    }
    comm.close().unwrap();
}

fn value(rank: usize, index: usize) -> u64 {
    (rank as u64 + 1).wrapping_mul(1_000_003).wrapping_add(index as u64)
}

/// A test for each layout: its name, the layout, the machines, and their usable queue pairs.
macro_rules! every_call_over {
    ($($name:ident: $layout:expr, $size:expr, $queue_pairs:expr;)*) => {$(
        #[test]
        fn $name() {
            let mut spec = $layout.latency_ns(3000).spec($size);
            spec.limits.queue_pairs = $queue_pairs;
            machines(concat!("machines::", stringify!($name)), &spec, every_call);
        }
    )*};
}

every_call_over! {
    every_call_works_over_one_cable: Layout::mesh(), 2, 10;
    every_call_works_over_three_cables_a_pair: Layout::mesh().cables(3), 2, 10;
    every_call_works_in_a_mesh_of_five: Layout::mesh(), 5, 10;
    every_call_works_in_a_ring_with_two_cables_a_pair: Layout::ring().cables(2), 4, 10;
    every_call_works_along_a_line: Layout::line(), 3, 10;
    every_call_works_with_two_queue_pairs_a_device: Layout::mesh(), 3, 2;
    every_call_works_with_one_queue_pair_a_device: Layout::mesh().cables(2), 3, 1;
}

#[test]
fn a_cable_cut_in_the_middle_is_an_error_that_names_the_link_on_every_rank() {
    let mut spec = Layout::mesh().latency_ns(1000).spec(3);
    spec.faults.push(Fault::Cut { cable: 1, message: Some(300) });
    machines(
        "machines::a_cable_cut_in_the_middle_is_an_error_that_names_the_link_on_every_rank",
        &spec,
        |comm| {
            let comm = comm.with_timeout(Duration::from_secs(5));
            let error = loop {
                let mut values = vec![1_u32; 50_000];
                match comm.all_reduce(&mut values, Sum) {
                    Ok(()) => assert!(values.iter().all(|&value| value == 3)),
                    Err(error) => break error,
                }
            };
            let text = chain(&error);
            assert!(text.contains("verbs") || text.contains("cable"), "{text}");
            assert!(comm.barrier().is_err());
        },
    );
}

#[test]
fn what_keeps_cables_from_being_used_is_said_on_every_rank() {
    let mut spec = Layout::mesh().spec(3);
    spec.faults.push(Fault::PortDown { machine: 1, device: "rdma_en3".into() });
    let emulation = Emulation::create(&spec).unwrap();
    launch_each(
        "machines::what_keeps_cables_from_being_used_is_said_on_every_rank",
        3,
        |rank| machine(&emulation, rank),
        |config| {
            let error = config.connect().unwrap_err();
            let Error::Unavailable { link: LinkKind::Verbs, .. } = &error else { panic!("{error}") };
            assert!(chain(&error).contains("rdma_en3: port 1 is down"), "{error}");
        },
    );
    assert!(emulation.books().live.is_zero());
}

#[test]
fn auto_takes_tcp_where_cables_cannot_be_used() {
    let mut spec = Layout::mesh().spec(2);
    spec.faults.push(Fault::PortDown { machine: 0, device: "rdma_en2".into() });
    let emulation = Emulation::create(&spec).unwrap();
    launch_each(
        "machines::auto_takes_tcp_where_cables_cannot_be_used",
        2,
        |rank| {
            let mut variables = machine(&emulation, rank);
            variables.push(("RACCL_LINK".into(), "auto".into()));
            variables
        },
        |config| {
            let comm = config.connect().unwrap();
            let links = comm.explain(raccl::Collective::Barrier, 0).links;
            assert_eq!(links[1 - comm.rank()], Some(LinkKind::Tcp));
            every_call(comm);
        },
    );
    assert!(emulation.books().live.is_zero());
}

/// An error with all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        write!(text, ": {source}").unwrap();
        next = source.source();
    }
    text
}

/// Runs `body` in a process that is all machines of `spec`. Returns the emulation to the process that started it.
fn one_process(name: &str, spec: &Spec, body: impl FnOnce(&Emulation)) -> Option<Emulation> {
    let emulation = Emulation::create(spec).unwrap();
    let variables = |_| {
        let all = emulation.environment_of_all().into_iter();
        all.map(|(name, value)| (name.to_owned(), value)).collect::<Vec<_>>()
    };
    let outputs = launch_each(name, 1, variables, |_| {
        let spec = env::var_os(SPEC_VARIABLE).unwrap();
        body(&Emulation::attach(Path::new(&spec)).unwrap());
    });
    (!outputs.is_empty()).then_some(emulation)
}

/// How a thread that is one machine joins a group over all cables of the emulation.
fn thread_config(meeting: &Meeting, emulation: &Emulation, rank: usize) -> Config {
    let names = emulation.spec().device_names();
    let row = |(machine, names): (usize, &Vec<Vec<String>>)| -> Vec<Vec<String>> {
        names.iter().map(|names| names.iter().map(|name| format!("m{machine}.{name}")).collect()).collect()
    };
    let rows: Vec<_> = names.iter().enumerate().map(row).collect();
    meeting
        .config(rank, names.len())
        .link(LinkKind::Verbs)
        .devices(serde_json::to_string(&rows).unwrap())
        .verbs_library(library())
}

#[test]
fn lost_and_damaged_packets_are_errors_and_never_wrong_data() {
    const NAME: &str = "machines::lost_and_damaged_packets_are_errors_and_never_wrong_data";
    let injections = setting("RACCL_TEST_INJECTIONS", 40);
    one_process(NAME, &Layout::mesh().cables(2).spec(2), |emulation| {
        let seed = setting("RACCL_TEST_SEED", Random::fresh_seed() as usize % 1_000_000);
        println!("seed {seed}");
        for injection in 0..injections {
            let mut random = Random::new((seed * 100_000 + injection) as u64);
            let (cable, end) = (random.below(2), random.below(2));
            // Past the token that every cable carries when the group forms.
            let message = 20 + random.below(300) as u64;
            let fault = match random.below(2) {
                0 => Fault::Lose { cable, end, message, every: None },
                _ => Fault::Corrupt { cable, end, message, every: None },
            };
            emulation.inject(&fault).unwrap();
            let meeting = Meeting::new();
            let emulation = Emulation::attach(emulation.spec_file()).unwrap();
            let errors = ranks(2, move |rank| {
                let config = thread_config(&meeting, &emulation, rank).verbs_checksum(true);
                let comm = match config.timeout(Duration::from_millis(400)).connect() {
                    Ok(comm) => comm,
                    // On a busy machine the last group may have run out of time before the fault was met.
                    Err(error) => return chain(&error),
                };
                let mut round = 0;
                loop {
                    round += 1;
                    let count = [10, 5000, 100_000][round % 3];
                    let mut values = vec![(rank + round) as u32; count];
                    match comm.all_reduce(&mut values, Sum) {
                        Ok(()) => {
                            assert!(values.iter().all(|&value| value == (2 * round + 1) as u32), "{round}")
                        }
                        Err(error) => break chain(&error),
                    }
                    assert!(round < 3000, "the fault was never met");
                }
            });
            assert!(
                errors.iter().any(|text| text.contains("verbs") || text.contains("cable")),
                "{fault:?}: {errors:?}"
            );
        }
    });
}

#[test]
fn groups_made_and_closed_again_leave_nothing_in_the_books() {
    const NAME: &str = "machines::groups_made_and_closed_again_leave_nothing_in_the_books";
    let cycles = setting("RACCL_TEST_CYCLES", 25);
    let emulation = one_process(NAME, &Layout::mesh().spec(3), |emulation| {
        for cycle in 0..cycles {
            let meeting = Meeting::new();
            let emulation = Emulation::attach(emulation.spec_file()).unwrap();
            ranks(3, move |rank| {
                let comm = thread_config(&meeting, &emulation, rank).connect().unwrap();
                let mut values = vec![rank as u64; 1 + cycle * 997 % 30_000];
                match comm.all_reduce(&mut values, Sum) {
                    Ok(()) => assert!(values.iter().all(|&value| value == 3)),
                    // Whoever is quick may end the group before the others have the result.
                    Err(error) => {
                        assert!(cycle % 4 == 2 && matches!(error, Error::Aborted { .. }), "{error}")
                    }
                }
                match cycle % 4 {
                    // Everybody leaves in order, or just goes, or one ends the group for all.
                    0 => comm.close().unwrap(),
                    1 => drop(comm),
                    2 if rank == cycle % 3 => comm.abort(),
                    2 => assert!(comm.barrier().is_err()),
                    _ => comm.barrier().unwrap(),
                }
            });
        }
    });
    let Some(emulation) = emulation else { return };
    assert!(emulation.books().live.is_zero(), "{:?} is left", emulation.books());
    assert_eq!(emulation.books().mistakes, Default::default());
    assert!(emulation.books().made.queue_pairs >= 12 * cycles as u64);
}

#[test]
fn cables_that_are_silent_for_long_are_kept_alive() {
    let mut spec = Layout::mesh().spec(2);
    spec.rules.idle_death_ms = Some(3000);
    let emulation = Emulation::create(&spec).unwrap();
    launch_each(
        "machines::cables_that_are_silent_for_long_are_kept_alive",
        2,
        |rank| {
            let mut variables = machine(&emulation, rank);
            variables.push(("RACCL_VERBS_KEEP_ALIVE".into(), "200ms".into()));
            variables
        },
        |config| {
            let comm = config.connect().unwrap();
            for count in [10, 300_000] {
                thread::sleep(Duration::from_millis(3500));
                let mut values = vec![1_u32; count];
                comm.all_reduce(&mut values, Sum).unwrap();
                assert!(values.iter().all(|&value| value == 2));
            }
            comm.close().unwrap();
        },
    );
    assert_eq!(emulation.books().mistakes, Default::default());
}

#[test]
fn a_last_message_that_is_lost_comes_another_way_although_its_sender_makes_no_call() {
    const NAME: &str =
        "machines::a_last_message_that_is_lost_comes_another_way_although_its_sender_makes_no_call";
    let emulation = one_process(NAME, &Layout::mesh().cables(2).spec(2), |emulation| {
        for count in [1, 5000, 100_000] {
            for _ in 0..3 {
                let meeting = Meeting::new();
                let emulation = Emulation::attach(emulation.spec_file()).unwrap();
                let has_come = Barrier::new(2);
                ranks(2, move |rank| {
                    let comm = thread_config(&meeting, &emulation, rank).degrade(true).connect().unwrap();
                    let mut values = vec![7_u64; count];
                    comm.barrier().unwrap();
                    if rank == 0 {
                        let fault = Fault::Lose { cable: 0, end: 0, message: 0, every: None };
                        emulation.inject(&fault).unwrap();
                        comm.send(&values, 1, 1).unwrap();
                    } else {
                        values.fill(0);
                        comm.recv(&mut values, 0, 1).unwrap();
                        assert!(values.iter().all(|&value| value == 7));
                    }
                    has_come.wait();
                    comm.close().unwrap();
                });
            }
        }
    });
    let Some(emulation) = emulation else { return };
    assert!(emulation.books().live.is_zero(), "{:?} is left", emulation.books());
    assert_eq!(emulation.books().mistakes, Default::default());
}
