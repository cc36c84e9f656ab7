//! Queue pairs: one end of a connection.
//!
//! A queue pair is made in state *reset* and is brought up in three steps, each a type of its own here, so that a
//! step cannot be left out: *init* binds it to a port, *ready to receive* to the peer, *ready to send* starts it.
//! Work can be posted in the last one only: Apple's driver rejects receives before it, so post receives when it is
//! reached, tell the peer over another connection, and send then.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi;
use crate::completion::{CompletionQueue, Queue};
use crate::device::Context;
use crate::domain::{Domain, ProtectionDomain};
use crate::errno;
use crate::error::Error;
use crate::port::{Gid, mtu_value};
use crate::region::{MemoryRegion, Span};

/// How a queue pair behaves when messages are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Unreliable connected: lost messages stay lost, and nobody is told. The only one Apple has.
    Uc,
    /// Reliable connected: acknowledged and repeated; a send waits for the peer's receive.
    Rc,
}

/// How many work requests each queue holds. Apple's driver counts one for every 4 KiB of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depths {
    /// Sends.
    pub send: u32,
    /// Receives.
    pub recv: u32,
}

/// What a queue pair is made with.
#[derive(Debug, Clone, Copy)]
pub struct QueuePairOptions {
    /// The transport.
    pub transport: Transport,
    /// The depths asked for. [`QueuePair::depths`] has those granted.
    pub depth: Depths,
}

/// One end, as the other has to know it. Both sides exchange theirs over another connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The port's local identifier.
    pub lid: u16,
    /// The queue pair's number.
    pub queue_pair: u32,
    /// The number of its first packet.
    pub psn: u32,
    /// The port's address.
    pub gid: Gid,
}

/// The local side of the way to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The local port.
    pub port: u8,
    /// Where in the port's GID table its own address stands.
    pub gid_index: u8,
    /// The size of packets in bytes: 256 to 4096, a power of two.
    pub mtu: u32,
}

/// A new queue pair.
#[derive(Debug)]
pub enum Reset {}
/// A queue pair that is bound to a port.
#[derive(Debug)]
pub enum Init {}
/// A queue pair that knows its peer.
#[derive(Debug)]
pub enum ReadyToReceive {}
/// A queue pair in use.
#[derive(Debug)]
pub enum ReadyToSend {}

/// A queue pair in state `S`.
///
/// Dropping it destroys it, and only then lets go of the regions it keeps, its completion queues and its domain. It
/// is never moved to the error state first: on Apple's driver later calls fail after that.
#[derive(Debug)]
pub struct QueuePair<S> {
    pair: Pair,
    state: PhantomData<fn() -> S>,
}

impl<S> QueuePair<S> {
    /// The number by which the peer addresses it.
    pub fn number(&self) -> u32 {
        self.pair.number
    }

    /// The depths granted, which the driver may have adjusted.
    pub fn depths(&self) -> Depths {
        self.pair.depths
    }

    /// The transport.
    pub fn transport(&self) -> Transport {
        self.pair.transport
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.pair.domain.context
    }

    /// Keeps `region` registered until this queue pair is destroyed.
    pub fn keep(&self, region: &MemoryRegion) {
        self.pair.kept.lock().unwrap_or_else(PoisonError::into_inner).push(region.clone());
    }

    /// Destroys it now, as dropping it does, and says whether that could be done: if not, the device may still read and write
    /// what was posted.
    pub fn destroy(mut self) -> Result<(), Error> {
        self.pair.destroy()
    }

    fn modify(&self, attributes: &mut abi::ibv_qp_attr, mask: abi::ibv_qp_attr_mask) -> Result<(), Error> {
        let context = self.context();
        errno::clear();
        // SAFETY: the queue pair is alive and `attributes` is the header's structure, alive for the call.
        let status = unsafe {
            (context.library().functions().modify_qp)(self.pair.raw, attributes, mask.cast_signed())
        };
        context.check("ibv_modify_qp", Some(self.pair.port), status)
    }

    fn into_state<T>(self) -> QueuePair<T> {
        QueuePair { pair: self.pair, state: PhantomData }
    }
}

impl QueuePair<Reset> {
    pub(crate) fn create(
        domain: &ProtectionDomain,
        options: &QueuePairOptions,
        send_queue: &CompletionQueue,
        recv_queue: &CompletionQueue,
    ) -> Result<Self, Error> {
        let context = domain.context();
        let functions = context.library().functions();
        let mut init = abi::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: send_queue.shared.raw,
            recv_cq: recv_queue.shared.raw,
            srq: std::ptr::null_mut(),
            cap: abi::ibv_qp_cap {
                max_send_wr: options.depth.send,
                max_recv_wr: options.depth.recv,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: match options.transport {
                Transport::Uc => abi::IBV_QPT_UC,
                Transport::Rc => abi::IBV_QPT_RC,
            },
            sq_sig_all: 1,
        };
        errno::clear();
        // SAFETY: domain and queues are alive and `init` is the header's structure, alive for the call.
        let raw = unsafe { (functions.create_qp)(domain.shared.raw, &mut init) };
        if raw.is_null() {
            return Err(context.null_error("ibv_create_qp"));
        }
        // SAFETY: the library has just made the queue pair, and it begins with these fields.
        let number = unsafe { (*raw).qp_num };
        let mut pair = Pair {
            raw,
            number,
            transport: options.transport,
            depths: Depths { send: init.cap.max_send_wr, recv: init.cap.max_recv_wr },
            port: 0,
            kept: Mutex::default(),
            _queues: [send_queue.shared.clone(), recv_queue.shared.clone()],
            domain: domain.shared.clone(),
        };
        pair.read_depths();
        Ok(QueuePair { pair, state: PhantomData })
    }

