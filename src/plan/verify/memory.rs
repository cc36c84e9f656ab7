//! Which memory the buffers of a plan name.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::super::{Buffer, Collective, Plan, Scratch, Shape, Span, parts::part_of};
use crate::reduce::Repr;

/// The buffers of one rank. Two buffers may name the same region.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) shape: Shape,
    scratch: Vec<Scratch>,
}

/// Where a buffer lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Regions do not overlap. Region [`INPUT`] belongs to the user and may not be written unless in place.
    pub(super) region: usize,
    /// The buffer's first element within the region.
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) repr: Repr,
}

pub(super) const INPUT: usize = 0;
pub(super) const OUTPUT: usize = 1;

impl Memory {
    pub(super) fn new(shape: &Shape, plan: &Plan) -> Memory {
        Memory { shape: shape.clone(), scratch: plan.scratch.clone() }
    }

    /// The place of a buffer; `None` if there is no such buffer.
    pub(super) fn place(&self, buffer: Buffer) -> Option<Place> {
        let Shape { rank, in_place, .. } = self.shape;
        let user = |region, offset, len| Some(Place { region, offset, len, repr: Repr::Raw });
        match (buffer, &self.shape.collective) {
            (Buffer::Scratch(index), _) => {
                let scratch = self.scratch.get(index)?;
                Some(Place { region: 2 + index, offset: 0, len: scratch.len, repr: scratch.repr })
            }
            (_, Collective::Barrier) => user(OUTPUT, 0, 0),
            (Buffer::Input, Collective::Broadcast { .. }) => None,
            (Buffer::Output, Collective::Broadcast { count, .. }) => user(OUTPUT, 0, *count),
            (Buffer::Input, Collective::AllReduce { count }) => {
                user(if in_place { OUTPUT } else { INPUT }, 0, *count)
            }
            (Buffer::Output, Collective::AllReduce { count }) => user(OUTPUT, 0, *count),
            (Buffer::Input, Collective::AllGather { counts }) if in_place => {
                user(OUTPUT, part_of(counts, rank).start, counts[rank])
            }
            (Buffer::Input, Collective::AllGather { counts }) => user(INPUT, 0, counts[rank]),
            (Buffer::Output, Collective::AllGather { counts }) => user(OUTPUT, 0, counts.iter().sum()),
            (Buffer::Input, Collective::ReduceScatter { counts }) => {
                user(if in_place { OUTPUT } else { INPUT }, 0, counts.iter().sum())
            }
            (Buffer::Output, Collective::ReduceScatter { counts }) if in_place => {
                user(OUTPUT, part_of(counts, rank).start, counts[rank])
            }
            (Buffer::Output, Collective::ReduceScatter { counts }) => user(OUTPUT, 0, counts[rank]),
        }
    }

    /// The sizes of all regions.
    pub(super) fn regions(&self) -> Vec<usize> {
        let mut sizes = vec![0; 2 + self.scratch.len()];
        let scratch = (0..self.scratch.len()).map(Buffer::Scratch);
        for place in [Buffer::Input, Buffer::Output].into_iter().chain(scratch).filter_map(|b| self.place(b))
        {
            sizes[place.region] = sizes[place.region].max(place.offset + place.len);
        }
        sizes
    }

    /// The region of a span and the ranges within it of the span's elements `from..to`. The span must be well formed.
    pub(super) fn locate(&self, span: &Span, elements: Range<usize>) -> (usize, Vec<Range<usize>>) {
        let place = self.place(span.buffer).expect("a well-formed span names a buffer");
        let mut ranges = Vec::new();
        let mut before = 0;
        for range in &span.ranges {
            let from = elements.start.clamp(before, before + range.len());
            let to = elements.end.clamp(before, before + range.len());
            if from < to {
                let start = place.offset + range.start - before;
                ranges.push(start + from..start + to);
            }
            before += range.len();
        }
        (place.region, ranges)
    }
}
