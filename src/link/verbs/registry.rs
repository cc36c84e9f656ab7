//! Memory of the user that the devices of a group may read and write themselves.
//!
//! A group has one registry. Whoever owns memory enters it here, and it is registered with every device of the group; what of a
//! message lies in such memory can be sent from there, and received there, without a copy. Links look ranges up by their
//! address, so that a message says nothing of how its buffer came to be.
//!
//! Where drivers take whole pages, those that are only in part of what was entered are left out: what else is on them is somebody
//! else's. The few bytes there are copied.

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use raccl_sys::{MemoryRegion, ProtectionDomain, Provider, Span};

use super::hold::Hold;

/// What Apple's driver wants regions to begin and end at.
const PAGE: usize = 16 << 10;
/// No region may reach from one of these into the next on Apple's driver.
const BANK: usize = 4 << 30;

/// All memory that was entered.
pub(crate) struct Registry {
    books: RwLock<Books>,
    /// Held while a region is made, so that none is made once the devices are let go.
    entering: Mutex<()>,
}

struct Books {
    /// By device; none where the group has no cables, or not any more.
    domains: Vec<ProtectionDomain>,
    ranges: Vec<Range>,
    next: u64,
    _hold: Option<Arc<Hold>>,
}

struct Range {
    id: u64,
    start: usize,
    end: usize,
    /// By device; those of one follow one another.
    regions: Vec<Vec<MemoryRegion>>,
}

/// Memory that is entered as long as this lives.
pub(crate) struct Entry {
    registry: Arc<Registry>,
    id: u64,
}

impl Registry {
    /// One for a group without devices, where nothing has to be registered.
    pub(crate) fn without_devices() -> Registry {
        Registry::new(Vec::new(), None)
    }

    /// One for these devices, which are known by their place in the list.
    pub(super) fn new(domains: Vec<ProtectionDomain>, hold: Option<Arc<Hold>>) -> Registry {
        let books = Books { domains, ranges: Vec::new(), next: 0, _hold: hold };
        Registry { books: RwLock::new(books), entering: Mutex::new(()) }
    }

    /// Whether there are devices to register memory with.
    pub(crate) fn has_devices(&self) -> bool {
        !self.books.read().domains.is_empty()
    }

    /// Enters memory and registers it with all devices.
    ///
    /// # Safety
    /// The memory stays mapped and writable until the entry is dropped, and it is not dropped while a link sends from there or
    /// receives there.
    pub(crate) unsafe fn enter(
        self: &Arc<Self>,
        start: *mut u8,
        bytes: usize,
    ) -> Result<Entry, raccl_sys::Error> {
        let _entering = self.entering.lock();
        let domains = self.books.read().domains.clone();
        let mut regions = Vec::with_capacity(domains.len());
        for domain in &domains {
            let mut of_device = Vec::new();
            for (start, bytes) in pieces(domain.context().provider(), start, bytes) {
                // SAFETY: the caller keeps the memory mapped and writable; it is covered by a work request only during calls that
                // it was lent to.
                of_device.push(unsafe { domain.register(start, bytes) }?);
            }
            regions.push(of_device);
        }
        drop(domains);
        let mut books = self.books.write();
        let id = books.next;
        books.next += 1;
        books.ranges.push(Range { id, start: start.addr(), end: start.addr() + bytes, regions });
        Ok(Entry { registry: Arc::clone(self), id })
    }

    /// These bytes as a device knows them, if they were entered in one piece.
    pub(super) fn find(&self, device: usize, start: *const u8, bytes: usize) -> Option<Span> {
        let (start, end) = (start.addr(), start.addr().checked_add(bytes)?);
        let books = self.books.read();
        let range = books.ranges.iter().rev().find(|range| range.start <= start && end <= range.end)?;
        let within = |region: &&MemoryRegion| {
            let first = region.as_ptr().addr();
            first <= start && end <= first + region.len()
        };
        let region = range.regions.get(device)?.iter().find(within)?;
        region.span(start - region.as_ptr().addr(), bytes).ok()
    }

