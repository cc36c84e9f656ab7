//! Which algorithms, links and cables a group of processes takes on each layout of emulated cables.

use raccl::{Algorithm, CableLayout, Collective, Communicator, Config, Explanation, LinkKind};
use raccl_emulator::{Cable, Emulation, End, Layout, Spec};

use crate::{
    machines::every_call,
    support::{cables::machine, launch_each},
};

/// Runs `body` as every rank of a group, each a machine of `spec`.
fn on(name: &str, spec: &Spec, link: &str, body: impl FnOnce(Config)) {
    let emulation = Emulation::create(spec).unwrap();
    let variables = |rank| {
        let mut variables = machine(&emulation, rank);
        variables.push(("RACCL_LINK".to_owned(), link.to_owned()));
        variables
    };
    launch_each(name, spec.machines, variables, body);
    assert!(emulation.books().live.is_zero(), "{:?} is left", emulation.books());
}

fn all_reduce(comm: &Communicator, bytes: usize) -> Explanation {
    comm.explain(Collective::AllReduce, bytes)
}

/// Checks that this rank has so many cables to its neighbours and verbs over them, and TCP to the others.
fn has_neighbours(comm: &Communicator, cables: usize, is_neighbour: impl Fn(usize) -> bool) {
    let explanation = all_reduce(comm, 8);
    for peer in (0..comm.size()).filter(|&peer| peer != comm.rank()) {
        let expected = if is_neighbour(peer) { (LinkKind::Verbs, cables) } else { (LinkKind::Tcp, 0) };
        assert_eq!((comm.link(peer).unwrap(), explanation.cables[peer]), (Some(expected.0), expected.1));
    }
}

#[test]
fn a_ring_takes_its_cables_both_ways_and_tcp_across() {
    let spec = Layout::ring().cables(2).latency_ns(2000).spec(4);
    on("layouts::a_ring_takes_its_cables_both_ways_and_tcp_across", &spec, "verbs", |config| {
        let comm = config.connect().unwrap();
        let (rank, large) = (comm.rank(), all_reduce(&comm, 16 << 20));
        assert_eq!(
            (large.layout, large.algorithm),
            (CableLayout::Ring, Algorithm::BidirectionalRing),
            "{large}"
        );
        assert_eq!(all_reduce(&comm, 1 << 10).algorithm, Algorithm::Relay);
        let text = large.to_string();
        assert!(text.contains("cables: ring (neighbours have 2 cables"), "{text}");
        assert!(text.contains("=verbs (2 cables)") && text.contains("=tcp"), "{text}");
        has_neighbours(&comm, 2, |peer| rank.abs_diff(peer) != 2);

        // Two that face each other have no cable, two neighbours have theirs.
        let facing = comm.split(Some(rank as u64 % 2), 0).unwrap().unwrap();
        assert_eq!(all_reduce(&facing, 1 << 20).layout, CableLayout::None);
        every_call(facing);
        let side = comm.split(Some(rank as u64 / 2), 0).unwrap().unwrap();
        assert_eq!(all_reduce(&side, 1 << 20).layout, CableLayout::Mesh);
        every_call(side);
        let three = comm.split((rank < 3).then_some(0), 0).unwrap();
        if let Some(three) = three {
            assert_eq!(all_reduce(&three, 1 << 20).layout, CableLayout::Line);
            every_call(three);
        }
        every_call(comm);
    });
}

#[test]
fn a_line_goes_along_its_cables() {
    let spec = Layout::line().latency_ns(2000).spec(4);
    on("layouts::a_line_goes_along_its_cables", &spec, "auto", |config| {
        let comm = config.connect().unwrap();
        let explanation = all_reduce(&comm, 16 << 20);
        assert_eq!((explanation.layout, explanation.algorithm), (CableLayout::Line, Algorithm::Line));
        let rank = comm.rank();
        has_neighbours(&comm, 1, |peer| rank.abs_diff(peer) == 1);
        every_call(comm);
    });
}

#[test]
fn a_mesh_can_be_used_as_a_ring() {
    let spec = Layout::mesh().spec(4);
    on("layouts::a_mesh_can_be_used_as_a_ring", &spec, "verbs", |config| {
        let comm = config.prefer_ring(true).connect().unwrap();
        assert_eq!(all_reduce(&comm, 1 << 20).layout, CableLayout::Ring);
        let rank = comm.rank();
        has_neighbours(&comm, 1, |peer| rank.abs_diff(peer) != 2);
        every_call(comm);
    });
}

#[test]
fn some_cables_and_tcp_make_a_group_together() {
    let end = |machine, device: &str| End { machine, device: device.to_owned() };
    let cable = |one, other| Cable { ends: [one, other], latency_ns: 2000, bandwidth: None };
    let cables =
        vec![cable(end(0, "rdma_en2"), end(2, "rdma_en2")), cable(end(2, "rdma_en3"), end(1, "rdma_en2"))];
    let spec = Spec { cables, ..Layout::mesh().spec(1) };
    let spec = Spec { machines: 4, ..spec };
    on("layouts::some_cables_and_tcp_make_a_group_together", &spec, "auto", |config| {
        let comm = config.connect().unwrap();
        let explanation = all_reduce(&comm, 1 << 20);
        assert_eq!(explanation.layout, CableLayout::Partial, "{explanation}");
        assert!(explanation.layout_reason.contains("2 of 6 pairs"), "{explanation}");
        let rank = comm.rank();
        has_neighbours(&comm, 1, |peer| [rank.min(peer), rank.max(peer)] != [0, 1] && rank.max(peer) != 3);
        // In the order of the cables, the three that have some are a line.
        let members = comm.split((rank < 3).then_some(0), [0, 2, 1, 3][rank]).unwrap();
        if let Some(line) = members {
            assert_eq!(all_reduce(&line, 1 << 20).layout, CableLayout::Line);
            every_call(line);
        }
        every_call(comm);
    });
}
