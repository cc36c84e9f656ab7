//! Groups over the kernel's own verbs: Soft-RoCE in a virtual machine (`ci/soft-roce`), which has a device for each rank.

#[path = "support/mod.rs"]
mod support;

use std::{process::Command, time::Duration};

use raccl::{Collective, Communicator, Error, LinkKind, Sum, VerbsTransport};
use support::{Meeting, ranks};

const SIZE: usize = 4;
/// Only a hang takes so long, even in a machine that is emulated.
const LONG: Duration = Duration::from_secs(120);

/// Every rank reaches every other through its one device, as behind a switch.
fn group<R: Send + 'static>(
    transport: VerbsTransport,
    timeout: Duration,
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let entry =
        |rank: usize, peer: usize| if rank == peer { "null".to_owned() } else { format!("\"rx{rank}\"") };
    let row = |rank| format!("[{}]", (0..SIZE).map(|peer| entry(rank, peer)).collect::<Vec<_>>().join(","));
    let matrix = format!("[{}]", (0..SIZE).map(row).collect::<Vec<_>>().join(","));
    let meeting = Meeting::new();
    ranks(SIZE, move |rank| {
        let config = meeting.config(rank, SIZE).link(LinkKind::Verbs).devices(&matrix);
        let config =
            config.verbs_transport(transport).verbs_checksum(true).connect_timeout(LONG).timeout(timeout);
        body(config.connect().unwrap())
    })
}

fn every_collective(transport: VerbsTransport) {
    group(transport, LONG, |comm| {
        let rank = comm.rank() as u64;
        let links = comm.explain(Collective::AllReduce, 0).links;
        assert!(links.iter().flatten().all(|&link| link == LinkKind::Verbs), "{links:?}");
        for count in [1, 1000, 40_000] {
            let mine: Vec<u64> = (0..count).map(|index| index * 10 + rank).collect();
            let mut sum = mine.clone();
            comm.all_reduce(&mut sum, Sum).unwrap();
            assert!(sum.iter().zip(0..).all(|(&sum, index)| sum == index * 40 + 6), "all_reduce of {count}");

            let mut all = vec![0; mine.len() * SIZE];
            comm.all_gather_into(&mine, &mut all).unwrap();
            let expected = (0..SIZE as u64).flat_map(|rank| (0..count).map(move |index| index * 10 + rank));
            assert!(all.iter().copied().eq(expected), "all_gather of {count}");

            let mut part = vec![0; mine.len()];
            comm.reduce_scatter_into(&all, &mut part, Sum).unwrap();
            assert!(
                part.iter().zip(&mine).all(|(&part, &mine)| part == 4 * mine),
                "reduce_scatter of {count}"
            );

            let mut root = if rank == 2 { mine.clone() } else { vec![0; mine.len()] };
            comm.broadcast(&mut root, 2).unwrap();
            assert!(
                root.iter().zip(0..).all(|(&found, index)| found == index * 10 + 2),
                "broadcast of {count}"
            );

            let (to, from) = ((comm.rank() + 1) % SIZE, (comm.rank() + SIZE - 1) % SIZE);
            let mut message = vec![0; mine.len()];
            comm.send_recv(&mine, to, &mut message, from, 1).unwrap();
            assert!(message.iter().zip(0..).all(|(&found, index)| found == index * 10 + from as u64));
            comm.barrier().unwrap();
        }
        comm.close().unwrap();
    });
}

#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn every_collective_is_right_over_reliable_queue_pairs() {
    every_collective(VerbsTransport::Rc);
}

#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn every_collective_is_right_over_unreliable_queue_pairs() {
    every_collective(VerbsTransport::Uc);
}

/// What is lost on an unreliable queue pair is gone: it has to be noticed.
#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn a_lossy_network_is_an_error_or_does_no_harm() {
    let results = group(VerbsTransport::Uc, Duration::from_secs(10), |comm| -> Result<(), Error> {
        comm.barrier()?;
        if comm.rank() == 0 {
            netem(&["add", "dev", "e1", "root", "netem", "loss", "2%"]);
        }
        for round in 0..40 {
            let mut values = vec![comm.rank() as u64 + round; 5000];
            comm.all_reduce(&mut values, Sum)?;
            assert!(values.iter().all(|&value| value == 6 + 4 * round), "wrong data in round {round}");
        }
        comm.close()
    });
    netem(&["del", "dev", "e1", "root"]);
    println!("{results:?}");
}

fn netem(arguments: &[&str]) {
    let status = Command::new("tc").arg("qdisc").args(arguments).status().unwrap();
    assert!(status.success(), "tc qdisc {arguments:?}: {status}");
}
