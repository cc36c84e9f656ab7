//! What the emulator itself costs: `cargo bench -p raccl-emulator`.
//!
//! Two processes over one cable: round trips of small messages, without latency and with one of 5 us each way, and a
//! stream of 64 KiB messages. Then the work of each side of such a message alone, in one process that is both
//! machines: what it takes does not depend on what else the computer does.

use std::process::Command;
use std::time::{Duration, Instant};

use raccl_emulator::{Emulation, Layout, MACHINE_VARIABLE, SPEC_VARIABLE, find_library};
use raccl_sys::{
    Completion, CompletionQueue, Depths, Error, GidEntry, Library, MemoryRegion, Peer, QueuePair,
    QueuePairOptions, ReadyToSend, Reset, Route, Transport,
};

const CASE: &str = "RACCL_BENCH_CASE";
const STREAM: usize = 64 << 10;
const WINDOW: usize = 16;
/// Here the cable is what takes time, and should take neither more nor less than it says.
const SLOW: &str = "stream of 64 KiB messages over 100 MB/s and 20 us";

fn main() {
    match std::env::var(CASE) {
        Ok(case) => run(&case).expect("the emulator works"),
        Err(_) => {
            // Cargo passes `--bench`; with anything else, such as `--list`, nothing is to be done.
            for (case, layout) in [
                ("round trip of 8 bytes", Layout::mesh()),
                ("round trip of 8 bytes over 5 us", Layout::mesh().latency_ns(5_000)),
                ("round trip of 4096 bytes", Layout::mesh()),
                ("stream of 64 KiB messages", Layout::mesh()),
                (SLOW, Layout::mesh().latency_ns(20_000).bandwidth(100_000_000)),
            ] {
                start(case, &layout, &["0", "1"]);
            }
            start("work for a message of 8 bytes", &Layout::mesh(), &["all"]);
            start("work for a message of 65536 bytes", &Layout::mesh(), &["all"]);
        }
    }
}

fn start(case: &str, layout: &Layout, machines: &[&str]) {
    let emulation = Emulation::create(&layout.spec(2)).expect("the spec is good");
    let program = std::env::current_exe().expect("this program has a file");
    let children: Vec<_> = machines
        .iter()
        .map(|machine| {
            let mut command = Command::new(&program);
            command.envs(emulation.environment(0)).env(MACHINE_VARIABLE, machine).env(CASE, case);
            command.spawn().expect("the program starts")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("it was started").success());
    }
}

struct Port {
    pair: QueuePair<ReadyToSend>,
    queue: CompletionQueue,
    memory: MemoryRegion,
    first: bool,
}

fn run(case: &str) -> Result<(), Error> {
    let program = std::env::current_exe().expect("this program has a file");
    let library = Library::load(Some(&find_library(&program).expect("cargo builds it")))?;
    let machine = std::env::var(MACHINE_VARIABLE).expect("the parent sets it");
    if machine == "all" {
        let ends = [unconnected(&library, "m0.rdma_en2")?, unconnected(&library, "m1.rdma_en2")?];
        let peers = [ends[0].peer(), ends[1].peer()];
        let [a, b] = ends;
        return work(case, &a.connect(&peers[1], true)?, &b.connect(&peers[0], false)?);
    }
    let machine = usize::from(machine == "1");
    let end = unconnected(&library, "rdma_en2")?;
    let other = exchange(machine, "peer", &format!("{} {}", end.pair.number(), end.gid.gid));
    let (number, address) = other.split_once(' ').expect("the other writes the same");
    let address: std::net::Ipv6Addr = address.parse().expect("the other writes the same");
    let number = number.parse().expect("the other writes the same");
    let peer = Peer { lid: 0, queue_pair: number, psn: 7, gid: raccl_sys::Gid(address.octets()) };
    let port = end.connect(&peer, machine == 0)?;
    if case.starts_with("stream") { port.stream(case, machine) } else { port.round_trips(case, machine) }
}

struct Unconnected {
    pair: QueuePair<Reset>,
    queue: CompletionQueue,
    memory: MemoryRegion,
    gid: GidEntry,
}

fn unconnected(library: &Library, device: &str) -> Result<Unconnected, Error> {
    let context = library.devices()?.find(device)?.open()?;
    let gid = context.ipv4_gid(1)?;
    let domain = context.protection_domain()?;
    let queue = domain.completion_queue(1024)?;
    let memory = domain.allocate(2 * WINDOW * STREAM)?;
    let depth = (WINDOW * STREAM / 4096) as u32;
    let options = QueuePairOptions { transport: Transport::Uc, depth: Depths { send: depth, recv: depth } };
    let pair = domain.queue_pair(&options, &queue, &queue)?;
    pair.keep(&memory);
    Ok(Unconnected { pair, queue, memory, gid })
}

impl Unconnected {
    fn peer(&self) -> Peer {
        Peer { lid: 0, queue_pair: self.pair.number(), psn: 7, gid: self.gid.gid }
    }

    fn connect(self, peer: &Peer, first: bool) -> Result<Port, Error> {
        let route = Route { port: 1, gid_index: self.gid.index, mtu: 4096 };
        let pair = self.pair.init(1)?.ready_to_receive(&route, peer)?.ready_to_send(7)?;
        Ok(Port { pair, queue: self.queue, memory: self.memory, first })
    }
}

