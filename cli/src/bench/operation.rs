//! What can be measured, and what its figures mean.

use clap::ValueEnum;
use raccl::Collective;

/// An operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Operation {
    /// Everybody gets the reduction of all.
    AllReduce,
    /// Everybody gets the parts of all.
    AllGather,
    /// Everybody gets a part of the reduction of all.
    ReduceScatter,
    /// Everybody gets what rank 0 has.
    Broadcast,
    /// Nobody goes on before all are there.
    Barrier,
    /// From rank 0 to rank 1, one way.
    SendRecv,
    /// From rank 0 to rank 1 and back; times are of round trips.
    PingPong,
}

impl Operation {
    /// The name on the command line.
    pub(crate) fn argument(self) -> &'static str {
        match self {
            Operation::AllReduce => "all-reduce",
            Operation::AllGather => "all-gather",
            Operation::ReduceScatter => "reduce-scatter",
            Operation::Broadcast => "broadcast",
            Operation::Barrier => "barrier",
            Operation::SendRecv => "send-recv",
            Operation::PingPong => "ping-pong",
        }
    }

    /// The name in the machine-readable output and in settings.
    pub(crate) fn name(self) -> String {
        self.argument().replace('-', "_")
    }

    /// The collective that it is, if it is one.
    pub(super) fn collective(self) -> Option<Collective> {
        match self {
            Operation::AllReduce => Some(Collective::AllReduce),
            Operation::AllGather => Some(Collective::AllGather),
            Operation::ReduceScatter => Some(Collective::ReduceScatter),
            Operation::Broadcast => Some(Collective::Broadcast),
            Operation::Barrier => Some(Collective::Barrier),
            Operation::SendRecv | Operation::PingPong => None,
        }
    }

    /// Whether elements are combined.
    pub(super) fn reduces(self) -> bool {
        matches!(self, Operation::AllReduce | Operation::ReduceScatter)
    }

    /// Whether it is between ranks 0 and 1 alone.
    pub(super) fn is_message(self) -> bool {
        matches!(self, Operation::SendRecv | Operation::PingPong)
    }

    /// The largest size not above `bytes` that can be divided as the operation divides it.
    pub(super) fn whole(self, bytes: u64, element: usize, ranks: usize) -> u64 {
        let unit = match self {
            Operation::AllGather | Operation::ReduceScatter => element as u64 * ranks as u64,
            _ => element as u64,
        };
        bytes - bytes % unit
    }

    /// Bytes of the two buffers of a rank, for a size as nccl-tests counts it: one rank's buffer for all-reduce
    /// and broadcast, the total received for all-gather, the total sent for reduce-scatter.
    pub(super) fn buffers(self, bytes: usize, ranks: usize) -> (usize, usize) {
        match self {
            Operation::AllReduce | Operation::SendRecv | Operation::PingPong => (bytes, bytes),
            Operation::AllGather => (bytes / ranks, bytes),
            Operation::ReduceScatter => (bytes, bytes / ranks),
            Operation::Broadcast => (0, bytes),
            Operation::Barrier => (0, 0),
        }
    }

    /// Algorithm bandwidth and bus bandwidth in 10^9 bytes a second, as nccl-tests defines them. A round trip
    /// moves its bytes twice.
    pub(super) fn bandwidths(self, bytes: u64, microseconds: f64, ranks: usize) -> (f64, f64) {
        if bytes == 0 || microseconds <= 0.0 {
            return (0.0, 0.0);
        }
        let trips = if self == Operation::PingPong { 2.0 } else { 1.0 };
        let algorithm = trips * bytes as f64 / microseconds / 1e3;
        let n = ranks as f64;
        let factor = match self {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            Operation::AllGather | Operation::ReduceScatter => (n - 1.0) / n,
            Operation::Broadcast | Operation::SendRecv | Operation::PingPong => 1.0,
            Operation::Barrier => 0.0,
        };
        (algorithm, algorithm * factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let near = |(a, b): (f64, f64), (c, d): (f64, f64)| {
            assert!((a - c).abs() < 1e-9 && (b - d).abs() < 1e-9, "({a}, {b}) is not ({c}, {d})");
        };
        near(Operation::AllReduce.bandwidths(1_000_000, 1000.0, 4), (1.0, 1.5));
        near(Operation::AllGather.bandwidths(1_000_000, 1000.0, 4), (1.0, 0.75));
        near(Operation::ReduceScatter.bandwidths(1_000_000, 1000.0, 2), (1.0, 0.5));
        near(Operation::Broadcast.bandwidths(1_000_000, 1000.0, 3), (1.0, 1.0));
        near(Operation::PingPong.bandwidths(1_000_000, 1000.0, 2), (2.0, 2.0));
        near(Operation::Barrier.bandwidths(0, 10.0, 2), (0.0, 0.0));
        near(Operation::AllReduce.bandwidths(1_000_000, 1000.0, 1), (1.0, 0.0));
    }

    #[test]
    fn sizes_divide_as_the_operation_does() {
        assert_eq!(Operation::AllReduce.whole(1003, 4, 3), 1000);
        assert_eq!(Operation::AllGather.whole(1003, 4, 3), 996);
        assert_eq!(Operation::AllGather.whole(8, 4, 3), 0);
        assert_eq!(Operation::ReduceScatter.buffers(96, 3), (96, 32));
        assert_eq!(Operation::AllGather.buffers(96, 3), (32, 96));
    }
}
