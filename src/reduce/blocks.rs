//! The fold over blocks that stay in the first-level cache, for everything that has no kernel of its own.
//!
//! One operation on one type is a handful of plain loops over memory ([`Loops`]) that the compiler vectorises,
//! once for each instruction set. This module drives them through the tree, a block of all sources at a time.

use std::mem::MaybeUninit;
use std::num::NonZeroU32;

use super::job::Job;
use super::reducer::Repr;
use super::stream;
use super::tree::{Leaf, Tree};

/// The loops of one operation on one type. Values are in the representation of partial results, at any
/// alignment, unless a loop says otherwise.
pub(super) struct Loops {
    /// Bytes of a value.
    pub(super) size: usize,
    /// `out = left op right`, where `out` overlaps neither.
    pub(super) combine: unsafe fn(left: *const u8, right: *const u8, out: *mut u8, count: usize),
    /// `out = out op right`, where `right` does not overlap.
    pub(super) append: unsafe fn(right: *const u8, out: *mut u8, count: usize),
    /// `out = out / divisor`, where the operation has averages.
    pub(super) divide: Option<unsafe fn(divisor: NonZeroU32, out: *mut u8, count: usize)>,
    /// How the caller's type becomes values and back, where it is another one.
    pub(super) half: Option<HalfLoops>,
}

impl Loops {
    /// Bytes of an element.
    pub(super) fn size(&self, repr: Repr) -> usize {
        match self.half {
            Some(half) if repr == Repr::Raw => half.size,
            _ => self.size,
        }
    }
}

/// The loops between a half in memory and its value, an f32.
#[derive(Clone, Copy)]
pub(super) struct HalfLoops {
    /// Bytes of a half.
    pub(super) size: usize,
    /// `out = from` as values; they do not overlap.
    pub(super) widen: unsafe fn(from: *const u8, out: *mut u8, count: usize),
    /// `out = from` as halves; they do not overlap.
    pub(super) narrow: unsafe fn(from: *const u8, out: *mut u8, count: usize),
}

/// Bytes of a block of values.
const BLOCK: usize = 4096;

/// Bytes of a block on its way past the cache: reads and such writes go side by side only where they alternate often.
const STREAM_BLOCK: usize = 512;

/// Carries out a job.
///
/// # Safety
///
/// As for [`Reducer::fold`](super::Reducer::fold), for the type of the loops; and the processor has the
/// instruction set that they were compiled for.
pub(super) unsafe fn run(loops: &Loops, job: &Job<'_>) {
    let fold = Fold { loops, job, tree: Tree::over(job.sources.len()) };
    let block = if job.stream { STREAM_BLOCK } else { BLOCK } / loops.size;
    for at in job.range.clone().step_by(block) {
        let count = block.min(job.range.end - at);
        // SAFETY: the caller's promises are the same ones; the block is inside the job.
        unsafe { fold.block(at, count) };
    }
}

struct Fold<'a> {
    loops: &'a Loops,
    job: &'a Job<'a>,
    tree: Tree,
}

/// A part of the tree.
enum Node {
    Source(usize),
    Leaves { first: usize, width: usize },
}

/// Room for the values of a node.
#[repr(align(64))]
struct Block(MaybeUninit<[u8; BLOCK]>);

impl Block {
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

impl Fold<'_> {
    /// Folds `count` elements from `at` on.
    ///
    /// # Safety
    ///
    /// As for [`run`]; the elements are inside the job and their values fit into a block.
    unsafe fn block(&self, at: usize, count: usize) {
        let job = self.job;
        let size = self.loops.size(job.to);
        // SAFETY: the elements are inside the job.
        let dst = unsafe { job.dst.add(at * size) };
        let narrow = self.loops.half.filter(|_| job.to == Repr::Raw).map(|half| half.narrow);
        // The first source is read before anything is written, so the destination can be the room of the nodes
        // on the left edge unless another source lies there.
        let aliased = || job.sources[1..].iter().any(|source| source.ptr == job.dst.cast_const());
        let direct = narrow.is_none() && !job.stream && !aliased();
        let mut room = Block::new();
        let out = if direct { dst } else { room.as_mut_ptr() };

        let whole = Node::Leaves { first: 0, width: self.tree.leaves() };
        // SAFETY: the caller's promises; `out` has room for the block and overlaps at most the first source.
        let folded = unsafe { self.node(whole, at, count, out) };
        if folded != out.cast_const() {
            // A fold of one.
            // SAFETY: `out` has room for the values and is not where they are; else they were equal.
            unsafe { out.copy_from_nonoverlapping(folded, count * self.loops.size) };
        }
        if let Some(divisor) = job.divisor
            && let Some(divide) = self.loops.divide
        {
            // SAFETY: `out` holds the values.
            unsafe { divide(divisor, out, count) };
        }
        if direct {
            return;
        }
        let mut narrowed = Block::new();
        let result = match narrow {
            Some(narrow) => {
                // SAFETY: halves take less room than the values in `out`, which fit into a block.
                unsafe { narrow(out, narrowed.as_mut_ptr(), count) };
                narrowed.as_mut_ptr()
            }
            None => out,
        };
        if job.stream {
            // SAFETY: the result is in one of our blocks; `dst` is writable by the caller's promise.
            unsafe { stream::copy_past_cache(result, dst, count * size) }
        } else {
            // SAFETY: as above.
            unsafe { dst.copy_from_nonoverlapping(result, count * size) }
        }
    }

    /// Computes a node's values, into `out` if they are not in memory already, and says where they are.
    ///
    /// # Safety
    ///
    /// As for [`block`](Self::block). `out` has room for the values and overlaps at most the first source, and
    /// that exactly and only if the node is on the tree's left edge.
    unsafe fn node(&self, node: Node, at: usize, count: usize, out: *mut u8) -> *const u8 {
        let (left, right) = match node {
            // SAFETY: the caller's promises are the same ones.
            Node::Source(index) => return unsafe { self.source(index, at, count, out) },
            Node::Leaves { first, width: 1 } => match self.tree.leaf(first) {
                // SAFETY: as above.
                Leaf::One(index) => return unsafe { self.source(index, at, count, out) },
                Leaf::Pair(left, right) => (Node::Source(left), Node::Source(right)),
            },
            Node::Leaves { first, width } => {
                let width = width / 2;
                (Node::Leaves { first, width }, Node::Leaves { first: first + width, width })
            }
        };
        let mut room = Block::new();
        // SAFETY: the caller's promises are the same ones.
        let left = unsafe { self.node(left, at, count, out) };
        // SAFETY: the room is a block of our own.
        let right = unsafe { self.node(right, at, count, room.as_mut_ptr()) };
        if left == out.cast_const() {
            // SAFETY: both hold `count` values; the right ones are in the room or in a source other than `out`.
            unsafe { (self.loops.append)(right, out, count) }
        } else {
            // SAFETY: as above, and the left ones are in a source other than `out`.
            unsafe { (self.loops.combine)(left, right, out, count) }
        }
        out
    }

    /// # Safety
    ///
    /// As for [`node`](Self::node).
    unsafe fn source(&self, index: usize, at: usize, count: usize, out: *mut u8) -> *const u8 {
        let source = self.job.sources[index];
        // SAFETY: the elements are inside the job.
        let from = unsafe { source.ptr.add(at * self.loops.size(source.repr)) };
        match self.loops.half {
            Some(half) if source.repr == Repr::Raw => {
                // SAFETY: the source holds `count` halves; `out` has room, and is no source, as only partial
                // results of the same size may lie where a destination of values is.
                unsafe { (half.widen)(from, out, count) };
                out
            }
            _ => from,
        }
    }
}
