//! Copying a message and summing it up on the way, fast enough to do it always.
//!
//! The sum is Fletcher's, in eight lanes of 64 bits: `a` adds words, `b` adds the running `a`, so a changed word and
//! exchanged words both show. Lanes are independent, which lets the compiler use vector registers.

const LANES: usize = 8;
const BLOCK: usize = LANES * 8;
/// Copied and then summed while it is still in the nearest cache.
const PIECE: usize = 4096;

/// The sum of a message so far.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sum {
    a: [u64; LANES],
    b: [u64; LANES],
    /// What is left of the last block, at the end of a message.
    rest: u64,
}

impl Sum {
    /// Adds `len` bytes at `from`, and copies them to `to` unless it is null.
    ///
    /// All parts of a message but the last are multiples of 64 bytes long.
    ///
    /// # Safety
    ///
    /// The bytes at `from` can be read and those at `to` written, and the two do not overlap.
    pub(crate) unsafe fn add(&mut self, from: *const u8, to: *mut u8, len: usize) {
        let mut done = 0;
        while done < len {
            let piece = PIECE.min(len - done);
            // SAFETY: `done` is below `len`.
            let source = unsafe { from.add(done) };
            if !to.is_null() {
                // SAFETY: as above.
                let target = unsafe { to.add(done) };
                // SAFETY: the caller promises both ranges, of which these are parts.
                unsafe { std::ptr::copy_nonoverlapping(source, target, piece) };
            }
            // SAFETY: the caller promises the range, of which this is a part.
            unsafe { self.piece(source, piece) };
            done += piece;
        }
    }

    /// # Safety
    ///
    /// The `len` bytes at `from` can be read.
    unsafe fn piece(&mut self, from: *const u8, len: usize) {
        let blocks = len / BLOCK;
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the instructions, and the blocks are part of the range promised.
            unsafe { self.blocks_avx2(from, blocks) };
        } else {
            // SAFETY: the blocks are part of the range promised.
            unsafe { self.blocks(from, blocks) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the blocks are part of the range promised.
        unsafe {
            self.blocks(from, blocks)
        };
        for index in blocks * BLOCK..len {
            // SAFETY: `index` is below `len`.
            let byte = unsafe { from.add(index) };
            // SAFETY: as above.
            let byte = unsafe { byte.read() };
            self.rest = self.rest.rotate_left(9) ^ u64::from(byte).wrapping_add(1);
        }
    }

    /// # Safety
    ///
    /// As for [`Sum::blocks`], and the processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn blocks_avx2(&mut self, from: *const u8, blocks: usize) {
        // SAFETY: the caller keeps the same promise; inlined, it is compiled for these instructions.
        unsafe { self.blocks(from, blocks) };
    }

    /// # Safety
    ///
    /// `blocks` times 64 bytes at `from` can be read.
    #[inline(always)]
    unsafe fn blocks(&mut self, from: *const u8, blocks: usize) {
        let (mut a, mut b) = (self.a, self.b);
        for block in 0..blocks {
            // SAFETY: the block is one of those promised.
            let words = unsafe { from.add(block * BLOCK) };
            // SAFETY: as above; any bytes are integers, and the read asks for no alignment.
            let words = unsafe { words.cast::<[u64; LANES]>().read_unaligned() };
            for lane in 0..LANES {
                a[lane] = a[lane].wrapping_add(words[lane]);
                b[lane] = b[lane].wrapping_add(a[lane]);
            }
        }
        (self.a, self.b) = (a, b);
    }

    /// The sum as one number.
    pub(crate) fn value(&self) -> u64 {
        let mix = |sum: u64, word: &u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
        self.a.iter().chain(&self.b).fold(self.rest, mix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u64 {
        let mut sum = Sum::default();
        // SAFETY: the slice can be read.
        unsafe { sum.add(bytes.as_ptr(), std::ptr::null_mut(), bytes.len()) };
        sum.value()
    }

    #[test]
    fn every_changed_byte_shows() {
        for len in [1, 7, 63, 64, 65, 1000, 4096, 4097, 10_000] {
            let mut bytes: Vec<u8> = (0..len).map(|index| (index * 31 % 251) as u8).collect();
            let before = sum(&bytes);
            for index in (0..len).step_by(1 + len / 97) {
                bytes[index] ^= 0x40;
                assert_ne!(sum(&bytes), before, "byte {index} of {len}");
                bytes[index] ^= 0x40;
            }
            assert_eq!(sum(&bytes), before);
        }
    }

    #[test]
    fn exchanged_words_show() {
        let mut bytes = vec![0_u8; 256];
        bytes[0] = 1;
        bytes[64] = 2;
        let before = sum(&bytes);
        bytes.swap(0, 64);
        assert_ne!(sum(&bytes), before);
    }

    #[test]
    fn parts_give_the_sum_of_the_whole_and_are_copied() {
        let bytes: Vec<u8> = (0..9000_u32).map(|index| (index % 255) as u8).collect();
        let mut copy = vec![0_u8; bytes.len()];
        let mut parts = Sum::default();
        for (start, end) in [(0, 640), (640, 8832), (8832, 9000)] {
            let (from, to) = (&bytes[start..end], &mut copy[start..end]);
            // SAFETY: both slices are as long as the part.
            unsafe { parts.add(from.as_ptr(), to.as_mut_ptr(), from.len()) };
        }
        assert_eq!(parts.value(), sum(&bytes));
        assert_eq!(copy, bytes);
    }
}
