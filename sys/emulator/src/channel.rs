//! What two queue pairs share: a file for each, written by its owner and read by the peer.
//!
//! ```text
//! Header    who owns it, how large its parts are, whom it is connected to
//! Credits   how many receives the owner has posted
//! Consumed  how much of the peer's messages the owner has taken
//! times     when each receive was posted: receive number n at n modulo their count
//! Entry...  messages that the owner has posted: message number n at n modulo the ring's size
//! staging   bytes of messages too long for their entry, a ring too
//! ```
//!
//! Who writes what, and what makes it visible:
//!
//! | written by the owner | with | read by the peer after |
//! | --- | --- | --- |
//! | `Header::peer`, `staging`, then `ring` | release of `ring` | acquire of `ring` |
//! | a time, then `Credits::posted` | release of `posted` | acquire of `posted` |
//! | an entry and its bytes, then `Entry::number` | release of `number` | acquire of `number` |
//! | its own copy of the bytes made, then `Consumed` | release | acquire, before the place is used again |
//!
//! `Entry::end` alone is written by both: it goes from 0 to [`CLAIMING`] by a compare-and-swap of whoever sees first
//! that message and receive have met, and from there to the time at which the message is sent. A process that dies
//! between the two leaves one message of its own connection unsent, as a dead process does anyway.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::mapping::{Mapping, Shared};

/// Frames are counted in these.
pub(crate) const FRAME: usize = 4096;
/// Bytes that an entry holds itself.
pub(crate) const INLINE: usize = 80;
/// The value of [`Entry::end`] while its time is being found out. 0: nobody has begun.
pub(crate) const CLAIMING: u64 = 1;

/// How many frames a message takes; an empty one takes one too.
#[inline]
pub(crate) fn frames(bytes: usize) -> u32 {
    // Messages are shorter than 4 GiB.
    bytes.div_ceil(FRAME).max(1) as u32
}

#[repr(C, align(128))]
struct Header {
    send_depth: AtomicU32,
    recv_depth: AtomicU32,
    /// How many times there is room for.
    times: AtomicU32,
    /// Entries in use; 0 until the owner is connected.
    ring: AtomicU32,
    /// Bytes of staging in use.
    staging: AtomicU64,
    /// The queue pair it is connected to, see [`identity`].
    peer: AtomicU64,
    /// 1 when the owner has been destroyed.
    gone: AtomicU32,
}
// SAFETY: atomics alone.
unsafe impl Shared for Header {}

#[repr(C, align(128))]
struct Credits {
    posted: AtomicU64,
    /// Receives that were meant for messages which were lost on the way.
    returned: AtomicU64,
}
// SAFETY: atomics alone.
unsafe impl Shared for Credits {}

#[repr(C, align(128))]
struct Consumed {
    messages: AtomicU64,
    /// Of staging, up to where.
    bytes: AtomicU64,
}
// SAFETY: atomics alone.
unsafe impl Shared for Consumed {}

/// A message. Short ones are in the first line of the cache alone.
#[repr(C, align(128))]
pub(crate) struct Entry {
    /// The message's number, from 1; other values are of an earlier lap.
    pub(crate) number: AtomicU64,
    /// When the cable is done with it.
    pub(crate) end: AtomicU64,
    pub(crate) posted_at: AtomicU64,
    pub(crate) len: AtomicU32,
    pub(crate) flags: AtomicU32,
    /// Where in staging it begins.
    pub(crate) position: AtomicU64,
    /// Which of the peer's receives it is for.
    pub(crate) credit: AtomicU64,
    inline: [AtomicU64; INLINE / 8],
}
// SAFETY: atomics alone.
unsafe impl Shared for Entry {}

/// It does not arrive.
pub(crate) const LOST: u32 = 1;
/// It is never sent.
pub(crate) const STALLED: u32 = 2;

#[repr(C)]
struct Time(AtomicU64);
// SAFETY: atomics alone.
unsafe impl Shared for Time {}

/// A queue pair of any machine as one number, never 0.
pub(crate) fn identity(device: usize, number: u32) -> u64 {
    (device as u64 + 1) << 32 | u64::from(number)
}

/// One queue pair's file.
pub(crate) struct Channel {
    mapping: Mapping,
    times: usize,
    entries_at: usize,
    staging_at: usize,
    entries: usize,
    send_depth: u32,
    recv_depth: u32,
}

impl Channel {
    fn path(folder: &Path, device: usize, number: u32) -> PathBuf {
        folder.join(format!("pair-{device}-{number}"))
    }

