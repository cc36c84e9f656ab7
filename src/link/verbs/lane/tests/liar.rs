//! Emulated cables, and who is at their ends: lanes, or somebody who sends whatever comes to mind.

use std::{
    env,
    process::{Command, Output, Stdio},
    sync::{Arc, atomic::AtomicU32},
    time::{Duration, Instant},
};

use parking_lot::RwLock;
use raccl_emulator::{Emulation, Layout, Mistakes, find_library};
use raccl_sys::{Completion, Gid, Library, Peer, Route};

use super::super::*;
use crate::link::verbs::{
    Entry, Options,
    device::{Device, Examined, NewClass},
    registry::Registry,
    wire::{Lent, PORT, Pair},
};

/// In the environment of the process that is both machines.
pub(super) const INSIDE: &str = "RACCL_TEST_INSIDE";
pub(super) const PAGE: usize = 16 << 10;
pub(super) const SLOT: usize = 64 << 10;
pub(super) const DEPTH: u32 = 8;
/// Only a hang takes so long.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Runs `body` in a process that is two machines joined by a cable. `name` is the test's.
pub(super) fn joined(name: &str, body: impl FnOnce()) {
    let mistakes = joined_for(name, body);
    assert_eq!(mistakes, Default::default());
}

/// The same, and what the devices found wrong.
pub(super) fn joined_for(name: &str, body: impl FnOnce()) -> Mistakes {
    if env::var_os(INSIDE).is_some() {
        body();
        return Mistakes::default();
    }
    let (emulation, output) = run(name);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    let books = emulation.books();
    assert!(books.live.is_zero() && books.made.queue_pairs > 0, "{books:?} is left\n{text}\n{errors}");
    books.mistakes
}

/// Runs a test of this module in a process that is two machines joined by a cable.
pub(super) fn run(name: &str) -> (Emulation, Output) {
    let mut spec = Layout::mesh().spec(2);
    // The stories follow one another, each with a cable's worth of everything.
    spec.limits.queue_pairs = 100;
    let emulation = Emulation::create(&spec).unwrap();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("link::verbs::lane::tests::{name}"), "--nocapture"])
        .env(INSIDE, "1")
        .envs(emulation.environment_of_all())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (emulation, output)
}

/// Both ends of a new cable, with the bulk class only if wanted.
pub(super) fn cable(bulk: bool) -> [End; 2] {
    deep_cable(bulk, DEPTH)
}

/// The same with so many bulk receives.
pub(super) fn deep_cable(bulk: bool, bulk_depth: u32) -> [End; 2] {
    let path = find_library(&env::current_exe().unwrap()).unwrap();
    let list = Library::load(Some(&path)).unwrap().devices().unwrap();
    let options = Options { bulk_bytes: SLOT, bulk_depth, ..Options::default() };
    let mut ends = ["m0.rdma_en2", "m1.rdma_en2"].map(|name| {
        let examined = Examined::new(&list, name, 1, Instant::now() + LONG).unwrap();
        let mut device = Device::new(examined, &options).unwrap();
        let mut new = device.lane().unwrap();
        new.classes.truncate(if bulk { 2 } else { 1 });
        (device, Some(new))
    });
    let peers = [0, 1].map(|end: usize| {
        let (device, new) = &ends[end];
        let numbers = new.as_ref().unwrap().classes.iter().map(|class| class.pair.number());
        let (lid, gid) = (device.lid, Gid(device.gid.gid.0));
        numbers.map(|queue_pair| Peer { lid, queue_pair, psn: 7, gid }).collect::<Vec<_>>()
    });
    [0, 1].map(|end: usize| {
        let (device, new) = &mut ends[end];
        let new = new.take().unwrap();
        let registry = Arc::new(Registry::new(vec![device.domain().clone()], None));
        let route = Route { port: PORT, gid_index: device.gid.index, mtu: device.mtu };
        let classes =
            new.classes.into_iter().zip(&peers[1 - end]).enumerate().map(|(index, (class, peer))| {
                let NewClass { pair, slot_bytes, send_at, recv_at, send_slots, recv_slots, window } = class;
                let pair = pair.ready_to_receive(&route, peer).unwrap().ready_to_send(7).unwrap();
                Class {
                    pair: match index {
                        BULK => Pair::Revocable(RwLock::new(Some(pair))),
                        _ => Pair::Lasting(pair),
                    },
                    slot_bytes,
                    send_at,
                    recv_at,
                    send_slots,
                    recv_slots,
                    window,
                    peer_slots: recv_slots,
                    granted: AtomicU32::new(recv_slots),
                    posted: AtomicU32::new(0),
                    told: AtomicU32::new(0),
                    done: AtomicU32::new(0),
                }
            });
        let wire = Wire {
            cable: format!("0 of end {end}"),
            queue: new.queue,
            region: new.region,
            classes: classes.collect(),
            out_number: end as u32,
            in_number: 1 - end as u32,
            sums: false,
            lent: Some(Lent { registry: Arc::clone(&registry), device: 0 }),
        };
        End { wire, registry }
    })
}

