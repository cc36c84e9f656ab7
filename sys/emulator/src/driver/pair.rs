//! Queue pairs: making, connecting, destroying. What they do is in `sender` and `receiver`.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use raccl_sys::abi;

use super::completion::{Batch, Clock, Queue, QueueObject};
use super::device::{Context, gids};
use super::memory::{Domain, DomainObject};
use super::numbers::{EBUSY, EINVAL, EIO, ENOMEM, EOPNOTSUPP, ETIMEDOUT};
use super::receiver::{Next, Receiver};
use super::sender::Sender;
use crate::channel::{Channel, Ring, identity};
use crate::mapping::now;
use crate::spec::{Resource, Verb};
use crate::wire::Wire;

/// What `ibv_qp` points to.
#[repr(C)]
pub(super) struct PairObject {
    pub(super) head: abi::ibv_qp,
    /// What the header has behind the fields that this driver uses.
    _rest: [u64; 16],
    pub(super) pair: Arc<Pair>,
}

/// A queue pair.
pub(super) struct Pair {
    pub(super) context: Arc<Context>,
    pub(super) domain: Arc<Domain>,
    pub(super) number: u32,
    pub(super) signal_all: bool,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    /// Its own file.
    pub(super) channel: Channel,
    pub(super) send_queue: Arc<Queue>,
    pub(super) recv_queue: Arc<Queue>,
    /// The cable and the peer, once it knows them.
    link: OnceLock<Link>,
    state: AtomicU32,
    /// Something failed: all work is flushed.
    failed: AtomicBool,
    /// When something was last sent or received.
    active_at: AtomicU64,
    /// Sends posted and not completed; written under the sender's lock.
    pub(super) sending: AtomicUsize,
    pub(super) sender: Mutex<Sender>,
    pub(super) receiver: Mutex<Receiver>,
    /// What the receiver waits for.
    pub(super) next: Next,
}

/// What a queue pair knows from when it can receive.
pub(super) struct Link {
    pub(super) wire: Wire,
    /// The peer's file; none where there was no such queue pair, and then nothing ever arrives.
    pub(super) peer: Option<Peer>,
}

pub(super) struct Peer {
    pub(super) channel: Channel,
    /// How this side's own file is used.
    pub(super) ring: Ring,
    /// How the peer's file is used, once it is connected to this queue pair.
    incoming: OnceLock<Ring>,
    me: u64,
}

impl Peer {
    /// How the peer's file is used; `None` until it is connected to this queue pair too.
    #[inline]
    pub(super) fn incoming(&self) -> Option<Ring> {
        if let Some(ring) = self.incoming.get() {
            return Some(*ring);
        }
        let ring = self.channel.ring_for(self.me)?;
        Some(*self.incoming.get_or_init(|| ring))
    }
}

