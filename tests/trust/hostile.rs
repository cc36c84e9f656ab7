//! Strangers hammer the coordinator while groups form.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use raccl::Sum;

use crate::{
    support::{CHILD, HANG, free_address, launch, setting},
    wire::{Scratch, relay},
};

const NAME: &str = "hostile::every_group_forms_while_strangers_hammer_the_coordinator";

/// What a stranger can hear at most: a preamble, a verdict and half a handshake.
const MOST_HEARD: usize = 12 + 1 + 48;

const PREAMBLE: &[u8; 12] = b"\xF1raccl\r\n\x01\0\x01\0";

/// Bytes of a call: preamble, place, half a handshake.
const CALL: usize = 12 + 13 + 48;

/// `RACCL_TEST_FORMATIONS` groups form.
#[test]
fn every_group_forms_while_strangers_hammer_the_coordinator() {
    if env::var(CHILD).is_ok() {
        launch(NAME, 3, &[], |config| {
            // One rank may be told to go another way.
            let relay = env::var("TRUST_TEST_RELAY").ok();
            let relay = relay.filter(|_| env::var("RACCL_RANK").as_deref() == Ok("1"));
            let config = relay.into_iter().fold(config, |config, relay| config.coordinator(relay));
            let comm = config.connect().unwrap();
            let mut values = vec![1_u32; 5000];
            comm.all_reduce(&mut values, Sum).unwrap();
            assert!(values.iter().all(|&value| value == 3));
            comm.close().unwrap();
        });
        return;
    }
    let secret = Scratch::new("hostile-secret");
    secret.write(&[0x77; 32]);
    let address = free_address();
    let form = |variables: &[(&str, &str)]| {
        let common = [
            ("RACCL_COORDINATOR", address.as_str()),
            ("RACCL_SECRET_FILE", secret.text()),
            ("RACCL_INSECURE", "0"),
            ("RACCL_CONNECT_TIMEOUT", "120s"),
        ];
        launch(NAME, 3, &[&common[..], variables].concat(), |_| unreachable!("the parent has no body"));
    };

    // One of the ranks of an earlier group was listened to, for those who replay.
    let said: Arc<Mutex<BTreeMap<usize, Vec<u8>>>> = Arc::default();
    let relayed = relay(address.clone(), {
        let said = Arc::clone(&said);
        move |number, _, bytes| said.lock().unwrap().entry(number).or_default().extend_from_slice(bytes)
    });
    form(&[("TRUST_TEST_RELAY", &relayed)]);
    // Not the first, if rank 0 did not listen yet, and no data connection, whose place is not the lobby.
    let hello = |bytes: &&Vec<u8>| bytes.len() > CALL + 50 && bytes[12] == 0;
    let hello = said.lock().unwrap().values().find(hello).expect("a call and a hello were recorded").clone();
    let recording = Scratch::new("hostile-recording");
    recording.write(&hello);

    let strangers: Vec<Stranger> = (0..8).map(|kind| Stranger::start(kind, &address, &recording)).collect();
    let formations = setting("RACCL_TEST_FORMATIONS", 4);
    let start = Instant::now();
    for _ in 0..formations {
        form(&[]);
    }
    println!("{formations} groups formed in {:?}", start.elapsed());
    for (kind, stranger) in strangers.into_iter().enumerate() {
        let told = stranger.stop();
        println!("stranger {kind}: {told}");
        let number = |name: &str| -> usize {
            let words: Vec<&str> = told.split_whitespace().collect();
            let at = words.iter().position(|&word| word == name).unwrap_or_else(|| panic!("{told}"));
            words[at + 1].parse().unwrap()
        };
        assert!(number("connections") > 0, "stranger {kind} never got a connection: {told}");
        assert!(number("heard") <= MOST_HEARD, "stranger {kind} got past the handshake: {told}");
    }
}

/// A process that does one hostile thing over and over.
struct Stranger(Child);

