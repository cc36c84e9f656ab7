//! The safe layer on Linux's own verbs, with any device that can reach itself: Soft-RoCE in a virtual machine
//! (`ci/soft-roce`), or a card.

use std::time::{Duration, Instant};

use raccl_sys::{
    Completion, CompletionQueue, Context, Depths, Error, GidEntry, Library, MemoryRegion, Peer, Port,
    ProtectionDomain, Provider, QueuePair, QueuePairOptions, ReadyToSend, Reset, Route, Transport,
};

const MEMORY: usize = 4 << 20;
const LONG: Duration = Duration::from_secs(60);

/// The first device with an active port and an IPv4 address.
fn device() -> (Context, Port, GidEntry) {
    let library = Library::load(None).expect("libibverbs is installed");
    assert_eq!(library.provider(), Provider::Linux);
    let devices = library.devices().expect("they can be listed");
    for device in devices.iter() {
        let context = device.open().expect("it can be opened");
        if let (Ok(port), Ok(gid)) = (context.active_port(1), context.ipv4_gid(1)) {
            return (context, port, gid);
        }
    }
    panic!("no device is of use: {:?}", devices.names());
}

/// One end of a connection of the device with itself.
struct End {
    pair: QueuePair<ReadyToSend>,
    queue: CompletionQueue,
    memory: MemoryRegion,
}

fn options(transport: Transport) -> QueuePairOptions {
    QueuePairOptions { transport, depth: Depths { send: 16, recv: 16 } }
}

fn loopback(transport: Transport) -> (End, End) {
    let (context, port, gid) = device();
    let route = Route { port: 1, gid_index: gid.index, mtu: port.active_mtu() };
    let domain = context.protection_domain().unwrap();
    let make = || -> (QueuePair<Reset>, CompletionQueue, MemoryRegion) {
        let queue = domain.completion_queue(64).unwrap();
        let memory = domain.allocate(MEMORY).unwrap();
        let pair = domain.queue_pair(&options(transport), &queue, &queue).unwrap();
        pair.keep(&memory);
        (pair, queue, memory)
    };
    let (a, b) = (make(), make());
    let peer = |number| Peer { lid: port.lid(), queue_pair: number, psn: 7, gid: gid.gid };
    let (peer_a, peer_b) = (peer(a.0.number()), peer(b.0.number()));
    let connect = |(pair, queue, memory): (QueuePair<Reset>, _, _), peer: &Peer| {
        let pair = pair.init(1).unwrap().ready_to_receive(&route, peer).unwrap().ready_to_send(7).unwrap();
        End { pair, queue, memory }
    };
    (connect(a, &peer_b), connect(b, &peer_a))
}

impl End {
    fn send(&self, id: u64, offset: usize, len: usize) {
        let span = self.memory.span(offset, len).unwrap();
        // SAFETY: the queue pair keeps the memory, and tests leave alone what is posted.
        unsafe { self.pair.post_send(id, span) }.unwrap();
    }

    fn recv(&self, id: u64, offset: usize, len: usize) {
        let span = self.memory.span(offset, len).unwrap();
        // SAFETY: as above.
        unsafe { self.pair.post_recv(id, span) }.unwrap();
    }

    fn wait_for(&self, id: u64) -> Completion {
        let deadline = Instant::now() + LONG;
        let mut done = [Completion::default()];
        while self.queue.poll(&mut done).unwrap() == 0 {
            assert!(Instant::now() < deadline, "completion {id} did not come");
            std::thread::sleep(Duration::from_micros(50));
        }
        done[0].check(self.pair.context()).unwrap();
        assert_eq!(done[0].id(), id);
        done[0]
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= MEMORY);
        // SAFETY: the range lies in the memory.
        let place = unsafe { self.memory.as_ptr().add(offset) };
        // SAFETY: as above, and there are no references to it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= MEMORY);
        let mut bytes = vec![0; len];
        // SAFETY: the range lies in the memory.
        let place = unsafe { self.memory.as_ptr().add(offset) };
        // SAFETY: as above, and it has been received.
        unsafe { std::ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), len) };
        bytes
    }
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index.wrapping_mul(31) + seed * 7 + (index >> 9)) as u8).collect()
}