pub(super) fn create_qp(
    domain_object: *mut DomainObject,
    domain: &Arc<Domain>,
    init: &mut abi::ibv_qp_init_attr,
) -> Result<*mut PairObject, i32> {
    let context = &domain.context;
    if let Some(errno) = context.injected(Verb::IbvCreateQp) {
        return Err(errno);
    }
    if init.qp_type != abi::IBV_QPT_UC || !init.srq.is_null() {
        return Err(EOPNOTSUPP);
    }
    let spec = &context.fabric.spec;
    let cap = &init.cap;
    let depth_is_good = |depth: u32| (1..=spec.limits.depth).contains(&depth);
    if !depth_is_good(cap.max_send_wr)
        || !depth_is_good(cap.max_recv_wr)
        || cap.max_send_sge > 1
        || cap.max_recv_sge > 1
        || cap.max_inline_data > 0
        || init.send_cq.is_null()
        || init.recv_cq.is_null()
    {
        return Err(EINVAL);
    }
    let adjusted = |depth: u32| spec.rules.adjust_depth.map_or(depth, |most| depth.min(most.max(1)));
    let (send_depth, recv_depth) = (adjusted(cap.max_send_wr), adjusted(cap.max_recv_wr));
    // SAFETY: the caller's queue is alive, a box that `create_cq` made.
    let send_queue = unsafe { (*init.send_cq.cast::<QueueObject>()).queue.clone() };
    // SAFETY: as above.
    let recv_queue = unsafe { (*init.recv_cq.cast::<QueueObject>()).queue.clone() };
    context.take(Resource::QueuePairs, spec.limits.queue_pairs, EBUSY)?;
    let state = context.fabric.device(context.device);
    // 24 bits, the first two of which numbers are the network's own.
    let number = state.last_number.fetch_add(1, Ordering::Relaxed) % ((1 << 24) - 2) + 2;
    let depths = [send_depth, recv_depth];
    let channel = Channel::create(&context.fabric.folder, context.device, number, depths, spec.limits.depth);
    let channel = channel.map_err(|error| {
        eprintln!("raccl-emulator: cannot make a file in {}: {error}", context.fabric.folder.display());
        context.give(Resource::QueuePairs);
        EIO
    })?;
    let pair = Arc::new(Pair {
        context: context.clone(),
        domain: domain.clone(),
        number,
        signal_all: init.sq_sig_all != 0,
        send_depth,
        recv_depth,
        channel,
        send_queue,
        recv_queue,
        link: OnceLock::new(),
        state: AtomicU32::new(abi::IBV_QPS_RESET),
        failed: AtomicBool::new(false),
        active_at: AtomicU64::new(0),
        sending: AtomicUsize::new(0),
        sender: Mutex::default(),
        receiver: Mutex::default(),
        next: Next::default(),
    });
    pair.send_queue.add(&pair);
    pair.recv_queue.add(&pair);
    context.pairs.lock().unwrap_or_else(PoisonError::into_inner).push(pair.clone());
    domain.pairs.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's domain is alive, and begins with these fields.
    let object = unsafe { (*domain_object.cast::<abi::ibv_pd>()).context };
    let head = abi::ibv_qp {
        context: object,
        qp_context: init.qp_context,
        pd: domain_object.cast(),
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: std::ptr::null_mut(),
        handle: number,
        qp_num: number,
        state: abi::IBV_QPS_RESET,
        qp_type: abi::IBV_QPT_UC,
    };
    Ok(Box::into_raw(Box::new(PairObject { head, _rest: [0; 16], pair })))
}