    /// Makes the file of a new queue pair that may be connected to one of up to `deepest` receives.
    pub(crate) fn create(
        folder: &Path,
        device: usize,
        number: u32,
        depths: [u32; 2],
        deepest: u32,
    ) -> io::Result<Channel> {
        let [send_depth, recv_depth] = depths;
        let times = recv_depth.next_power_of_two() as usize;
        let (entries_at, entries, staging_at, staging) = Channel::places(times, send_depth, deepest);
        let mapping = Mapping::create(&Channel::path(folder, device, number), staging_at + staging)?;
        let channel = Channel { mapping, times, entries_at, staging_at, entries, send_depth, recv_depth };
        let header = channel.header();
        header.send_depth.store(send_depth, Ordering::Relaxed);
        header.recv_depth.store(recv_depth, Ordering::Relaxed);
        header.times.store(times as u32, Ordering::Release);
        Ok(channel)
    }

    /// Opens the file of a peer.
    pub(crate) fn open(folder: &Path, device: usize, number: u32, deepest: u32) -> io::Result<Channel> {
        let mapping = Mapping::open(&Channel::path(folder, device, number))?;
        let broken = || io::Error::from(io::ErrorKind::InvalidData);
        if mapping.len() < size_of::<Header>() {
            return Err(broken());
        }
        let header: &Header = mapping.at(0);
        let times = header.times.load(Ordering::Acquire) as usize;
        let send_depth = header.send_depth.load(Ordering::Relaxed);
        let recv_depth = header.recv_depth.load(Ordering::Relaxed);
        if !times.is_power_of_two() || send_depth > deepest || recv_depth > deepest {
            return Err(broken());
        }
        let (entries_at, entries, staging_at, staging) = Channel::places(times, send_depth, deepest);
        if mapping.len() != staging_at + staging {
            return Err(broken());
        }
        Ok(Channel { mapping, times, entries_at, staging_at, entries, send_depth, recv_depth })
    }

    /// Removes the file of a queue pair. Who has it mapped keeps it.
    pub(crate) fn remove(folder: &Path, device: usize, number: u32) -> io::Result<()> {
        std::fs::remove_file(Channel::path(folder, device, number))
    }

    /// Where entries begin and how many there are, where staging begins and how long it is.
    fn places(times: usize, send_depth: u32, deepest: u32) -> (usize, usize, usize, usize) {
        // Both are at most 2^16, see `Spec::check`. Messages that the sender may not post again yet number at most
        // `send_depth`, and those that the receiver has not taken yet at most its depth.
        let most = (send_depth + deepest) as usize;
        let entries = most.next_power_of_two();
        let times_at = 3 * size_of::<Header>();
        let entries_at = (times_at + times * size_of::<Time>()).next_multiple_of(align_of::<Entry>());
        let staging_at = (entries_at + entries * size_of::<Entry>()).next_multiple_of(FRAME);
        (entries_at, entries, staging_at, most * FRAME)
    }

    fn header(&self) -> &Header {
        self.mapping.at(0)
    }

    fn credits(&self) -> &Credits {
        self.mapping.at(size_of::<Header>())
    }

    fn consumed(&self) -> &Consumed {
        self.mapping.at(2 * size_of::<Header>())
    }

    /// Notes as its owner that it is connected to a peer. Memory for a queue of ordinary size is had at once.
    pub(crate) fn connect(&self, peer: u64, peers: &Channel) -> io::Result<Ring> {
        let most = (self.send_depth + peers.recv_depth) as usize;
        let ring =
            Ring { entries: most.next_power_of_two().min(self.entries), staging: (most * FRAME) as u64 };
        self.mapping.populate(0, self.entries_at + ring.entries * size_of::<Entry>())?;
        self.mapping.populate(self.staging_at, (ring.staging as usize).min(PREPARED))?;
        let header = self.header();
        header.peer.store(peer, Ordering::Relaxed);
        header.staging.store(ring.staging, Ordering::Relaxed);
        header.ring.store(ring.entries as u32, Ordering::Release);
        Ok(ring)
    }

    /// The ring of a peer, once that is connected to the queue pair `me`.
    pub(crate) fn ring_for(&self, me: u64) -> Option<Ring> {
        let header = self.header();
        let entries = header.ring.load(Ordering::Acquire) as usize;
        let staging = header.staging.load(Ordering::Relaxed);
        let good = entries.is_power_of_two() && entries <= self.entries;
        let fits = self.staging_at as u64 + staging <= self.mapping.len() as u64;
        if !good || !fits || header.peer.load(Ordering::Relaxed) != me {
            return None;
        }
        // The pages are there already; here they come into this process's tables. It works without, too.
        let _advice = self.mapping.populate(self.entries_at, entries * size_of::<Entry>());
        let _advice = self.mapping.populate(self.staging_at, (staging as usize).min(PREPARED));
        Some(Ring { entries, staging })
    }