impl Stranger {
    fn start(kind: usize, address: &str, recording: &Scratch) -> Stranger {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "hostile::a_stranger", "--ignored", "--nocapture"])
            .env("TRUST_TEST_STRANGER", format!("{kind} {address}"))
            .env("TRUST_TEST_RECORDING", recording.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Stranger(child)
    }

    /// Ends it; what it says of itself.
    fn stop(mut self) -> String {
        drop(self.0.stdin.take());
        let mut told = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut told).unwrap();
        assert!(self.0.wait().unwrap().success(), "{told}");
        told.lines().find_map(|line| line.split_once("> ")).expect("its last words").1.to_owned()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // It has usually ended long ago.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A connection that is kept, with what it still says and how much it has heard.
struct Held {
    stream: TcpStream,
    drip: Vec<u8>,
    heard: usize,
}

#[test]
#[ignore = "one process of the test before, which starts it"]
fn a_stranger() {
    let Ok(order) = env::var("TRUST_TEST_STRANGER") else { return };
    let (kind, address) = order.split_once(' ').unwrap();
    let kind: usize = kind.parse().unwrap();
    let address: SocketAddr = address.parse().unwrap();
    let recording = fs::read(env::var("TRUST_TEST_RECORDING").unwrap()).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let _ = io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::SeqCst);
        }
    });
    let (mut connections, mut heard) = (0_u64, 0);
    let mut held: Vec<Held> = Vec::new();
    let until = Instant::now() + HANG;
    while !stop.load(Ordering::SeqCst) && Instant::now() < until {
        if let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
            connections += 1;
            let (says, drip) = script(kind, connections, &recording);
            stream.set_nonblocking(true).unwrap();
            // Whatever does not go through is not missed.
            let _ = (&stream).write(&says);
            held.push(Held { stream, drip, heard: 0 });
        } else {
            thread::sleep(Duration::from_millis(2));
        }
        held.retain_mut(|held| listen(held, &mut heard));
        // Scanners leave at once, the others occupy as many places as they can.
        if held.len() > if kind == 0 { 0 } else { 100 } {
            held.remove(0);
        }
        thread::sleep(Duration::from_micros(500));
    }
    println!("\n> connections {connections} heard {heard}");
}

/// What this kind says at once, and what it says byte by byte after that.
fn script(kind: usize, round: u64, recording: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let garbage = |count: u64| -> Vec<u8> {
        (0..count).map(|i| (round.wrapping_mul(0x9E37_79B9).wrapping_add(i * i * 97) >> 5) as u8).collect()
    };
    match kind {
        // Looks which ports are open.
        0 => (vec![], vec![]),
        // Takes it for something else.
        1 => (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), vec![]),
        // Drips.
        2 => (vec![], [&PREAMBLE[..], &garbage(200)].concat()),
        // Begins well and goes on with garbage.
        3 => ([&PREAMBLE[..], &garbage(61 + round % 300)].concat(), vec![]),
        // Wants to talk without a secret, and claims frames of 4 GiB.
        4 => ([&PREAMBLE[..10], &[0, 0], &[0xff; 4], &garbage(100)].concat(), vec![]),
        // Says what a rank once said, all of it.
        5 => (recording.to_vec(), vec![]),
        // Says half of that and waits.
        6 => (recording[..CALL].to_vec(), vec![]),
        // Proves itself with another's words, and goes on with records of all lengths.
        _ => ([&recording[..CALL], &(round as u16).to_le_bytes(), &garbage(round % 3000)].concat(), vec![]),
    }
}

/// Reads what is there and says the next byte; false when the connection is over.
fn listen(held: &mut Held, most: &mut usize) -> bool {
    let mut buffer = [0; 4096];
    let open = loop {
        match held.stream.read(&mut buffer) {
            Ok(0) => break false,
            Ok(count) => held.heard += count,
            Err(error) => break error.kind() == io::ErrorKind::WouldBlock,
        }
    };
    *most = held.heard.max(*most);
    if open && !held.drip.is_empty() && held.stream.write(&held.drip[..1]).is_ok() {
        held.drip.remove(0);
    }
    open
}