impl Pair {
    /// The state after which work can be posted.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state.load(Ordering::Acquire), abi::IBV_QPS_RTS | abi::IBV_QPS_ERR)
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Puts it out of action.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        self.state.store(abi::IBV_QPS_ERR, Ordering::Release);
    }

    /// Notes that something is sent or received.
    #[inline]
    pub(super) fn active(&self, time: u64) {
        if self.context.fabric.spec.rules.idle_death_ms.is_some() {
            self.active_at.fetch_max(time, Ordering::Relaxed);
        }
    }

    /// Whether it has been silent for longer than it lives.
    #[inline]
    pub(super) fn has_died_of_silence(&self, time: u64) -> bool {
        let limit = self.context.fabric.spec.rules.idle_death_ms;
        limit.is_some_and(|limit| {
            let silence = time.saturating_sub(self.active_at.load(Ordering::Relaxed));
            silence > limit.saturating_mul(1_000_000)
        })
    }

    #[inline]
    pub(super) fn link(&self) -> Option<&Link> {
        self.link.get()
    }

    #[inline]
    pub(super) fn poll_sender(&self, into: &mut Batch, clock: &mut Clock) {
        // Most polls are of programs that wait for a message and have none under way.
        if self.sending.load(Ordering::Acquire) == 0 {
            return;
        }
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).poll(self, into, clock);
    }

    #[inline]
    pub(super) fn poll_receiver(&self, into: &mut Batch, clock: &mut Clock) {
        if !self.has_failed() && self.next.is_to_come(self, clock) {
            return;
        }
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner).poll(self, into, clock);
    }

    /// Whether work with a memory region is posted.
    pub(super) fn uses(&self, key: u32) -> bool {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).uses(key)
            || self.receiver.lock().unwrap_or_else(PoisonError::into_inner).uses(key)
    }

    pub(super) fn modify(&self, attributes: &abi::ibv_qp_attr, mask: u32) -> Result<u32, i32> {
        if let Some(errno) = self.context.injected(Verb::IbvModifyQp) {
            return Err(errno);
        }
        if mask & abi::IBV_QP_STATE == 0 {
            return Err(EINVAL);
        }
        let current = self.state.load(Ordering::Acquire);
        let wants = |exactly: u32| if mask == exactly | abi::IBV_QP_STATE { Ok(()) } else { Err(EINVAL) };
        match (current, attributes.qp_state) {
            (abi::IBV_QPS_RESET, abi::IBV_QPS_INIT) => {
                wants(abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS)?;
                if attributes.port_num != 1 || attributes.pkey_index != 0 {
                    return Err(EINVAL);
                }
            }
            (abi::IBV_QPS_INIT, abi::IBV_QPS_RTR) => {
                wants(abi::IBV_QP_AV | abi::IBV_QP_PATH_MTU | abi::IBV_QP_DEST_QPN | abi::IBV_QP_RQ_PSN)?;
                self.connect(attributes)?;
            }
            (abi::IBV_QPS_RTR, abi::IBV_QPS_RTS) => {
                wants(abi::IBV_QP_SQ_PSN)?;
                self.active(now());
            }
            (_, abi::IBV_QPS_ERR) => {
                self.domain.spoilt.store(true, Ordering::Relaxed);
                self.fail();
                return Ok(abi::IBV_QPS_ERR);
            }
            _ => return Err(EINVAL),
        }
        self.state.store(attributes.qp_state, Ordering::Release);
        Ok(attributes.qp_state)
    }

    /// Finds the peer that attributes name, at the other end of the cable.
    fn connect(&self, attributes: &abi::ibv_qp_attr) -> Result<(), i32> {
        let (fabric, device) = (&self.context.fabric, self.context.device);
        let way = &attributes.ah_attr;
        if way.is_global != 1
            || way.port_num != 1
            || !(abi::IBV_MTU_256..=abi::IBV_MTU_4096).contains(&attributes.path_mtu)
        {
            return Err(EINVAL);
        }
        // The local address has to be the IPv4-mapped one, as it is now.
        let own = gids(fabric, device).get(usize::from(way.grh.sgid_index)).copied().unwrap_or_default();
        let is_mapped = |gid: [u8; 16]| std::net::Ipv6Addr::from(gid).to_ipv4_mapped().is_some();
        if !is_mapped(own) || !fabric.port_active(device) {
            return Err(EINVAL);
        }
        // SAFETY: every view of the union is made of plain bytes.
        let wanted = unsafe { way.grh.dgid.raw };
        let opposite = fabric.opposite(device).filter(|other| {
            is_mapped(wanted) && fabric.port_active(*other) && gids(fabric, *other).contains(&wanted)
        });
        let (Some(opposite), Some((cable, end))) = (opposite, fabric.devices[device].cable) else {
            return Err(ETIMEDOUT);
        };
        let settings = &fabric.spec.cables[cable];
        let wire = Wire { cable, end, latency: settings.latency_ns, bandwidth: settings.bandwidth };
        let number = attributes.dest_qp_num;
        let me = identity(device, self.number);
        let peer = match Channel::open(&fabric.folder, opposite, number, fabric.spec.limits.depth) {
            Ok(channel) => {
                let ring = self.channel.connect(identity(opposite, number), &channel).map_err(|error| {
                    eprintln!("raccl-emulator: no memory in {}: {error}", fabric.folder.display());
                    ENOMEM
                })?;
                Some(Peer { channel, ring, incoming: OnceLock::new(), me })
            }
            // Nobody is told that there is no such queue pair.
            Err(_) => None,
        };
        self.link.set(Link { wire, peer }).map_err(|_| EINVAL)
    }

    pub(super) fn query(&self, into: &mut abi::ibv_qp_attr) -> Result<(), i32> {
        if let Some(errno) = self.context.injected(Verb::IbvQueryQp) {
            return Err(errno);
        }
        if !self.context.fabric.spec.rules.queries {
            return Err(EOPNOTSUPP);
        }
        into.qp_state = self.state.load(Ordering::Acquire);
        into.cur_qp_state = into.qp_state;
        into.port_num = 1;
        into.cap = abi::ibv_qp_cap {
            max_send_wr: self.send_depth,
            max_recv_wr: self.recv_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        Ok(())
    }

    pub(super) fn destroy(&self) -> Result<(), i32> {
        if let Some(errno) = self.context.injected(Verb::IbvDestroyQp) {
            return Err(errno);
        }
        self.channel.leave();
        self.send_queue.remove(self);
        self.recv_queue.remove(self);
        let sends = self.sender.lock().unwrap_or_else(PoisonError::into_inner).len();
        let receives = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.send_queue.forget(sends);
        self.recv_queue.forget(receives);
        let mut pairs = self.context.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.retain(|known| !std::ptr::eq(&**known, self));
        drop(pairs);
        self.domain.pairs.fetch_sub(1, Ordering::Relaxed);
        self.context.give(Resource::QueuePairs);
        // The folder may be gone already, and with it the file.
        let _gone = Channel::remove(&self.context.fabric.folder, self.context.device, self.number);
        Ok(())
    }
}
