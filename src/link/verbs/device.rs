//! A device of this machine, opened after it was found good, with the memory of all its lanes.
#![forbid(unsafe_code)]

use std::{
    thread,
    time::{Duration, Instant},
};

use raccl_sys::{
    CompletionQueue, Context, DeviceList, Error, GidEntry, Init, MemoryRegion, Port, ProtectionDomain,
    Provider, QueuePair, QueuePairOptions, Transport,
};

use super::{
    Options, hold,
    plan::{Budget, Share},
    wire::{FRAME, PORT},
};
use crate::config::VerbsTransport;

/// Slots of the small class, each way.
const SMALL_SLOTS: u32 = 64;
/// No class has more receives; the settings do not allow deeper bulk queues either.
pub(super) const MOST_SLOTS: u32 = 64;
/// Path MTU where the driver is Apple's; the one that has been in use there.
const APPLE_MTU: u32 = 1024;
/// Between two looks at a GID table.
const LOOK: Duration = Duration::from_millis(50);

/// An open device whose port can carry messages.
pub(super) struct Device {
    domain: ProtectionDomain,
    region: MemoryRegion,
    classes: Vec<Slots>,
    transport: Transport,
    pub(super) gid: GidEntry,
    pub(super) lid: u16,
    /// The largest packet that the way from here can have.
    pub(super) mtu: u32,
    /// What the port says of its speed, 0 if nothing.
    pub(super) megabits: u32,
    /// Lanes that have their share of the region.
    lanes: usize,
}

/// The slots of a class of one lane, and where in the lane's memory they begin.
#[derive(Debug, Clone, Copy)]
struct Slots {
    bytes: usize,
    sends: u32,
    receives: u32,
    /// Sends that are handed to the device at a time.
    window: u32,
    send_at: usize,
    recv_at: usize,
}

/// A class of one lane before it is connected.
pub(super) struct NewClass {
    pub(super) pair: QueuePair<Init>,
    pub(super) slot_bytes: usize,
    pub(super) send_at: usize,
    pub(super) recv_at: usize,
    pub(super) send_slots: u32,
    pub(super) recv_slots: u32,
    pub(super) window: u32,
}

/// One end of a cable before it is connected.
pub(super) struct NewLane {
    pub(super) queue: CompletionQueue,
    pub(super) region: MemoryRegion,
    pub(super) classes: Vec<NewClass>,
}

/// A device that was found good, on which nothing is taken yet.
pub(super) struct Examined {
    context: Context,
    port: Port,
    gid: GidEntry,
    share: Share,
}

impl Examined {
    /// Looks at a device that is to serve so many lanes: first at its port and its address, which is waited for until the
    /// deadline since it comes some time after a cable was plugged in, then at its limits.
    pub(super) fn new(
        list: &DeviceList,
        name: &str,
        lanes: usize,
        until: Instant,
    ) -> Result<Examined, Box<dyn std::error::Error + Send + Sync>> {
        let context = list.find(name)?.open()?;
        let port = context.active_port(PORT)?;
        let gid = wait_for_gid(&context, until)?;
        let budget = Budget::new(context.limits()?.as_ref(), context.provider());
        let share = Share::new(name, lanes, &budget)?;
        Ok(Examined { context, port, gid, share })
    }
}

impl Device {
    /// Takes what the lanes of a device share.
    pub(super) fn new(examined: Examined, options: &Options) -> Result<Device, Error> {
        let Examined { context, port, gid, share } = examined;
        let classes = divide(&share, options);
        let domain = context.protection_domain()?;
        let region = domain.allocate(share.lanes * lane_bytes(&classes))?;
        let provider = context.provider();
        let mtu = match provider {
            Provider::Apple => APPLE_MTU,
            Provider::Linux => port.active_mtu().max(256),
        };
        let transport = match (options.transport, provider) {
            (Some(VerbsTransport::Uc), _) | (None, Provider::Apple) => Transport::Uc,
            (Some(VerbsTransport::Rc), _) | (None, Provider::Linux) => Transport::Rc,
        };
        let (lid, megabits) = (port.lid(), port.megabits());
        Ok(Device { domain, region, classes, transport, gid, lid, mtu, megabits, lanes: 0 })
    }

