//! Parts that travel between neighbours on both sides of their owner at once.
//!
//! Every block of elements has an owner. To reduce, partial results start at the furthest rank on either side and are folded
//! on the way to the owner, who folds what comes from below, its own elements and what comes from above. To gather, the
//! owner's result travels the other way. On a ring each side reaches halfway around, so that both directions of every cable
//! carry half the bytes; on a line each side reaches to the end.
//!
//! The order of a fold is fixed by the number of elements, of ranks and the cabling: ((a + b) + c) + ... from below, plus the
//! owner's, plus ... + (x + (y + z)) from above. On a line that is the order of the ranks.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::{After, Leaf, Shape, Span, partials::Partials, parts::part, steps::Steps};
use crate::reduce::Repr;

/// On a ring of an even number of ranks, blocks from this many elements on are cut in two, of which one half comes from the
/// opposite rank over either side; below it the bytes do not matter and the second message would.
const CUT: usize = 1024;

/// How the ranks are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cables {
    /// Each to the next, and the last to the first.
    Ring,
    /// Each to the next.
    Line,
}

/// The blocks of an operation, by owner, and the cables that they travel over.
#[derive(Debug)]
pub(super) struct Blocks<'a> {
    pub(super) shape: &'a Shape,
    pub(super) cables: Cables,
    pub(super) blocks: Vec<Range<usize>>,
}

/// The elements of a block that travel alike, and how many ranks on either side of the owner they pass.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) elements: Range<usize>,
    below: usize,
    above: usize,
}

/// A side of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Below,
    Above,
}

const SIDES: [Side; 2] = [Side::Below, Side::Above];

impl Blocks<'_> {
    /// The pieces of an owner's block. The same for all kinds of elements.
    pub(super) fn pieces(&self, owner: usize) -> Vec<Piece> {
        let size = self.shape.size;
        let block = self.blocks[owner].clone();
        match self.cables {
            Cables::Line => vec![Piece { elements: block, below: owner, above: size - 1 - owner }],
            Cables::Ring if size.is_multiple_of(2) && block.len() >= CUT => {
                let half = |index| {
                    let half = part(block.len(), 2, index);
                    block.start + half.start..block.start + half.end
                };
                vec![
                    Piece { elements: half(0), below: size / 2, above: size / 2 - 1 },
                    Piece { elements: half(1), below: size / 2 - 1, above: size / 2 },
                ]
            }
            Cables::Ring => vec![Piece { elements: block, below: size / 2, above: (size - 1) / 2 }],
        }
    }

    /// Folds every block towards its owner. `into` is where the final values of a piece of this rank's block go. Returns the
    /// last step for each piece. The ranks must be joined to at least two different neighbours.
    pub(super) fn reduce(&self, steps: &mut Steps, into: impl Fn(&Range<usize>) -> Span) -> Vec<usize> {
        let shape = self.shape;
        let longest = (0..shape.size)
            .filter(|&owner| owner != shape.rank)
            .flat_map(|owner| self.pieces(owner))
            .map(|piece| piece.elements.len())
            .max()
            .unwrap_or(0);
        // What comes from either side is on its way at the same time.
        let mut partials = SIDES.map(|side| {
            let passes_on = self.neighbour(side, 1).is_some() && self.neighbour(side.opposite(), 1).is_some();
            passes_on.then(|| Partials::new(shape, steps, longest))
        });
        for distance in (1..shape.size).rev() {
            for (side, partials) in SIDES.into_iter().zip(&mut partials) {
                // The block's owner is so far on the other side of this rank, so what comes from this side is for it.
                let (Some(owner), Some(next)) =
                    (self.neighbour(side.opposite(), distance), self.neighbour(side.opposite(), 1))
                else {
                    continue;
                };
                for piece in self.pieces(owner) {
                    let reach = piece.reach(side);
                    let own = Span::input(piece.elements.clone());
                    if distance == reach {
                        steps.send(next, own, vec![]);
                    } else if distance < reach {
                        let from = self.neighbour(side, 1).expect("a rank within reach is not the first");
                        let partials = partials.as_mut().expect("a rank between two others passes on");
                        let (place, after) = partials.next(piece.elements.clone());
                        let leaves = self.leaves(own, [(side, from, distance + 1 == reach)]);
                        let fold = steps.recv_fold(leaves, place.clone(), false, after);
                        partials.read_by(steps.send(next, place, vec![After::Stream(fold)]));
                    }
                }
            }
        }
        let own = self.pieces(shape.rank).into_iter().map(|piece| {
            let sides = SIDES.into_iter().filter(|&side| piece.reach(side) > 0).map(|side| {
                let from = self.neighbour(side, 1).expect("what has a reach has a neighbour");
                (side, from, piece.reach(side) == 1)
            });
            let leaves = self.leaves(Span::input(piece.elements.clone()), sides);
            steps.recv_fold(leaves, into(&piece.elements), true, vec![])
        });
        own.collect()
    }

    /// Spreads every block from its owner into all outputs. `own` is, for each piece of this rank's block, where its final
    /// values are and what has to be waited for.
    pub(super) fn gather(&self, steps: &mut Steps, own: Vec<(Span, Vec<After>)>) {
        let shape = self.shape;
        for side in SIDES {
            for (piece, (from, after)) in self.pieces(shape.rank).into_iter().zip(&own) {
                if let (true, Some(to)) = (piece.reach(side) > 0, self.neighbour(side, 1)) {
                    steps.send(to, from.clone(), after.clone());
                }
            }
        }
        for distance in 1..shape.size {
            for side in SIDES {
                let Some(owner) = self.neighbour(side.opposite(), distance) else { continue };
                for piece in self.pieces(owner).into_iter().filter(|piece| piece.reach(side) >= distance) {
                    let from = self
                        .neighbour(side.opposite(), 1)
                        .expect("an owner on a side means a neighbour there");
                    // In place, what was sent from here is part of the result that comes.
                    let recv = steps.recv(from, Span::output(piece.elements.clone()), vec![]);
                    if let (true, Some(to)) = (piece.reach(side) > distance, self.neighbour(side, 1)) {
                        steps.send(to, Span::output(piece.elements), vec![After::Stream(recv)]);
                    }
                }
            }
        }
    }

    /// The rank so far on a side of this one.
    fn neighbour(&self, side: Side, distance: usize) -> Option<usize> {
        let shape = self.shape;
        match (self.cables, side) {
            (Cables::Ring, Side::Below) => Some(shape.below(distance)),
            (Cables::Ring, Side::Above) => Some(shape.above(distance)),
            (Cables::Line, Side::Below) => shape.rank.checked_sub(distance),
            (Cables::Line, Side::Above) => Some(shape.rank + distance).filter(|&rank| rank < shape.size),
        }
    }

    /// The operands in order: from below, own, from above. For each side the neighbour and whether it sends raw elements.
    fn leaves(&self, own: Span, sides: impl IntoIterator<Item = (Side, usize, bool)>) -> Vec<Leaf> {
        let mut leaves = vec![Leaf::Local(own)];
        for (side, rank, raw) in sides {
            let peer = Leaf::Peer { rank, repr: if raw { Repr::Raw } else { self.shape.partial_repr() } };
            match side {
                Side::Below => leaves.insert(0, peer),
                Side::Above => leaves.push(peer),
            }
        }
        leaves
    }
}

impl Piece {
    fn reach(&self, side: Side) -> usize {
        match side {
            Side::Below => self.below,
            Side::Above => self.above,
        }
    }
}

impl Side {
    fn opposite(self) -> Side {
        match self {
            Side::Below => Side::Above,
            Side::Above => Side::Below,
        }
    }
}
