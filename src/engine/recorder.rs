//! The flight recorder: the last calls of this rank, kept so that the report of a hang or a failure shows who waits for whom.
//!
//! A fixed ring behind the engine's lock. A call costs one write of a slot when it begins and one when it ends, nothing is
//! allocated and no clock is read; all words are made when somebody asks. Messages that went out at once, past the engine's
//! lock, are not in it: nobody can wait for them. Where a [trace](super::trace) is written, they go through the engine and
//! are in both.
#![forbid(unsafe_code)]

use std::{fmt, time::Instant};

use super::{
    call,
    core::{Core, Entry, Operation, OperationId},
    message::{RecvState, SendState},
    trace::Trace,
};
use crate::{
    link::{LinkKind, Sender, Signature},
    plan::Algorithm,
};

/// Calls that are remembered.
const KEPT: usize = 32;

/// Finished calls that an error shows, and calls in flight.
const SHOWN: (usize, usize) = (3, 4);

/// The ring.
pub(super) struct Recorder {
    ring: [Option<Record>; KEPT],
    /// Calls ever recorded; the next goes to this place of the ring.
    count: usize,
    pub(super) trace: Option<Trace>,
}

/// A call as it is remembered.
#[derive(Clone, Copy)]
struct Record {
    id: OperationId,
    comm: u32,
    what: What,
    state: FlightState,
    /// Only read where a trace is written.
    begun: Option<Instant>,
}

#[derive(Clone, Copy)]
enum What {
    Collective { sequence: u64, signature: Signature, algorithm: Algorithm },
    Send { peer: usize, tag: u64, bytes: u64 },
    Recv { peer: usize, tag: u64, bytes: u64 },
}

/// The last calls of one rank, the oldest first. See [`Communicator::flight_record`](crate::Communicator::flight_record).
///
/// Its `Display` has a line for each call.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlightRecord {
    /// The rank in the whole group.
    pub rank: usize,
    /// The calls.
    pub calls: Vec<FlightCall>,
}

/// A call in a [`FlightRecord`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlightCall {
    /// The number of the communicator: 0 for that of the whole group, the same on all its ranks for every other.
    pub communicator: u32,
    /// The place in the communicator's sequence of collectives; none for messages.
    pub sequence: Option<u64>,
    /// What was called, in words.
    pub call: String,
    /// How it is carried out, for collectives.
    pub algorithm: Option<Algorithm>,
    /// How it went.
    pub state: FlightState,
    /// While the call is in flight: how far it is with each peer that its plan has to do with.
    pub peers: Vec<FlightPeer>,
}

/// What has become of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FlightState {
    /// It has not returned.
    InFlight,
    /// It has returned without an error.
    Done,
    /// It has returned an error.
    Failed,
}

/// How far a call is with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlightPeer {
    /// The peer's rank in the whole group.
    pub rank: usize,
    /// What joins this rank with it; none for itself.
    pub link: Option<LinkKind>,
    /// Whether it is known to have entered the call.
    pub entered: bool,
    /// Bytes received from it, and how many are expected.
    pub received: (u64, u64),
    /// Bytes that the link has taken for it, and how many there are.
    pub sent: (u64, u64),
}

impl Recorder {
    pub(super) fn new() -> Recorder {
        Recorder { ring: [None; KEPT], count: 0, trace: None }
    }

    /// What is kept, the oldest first.
    fn records(&self) -> impl Iterator<Item = &Record> {
        (0..KEPT).filter_map(move |step| self.ring[(self.count + step) % KEPT].as_ref())
    }

    fn begin(&mut self, id: OperationId, operation: &Operation) {
        let (comm, what) = match operation {
            Operation::Collective(run) => {
                let algorithm = run.prepared.plan.algorithm;
                let what = What::Collective { sequence: run.sequence, signature: run.signature, algorithm };
                (run.shared.id, what)
            }
            Operation::Send(send) => {
                (send.comm, What::Send { peer: send.peer, tag: send.tag, bytes: send.length as u64 })
            }
            Operation::Recv(recv) => {
                (recv.comm, What::Recv { peer: recv.peer, tag: recv.tag, bytes: recv.room as u64 })
            }
        };
        let begun = self.trace.is_some().then(Instant::now);
        self.ring[self.count % KEPT] = Some(Record { id, comm, what, state: FlightState::InFlight, begun });
        self.count = self.count.wrapping_add(1);
    }

    /// A call has ended.
    fn end(&mut self, id: OperationId, operation: &Operation, failed: bool) {
        // Most often it is the last that began.
        let is_it = |record: &Record| record.id == id && record.state == FlightState::InFlight;
        let at = (1..=KEPT)
            .map(|back| self.count.wrapping_sub(back) % KEPT)
            .find(|&at| self.ring[at].as_ref().is_some_and(is_it));
        let Some(record) = at.and_then(|at| self.ring[at].as_mut()) else { return };
        record.state = if failed { FlightState::Failed } else { FlightState::Done };
        if let (Some(trace), Some(begun)) = (&mut self.trace, record.begun) {
            let bytes = match operation {
                Operation::Collective(run) => {
                    run.traffic().fold(0, |sum, peer| sum + peer.received.0 + peer.sent.0)
                }
                Operation::Send(send) => send.length as u64,
                Operation::Recv(recv) => match recv.state {
                    RecvState::Done(bytes) => bytes,
                    _ => 0,
                },
            };
            let words = record.words();
            trace.add(begun, &words, record.comm, bytes, failed);
            // Who gets an error may well end the process.
            if failed {
                trace.flush();
            }
        }
    }
}