    /// What owns everything of the device.
    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Makes one lane's end.
    pub(super) fn lane(&mut self) -> Result<NewLane, Error> {
        let base = self.lanes * lane_bytes(&self.classes);
        self.lanes += 1;
        // Whatever is posted at a time has a place: each slot once.
        let entries: u32 = self.classes.iter().map(|class| class.window + class.receives).sum();
        let queue = self.domain.completion_queue(entries as usize)?;
        let mut classes = Vec::new();
        for slots in &self.classes {
            // Less than 2^32: the options are bounded.
            let unit = match self.domain.context().provider() {
                Provider::Apple => (slots.bytes / FRAME) as u32,
                Provider::Linux => 1,
            };
            let depth = raccl_sys::Depths { send: slots.window * unit, recv: slots.receives * unit };
            let pair = self.domain.queue_pair(
                &QueuePairOptions { transport: self.transport, depth },
                &queue,
                &queue,
            )?;
            pair.keep(&self.region);
            let granted = pair.depths();
            let fit = |granted: u32, wanted: u32| match (granted / unit).min(wanted) {
                0 => 0,
                count => 1 << count.ilog2(),
            };
            let window = fit(granted.send, slots.window);
            let recv_slots = fit(granted.recv, slots.receives);
            if window < 2 || recv_slots < 2 {
                let what = format!(
                    "RDMA device {} grants queues {} and {} deep, where {} and {} were asked for; set RACCL_VERBS_BULK to less",
                    self.domain.context().name(),
                    granted.send,
                    granted.recv,
                    depth.send,
                    depth.recv
                );
                return Err(Error::Argument { what });
            }
            classes.push(NewClass {
                pair: pair.init(PORT)?,
                slot_bytes: slots.bytes,
                send_at: base + slots.send_at,
                recv_at: base + slots.recv_at,
                send_slots: slots.sends,
                recv_slots,
                window,
            });
        }
        Ok(NewLane { queue, region: self.region.clone(), classes })
    }
}

fn wait_for_gid(context: &Context, until: Instant) -> Result<GidEntry, Error> {
    loop {
        match context.ipv4_gid(PORT) {
            Err(Error::NoIpv4Gid { .. }) if Instant::now() < until && hold::check().is_ok() => {
                thread::sleep(LOOK);
            }
            result => return result,
        }
    }
}

/// The classes of each lane of a device.
///
/// Of bulk packets, few are handed to the device at a time, because whatever goes out later waits behind them on the cable, the
/// words that tell the peer of posted receives too: when both sides send, a peer with no more receives than we have sends
/// would always wait for such a word, and the cable would be idle half of the time. Where cables stand in for each other, there
/// is a slot for whatever the peer may not have yet, which is as much as it has receives.
fn divide(share: &Share, options: &Options) -> Vec<Slots> {
    let bulk_sends = (options.bulk_depth / 4).max(2);
    let sizes = [(FRAME, SMALL_SLOTS, SMALL_SLOTS), (options.bulk_bytes, bulk_sends, options.bulk_depth)];
    let mut at = 0;
    let slots = |(bytes, window, receives): (usize, u32, u32)| {
        let sends = if options.degrade { receives } else { window };
        let send_at = at;
        let recv_at = send_at + bytes * sends as usize;
        at = recv_at + bytes * receives as usize;
        Slots { bytes, sends, receives, window, send_at, recv_at }
    };
    sizes.into_iter().take(share.classes).map(slots).collect()
}

fn lane_bytes(classes: &[Slots]) -> usize {
    classes.last().map_or(0, |last| last.recv_at + last.bytes * last.receives as usize)
}
