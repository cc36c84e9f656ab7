//! Registered memory.

use std::sync::Arc;

use crate::abi;
use crate::device::Context;
use crate::domain::{Domain, ProtectionDomain};
use crate::errno;
use crate::error::Error;
use crate::memory::Pages;

/// Memory that the device may read and write.
///
/// The device, and through it a peer, writes whenever a receive is posted, so this type never gives out a Rust
/// reference to its bytes, only their address.
///
/// Cheap to clone. It is deregistered when the last clone is gone, and the last queue pair that
/// [keeps](crate::QueuePair::keep) it.
#[derive(Debug, Clone)]
pub struct MemoryRegion {
    shared: Arc<Region>,
}

impl MemoryRegion {
    pub(crate) fn allocate(domain: &ProtectionDomain, bytes: usize) -> Result<MemoryRegion, Error> {
        let pages = Pages::map(bytes)?;
        let raw = register(domain, pages.as_ptr(), pages.len())?;
        Ok(MemoryRegion::of(domain, raw, pages.as_ptr(), pages.len(), Some(pages)))
    }

    /// # Safety
    ///
    /// As for [`ProtectionDomain::register`].
    pub(crate) unsafe fn register(
        domain: &ProtectionDomain,
        start: *mut u8,
        len: usize,
    ) -> Result<Self, Error> {
        if start.is_null() || len == 0 {
            return Err(Error::Argument { what: "an empty buffer cannot be registered for RDMA".into() });
        }
        let raw = register(domain, start, len)?;
        Ok(MemoryRegion::of(domain, raw, start, len, None))
    }

    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.shared.start
    }

    /// Its length, for allocated memory rounded up to pages.
    pub fn len(&self) -> usize {
        self.shared.len
    }

    /// Whether it has no bytes. It never has none.
    pub fn is_empty(&self) -> bool {
        self.shared.len == 0
    }

    /// A part of it, for a work request.
    #[inline]
    pub fn span(&self, offset: usize, bytes: usize) -> Result<Span, Error> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.shared.len);
        match u32::try_from(bytes) {
            Ok(length) if fits => Ok(Span(abi::ibv_sge {
                addr: (self.shared.start.addr() + offset) as u64,
                length,
                lkey: self.shared.key,
            })),
            _ => Err(self.outside(offset, bytes)),
        }
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.shared.domain.context
    }

    #[cold]
    fn outside(&self, offset: usize, bytes: usize) -> Error {
        Error::Argument {
            what: format!(
                "{bytes} bytes at {offset} are no part of a memory region of {} bytes",
                self.shared.len
            ),
        }
    }

    fn of(
        domain: &ProtectionDomain,
        raw: *mut abi::ibv_mr,
        start: *mut u8,
        len: usize,
        pages: Option<Pages>,
    ) -> Self {
        domain.shared.region_registered();
        // SAFETY: the library has just made the region, and it begins with these fields.
        let key = unsafe { (*raw).lkey };
        MemoryRegion {
            shared: Arc::new(Region { raw, key, start, len, _pages: pages, domain: domain.shared.clone() }),
        }
    }
}

/// A part of a region, as a work request names it.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Span(pub(crate) abi::ibv_sge);

impl Span {
    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.0.length as usize
    }
}

/// The pointer of a region. Deregistered when dropped; memory of its own is unmapped afterwards.
#[derive(Debug)]
struct Region {
    raw: *mut abi::ibv_mr,
    key: u32,
    start: *mut u8,
    len: usize,
    _pages: Option<Pages>,
    domain: Arc<Domain>,
}

// SAFETY: the pointers are only handed to verbs, which may be called from any thread, or given out as addresses.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        errno::clear();
        let context = &self.domain.context;
        // SAFETY: the region was made by this library, and no queue pair that keeps it is left.
        let status = unsafe { (context.library().functions().dereg_mr)(self.raw) };
        context.freed("ibv_dereg_mr", status);
        if status != 0 {
            // The device may still use these pages, so they are never given to anybody else.
            std::mem::forget(self._pages.take());
        }
        self.domain.region_gone();
    }
}

/// Registers memory with the rights that most drivers expect, or else with the one that receiving needs.
fn register(domain: &ProtectionDomain, start: *mut u8, len: usize) -> Result<*mut abi::ibv_mr, Error> {
    let all = abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_READ | abi::IBV_ACCESS_REMOTE_WRITE;
    for access in [all, abi::IBV_ACCESS_LOCAL_WRITE] {
        errno::clear();
        // SAFETY: the domain is alive, and whoever made the memory keeps it mapped while it is registered.
        let raw = unsafe {
            (domain.context().library().functions().reg_mr)(
                domain.shared.raw,
                start.cast(),
                len,
                access as i32,
            )
        };
        if !raw.is_null() {
            return Ok(raw);
        }
    }
    Err(domain.context().null_error("ibv_reg_mr"))
}