pub(super) struct End {
    pub(super) wire: Wire,
    pub(super) registry: Arc<Registry>,
}

impl End {
    /// With so many bytes that its device knows.
    pub(super) fn lane(self, bytes: usize) -> (Lane, Memory) {
        let memory = Memory::new(&self.registry, bytes);
        (Lane::new(self.wire, Hold::new(false).unwrap()).unwrap(), memory)
    }

    pub(super) fn liar(self) -> Liar {
        let wire = self.wire;
        for (index, class) in wire.classes.iter().enumerate() {
            (0..class.recv_slots).for_each(|slot| wire.post_receive(index, slot).unwrap());
        }
        Liar { wire, sent: [0; 2], sequence: 0, is_hasty: false }
    }
}

/// Whole pages that a device knows.
pub(super) struct Memory {
    pub(super) entry: Option<Entry>,
    pub(super) bytes: Vec<u8>,
    pub(super) from: usize,
    pub(super) length: usize,
}

impl Memory {
    pub(super) fn new(registry: &Arc<Registry>, length: usize) -> Memory {
        let room = length.next_multiple_of(PAGE);
        let mut bytes = vec![0; room + PAGE];
        let from = bytes.as_ptr().align_offset(PAGE);
        // SAFETY: the entry is dropped before the memory, which nothing moves, after the lane let go of it.
        let entry = unsafe { registry.enter(bytes[from..].as_mut_ptr(), room) }.unwrap();
        Memory { entry: Some(entry), bytes, from, length }
    }

    pub(super) fn slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.length]
    }

    pub(super) fn piece(&mut self, from: usize) -> IoVec {
        let rest = &mut self.slice()[from..];
        IoVec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // What the device would still read has changed, and what it would still write is not its any more.
        self.slice().fill(0xEE);
        self.entry = None;
    }
}

/// Somebody who has a cable and sends what comes to mind.
pub(super) struct Liar {
    pub(super) wire: Wire,
    pub(super) sent: [u32; 2],
    pub(super) sequence: u32,
    /// Says nothing where there is no room.
    pub(super) is_hasty: bool,
}

impl Liar {
    /// Whether there is room.
    pub(super) fn settle(&self, class: usize) -> bool {
        let until = Instant::now() + LONG;
        let mut looks = 0;
        while !self.wire.has_room(class, self.sent[class], 0) {
            looks += 1;
            if self.is_hasty && looks == 200 {
                return false;
            }
            assert!(Instant::now() < until, "there is never room");
            let mut done = [Completion::default(); BATCH];
            let count = self.wire.poll(&mut done).unwrap();
            for completion in &done[..count] {
                if let Some(Came::Packet { class, slot, packet }) = self.wire.completed(completion).unwrap() {
                    self.wire.granted(&packet);
                    self.wire.post_receive(class, slot).unwrap();
                }
            }
        }
        true
    }