    /// Binds it to a port.
    pub fn init(mut self, port: u8) -> Result<QueuePair<Init>, Error> {
        self.pair.port = port;
        let mut attributes = no_attributes();
        attributes.qp_state = abi::IBV_QPS_INIT;
        attributes.pkey_index = 0;
        attributes.port_num = port;
        attributes.qp_access_flags =
            abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_READ | abi::IBV_ACCESS_REMOTE_WRITE;
        let mask = abi::IBV_QP_STATE | abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attributes, mask)?;
        Ok(self.into_state())
    }
}

impl QueuePair<Init> {
    /// Connects it to a peer's queue pair.
    pub fn ready_to_receive(self, route: &Route, peer: &Peer) -> Result<QueuePair<ReadyToReceive>, Error> {
        let mut attributes = no_attributes();
        attributes.qp_state = abi::IBV_QPS_RTR;
        attributes.path_mtu = mtu_value(route.mtu).ok_or_else(|| Error::Argument {
            what: format!("a path MTU of {} bytes is none of 256, 512, 1024, 2048, 4096", route.mtu),
        })?;
        attributes.dest_qp_num = peer.queue_pair;
        attributes.rq_psn = peer.psn;
        attributes.ah_attr.dlid = peer.lid;
        attributes.ah_attr.port_num = route.port;
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.grh.dgid = abi::ibv_gid { raw: peer.gid.0 };
        attributes.ah_attr.grh.sgid_index = route.gid_index;
        attributes.ah_attr.grh.hop_limit = 1;
        let mut mask = abi::IBV_QP_STATE
            | abi::IBV_QP_AV
            | abi::IBV_QP_PATH_MTU
            | abi::IBV_QP_DEST_QPN
            | abi::IBV_QP_RQ_PSN;
        if self.pair.transport == Transport::Rc {
            attributes.max_dest_rd_atomic = 1;
            attributes.min_rnr_timer = RNR_TIMER;
            mask |= abi::IBV_QP_MAX_DEST_RD_ATOMIC | abi::IBV_QP_MIN_RNR_TIMER;
        }
        self.modify(&mut attributes, mask)?;
        Ok(self.into_state())
    }
}

impl QueuePair<ReadyToReceive> {
    /// Starts it. `psn` is the one that the peer was told.
    pub fn ready_to_send(self, psn: u32) -> Result<QueuePair<ReadyToSend>, Error> {
        let mut attributes = no_attributes();
        attributes.qp_state = abi::IBV_QPS_RTS;
        attributes.sq_psn = psn;
        let mut mask = abi::IBV_QP_STATE | abi::IBV_QP_SQ_PSN;
        if self.pair.transport == Transport::Rc {
            attributes.timeout = ACK_TIMEOUT;
            attributes.retry_cnt = ACK_RETRIES;
            attributes.rnr_retry = RNR_FOR_EVER;
            attributes.max_rd_atomic = 1;
            mask |= abi::IBV_QP_TIMEOUT
                | abi::IBV_QP_RETRY_CNT
                | abi::IBV_QP_RNR_RETRY
                | abi::IBV_QP_MAX_QP_RD_ATOMIC;
        }
        self.modify(&mut attributes, mask)?;
        Ok(self.into_state())
    }
}

impl QueuePair<ReadyToSend> {
    /// Posts a message to be sent. A completion with `id` follows.
    ///
    /// The sender has to know that the peer has posted a receive of as many frames of 4 KiB: UC on Linux drops the
    /// message otherwise. A completion does not mean that the peer has it.
    ///
    /// # Safety
    ///
    /// Until the completion has been polled or the queue pair is destroyed, nobody writes to `span` and its region
    /// stays registered.
    #[inline]
    pub unsafe fn post_send(&self, id: u64, span: Span) -> Result<(), Error> {
        let mut span = span;
        // SAFETY: the structure is made of integers and pointers, for which zero bytes are a value.
        let mut request: abi::ibv_send_wr = unsafe { std::mem::zeroed() };
        request.wr_id = id;
        request.sg_list = &raw mut span.0;
        request.num_sge = 1;
        request.opcode = abi::IBV_WR_SEND;
        request.send_flags = abi::IBV_SEND_SIGNALED;
        let mut bad = std::ptr::null_mut();
        // SAFETY: the context outlives the queue pair and begins with these fields.
        let post = unsafe { (*self.context().shared.raw).ops.post_send };
        let Some(post) = post else { return Err(self.lost("ibv_post_send")) };
        // SAFETY: the queue pair is alive and request and span are until the call returns, when the driver has
        // copied them; the caller keeps the memory that the span names.
        let status = unsafe { post(self.pair.raw, &mut request, &mut bad) };
        self.posted("ibv_post_send", status)
    }

