//! Files that several processes have in memory.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;

/// Types that several processes may share: made of atomics alone, and good when all bytes are zero.
///
/// # Safety
///
/// Every byte pattern is a value, and every field that is not padding is an atomic or an array of such.
pub(crate) unsafe trait Shared {}

/// A file in memory, writable, shared with whoever maps it too.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that no thread owns; access to it is by atomics or raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Makes a file of `len` zero bytes, which must not exist yet, and maps it. Bytes take no memory until written.
    pub(crate) fn create(path: &Path, len: usize) -> io::Result<Mapping> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(len as u64)?;
        Mapping::of(&file, len)
    }

    /// Maps a file that exists.
    pub(crate) fn open(path: &Path) -> io::Result<Mapping> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if len == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        Mapping::of(&file, len)
    }

    fn of(file: &File, len: usize) -> io::Result<Mapping> {
        // SAFETY: asks for a new mapping at a place of the system's choice; nothing that exists is touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Mapping { start, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The `T` at `offset`.
    ///
    /// Panics when it does not lie within the file, or not at its alignment: offsets are computed here, and a file's
    /// length is checked when it is opened.
    pub(crate) fn at<T: Shared>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.len);
        // SAFETY: the offset was just checked to lie within the mapping.
        let place = unsafe { self.start.add(offset) };
        // SAFETY: mappings begin at a page, so the place is aligned; it is mapped as long as `self` lives; any bytes
        // are a `T`, and what others write at the same time they write to atomics.
        unsafe { place.cast::<T>().as_ref() }
    }

    /// The address of `offset`, at which `len` bytes lie within the file.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: the offset was just checked to lie within the mapping.
        unsafe { self.start.add(offset) }.as_ptr()
    }

    /// Has memory for a part of the file now, so that nobody waits for it later. Fails where there is none; systems
    /// that cannot be asked for it give it at the first touch.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        {
            let page = 4096;
            let start = offset / page * page;
            let len = len + (offset - start);
            // SAFETY: the range was checked to lie within the mapping; this advice changes no bytes.
            let status =
                unsafe { libc::madvise(self.bytes(start, len).cast(), len, libc::MADV_POPULATE_WRITE) };
            let error = io::Error::last_os_error();
            if status != 0 && error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error);
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, len);
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the whole of one mapping, to which nobody keeps a reference.
        let status = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(status, 0, "unmapping a mapping cannot fail");
    }
}

/// Nanoseconds of the clock that all processes of a machine share and that never goes back.
#[inline]
pub(crate) fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable for the call.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    debug_assert_eq!(status, 0, "this clock exists everywhere");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
