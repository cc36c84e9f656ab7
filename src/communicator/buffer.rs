//! Memory that devices read and write themselves, so that large messages are not copied.

use std::{
    alloc::{self, Layout},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
};

use super::Communicator;
use crate::{
    error::{Cause, Error, Result},
    link::verbs::Entry,
    reduce::Element,
};

/// What every device is content with: a page of 16 KiB, as Macs have.
const PAGE: usize = 16 << 10;

impl Communicator {
    /// Allocates `length` elements of zeroed memory that the devices of the group know, so that they send from there and receive
    /// there themselves.
    ///
    /// Any operation takes it as it takes any other slice. What is large enough (twice
    /// [`verbs_bulk`](crate::Config::verbs_bulk)'s size, by default 128 KiB) goes out without a copy. What comes in is copied out of
    /// the receives that are posted ahead (by default half a megabyte for each cable), and the rest of the message goes straight to
    /// its place: messages, and collectives that only move and do so directly ([`explain`](Communicator::explain) says `direct`), go in
    /// pieces of 8 MiB. What a reduction receives it has to read and fold in any case. Each side saves its own copies, and a sender
    /// without such memory has its receiver copy too.
    ///
    /// Over TCP and in memory it is ordinary memory, and also with [`verbs_checksum`](crate::Config::verbs_checksum) and
    /// [`degrade`](crate::Config::degrade), which have to look at what comes or to keep what goes: see
    /// [`Buffer::is_registered`]. Devices have few regions, Apple's a hundred: allocate few large buffers and keep them. A buffer may
    /// outlive its group; in a later one (after [`shrink`](Communicator::shrink), say) it is ordinary memory.
    ///
    /// # Errors
    /// [`Error::Registration`] if there is no memory, or if a device cannot take more. The communicator stays usable.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut activations = comm.allocate::<f32>(1 << 20)?;
    /// activations[0] = 1.0;
    /// comm.all_reduce(&mut activations, raccl::Sum)?;
    /// assert_eq!(activations[0], 1.0);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn allocate<T: Element>(&self, length: usize) -> Result<Buffer<T>> {
        let memory: Memory<T> = Memory::zeroed(length).ok_or_else(|| Error::Registration {
            rank: self.rank(),
            bytes: length.saturating_mul(size_of::<T>()),
            reason: "there is no memory".to_owned(),
            source: None,
        })?;
        // SAFETY: the buffer drops its registration first, and lends its memory to calls only while it is borrowed.
        let registration = unsafe { self.register(memory.start.as_ptr().cast(), memory.whole_pages()) }?;
        Ok(Buffer { registration, memory })
    }

    /// Lets the devices of the group know `memory` while `body` runs; see [`allocate`](Communicator::allocate) for what that does.
    ///
    /// Registering costs time for each page, so it pays for what is sent or received many times.
    ///
    /// # Errors
    /// [`Error::Registration`] if a device cannot take more; `body` has not run then.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut weights = vec![0.5_f32; 1 << 16];
    /// comm.with_registered(&mut weights, |weights| {
    ///     for _step in 0..10 {
    ///         comm.all_reduce(weights, raccl::Avg)?;
    ///     }
    ///     Ok::<(), raccl::Error>(())
    /// })??;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn with_registered<T: Element, R>(
        &self,
        memory: &mut [T],
        body: impl FnOnce(&mut [T]) -> R,
    ) -> Result<R> {
        // SAFETY: the memory is borrowed until this returns, which drops the registration first, and calls that it is lent to end
        // before `body` does.
        let _registration = unsafe { self.register(memory.as_mut_ptr().cast(), size_of_val(memory)) }?;
        Ok(body(memory))
    }

    /// Lets the devices of the group know memory that belongs to somebody else, a framework's tensor, say; see
    /// [`allocate`](Communicator::allocate) for what that does. Slices of it can then be passed to any operation.
    ///
    /// # Safety
    /// The `bytes` bytes at `start` stay mapped and writable until the registration is dropped, and it is not dropped while an
    /// operation that was given any of them is running.
    ///
    /// # Errors
    /// [`Error::Registration`] if a device cannot take more.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut tensor = vec![0_u8; 1 << 20];
    /// // SAFETY: the registration is dropped before the tensor, and nothing runs then.
    /// let registration = unsafe { comm.register(tensor.as_mut_ptr(), tensor.len()) }?;
    /// comm.broadcast(&mut tensor[..1000], 0)?;
    /// drop(registration);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Registration> {
        let registry = self.engine().registry();
        if bytes == 0 || !registry.has_devices() {
            return Ok(Registration { entry: None });
        }
        // SAFETY: the caller's promise is the same.
        match unsafe { registry.enter(start, bytes) } {
            Ok(entry) => Ok(Registration { entry: Some(entry) }),
            Err(source) => Err(Error::Registration {
                rank: self.rank(),
                bytes,
                reason: source.to_string(),
                source: Some(Cause::new(source)),
            }),
        }
    }

    /// How many bytes this rank has sent from where they were, and received where they were wanted, without a copy, since the group
    /// was formed.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// assert_eq!(comm.uncopied(), raccl::Uncopied { sent: 0, received: 0 }); // there is nobody to send to
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn uncopied(&self) -> Uncopied {
        let (sent, received) = self.engine().uncopied();
        Uncopied { sent, received }
    }
}

