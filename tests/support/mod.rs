//! What the tests of groups share: groups of threads and of processes that may not hang, random numbers, and an oracle that
//! knows the fold tree from its definition alone.
#![allow(dead_code, reason = "not every test program uses all of it")]

pub(crate) mod cables;
pub(crate) mod oracle;
pub(crate) mod random;

use std::{
    env,
    io::Read,
    net::TcpListener,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use raccl::{Communicator, Config, LinkKind, local_group};

/// How long anything may take before it counts as hung. Only a hang takes so long, however slow the machine is.
pub(crate) const HANG: Duration = Duration::from_secs(300);

/// What joins the ranks of a group of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// Memory of this process.
    Local,
    /// So many TCP sockets for every pair, over the loopback interface; or cables, see [`cables::plug`].
    Tcp(usize),
}

/// Every kind of links that a test of results should see.
pub(crate) const LINKS: [Links; 5] =
    [Links::Local, Links::Tcp(1), Links::Tcp(2), Links::Tcp(3), Links::Tcp(4)];

/// Runs `body` as every rank of a group of threads and returns what the ranks return, in order. A rank that panics, and one
/// that does not end, fail the test.
pub(crate) fn group<R: Send + 'static>(
    links: Links,
    size: usize,
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    configured_group(links, size, |config| config, body)
}

/// The same with settings of the test's own, which only a group over TCP has.
pub(crate) fn configured_group<R: Send + 'static>(
    links: Links,
    size: usize,
    configure: impl Fn(Config) -> Config + Send + Sync + 'static,
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    match links {
        Links::Local => {
            let group = local_group(size).unwrap().into_iter().map(parking::Slot::new).collect::<Vec<_>>();
            ranks(size, move |rank| body(group[rank].take()))
        }
        Links::Tcp(sockets) => {
            let meeting = Meeting::new();
            ranks(size, move |rank| {
                let config = cables::plug(meeting.config(rank, size).sockets(sockets), size, sockets);
                body(configure(config).connect().unwrap())
            })
        }
    }
}

/// Runs `body` in a thread for every rank, with the promise of [`group`].
pub(crate) fn ranks<R: Send + 'static>(
    size: usize,
    body: impl Fn(usize) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let body = Arc::new(body);
    let (done, ends) = mpsc::channel();
    for rank in 0..size {
        let (body, done) = (Arc::clone(&body), done.clone());
        thread::Builder::new()
            .name(format!("rank {rank}"))
            .spawn(move || {
                let end = catch_unwind(AssertUnwindSafe(|| body(rank)));
                let _ = done.send((rank, end));
            })
            .unwrap();
    }
    drop(done);
    let mut results: Vec<Option<R>> = (0..size).map(|_| None).collect();
    let until = Instant::now() + HANG;
    for _ in 0..size {
        match ends.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((rank, Ok(result))) => results[rank] = Some(result),
            Ok((_, Err(panic))) => resume_unwind(panic),
            Err(_) => {
                let hung: Vec<usize> = (0..size).filter(|&rank| results[rank].is_none()).collect();
                panic!("ranks {hung:?} hang");
            }
        }
    }
    results.into_iter().map(|result| result.unwrap()).collect()
}

/// Ends the whole test program if `body` takes longer than anything may: for what cannot be left behind in a thread.
pub(crate) fn bounded<R>(body: impl FnOnce() -> R) -> R {
    let (done, waiting) = mpsc::channel::<()>();
    let me = thread::current().name().unwrap_or("a test").to_owned();
    let watch = thread::spawn(move || {
        if waiting.recv_timeout(HANG) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{me} hangs");
            std::process::abort();
        }
    });
    let result = body();
    drop(done);
    watch.join().unwrap();
    result
}

/// Where the ranks of one group find each other.
pub(crate) struct Meeting {
    listener: TcpListener,
}

