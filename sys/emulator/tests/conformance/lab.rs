//! Where the tests work: processes that load the emulator as any program does.
//!
//! A test function starts the test binary again for itself, with an environment that makes the new process one
//! machine of an emulation, or all of them. There the function's body runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use raccl_emulator::{Emulation, SPEC_VARIABLE, Spec, find_library};
use raccl_sys::{
    Completion, CompletionQueue, Context, Depths, Error, GidEntry, Library, MemoryRegion, Peer,
    ProtectionDomain, QueuePair, QueuePairOptions, ReadyToSend, Route, Transport,
};

/// Says which process of its test this one is.
const ROLE: &str = "RACCL_TEST_ROLE";
/// After this something is wrong, however slow the machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// For this long, something that must not happen is waited for.
pub(crate) const A_WHILE: Duration = Duration::from_millis(60);

/// A process's view of the emulation.
pub(crate) struct Lab {
    pub(crate) emulation: Emulation,
    pub(crate) library: Library,
    /// Which machine this process is, or where it is all of them, which process.
    pub(crate) machine: usize,
}

/// Runs `body` in a process of its own that is all machines of `spec`.
pub(crate) fn one_process<F: FnOnce(&Lab)>(spec: &Spec, body: F) {
    if role().is_some() {
        body(&Lab::here());
        return;
    }
    let emulation = Emulation::create(spec).expect("the spec is good");
    finish(vec![start(&test_of::<F>(), &emulation, emulation.environment_of_all(), 0)]);
}

/// Runs `body` in a process for each machine of `spec`. They have to leave nothing behind.
pub(crate) fn processes<F: FnOnce(&Lab)>(spec: &Spec, body: F) {
    run_all(spec, body, Emulation::environment);
}

/// Runs `body` in as many processes as `spec` has machines, each of which is all machines.
pub(crate) fn processes_of_all<F: FnOnce(&Lab)>(spec: &Spec, body: F) {
    run_all(spec, body, |emulation, _| emulation.environment_of_all());
}

fn run_all<F: FnOnce(&Lab)>(spec: &Spec, body: F, environment: impl Fn(&Emulation, usize) -> Environment) {
    if role().is_some() {
        body(&Lab::here());
        return;
    }
    let name = test_of::<F>();
    let emulation = Emulation::create(spec).expect("the spec is good");
    let start = |number| start(&name, &emulation, environment(&emulation, number), number);
    finish((0..spec.machines).map(start).collect());
    assert!(emulation.books().live.is_zero(), "{name} left {:?}", emulation.books());
}

/// The name of the test in which the closure `F` is written.
pub(crate) fn test_of<F>() -> String {
    let path = std::any::type_name::<F>().trim_end_matches("::{{closure}}");
    path.split_once("::").expect("it is in a crate").1.into()
}

/// The role of this process: `None` in the one that `cargo test` started.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

