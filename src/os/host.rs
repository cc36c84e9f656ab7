//! Which machine this is, and how much of it is ours.

use std::{
    hash::{BuildHasher, RandomState},
    sync::OnceLock,
};

/// Two processes that see the same value run on the same boot of the same machine and in the same network namespace. If that
/// cannot be told, the value is random and equal to nobody's.
pub(crate) fn host_id() -> u128 {
    static ID: OnceLock<u128> = OnceLock::new();
    *ID.get_or_init(|| identity().map_or_else(random, |parts| fnv1a(&parts)))
}

/// How many cores this process may use: its affinity and its control group's quota count. At least 1.
pub(crate) fn available_cores() -> usize {
    // An unknown number is treated as the least: the library then yields instead of spinning.
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The cores of [`available_cores`], a bit each, for comparison with those of other processes of the machine.
pub(crate) fn own_cores() -> Vec<u64> {
    first_bits(affinity(), available_cores())
}

/// The first `count` bits that are set, or the first `count` of all where nothing is known.
fn first_bits(set: Option<Vec<u64>>, count: usize) -> Vec<u64> {
    let mut set = set.unwrap_or_else(|| vec![!0; count.div_ceil(64)]);
    let mut left = count;
    for word in &mut set {
        while word.count_ones() as usize > left {
            *word &= !(1 << (63 - word.leading_zeros()));
        }
        left -= word.count_ones() as usize;
    }
    // The system's sets have room for many more cores than there are.
    while set.pop_if(|word| *word == 0).is_some() {}
    set
}

/// The cores that this thread may run on.
#[cfg(target_os = "linux")]
fn affinity() -> Option<Vec<u64>> {
    let mut words = [0_u64; size_of::<libc::cpu_set_t>() / 8];
    // SAFETY: the kernel writes at most so many bytes of bits into the array.
    let status = unsafe { libc::sched_getaffinity(0, size_of_val(&words), words.as_mut_ptr().cast()) };
    (status == 0).then(|| words.to_vec())
}

#[cfg(not(target_os = "linux"))]
fn affinity() -> Option<Vec<u64>> {
    None
}

/// What tells machines apart; `None` if something of it is missing.
#[cfg(target_os = "linux")]
fn identity() -> Option<[Vec<u8>; 3]> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    let host = std::fs::read("/proc/sys/kernel/hostname").ok()?;
    let network = std::fs::read_link("/proc/self/ns/net").ok()?;
    Some([boot, host, network.into_os_string().into_encoded_bytes()])
}

#[cfg(target_os = "macos")]
fn identity() -> Option<[Vec<u8>; 2]> {
    Some([sysctl(c"kern.bootsessionuuid")?, sysctl(c"kern.hostname")?])
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn identity() -> Option<[Vec<u8>; 0]> {
    None
}

/// A string from the kernel's table; `None` if it is not there or longer than any we ask for.
#[cfg(target_os = "macos")]
fn sysctl(name: &std::ffi::CStr) -> Option<Vec<u8>> {
    let mut value = vec![0u8; 1024];
    let mut length = value.len();
    // SAFETY: `value` is valid for writes of `length` bytes, and no new value is set.
    let status = unsafe {
        libc::sysctlbyname(name.as_ptr(), value.as_mut_ptr().cast(), &raw mut length, std::ptr::null_mut(), 0)
    };
    value.truncate(length);
    (status == 0 && length > 0).then_some(value)
}

/// FNV-1a with 128 bits: the same on every build, which the standard library's hash does not promise.
fn fnv1a(parts: &[Vec<u8>]) -> u128 {
    const OFFSET: u128 = 0x6c62272e07bb014262b821756295c58d;
    const PRIME: u128 = 0x0000000001000000000000000000013b;
    let step = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(PRIME);
    // The length in front keeps ("ab", "c") apart from ("a", "bc").
    let bytes =
        parts.iter().flat_map(|part| part.len().to_le_bytes().into_iter().chain(part.iter().copied()));
    bytes.fold(OFFSET, step)
}

fn random() -> u128 {
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    half() << 64 | half()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv1a_knows_where_one_part_ends() {
        assert_ne!(fnv1a(&[b"ab".to_vec(), b"c".to_vec()]), fnv1a(&[b"a".to_vec(), b"bc".to_vec()]));
        assert_eq!(fnv1a(&[]), 0x6c62272e07bb014262b821756295c58d);
    }

    #[test]
    fn a_machine_knows_itself() {
        assert!(identity().is_some());
        assert_eq!(host_id(), host_id());
        assert_eq!(host_id(), fnv1a(&identity().unwrap()));
    }

    #[test]
    fn unknown_machines_are_never_taken_for_the_same() {
        assert_ne!(random(), random());
    }

    #[test]
    fn there_is_a_core() {
        assert!(available_cores() >= 1);
        let bits: u32 = own_cores().iter().map(|word| word.count_ones()).sum();
        assert_eq!(bits as usize, available_cores());
    }

    #[test]
    fn a_quota_leaves_the_first_cores() {
        assert_eq!(first_bits(Some(vec![0b1011_0000, 0b11]), 4), [0b1011_0000, 0b1]);
        assert_eq!(first_bits(Some(vec![0b1011_0000, 0b11, 0]), 2), [0b0011_0000]);
        assert_eq!(first_bits(None, 65), [!0, 1]);
    }
}
