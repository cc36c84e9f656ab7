//! Completion queues. Nothing is put into one: what is done is found out when it is polled.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use raccl_sys::abi;

use super::device::{Context, ContextObject};
use super::numbers::{EBUSY, EINVAL, ENOMEM, EOPNOTSUPP};
use super::pair::Pair;
use crate::device_state::Mistake;
use crate::mapping::now;
use crate::spec::{Resource, Verb};

/// What `ibv_cq` points to.
#[repr(C)]
pub(super) struct QueueObject {
    head: abi::ibv_cq,
    /// What the header has behind the fields that this driver uses.
    _rest: [u64; 16],
    pub(super) queue: Arc<Queue>,
}

/// A completion queue.
pub(super) struct Queue {
    context: Arc<Context>,
    capacity: usize,
    /// Work requests posted and not polled yet.
    outstanding: AtomicUsize,
    pairs: Mutex<Pairs>,
}

#[derive(Default)]
struct Pairs {
    list: Vec<Arc<Pair>>,
    /// Whose turn it is, so that one busy queue pair does not hide the others.
    turn: usize,
}

pub(super) fn create_cq(
    object: *mut ContextObject,
    context: &Arc<Context>,
    entries: c_int,
    has_channel: bool,
) -> Result<*mut QueueObject, i32> {
    if let Some(errno) = context.injected(Verb::IbvCreateCq) {
        return Err(errno);
    }
    if has_channel {
        return Err(EOPNOTSUPP);
    }
    let limits = &context.fabric.spec.limits;
    let capacity = u32::try_from(entries).ok().filter(|entries| (1..=limits.completions).contains(entries));
    let capacity = capacity.ok_or(EINVAL)? as usize;
    context.take(Resource::CompletionQueues, limits.completion_queues, ENOMEM)?;
    let queue = Queue {
        context: context.clone(),
        capacity,
        outstanding: AtomicUsize::new(0),
        pairs: Mutex::default(),
    };
    let head = abi::ibv_cq { context: object.cast(), channel: std::ptr::null_mut() };
    Ok(Box::into_raw(Box::new(QueueObject { head, _rest: [0; 16], queue: Arc::new(queue) })))
}

impl Queue {
    pub(super) fn destroy(&self) -> Result<(), i32> {
        let context = &self.context;
        if let Some(errno) = context.injected(Verb::IbvDestroyCq) {
            return Err(errno);
        }
        if !self.pairs.lock().unwrap_or_else(PoisonError::into_inner).list.is_empty() {
            return Err(EBUSY);
        }
        if context.held(Resource::Regions) > 0 {
            context.fabric.device(context.device).mistake(Mistake::FreedOutOfOrder);
        }
        context.give(Resource::CompletionQueues);
        Ok(())
    }

    pub(super) fn add(&self, pair: &Arc<Pair>) {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        if !pairs.list.iter().any(|known| Arc::ptr_eq(known, pair)) {
            pairs.list.push(pair.clone());
        }
    }

    pub(super) fn remove(&self, pair: &Pair) {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.list.retain(|known| !std::ptr::eq(&**known, pair));
    }

    /// Counts a work request that will complete here.
    #[inline]
    pub(super) fn expect(&self) {
        if self.outstanding.fetch_add(1, Ordering::Relaxed) >= self.capacity {
            self.context.fabric.device(self.context.device).mistake(Mistake::CompletionQueueTooSmall);
        }
    }

    /// Forgets work requests of a queue pair that goes.
    pub(super) fn forget(&self, count: usize) {
        self.outstanding.fetch_sub(count, Ordering::Relaxed);
    }

    fn poll(&self, into: &mut Batch) -> Result<(), i32> {
        if let Some(errno) = self.context.injected(Verb::IbvPollCq) {
            return Err(-errno.saturating_abs());
        }
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let Pairs { list, turn } = &mut *pairs;
        if *turn >= list.len() {
            *turn = 0;
        }
        let mut clock = Clock::default();
        let (others, first) = list.split_at(*turn);
        for pair in first.iter().chain(others) {
            if std::ptr::eq(&*pair.recv_queue, self) {
                pair.poll_receiver(into, &mut clock);
            }
            if std::ptr::eq(&*pair.send_queue, self) {
                pair.poll_sender(into, &mut clock);
            }
            // The next poll begins with the next queue pair.
            if into.count > 0 {
                break;
            }
        }
        *turn += 1;
        drop(pairs);
        if into.count > 0 {
            self.outstanding.fetch_sub(into.count, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The time, looked at once a poll, and only when something depends on it.
#[derive(Default)]
pub(super) struct Clock {
    time: Option<u64>,
}

impl Clock {
    #[inline]
    pub(super) fn now(&mut self) -> u64 {
        *self.time.get_or_insert_with(now)
    }
}

/// The caller's array, being filled.
pub(super) struct Batch {
    into: *mut abi::ibv_wc,
    room: usize,
    count: usize,
}

impl Batch {
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.count == self.room
    }

    /// Adds a completion. The batch is not full.
    #[inline]
    pub(super) fn push(&mut self, pair: &Pair, id: u64, status: abi::ibv_wc_status, opcode: u32, bytes: u32) {
        debug_assert!(!self.is_full());
        // SAFETY: `count` is below `room`, the length of the caller's array.
        let place = unsafe { self.into.add(self.count) };
        let completion = abi::ibv_wc {
            wr_id: id,
            status,
            opcode,
            vendor_err: 0,
            byte_len: bytes,
            __bindgen_anon_1: abi::ibv_wc__bindgen_ty_1 { imm_data: 0 },
            qp_num: pair.number,
            src_qp: 0,
            wc_flags: 0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        };
        // SAFETY: as above; the array is the caller's to be written.
        unsafe { place.write(completion) };
        self.count += 1;
    }
}

/// `ibv_poll_cq`.
///
/// # Safety
///
/// `queue` is alive, and `into` has room for `room` completions.
pub(super) unsafe extern "C" fn poll_cq(
    queue: *mut abi::ibv_cq,
    room: c_int,
    into: *mut abi::ibv_wc,
) -> c_int {
    // SAFETY: the pointer is of a box that `create_cq` made.
    let queue = unsafe { &(*queue.cast::<QueueObject>()).queue };
    let mut batch = Batch { into, room: usize::try_from(room).unwrap_or(0), count: 0 };
    match queue.poll(&mut batch) {
        // It is at most `room`.
        Ok(()) => batch.count as c_int,
        Err(status) => status,
    }
}