/// Bytes that were not copied on their way; see [`Communicator::uncopied`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Uncopied {
    /// Sent by a device from the caller's memory.
    pub sent: u64,
    /// Put into the caller's memory by a device.
    pub received: u64,
}

/// Memory that the devices of a group know; see [`Communicator::allocate`]. A slice in all that it can do.
pub struct Buffer<T: Element> {
    /// Dropped before the memory.
    registration: Registration,
    memory: Memory<T>,
}

impl<T: Element> Buffer<T> {
    /// Whether some device knows it.
    ///
    /// ```
    /// let comm = raccl::Config::new().connect()?;
    /// assert!(!comm.allocate::<u8>(100)?.is_registered()); // a group of one needs no devices
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn is_registered(&self) -> bool {
        self.registration.is_registered()
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let Memory { start, length } = &self.memory;
        // SAFETY: so many elements are there, zeroed in the beginning, which is a value of every element type, and nobody writes
        // to them while they are borrowed.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), *length) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let Memory { start, length } = &self.memory;
        // SAFETY: as above, and nobody else has them while they are borrowed.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), *length) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Memory of somebody else that the devices of a group know as long as this lives; see [`Communicator::register`].
pub struct Registration {
    entry: Option<Entry>,
}

impl Registration {
    /// Whether some device knows it: not where the group has no cables, copies all the same or has ended, and not if it has no page
    /// of its own, where drivers want whole pages.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut memory = [0_u8; 64];
    /// // SAFETY: it is dropped at once.
    /// assert!(!unsafe { comm.register(memory.as_mut_ptr(), 64) }?.is_registered());
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn is_registered(&self) -> bool {
        self.entry.as_ref().is_some_and(Entry::has_regions)
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("is_registered", &self.is_registered()).finish()
    }
}

/// Whole pages.
struct Memory<T> {
    start: NonNull<T>,
    length: usize,
}

// SAFETY: it owns its elements, as a `Box<[T]>` does.
unsafe impl<T: Send> Send for Memory<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Memory<T> {}

impl<T: Element> Memory<T> {
    fn zeroed(length: usize) -> Option<Memory<T>> {
        let layout = layout::<T>(length)?;
        if layout.size() == 0 {
            return Some(Memory { start: NonNull::dangling(), length });
        }
        // SAFETY: the size is not 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        Some(Memory { start: NonNull::new(start.cast())?, length })
    }

    /// Bytes of its pages, the last of which is its own as well.
    fn whole_pages(&self) -> usize {
        layout::<T>(self.length).map_or(0, |layout| layout.size())
    }
}

impl<T> Drop for Memory<T> {
    fn drop(&mut self) {
        match layout::<T>(self.length) {
            // SAFETY: allocated with the same layout, and nobody has a reference any more.
            Some(layout) if layout.size() > 0 => unsafe {
                alloc::dealloc(self.start.as_ptr().cast(), layout)
            },
            _ => {}
        }
    }
}

/// So much that nothing else is on the same pages.
fn layout<T>(length: usize) -> Option<Layout> {
    let bytes = length.checked_mul(size_of::<T>())?.checked_next_multiple_of(PAGE)?;
    Layout::from_size_align(bytes, PAGE.max(align_of::<T>())).ok()
}

#[cfg(test)]
mod tests {
    use crate::{Config, Error};

    #[test]
    fn a_buffer_is_zeroed_whole_pages() {
        let comm = Config::new().connect().unwrap();
        for length in [0, 1, 4096, 100_000] {
            let mut buffer = comm.allocate::<u32>(length).unwrap();
            assert_eq!(buffer.len(), length);
            assert!(buffer.iter().all(|&element| element == 0));
            assert!(length == 0 || buffer.as_ptr().addr().is_multiple_of(super::PAGE));
            buffer.fill(7);
            assert!(buffer.iter().all(|&element| element == 7));
        }
        assert_eq!(format!("{:?}", comm.allocate::<u8>(2).unwrap()), "[0, 0]");
    }

    #[test]
    fn more_than_there_can_be_is_refused() {
        let comm = Config::new().connect().unwrap();
        for length in [usize::MAX, usize::MAX / 8, isize::MAX as usize / 8] {
            let error = comm.allocate::<u64>(length).unwrap_err();
            assert!(matches!(error, Error::Registration { rank: 0, .. }), "{error}");
        }
        comm.barrier().unwrap();
    }
}
