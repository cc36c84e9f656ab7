//! The fold in vector registers, for the types that most of the work is done on.
//!
//! A step takes a few registers' worth of every source through the whole tree and writes the result, so memory
//! is passed over once however many sources there are, and a destination that is also a source is written only
//! after it was read. The loop is instantiated for each instruction set by [`Vector::run`], which enables it;
//! everything below is inlined there, so there is as little of it as speed allows.
//!
//! [`Vector::run`]: super::vector::Vector::run

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::formats::Format;
use super::job::Job;
use super::reducer::Repr;
use super::tree::Tree;
use super::vector::Lanewise;

/// More sources than any group has ranks. It bounds the nodes that wait for their right neighbour.
pub(super) const MAX_SOURCES: usize = (2 << UNFINISHED) - 1;

const UNFINISHED: usize = 16;

/// Registers of a step, where there are elements for as many.
const STEP: usize = 4;

/// Carries out a job.
///
/// # Safety
///
/// As for [`Reducer::fold`](super::Reducer::fold), with the units of `F`; when the job streams, its first element
/// in the destination is at the start of a cache line; and the caller has enabled the vectors' instruction set.
#[inline(always)]
pub(super) unsafe fn run<F: Format, O: Lanewise>(job: &Job<'_>) {
    let mut at = job.range.start;
    while job.range.end - at >= STEP * F::LANES {
        let step = Step::<F, O, STEP> { job, at, lanes: F::LANES, kind: PhantomData };
        if job.sources.len() == 2 {
            // SAFETY: the step's elements are inside the job, which is as the caller promises; steps are a whole
            // number of vectors, so that all of them are as aligned as the first.
            unsafe { step.two() }
        } else {
            // SAFETY: as above.
            unsafe { step.any() }
        }
        at += STEP * F::LANES;
    }
    while at < job.range.end {
        let lanes = F::LANES.min(job.range.end - at);
        let step = Step::<F, O, 1> { job, at, lanes, kind: PhantomData };
        // SAFETY: the step's elements are inside the job, which is as the caller promises.
        unsafe { step.any() };
        at += lanes;
    }
}

/// The elements of `U` registers from `at` on; or only the first `lanes` of one register.
struct Step<'a, F, O, const U: usize> {
    job: &'a Job<'a>,
    at: usize,
    lanes: usize,
    kind: PhantomData<(F, O)>,
}

