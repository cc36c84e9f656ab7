//! Who this process runs as.

/// The effective user id, which owns the files that this process makes.
pub(crate) fn effective_id() -> u32 {
    // SAFETY: geteuid takes nothing, touches no memory of ours and cannot fail (POSIX).
    unsafe { libc::geteuid() }
}
