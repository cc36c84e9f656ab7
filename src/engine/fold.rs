//! The folds of a plan, chunk by chunk as their operands arrive.

use std::{
    num::NonZeroU32,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    health::Failure,
    prepare::{Landing, Prepared},
    reentry::inside,
    run::{Run, next_boundary},
};
use crate::{
    plan::{Leaf, Span},
    reduce::{ReduceOp, Repr, Source},
};

impl Run {
    pub(super) fn fold(
        &mut self,
        prepared: &Prepared,
        index: usize,
        leaves: &[Leaf],
        into: &Span,
        finish: bool,
    ) -> Result<(), Failure> {
        let Some(allowed) = self.allowed(prepared, index) else { return Ok(()) };
        let length = prepared.lengths[index];
        let state = &self.steps[index];
        let there = state.arrived.iter().map(|arrived| arrived.elements).min().unwrap_or(length).min(allowed);
        let heard = state.arrived.iter().all(|arrived| arrived.heard);
        let mut done = state.done;
        while done < length {
            let end = next_boundary(done, prepared.chunk).min(length);
            if end > there {
                break;
            }
            while done < end {
                done += self.fold_piece(prepared, index, leaves, into, finish, done, end - done)?;
            }
        }
        self.steps[index].done = done;
        self.steps[index].finished = heard && done == length;
        Ok(())
    }

    /// Folds up to `most` elements from `at` on; returns how many lie together in all operands and were folded.
    #[allow(clippy::too_many_arguments)]
    fn fold_piece(
        &mut self,
        prepared: &Prepared,
        index: usize,
        leaves: &[Leaf],
        into: &Span,
        finish: bool,
        at: usize,
        most: usize,
    ) -> Result<usize, Failure> {
        let (target, mut count) = self.locate(into, at);
        count = count.min(most);
        let mut sources = std::mem::take(&mut self.sources);
        sources.clear();
        let mut peer = 0;
        for leaf in leaves {
            let (ptr, repr) = match leaf {
                Leaf::Local(span) => {
                    let (pointer, contiguous) = self.locate(span, at);
                    count = count.min(contiguous);
                    (pointer, span.repr)
                }
                Leaf::Peer { repr, .. } => {
                    let pointer = match prepared.landings[index][peer] {
                        Landing::Result => target,
                        Landing::Workspace(offset) => self.workspace(offset + at * self.size(*repr)),
                    };
                    peer += 1;
                    (pointer, *repr)
                }
            };
            sources.push(Source { ptr: ptr.cast_const(), repr });
        }
        let result = self.apply(&sources, target, into.repr, finish, count);
        self.sources = sources;
        result.map(|()| count)
    }

    fn apply(
        &self,
        sources: &[Source],
        target: *mut u8,
        to: Repr,
        finish: bool,
        count: usize,
    ) -> Result<(), Failure> {
        let Some(reducer) = &self.reducer else {
            // Plans of operations without a reduction have folds of one operand only: a move.
            let bytes = count * self.raw_size;
            if let [source] = sources
                && source.ptr != target.cast_const()
            {
                // SAFETY: both lie in buffers valid for the run; `copy` allows them to overlap.
                unsafe { std::ptr::copy(source.ptr, target, bytes) };
            }
            return Ok(());
        };
        let finish = if finish { NonZeroU32::new(self.peers.len() as u32) } else { None };
        // SAFETY: every operand and the target lie in the run's buffers with `count` elements from there on, as `locate` says;
        // the plan keeps them equal or apart (proved by the plan verifier).
        let fold = || unsafe { reducer.fold(sources, target, to, finish, count) };
        let custom = reducer.op() == ReduceOp::Custom;
        let fold = || if custom { inside(fold) } else { fold() };
        catch_unwind(AssertUnwindSafe(fold)).map_err(|panic| {
            let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
            Failure::Panicked { message: message.unwrap_or_else(|| "no message".to_owned()) }
        })
    }
}
