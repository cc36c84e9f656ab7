//! Groups over the kernel's own verbs: Soft-RoCE in a virtual machine (`ci/soft-roce`), which has a device for each rank.

#[path = "support/mod.rs"]
mod support;

use std::{
    fs,
    path::Path,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use raccl::{Collective, Communicator, Error, LinkKind, Sum, VerbsTransport};
use support::{Meeting, ranks};

const SIZE: usize = 4;
/// Only a hang takes so long, even in a machine that is emulated.
const LONG: Duration = Duration::from_secs(120);

/// How a group is joined.
#[derive(Clone, Copy)]
struct Joined {
    transport: VerbsTransport,
    /// So many cables join each pair, and stand in for each other if there are several.
    cables: usize,
    /// Payloads are summed.
    sums: bool,
    timeout: Duration,
}

impl Joined {
    fn new(transport: VerbsTransport) -> Joined {
        Joined { transport, cables: 1, sums: true, timeout: LONG }
    }
}

/// The device of a rank through which its cables of that number go to all others, as behind a switch.
fn device(rank: usize, cable: usize) -> usize {
    rank + SIZE * cable
}

fn group<R: Send + 'static>(
    joined: Joined,
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let Joined { transport, cables, sums, timeout } = joined;
    let entry = |rank: usize, peer: usize| -> Vec<String> {
        let devices = (0..cables).filter(|_| rank != peer);
        devices.map(|cable| format!("rx{}", device(rank, cable))).collect()
    };
    let row = |rank| (0..SIZE).map(|peer| entry(rank, peer)).collect::<Vec<_>>();
    let matrix = serde_json::to_string(&(0..SIZE).map(row).collect::<Vec<_>>()).unwrap();
    let meeting = Meeting::new();
    ranks(SIZE, move |rank| {
        let config = meeting.config(rank, SIZE).link(LinkKind::Verbs).devices(&matrix);
        let config =
            config.verbs_transport(transport).verbs_checksum(sums).connect_timeout(LONG).timeout(timeout);
        body(config.degrade(cables > 1).connect().unwrap())
    })
}

fn every_collective(comm: &Communicator, count: u64) {
    let rank = comm.rank() as u64;
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
    assert!(part.iter().zip(&mine).all(|(&part, &mine)| part == 4 * mine), "reduce_scatter of {count}");

    let mut root = if rank == 2 { mine.clone() } else { vec![0; mine.len()] };
    comm.broadcast(&mut root, 2).unwrap();
    assert!(root.iter().zip(0..).all(|(&found, index)| found == index * 10 + 2), "broadcast of {count}");

    let (to, from) = ((comm.rank() + 1) % SIZE, (comm.rank() + SIZE - 1) % SIZE);
    let mut message = vec![0; mine.len()];
    comm.send_recv(&mine, to, &mut message, from, 1).unwrap();
    assert!(message.iter().zip(0..).all(|(&found, index)| found == index * 10 + from as u64));
    comm.barrier().unwrap();
}

fn every_collective_is_right(transport: VerbsTransport) {
    group(Joined::new(transport), |comm| {
        let links = comm.explain(Collective::AllReduce, 0).links;
        assert!(links.iter().flatten().all(|&link| link == LinkKind::Verbs), "{links:?}");
        for count in [1, 1000, 40_000] {
            every_collective(&comm, count);
        }
        comm.close().unwrap();
    });
}

#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn every_collective_is_right_over_reliable_queue_pairs() {
    every_collective_is_right(VerbsTransport::Rc);
}

#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn every_collective_is_right_over_unreliable_queue_pairs() {
    every_collective_is_right(VerbsTransport::Uc);
}

/// Of the two cables of each pair, those at one device of rank 1 die.
fn outlive(transport: VerbsTransport, harm: &'static Harm) {
    /// Long enough to be divided among cables.
    const COUNT: u64 = 18_000;
    let joined = Joined { cables: 2, ..Joined::new(transport) };
    group(joined, move |comm| {
        every_collective(&comm, COUNT);
        let mut harming = (comm.rank() == 1).then(|| Harming::begin(harm));
        // In the middle of what this group does.
        let mut is_done = [0_u8];
        while is_done == [0] {
            let mut all = vec![0; COUNT as usize * SIZE];
            comm.all_gather_into(&vec![comm.rank() as u64; COUNT as usize], &mut all).unwrap();
            assert!((0..SIZE as u64).flat_map(|rank| [rank; COUNT as usize]).eq(all));
            is_done = [harming.as_mut().is_some_and(Harming::is_done).into()];
            comm.broadcast(&mut is_done, 1).unwrap();
        }
        every_collective(&comm, COUNT);
        comm.close().unwrap();
    });
}

/// Its port goes down, which is looked at.
#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn a_group_outlives_a_device_that_is_unplugged() {
    outlive(VerbsTransport::Uc, &UNPLUGGED);
}

/// The device itself notices that nothing is acknowledged.
#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn a_group_outlives_a_network_that_goes_dark_over_reliable_queue_pairs() {
    outlive(VerbsTransport::Rc, &DARK);
}

/// Something that happens to the second device of rank 1, and how it is put right.
struct Harm {
    done: &'static [&'static str],
    undone: &'static [&'static str],
}

