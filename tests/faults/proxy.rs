//! A network between ranks that cuts, delays, stalls and resets.
//!
//! The proxy stands where rank 0 listens, so everything between rank 0 and the others goes through it: control connections and
//! data sockets. The others are connected directly with each other.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use raccl::{Communicator, Config, Error, LinkKind};
use socket2::SockRef;

use crate::{
    kills::{lost, seed},
    operations::Operations,
    support::{Meeting, random::Random, ranks, setting},
};

/// What the proxy does with the bytes of one direction of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Passes them on one by one.
    Bytes,
    /// Passes them on in pieces of any length, each after a moment.
    Delay,
    /// Passes nothing on for a while, now and then.
    Stalls,
    /// Passes nothing on once it is told to.
    Silence,
    /// Ends both directions without a farewell once so many bytes have passed.
    ResetAfter(u64),
}

/// Connections through a proxy, in the order in which they were made.
struct Proxy {
    address: String,
    /// Set when [`Fault::Silence`] begins.
    silent: Arc<AtomicBool>,
    passed: Arc<AtomicU64>,
}

impl Proxy {
    /// `fault` says what happens to the connection of a number, counted from 0.
    fn new(target: String, seed: u64, fault: impl Fn(usize) -> Option<Fault> + Send + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (silent, passed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (quiet, counter) = (Arc::clone(&silent), Arc::clone(&passed));
        // Ends with the process: a listener that is blocked in accept cannot be woken.
        thread::spawn(move || {
            for (index, near) in listener.incoming().map_while(std::io::Result::ok).enumerate() {
                let Ok(far) = TcpStream::connect(&target) else { continue };
                let (near, far) = (Arc::new(near), Arc::new(far));
                let fault = fault(index);
                for (from, to, turn) in [(&near, &far, 0), (&far, &near, 1)] {
                    let random = Random::new(seed ^ (index as u64) << 8 ^ turn);
                    let pipe = Pipe {
                        from: Arc::clone(from),
                        to: Arc::clone(to),
                        fault,
                        silent: Arc::clone(&quiet),
                        passed: Arc::clone(&counter),
                        random,
                    };
                    thread::spawn(move || pipe.run());
                }
            }
        });
        Proxy { address, silent, passed }
    }
}

/// One direction of a connection.
struct Pipe {
    from: Arc<TcpStream>,
    to: Arc<TcpStream>,
    fault: Option<Fault>,
    silent: Arc<AtomicBool>,
    passed: Arc<AtomicU64>,
    random: Random,
}

impl Pipe {
    fn run(mut self) {
        let _ = self.to.set_nodelay(true);
        let mut buffer = vec![0; 64 << 10];
        let mut passed = 0;
        loop {
            let count = match (&*self.from).read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return self.reset(),
            };
            let mut rest = &buffer[..count];
            while !rest.is_empty() {
                let (now, later) = rest.split_at(self.piece(rest.len()));
                rest = later;
                if let Some(Fault::ResetAfter(most)) = self.fault
                    && passed + now.len() as u64 > most
                {
                    return self.reset();
                }
                if (&*self.to).write_all(now).is_err() {
                    return self.reset();
                }
                passed += now.len() as u64;
                self.passed.fetch_add(now.len() as u64, Ordering::Relaxed);
            }
        }
        let _ = self.to.shutdown(std::net::Shutdown::Write);
    }

