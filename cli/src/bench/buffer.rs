//! Memory for messages, at the beginning of a page as applications have it.

use anyhow::{Context, anyhow};
use raccl::Communicator;

/// Pages of the largest size that systems use for ordinary memory.
const PAGE: usize = 16 << 10;

/// Bytes that begin at a page.
pub(super) struct Buffer {
    storage: Storage,
    start: usize,
    length: usize,
}

enum Storage {
    Ordinary(Vec<u8>),
    /// RDMA devices know it.
    Registered(raccl::Buffer<u8>),
}

impl Buffer {
    /// Zeros, all of them in memory already.
    pub(super) fn new(length: usize) -> anyhow::Result<Self> {
        let total = length.checked_add(PAGE).ok_or_else(|| anyhow!("{length} bytes are too many"))?;
        let mut storage: Vec<u8> = Vec::new();
        storage.try_reserve_exact(total).with_context(|| format!("no memory for {length} bytes"))?;
        // This writes them, or the first call would pay for it.
        storage.resize(total, 0);
        let start = storage.as_ptr().align_offset(PAGE).min(PAGE);
        Ok(Self { storage: Storage::Ordinary(storage), start, length })
    }

    /// The same, known to the devices of a group.
    pub(super) fn registered(comm: &Communicator, length: usize) -> anyhow::Result<Self> {
        let mut storage = comm.allocate(length)?;
        storage.fill(0);
        Ok(Self { storage: Storage::Registered(storage), start: 0, length })
    }

    /// The first bytes.
    pub(super) fn first(&self, length: usize) -> &[u8] {
        let storage = match &self.storage {
            Storage::Ordinary(storage) => &storage[..],
            Storage::Registered(storage) => &storage[..],
        };
        &storage[self.start..self.start + length.min(self.length)]
    }

    /// The first bytes, to be written.
    pub(super) fn first_mut(&mut self, length: usize) -> &mut [u8] {
        let storage = match &mut self.storage {
            Storage::Ordinary(storage) => &mut storage[..],
            Storage::Registered(storage) => &mut storage[..],
        };
        &mut storage[self.start..self.start + length.min(self.length)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_at_a_page_and_refuse_what_no_machine_has() {
        let comm = raccl::Config::new().connect().expect("a group of one");
        for mut buffer in
            [Buffer::new(100_000).expect("memory"), Buffer::registered(&comm, 100_000).expect("memory")]
        {
            assert_eq!(buffer.first(1).as_ptr() as usize % PAGE, 0);
            assert_eq!(buffer.first_mut(100_000).len(), 100_000);
        }
        for length in [usize::MAX - 5, usize::MAX / 4] {
            assert!(Buffer::new(length).is_err());
            assert!(Buffer::registered(&comm, length).is_err());
        }
    }
}
