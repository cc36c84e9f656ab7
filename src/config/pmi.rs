//! A client of PMI-1, the protocol between an MPI launcher and its processes.
//!
//! Every process has a connection to the launcher. A request is a line of `name=value` words that begins with `cmd=`, and
//! each has one line of answer. What is put into the job's key-value space before a barrier can be got by everyone after it,
//! which is all that an all-gather of bytes needs:
//!
//! ```text
//! cmd=init pmi_version=1 pmi_subversion=1     cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0
//! cmd=get_maxes                               cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024
//! cmd=get_my_kvsname                          cmd=my_kvsname kvsname=kvs_1
//! cmd=put kvsname=kvs_1 key=k value=v         cmd=put_result rc=0 msg=success
//! cmd=barrier_in                              cmd=barrier_out
//! cmd=get kvsname=kvs_1 key=k                 cmd=get_result rc=0 msg=success value=v
//! cmd=finalize                                cmd=finalize_ack
//! ```
//!
//! A connection that was made by port, and not inherited, begins with `cmd=initack pmiid=0`, whose answer tells rank and size.
#![forbid(unsafe_code)]

use std::{
    io::{self, Read, Write},
    net::SocketAddr,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, Socket, Type};

use super::{environment::MOST_RANKS, parse::shorten};

/// The most bytes that a rank can contribute to an exchange.
const LONGEST_BLOB: usize = 64 << 10;

/// Longer than any line that is meant for us.
const LONGEST_LINE: usize = 16 << 10;

/// A connection to the launcher, before anything of the job's key-value space is used.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    /// What was read beyond the last line.
    buffered: Vec<u8>,
    deadline: Instant,
}

impl Connection {
    /// Speaks over a socket that the launcher left open for this process.
    pub(crate) fn inherited(socket: OwnedFd, deadline: Instant) -> Connection {
        Connection { socket: Socket::from(socket), buffered: Vec::new(), deadline }
    }

    /// Connects to the launcher's port and says who this is; the answer is rank and size.
    pub(crate) fn connect(
        addresses: &[SocketAddr],
        id: usize,
        deadline: Instant,
    ) -> io::Result<(Self, usize, usize)> {
        let socket = connect_to_one(addresses, deadline)?;
        let mut connection = Connection { socket, buffered: Vec::new(), deadline };
        connection.send(&format!("cmd=initack pmiid={id}"))?;
        connection.receive("initack")?;
        let (mut rank, mut size) = (None, None);
        // Three settings follow, in any order.
        for _ in 0..3 {
            let answer = connection.receive("set")?;
            rank = rank.or(answer.number("rank"));
            size = size.or(answer.number("size"));
        }
        match (rank, size) {
            (Some(rank), Some(size)) if rank < size && size <= MOST_RANKS => Ok((connection, rank, size)),
            _ => Err(broken(format!("its answer has rank {rank:?} and size {size:?}"))),
        }
    }

    /// Opens the job's key-value space. From here on the launcher expects an orderly end, see [`Space::finalize`].
    pub(crate) fn init(mut self) -> io::Result<Space> {
        self.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
        let maxes = self.ask("cmd=get_maxes", "maxes")?;
        let (Some(key_max), Some(value_max)) = (maxes.number("keylen_max"), maxes.number("vallen_max"))
        else {
            return Err(broken(format!("it does not tell its limits in {:?}", shorten(&maxes.line))));
        };
        let space = self.ask("cmd=get_my_kvsname", "my_kvsname")?;
        let Some(name) = space.word("kvsname") else {
            return Err(broken(format!("it does not name the job in {:?}", shorten(&space.line))));
        };
        // The limits count a closing zero byte. Lines of the reference implementation are at most 1024 bytes long.
        let (longest_key, longest_value) = (key_max.saturating_sub(1), value_max.saturating_sub(1).min(512));
        if longest_value < 16 {
            return Err(broken(format!("values of {value_max} bytes are too short to be of use")));
        }
        Ok(Space { name: name.to_owned(), longest_key, longest_value, connection: self })
    }

    fn ask(&mut self, request: &str, answer: &str) -> io::Result<Answer> {
        self.send(request)?;
        self.receive(answer)
    }

    fn send(&mut self, request: &str) -> io::Result<()> {
        self.socket.set_write_timeout(Some(self.left()?))?;
        self.socket.write_all(format!("{request}\n").as_bytes()).map_err(timed_out)
    }