impl Meeting {
    pub(crate) fn new() -> Meeting {
        Meeting { listener: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    pub(crate) fn address(&self) -> String {
        self.listener.local_addr().unwrap().to_string()
    }

    /// How a rank of this process joins.
    pub(crate) fn config(&self, rank: usize, size: usize) -> Config {
        let config = Config::new().rank(rank).size(size).link(LinkKind::Tcp).insecure(true);
        match rank {
            0 => config.listener(self.listener.try_clone().unwrap()),
            _ => config.coordinator(self.address()),
        }
    }
}

/// Says in a process's environment which test it is a rank of.
pub(crate) const CHILD: &str = "RACCL_TEST_CHILD";

/// Runs `body` as every rank of a group of processes: the test program starts itself once for every rank, and in those
/// processes this call runs `body` and ends the process. `name` is the test's full name. Returns what the ranks printed.
pub(crate) fn processes(name: &str, size: usize, body: impl FnOnce(Communicator)) -> Vec<String> {
    launch(name, size, &[], |config| body(config.connect().unwrap()))
}

/// As [`processes`], with more variables, for a body that connects on its own.
pub(crate) fn launch(
    name: &str,
    size: usize,
    variables: &[(&str, &str)],
    body: impl FnOnce(Config),
) -> Vec<String> {
    let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
    let variables: Vec<(String, String)> = variables.collect();
    launch_each(name, size, |_| variables.clone(), body)
}

/// As [`launch`], with other variables for each rank; they are asked for in the process that starts the others.
pub(crate) fn launch_each(
    name: &str,
    size: usize,
    variables: impl Fn(usize) -> Vec<(String, String)>,
    body: impl FnOnce(Config),
) -> Vec<String> {
    if let Some(config) = child(name) {
        body(config);
        // The parent wants to see that everything ended well, this included.
        println!("\n{ENDED}");
        return Vec::new();
    }
    let coordinator = free_address();
    let children: Vec<Process> = (0..size)
        .map(|rank| {
            let mut command = rank_command(name, rank, size, &coordinator);
            Process::new(command.envs(variables(rank)).spawn().unwrap())
        })
        .collect();
    let until = Instant::now() + HANG;
    let outputs: Vec<Output> = children.into_iter().map(|child| child.wait(until)).collect();
    let texts = outputs.iter().map(|output| {
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("{}\n{text}\n{errors}", output.status)
    });
    let texts: Vec<String> = texts.collect();
    if let Some(bad) =
        outputs.iter().zip(&texts).find(|(o, text)| !o.status.success() || !text.contains(ENDED))
    {
        panic!("{name}: a process failed\n{}\n(all: {texts:#?})", bad.1);
    }
    texts
}

/// How this process joins if it is a rank of the test `name`.
pub(crate) fn child(name: &str) -> Option<Config> {
    if env::var(CHILD).is_ok_and(|child| child == name) {
        // What runs in the background of a script ignores this signal, and hands that on; a rank is to end by it.
        // SAFETY: no function is called when it comes.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        return Some(Config::from_env().unwrap());
    }
    None
}

/// Starts this test program as a rank of the test `name`.
pub(crate) fn rank_command(name: &str, rank: usize, size: usize, coordinator: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--test-threads=1", "--include-ignored"])
        .env(CHILD, name)
        .env("RACCL_RANK", rank.to_string())
        .env("RACCL_SIZE", size.to_string())
        .env("RACCL_COORDINATOR", coordinator)
        .env("RACCL_INSECURE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// An address on which nobody listens. Its port is below those that the system gives to outgoing connections, so that none
/// of these takes it before a rank does.
pub(crate) fn free_address() -> String {
    let mut random = random::Random::new(random::Random::fresh_seed());
    loop {
        let address = format!("127.0.0.1:{}", 10_000 + random.below(20_000));
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

/// What a rank's process prints when its body has returned.
const ENDED: &str = "the body has ended";

/// Reads all that a child prints.
type Reader = thread::JoinHandle<Vec<u8>>;

/// A child process, killed when it is dropped.
struct Process {
    child: Child,
    readers: Option<(Reader, Reader)>,
}

impl Process {
    fn new(mut child: Child) -> Process {
        fn drain(mut from: impl Read + Send + 'static) -> Reader {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = from.read_to_end(&mut bytes);
                bytes
            })
        }
        let stdout = drain(child.stdout.take().unwrap());
        let stderr = drain(child.stderr.take().unwrap());
        Process { child, readers: Some((stdout, stderr)) }
    }

    fn wait(mut self, until: Instant) -> Output {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > until {
                let _ = self.child.kill();
                break self.child.wait().unwrap();
            }
            thread::sleep(Duration::from_millis(2));
        };
        let (stdout, stderr) = self.readers.take().unwrap();
        Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has usually ended long ago.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A number from the environment, for tests that run longer when asked to.
pub(crate) fn setting(name: &str, default: usize) -> usize {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")),
        Err(_) => default,
    }
}

/// Bytes, to compare what floats cannot.
pub(crate) fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// FNV-1a, to compare results across many runs.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

mod parking {
    use std::sync::Mutex;

    /// A value that one of many threads takes out.
    pub(crate) struct Slot<T>(Mutex<Option<T>>);

    impl<T> Slot<T> {
        pub(crate) fn new(value: T) -> Slot<T> {
            Slot(Mutex::new(Some(value)))
        }

        pub(crate) fn take(&self) -> T {
            self.0.lock().unwrap().take().expect("taken once")
        }
    }
}
