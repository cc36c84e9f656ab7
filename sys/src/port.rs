//! What a device says about its port and addresses.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::abi;

/// The state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// Not plugged in, or switched off.
    Down,
    /// Coming up.
    Initializing,
    /// Coming up.
    Armed,
    /// In use.
    Active,
    /// In use, and recovering from a fault.
    ActiveDefer,
    /// A value that this crate does not know.
    Other(u32),
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortState::Down => f.write_str("down"),
            PortState::Initializing => f.write_str("initializing"),
            PortState::Armed => f.write_str("armed"),
            PortState::Active => f.write_str("active"),
            PortState::ActiveDefer => f.write_str("active (deferred)"),
            PortState::Other(value) => write!(f, "in unknown state {value}"),
        }
    }
}

/// What `ibv_query_port` says of a port.
#[derive(Clone, Copy)]
pub struct Port(pub(crate) abi::ibv_port_attr);

impl Port {
    /// The state.
    pub fn state(&self) -> PortState {
        match self.0.state {
            abi::IBV_PORT_DOWN => PortState::Down,
            abi::IBV_PORT_INIT => PortState::Initializing,
            abi::IBV_PORT_ARMED => PortState::Armed,
            abi::IBV_PORT_ACTIVE => PortState::Active,
            abi::IBV_PORT_ACTIVE_DEFER => PortState::ActiveDefer,
            other => PortState::Other(other),
        }
    }

    /// The local identifier, to be handed to the peer. 0 on RoCE and on Thunderbolt.
    pub fn lid(&self) -> u16 {
        self.0.lid
    }

    /// The path MTU in use, in bytes; 0 for a value that this crate does not know.
    pub fn active_mtu(&self) -> u32 {
        mtu_bytes(self.0.active_mtu)
    }

    /// How fast the port says it is, in megabits a second and direction; 0 where it says nothing that this crate knows.
    pub fn megabits(&self) -> u32 {
        let lanes = match self.0.active_width {
            1 => 1,
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 0,
        };
        let lane = match self.0.active_speed {
            1 => 2_500,
            2 => 5_000,
            4 | 8 => 10_000,
            16 => 14_000,
            32 => 25_000,
            64 => 50_000,
            128 => 100_000,
            _ => 0,
        };
        lanes * lane
    }

    /// The largest message, in bytes.
    pub fn max_message(&self) -> u32 {
        self.0.max_msg_sz
    }

    /// The number of entries of the GID table. Never more than an address can name.
    pub fn gid_count(&self) -> usize {
        usize::try_from(self.0.gid_tbl_len).unwrap_or(0).min(usize::from(u8::MAX) + 1)
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("state", &self.state())
            .field("lid", &self.lid())
            .field("active_mtu", &self.active_mtu())
            .field("max_message", &self.max_message())
            .field("gid_count", &self.gid_count())
            .finish()
    }
}

/// The header's value of an MTU of `bytes`.
pub(crate) fn mtu_value(bytes: u32) -> Option<abi::ibv_mtu> {
    (abi::IBV_MTU_256..=abi::IBV_MTU_4096).find(|value| mtu_bytes(*value) == bytes)
}

fn mtu_bytes(value: abi::ibv_mtu) -> u32 {
    match value {
        abi::IBV_MTU_256..=abi::IBV_MTU_4096 => 128 << value,
        _ => 0,
    }
}

/// The address of a port.
///
/// ```
/// use raccl_sys::Gid;
/// use std::net::Ipv4Addr;
///
/// let gid = Gid::from(Ipv4Addr::new(192, 168, 0, 7));
/// assert_eq!(gid.to_string(), "::ffff:192.168.0.7");
/// assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(192, 168, 0, 7)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IPv4 address, where it is an IPv4-mapped one.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// Whether the entry is empty.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(address: Ipv4Addr) -> Gid {
        Gid(address.to_ipv6_mapped().octets())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// An entry of a GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    /// Where it stands, which is how an address names it.
    pub index: u8,
    /// The address.
    pub gid: Gid,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_as_fast_as_its_lanes_together() {
        // SAFETY: the structure is made of integers, for which zero bytes are a value.
        let mut port = Port(unsafe { std::mem::zeroed() });
        assert_eq!(port.megabits(), 0);
        port.0.active_width = 2;
        port.0.active_speed = 32;
        assert_eq!(port.megabits(), 100_000);
        port.0.active_speed = 3;
        assert_eq!(port.megabits(), 0);
    }

    #[test]
    fn mtus_of_the_header_are_powers_of_two() {
        for (bytes, value) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            assert_eq!(mtu_value(bytes), Some(value));
            assert_eq!(mtu_bytes(value), bytes);
        }
        assert_eq!(mtu_value(1500), None);
        assert_eq!(mtu_bytes(0), 0);
        assert_eq!(mtu_bytes(6), 0);
    }
}