    /// How many of the bytes that are there go on now, and waits for that moment.
    fn piece(&mut self, there: usize) -> usize {
        match self.fault {
            Some(Fault::Bytes) => 1,
            Some(Fault::Delay) => {
                thread::sleep(Duration::from_micros(self.random.below(3000) as u64));
                1 + self.random.below(there)
            }
            Some(Fault::Stalls) => {
                if self.random.below(20) == 0 {
                    thread::sleep(Duration::from_millis(self.random.below(400) as u64));
                }
                1 + self.random.below(there)
            }
            Some(Fault::Silence) => {
                while self.silent.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(5));
                }
                there
            }
            Some(Fault::ResetAfter(_)) => 1 + self.random.below(there),
            None => there,
        }
    }

    fn reset(&self) {
        for stream in [&self.from, &self.to] {
            // A linger of nothing makes the kernel send a reset; the other direction's thread sees the end of its stream.
            let _ = SockRef::from(&**stream).set_linger(Some(Duration::ZERO));
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Runs `body` as every rank of a group whose rank 0 stands behind a proxy.
fn behind<R: Send + 'static>(
    size: usize,
    seed: u64,
    fault: impl Fn(usize) -> Option<Fault> + Send + 'static,
    configure: impl Fn(Config) -> Config + Send + Sync + 'static,
    body: impl Fn(Communicator, &Proxy) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let meeting = Meeting::new();
    let proxy = Proxy::new(meeting.address(), seed, fault);
    ranks(size, move |rank| {
        let config = match rank {
            0 => meeting.config(0, size),
            _ => {
                let config = Config::new().rank(rank).size(size).link(LinkKind::Tcp).insecure(true);
                config.coordinator(proxy.address.clone())
            }
        };
        body(configure(config).connect().unwrap(), &proxy)
    })
}

/// All results are right behind a network that does this.
fn results_are_right(name: &str, fault: Fault, operations: usize, longest: usize) {
    let groups = setting("RACCL_TEST_PROXIES", 2);
    let seed = seed();
    for seed in seed..seed + groups as u64 {
        let mut random = Random::new(seed);
        let (size, sockets) = (2 + random.below(2), 1 + random.below(2));
        println!("{name}: seed {seed}, {size} ranks, {sockets} sockets");
        behind(
            size,
            seed,
            move |_| Some(fault),
            move |config| config.sockets(sockets),
            move |comm, _| {
                let mut calls = Operations::new(seed, longest);
                (0..operations).for_each(|_| calls.next(&comm).unwrap());
                comm.close().unwrap();
            },
        );
    }
}

#[test]
fn bytes_that_come_one_by_one_are_put_together() {
    results_are_right("bytes", Fault::Bytes, 60, 2000);
}

#[test]
fn bytes_that_come_late_are_waited_for() {
    results_are_right("delay", Fault::Delay, 60, 20_000);
}

#[test]
fn a_network_that_stalls_is_waited_for() {
    results_are_right("stalls", Fault::Stalls, 40, 20_000);
}

/// The first connection of a group of two is its control connection, those after it are for data.
fn cut(connection: usize, seed: u64, bytes: u64) {
    println!("seed {seed}: connection {connection} cut after {bytes} bytes");
    let errors = behind(
        2,
        seed,
        move |index| (index == connection).then_some(Fault::ResetAfter(bytes)),
        |config| config.sockets(2),
        move |comm, _| {
            // Long enough for every socket to be used.
            let mut calls = Operations::new(seed, 200_000);
            loop {
                if let Err(error) = calls.next(&comm) {
                    return (comm.rank(), error, comm.barrier());
                }
            }
        },
    );
    for (rank, error, again) in errors {
        assert_eq!(lost(&error), Some(1 - rank), "seed {seed}: {error:?}");
        assert!(error.to_string().contains(&format!("lost rank {}", 1 - rank)), "{error}");
        assert_eq!(again.map_err(|again| lost(&again)), Err(Some(1 - rank)));
    }
}

#[test]
fn a_connection_that_is_reset_loses_the_peer_behind_it() {
    let (cuts, seed) = (setting("RACCL_TEST_CUTS", 8), seed());
    for seed in seed..seed + cuts as u64 {
        let mut random = Random::new(seed);
        // Not before the group has formed: a hello, a roster and the greetings have a few hundred bytes.
        cut(1 + random.below(2), seed, 2000 + random.below(200_000) as u64);
    }
}

#[test]
fn data_that_stop_while_the_control_connection_lives_end_by_deadline() {
    let seed = seed();
    println!("seed {seed}");
    let errors = behind(
        2,
        seed,
        |index| (index > 0).then_some(Fault::Silence),
        |config| config.timeout(Duration::from_millis(700)).sockets(1),
        |comm, proxy| {
            let mut values = vec![1_u64; 300_000];
            comm.all_reduce(&mut values, raccl::Sum).unwrap();
            assert!(proxy.passed.load(Ordering::Relaxed) > 0);
            // The other has its sum when this ends here.
            let mut result = comm.barrier();
            if comm.rank() == 0 {
                result.clone().unwrap();
                proxy.silent.store(true, Ordering::Relaxed);
            }
            loop {
                if let Err(error) = result {
                    return error;
                }
                result = comm.all_reduce(&mut values, raccl::Sum);
            }
        },
    );
    // One of them has its deadline first and tells the other.
    let timeouts: Vec<&Error> = errors.iter().filter(|e| matches!(e, Error::Timeout { .. })).collect();
    assert!(!timeouts.is_empty(), "{errors:?}");
    for error in timeouts {
        let Error::Timeout { operation, rank, peer, link, waited, .. } = error else { unreachable!() };
        assert!(["all_reduce", "barrier"].contains(operation), "{error}");
        assert_eq!((*peer, *link), (1 - rank, LinkKind::Tcp));
        assert!(*waited >= Duration::from_millis(700), "{error}");
        let text = error.to_string();
        for word in [format!("rank {peer}"), "over tcp".to_owned(), "bytes".to_owned()] {
            assert!(text.contains(&word), "{text}");
        }
    }
    let told = errors.iter().all(|e| matches!(e, Error::Timeout { .. } | Error::Remote { .. }));
    assert!(told, "{errors:?}");
}

/// A control connection carries next to nothing, so it is cut by hand.
#[test]
fn a_control_connection_that_is_reset_loses_the_peer() {
    let meeting = Meeting::new();
    let streams: Arc<Mutex<Vec<Arc<TcpStream>>>> = Arc::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, target) = (listener.local_addr().unwrap().to_string(), meeting.address());
    let kept = Arc::clone(&streams);
    thread::spawn(move || {
        for near in listener.incoming().map_while(std::io::Result::ok) {
            let Ok(far) = TcpStream::connect(&target) else { continue };
            let (near, far) = (Arc::new(near), Arc::new(far));
            kept.lock().unwrap().push(Arc::clone(&near));
            for (from, to) in [(Arc::clone(&near), Arc::clone(&far)), (far, near)] {
                thread::spawn(move || {
                    let _ = std::io::copy(&mut &*from, &mut &*to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    let errors = ranks(2, move |rank| {
        let config = match rank {
            0 => meeting.config(0, 2),
            _ => {
                Config::new().rank(1).size(2).link(LinkKind::Tcp).insecure(true).coordinator(address.clone())
            }
        };
        let comm = config.connect().unwrap();
        comm.barrier().unwrap();
        if rank == 0 {
            // The other has returned from the first one if this one ends.
            comm.barrier().unwrap();
            let first = Arc::clone(&streams.lock().unwrap()[0]);
            let _ = SockRef::from(&*first).set_linger(Some(Duration::ZERO));
            first.shutdown(std::net::Shutdown::Both).unwrap();
        }
        loop {
            if let Err(error) = comm.barrier() {
                return error;
            }
        }
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(lost(error), Some(1 - rank), "{error:?}");
    }
}
