//! Completion queues: what has been done.

use std::fmt;
use std::sync::Arc;

use crate::abi;
use crate::device::Context;
use crate::domain::{Domain, ProtectionDomain};
use crate::errno;
use crate::error::Error;

/// A queue into which queue pairs put a note for each work request that is done.
///
/// Cheap to clone. Of its domain's objects it is destroyed after queue pairs and regions.
#[derive(Debug, Clone)]
pub struct CompletionQueue {
    pub(crate) shared: Arc<Queue>,
}

impl CompletionQueue {
    pub(crate) fn create(domain: &ProtectionDomain, capacity: usize) -> Result<CompletionQueue, Error> {
        let context = domain.context();
        let entries =
            i32::try_from(capacity).ok().filter(|entries| *entries > 0).ok_or_else(|| Error::Argument {
                what: format!(
                    "a completion queue cannot hold {capacity} completions; ask for 1 to {}",
                    i32::MAX
                ),
            })?;
        let functions = context.library().functions();
        errno::clear();
        // SAFETY: the context is open; neither a word of ours nor a channel is wanted, so both may be null.
        let raw = unsafe {
            (functions.create_cq)(context.shared.raw, entries, std::ptr::null_mut(), std::ptr::null_mut(), 0)
        };
        if raw.is_null() {
            return Err(context.null_error("ibv_create_cq"));
        }
        Ok(CompletionQueue { shared: Arc::new(Queue { raw, domain: domain.shared.clone() }) })
    }

    /// Takes up to `into.len()` completions off the queue, oldest first, and returns how many.
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, Error> {
        let context = self.shared.domain.context.shared.raw;
        let room = i32::try_from(into.len()).unwrap_or(i32::MAX);
        // SAFETY: the context is open and begins with these fields.
        let poll = unsafe { (*context).ops.poll_cq };
        let Some(poll) = poll else { return Err(self.broken("the operations table has lost it".into())) };
        // SAFETY: the queue is alive, `into` has `room` entries, and `Completion` is the header's structure.
        let count = unsafe { poll(self.shared.raw, room, into.as_mut_ptr().cast()) };
        match usize::try_from(count) {
            Ok(count) if count <= into.len() => Ok(count),
            Ok(count) => Err(self.broken(format!("it returned {count} completions for {room} places"))),
            Err(_) => Err(self.failed(count)),
        }
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.shared.domain.context
    }

    #[cold]
    fn failed(&self, status: i32) -> Error {
        match self.context().check("ibv_poll_cq", None, status) {
            Err(error) => error,
            Ok(()) => self.broken("it failed without an error".into()),
        }
    }

    #[cold]
    fn broken(&self, what: String) -> Error {
        Error::Protocol { verb: "ibv_poll_cq", device: self.context().name().into(), what }
    }
}

/// The pointer of a queue. Handed to the domain when dropped.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) raw: *mut abi::ibv_cq,
    pub(crate) domain: Arc<Domain>,
}

// SAFETY: verbs may be called on a queue from any thread, at the same time.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Drop for Queue {
    fn drop(&mut self) {
        self.domain.retire(self.raw);
    }
}

/// What `poll` says of one work request.
///
/// After an error only [`id`](Self::id), [`status`](Self::status) and [`queue_pair`](Self::queue_pair) mean
/// anything: let the id tell sends from receives.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Completion(abi::ibv_wc);

impl Completion {
    /// The id that the work request was posted with.
    #[inline]
    pub fn id(&self) -> u64 {
        self.0.wr_id
    }

    /// The status as the header numbers it; 0 is success.
    #[inline]
    pub fn status(&self) -> u32 {
        self.0.status
    }

