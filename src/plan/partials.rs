//! Where a rank keeps partial results until it has passed them on.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{After, Buffer, Collective, Shape, Span, steps::Steps};
use crate::reduce::Repr;

/// So many partial results may be on their way at once, so that one can be folded while another is being sent.
const SLOTS: usize = 3;

/// Places for partial results, each of which is written by one fold and read by one send.
#[derive(Debug)]
pub(super) enum Partials {
    /// In the user's buffer, at the place of the elements they are of: it is large enough and its content is not needed.
    Home(Buffer),
    /// In a few scratch slots used in turn.
    Slots { buffer: Buffer, repr: Repr, len: usize, readers: Vec<usize> },
}

impl Partials {
    /// Room for partial results of at most `len` elements.
    pub(super) fn new(shape: &Shape, steps: &mut Steps, len: usize) -> Partials {
        match Partials::home(shape) {
            Some(buffer) => Partials::Home(buffer),
            None => {
                let repr = shape.partial_repr();
                let buffer = steps.scratch(repr, SLOTS * len);
                Partials::Slots { buffer, repr, len, readers: Vec::new() }
            }
        }
    }

    /// The user's buffer that can hold partial results of all elements, if there is one.
    pub(super) fn home(shape: &Shape) -> Option<Buffer> {
        match shape.collective {
            Collective::AllReduce { .. } if shape.partials_are_raw() => Some(Buffer::Output),
            Collective::ReduceScatter { .. } if shape.partials_are_raw() && shape.in_place => {
                Some(Buffer::Input)
            }
            _ => None,
        }
    }

    /// A place for a partial result of these elements, and what its writer has to wait for.
    pub(super) fn next(&self, elements: Range<usize>) -> (Span, Vec<After>) {
        match self {
            Partials::Home(buffer) => (Span::new(*buffer, Repr::Raw, elements), vec![]),
            Partials::Slots { buffer, repr, len, readers } => {
                let start = readers.len() % SLOTS * len;
                let after = readers.len().checked_sub(SLOTS).map(|index| After::Whole(readers[index]));
                (Span::new(*buffer, *repr, start..start + elements.len()), after.into_iter().collect())
            }
        }
    }

    /// Tells which send reads the place that `next` gave out.
    pub(super) fn read_by(&mut self, send: usize) {
        if let Partials::Slots { readers, .. } = self {
            readers.push(send);
        }
    }
}

impl Shape {
    /// The representation in which partial results are kept and sent.
    pub(super) fn partial_repr(&self) -> Repr {
        if self.partials_are_raw() { Repr::Raw } else { Repr::Acc }
    }
}
