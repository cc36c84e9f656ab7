//! Protection domains and memory regions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use raccl_sys::abi;

use super::device::{Context, ContextObject};
use super::numbers::{EACCES, EBUSY, EINVAL, ENODATA, ENOMEM};
use crate::device_state::Mistake;
use crate::spec::{Resource, Verb};

/// The page size of the machines emulated.
const PAGE: usize = 16 << 10;
/// Regions do not reach from one of these into the next.
const BANK: usize = 4 << 30;

/// What `ibv_pd` points to.
#[repr(C)]
pub(super) struct DomainObject {
    head: abi::ibv_pd,
    pub(super) domain: Arc<Domain>,
}

/// A protection domain.
pub(super) struct Domain {
    pub(super) context: Arc<Context>,
    /// Tells domains of a process apart.
    pub(super) number: u32,
    regions: AtomicU32,
    pub(super) pairs: AtomicU32,
    /// A queue pair of it was moved to the error state, after which regions cannot be deregistered.
    pub(super) spoilt: AtomicBool,
}

pub(super) fn alloc_pd(object: *mut ContextObject, context: &Arc<Context>) -> Result<*mut DomainObject, i32> {
    static NUMBERS: AtomicU32 = AtomicU32::new(1);
    if let Some(errno) = context.injected(Verb::IbvAllocPd) {
        return Err(errno);
    }
    if !context.fabric.port_active(context.device) {
        return Err(ENODATA);
    }
    context.take(Resource::Domains, context.fabric.spec.limits.domains, ENODATA)?;
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let domain = Domain {
        context: context.clone(),
        number,
        regions: AtomicU32::new(0),
        pairs: AtomicU32::new(0),
        spoilt: AtomicBool::new(false),
    };
    let head = abi::ibv_pd { context: object.cast(), handle: number };
    Ok(Box::into_raw(Box::new(DomainObject { head, domain: Arc::new(domain) })))
}

impl Domain {
    pub(super) fn dealloc(&self) -> Result<(), i32> {
        let context = &self.context;
        if let Some(errno) = context.injected(Verb::IbvDeallocPd) {
            return Err(errno);
        }
        if self.regions.load(Ordering::Relaxed) > 0 || self.pairs.load(Ordering::Relaxed) > 0 {
            return Err(EBUSY);
        }
        if context.held(Resource::Domains) == 1 && context.held(Resource::CompletionQueues) > 0 {
            context.fabric.device(context.device).mistake(Mistake::FreedOutOfOrder);
        }
        context.give(Resource::Domains);
        Ok(())
    }
}

/// What `ibv_mr` points to.
#[repr(C)]
pub(super) struct RegionObject {
    head: abi::ibv_mr,
    domain: Arc<Domain>,
}

/// The regions of a context, by key.
#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// Changes whenever a region goes.
    pub(super) generation: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    /// 0 while the slot is free.
    key: u32,
    laps: u32,
    domain: u32,
    start: usize,
    len: usize,
}

/// A key's low bits are the slot's place.
const SLOT_BITS: u32 = 12;

impl Table {
    /// Whether the domain may use these bytes by that key.
    #[inline]
    pub(super) fn allows(&self, domain: u32, key: u32, start: usize, len: usize) -> bool {
        match self.slots.get((key & ((1 << SLOT_BITS) - 1)) as usize) {
            Some(slot) => {
                slot.key == key
                    && slot.domain == domain
                    && start >= slot.start
                    && start.checked_add(len).is_some_and(|end| end <= slot.start + slot.len)
            }
            None => false,
        }
    }

    fn insert(&mut self, domain: u32, start: usize, len: usize) -> Option<u32> {
        let place = self.slots.iter().position(|slot| slot.key == 0).unwrap_or(self.slots.len());
        if place == self.slots.len() {
            if place == 1 << SLOT_BITS {
                return None;
            }
            self.slots.push(Slot { key: 0, laps: 0, domain: 0, start: 0, len: 0 });
        }
        let slot = &mut self.slots[place];
        // Never 0, and not the same again for a long time.
        slot.laps = slot.laps % ((1 << (32 - SLOT_BITS)) - 1) + 1;
        *slot = Slot { key: slot.laps << SLOT_BITS | place as u32, laps: slot.laps, domain, start, len };
        Some(slot.key)
    }

    fn remove(&mut self, key: u32) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.key == key) {
            slot.key = 0;
            self.generation += 1;
        }
    }
}

