//! What a rank's cables need of its devices, counted before anything is opened.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use raccl_sys::{DeviceLimits, Provider};

use crate::config::DeviceMatrix;

/// What a device has, over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) queue_pairs: usize,
    pub(crate) completion_queues: usize,
    pub(crate) regions: usize,
    pub(crate) domains: usize,
}

impl Budget {
    /// What is known of Apple's devices, for drivers that cannot be asked.
    pub(crate) const APPLE: Budget =
        Budget { queue_pairs: 10, completion_queues: 11, regions: 100, domains: 11 };

    /// What a device says of itself.
    pub(crate) fn new(limits: Option<&DeviceLimits>, provider: Provider) -> Budget {
        let Some(limits) = limits else { return Budget::APPLE };
        // Apple counts one queue pair that cannot be had.
        let reserved = usize::from(provider == Provider::Apple);
        Budget {
            queue_pairs: limits.queue_pairs.saturating_sub(reserved),
            completion_queues: limits.completion_queues,
            regions: limits.regions,
            domains: limits.domains,
        }
    }
}

/// What one device is asked for: one domain, one region, and for each of its lanes a completion queue and one queue pair or two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) lanes: usize,
    /// Queue pairs a lane: 2, or 1 where the device has few.
    pub(crate) classes: usize,
}

impl Share {
    /// Divides a device among so many lanes; the error says what it lacks.
    pub(crate) fn new(device: &str, lanes: usize, budget: &Budget) -> Result<Share, String> {
        let lacks = |what: &str, has: usize| {
            Err(format!(
                "RDMA device {device} has to serve {lanes} cable(s) and has {has} {what}; use more devices or fewer cables"
            ))
        };
        if lanes > budget.queue_pairs {
            return lacks("queue pair(s)", budget.queue_pairs);
        }
        if lanes > budget.completion_queues {
            return lacks("completion queue(s)", budget.completion_queues);
        }
        if budget.regions == 0 || budget.domains == 0 {
            return lacks("memory region(s) or protection domain(s)", 0);
        }
        Ok(Share { lanes, classes: if 2 * lanes <= budget.queue_pairs { 2 } else { 1 } })
    }

    /// What it takes of the device.
    #[cfg(test)]
    fn needs(&self) -> Budget {
        let Share { lanes, classes } = *self;
        Budget { queue_pairs: lanes * classes, completion_queues: lanes, regions: 1, domains: 1 }
    }
}

/// The cables of `rank` by device: which peer each leads to, and which of the pair's cables it is. The n-th name of the matrix at
/// `[i][j]` and the n-th at `[j][i]` are the two ends of one cable.
pub(crate) fn cables(matrix: &DeviceMatrix, rank: usize) -> BTreeMap<String, Vec<(usize, usize)>> {
    let mut devices: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
    for peer in (0..matrix.size()).filter(|&peer| peer != rank) {
        for (index, device) in matrix.cables(rank, peer).iter().enumerate() {
            devices.entry(device.clone()).or_default().push((peer, index));
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every two machines are joined by so many cables; the n-th device of a machine serves its cables in turn.
    fn mesh(machines: usize, cables: usize, devices: usize) -> DeviceMatrix {
        let entry = |i: usize, j: usize| -> Vec<String> {
            let first = if j > i { j - 1 } else { j } * cables;
            let names = (0..cables).map(|cable| format!("rdma_en{}", (first + cable) % devices));
            if i == j { Vec::new() } else { names.collect() }
        };
        let rows = (0..machines).map(|i| (0..machines).map(|j| entry(i, j)).collect()).collect();
        DeviceMatrix::from_rows(rows).unwrap()
    }

    fn shares(matrix: &DeviceMatrix, rank: usize, budget: &Budget) -> Vec<Share> {
        let share = |(device, lanes): (&String, &Vec<_>)| Share::new(device, lanes.len(), budget).unwrap();
        cables(matrix, rank).iter().map(share).collect()
    }

    #[test]
    fn eight_machines_in_full_mesh_with_two_cables_a_pair_stay_within_apples_limits() {
        // A port for each cable, and as few devices as two cables a pair can have.
        for devices in [14, 7, 2] {
            let matrix = mesh(8, 2, devices);
            for rank in 0..8 {
                let shares = shares(&matrix, rank, &Budget::APPLE);
                assert_eq!(shares.iter().map(|share| share.lanes).sum::<usize>(), 14);
                for share in shares {
                    let needs = share.needs();
                    assert!(needs.queue_pairs <= 10 && needs.regions <= 100, "{share:?}");
                    assert!(needs.completion_queues <= 11 && needs.domains <= 11, "{share:?}");
                }
            }
        }
    }

    #[test]
    fn a_device_with_few_queue_pairs_gives_each_lane_one() {
        let few = Budget { queue_pairs: 2, ..Budget::APPLE };
        assert_eq!(Share::new("d", 1, &few), Ok(Share { lanes: 1, classes: 2 }));
        assert_eq!(Share::new("d", 2, &few), Ok(Share { lanes: 2, classes: 1 }));
        let error = Share::new("d", 3, &few).unwrap_err();
        assert!(error.contains("device d has to serve 3 cable(s) and has 2 queue pair(s)"), "{error}");
    }

    #[test]
    fn cables_are_counted_by_their_place_in_the_matrix() {
        let matrix =
            DeviceMatrix::parse(r#"[[null, ["a", "b"], "a"], [["x", "y"], null, null], ["z", null, null]]"#);
        let devices = cables(&matrix.unwrap(), 0);
        assert_eq!(devices["a"], [(1, 0), (2, 0)]);
        assert_eq!(devices["b"], [(1, 1)]);
    }
}
