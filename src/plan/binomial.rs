//! Binomial tree broadcast: everyone who has the data passes it on, so the number of holders doubles with each message time.
//!
//! ceil(lg p) message times. Chunks stream through the tree, and the largest subtree is served first.
#![forbid(unsafe_code)]

use super::{After, Cabling, Collective, Cost, Shape, Span, Tuning, steps::Steps};

pub(super) fn make(shape: &Shape) -> Option<Steps> {
    let Collective::Broadcast { root, count } = shape.collective else { return None };
    let size = shape.size;
    // Ranks counted from the root. The parent of `place` lacks its lowest set bit; its children add one lower bit each.
    let place = (shape.rank + size - root) % size;
    let rank_at = |place: usize| (place + root) % size;
    let data = || Span::output(0..count);

    let mut steps = Steps::new();
    let lowest = if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
    let mut after = Vec::new();
    if place != 0 {
        after.push(After::Stream(steps.recv(rank_at(place - lowest), data(), vec![])));
    }
    let mut distance = lowest / 2;
    while distance > 0 {
        if place + distance < size {
            steps.send(rank_at(place + distance), data(), after.clone());
        }
        distance /= 2;
    }
    Some(steps)
}

pub(super) fn cost(shape: &Shape, tuning: &Tuning) -> Option<Cost> {
    let Collective::Broadcast { count, .. } = shape.collective else { return None };
    let (rounds, bytes) = (shape.doublings(), shape.raw_bytes(count));
    // A path is as long as its end has bits.
    let depth = shape.size.ilog2();
    // The root has to send everything in every round, over one port or over as many links.
    let bytes = match tuning.cabling {
        Cabling::Shared => bytes.saturating_mul(u64::from(rounds)),
        Cabling::Mesh | Cabling::Ring | Cabling::Line => tuning.pipelined(depth as usize, bytes),
    };
    Some(Cost { latencies: u64::from(depth), messages: u64::from(rounds), bytes, folded: 0 })
}