/// Times each step of a message between two ends that this thread works alone.
fn work(case: &str, a: &Port, b: &Port) -> Result<(), Error> {
    let len = if case.contains("65536") { STREAM } else { 8 };
    let mut steps = [const { Vec::new() }; 5];
    let mut done = [Completion::default(); 8];
    for _ in 0..10_000 {
        let mut times = vec![Instant::now()];
        b.recv(1, 0, len)?;
        times.push(Instant::now());
        a.send(2, 0, len)?;
        times.push(Instant::now());
        assert_eq!(b.queue.poll(&mut done)?, 1);
        times.push(Instant::now());
        assert_eq!(a.queue.poll(&mut done)?, 1);
        times.push(Instant::now());
        assert_eq!(a.queue.poll(&mut done)?, 0);
        times.push(Instant::now());
        for (step, ends) in steps.iter_mut().zip(times.windows(2)) {
            step.push(ends[1] - ends[0]);
        }
    }
    for (name, step) in
        ["post_recv", "post_send", "poll of the receiver", "poll of the sender", "poll of nothing"]
            .into_iter()
            .zip(steps)
    {
        println!("{case}, {name}: {}", summary(step));
    }
    Ok(())
}

impl Port {
    fn send(&self, id: u64, offset: usize, len: usize) -> Result<(), Error> {
        let span = self.memory.span(offset, len)?;
        // SAFETY: the queue pair keeps the memory, and nobody writes to it.
        unsafe { self.pair.post_send(id, span) }
    }

    fn recv(&self, id: u64, offset: usize, len: usize) -> Result<(), Error> {
        let span = self.memory.span(offset, len)?;
        // SAFETY: as above, and nobody reads it.
        unsafe { self.pair.post_recv(id, span) }
    }

    fn round_trips(&self, case: &str, machine: usize) -> Result<(), Error> {
        let len = if case.contains("4096") { 4096 } else { 8 };
        for id in 0..4 {
            self.recv(id, STREAM, len)?;
        }
        exchange(machine, "ready", "");
        let mut times = Vec::new();
        for round in 0..10_000 {
            let start = Instant::now();
            if self.first {
                self.send(100, 0, len)?;
            }
            let mut done = [Completion::default(); 8];
            let mut received = false;
            let mut looks = 0;
            while !received {
                let count = self.queue.poll(&mut done)?;
                looks += 1;
                if looks % 1000 == 0 {
                    // The other process may be waiting for this processor.
                    std::thread::yield_now();
                }
                for completion in &done[..count] {
                    completion.check(self.pair.context())?;
                    received |= completion.is_receive();
                }
            }
            self.recv(0, STREAM, len)?;
            if !self.first {
                self.send(100, 0, len)?;
            }
            if round >= 1000 {
                times.push(start.elapsed());
            }
        }
        if self.first {
            println!("{case}: {}", summary(times));
        }
        exchange(machine, "done", "");
        Ok(())
    }

    fn stream(&self, case: &str, machine: usize) -> Result<(), Error> {
        let (rounds, stretch) = if case == SLOW { (800, 100) } else { (8_000, 1000) };
        let mut next = 0;
        // The best stretch says what is possible on a machine that is busy otherwise.
        let mut stretches = vec![Instant::now()];
        if !self.first {
            for id in 0..WINDOW {
                self.recv(id as u64, id * STREAM, STREAM)?;
            }
        }
        exchange(machine, "ready", "");
        let start = Instant::now();
        let mut completed = 0;
        while completed < rounds {
            while self.first && next < rounds && next - completed < WINDOW {
                self.send(next as u64, next % WINDOW * STREAM, STREAM)?;
                next += 1;
            }
            let mut done = [Completion::default(); 8];
            let count = self.queue.poll(&mut done)?;
            if count == 0 {
                std::thread::yield_now();
            }
            for completion in &done[..count] {
                completion.check(self.pair.context())?;
                if !self.first {
                    self.recv(completion.id(), completion.id() as usize * STREAM, STREAM)?;
                }
                completed += 1;
                if completed % stretch == 0 {
                    stretches.push(Instant::now());
                }
            }
        }
        if !self.first {
            let speed =
                |messages: usize, time: Duration| (messages * STREAM) as f64 / time.as_secs_f64() / 1e9;
            let best = stretches.windows(2).map(|ends| ends[1] - ends[0]).min().unwrap_or_default();
            println!(
                "{case}: {:.3} GB/s, at best {:.3}",
                speed(rounds, start.elapsed()),
                speed(stretch, best)
            );
        }
        exchange(machine, "done", "");
        Ok(())
    }
}

fn summary(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_nanos();
    format!("least {} ns, median {} ns, 99 % {} ns", times[0].as_nanos(), at(0.5), at(0.99))
}

/// Gives a text to the other process, and returns its.
fn exchange(machine: usize, step: &str, text: &str) -> String {
    let spec = std::env::var_os(SPEC_VARIABLE).expect("the parent sets it");
    let file = |name: String| std::path::Path::new(&spec).with_file_name(name);
    let draft = file(format!("draft-{machine}"));
    std::fs::write(&draft, text).expect("the folder is there");
    std::fs::rename(&draft, file(format!("{step}-{machine}"))).expect("it was just written");
    loop {
        if let Ok(text) = std::fs::read_to_string(file(format!("{step}-{}", 1 - machine))) {
            return text;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}