/// The port goes down.
const UNPLUGGED: Harm = Harm { done: &["link", "set", "e5", "down"], undone: &["link", "set", "e5", "up"] };
/// The port stays up, and nothing goes through.
const DARK: Harm =
    Harm { done: &["link", "set", "b5", "nomaster"], undone: &["link", "set", "b5", "master", "br0"] };

/// A harm that is put right when this is dropped.
struct Harming {
    harm: &'static Harm,
    ip: Child,
}

impl Harming {
    fn begin(harm: &'static Harm) -> Harming {
        Harming { harm, ip: Command::new("ip").args(harm.done).spawn().unwrap() }
    }

    fn is_done(&mut self) -> bool {
        self.ip.try_wait().unwrap().is_some_and(|status| {
            assert!(status.success(), "ip {:?}: {status}", self.harm.done);
            true
        })
    }
}

impl Drop for Harming {
    fn drop(&mut self) {
        // It may not have come so far, in a test that fails.
        let _ = self.ip.wait();
        let status = Command::new("ip").args(self.harm.undone).status();
        assert!(status.is_ok_and(|status| status.success()), "ip {:?}", self.harm.undone);
        // A device follows its network interface a moment later.
        let port = Path::new("/sys/class/infiniband/rx5/ports/1");
        let is_up = || {
            fs::read_to_string(port.join("state")).is_ok_and(|state| state.contains("ACTIVE"))
                && fs::read_to_string(port.join("gids/1")).is_ok_and(|gid| gid.contains("ffff:0a09:0106"))
        };
        let until = Instant::now() + LONG;
        while !is_up() && Instant::now() < until {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Devices take what is sent from where it is, and put what comes where it is wanted.
fn registered_buffers(transport: VerbsTransport) {
    group(Joined { sums: false, ..Joined::new(transport) }, |comm| {
        let rank = comm.rank();
        let value = |rank: usize, index: usize| (index as u64).wrapping_mul(0x9E37_79B9) + rank as u64;
        let (to, from) = ((rank + 1) % SIZE, (rank + SIZE - 1) % SIZE);
        for count in [100_000, 300_007] {
            let mut all = comm.allocate::<u64>(count * SIZE).unwrap();
            assert!(all.is_registered());
            (0..count).for_each(|index| all[rank * count + index] = value(rank, index));
            comm.all_gather(&mut all).unwrap();
            let expected = (0..SIZE).flat_map(|rank| (0..count).map(move |index| value(rank, index)));
            assert!(all.iter().copied().eq(expected), "all_gather of {count}");

            let mut message = comm.allocate::<u64>(count).unwrap();
            comm.send_recv(&all[rank * count..(rank + 1) * count], to, &mut message, from, 1).unwrap();
            assert!(message.iter().enumerate().all(|(index, &found)| found == value(from, index)));
            comm.broadcast(&mut message, 2).unwrap();
            assert!(message.iter().enumerate().all(|(index, &found)| found == value(1, index)));
            message.iter_mut().enumerate().for_each(|(index, at)| *at = value(rank, index));
            comm.all_reduce(&mut message, Sum).unwrap();
            assert!(message.iter().enumerate().all(|(index, &sum)| sum == 4 * value(0, index) + 6));
            // What devices are still told of would be overwritten.
            all.fill(0);
            message.fill(0);
        }
        let uncopied = comm.uncopied();
        assert!(uncopied.sent > 0 && uncopied.received > 0, "{uncopied:?}");
        comm.barrier().unwrap();
        comm.close().unwrap();
    });
}

#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn registered_buffers_are_right_over_reliable_queue_pairs() {
    registered_buffers(VerbsTransport::Rc);
}

#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn registered_buffers_are_right_over_unreliable_queue_pairs() {
    registered_buffers(VerbsTransport::Uc);
}

/// The same of packets without a header, which only their lengths tell apart.
#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn a_lossy_network_is_an_error_or_does_no_harm_to_registered_buffers() {
    let body = |comm: Communicator| -> Result<(), Error> {
        comm.barrier()?;
        if comm.rank() == 0 {
            netem(&["add", "dev", "e2", "root", "netem", "loss", "0.1%"]);
        }
        for round in 0..20 {
            let count = 200_000;
            let value = |rank: usize, index: usize| (index * 16 + rank + round) as u64;
            let mut all = comm.allocate::<u64>(count * SIZE)?;
            (0..count).for_each(|index| all[comm.rank() * count + index] = value(comm.rank(), index));
            comm.all_gather(&mut all)?;
            let expected = (0..SIZE).flat_map(|rank| (0..count).map(move |index| value(rank, index)));
            assert!(all.iter().copied().eq(expected), "wrong data in round {round}");
        }
        comm.close()
    };
    let joined = Joined { sums: false, timeout: Duration::from_secs(10), ..Joined::new(VerbsTransport::Uc) };
    let results = group(joined, body);
    netem(&["del", "dev", "e2", "root"]);
    println!("{results:?}");
}

/// What is lost on an unreliable queue pair is gone: it has to be noticed.
#[test]
#[ignore = "needs the devices of ci/soft-roce"]
fn a_lossy_network_is_an_error_or_does_no_harm() {
    let joined = Joined { timeout: Duration::from_secs(10), ..Joined::new(VerbsTransport::Uc) };
    let results = group(joined, |comm| -> Result<(), Error> {
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
