//! What happens before what.
//!
//! The unit is one chunk of one step. A chunk waits for what its dependencies say and, if it receives, for the sending of the
//! same chunk; nothing else is assumed: not even that the chunks of a step are handled in order. The end of a send means that
//! its memory has been read, not that the peer has the data; an arrival means that the data has been read at the sender.
//!
//! Deadlocks are looked for in a harsher world. A link between two ranks holds nothing: a send ends when the peer takes the
//! message. Links to different peers move independently. A receive takes a chunk when its own dependencies allow; a fold takes
//! one chunk of each leaf at a time, and the next when that has been folded. The streams between two ranks may move each by
//! itself, or the link may carry one message at a time in the order of the sending steps: both must be free of circles of
//! waiting, and then no timing leads to a deadlock, because nothing ever chooses between two messages.
#![forbid(unsafe_code)]

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use super::{
    super::{Action, After, Collective, Plan, Shape, Step},
    Fault, Kind,
    form::{End, Matching},
    memory::Memory,
};

/// The chunks of all steps of all ranks, as nodes of a graph.
pub(super) struct Order {
    /// Elements of a chunk.
    chunk: usize,
    /// By rank and step: the node of chunk 0. The others follow, then the node of the completed step.
    first: Vec<Vec<usize>>,
    nodes: Vec<Node>,
    /// Every node after all that happens before it.
    pub(super) sorted: Vec<usize>,
    /// By node: the set of nodes that happen before it.
    before: Vec<Vec<u64>>,
}

/// What a node stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) rank: usize,
    pub(super) step: usize,
    /// `None` when the step is complete.
    pub(super) chunk: Option<usize>,
}

impl Order {
    pub(super) fn new(plans: &[Plan], matching: &Matching, raw_size: usize) -> Result<Order, Fault> {
        let chunk = plans[0].chunk_elements(raw_size);
        let mut nodes = Vec::new();
        let mut first = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            let mut of_rank = Vec::new();
            for (step, Step { action, .. }) in plan.steps.iter().enumerate() {
                of_rank.push(nodes.len());
                let chunks = action.len().div_ceil(chunk).max(1);
                nodes.extend((0..chunks).map(|chunk| Node { rank, step, chunk: Some(chunk) }));
                nodes.push(Node { rank, step, chunk: None });
            }
            first.push(of_rank);
        }
        let mut order = Order { chunk, first, nodes, sorted: Vec::new(), before: Vec::new() };

