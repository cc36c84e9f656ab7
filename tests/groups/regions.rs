//! Memory that devices know, at its edges: no more regions, groups that end before their buffers, odd packets and cables.

use std::thread;

use raccl::{Buffer, Communicator, Error, Sum, Uncopied};

use crate::{
    buffers::cabled,
    support::{Links, configured_group, group},
};

fn value(rank: usize, index: usize) -> u32 {
    (index as u32).wrapping_mul(0x9E37_79B9) ^ rank as u32
}

fn filled(comm: &Communicator, rank: usize, length: usize) -> Buffer<u32> {
    let mut buffer = comm.allocate(length).unwrap();
    buffer.iter_mut().enumerate().for_each(|(index, at)| *at = value(rank, index));
    buffer
}

/// Moves large buffers in all ways, and checks them.
fn exchange(comm: &Communicator, length: usize) {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let mine = filled(comm, rank, length);
    let mut theirs = filled(comm, 99, length);
    comm.send_recv(&mine, next, &mut theirs, last, 1).unwrap();
    assert!(theirs.iter().enumerate().all(|(index, &found)| found == value(last, index)), "send_recv");
    let mut all = comm.allocate::<u32>(length * size).unwrap();
    all[rank * length..(rank + 1) * length].copy_from_slice(&mine);
    comm.all_gather(&mut all).unwrap();
    let expected = |index| value(index / length, index % length);
    assert!(all.iter().enumerate().all(|(index, &found)| found == expected(index)), "all_gather");
    let root = size - 1;
    comm.broadcast(&mut theirs, root).unwrap();
    // It was what the rank before had sent.
    let from = (root + size - 1) % size;
    assert!(theirs.iter().enumerate().all(|(index, &found)| found == value(from, index)), "broadcast");
    let mut sums = mine;
    comm.all_reduce(&mut sums, Sum).unwrap();
    let sum = |index| (0..size).map(|rank| value(rank, index)).fold(0, u32::wrapping_add);
    assert!(sums.iter().enumerate().all(|(index, &found)| found == sum(index)), "all_reduce");
}

#[test]
fn devices_run_out_of_regions_and_get_them_back() {
    let most = |comm: &Communicator| {
        let mut buffers = Vec::new();
        let error = loop {
            // A page at least, so that there is something to know.
            match comm.allocate::<u8>(20_000) {
                Ok(buffer) => buffers.push(buffer),
                Err(error) => break error,
            }
            assert!(buffers.len() < 1000, "there is no end of regions");
        };
        (buffers, error)
    };
    group(Links::Tcp(1), 2, move |comm| {
        if !cabled() {
            return;
        }
        let (buffers, error) = most(&comm);
        assert!(
            matches!(&error, Error::Registration { bytes: 32_768, .. } if error.to_string().contains("few regions")),
            "{error}"
        );
        assert!(buffers.len() > 50, "{} buffers", buffers.len());
        let mut memory = vec![7_u8; 1 << 20];
        let error = comm.with_registered(&mut memory, |_| unreachable!("it is not registered")).unwrap_err();
        assert!(matches!(error, Error::Registration { bytes: 1_048_576, .. }), "{error}");
        // Without a region it is copied.
        let before = comm.uncopied();
        let mut theirs = vec![0; 1 << 20];
        comm.send_recv(&memory, 1 - comm.rank(), &mut theirs, 1 - comm.rank(), 1).unwrap();
        assert!(theirs == memory && comm.uncopied() == before);
        let count = buffers.len();
        drop(buffers);
        let (buffers, _) = most(&comm);
        assert_eq!(buffers.len(), count);
        drop(buffers);
        exchange(&comm, 300_000);
        assert_ne!(comm.uncopied(), before);
    });
}

#[test]
fn buffers_end_after_their_group_in_any_order() {
    group(Links::Tcp(2), 2, |comm| {
        let second = comm.duplicate().unwrap();
        let mut buffers: Vec<Buffer<u32>> = (0..6).map(|_| filled(&comm, comm.rank(), 100_000)).collect();
        second.all_reduce(&mut buffers[2], Sum).unwrap();
        drop(buffers.swap_remove(0));
        let part = comm.split(Some(0), 0).unwrap().unwrap();
        part.broadcast(&mut buffers[0], 1).unwrap();
        drop((second, part));
        comm.close().unwrap();
        assert!(buffers[0].iter().enumerate().all(|(index, &found)| found == value(1, index)));
        drop(buffers.swap_remove(1));
        buffers[1].fill(3);
    });
}

#[test]
fn a_group_ends_while_another_thread_allocates() {
    group(Links::Tcp(1), 2, |comm| {
        for round in 0..20 {
            let part = comm.duplicate().unwrap();
            let busy = {
                let part = part.clone();
                thread::spawn(move || {
                    let some: Vec<Buffer<u8>> = (0..round).map(|_| part.allocate(20_000).unwrap()).collect();
                    drop(part);
                    some
                })
            };
            part.barrier().unwrap();
            drop(part);
            drop(busy.join().unwrap());
        }
        let busy = {
            let comm = comm.clone();
            thread::spawn(move || (0..60).map(|_| comm.allocate::<u8>(20_000).unwrap()).collect::<Vec<_>>())
        };
        comm.barrier().unwrap();
        // The last one of both closes the group.
        drop(comm);
        drop(busy.join().unwrap());
    });
}

#[test]
fn packets_of_every_size_carry_what_was_lent() {
    for (bytes, depth) in [(8192, 2), (8192, 64), (512 << 10, 2), (64 << 10, 2)] {
        for cables in [1, 3] {
            configured_group(
                Links::Tcp(cables),
                2,
                move |config| config.verbs_bulk(bytes, depth),
                move |comm| {
                    exchange(&comm, (9 << 20) / 4 + 77);
                    let Uncopied { sent, received } = comm.uncopied();
                    assert_eq!(sent > 0, cabled(), "{bytes} {depth}");
                    assert_eq!(received > 0, cabled(), "{bytes} {depth}");
                },
            );
        }
    }
}

#[test]
fn groups_of_every_size_with_some_pairs_over_sockets() {
    // The emulation has five machines.
    for size in [3, 5, 6] {
        group(Links::Tcp(1), size, |comm| {
            exchange(&comm, 200_003);
            let halves = comm.split(Some((comm.rank() % 2) as u64), 0).unwrap().unwrap();
            exchange(&halves, 150_001);
            exchange(&comm.duplicate().unwrap(), 50_021);
        });
    }
}