fn messages_arrive(transport: Transport) {
    let (a, b) = loopback(transport);
    for (seed, len) in [1, 64, 4096, 4097, 65_536, 1 << 20].into_iter().enumerate() {
        let id = seed as u64;
        b.recv(id, MEMORY / 2, len);
        a.write(0, &pattern(seed, len));
        a.send(100 + id, 0, len);
        assert_eq!(b.wait_for(id).bytes(), len);
        a.wait_for(100 + id);
        assert_eq!(b.read(MEMORY / 2, len), pattern(seed, len), "{len} bytes");
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn messages_arrive_by_uc() {
    messages_arrive(Transport::Uc);
}

#[test]
#[ignore = "needs an RDMA device"]
fn messages_arrive_by_rc() {
    messages_arrive(Transport::Rc);
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_reliable_send_waits_for_its_receive() {
    let (a, b) = loopback(Transport::Rc);
    a.write(0, b"early");
    a.send(1, 0, 5);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(a.queue.poll(&mut [Completion::default()]).unwrap(), 0);
    b.recv(2, 0, 64);
    assert_eq!(b.wait_for(2).bytes(), 5);
    a.wait_for(1);
    assert_eq!(b.read(0, 5), b"early");
}

#[test]
#[ignore = "needs an RDMA device"]
fn an_unreliable_send_without_a_receive_succeeds_and_is_lost() {
    let (a, b) = loopback(Transport::Uc);
    a.send(1, 0, 5);
    a.wait_for(1);
    std::thread::sleep(Duration::from_millis(50));
    b.recv(2, 0, 64);
    a.send(3, 0, 33);
    a.wait_for(3);
    assert_eq!(b.wait_for(2).bytes(), 33, "the first message is gone");
}

#[test]
#[ignore = "needs an RDMA device"]
fn what_the_device_says_of_itself_makes_sense() {
    let (context, port, gid) = device();
    let limits = context.limits().unwrap().expect("this library can be asked");
    assert!(limits.queue_pairs > 1 && limits.domains > 1 && limits.regions > 1);
    assert!(limits.work_requests >= 16 && limits.region_bytes > 1 << 20);
    assert!([256, 512, 1024, 2048, 4096].contains(&port.active_mtu()));
    assert!(usize::from(gid.index) < port.gid_count());
    assert_eq!(context.gid(1, gid.index).unwrap(), gid.gid);
    assert!(context.gids(1).unwrap().contains(&gid));
    let error = context.port(200).unwrap_err();
    assert!(error.to_string().contains(context.name()), "{error}");
}

#[test]
#[ignore = "needs an RDMA device"]
fn depths_granted_are_at_least_those_asked_for() {
    let (a, _b) = loopback(Transport::Rc);
    let depths = a.pair.depths();
    assert!(depths.send >= 16 && depths.recv >= 16, "{depths:?}");
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_peer_that_is_not_there_is_an_error_with_its_verb() {
    let (context, port, gid) = device();
    let domain = context.protection_domain().unwrap();
    let queue = domain.completion_queue(4).unwrap();
    let pair = domain.queue_pair(&options(Transport::Rc), &queue, &queue).unwrap().init(1).unwrap();
    // No entry of the table is at this index.
    let route = Route { port: 1, gid_index: u8::MAX, mtu: port.active_mtu() };
    let peer = Peer { lid: 0, queue_pair: 1, psn: 7, gid: gid.gid };
    match pair.ready_to_receive(&route, &peer) {
        Err(error @ Error::Verb { verb: "ibv_modify_qp", .. }) => {
            assert!(error.to_string().contains(context.name()), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn cycles_in_any_order_leave_nothing_behind() {
    let (context, _, _) = device();
    let failures = context.failures();
    let limits = context.limits().unwrap().expect("this library can be asked");
    let cycle = |backwards: bool| {
        let domain: ProtectionDomain = context.protection_domain().unwrap();
        let queue = domain.completion_queue(4).unwrap();
        let memory = domain.allocate(1 << 14).unwrap();
        let pair = domain.queue_pair(&options(Transport::Uc), &queue, &queue).unwrap();
        pair.keep(&memory);
        if backwards {
            drop((domain, queue, memory, pair));
        } else {
            drop((pair, memory, queue, domain));
        }
    };
    for round in 0..100 {
        cycle(round % 2 == 0);
    }
    assert!(limits.queue_pairs > 0);
    let failures = failures.take();
    assert!(failures.is_empty(), "{failures:?}");
}