        let mut edges = vec![Vec::new(); order.nodes.len()];
        for (node, &Node { rank, step, chunk }) in order.nodes.iter().enumerate() {
            let Some(chunk) = chunk else { continue };
            edges[order.complete(rank, step)].push(node);
            edges[node] = order.dependencies(plans, rank, step, chunk);
            for leaf in plans[rank].steps[step].action.peer_leaves() {
                let (peer, send) = matching.sender[&End { rank, step, leaf }];
                edges[node].push(order.node(peer, send, chunk));
            }
        }
        order.sorted = match sort(&edges) {
            Ok(sorted) => sorted,
            Err(circle) => {
                return Fault::new(Kind::Deadlock, format!("{:?} waits for itself", order.nodes[circle]));
            }
        };
        order.before = closure(&edges, &order.sorted);
        Ok(order)
    }

    /// What a chunk of a step waits for on its own rank.
    fn dependencies(&self, plans: &[Plan], rank: usize, step: usize, chunk: usize) -> Vec<usize> {
        let after = plans[rank].steps[step].after.iter();
        after
            .map(|after| match *after {
                After::Whole(earlier) => self.complete(rank, earlier),
                After::Stream(earlier) => self.node(rank, earlier, chunk),
            })
            .collect()
    }

    /// The elements that a node handles; `None` for completions.
    pub(super) fn elements(&self, node: usize, plans: &[Plan]) -> Option<Range<usize>> {
        let Node { rank, step, chunk } = self.nodes[node];
        let len = plans[rank].steps[step].action.len();
        chunk.map(|chunk| chunk * self.chunk..((chunk + 1) * self.chunk).min(len))
    }

    pub(super) fn at(&self, node: usize) -> Node {
        self.nodes[node]
    }

    pub(super) fn node(&self, rank: usize, step: usize, chunk: usize) -> usize {
        self.first[rank][step] + chunk
    }

    fn chunks(&self, rank: usize, step: usize) -> usize {
        let first = self.first[rank][step];
        self.nodes[first..].iter().take_while(|node| node.chunk.is_some()).count()
    }

    fn complete(&self, rank: usize, step: usize) -> usize {
        self.first[rank][step] + self.chunks(rank, step)
    }

    fn happens_before(&self, one: usize, other: usize) -> bool {
        self.before[other][one / 64] >> (one % 64) & 1 == 1
    }

    /// Two accesses to the same memory must be ordered unless both read. A fold that waits for no step may receive its first
    /// peer's elements where its result goes, so it writes there from when that peer sends.
    pub(super) fn check_races(
        &self,
        plans: &[Plan],
        memories: &[Memory],
        matching: &Matching,
    ) -> Result<(), Fault> {
        struct Access {
            region: usize,
            range: Range<usize>,
            write: bool,
            node: usize,
        }
        for (rank, (plan, memory)) in plans.iter().zip(memories).enumerate() {
            let mut accesses = Vec::new();
            let mut landings = HashMap::new();
            for (step, Step { action, after }) in plan.steps.iter().enumerate() {
                let landing = match action {
                    Action::RecvFold { .. } if after.is_empty() => action.peer_leaves().next(),
                    _ => None,
                };
                for (chunk, node) in
                    (0..self.chunks(rank, step)).map(|chunk| (chunk, self.node(rank, step, chunk)))
                {
                    if let Some(leaf) = landing {
                        let (peer, send) = matching.sender[&End { rank, step, leaf }];
                        landings.insert(node, self.node(peer, send, chunk));
                    }
                    let elements = self.elements(node, plans).expect("a chunk has elements");
                    let reads = action.reads().into_iter().map(|span| (span, false));
                    for (span, write) in reads.chain(action.write().map(|span| (span, true))) {
                        let (region, ranges) = memory.locate(span, elements.clone());
                        let list = ranges.into_iter().map(|range| Access { region, range, write, node });
                        accesses.extend(list);
                    }
                }
            }
            accesses.sort_by_key(|access| (access.region, access.range.start));
            for (index, one) in accesses.iter().enumerate() {
                let overlapping = accesses[index + 1..]
                    .iter()
                    .take_while(|other| other.region == one.region && other.range.start < one.range.end);
                for other in overlapping.filter(|other| (one.write || other.write) && other.node != one.node)
                {
                    if !self.happens_before(one.node, other.node)
                        && !self.happens_before(other.node, one.node)
                    {
                        let (one, other) = (self.nodes[one.node], self.nodes[other.node]);
                        return Fault::new(Kind::Race, format!("{one:?} and {other:?} are not ordered"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Nobody may leave a barrier before everybody has entered it: some step of each rank, which can only start when that
    /// rank has entered, must happen before some step of every other.
    pub(super) fn check_barrier(&self, shape: &Shape) -> Result<(), Fault> {
        if shape.collective != Collective::Barrier {
            return Ok(());
        }
        let of_rank = |rank: usize| (0..self.nodes.len()).filter(move |&node| self.nodes[node].rank == rank);
        for entering in 0..shape.size {
            for leaving in (0..shape.size).filter(|&rank| rank != entering) {
                let waits = of_rank(leaving)
                    .any(|late| of_rank(entering).any(|early| self.happens_before(early, late)));
                if !waits {
                    let text = format!("rank {leaving} may leave before rank {entering} has entered");
                    return Fault::new(Kind::Barrier, text);
                }
            }
        }
        Ok(())
    }

    /// See the module's words for the model.
    pub(super) fn check_deadlock(&self, plans: &[Plan], matching: &Matching) -> Result<(), Fault> {
        for in_order in [false, true] {
            if let Err(circle) = sort(&self.rendezvous(plans, matching, in_order)) {
                let node = self.nodes.get(circle);
                let text =
                    format!("{node:?} waits for itself on links that hold nothing (in order: {in_order})");
                return Fault::new(Kind::Deadlock, text);
            }
        }
        Ok(())
    }

    /// What each node waits for on links that hold nothing. A chunk's node says that it is ready to be sent; two further
    /// nodes for each message say that the peer may take it and that it was taken.
    fn rendezvous(&self, plans: &[Plan], matching: &Matching, in_order: bool) -> Vec<Vec<usize>> {
        let mut edges: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        let mut previous: HashMap<(usize, usize), usize> = HashMap::new();
        // By the node of a sending chunk.
        let mut taken: HashMap<usize, usize> = HashMap::new();
        for (node, &Node { rank, step, chunk }) in self.nodes.iter().enumerate() {
            let Some(chunk) = chunk else { continue };
            edges[node].extend(self.dependencies(plans, rank, step, chunk));
            let complete = self.complete(rank, step);
            let Some(&end) = matching.receiver.get(&(rank, step)) else {
                edges[complete].push(node);
                continue;
            };
            let receiving = self.node(end.rank, end.step, chunk);
            let willing = edges.len();
            edges.push(match plans[end.rank].steps[end.step].action {
                Action::Recv { .. } => self.dependencies(plans, end.rank, end.step, chunk),
                _ if chunk == 0 => vec![],
                _ => vec![receiving - 1],
            });
            let taking = edges.len();
            edges.push(vec![node, willing]);
            edges[receiving].push(taking);
            edges[complete].push(taking);
            let earlier = previous.insert((rank, end.rank), taking);
            edges[node].extend(earlier.filter(|_| in_order || chunk > 0));
            taken.insert(node, taking);
        }
        // Whoever waits for a sending chunk waits until it has been taken; only the taking itself waits until it is ready.
        let taking: HashSet<usize> = taken.values().copied().collect();
        for (node, before) in edges.iter_mut().enumerate().filter(|(node, _)| !taking.contains(node)) {
            for earlier in before.iter_mut().filter(|earlier| **earlier != node) {
                *earlier = taken.get(earlier).copied().unwrap_or(*earlier);
            }
        }
        edges
    }
}

/// All nodes, each after those in its list; or a node on a circle.
fn sort(edges: &[Vec<usize>]) -> Result<Vec<usize>, usize> {
    let mut waiting: Vec<usize> = edges.iter().map(Vec::len).collect();
    let mut followers = vec![Vec::new(); edges.len()];
    for (node, before) in edges.iter().enumerate() {
        for &earlier in before {
            followers[earlier].push(node);
        }
    }
    let mut sorted: Vec<usize> = (0..edges.len()).filter(|&node| waiting[node] == 0).collect();
    let mut next = 0;
    while let Some(&node) = sorted.get(next) {
        next += 1;
        for &follower in &followers[node] {
            waiting[follower] -= 1;
            if waiting[follower] == 0 {
                sorted.push(follower);
            }
        }
    }
    match waiting.iter().position(|&count| count > 0) {
        None => Ok(sorted),
        Some(node) => Err(node),
    }
}

/// For each node the set of all that come before it.
fn closure(edges: &[Vec<usize>], sorted: &[usize]) -> Vec<Vec<u64>> {
    let mut sets = vec![Vec::new(); edges.len()];
    for &node in sorted {
        let mut set = vec![0u64; edges.len().div_ceil(64)];
        for &earlier in &edges[node] {
            set[earlier / 64] |= 1 << (earlier % 64);
            for (word, other) in set.iter_mut().zip(&sets[earlier]) {
                *word |= other;
            }
        }
        sets[node] = set;
    }
    sets
}
