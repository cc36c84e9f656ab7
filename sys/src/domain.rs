//! Protection domains, which own everything else.

use std::sync::{Arc, Mutex, PoisonError};

use crate::abi;
use crate::completion::CompletionQueue;
use crate::device::Context;
use crate::errno;
use crate::error::Error;
use crate::port::PortState;
use crate::queue_pair::{QueuePair, QueuePairOptions, Reset};
use crate::region::MemoryRegion;

/// A protection domain: queue pairs of one may use the memory of the same one.
///
/// Cheap to clone. It is deallocated when the last clone and everything made of it are gone.
#[derive(Debug, Clone)]
pub struct ProtectionDomain {
    pub(crate) shared: Arc<Domain>,
}

impl Context {
    /// Allocates a protection domain.
    ///
    /// Apple's driver refuses where the port is down; the error then says so.
    pub fn protection_domain(&self) -> Result<ProtectionDomain, Error> {
        errno::clear();
        // SAFETY: the context is open.
        let raw = unsafe { (self.library().functions().alloc_pd)(self.shared.raw) };
        if raw.is_null() {
            let error = self.null_error("ibv_alloc_pd");
            return Err(match self.active_port(1) {
                Err(down @ Error::PortNotActive { state: PortState::Down, .. }) => down,
                _ => error,
            });
        }
        let domain = Domain { raw, context: self.clone(), ledger: Mutex::default() };
        Ok(ProtectionDomain { shared: Arc::new(domain) })
    }
}

impl ProtectionDomain {
    /// The device.
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// Makes a completion queue for `capacity` completions that nobody has polled yet.
    pub fn completion_queue(&self, capacity: usize) -> Result<CompletionQueue, Error> {
        CompletionQueue::create(self, capacity)
    }

    /// Allocates `bytes` of memory, rounded up to pages, and registers it.
    ///
    /// Devices have few regions: take a large one and divide it.
    pub fn allocate(&self, bytes: usize) -> Result<MemoryRegion, Error> {
        MemoryRegion::allocate(self, bytes)
    }

    /// Registers memory that belongs to somebody else.
    ///
    /// Apple's driver wants it to begin at a page (16 KiB) and to lie within 4 GiB of addresses.
    ///
    /// # Safety
    ///
    /// The memory is mapped, writable and stays both until the region is gone, and nobody holds a Rust reference to
    /// it while a posted work request covers it.
    pub unsafe fn register(&self, memory: *mut u8, bytes: usize) -> Result<MemoryRegion, Error> {
        // SAFETY: the caller keeps the same promise.
        unsafe { MemoryRegion::register(self, memory, bytes) }
    }

    /// Makes a queue pair.
    pub fn queue_pair(
        &self,
        options: &QueuePairOptions,
        send_queue: &CompletionQueue,
        recv_queue: &CompletionQueue,
    ) -> Result<QueuePair<Reset>, Error> {
        QueuePair::create(self, options, send_queue, recv_queue)
    }
}

/// The pointer of a domain. Deallocated when dropped.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) raw: *mut abi::ibv_pd,
    pub(crate) context: Context,
    ledger: Mutex<Ledger>,
}

/// What decides when completion queues are destroyed: after the last region has been deregistered.
#[derive(Debug, Default)]
struct Ledger {
    regions: usize,
    /// Queues that nobody uses any more and that wait for the regions.
    idle: Vec<IdleQueue>,
}

#[derive(Debug)]
struct IdleQueue(*mut abi::ibv_cq);

// SAFETY: verbs may be called on a domain from any thread, at the same time.
unsafe impl Send for Domain {}
// SAFETY: as above; the ledger has its lock.
unsafe impl Sync for Domain {}

impl Domain {
    /// Notes a region that has been registered.
    pub(crate) fn region_registered(&self) {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner).regions += 1;
    }

    /// Notes a region that is gone, and destroys the queues that waited for the last one.
    pub(crate) fn region_gone(&self) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.regions -= 1;
        if ledger.regions == 0 {
            for queue in ledger.idle.drain(..) {
                self.destroy(queue);
            }
        }
    }

    /// Destroys a queue that no queue pair uses, now or after the last region.
    pub(crate) fn retire(&self, queue: *mut abi::ibv_cq) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if ledger.regions == 0 {
            self.destroy(IdleQueue(queue));
        } else {
            ledger.idle.push(IdleQueue(queue));
        }
    }

    fn destroy(&self, queue: IdleQueue) {
        errno::clear();
        // SAFETY: the queue was made by this library and no queue pair or handle of it is left.
        let status = unsafe { (self.context.library().functions().destroy_cq)(queue.0) };
        self.context.freed("ibv_destroy_cq", status);
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        errno::clear();
        // SAFETY: everything made of the domain holds it, so nothing is left.
        let status = unsafe { (self.context.library().functions().dealloc_pd)(self.raw) };
        self.context.freed("ibv_dealloc_pd", status);
    }
}