    /// Posts a place for a message to come. A completion with `id` follows when it has.
    ///
    /// Post no more than the depth: Apple's driver takes them and stalls or corrupts data later.
    ///
    /// # Safety
    ///
    /// Until the completion has been polled or the queue pair is destroyed, nobody reads or writes `span`, there is
    /// no Rust reference to it, and its region stays registered.
    #[inline]
    pub unsafe fn post_recv(&self, id: u64, span: Span) -> Result<(), Error> {
        let mut span = span;
        let mut request =
            abi::ibv_recv_wr { wr_id: id, next: std::ptr::null_mut(), sg_list: &raw mut span.0, num_sge: 1 };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the context outlives the queue pair and begins with these fields.
        let post = unsafe { (*self.context().shared.raw).ops.post_recv };
        let Some(post) = post else { return Err(self.lost("ibv_post_recv")) };
        // SAFETY: as in `post_send`.
        let status = unsafe { post(self.pair.raw, &mut request, &mut bad) };
        self.posted("ibv_post_recv", status)
    }

    #[inline]
    fn posted(&self, verb: &'static str, status: i32) -> Result<(), Error> {
        if status == 0 { Ok(()) } else { self.refused(verb, status) }
    }

    #[cold]
    fn refused(&self, verb: &'static str, status: i32) -> Result<(), Error> {
        self.context().check(verb, None, status)
    }

    #[cold]
    fn lost(&self, verb: &'static str) -> Error {
        let what = "the operations table has lost it".into();
        Error::Protocol { verb, device: self.context().name().into(), what }
    }
}

/// Encoded time after which a receiver without a posted receive is tried again: 10 us.
const RNR_TIMER: u8 = 1;
/// Encoded as "wait for ever": our own deadlines end a wait.
const RNR_FOR_EVER: u8 = 7;
/// 4.096 us times 2 to this power, 134 ms: how long an acknowledgement may take.
const ACK_TIMEOUT: u8 = 15;
/// How often what is not acknowledged is sent again. To Soft-RoCE one more means for ever.
const ACK_RETRIES: u8 = 6;

/// Attributes of which none is set yet.
fn no_attributes() -> abi::ibv_qp_attr {
    // SAFETY: the structure is made of integers and byte arrays, for which zero bytes are a value.
    unsafe { std::mem::zeroed() }
}

/// The pointer of a queue pair and what has to outlive it. Destroyed when dropped, before the other fields.
#[derive(Debug)]
struct Pair {
    raw: *mut abi::ibv_qp,
    number: u32,
    transport: Transport,
    depths: Depths,
    /// The port it is bound to; 0 before.
    port: u8,
    kept: Mutex<Vec<MemoryRegion>>,
    _queues: [Arc<Queue>; 2],
    domain: Arc<Domain>,
}

// SAFETY: verbs may be called on a queue pair from any thread, at the same time.
unsafe impl Send for Pair {}
// SAFETY: as above; the list of regions has its lock.
unsafe impl Sync for Pair {}

impl Pair {
    /// Replaces what creation said of the depths by what the driver has, where it can be asked.
    fn read_depths(&mut self) {
        let Some(query) = self.domain.context.library().functions().query_qp else {
            return;
        };
        let mut attributes = no_attributes();
        let mut init = MaybeUninit::<abi::ibv_qp_init_attr>::zeroed();
        // SAFETY: the queue pair is alive and both answers are writable for the call.
        let status =
            unsafe { query(self.raw, &mut attributes, abi::IBV_QP_CAP.cast_signed(), init.as_mut_ptr()) };
        if status != 0 {
            // Not every driver can be asked; what creation said holds then.
            return;
        }
        for (depth, granted) in [
            (&mut self.depths.send, attributes.cap.max_send_wr),
            (&mut self.depths.recv, attributes.cap.max_recv_wr),
        ] {
            // A driver that leaves the answer empty does not know.
            if granted != 0 {
                *depth = granted;
            }
        }
    }
}

impl Pair {
    /// Does nothing a second time.
    fn destroy(&mut self) -> Result<(), Error> {
        if self.raw.is_null() {
            return Ok(());
        }
        let context = &self.domain.context;
        errno::clear();
        let raw = std::mem::take(&mut self.raw);
        // SAFETY: the queue pair was made by this library and this is its only owner, which has just forgotten it.
        let status = unsafe { (context.library().functions().destroy_qp)(raw) };
        context.freed("ibv_destroy_qp", status);
        if status != 0 {
            // The device may still use the memory: it stays registered and mapped.
            std::mem::forget(std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner)));
        }
        context.check("ibv_destroy_qp", None, status)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Failures are in the context's list.
        let _ = self.destroy();
    }
}
