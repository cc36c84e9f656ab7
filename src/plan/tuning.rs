//! What the choice of algorithms depends on besides the shape: measured or assumed speeds, cabling and overrides.
//!
//! Plain data. Rank 0's is agreed on when the group forms, so that all ranks choose alike.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use super::{DEFAULT_CHUNK, Overrides};

/// The inputs of the choice. The defaults for each kind of link are starting points from measurements; calibration and the
/// user's overrides replace them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tuning {
    pub(crate) cabling: Cabling,
    /// From the sending of a small message until the receiver can use it, in nanoseconds.
    pub(crate) latency_ns: u64,
    /// What a rank spends on each message before it can turn to the next, in nanoseconds.
    pub(crate) message_ns: u64,
    /// One byte over one link or port in one direction, in picoseconds.
    pub(crate) byte_ps: u64,
    /// Folding one byte of one further operand, in picoseconds.
    pub(crate) fold_ps: u64,
    /// Bytes that a step moves at a time (see [`super::Plan::chunk`]).
    pub(crate) chunk: u64,
    pub(crate) overrides: Overrides,
}

/// Which pairs of ranks have a link, and what links share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cabling {
    /// Every pair; all messages of a rank share its port (or the machine's memory).
    Shared,
    /// Every pair has a link of its own.
    Mesh,
    /// Each rank to the next, and the last to the first.
    Ring,
    /// Each rank to the next.
    Line,
}

impl Default for Tuning {
    /// Two ranks on one machine over TCP.
    fn default() -> Tuning {
        Tuning::tcp_on_one_machine(2, 2)
    }
}

impl Tuning {
    /// TCP between `ranks` processes of one machine, which share `cores` cores.
    pub(crate) fn tcp_on_one_machine(ranks: usize, cores: usize) -> Tuning {
        let load = Load::new(ranks, cores);
        Tuning {
            latency_ns: load.waiting(3700, 2500),
            message_ns: load.work(4500),
            byte_ps: load.work(210),
            fold_ps: load.work(80),
            // Every piece costs system calls and turns; what overlaps within one machine is the same cores' work.
            chunk: 1 << 20,
            ..Tuning::plain(Cabling::Shared)
        }
    }

    /// TCP between machines on a network of about 10 Gbit/s.
    pub(crate) fn tcp_between_machines() -> Tuning {
        Tuning {
            latency_ns: 20_000,
            message_ns: 2000,
            byte_ps: 850,
            fold_ps: 60,
            ..Tuning::plain(Cabling::Shared)
        }
    }

    /// Queues between `ranks` threads of one process on `cores` cores.
    pub(crate) fn threads(ranks: usize, cores: usize) -> Tuning {
        let load = Load::new(ranks, cores);
        Tuning {
            latency_ns: load.waiting(800, 2000),
            message_ns: load.work(300),
            byte_ps: load.work(100),
            fold_ps: load.work(80),
            ..Tuning::plain(Cabling::Shared)
        }
    }

    /// Memory shared by `ranks` processes of one machine on `cores` cores.
    pub(crate) fn shared_memory(ranks: usize, cores: usize) -> Tuning {
        let load = Load::new(ranks, cores);
        Tuning {
            latency_ns: load.waiting(120, 800),
            message_ns: load.work(50),
            byte_ps: load.work(67),
            fold_ps: load.work(78),
            chunk: 64 << 10,
            ..Tuning::plain(Cabling::Shared)
        }
    }

    /// RDMA over Thunderbolt 5, with so many cables between ranks that have some.
    pub(crate) fn thunderbolt(cabling: Cabling, cables: usize) -> Tuning {
        let byte_ps = 110 / (cables as u64).clamp(1, 110);
        Tuning { latency_ns: 4200, message_ns: 300, byte_ps, fold_ps: 50, ..Tuning::plain(cabling) }
    }

    /// The bytes that bound a rank's exchange of `bytes` with each of `peers` peers at once.
    pub(super) fn fan(&self, peers: usize, bytes: u64) -> u64 {
        match self.cabling {
            Cabling::Shared => bytes.saturating_mul(peers as u64),
            Cabling::Mesh | Cabling::Ring | Cabling::Line => bytes,
        }
    }

    /// The bytes that pass until `bytes` have gone over `hops` links one behind the other, chunk by chunk.
    pub(super) fn pipelined(&self, hops: usize, bytes: u64) -> u64 {
        bytes.saturating_add(self.filling(hops, bytes))
    }

    /// How much of it the last of the links waits until the first chunk arrives.
    pub(super) fn filling(&self, hops: usize, bytes: u64) -> u64 {
        bytes.min(self.chunk).saturating_mul(hops.saturating_sub(1) as u64)
    }

    fn plain(cabling: Cabling) -> Tuning {
        Tuning {
            cabling,
            latency_ns: 0,
            message_ns: 0,
            byte_ps: 0,
            fold_ps: 0,
            chunk: DEFAULT_CHUNK as u64,
            overrides: Overrides::default(),
        }
    }
}

/// How far ranks have to share cores.
struct Load {
    ranks: u64,
    cores: u64,
}

impl Load {
    fn new(ranks: usize, cores: usize) -> Load {
        let cores = cores.max(1) as u64;
        Load { ranks: (ranks as u64).max(cores), cores }
    }

    /// What a core needs for its ranks when a rank alone needs `cost`.
    fn work(&self, cost: u64) -> u64 {
        cost.saturating_mul(self.ranks) / self.cores
    }

    /// `free` when every rank has a core; else each rank in turn has to be switched to.
    fn waiting(&self, free: u64, switch: u64) -> u64 {
        if self.ranks == self.cores { free } else { self.work(switch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuning_survives_its_encoding() {
        let overrides = "all_reduce:0-32k=one_shot,32k-=two_shot".parse().expect("well formed");
        let tuning = Tuning { overrides, ..Tuning::thunderbolt(Cabling::Ring, 1) };
        let encoded = serde_json::to_vec(&tuning).expect("plain data");
        assert_eq!(serde_json::from_slice::<Tuning>(&encoded).expect("what was encoded"), tuning);
    }

    #[test]
    fn sharing_cores_makes_everything_slower() {
        let (alone, crowded) = (Tuning::tcp_on_one_machine(2, 2), Tuning::tcp_on_one_machine(8, 2));
        assert!(crowded.latency_ns > alone.latency_ns && crowded.byte_ps > alone.byte_ps);
        assert_eq!(Tuning::tcp_on_one_machine(1, 64), Tuning::tcp_on_one_machine(64, 64));
        assert_eq!(Tuning::threads(3, 0), Tuning::threads(3, 1));
    }
}