type Environment = [(&'static str, String); 2];

/// A test started again.
pub(crate) struct Process {
    pub(crate) child: Child,
    /// What it prints, which nobody wants to see unless it fails.
    output: PathBuf,
}

/// Starts a test again.
pub(crate) fn start(name: &str, emulation: &Emulation, environment: Environment, number: usize) -> Process {
    let output = emulation.spec_file().with_file_name(format!("output-{name}-{number}"));
    let file = File::create(&output).expect("the folder is there");
    let child = Command::new(std::env::current_exe().expect("this program has a file"))
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .envs(environment)
        .env(ROLE, number.to_string())
        .stdout(file.try_clone().expect("descriptors can be copied"))
        .stderr(file)
        .spawn()
        .expect("the test binary starts");
    Process { child, output }
}

/// Waits for processes, all of which have to succeed.
pub(crate) fn finish(mut processes: Vec<Process>) {
    let ends: Vec<_> =
        processes.iter_mut().map(|process| process.child.wait().expect("it was started")).collect();
    let mut good = true;
    for (Process { output, .. }, end) in processes.iter().zip(ends) {
        if !end.success() {
            println!("{}: {end}\n{}", output.display(), fs::read_to_string(output).unwrap_or_default());
            good = false;
        }
    }
    assert!(good, "a process failed, see above");
}

/// Where cargo has built the emulator.
pub(crate) fn library_file() -> PathBuf {
    find_library(&std::env::current_exe().expect("this program has a file"))
        .expect("cargo builds it for the tests")
}

impl Lab {
    pub(crate) fn here() -> Lab {
        let spec = std::env::var_os(SPEC_VARIABLE).expect("the parent sets it");
        let machine = role().and_then(|role| role.parse().ok()).unwrap_or(0);
        Lab {
            emulation: Emulation::attach(Path::new(&spec)).expect("the parent made it"),
            library: Library::load(Some(&library_file())).expect("it is a verbs library"),
            machine,
        }
    }

    /// Opens a device by its full name.
    pub(crate) fn open(&self, device: &str) -> Context {
        self.try_open(device).expect("it can be opened")
    }

    pub(crate) fn try_open(&self, device: &str) -> Result<Context, Error> {
        self.library.devices()?.find(device)?.open()
    }

    /// A port with everything on it.
    pub(crate) fn bench(&self, device: &str) -> Bench {
        Bench::new(self.open(device))
    }

    /// Both ends of the cable of a two-machine mesh, in a process that is both machines.
    pub(crate) fn benches(&self) -> (Bench, Bench) {
        (self.bench("m0.rdma_en2"), self.bench("m1.rdma_en2"))
    }

    /// Connected queue pairs at both ends of that cable.
    pub(crate) fn wire(&self, depth: u32) -> (Port, Port) {
        let (a, b) = self.benches();
        connect_both(a, b, depth)
    }

    /// Gives `value` to the other processes and returns theirs, by machine. Every process does the same exchanges.
    pub(crate) fn exchange(&self, step: &str, value: &[u8]) -> Vec<Vec<u8>> {
        let folder = self.emulation.spec_file().parent().expect("it is a file in a folder");
        let file = |machine: usize| folder.join(format!("exchange-{step}-{machine}"));
        let draft = folder.join(format!("draft-{step}-{}", self.machine));
        fs::write(&draft, value).expect("the folder is there");
        fs::rename(&draft, file(self.machine)).expect("it was just written");
        let deadline = Instant::now() + LONG;
        (0..self.emulation.spec().machines)
            .map(|machine| {
                loop {
                    if let Ok(value) = fs::read(file(machine)) {
                        return value;
                    }
                    assert!(Instant::now() < deadline, "machine {machine} did not come to {step}");
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
            .collect()
    }

    pub(crate) fn barrier(&self, step: &str) {
        self.exchange(step, &[]);
    }
}

/// A device opened, with a domain, a queue and memory.
pub(crate) struct Bench {
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    pub(crate) queue: CompletionQueue,
    pub(crate) memory: MemoryRegion,
    pub(crate) gid: GidEntry,
}

/// How much memory a bench has.
pub(crate) const MEMORY: usize = 16 << 20;

impl Bench {
    pub(crate) fn new(context: Context) -> Bench {
        context.active_port(1).expect("the cable is plugged in");
        let gid = context.ipv4_gid(1).expect("the port has an address");
        let domain = context.protection_domain().expect("there are domains");
        let queue = domain.completion_queue(1024).expect("there are queues");
        let memory = domain.allocate(MEMORY).expect("there are regions");
        Bench { context, domain, queue, memory, gid }
    }

    pub(crate) fn pair(&self, depth: u32) -> QueuePair<raccl_sys::Reset> {
        let options =
            QueuePairOptions { transport: Transport::Uc, depth: Depths { send: depth, recv: depth } };
        let pair = self.domain.queue_pair(&options, &self.queue, &self.queue).expect("there are queue pairs");
        pair.keep(&self.memory);
        pair
    }

    pub(crate) fn peer(&self, number: u32) -> Peer {
        Peer { lid: 0, queue_pair: number, psn: 7, gid: self.gid.gid }
    }

    pub(crate) fn route(&self) -> Route {
        Route { port: 1, gid_index: self.gid.index, mtu: 1024 }
    }

    pub(crate) fn connect(self, pair: QueuePair<raccl_sys::Reset>, peer: &Peer) -> Port {
        let route = self.route();
        let pair =
            pair.init(1).expect("port 1 is there").ready_to_receive(&route, peer).expect("the peer is there");
        let pair = pair.ready_to_send(7).expect("it was ready to receive");
        Port { pair, bench: self }
    }
}

/// Connects two benches that are in this process.
pub(crate) fn connect_both(a: Bench, b: Bench, depth: u32) -> (Port, Port) {
    let (pair_a, pair_b) = (a.pair(depth), b.pair(depth));
    let (peer_a, peer_b) = (a.peer(pair_a.number()), b.peer(pair_b.number()));
    (a.connect(pair_a, &peer_b), b.connect(pair_b, &peer_a))
}

/// A peer as bytes, for [`Lab::exchange`].
pub(crate) fn peer_bytes(peer: &Peer) -> Vec<u8> {
    [&peer.queue_pair.to_le_bytes()[..], &peer.gid.0].concat()
}

pub(crate) fn peer_of(bytes: &[u8]) -> Peer {
    let (number, gid) = bytes.split_first_chunk().expect("it is what peer_bytes makes");
    let gid = raccl_sys::Gid(gid.try_into().expect("it is what peer_bytes makes"));
    Peer { lid: 0, queue_pair: u32::from_le_bytes(*number), psn: 7, gid }
}

/// A connected queue pair and its bench.
pub(crate) struct Port {
    pub(crate) pair: QueuePair<ReadyToSend>,
    pub(crate) bench: Bench,
}

impl Port {
    /// Posts `bytes` at `offset` of the memory to be sent.
    pub(crate) fn send(&self, id: u64, offset: usize, bytes: usize) -> Result<(), Error> {
        let span = self.bench.memory.span(offset, bytes)?;
        // SAFETY: the queue pair keeps the memory, and tests leave alone what is posted, or mean not to.
        unsafe { self.pair.post_send(id, span) }
    }

    /// Posts `bytes` at `offset` of the memory for a message.
    pub(crate) fn recv(&self, id: u64, offset: usize, bytes: usize) -> Result<(), Error> {
        let span = self.bench.memory.span(offset, bytes)?;
        // SAFETY: as above.
        unsafe { self.pair.post_recv(id, span) }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= MEMORY);
        // SAFETY: the range lies in the memory.
        let place = unsafe { self.bench.memory.as_ptr().add(offset) };
        // SAFETY: as above, and there are no references to it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= MEMORY);
        let mut bytes = vec![0; len];
        // SAFETY: the range lies in the memory.
        let place = unsafe { self.bench.memory.as_ptr().add(offset) };
        // SAFETY: as above, and it has been received.
        unsafe { std::ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), len) };
        bytes
    }

    /// What is done by now.
    pub(crate) fn poll(&self) -> Vec<Completion> {
        let mut done = [Completion::default(); 64];
        let count = self.bench.queue.poll(&mut done).expect("polling works");
        done[..count].to_vec()
    }

    /// Waits for one completion.
    pub(crate) fn wait(&self) -> Completion {
        let deadline = Instant::now() + LONG;
        let mut done = [Completion::default()];
        while self.bench.queue.poll(&mut done).expect("polling works") == 0 {
            assert!(Instant::now() < deadline, "no completion came");
            std::thread::yield_now();
        }
        done[0]
    }

    /// Waits for a completion, which has to be a success with that id.
    pub(crate) fn wait_for(&self, id: u64) -> Completion {
        let done = self.wait();
        done.check(&self.bench.context).expect("it succeeds");
        assert_eq!(done.id(), id);
        done
    }

    /// Looks for a while, during which nothing may complete.
    pub(crate) fn stays_silent(&self) {
        let end = Instant::now() + A_WHILE;
        while Instant::now() < end {
            let done = self.poll();
            assert!(done.is_empty(), "something completed: {done:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Bytes that differ from message to message and from place to place.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|index| (index.wrapping_mul(131).wrapping_add(seed * 17) >> 3) as u8 ^ index as u8)
        .collect()
}