    /// The status by its name in the header.
    pub fn status_name(&self) -> &'static str {
        STATUSES.get(self.0.status as usize).copied().unwrap_or("an unknown status")
    }

    /// The driver's own word about an error.
    pub fn vendor_error(&self) -> u32 {
        self.0.vendor_err
    }

    /// The length of a message that was received.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.0.byte_len as usize
    }

    /// The number of the queue pair.
    #[inline]
    pub fn queue_pair(&self) -> u32 {
        self.0.qp_num
    }

    /// Whether a receive is done, not a send. Means something after success only.
    #[inline]
    pub fn is_receive(&self) -> bool {
        self.0.opcode & abi::IBV_WC_RECV != 0
    }

    /// The error, unless it is success.
    #[inline]
    pub fn check(&self, context: &Context) -> Result<(), Error> {
        if self.0.status == abi::IBV_WC_SUCCESS { Ok(()) } else { Err(self.error(context)) }
    }

    #[cold]
    fn error(&self, context: &Context) -> Error {
        Error::Completion {
            device: context.name().into(),
            status: self.status_name(),
            vendor: self.vendor_error(),
        }
    }
}

impl Default for Completion {
    /// An empty one, for `poll` to fill in.
    fn default() -> Self {
        Completion(abi::ibv_wc {
            wr_id: 0,
            status: abi::IBV_WC_GENERAL_ERR,
            opcode: 0,
            vendor_err: 0,
            byte_len: 0,
            __bindgen_anon_1: abi::ibv_wc__bindgen_ty_1 { imm_data: 0 },
            qp_num: 0,
            src_qp: 0,
            wc_flags: 0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        })
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("id", &self.id())
            .field("status", &self.status_name())
            .field("bytes", &self.bytes())
            .field("queue_pair", &self.queue_pair())
            .finish()
    }
}

/// The statuses of a completion, by number.
const STATUSES: &[&str] = &[
    "IBV_WC_SUCCESS",
    "IBV_WC_LOC_LEN_ERR",
    "IBV_WC_LOC_QP_OP_ERR",
    "IBV_WC_LOC_EEC_OP_ERR",
    "IBV_WC_LOC_PROT_ERR",
    "IBV_WC_WR_FLUSH_ERR",
    "IBV_WC_MW_BIND_ERR",
    "IBV_WC_BAD_RESP_ERR",
    "IBV_WC_LOC_ACCESS_ERR",
    "IBV_WC_REM_INV_REQ_ERR",
    "IBV_WC_REM_ACCESS_ERR",
    "IBV_WC_REM_OP_ERR",
    "IBV_WC_RETRY_EXC_ERR",
    "IBV_WC_RNR_RETRY_EXC_ERR",
    "IBV_WC_LOC_RDD_VIOL_ERR",
    "IBV_WC_REM_INV_RD_REQ_ERR",
    "IBV_WC_REM_ABORT_ERR",
    "IBV_WC_INV_EECN_ERR",
    "IBV_WC_INV_EEC_STATE_ERR",
    "IBV_WC_FATAL_ERR",
    "IBV_WC_RESP_TIMEOUT_ERR",
    "IBV_WC_GENERAL_ERR",
    "IBV_WC_TM_ERR",
    "IBV_WC_TM_RNDV_INCOMPLETE",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_the_names_of_the_header() {
        for (status, name) in [
            (abi::IBV_WC_SUCCESS, "IBV_WC_SUCCESS"),
            (abi::IBV_WC_LOC_LEN_ERR, "IBV_WC_LOC_LEN_ERR"),
            (abi::IBV_WC_LOC_PROT_ERR, "IBV_WC_LOC_PROT_ERR"),
            (abi::IBV_WC_WR_FLUSH_ERR, "IBV_WC_WR_FLUSH_ERR"),
            (abi::IBV_WC_RNR_RETRY_EXC_ERR, "IBV_WC_RNR_RETRY_EXC_ERR"),
            (abi::IBV_WC_GENERAL_ERR, "IBV_WC_GENERAL_ERR"),
            (abi::IBV_WC_TM_RNDV_INCOMPLETE, "IBV_WC_TM_RNDV_INCOMPLETE"),
        ] {
            assert_eq!(STATUSES.get(status as usize), Some(&name));
        }
        assert_eq!(STATUSES.len() as u32, abi::IBV_WC_TM_RNDV_INCOMPLETE + 1);
    }
}
