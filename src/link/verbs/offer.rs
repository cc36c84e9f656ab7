//! What the ends of a cable tell each other before they are connected.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use super::device::MOST_SLOTS;

/// No device has a longer name.
const LONGEST_NAME: usize = 64;

/// What the other end has to know.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Which of the cables of the pair.
    pub(super) index: usize,
    pub(super) device: String,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    pub(super) mtu: u32,
    pub(super) megabits: u32,
    pub(super) classes: Vec<OfferedClass>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct OfferedClass {
    pub(super) queue_pair: u32,
    pub(super) slot_bytes: usize,
    pub(super) recv_slots: u32,
}

impl Offer {
    /// Finds among those of `peer` the one for the cable of this number to `rank`. The error says why there is none.
    pub(super) fn find(offers: &[Offer], index: usize, peer: usize, rank: usize) -> Result<&Offer, String> {
        let offer = offers.iter().find(|offer| offer.index == index);
        let offer = offer.ok_or_else(|| format!("rank {peer} knows of no cable {index} to rank {rank}"))?;
        // It is told to every rank in what may go wrong later.
        if offer.device.len() > LONGEST_NAME {
            let bytes = offer.device.len();
            return Err(format!("rank {peer} names a device of cable {index} with {bytes} bytes"));
        }
        Ok(offer)
    }

    /// Whether queue pairs whose slots have so many bytes can be connected to those of `peer`. The error says why not.
    pub(super) fn check(
        &self,
        cable: &str,
        peer: usize,
        slots: impl Iterator<Item = usize>,
    ) -> Result<(), String> {
        if self.classes.is_empty() {
            return Err(format!("cable {cable}: rank {peer} offers no queue pair"));
        }
        // One side may have fewer queue pairs than the other.
        for (slot_bytes, offered) in slots.zip(&self.classes) {
            let possible = offered.recv_slots.is_power_of_two() && offered.recv_slots <= MOST_SLOTS;
            if slot_bytes != offered.slot_bytes || !possible {
                return Err(format!(
                    "cable {cable}: rank {peer} has {} receives of {} bytes, here they have {slot_bytes}",
                    offered.recv_slots, offered.slot_bytes
                ));
            }
        }
        Ok(())
    }
}
