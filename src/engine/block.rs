//! Uninitialised, cache-line aligned memory for landings and scratch, kept for the next operation.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    ptr::NonNull,
};

const ALIGN: usize = 64;

/// A piece of memory that holds no initialised bytes as far as Rust knows; it is only used through raw pointers.
pub(crate) struct Block {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block owns its memory like a `Box`, and nothing in it is tied to a thread.
unsafe impl Send for Block {}

impl Block {
    pub(crate) fn empty() -> Block {
        Block { base: NonNull::dangling(), bytes: 0 }
    }

    /// `bytes` bytes, aligned to 64.
    pub(crate) fn new(bytes: usize) -> Block {
        let Some(layout) = Block::layout(bytes) else { return Block::empty() };
        // SAFETY: the layout is not empty (`Block::layout`).
        let base = unsafe { alloc(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        Block { base, bytes }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte; dangling if the block is empty.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    fn layout(bytes: usize) -> Option<Layout> {
        if bytes == 0 { None } else { Layout::from_size_align(bytes, ALIGN).ok() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(layout) = Block::layout(self.bytes) {
            // SAFETY: allocated in `Block::new` with this very layout.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
    }
}

/// Blocks between two uses, at most [`Pool::LIMIT`] bytes of them.
#[derive(Default)]
pub(crate) struct Pool {
    spare: Vec<Block>,
    bytes: usize,
}

impl Pool {
    const LIMIT: usize = 256 << 20;
    const COUNT: usize = 32;

    /// The smallest spare block that is large enough, or a new one.
    pub(crate) fn take(&mut self, bytes: usize) -> Block {
        if bytes == 0 {
            return Block::empty();
        }
        let fit = (0..self.spare.len())
            .filter(|&i| self.spare[i].bytes() >= bytes)
            .min_by_key(|&i| self.spare[i].bytes());
        match fit {
            Some(i) => {
                let block = self.spare.swap_remove(i);
                self.bytes -= block.bytes();
                block
            }
            None => Block::new(bytes.saturating_add(bytes / 8).next_multiple_of(4096)),
        }
    }

    pub(crate) fn give(&mut self, block: Block) {
        if block.bytes() == 0 || self.bytes + block.bytes() > Pool::LIMIT {
            return;
        }
        if self.spare.len() == Pool::COUNT {
            let smallest = (0..self.spare.len()).min_by_key(|&i| self.spare[i].bytes()).unwrap_or(0);
            self.bytes -= self.spare.swap_remove(smallest).bytes();
        }
        self.bytes += block.bytes();
        self.spare.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_reused_when_it_is_large_enough() {
        let mut pool = Pool::default();
        let block = pool.take(10_000);
        assert!(block.bytes() >= 10_000);
        let pointer = block.base();
        assert_eq!(pointer as usize % 64, 0);
        pool.give(block);
        assert_eq!(pool.take(5_000).base(), pointer);
        assert_ne!(pool.take(5_000).bytes(), 0);
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut pool = Pool::default();
        for _ in 0..200 {
            pool.give(Block::new(4 << 20));
        }
        assert!(pool.bytes <= Pool::LIMIT && pool.spare.len() <= Pool::COUNT);
    }
}