impl Core {
    /// Puts an operation into the table and on record.
    pub(super) fn enter(&mut self, entry: Entry) -> OperationId {
        let id = self.table.insert(entry);
        if let Some(operation) = self.table.get(id) {
            self.recorder.begin(id, operation);
        }
        id
    }

    /// Takes an operation out of the table, and records how it ended.
    pub(super) fn exit(&mut self, id: OperationId) -> Option<Operation> {
        let failed = !self.table.finished(id);
        let operation = self.table.remove(id)?;
        self.recorder.end(id, &operation, failed);
        Some(operation)
    }

    /// What is on record, in words.
    pub(super) fn flight_record(&self, rank: usize, senders: &[Option<Sender>]) -> FlightRecord {
        let link = |peer: usize| senders.get(peer).and_then(Option::as_ref).map(Sender::kind);
        let calls = self.recorder.records().map(|record| {
            let words = record.words();
            FlightCall {
                communicator: record.comm,
                sequence: words.sequence,
                call: words.call,
                algorithm: words.algorithm,
                state: record.state,
                peers: match (record.state, self.table.get(record.id)) {
                    (FlightState::InFlight, Some(operation)) => progress(operation, link),
                    _ => Vec::new(),
                },
            }
        });
        FlightRecord { rank, calls: calls.collect() }
    }
}

/// How far an operation in flight is with each peer.
fn progress(operation: &Operation, link: impl Fn(usize) -> Option<LinkKind>) -> Vec<FlightPeer> {
    match operation {
        Operation::Collective(run) => {
            run.traffic().map(|peer| FlightPeer { link: link(peer.rank), ..peer }).collect()
        }
        Operation::Send(send) => {
            let total = send.length as u64;
            let (entered, taken) = match send.state {
                SendState::Queued | SendState::Announced => (false, 0),
                SendState::Streaming { offset, .. } => (true, offset as u64),
                // Handed to the link, which may hold it until the peer takes it.
                SendState::Flushing(_) => (false, 0),
                SendState::Done => (true, total),
            };
            vec![FlightPeer {
                rank: send.peer,
                link: link(send.peer),
                entered,
                received: (0, 0),
                sent: (taken, total),
            }]
        }
        Operation::Recv(recv) => {
            let (entered, received, total) = match recv.state {
                RecvState::Posted => (false, 0, recv.room as u64),
                RecvState::Landing => (true, 0, recv.room as u64),
                RecvState::Receiving { total, received } => (true, received, total),
                RecvState::Done(bytes) => (true, bytes, bytes),
            };
            vec![FlightPeer {
                rank: recv.peer,
                link: link(recv.peer),
                entered,
                received: (received, total),
                sent: (0, 0),
            }]
        }
    }
}

/// A record's call in words.
pub(super) struct Words {
    pub(super) sequence: Option<u64>,
    pub(super) call: String,
    pub(super) algorithm: Option<Algorithm>,
    /// The call's name alone.
    pub(super) name: &'static str,
}

impl Record {
    fn words(&self) -> Words {
        let message = |name, call: String| Words { sequence: None, call, algorithm: None, name };
        match self.what {
            What::Collective { sequence, signature, algorithm } => Words {
                sequence: Some(sequence),
                call: call::describe(&signature),
                algorithm: Some(algorithm),
                name: call::name(&signature),
            },
            What::Send { peer, tag, bytes } => {
                message("send", format!("send({bytes} bytes to rank {peer}, tag {tag})"))
            }
            What::Recv { peer, tag, bytes } => {
                message("recv", format!("recv(at most {bytes} bytes from rank {peer}, tag {tag})"))
            }
        }
    }
}

impl FlightRecord {
    /// The calls that matter most, in one line: those in flight and the last before them.
    pub(super) fn summary(&self) -> String {
        let (done, flying) = SHOWN;
        let in_flight: Vec<&FlightCall> =
            self.calls.iter().filter(|call| call.state == FlightState::InFlight).take(flying).collect();
        let before: Vec<&FlightCall> =
            self.calls.iter().filter(|call| call.state != FlightState::InFlight).collect();
        let calls: Vec<String> = before[before.len().saturating_sub(done)..]
            .iter()
            .chain(&in_flight)
            .map(|call| call.to_string())
            .collect();
        if calls.is_empty() {
            return format!("rank {} had made no call", self.rank);
        }
        format!("last calls of rank {}: {}", self.rank, calls.join("; "))
    }
}

impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the last {} calls of rank {}:", self.calls.len(), self.rank)?;
        self.calls.iter().try_for_each(|call| write!(f, "\n  {call}"))
    }
}

impl fmt::Display for FlightCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.communicator != 0 {
            write!(f, "communicator {}: ", self.communicator)?;
        }
        if let Some(sequence) = self.sequence {
            write!(f, "#{sequence} ")?;
        }
        f.write_str(&self.call)?;
        // A signature that has it says it already.
        if let Some(algorithm) = self.algorithm
            && !self.call.contains(algorithm.name())
        {
            write!(f, " by {algorithm}")?;
        }
        f.write_str(match self.state {
            FlightState::InFlight => " IN FLIGHT",
            FlightState::Done => " done",
            FlightState::Failed => " failed",
        })?;
        self.peers.iter().try_for_each(|peer| write!(f, ", {peer}"))
    }
}

impl fmt::Display for FlightPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if let Some(link) = self.link {
            write!(f, " over {link}")?;
        }
        let entered = if self.entered { "entered" } else { "not known to have entered" };
        write!(f, " ({entered}")?;
        if self.received.1 > 0 {
            write!(f, ", {} of {} bytes received", self.received.0, self.received.1)?;
        }
        if self.sent.1 > 0 {
            write!(f, ", {} of {} bytes sent", self.sent.0, self.sent.1)?;
        }
        f.write_str(")")
    }
}
