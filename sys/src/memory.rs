//! Memory from the operating system as registration wants it.

use std::ptr;

use crate::error::Error;

/// Apple's page size, and a multiple of Linux's.
const PAGE: usize = 16 << 10;
/// A region has to lie within one of these, or Apple's driver mishandles it.
const BANK: usize = 4 << 30;

/// Zeroed memory that begins and ends at a page and lies within one bank of 4 GiB.
#[derive(Debug)]
pub(crate) struct Pages {
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory belongs to this object, which nothing ties to a thread.
unsafe impl Send for Pages {}
// SAFETY: through a shared reference only the address can be had.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `bytes`.
    pub(crate) fn map(bytes: usize) -> Result<Pages, Error> {
        let len =
            bytes.max(1).checked_next_multiple_of(PAGE).filter(|len| *len <= BANK).ok_or_else(|| {
                Error::Argument {
                    what: format!("a memory region of {bytes} bytes does not fit into 4 GiB; use several"),
                }
            })?;
        // Nearly always the first attempt lies well; where it does not, twice the length holds a stretch that does.
        let slack = PAGE;
        for reserve in [len + slack, 2 * len + slack] {
            let base = map(reserve)?;
            let low = base.next_multiple_of(PAGE);
            match within_bank(low, base + reserve, len) {
                Some(start) => {
                    unmap(base, start - base);
                    unmap(start + len, base + reserve - start - len);
                    let pages = Pages { start: ptr::with_exposed_provenance_mut(start), len };
                    keep_from_children(&pages).map_err(|source| Error::Memory { bytes, source })?;
                    return Ok(pages);
                }
                None => unmap(base, reserve),
            }
        }
        Err(Error::Argument { what: format!("no {len} bytes of address space lie within 4 GiB") })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        unmap(self.start.addr(), self.len);
    }
}

/// Where in `low..high` a stretch of `len` bytes lies within one bank. `low` is a multiple of the page.
fn within_bank(low: usize, high: usize, len: usize) -> Option<usize> {
    let fits = |start: usize| start / BANK == (start + len - 1) / BANK && start + len <= high;
    [low, low.next_multiple_of(BANK)].into_iter().find(|start| fits(*start))
}

fn map(bytes: usize) -> Result<usize, Error> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
    // SAFETY: asks for new memory at a place of the system's choice; nothing that exists is touched.
    let start =
        unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(Error::Memory { bytes, source: std::io::Error::last_os_error() });
    }
    Ok(start.expose_provenance())
}

/// Unmaps what `map` gave, or a part of it.
fn unmap(start: usize, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: the range is part of a mapping made here to which nobody has a pointer any more.
    let status = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), bytes) };
    debug_assert_eq!(status, 0, "unmapping a range that was mapped cannot fail");
}

/// Leaves the memory out of processes forked off: the device goes on writing to these pages, so they must not become
/// copies.
#[cfg(target_os = "linux")]
fn keep_from_children(pages: &Pages) -> std::io::Result<()> {
    // SAFETY: the range is a mapping of its own; the advice changes nothing in this process.
    let status = unsafe { libc::madvise(pages.start.cast(), pages.len, libc::MADV_DONTFORK) };
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// macOS has no such advice; a forked process has to call `exec`.
#[cfg(not(target_os = "linux"))]
fn keep_from_children(_: &Pages) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_aligned_zeroed_and_in_one_bank() {
        for bytes in [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 << 20] {
            let pages = Pages::map(bytes).expect("there is memory");
            let start = pages.as_ptr().addr();
            assert_eq!(start % PAGE, 0);
            assert_eq!(pages.len() % PAGE, 0);
            assert!(pages.len() >= bytes);
            assert_eq!(start / BANK, (start + pages.len() - 1) / BANK);
            // SAFETY: the last byte lies in the mapping.
            let last = unsafe { pages.as_ptr().add(pages.len() - 1) };
            // SAFETY: as above.
            assert_eq!(unsafe { last.read() }, 0);
        }
    }

    #[test]
    fn a_stretch_across_a_bank_is_moved_behind_its_start() {
        let len = 4 * PAGE;
        let low = BANK - 2 * PAGE;
        assert_eq!(within_bank(low, low + len + PAGE, len), None);
        assert_eq!(within_bank(low, low + 2 * len + PAGE, len), Some(BANK));
        assert_eq!(within_bank(BANK - len, BANK + len, len), Some(BANK - len));
    }

    #[test]
    fn more_than_a_bank_is_refused() {
        assert!(matches!(Pages::map(BANK + 1), Err(Error::Argument { .. })));
        assert!(matches!(Pages::map(usize::MAX), Err(Error::Argument { .. })));
    }
}
