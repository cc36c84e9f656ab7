//! Error numbers. They are Darwin's on every system, as the driver's messages would be.

pub(super) const ENOENT: i32 = 2;
pub(super) const EIO: i32 = 5;
pub(super) const ENOMEM: i32 = 12;
pub(super) const EACCES: i32 = 13;
pub(super) const EBUSY: i32 = 16;
pub(super) const EINVAL: i32 = 22;
pub(super) const ETIMEDOUT: i32 = 60;
pub(super) const ENODATA: i32 = 96;
pub(super) const EOPNOTSUPP: i32 = 102;

/// Sets the thread's `errno`.
pub(super) fn set_errno(number: i32) {
    #[cfg(target_os = "linux")]
    use libc::__errno_location as location;
    #[cfg(target_vendor = "apple")]
    use libc::__error as location;
    // SAFETY: the function returns a pointer to this thread's `errno`, valid for the thread's life.
    let errno = unsafe { location() };
    // SAFETY: as above; no other thread has this pointer.
    unsafe { *errno = number };
}
