//! CRC-32C, for which processors have instructions.

/// The checksum of `bytes`, continued from `seed`: 0, or the checksum of what comes before.
pub(super) fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    // SAFETY: a slice is valid for reads of its length.
    unsafe { crc32c_raw(seed, bytes.as_ptr(), bytes.len()) }
}

/// The same of memory that others may write to.
///
/// # Safety
/// `bytes` is valid for reads of `length` bytes. That a device writes there meanwhile makes the result meaningless, no more.
pub(super) unsafe fn crc32c_raw(seed: u32, bytes: *const u8, length: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions, and the caller vouches for the memory.
        return unsafe { x86(seed, bytes, length) };
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("crc") {
        // SAFETY: as above.
        return unsafe { arm(seed, bytes, length) };
    }
    // SAFETY: the caller vouches for the memory.
    unsafe { by_table(seed, bytes, length) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn x86(seed: u32, mut bytes: *const u8, mut length: usize) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    let mut sum = u64::from(!seed);
    while length >= 8 {
        // SAFETY: eight bytes are left, by the caller's promise.
        let word = unsafe { bytes.cast::<u64>().read_unaligned() };
        sum = _mm_crc32_u64(sum, word);
        bytes = bytes.wrapping_add(8);
        length -= 8;
    }
    // The instruction leaves the upper half zero.
    let mut sum = sum as u32;
    for at in 0..length {
        // SAFETY: as above, one byte.
        sum = _mm_crc32_u8(sum, unsafe { bytes.wrapping_add(at).read() });
    }
    !sum
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "crc")]
unsafe fn arm(seed: u32, mut bytes: *const u8, mut length: usize) -> u32 {
    use std::arch::aarch64::{__crc32cb, __crc32cd};
    let mut sum = !seed;
    while length >= 8 {
        // SAFETY: eight bytes are left, by the caller's promise.
        let word = unsafe { bytes.cast::<u64>().read_unaligned() };
        sum = __crc32cd(sum, word);
        bytes = bytes.wrapping_add(8);
        length -= 8;
    }
    for at in 0..length {
        // SAFETY: as above, one byte.
        sum = __crc32cb(sum, unsafe { bytes.wrapping_add(at).read() });
    }
    !sum
}

unsafe fn by_table(seed: u32, bytes: *const u8, length: usize) -> u32 {
    let mut sum = !seed;
    for at in 0..length {
        // SAFETY: `at` is below the length that the caller vouches for.
        let byte = unsafe { bytes.wrapping_add(at).read() };
        sum = TABLE[usize::from(sum as u8 ^ byte)] ^ (sum >> 8);
    }
    !sum
}

/// What each byte does to the sum: the polynomial 0x1EDC6F41 with its bits reversed, as the instructions have it.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 { (sum >> 1) ^ 0x82F6_3B78 } else { sum >> 1 };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_sums_come_out() {
        // The check value of the algorithm's catalogue, and the examples of RFC 3720.
        assert_eq!(crc32c(0, b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(0, &[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(0, &[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(0, b""), 0);
    }

    proptest! {
        #[test]
        fn every_way_gives_the_same_and_can_be_continued(bytes: Vec<u8>, seed: u32, cut: prop::sample::Index) {
            // SAFETY: the bytes are a slice's.
            let table = unsafe { by_table(seed, bytes.as_ptr(), bytes.len()) };
            prop_assert_eq!(crc32c(seed, &bytes), table);
            let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
            prop_assert_eq!(crc32c(crc32c(seed, head), tail), table);
        }
    }
}