    /// Notes as its owner that it is destroyed.
    pub(crate) fn leave(&self) {
        self.header().gone.store(1, Ordering::Release);
    }

    /// Whether its owner has destroyed it.
    pub(crate) fn is_gone(&self) -> bool {
        self.header().gone.load(Ordering::Acquire) != 0
    }

    /// Announces as its owner receive number `number`, posted at `time`.
    #[inline]
    pub(crate) fn announce(&self, number: u64, time: u64) {
        self.time(number).store(time, Ordering::Relaxed);
        self.credits().posted.store(number + 1, Ordering::Release);
    }

    /// Gives the sender another receive for one that its message never reached.
    pub(crate) fn give_back(&self) {
        self.credits().returned.fetch_add(1, Ordering::Release);
    }

    /// How many messages the owner can take.
    #[inline]
    pub(crate) fn announced(&self) -> u64 {
        let credits = self.credits();
        credits.posted.load(Ordering::Acquire) + credits.returned.load(Ordering::Relaxed)
    }

    /// When receive number `number`, which has been announced, was posted.
    #[inline]
    pub(crate) fn announced_at(&self, number: u64) -> u64 {
        let posted = self.credits().posted.load(Ordering::Acquire);
        self.time(number.min(posted.saturating_sub(1))).load(Ordering::Relaxed)
    }

    #[inline]
    fn time(&self, number: u64) -> &AtomicU64 {
        let slot = number as usize & (self.times - 1);
        &self.mapping.at::<Time>(3 * size_of::<Header>() + slot * size_of::<Time>()).0
    }

    /// Notes as its owner how much of the peer's messages it has taken.
    #[inline]
    pub(crate) fn consume(&self, messages: u64, bytes: u64) {
        let consumed = self.consumed();
        consumed.bytes.store(bytes, Ordering::Release);
        consumed.messages.store(messages, Ordering::Release);
    }

    /// How many messages the owner has taken, and up to where in staging.
    #[inline]
    pub(crate) fn taken(&self) -> (u64, u64) {
        let consumed = self.consumed();
        let messages = consumed.messages.load(Ordering::Acquire);
        (messages, consumed.bytes.load(Ordering::Acquire))
    }

    /// The entry of message number `message`.
    #[inline]
    pub(crate) fn entry(&self, ring: Ring, message: u64) -> &Entry {
        let slot = message as usize & (ring.entries - 1);
        self.mapping.at(self.entries_at + slot * size_of::<Entry>())
    }

    /// Has the beginning of a message, which is on its way, come into this processor's cache, where the sender is another.
    pub(crate) fn fetch(&self, ring: Ring, entry: &Entry) {
        let len = (entry.len.load(Ordering::Relaxed) as usize).min(FETCHED);
        let parts = if len <= INLINE {
            [(entry.inline(), len), (std::ptr::null_mut(), 0)]
        } else {
            self.staged(ring, entry.position.load(Ordering::Relaxed), len)
        };
        #[cfg(target_arch = "x86_64")]
        for (start, len) in parts {
            for line in (0..len).step_by(64) {
                let place = start.wrapping_add(line).cast_const().cast();
                // SAFETY: every processor of this kind has the instruction, which reads and writes nothing.
                unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = parts;
    }

    /// The parts of a message in staging that begins at `position`: two where the ring ends in between.
    #[inline]
    pub(crate) fn staged(&self, ring: Ring, position: u64, len: usize) -> [(*mut u8, usize); 2] {
        let offset = (position % ring.staging) as usize;
        let first = len.min(ring.staging as usize - offset);
        [
            (self.mapping.bytes(self.staging_at + offset, first), first),
            (self.mapping.bytes(self.staging_at, len - first), len - first),
        ]
    }
}

/// Bytes of a message that are [fetched](Channel::fetch) at most.
const FETCHED: usize = 512;

/// Staging that is given memory when a connection is made. More gets it at first use.
const PREPARED: usize = 2 << 20;

/// How much of a file's rings a connection uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ring {
    pub(crate) entries: usize,
    pub(crate) staging: u64,
}

impl Entry {
    /// Where a short message's bytes are.
    #[inline]
    pub(crate) fn inline(&self) -> *mut u8 {
        // Atomics may be written through a shared reference, so the pointer may too.
        self.inline.as_ptr().cast_mut().cast()
    }
}
