//! Messages arrive: whole, in order, between processes.

use raccl_emulator::Layout;

use crate::lab::*;

#[test]
fn messages_of_every_size_arrive_between_processes() {
    let spec = Layout::mesh().spec(2);
    processes(&spec, |lab| {
        let bench = lab.bench("rdma_en2");
        let pair = bench.pair(1024);
        let peers = lab.exchange("peers", &peer_bytes(&bench.peer(pair.number())));
        let port = bench.connect(pair, &peer_of(&peers[1 - lab.machine]));
        let sizes =
            [0, 1, 7, 8, 79, 80, 81, 100, 4095, 4096, 4097, 8192, 65_536, 65_537, 1 << 20, (4 << 20) - 1];
        let half = MEMORY / 2;
        for (id, len) in sizes.into_iter().enumerate() {
            let id = id as u64;
            port.recv(id, half, len).unwrap();
            lab.barrier(&format!("posted-{id}"));
            port.write(0, &pattern(id * 2 + lab.machine as u64, len));
            port.send(100 + id, 0, len).unwrap();
            let mut ids = [port.wait(), port.wait()].map(|done| {
                done.check(&port.bench.context).unwrap();
                if done.is_receive() {
                    assert_eq!(done.bytes(), len);
                }
                done.id()
            });
            ids.sort_unstable();
            assert_eq!(ids, [id, 100 + id]);
            assert_eq!(port.read(half, len), pattern(id * 2 + (1 - lab.machine) as u64, len), "{len} bytes");
        }
    });
}
