//! Collectives on ranks whose plans reckon with the cables of a matrix, though what joins them is memory.

use super::{super::local::threads, *};
use crate::{
    CableLayout, DeviceMatrix, Max,
    link::HEADER_BYTES,
    plan::{Algorithm, Overrides},
};

/// A matrix with a cable for each pair, each on devices of its own.
fn matrix(size: usize, pairs: &[(usize, usize)]) -> DeviceMatrix {
    let mut rows = vec![vec![Vec::new(); size]; size];
    for (number, &(one, other)) in pairs.iter().enumerate() {
        rows[one][other].push(format!("d{number}"));
        rows[other][one].push(format!("d{number}"));
    }
    DeviceMatrix::from_rows(rows).unwrap()
}

fn line(size: usize) -> Vec<(usize, usize)> {
    (1..size).map(|rank| (rank - 1, rank)).collect()
}

fn ring(size: usize) -> Vec<(usize, usize)> {
    [line(size), vec![(size - 1, 0)]].concat()
}

fn run<R: Send>(
    size: usize,
    pairs: &[(usize, usize)],
    body: impl Fn(Communicator) -> R + Send + Sync,
) -> Vec<R> {
    let topology = Topology::new(&vec![(); size], LinkKind::Local, LinkKind::Local, 2, Overrides::default());
    let topology = topology.with_cables(&matrix(size, pairs));
    let group = threads(topology, |low, high| Ok(link::local::pair(Arc::clone(low), Arc::clone(high))));
    let body = &body;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = group.unwrap().into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// In [`call_everything`].
const BROADCASTS: usize = 8;

/// Makes every collective call for small and large buffers, and checks the results.
fn call_everything(comm: &Communicator) {
    let (rank, size) = (comm.rank(), comm.size());
    let value = |rank: usize, index: usize| (rank * 31 + index % 1009) as u64;
    for count in [0, 1, 700, 60_000] {
        let mine: Vec<u64> = (0..count).map(|index| value(rank, index)).collect();
        let mut sum = mine.clone();
        comm.all_reduce(&mut sum, Sum).unwrap();
        assert!((0..count).all(|at| sum[at] == (0..size).map(|rank| value(rank, at)).sum::<u64>()));
        let mut all = vec![0; count * size];
        comm.all_gather_into(&mine, &mut all).unwrap();
        assert!((0..count * size).all(|at| all[at] == value(at / count, at % count)));
        let mut part = vec![0; count];
        comm.reduce_scatter_into(&all, &mut part, Max).unwrap();
        assert!(part == all[rank * count..][..count]);
        for root in [0, size - 1] {
            let mut data = if rank == root { mine.clone() } else { vec![0; count] };
            comm.broadcast(&mut data, root).unwrap();
            assert!((0..count).all(|at| data[at] == value(root, at)));
        }
        comm.barrier().unwrap();
    }
}

#[test]
fn collectives_on_a_ring_or_a_line_send_no_payload_where_there_is_no_cable() {
    for size in 2..7 {
        for (pairs, layout) in [(line(size), CableLayout::Line), (ring(size), CableLayout::Ring)] {
            // Two ranks have the one cable, whatever it is called.
            let pairs = if size == 2 { &pairs[..1] } else { &pairs[..] };
            run(size, pairs, |comm| {
                call_everything(&comm);
                let explanation = comm.explain(Collective::AllReduce, 1 << 20);
                for peer in (0..size).filter(|&peer| peer != comm.rank()) {
                    let cables = explanation.cables[peer];
                    // Only a word to the root of each broadcast.
                    let words = (BROADCASTS * HEADER_BYTES) as u64;
                    assert_eq!(
                        comm.engine().sent_to(peer) > words,
                        cables > 0,
                        "{size} ranks: {explanation}"
                    );
                }
                let all = explanation.cables.iter().filter(|&&cables| cables == 0).count() == 1;
                assert!(explanation.layout == layout || size <= 3 && all, "{explanation}");
                assert!(explanation.to_string().contains(&format!("cables: {} (", explanation.layout)));
            });
        }
    }
}

#[test]
fn parts_of_a_ring_choose_by_their_own_cables() {
    run(6, &ring(6), |comm| {
        let rank = comm.rank();
        let algorithm = |comm: &Communicator| comm.explain(Collective::AllReduce, 16 << 20).algorithm;
        assert_eq!(algorithm(&comm), Algorithm::BidirectionalRing);

        let half = comm.split(Some(rank as u64 / 3), 0).unwrap().unwrap();
        assert_eq!(half.explain(Collective::Barrier, 0).layout, CableLayout::Line);
        assert_eq!(algorithm(&half), Algorithm::Line);
        call_everything(&half);

        let third = comm.split(Some(rank as u64 % 2), 0).unwrap().unwrap();
        assert_eq!(third.explain(Collective::Barrier, 0).layout, CableLayout::None);
        assert_eq!(algorithm(&third), Algorithm::TwoShot);
        call_everything(&third);

        let pair = comm.split(Some(rank as u64 / 2), -(rank as i64)).unwrap().unwrap();
        assert_eq!(pair.explain(Collective::Barrier, 0).layout, CableLayout::Mesh);
        call_everything(&pair);

        // The same ranks in another order: what was a ring is none in the order of these ranks.
        let mixed = comm.split(Some(0), [0, 3, 1, 4, 2, 5][rank]).unwrap().unwrap();
        let explanation = mixed.explain(Collective::Barrier, 0);
        assert_eq!(explanation.layout, CableLayout::Partial, "{explanation}");
        assert!(explanation.layout_reason.contains("number the ranks in the order"), "{explanation}");
        call_everything(&mixed);
        assert_eq!(comm.duplicate().unwrap().explain(Collective::Barrier, 0).layout, CableLayout::Ring);
    });
}

#[test]
fn some_cables_leave_the_choice_to_what_joins_the_others() {
    run(4, &[(0, 1), (1, 2), (0, 2)], |comm| {
        let explanation = comm.explain(Collective::AllReduce, 1 << 20);
        assert_eq!(explanation.layout, CableLayout::Partial);
        assert!(explanation.layout_reason.contains("3 of 6 pairs"), "{explanation}");
        call_everything(&comm);
        let members = comm.split((comm.rank() < 3).then_some(0), 0).unwrap();
        if let Some(cabled) = members {
            assert_eq!(cabled.explain(Collective::Barrier, 0).layout, CableLayout::Mesh);
            call_everything(&cabled);
        }
    });
}
