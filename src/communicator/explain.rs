//! What would run, and why.
#![forbid(unsafe_code)]

use std::{fmt, str::FromStr, time::Duration};

use super::Communicator;
use crate::{
    link::LinkKind,
    plan::{self, Algorithm, Shape},
    topology::CableLayout,
};

/// A collective operation, to ask [`Communicator::explain`] about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// [`Communicator::barrier`].
    Barrier,
    /// [`Communicator::all_reduce`].
    AllReduce,
    /// [`Communicator::all_gather`].
    AllGather,
    /// [`Communicator::reduce_scatter`].
    ReduceScatter,
    /// [`Communicator::broadcast`].
    Broadcast,
}

/// What would run for an operation of a given size, and what else could.
///
/// Its `Display` is a few lines for people.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Explanation {
    /// The operation asked about.
    pub operation: Collective,
    /// Bytes as in the question.
    pub bytes: usize,
    /// Ranks of the communicator.
    pub ranks: usize,
    /// What would run.
    pub algorithm: Algorithm,
    /// Why.
    pub reason: String,
    /// All that could run with the time that the cost model predicts, the fastest first. The model compares algorithms; it is
    /// not a promise of speed.
    pub candidates: Vec<(Algorithm, Duration)>,
    /// The link to each rank, `None` for this one.
    pub links: Vec<Option<LinkKind>>,
    /// How many cables of its own this rank has to each rank; 0 for itself and where the link is of another kind.
    pub cables: Vec<usize>,
    /// The shape that the cables between all ranks make, which decides which algorithms can run over them alone.
    pub layout: CableLayout,
    /// Why the layout is that, in words.
    pub layout_reason: String,
}

impl Communicator {
    /// Says which algorithm would run for `bytes` bytes of f32 elements, why, and over which links. `bytes` is one rank's buffer
    /// for all-reduce and broadcast, the total received for all-gather, the total sent for reduce-scatter.
    ///
    /// ```
    /// let group = raccl::local_group(4)?;
    /// let explanation = group[0].explain(raccl::Collective::AllReduce, 64 << 20);
    /// println!("{explanation}");
    /// assert_eq!(explanation.ranks, 4);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn explain(&self, operation: Collective, bytes: usize) -> Explanation {
        const ELEMENT: usize = size_of::<f32>();
        let (ranks, count) = (self.size(), bytes.div_ceil(ELEMENT));
        let parts = || {
            let (each, more) = (count / ranks, count % ranks);
            (0..ranks).map(|rank| each + usize::from(rank < more)).collect()
        };
        let collective = match operation {
            Collective::Barrier => plan::Collective::Barrier,
            Collective::AllReduce => plan::Collective::AllReduce { count },
            Collective::AllGather => plan::Collective::AllGather { counts: parts() },
            Collective::ReduceScatter => plan::Collective::ReduceScatter { counts: parts() },
            Collective::Broadcast => plan::Collective::Broadcast { root: 0, count },
        };
        let shape = Shape {
            collective,
            rank: self.rank(),
            size: ranks,
            in_place: false,
            raw_size: ELEMENT,
            acc_size: ELEMENT,
            ordered: false,
        };
        let (members, topology) = (&*self.inner.shared.members, self.inner.planner.topology());
        let explained = plan::explain(&shape, self.inner.planner.tuning());
        Explanation {
            operation,
            bytes,
            ranks,
            algorithm: explained.choice.algorithm,
            reason: explained.choice.reason.to_string(),
            candidates: explained.candidates.iter().map(|c| (c.algorithm, c.predicted)).collect(),
            links: members.iter().map(|&member| self.engine().link(member)).collect(),
            cables: members.iter().map(|&member| topology.cables(self.engine().rank, member)).collect(),
            layout: topology.layout(members),
            layout_reason: topology.why(members),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explanation { operation, bytes, ranks, algorithm, reason, .. } = self;
        writeln!(f, "{operation} of {bytes} bytes on {ranks} ranks runs {algorithm} ({reason})")?;
        for (candidate, predicted) in &self.candidates {
            let mark = if candidate == algorithm { '*' } else { ' ' };
            writeln!(f, "  {mark} {candidate:<20} predicted {:.1} us", predicted.as_nanos() as f64 / 1e3)?;
        }
        writeln!(f, "  cables: {} ({})", self.layout, self.layout_reason)?;
        write!(f, "  links:")?;
        for (rank, link) in self.links.iter().enumerate() {
            match link {
                Some(link) => match self.cables.get(rank) {
                    None | Some(0) => write!(f, " {rank}={link}")?,
                    Some(1) => write!(f, " {rank}={link} (1 cable)")?,
                    Some(cables) => write!(f, " {rank}={link} ({cables} cables)")?,
                },
                None => write!(f, " {rank}=self")?,
            }
        }
        Ok(())
    }
}

impl Collective {
    /// All of them.
    pub const ALL: [Collective; 5] = [
        Collective::Barrier,
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
    ];

    /// The operation's name, as in `all_reduce`.
    pub fn name(self) -> &'static str {
        match self {
            Collective::Barrier => "barrier",
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Broadcast => "broadcast",
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Collective {
    type Err = String;

    /// Takes names with underscores or hyphens.
    fn from_str(text: &str) -> Result<Collective, String> {
        let name = text.replace('-', "_");
        let found = Collective::ALL.into_iter().find(|operation| operation.name() == name);
        found.ok_or_else(|| {
            format!(
                "{text:?} is no collective; known are {}",
                Collective::ALL.map(Collective::name).join(", ")
            )
        })
    }
}