    /// Whether devices know a part of what was entered.
    fn has_regions(&self, id: u64) -> bool {
        let books = self.books.read();
        let range = books.ranges.iter().find(|range| range.id == id);
        range.is_some_and(|range| range.regions.iter().any(|regions| !regions.is_empty()))
    }

    /// Whether a message from there can be sent without a copy.
    pub(crate) fn knows(&self, start: *const u8, bytes: usize) -> bool {
        let (start, end) = (start.addr(), start.addr().saturating_add(bytes));
        let books = self.books.read();
        !books.domains.is_empty() && books.ranges.iter().any(|range| range.start <= start && end <= range.end)
    }

    /// Lets go of all devices, after the last queue pair: memory stays what it is, and is found no more.
    pub(crate) fn release(&self) {
        let _entering = self.entering.lock();
        let mut books = self.books.write();
        books.ranges.clear();
        books.domains.clear();
        books._hold = None;
    }
}

impl Entry {
    /// Whether devices know it: not where it has no whole page that the driver wants, and not after the group.
    pub(crate) fn has_regions(&self) -> bool {
        self.registry.has_regions(self.id)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut books = self.registry.books.write();
        let gone = books.ranges.iter().position(|range| range.id == self.id);
        let range = gone.map(|at| books.ranges.swap_remove(at));
        // The driver may take its time.
        drop(books);
        drop(range);
    }
}

/// The regions that memory is registered as: whole pages, and none in two banks, where the driver is Apple's; none if that is
/// nothing.
fn pieces(provider: Provider, start: *mut u8, bytes: usize) -> Vec<(*mut u8, usize)> {
    if provider != Provider::Apple {
        return vec![(start, bytes)];
    }
    let first = start.addr().next_multiple_of(PAGE);
    let end = (start.addr() + bytes) / PAGE * PAGE;
    let mut pieces = Vec::new();
    let mut at = first;
    while at < end {
        let next = (at - at % BANK).saturating_add(BANK).min(end);
        pieces.push((start.with_addr(at), next - at));
        at = next;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn places(provider: Provider, start: usize, bytes: usize) -> Vec<(usize, usize)> {
        let pieces = pieces(provider, ptr::without_provenance_mut(start), bytes);
        pieces.into_iter().map(|(start, bytes)| (start.addr(), bytes)).collect()
    }

    #[test]
    fn apples_regions_are_whole_pages_of_one_bank() {
        assert_eq!(places(Provider::Apple, 5 * PAGE, PAGE), [(5 * PAGE, PAGE)]);
        assert_eq!(places(Provider::Apple, 5 * PAGE + 7, 3), []);
        assert_eq!(places(Provider::Apple, 6 * PAGE - 1, PAGE), []);
        assert_eq!(places(Provider::Apple, 6 * PAGE - 1, 2 * PAGE), [(6 * PAGE, PAGE)]);
        let across = places(Provider::Apple, 2 * BANK - PAGE - 100, BANK + 3 * PAGE);
        assert_eq!(across, [(2 * BANK - PAGE, PAGE), (2 * BANK, BANK), (3 * BANK, PAGE)]);
    }

    #[test]
    fn linux_takes_memory_as_it_is() {
        assert_eq!(places(Provider::Linux, 2 * BANK - 100, 200), [(2 * BANK - 100, 200)]);
    }

    #[test]
    fn without_devices_everything_can_be_entered_and_nothing_is_found() {
        let registry = Arc::new(Registry::without_devices());
        let mut memory = [0_u8; 64];
        // SAFETY: the memory outlives the entry, and there is no link.
        let entry = unsafe { registry.enter(memory.as_mut_ptr(), 64) }.unwrap();
        assert!(!registry.has_devices() && !entry.has_regions());
        assert!(!registry.knows(memory.as_ptr(), 64));
        assert!(registry.find(0, memory.as_ptr(), 64).is_none());
        drop(entry);
        registry.release();
    }
}
