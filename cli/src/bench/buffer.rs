//! Memory for messages, at the beginning of a page as applications have it.

use anyhow::{Context, anyhow};

/// Pages of the largest size that systems use for ordinary memory.
const PAGE: usize = 16 << 10;

/// Bytes that begin at a page.
pub(super) struct Buffer {
    storage: Vec<u8>,
    start: usize,
    length: usize,
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
        Ok(Self { storage, start, length })
    }

    /// The first bytes.
    pub(super) fn first(&self, length: usize) -> &[u8] {
        &self.storage[self.start..self.start + length.min(self.length)]
    }

    /// The first bytes, to be written.
    pub(super) fn first_mut(&mut self, length: usize) -> &mut [u8] {
        &mut self.storage[self.start..self.start + length.min(self.length)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_at_a_page_and_refuse_what_no_machine_has() {
        let mut buffer = Buffer::new(100_000).expect("memory");
        assert_eq!(buffer.first(1).as_ptr() as usize % PAGE, 0);
        assert_eq!(buffer.first_mut(100_000).len(), 100_000);
        assert!(Buffer::new(usize::MAX - 5).is_err());
        assert!(Buffer::new(usize::MAX / 4).is_err());
    }
}
