//! The pieces of a write, taken from the front.

use crate::os::IoVec;

/// What is still to be written.
pub(super) struct Source<'a> {
    pieces: &'a [IoVec],
    /// Where in the first piece the rest begins.
    at: usize,
    pub(super) left: usize,
}

impl<'a> Source<'a> {
    pub(super) fn new(pieces: &'a [IoVec]) -> Source<'a> {
        Source { pieces, at: 0, left: pieces.iter().map(|piece| piece.iov_len).sum() }
    }

    /// The rest of the first piece.
    pub(super) fn first(&self) -> Option<(*const u8, usize)> {
        let piece = self.pieces.first()?;
        let start = piece.iov_base.cast::<u8>().cast_const();
        Some((start.wrapping_add(self.at), piece.iov_len - self.at))
    }

    /// The first piece of which so much is left: how many bytes are before it, where it begins, and how long it is.
    pub(super) fn find_longer(&self, bytes: usize) -> Option<(usize, *const u8, usize)> {
        let (start, length) = self.first()?;
        if length >= bytes {
            return Some((0, start, length));
        }
        let mut before = length;
        for piece in &self.pieces[1..] {
            if piece.iov_len >= bytes {
                return Some((before, piece.iov_base.cast::<u8>().cast_const(), piece.iov_len));
            }
            before += piece.iov_len;
        }
        None
    }

    /// Passes over the next `bytes` bytes, which are all of the first piece.
    pub(super) fn skip(&mut self, bytes: usize) {
        self.at += bytes;
        self.left -= bytes;
        if self.pieces.first().is_some_and(|piece| piece.iov_len == self.at) {
            self.pieces = &self.pieces[1..];
            self.at = 0;
        }
    }

    /// Copies the next `bytes` bytes, of which there are so many.
    ///
    /// # Safety
    /// The pieces are valid for reads, and `to` for writes of `bytes` bytes that are in no piece.
    pub(super) unsafe fn copy(&mut self, mut to: *mut u8, bytes: usize) {
        let mut missing = bytes;
        self.left -= bytes;
        while missing > 0
            && let Some(piece) = self.pieces.first()
        {
            let count = missing.min(piece.iov_len - self.at);
            let from = piece.iov_base.cast::<u8>().cast_const().wrapping_add(self.at);
            // SAFETY: `at + count` is within the piece, and the caller vouches for the target.
            unsafe { std::ptr::copy_nonoverlapping(from, to, count) };
            to = to.wrapping_add(count);
            missing -= count;
            self.at += count;
            if self.at == piece.iov_len {
                self.pieces = &self.pieces[1..];
                self.at = 0;
            }
        }
    }
}
