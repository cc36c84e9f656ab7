//! Runs all plans on symbols and compares the outputs with the promise.
//!
//! One order of events is enough: the plans are free of races, so every order gives the same values.
#![forbid(unsafe_code)]

use super::{
    super::{Action, Buffer, Collective, Leaf, Plan, Span, parts::part_of},
    Fault, Kind,
    expression::{Expression, Expressions},
    form::{End, Matching},
    memory::{INPUT, Memory},
    order::{Node, Order},
};
use crate::reduce::Repr;

/// What one element of memory holds: an expression, of which element of the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    value: Expression,
    element: usize,
}

/// Memory by rank, region and element; `None` where nothing was written yet.
type Cells = Vec<Vec<Vec<Option<Cell>>>>;

pub(super) fn check(
    plans: &[Plan],
    memories: &[Memory],
    matching: &Matching,
    order: &Order,
    promise: impl Fn(&mut Expressions, usize) -> Expression,
) -> Result<(), Fault> {
    let mut expressions = Expressions::default();
    let mut cells: Cells = memories.iter().map(|memory| initial(memory, &mut expressions)).collect();
    let mut payloads: Vec<Vec<Cell>> = vec![Vec::new(); order.sorted.len()];

    for &node in &order.sorted {
        let Some(elements) = order.elements(node, plans) else { continue };
        let Node { rank, step, chunk } = order.at(node);
        let action = &plans[rank].steps[step].action;
        let fault = |text: String| Fault {
            kind: Kind::Value,
            text: format!("rank {rank}, step {step} {action:?}: {text}"),
        };
        let load = |cells: &Cells, span: &Span| -> Result<Vec<Cell>, Fault> {
            let (region, ranges) = memories[rank].locate(span, elements.clone());
            let loaded: Option<Vec<Cell>> =
                ranges.into_iter().flatten().map(|index| cells[rank][region][index]).collect();
            loaded.ok_or_else(|| fault(format!("reads {span:?} before it is written")))
        };
        let received = |leaf: usize| {
            let (peer, send) = matching.sender[&End { rank, step, leaf }];
            payloads[order.node(peer, send, chunk.expect("chunks have elements"))].clone()
        };
        let result = match action {
            Action::Send { from, .. } => {
                payloads[node] = load(&cells, from)?;
                continue;
            }
            Action::Recv { .. } => received(0),
            Action::Copy { from, .. } => load(&cells, from)?,
            Action::RecvFold { leaves, finish, .. } => {
                let operands = leaves.iter().enumerate().map(|(leaf, operand)| match operand {
                    Leaf::Peer { .. } => Ok(received(leaf)),
                    Leaf::Local(span) => load(&cells, span),
                });
                let operands = operands.collect::<Result<Vec<_>, _>>()?;
                fold(&mut expressions, &operands, *finish).map_err(fault)?
            }
        };
        let into = action.write().expect("everything but a send writes");
        let (region, ranges) = memories[rank].locate(into, elements.clone());
        if region == INPUT {
            return Err(fault("writes the user's input".into()));
        }
        let raw_only = into.repr == Repr::Raw && !memories[rank].shape.partials_are_raw();
        for (index, cell) in ranges.into_iter().flatten().zip(result) {
            if raw_only && !expressions.is_raw(cell.value) {
                return Err(fault(format!("rounds the partial value {}", expressions.show(cell.value))));
            }
            cells[rank][region][index] = Some(cell);
        }
    }
    compare(memories, &cells, &mut expressions, promise)
}

/// The memory of a rank when the call begins.
fn initial(memory: &Memory, expressions: &mut Expressions) -> Vec<Vec<Option<Cell>>> {
    let rank = memory.shape.rank;
    let mut regions: Vec<Vec<Option<Cell>>> = memory.regions().iter().map(|&size| vec![None; size]).collect();
    let (buffer, first) = match &memory.shape.collective {
        Collective::Barrier => return regions,
        Collective::Broadcast { root, .. } if *root != rank => return regions,
        Collective::Broadcast { .. } => (Buffer::Output, 0),
        Collective::AllReduce { .. } | Collective::ReduceScatter { .. } => (Buffer::Input, 0),
        Collective::AllGather { counts } => (Buffer::Input, part_of(counts, rank).start),
    };
    let place = memory.place(buffer).expect("the operation has this buffer");
    let value = expressions.input(rank);
    for index in 0..place.len {
        regions[place.region][place.offset + index] = Some(Cell { value, element: first + index });
    }
    regions
}

fn fold(expressions: &mut Expressions, operands: &[Vec<Cell>], finish: bool) -> Result<Vec<Cell>, String> {
    (0..operands[0].len())
        .map(|index| {
            let element = operands[0][index].element;
            let mut values = Vec::with_capacity(operands.len());
            for operand in operands {
                let cell = operand[index];
                if cell.element != element {
                    return Err(format!("folds element {element} with element {}", cell.element));
                }
                if expressions.is_finished(cell.value) {
                    return Err(format!("folds the final value {}", expressions.show(cell.value)));
                }
                values.push(cell.value);
            }
            let tree = expressions.tree(&values);
            Ok(Cell { value: if finish { expressions.finished(tree) } else { tree }, element })
        })
        .collect()
}

fn compare(
    memories: &[Memory],
    cells: &Cells,
    expressions: &mut Expressions,
    promise: impl Fn(&mut Expressions, usize) -> Expression,
) -> Result<(), Fault> {
    for (rank, memory) in memories.iter().enumerate() {
        let place = memory.place(Buffer::Output).expect("every operation has an output");
        let first = match &memory.shape.collective {
            Collective::ReduceScatter { counts } => part_of(counts, rank).start,
            _ => 0,
        };
        for index in 0..place.len {
            let element = first + index;
            let wanted = Cell { value: promise(expressions, element), element };
            let found = cells[rank][place.region][place.offset + index];
            if found != Some(wanted) {
                let show =
                    |cell: Cell| format!("{} of element {}", expressions.show(cell.value), cell.element);
                let found = found.map_or("nothing".into(), show);
                let text = format!("rank {rank} ends with {found} instead of {}", show(wanted));
                return Fault::new(Kind::Value, text);
            }
        }
    }
    Ok(())
}