    /// The next line, which has to be an answer of this kind and a good one.
    fn receive(&mut self, kind: &str) -> io::Result<Answer> {
        let answer = Answer { line: self.line()? };
        if answer.word("cmd") != Some(kind) {
            return Err(broken(format!("it answers {:?} where cmd={kind} is due", shorten(&answer.line))));
        }
        match answer.word("rc") {
            None | Some("0") => Ok(answer),
            Some(_) => Err(broken(format!("it refuses: {:?}", shorten(&answer.line)))),
        }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut scanned = 0;
        loop {
            if let Some(end) = self.buffered[scanned..].iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffered.drain(..=scanned + end).collect();
                return String::from_utf8(line).map_err(|_| broken("it sends what is not text".to_owned()));
            }
            scanned = self.buffered.len();
            if scanned > LONGEST_LINE {
                return Err(broken("it sends a line without end".to_owned()));
            }
            self.socket.set_read_timeout(Some(self.left()?))?;
            let mut bytes = [0; 1024];
            match (&self.socket).read(&mut bytes) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the launcher hung up")),
                Ok(count) => self.buffered.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(timed_out(error)),
            }
        }
    }

    /// The time to the deadline, never zero, which would mean for ever.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(timed_out(io::ErrorKind::TimedOut.into())) } else { Ok(left) }
    }
}

/// The job's key-value space.
#[derive(Debug)]
pub(crate) struct Space {
    connection: Connection,
    name: String,
    longest_key: usize,
    longest_value: usize,
}

impl Space {
    /// Gives rank 0's bytes to everyone.
    pub(crate) fn broadcast(
        &mut self,
        rank: usize,
        mine: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<Vec<u8>> {
        const KEY: &str = "raccl-all";
        let bytes = if rank == 0 { mine()? } else { Vec::new() };
        if rank == 0 {
            self.put(KEY, &bytes)?;
        }
        self.barrier()?;
        if rank == 0 { Ok(bytes) } else { self.get(KEY) }
    }

    /// Gives every rank's bytes to everyone, in the order of ranks.
    pub(crate) fn all_gather(&mut self, rank: usize, size: usize, mine: Vec<u8>) -> io::Result<Vec<Vec<u8>>> {
        let key = |rank: usize| format!("raccl-{rank}");
        self.put(&key(rank), &mine)?;
        self.barrier()?;
        (0..size).map(|peer| if peer == rank { Ok(mine.clone()) } else { self.get(&key(peer)) }).collect()
    }

    /// Tells the launcher that this process needs it no more; to end without is a failure of the job.
    pub(crate) fn finalize(mut self) -> io::Result<()> {
        self.connection.ask("cmd=finalize", "finalize_ack").map(|_| ())
    }

    fn barrier(&mut self) -> io::Result<()> {
        self.connection.ask("cmd=barrier_in", "barrier_out").map(|_| ())
    }

    /// Stores bytes as hexadecimal digits, their number first, in as many values as it takes.
    fn put(&mut self, key: &str, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > LONGEST_BLOB {
            let count = bytes.len();
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{count} bytes are to be exchanged, at most {LONGEST_BLOB} can be"),
            ));
        }
        let mut digits = format!("{:08x}", bytes.len());
        digits.extend(bytes.iter().map(|byte| format!("{byte:02x}")));
        for (index, value) in digits.as_bytes().chunks(self.longest_value).enumerate() {
            let key = self.key(key, index)?;
            let value = String::from_utf8_lossy(value);
            let request = format!("cmd=put kvsname={} key={key} value={value}", self.name);
            self.connection.ask(&request, "put_result")?;
        }
        Ok(())
    }

    fn get(&mut self, key: &str) -> io::Result<Vec<u8>> {
        let mut digits = self.get_value(key, 0)?;
        let malformed = || broken(format!("the value of {key} is malformed"));
        let count =
            digits.get(..8).and_then(|count| usize::from_str_radix(count, 16).ok()).ok_or_else(malformed)?;
        if count > LONGEST_BLOB {
            return Err(broken(format!(
                "the value of {key} claims {count} bytes, at most {LONGEST_BLOB} can be"
            )));
        }
        let length = 8 + 2 * count;
        let mut index = 1;
        while digits.len() < length {
            let more = self.get_value(key, index)?;
            if more.is_empty() {
                return Err(malformed());
            }
            digits.push_str(&more);
            index += 1;
        }
        if digits.len() != length {
            return Err(malformed());
        }
        let digits: Option<Vec<u8>> =
            digits[8..].chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.ok_or_else(malformed)?;
        Ok(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
    }

    fn get_value(&mut self, key: &str, index: usize) -> io::Result<String> {
        let key = self.key(key, index)?;
        let answer =
            self.connection.ask(&format!("cmd=get kvsname={} key={key}", self.name), "get_result")?;
        match answer.word("value") {
            Some(value) if value.is_ascii() => Ok(value.to_owned()),
            _ => Err(broken(format!("it has no good value for {key}"))),
        }
    }

    fn key(&self, key: &str, index: usize) -> io::Result<String> {
        let key = format!("{key}-{index}");
        if key.len() > self.longest_key {
            return Err(broken(format!("its keys are too short for {key}")));
        }
        Ok(key)
    }
}

