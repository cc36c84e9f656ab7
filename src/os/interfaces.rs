//! The addresses of this machine's network interfaces.

use std::{
    ffi::CStr,
    io,
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    ptr,
};

/// One address of one interface that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    /// The interface's name, such as `en5` or `eth0`.
    pub(crate) name: String,
    /// The address with port 0; a link-local IPv6 address has its scope.
    pub(crate) address: SocketAddr,
    /// Which bits of the address are those of its network.
    pub(crate) mask: Option<IpAddr>,
}

/// All IPv4 and IPv6 addresses of interfaces that are up, in the system's order.
pub(crate) fn list() -> io::Result<Vec<Interface>> {
    let mut found = Vec::new();
    each(|node, name| {
        let up = node.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
        if !up || node.ifa_addr.is_null() {
            return;
        }
        // SAFETY: not null, and a socket address of the list, which lives while it is walked.
        let family = unsafe { (*node.ifa_addr).sa_family };
        // SAFETY: a socket address of the same living list.
        let address = unsafe { socket_address(node.ifa_addr, family) };
        // The mask is of the address's family, whatever it says of itself on macOS.
        // SAFETY: null or a socket address of the same living list.
        let mask = unsafe { socket_address(node.ifa_netmask, family) };
        if let Some(address) = address {
            let (name, mask) = (name.to_string_lossy().into_owned(), mask.map(|mask| mask.ip()));
            found.push(Interface { name, address, mask });
        }
    })?;
    Ok(found)
}

/// Every interface, up or not, with its flags; once for each address it has.
#[cfg(target_vendor = "apple")]
pub(crate) fn flags() -> io::Result<Vec<(String, libc::c_uint)>> {
    let mut found = Vec::new();
    each(|node, name| found.push((name.to_string_lossy().into_owned(), node.ifa_flags)))?;
    Ok(found)
}

/// Calls `visit` with each entry of the system's list of addresses and the name of its interface.
fn each(mut visit: impl FnMut(&libc::ifaddrs, &CStr)) -> io::Result<()> {
    let mut head: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: getifaddrs writes one pointer to the given place, which lives through the call.
    let status = unsafe { libc::getifaddrs(&mut head) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    let list = List(head);
    let mut next = list.0;
    while !next.is_null() {
        // SAFETY: `next` is a node of the list, which getifaddrs made whole and which `list` keeps until the function ends.
        let node = unsafe { &*next };
        next = node.ifa_next;
        if node.ifa_name.is_null() {
            continue;
        }
        // SAFETY: `ifa_name` is not null and a C string in the same living list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) };
        visit(node, name);
    }
    Ok(())
}

/// The list of getifaddrs, freed when dropped.
struct List(*mut libc::ifaddrs);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a successful getifaddrs and is freed only here.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

/// The IPv4 or IPv6 address behind `address`, if `family` is one of these.
///
/// # Safety
/// `address` is null or points to a socket address, whose memory is as long as it says on macOS and as the family needs
/// elsewhere.
unsafe fn socket_address(address: *const libc::sockaddr, family: libc::sa_family_t) -> Option<SocketAddr> {
    if address.is_null() {
        return None;
    }
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the caller's promise; every bit pattern is a sockaddr_in.
            let v4: libc::sockaddr_in = unsafe { copy(address) };
            Some(SocketAddrV4::new(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)), 0).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the caller's promise; every bit pattern is a sockaddr_in6.
            let v6: libc::sockaddr_in6 = unsafe { copy(address) };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, 0, 0, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Copies as much of a socket address as there is; the rest is zero. macOS cuts the zeros at the end of masks.
///
/// # Safety
/// As for [`socket_address`], and every bit pattern is a `T`.
unsafe fn copy<T: Copy>(address: *const libc::sockaddr) -> T {
    let mut whole = MaybeUninit::<T>::zeroed();
    #[cfg(target_vendor = "apple")]
    // SAFETY: the caller says that a socket address is there.
    let length = usize::from(unsafe { (*address).sa_len }).min(size_of::<T>());
    #[cfg(not(target_vendor = "apple"))]
    let length = size_of::<T>();
    // SAFETY: the source is that long by the caller's word, the target by the minimum, and it is a local of ours.
    unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), whole.as_mut_ptr().cast::<u8>(), length) };
    // SAFETY: every byte was set, by zero or by the copy, and every bit pattern is a `T`.
    unsafe { whole.assume_init() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_the_interfaces() {
        let interfaces = list().expect("interfaces");
        assert!(interfaces.iter().any(|one| one.address.ip().is_loopback()), "{interfaces:?}");
        assert!(interfaces.iter().all(|one| one.address.port() == 0 && !one.name.is_empty()));
    }
}
