//! Error numbers by the name that the provider's system gives them.

use std::fmt;

use crate::loader::Provider;

/// An error number of a verbs call, always positive, with the system whose numbers it is one of.
///
/// The same number means different things on macOS and Linux (60 is `ETIMEDOUT` on one and `ENOSTR` on the other),
/// and a driver in software may speak the other system's.
///
/// ```
/// use raccl_sys::{Errno, Provider};
///
/// let errno = Errno::new(Provider::Apple, -96);
/// assert_eq!(errno.to_string(), "errno 96 ENODATA");
/// assert_eq!(errno.number(), 96);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno {
    provider: Provider,
    number: i32,
}

impl Errno {
    /// The error number `number` of a provider. Some calls return it negated: the sign is dropped.
    pub fn new(provider: Provider, number: i32) -> Self {
        Errno { provider, number: number.saturating_abs() }
    }

    /// What a call that returned `status` meant: the number itself, or what it left in the thread's `errno`.
    pub(crate) fn of_status(provider: Provider, status: i32) -> Self {
        // Where -1 means "look at errno" and where it is a negated EPERM cannot be told apart by the value alone.
        if status == -1 {
            Errno::last(provider).unwrap_or(Errno::new(provider, 1))
        } else {
            Errno::new(provider, status)
        }
    }

    /// What the thread's `errno` holds, for calls that return a null pointer; `None` where the call left it at 0.
    pub(crate) fn last(provider: Provider) -> Option<Self> {
        match std::io::Error::last_os_error().raw_os_error() {
            None | Some(0) => None,
            Some(number) => Some(Errno::new(provider, number)),
        }
    }

    /// The number, positive.
    pub fn number(self) -> i32 {
        self.number
    }

    /// The name, where it is one that verbs calls are known to give.
    pub fn name(self) -> Option<&'static str> {
        let system = match self.provider {
            Provider::Apple => DARWIN,
            Provider::Linux => LINUX,
        };
        let find = |table: &[(i32, &'static str)]| {
            table.iter().find(|entry| entry.0 == self.number).map(|entry| entry.1)
        };
        find(COMMON).or_else(|| find(system))
    }

    /// Whether it is the error of that name, whatever its number.
    pub fn is(self, name: &str) -> bool {
        self.name() == Some(name)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "errno {} {name}", self.number),
            None => write!(f, "errno {}", self.number),
        }
    }
}

impl std::error::Error for Errno {}

/// Sets the thread's `errno` to 0, so that what a failing call leaves there is its own.
pub(crate) fn clear() {
    // SAFETY: the function returns a pointer to this thread's `errno`, valid for the thread's life.
    let errno = unsafe { location() };
    // SAFETY: as above; no other thread has this pointer.
    unsafe { *errno = 0 };
}

#[cfg(target_os = "linux")]
use libc::__errno_location as location;
#[cfg(target_vendor = "apple")]
use libc::__error as location;

/// Numbers on which both systems agree.
const COMMON: &[(i32, &str)] = &[
    (1, "EPERM"),
    (2, "ENOENT"),
    (4, "EINTR"),
    (5, "EIO"),
    (6, "ENXIO"),
    (9, "EBADF"),
    (12, "ENOMEM"),
    (13, "EACCES"),
    (14, "EFAULT"),
    (16, "EBUSY"),
    (17, "EEXIST"),
    (19, "ENODEV"),
    (22, "EINVAL"),
    (24, "EMFILE"),
    (28, "ENOSPC"),
    (34, "ERANGE"),
];

const DARWIN: &[(i32, &str)] = &[
    (35, "EAGAIN"),
    (36, "EINPROGRESS"),
    (40, "EMSGSIZE"),
    (42, "ENOPROTOOPT"),
    (43, "EPROTONOSUPPORT"),
    (45, "ENOTSUP"),
    (48, "EADDRINUSE"),
    (49, "EADDRNOTAVAIL"),
    (50, "ENETDOWN"),
    (51, "ENETUNREACH"),
    (54, "ECONNRESET"),
    (55, "ENOBUFS"),
    (57, "ENOTCONN"),
    (60, "ETIMEDOUT"),
    (61, "ECONNREFUSED"),
    (64, "EHOSTDOWN"),
    (65, "EHOSTUNREACH"),
    (78, "ENOSYS"),
    (89, "ECANCELED"),
    (96, "ENODATA"),
    (100, "EPROTO"),
    (102, "EOPNOTSUPP"),
];

const LINUX: &[(i32, &str)] = &[
    (11, "EAGAIN"),
    (38, "ENOSYS"),
    (61, "ENODATA"),
    (71, "EPROTO"),
    (90, "EMSGSIZE"),
    (92, "ENOPROTOOPT"),
    (93, "EPROTONOSUPPORT"),
    (95, "EOPNOTSUPP"),
    (98, "EADDRINUSE"),
    (99, "EADDRNOTAVAIL"),
    (100, "ENETDOWN"),
    (101, "ENETUNREACH"),
    (104, "ECONNRESET"),
    (105, "ENOBUFS"),
    (107, "ENOTCONN"),
    (110, "ETIMEDOUT"),
    (111, "ECONNREFUSED"),
    (112, "EHOSTDOWN"),
    (113, "EHOSTUNREACH"),
    (115, "EINPROGRESS"),
    (125, "ECANCELED"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_has_the_name_of_its_own_system() {
        assert_eq!(Errno::new(Provider::Apple, 60).name(), Some("ETIMEDOUT"));
        assert_eq!(Errno::new(Provider::Linux, 60).name(), None);
        assert_eq!(Errno::new(Provider::Linux, 110).name(), Some("ETIMEDOUT"));
        assert_eq!(Errno::new(Provider::Apple, 61).name(), Some("ECONNREFUSED"));
        assert_eq!(Errno::new(Provider::Linux, 61).name(), Some("ENODATA"));
    }

    #[test]
    fn negated_numbers_are_the_same_error() {
        assert_eq!(Errno::of_status(Provider::Apple, -12), Errno::new(Provider::Apple, 12));
        assert_eq!(Errno::new(Provider::Apple, i32::MIN).number(), i32::MAX);
    }

    #[test]
    fn minus_one_means_the_threads_errno() {
        clear();
        assert!(Errno::of_status(Provider::Linux, -1).is("EPERM"));
        // SAFETY: closing a descriptor that cannot exist only sets `errno`.
        unsafe { libc::close(-1) };
        assert!(Errno::of_status(Provider::Linux, -1).is("EBADF"));
    }

    #[test]
    fn the_host_agrees_with_its_table() {
        let table = if cfg!(target_vendor = "apple") { DARWIN } else { LINUX };
        for (number, name) in [
            (libc::EAGAIN, "EAGAIN"),
            (libc::ENODATA, "ENODATA"),
            (libc::EOPNOTSUPP, "EOPNOTSUPP"),
            (libc::EADDRNOTAVAIL, "EADDRNOTAVAIL"),
            (libc::ETIMEDOUT, "ETIMEDOUT"),
            (libc::ECONNREFUSED, "ECONNREFUSED"),
            (libc::EHOSTUNREACH, "EHOSTUNREACH"),
            (libc::ENOBUFS, "ENOBUFS"),
            (libc::ENETDOWN, "ENETDOWN"),
        ] {
            assert!(table.contains(&(number, name)), "{name} is {number}");
        }
    }
}