    /// A packet of any kind with these bytes behind its header.
    pub(super) fn send(&mut self, class: usize, packet: Packet, payload: &[u8]) {
        if !self.settle(class) {
            return;
        }
        let to = self.wire.send_slot(class, self.sent[class]).wrapping_add(PACKET_BYTES);
        // SAFETY: the slot is longer than that, and its last send has completed.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), to, payload.len()) };
        let mut packet = Packet { turn: self.sent[class], bytes: payload.len() as u32, ..packet };
        self.wire.send(class, &mut packet).unwrap();
        self.sent[class] += 1;
    }

    /// The next packet of the stream.
    pub(super) fn stream(&mut self, class: usize, kind: Kind, payload: &[u8]) {
        let payload_sum = (kind == Kind::Bare).then(|| crate::link::verbs::crc32c::crc32c(0, payload));
        self.send(class, Packet { kind, sequence: self.sequence, payload_sum, ..Packet::EMPTY }, payload);
        self.sequence = self.sequence.wrapping_add(1);
    }

    pub(super) fn announce(&mut self, turn: u32, count: u32) {
        self.stream(SMALL, Kind::Bare, &Bare { turn, count }.encode());
    }

    /// The next bare packet, of another length if wanted.
    pub(super) fn bare(&mut self, longer: isize, fill: u8) -> usize {
        if !self.settle(BULK) {
            return 0;
        }
        let turn = self.sent[BULK];
        let bytes = Bare::length(SLOT, turn).checked_add_signed(longer).unwrap();
        let to = self.wire.send_slot(BULK, turn);
        // SAFETY: the slot is longer than that, and its last send has completed.
        unsafe { std::ptr::write_bytes(to, fill, bytes) };
        let span = self.wire.bare_slot(turn, bytes).unwrap();
        // SAFETY: the slot is not written again before the completion.
        unsafe { self.wire.send_bare(turn, span) }.unwrap();
        self.sent[BULK] = turn.wrapping_add(1);
        self.sequence = self.sequence.wrapping_add(1);
        bytes
    }
}

/// Reads until so much is there, nothing has come for a while, or the end; how it ended, and how much it was.
pub(super) fn read(
    lane: &Lane,
    memory: &mut Memory,
    from: usize,
    most: usize,
) -> (Result<stripe::Read, LinkError>, usize) {
    let mut at = from;
    let mut idle = 0;
    loop {
        if at >= most {
            return (Ok(stripe::Read::Bytes(at)), at);
        }
        // SAFETY: the memory is the test's, which leaves it alone until it has revoked it.
        match unsafe { lane.read(&[memory.piece(at)], true) } {
            Ok(stripe::Read::Bytes(count)) => (at, idle) = (at + count, 0),
            Ok(stripe::Read::Empty) if idle < 300 => idle += 1,
            other => return (other, at),
        }
    }
}

/// Lets a lane read while a peer sends, then tells it no more; its error or what else was last, and how many bytes came.
/// `look` says whether the lane still reads.
pub(super) fn told(
    bytes: usize,
    tell: impl FnOnce(&mut Liar, &mut dyn FnMut() -> bool),
) -> (Result<stripe::Read, LinkError>, usize) {
    let [one, other] = cable(true);
    let (lane, mut memory) = one.lane(bytes);
    let mut liar = other.liar();
    let mut last = (Ok(stripe::Read::Empty), 0);
    let mut look = || {
        if last.0.is_ok() {
            last = read(&lane, &mut memory, last.1, bytes);
        }
        last.0.is_ok() && last.1 < bytes
    };
    tell(&mut liar, &mut look);
    look();
    if last.1 < bytes {
        lane.revoke_receives();
    }
    assert!(!lane.has_receives_out(), "the device was left with {last:?}");
    drop(memory);
    last
}

pub(super) fn why(end: &(Result<stripe::Read, LinkError>, usize)) -> String {
    match &end.0 {
        Err(LinkError::Broken { source, .. }) => source.to_string(),
        other => panic!("no error: {other:?} after {} bytes", end.1),
    }
}