impl<F: Format, O: Lanewise, const U: usize> Step<'_, F, O, U> {
    /// The step over two sources.
    ///
    /// # Safety
    ///
    /// The step's elements are inside the job, and the job is as [`run`] asks.
    #[inline(always)]
    unsafe fn two(&self) {
        // SAFETY: the caller's promises are the same ones.
        let left = unsafe { self.source(0) };
        // SAFETY: as above.
        let right = unsafe { self.source(1) };
        // SAFETY: the caller has enabled the instruction set.
        let folded = unsafe { combine::<F, O, U>(left, right) };
        // SAFETY: the caller's promises are the same ones.
        unsafe { self.finish(folded) }
    }

    /// The step over any number of sources.
    ///
    /// # Safety
    ///
    /// As for [`two`](Self::two).
    #[inline(always)]
    unsafe fn any(&self) {
        let tree = Tree::over(self.job.sources.len());
        // Nodes to the left of the current one, largest first: like the digits of a binary counter.
        let mut unfinished = [MaybeUninit::uninit(); UNFINISHED];
        let mut depth = 0;
        // SAFETY: the caller's promises are the same ones.
        let mut node = unsafe { self.source(0) };
        for index in 1..self.job.sources.len() {
            // SAFETY: as above.
            let next = unsafe { self.source(index) };
            let merges = tree.merges(index);
            if merges == 0 {
                unfinished[depth] = MaybeUninit::new(node);
                depth += 1;
                node = next;
                continue;
            }
            // SAFETY: the caller has enabled the instruction set.
            node = unsafe { combine::<F, O, U>(node, next) };
            for _ in 1..merges {
                depth -= 1;
                // SAFETY: `merges` counts nodes that were put there and not taken yet.
                let left = unsafe { unfinished[depth].assume_init() };
                // SAFETY: the caller has enabled the instruction set.
                node = unsafe { combine::<F, O, U>(left, node) };
            }
        }
        // SAFETY: the caller's promises are the same ones.
        unsafe { self.finish(node) }
    }

    #[inline(always)]
    unsafe fn source(&self, index: usize) -> [F::Register; U] {
        let source = self.job.sources[index];
        if F::ACC_IS_RAW || source.repr == Repr::Raw {
            // SAFETY: the caller promises elements of this representation.
            unsafe { self.load::<F>(source.ptr) }
        } else {
            // SAFETY: as above.
            unsafe { self.load::<F::Acc>(source.ptr) }
        }
    }

    #[inline(always)]
    unsafe fn load<G: Format<Register = F::Register>>(&self, source: *const u8) -> [F::Register; U] {
        // SAFETY: the caller promises that the step's elements are inside the source.
        let from = unsafe { source.add(self.at * G::SIZE) };
        if U == 1 && self.lanes < G::LANES {
            // SAFETY: `lanes` elements are readable by the caller's promise.
            return [unsafe { G::load_first(from, self.lanes) }; U];
        }
        // SAFETY: the first of `U` registers is readable by the caller's promise.
        let mut values = [unsafe { G::load(from) }; U];
        for (u, value) in values.iter_mut().enumerate().skip(1) {
            // SAFETY: all `U` registers are readable by the caller's promise.
            let from = unsafe { from.add(u * G::LANES * G::SIZE) };
            // SAFETY: as above.
            *value = unsafe { G::load(from) };
        }
        values
    }

    #[inline(always)]
    unsafe fn finish(&self, mut values: [F::Register; U]) {
        if let Some(divisor) = self.job.divisor {
            for value in &mut values {
                for value in value.as_mut() {
                    // SAFETY: the caller has enabled the instruction set.
                    *value = unsafe { O::divide(*value, divisor) };
                }
            }
        }
        if F::ACC_IS_RAW || self.job.to == Repr::Raw {
            // SAFETY: the caller promises room for elements of this representation.
            unsafe { self.store::<F>(values) }
        } else {
            // SAFETY: as above.
            unsafe { self.store::<F::Acc>(values) }
        }
    }

    #[inline(always)]
    unsafe fn store<G: Format<Register = F::Register>>(&self, values: [F::Register; U]) {
        // SAFETY: the caller promises that the step's elements are inside the destination.
        let to = unsafe { self.job.dst.add(self.at * G::SIZE) };
        if U == 1 && self.lanes < G::LANES {
            // SAFETY: `lanes` elements are writable by the caller's promise.
            return unsafe { G::store_first(values[0], to, self.lanes) };
        }
        for (u, value) in values.into_iter().enumerate() {
            // SAFETY: all `U` registers are writable by the caller's promise.
            let to = unsafe { to.add(u * G::LANES * G::SIZE) };
            if U > 1 && self.job.stream {
                // SAFETY: as above, and aligned as `run` says.
                unsafe { G::stream(value, to) }
            } else {
                // SAFETY: as above.
                unsafe { G::store(value, to) }
            }
        }
    }
}

/// # Safety
///
/// The caller has enabled the instruction set.
#[inline(always)]
unsafe fn combine<F: Format, O: Lanewise, const U: usize>(
    mut left: [F::Register; U],
    right: [F::Register; U],
) -> [F::Register; U] {
    for (left, right) in left.iter_mut().zip(&right) {
        for (left, right) in left.as_mut().iter_mut().zip(right.as_ref()) {
            // SAFETY: the caller has enabled the instruction set.
            *left = unsafe { O::combine(*left, *right) };
        }
    }
    left
}