pub(super) fn reg_mr(
    domain_object: *mut DomainObject,
    domain: &Arc<Domain>,
    start: usize,
    len: usize,
    access: u32,
) -> Result<*mut RegionObject, i32> {
    let context = &domain.context;
    if let Some(errno) = context.injected(Verb::IbvRegMr) {
        return Err(errno);
    }
    let rules = &context.fabric.spec.rules;
    let known = abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_READ | abi::IBV_ACCESS_REMOTE_WRITE;
    let allowed = if rules.local_write_only { abi::IBV_ACCESS_LOCAL_WRITE } else { known };
    let end = start.checked_add(len).filter(|end| *end > start);
    let good = start.is_multiple_of(PAGE)
        && end.is_some_and(|end| start / BANK == (end - 1) / BANK)
        && access & !allowed == 0
        && access & abi::IBV_ACCESS_LOCAL_WRITE != 0;
    if !good {
        return Err(EINVAL);
    }
    if !is_writable(start, len) {
        return Err(EACCES);
    }
    context.take(Resource::Regions, context.fabric.spec.limits.regions, ENOMEM)?;
    let key =
        context.regions.write().unwrap_or_else(|error| error.into_inner()).insert(domain.number, start, len);
    let Some(key) = key else {
        context.give(Resource::Regions);
        return Err(ENOMEM);
    };
    domain.regions.fetch_add(1, Ordering::Relaxed);
    let head = abi::ibv_mr {
        // The pointer that the domain's first field holds.
        // SAFETY: the caller's domain is alive, and begins with these fields.
        context: unsafe { (*domain_object).head.context },
        pd: domain_object.cast(),
        addr: std::ptr::with_exposed_provenance_mut(start),
        length: len,
        handle: key,
        lkey: key,
        rkey: 0,
    };
    Ok(Box::into_raw(Box::new(RegionObject { head, domain: domain.clone() })))
}

impl RegionObject {
    pub(super) fn dereg(&self) -> Result<(), i32> {
        let context = &self.domain.context;
        if let Some(errno) = context.injected(Verb::IbvDeregMr) {
            return Err(errno);
        }
        if self.domain.spoilt.load(Ordering::Relaxed) {
            return Err(EBUSY);
        }
        let key = self.head.lkey;
        let in_use = {
            let pairs = context.pairs.lock().unwrap_or_else(|error| error.into_inner());
            pairs.iter().any(|pair| pair.uses(key))
        };
        if in_use {
            context.fabric.device(context.device).mistake(Mistake::FreedOutOfOrder);
        }
        context.regions.write().unwrap_or_else(|error| error.into_inner()).remove(key);
        self.domain.regions.fetch_sub(1, Ordering::Relaxed);
        context.give(Resource::Regions);
        Ok(())
    }
}

/// Whether all of the range may be written. Where the system cannot be asked, it is believed.
fn is_writable(start: usize, len: usize) -> bool {
    #[cfg(target_os = "linux")]
    {
        let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return true };
        // Lines are sorted, such as "7f3c8000-7f3c9000 rw-p ...".
        let mut reached = start;
        for line in maps.lines() {
            let mut words = line.split_ascii_whitespace();
            let range = words.next().and_then(|word| word.split_once('-')).unwrap_or_default();
            let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            let (low, high) = (number(range.0), number(range.1));
            if low <= reached
                && reached < high
                && words.next().is_some_and(|rights| rights.as_bytes().get(1) == Some(&b'w'))
            {
                reached = high;
            }
        }
        reached >= start + len
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (start, len);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_good_for_its_range_and_domain_until_it_goes() {
        let mut table = Table::default();
        let first = table.insert(1, 1000, 100).unwrap();
        let second = table.insert(2, 5000, 100).unwrap();
        assert!(table.allows(1, first, 1000, 100));
        assert!(table.allows(2, second, 5050, 50));
        for (domain, key, start, len) in [
            (2, first, 1000, 100),
            (1, second, 5000, 1),
            (1, first, 999, 1),
            (1, first, 1000, 101),
            (1, first, 1001, usize::MAX),
            (1, 0, 1000, 1),
        ] {
            assert!(!table.allows(domain, key, start, len));
        }
        table.remove(first);
        assert!(!table.allows(1, first, 1000, 100));
        let third = table.insert(1, 1000, 100).unwrap();
        assert_ne!(first, third, "a key is not used again at once");
    }

    #[test]
    fn read_only_memory_is_known() {
        let writable = [0_u8; 100];
        assert!(is_writable(writable.as_ptr().addr(), writable.len()));
        static CONSTANT: [u8; 64] = [7; 64];
        assert_eq!(is_writable(CONSTANT.as_ptr().addr(), CONSTANT.len()), !cfg!(target_os = "linux"));
    }
}
