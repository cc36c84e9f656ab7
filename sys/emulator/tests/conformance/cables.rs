//! Time on cables, and several of them. No test asks for speed: only that nothing is faster than its cable.

use std::time::{Duration, Instant};

use raccl_emulator::{Layout, Shape};

use crate::lab::*;

#[test]
fn nothing_arrives_before_its_latency() {
    let latency = Duration::from_millis(20);
    let spec = Layout::mesh().latency_ns(latency.as_nanos() as u64).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(4);
        for id in 0..5 {
            b.recv(id, 0, 64).unwrap();
            let start = Instant::now();
            a.send(id, 0, 64).unwrap();
            b.wait_for(id);
            assert!(start.elapsed() >= latency);
            a.wait_for(id);
        }
    });
}

#[test]
fn messages_share_the_bandwidth_of_their_cable_and_direction() {
    let bandwidth = 50_000_000;
    let spec = Layout::mesh().bandwidth(bandwidth).spec(2);
    one_process(&spec, |lab| {
        // Two queue pairs on one cable, four messages of 256 KiB each: 2 MiB take 42 ms together.
        let wires = [lab.wire(512), lab.wire(512)];
        let len = 256 << 10;
        for (a, b) in &wires {
            for id in 0..4 {
                b.recv(id, id as usize * len, len).unwrap();
                a.recv(id, id as usize * len, len).unwrap();
            }
        }
        let start = Instant::now();
        for id in 0..4 {
            for (a, b) in &wires {
                a.send(100 + id, (8 + id as usize) * len, len).unwrap();
                b.send(100 + id, (8 + id as usize) * len, len).unwrap();
            }
        }
        let expected = Duration::from_secs_f64(8.0 * len as f64 / bandwidth as f64);
        let mut last = 0;
        for (a, b) in &wires {
            for _ in 0..8 {
                a.wait().check(&a.bench.context).unwrap();
                b.wait().check(&b.bench.context).unwrap();
                last += 2;
            }
        }
        assert_eq!(last, 32);
        assert!(start.elapsed() >= expected, "16 messages took {:?}, not {expected:?}", start.elapsed());
    });
}

#[test]
fn a_message_is_sent_while_nobody_looks() {
    // Half a second on the cable, over by the time anybody looks.
    let spec = Layout::mesh().latency_ns(250_000_000).bandwidth(4_000_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(512);
        b.recv(1, 0, 1 << 20).unwrap();
        a.send(1, 0, 1 << 20).unwrap();
        std::thread::sleep(Duration::from_millis(520));
        assert_eq!(b.poll().len(), 1, "one look is enough");
        assert_eq!(a.poll().len(), 1);
    });
}

#[test]
fn cables_between_two_machines_are_independent() {
    let spec = Layout::mesh().cables(3).bandwidth(10_000).spec(2);
    one_process(&spec, |lab| {
        let device = |machine: usize, cable: usize| format!("m{machine}.rdma_en{}", 2 + cable);
        let wires: Vec<_> = (0..3)
            .map(|cable| connect_both(lab.bench(&device(0, cable)), lab.bench(&device(1, cable)), 64))
            .collect();
        // The first cable is busy for ten seconds, which nobody waits for.
        let (a, b) = &wires[0];
        b.recv(1, 0, 100_000).unwrap();
        a.send(1, 0, 100_000).unwrap();
        for (a, b) in &wires[1..] {
            b.recv(1, 0, 8).unwrap();
            a.send(1, 0, 8).unwrap();
            b.wait_for(1);
        }
        assert!(b.poll().is_empty(), "the first cable cannot be done yet");
        assert_eq!(lab.emulation.messages(0, 0), 1);
        assert_eq!(lab.emulation.messages(2, 0), 1);
        assert_eq!(lab.emulation.messages(2, 1), 0);
    });
}

#[test]
fn both_directions_of_a_cable_are_independent() {
    let spec = Layout::mesh().bandwidth(10_000).spec(2);
    one_process(&spec, |lab| {
        let (a, b) = lab.wire(64);
        // Ten seconds that way, which nobody waits for.
        b.recv(1, 0, 100_000).unwrap();
        a.send(1, 0, 100_000).unwrap();
        a.recv(2, 0, 8).unwrap();
        b.send(2, 64, 8).unwrap();
        a.wait_for(2);
        let done = b.wait();
        assert!(!done.is_receive(), "the way there cannot be done yet");
        assert!(b.poll().is_empty());
    });
}

#[test]
fn a_ring_joins_neighbours_and_the_matrix_says_so() {
    let layout: Layout = "ring,cables=2,latency=1us".parse().unwrap();
    assert_eq!(layout.shape, Shape::Ring);
    let spec = layout.spec(4);
    processes(&spec, |lab| {
        let names = lab.emulation.spec().device_names();
        let next = (lab.machine + 1) % 4;
        let previous = (lab.machine + 3) % 4;
        assert!(names[lab.machine][(lab.machine + 2) % 4].is_empty());
        assert!(names[lab.machine][lab.machine].is_empty());
        // A queue pair over each cable, to the next and to the previous.
        let mut ports = Vec::new();
        for (place, other) in [next, previous].into_iter().enumerate() {
            for (cable, device) in names[lab.machine][other].iter().enumerate() {
                ports.push((place, cable, other, lab.bench(device)));
            }
        }
        let pairs: Vec<_> = ports.iter().map(|(.., bench)| bench.pair(4)).collect();
        // Each gives all its ends, in the order: next over each cable, previous over each cable.
        let mine: Vec<u8> = ports
            .iter()
            .zip(&pairs)
            .flat_map(|((.., bench), pair)| peer_bytes(&bench.peer(pair.number())))
            .collect();
        let all = lab.exchange("peers", &mine);
        let mut connected = Vec::new();
        for ((place, cable, other, bench), pair) in ports.into_iter().zip(pairs) {
            // What is my next's way to its previous is the other end of my cable to it.
            let index = (1 - place) * 2 + cable;
            let peer = peer_of(&all[other][index * 20..(index + 1) * 20]);
            connected.push((other, cable, bench.connect(pair, &peer)));
        }
        for (_, _, port) in &connected {
            port.recv(1, 4096, 64).unwrap();
        }
        lab.barrier("posted");
        for (_, cable, port) in &connected {
            port.write(0, &[lab.machine as u8, *cable as u8]);
            port.send(2, 0, 2).unwrap();
        }
        for (other, cable, port) in &connected {
            for _ in 0..2 {
                port.wait().check(&port.bench.context).unwrap();
            }
            assert_eq!(port.read(4096, 2), [*other as u8, *cable as u8]);
        }
        lab.barrier("done");
    });
}