/// A line of answer.
struct Answer {
    line: String,
}

impl Answer {
    fn word(&self, name: &str) -> Option<&str> {
        let words = self.line.split_ascii_whitespace().filter_map(|word| word.split_once('='));
        words.filter(|(found, _)| *found == name).map(|(_, value)| value).next()
    }

    fn number(&self, name: &str) -> Option<usize> {
        self.word(name)?.parse().ok()
    }
}

fn connect_to_one(addresses: &[SocketAddr], deadline: Instant) -> io::Result<Socket> {
    let mut failure = io::Error::new(io::ErrorKind::AddrNotAvailable, "the launcher's host has no address");
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(timed_out(io::ErrorKind::TimedOut.into()));
        }
        let socket = Socket::new(Domain::for_address(*address), Type::STREAM, Some(Protocol::TCP))?;
        match socket.connect_timeout(&(*address).into(), left) {
            Ok(()) => return Ok(socket),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn broken(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the launcher breaks its protocol: {reason}"))
}

/// Sockets report their time-outs as a call that would block.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => io::Error::new(
            io::ErrorKind::TimedOut,
            "the launcher did not answer before the connect timeout; do all ranks join the group?",
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        io::{BufRead, BufReader},
        os::unix::net::UnixStream,
        sync::{Arc, Barrier, Mutex},
        thread,
    };

    use proptest::prelude::*;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    /// What the launcher has in common for all its processes.
    struct Job {
        space: Mutex<HashMap<String, String>>,
        barrier: Barrier,
        value_max: usize,
    }

    /// The launcher's side of one connection, to the end.
    fn serve(stream: UnixStream, job: &Job) {
        let mut to_client = stream.try_clone().expect("clone");
        for line in BufReader::new(stream).lines() {
            let request = Answer { line: line.expect("line") };
            let answer = match request.word("cmd").expect("cmd") {
                "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
                "get_maxes" => {
                    format!("cmd=maxes kvsname_max=256 keylen_max=64 vallen_max={}", job.value_max)
                }
                "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs".to_owned(),
                "put" => {
                    let (key, value) =
                        (request.word("key").expect("key"), request.word("value").expect("value"));
                    assert!(value.len() < job.value_max);
                    let before = job.space.lock().expect("lock").insert(key.to_owned(), value.to_owned());
                    assert_eq!(before, None, "{key} was put twice");
                    "cmd=put_result rc=0 msg=success".to_owned()
                }
                "get" => {
                    let key = request.word("key").expect("key");
                    match job.space.lock().expect("lock").get(key) {
                        Some(value) => format!("cmd=get_result rc=0 msg=success value={value}"),
                        None => format!("cmd=get_result rc=-1 msg=key_{key}_not_found value=unknown"),
                    }
                }
                "barrier_in" => {
                    job.barrier.wait();
                    "cmd=barrier_out".to_owned()
                }
                "finalize" => "cmd=finalize_ack".to_owned(),
                other => panic!("{other}"),
            };
            writeln!(to_client, "{answer}").expect("answer");
        }
    }

    fn exchange(blobs: &[Vec<u8>], value_max: usize) -> Vec<(Vec<u8>, Vec<Vec<u8>>)> {
        let size = blobs.len();
        let job = Arc::new(Job { space: Mutex::default(), barrier: Barrier::new(size), value_max });
        let ranks: Vec<_> = blobs
            .iter()
            .cloned()
            .enumerate()
            .map(|(rank, blob)| {
                let (ours, theirs) = UnixStream::pair().expect("pair");
                let job = Arc::clone(&job);
                let server = thread::spawn(move || serve(theirs, &job));
                let client = thread::spawn(move || {
                    let mut space = Connection::inherited(ours.into(), soon()).init().expect("init");
                    let all = space.broadcast(rank, || Ok(b"from rank 0".to_vec())).expect("broadcast");
                    let gathered = space.all_gather(rank, size, blob).expect("all_gather");
                    space.finalize().expect("finalize");
                    (all, gathered)
                });
                (server, client)
            })
            .collect();
        let join = |(server, client): (thread::JoinHandle<()>, thread::JoinHandle<_>)| {
            let result = client.join().expect("client");
            server.join().expect("server");
            result
        };
        ranks.into_iter().map(join).collect()
    }

    #[test]
    fn everybody_gets_what_everybody_put_however_short_values_are() {
        for value_max in [1024, 64, 17] {
            let blobs = vec![vec![], vec![7; 3], (0..=255).cycle().take(2000).collect()];
            for (all, gathered) in exchange(&blobs, value_max) {
                assert_eq!(all, b"from rank 0");
                assert_eq!(gathered, blobs);
            }
        }
    }

    /// A connection to a launcher that has said its piece already and hangs up.
    fn answered(said: &[u8]) -> Connection {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let said = said.to_vec();
        thread::spawn(move || {
            let mut theirs = theirs;
            // The client may hang up first.
            let _ = theirs.write_all(&said);
            let _ = theirs.shutdown(std::net::Shutdown::Write);
            let _ = io::copy(&mut theirs, &mut io::sink());
        });
        Connection::inherited(ours.into(), soon())
    }

    const BEGIN: &str =
        "cmd=response_to_init rc=0\ncmd=maxes keylen_max=64 vallen_max=1024\ncmd=my_kvsname kvsname=k\n";

    #[test]
    fn wrong_answers_are_errors_that_show_them() {
        for (said, reason) in [
            ("", "hung up"),
            ("cmd=response_to_init rc=-1\n", "refuses"),
            ("cmd=else\n", "cmd=response_to_init is due"),
            ("cmd=response_to_init rc=0\ncmd=maxes\n", "limits"),
            (
                "cmd=response_to_init rc=0\ncmd=maxes keylen_max=64 vallen_max=9\ncmd=my_kvsname kvsname=k\n",
                "too short",
            ),
            (
                "cmd=response_to_init rc=0\ncmd=maxes keylen_max=64 vallen_max=1024\ncmd=my_kvsname\n",
                "name the job",
            ),
        ] {
            let error = answered(said.as_bytes()).init().expect_err(said).to_string();
            assert!(error.contains(reason), "{said}: {error}");
        }
        for (value, reason) in [
            ("zz", "malformed"),
            ("00000001", "hung up"),
            ("00000001abcd", "malformed"),
            ("00000001xy", "malformed"),
            ("ffffffff00", "claims 4294967295 bytes"),
            ("é000000", "no good value"),
        ] {
            let said = format!("{BEGIN}cmd=barrier_out\ncmd=get_result rc=0 value={value}\n");
            let mut space = answered(said.as_bytes()).init().expect("init");
            let error = space.broadcast(1, || Ok(Vec::new())).expect_err(value).to_string();
            assert!(error.contains(reason), "{value}: {error}");
        }
    }

    #[test]
    fn endless_lines_end() {
        let error = answered(&vec![b'x'; 1 << 20]).init().expect_err("endless").to_string();
        assert!(error.contains("without end"), "{error}");
    }

    #[test]
    fn a_silent_launcher_is_given_up_at_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().expect("pair");
        let deadline = Instant::now() + Duration::from_millis(30);
        let error = Connection::inherited(ours.into(), deadline).init().expect_err("silent");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("connect timeout"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_answer_panics(garbage in any::<Vec<u8>>(), near in "(cmd=[a-z_]{1,16}( [a-z_]{1,10}=[0-9a-f]{0,9}){0,4}\\n){0,6}") {
            let _ = answered(&garbage).init();
            let _ = answered(near.as_bytes()).init();
            let begun = [BEGIN.as_bytes(), b"cmd=barrier_out\ncmd=get_result rc=0 value=", &garbage, b"\n", near.as_bytes()];
            if let Ok(mut space) = answered(&begun.concat()).init() {
                let _ = space.broadcast(1, || Ok(Vec::new()));
            }
        }
    }
}
