//! Which kinds of link and which cables join the ranks, and what that means for plans. Pure.
//!
//! Everything here is made of what all ranks agreed on when the group formed (the machines, the device matrix, rank 0's
//! wishes), so that every rank comes to the same tuning for every communicator.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
};

use super::layout::CableLayout;
use crate::{
    config::{DeviceMatrix, LinkChoice},
    link::LinkKind,
    plan::{Cabling, Overrides, Tuning},
};

/// How all ranks of a group are joined, and what else the choice of algorithms depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    /// The machine of each rank, as the first rank on it.
    machines: Vec<usize>,
    /// What joins two ranks of one machine that have no cable.
    near: LinkKind,
    /// What joins two ranks of different machines that have no cable.
    far: LinkKind,
    /// The cables by pair, the lower rank first.
    cables: BTreeMap<(usize, usize), Cables>,
    /// Of rank 0's machine.
    cores: usize,
    overrides: Overrides,
}

/// The cables of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cables {
    count: usize,
    /// Whether a device at either end serves another pair too, as behind a switch.
    shared: bool,
}

impl Topology {
    /// Ranks on the given machines (any value that is equal for ranks of one machine), joined by `near` and `far`.
    pub(crate) fn new<M: Eq + std::hash::Hash>(
        machines: &[M],
        near: LinkKind,
        far: LinkKind,
        cores: usize,
        overrides: Overrides,
    ) -> Topology {
        let mut first = HashMap::new();
        let machines = machines
            .iter()
            .enumerate()
            .map(|(rank, machine)| *first.entry(machine).or_insert(rank))
            .collect();
        Topology { machines, near, far, cables: BTreeMap::new(), cores, overrides }
    }

    /// Machines that have nothing but the cables of a matrix.
    pub(super) fn of_cables(matrix: &DeviceMatrix) -> Topology {
        let machines: Vec<usize> = (0..matrix.size()).collect();
        let topology = Topology::new(&machines, LinkKind::Tcp, LinkKind::Tcp, 1, Overrides::default());
        topology.with_cables(matrix)
    }

    /// The same with the cables of a device matrix.
    pub(crate) fn with_cables(mut self, matrix: &DeviceMatrix) -> Topology {
        let size = self.machines.len().min(matrix.size());
        // How many pairs each device serves.
        let mut serves: HashMap<(usize, &str), usize> = HashMap::new();
        for one in 0..size {
            for other in 0..size {
                for device in matrix.cables(one, other) {
                    *serves.entry((one, device.as_str())).or_default() += 1;
                }
            }
        }
        let shared = |one: usize, other: usize| {
            matrix.cables(one, other).iter().any(|device| serves.get(&(one, device.as_str())) > Some(&1))
        };
        for low in 0..size {
            for high in low + 1..size {
                let count = matrix.cables(low, high).len();
                if count > 0 {
                    let shared = shared(low, high) || shared(high, low);
                    self.cables.insert((low, high), Cables { count, shared });
                }
            }
        }
        self
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.machines.len()
    }

    /// How many cables a pair has.
    pub(crate) fn cables(&self, one: usize, other: usize) -> usize {
        self.pair(one, other).map_or(0, |cables| cables.count)
    }

    /// What the choice of algorithms depends on for a communicator of these ranks, in its order.
    pub(crate) fn tuning(&self, members: &[usize]) -> Tuning {
        let cables = |pairs: usize| {
            let counts = neighbours(members.len(), pairs)
                .map(|(one, other)| self.cables(members[one], members[other]));
            counts.min().unwrap_or(1)
        };
        let tuning = match self.layout(members) {
            CableLayout::Mesh => {
                let fewest = self.within(members).map(|(_, cables)| cables.count).min().unwrap_or(1);
                Tuning::thunderbolt(Cabling::Mesh, fewest)
            }
            CableLayout::Ring => Tuning::thunderbolt(Cabling::Ring, cables(members.len())),
            CableLayout::Line => Tuning::thunderbolt(Cabling::Line, cables(members.len() - 1)),
            CableLayout::Switched => Tuning::thunderbolt(Cabling::Shared, 1),
            CableLayout::None | CableLayout::Partial => self.shared(members),
        };
        Tuning { overrides: self.overrides.clone(), ..tuning }
    }

    /// The shape that the cables between these ranks make, in the order of the communicator.
    pub(crate) fn layout(&self, members: &[usize]) -> CableLayout {
        let size = members.len();
        let (mut pairs, mut shared) = (0, false);
        for (_, cables) in self.within(members) {
            pairs += 1;
            shared |= cables.shared;
        }
        let joined = |count: usize| {
            neighbours(size, count).all(|(one, other)| self.cables(members[one], members[other]) > 0)
        };
        match pairs {
            0 => CableLayout::None,
            all if all == size * (size - 1) / 2 => {
                if shared {
                    CableLayout::Switched
                } else {
                    CableLayout::Mesh
                }
            }
            _ if shared => CableLayout::Partial,
            _ if joined(size) => CableLayout::Ring,
            _ if joined(size - 1) => CableLayout::Line,
            _ => CableLayout::Partial,
        }
    }

    /// Why the layout is what it is, in words, with what would be better if something would.
    pub(crate) fn why(&self, members: &[usize]) -> String {
        let size = members.len();
        let counts = |pairs: usize| {
            let counts: HashSet<usize> = neighbours(size, pairs)
                .map(|(one, other)| self.cables(members[one], members[other]))
                .collect();
            Range(counts)
        };
        match self.layout(members) {
            CableLayout::None if size == 1 => "there is one rank".to_owned(),
            CableLayout::None => "no pair of ranks has a cable of its own".to_owned(),
            CableLayout::Mesh => {
                let counts = self.within(members).map(|(_, cables)| cables.count).collect();
                format!("every pair has {}", Range(counts))
            }
            CableLayout::Switched => {
                "every pair is reached, several of them through one device, so they share its speed"
                    .to_owned()
            }
            CableLayout::Ring => {
                format!(
                    "neighbours have {}, the last rank with the first; others are not joined",
                    counts(size)
                )
            }
            CableLayout::Line => {
                format!("neighbours have {}; others are not joined", counts(size - 1))
            }
            CableLayout::Partial => {
                let joined = self.within(members).count();
                let all = size * (size - 1) / 2;
                let base = format!(
                    "{joined} of {all} pairs have a cable and they make no mesh, ring or line in the order of the ranks; \
                     collectives reckon with {} for the others",
                    self.uncabled(members)
                );
                match self.better_order(members) {
                    Some(order) => {
                        let order: Vec<String> = order.iter().map(usize::to_string).collect();
                        format!(
                            "{base}; number the ranks in the order {} to use the cables alone",
                            order.join(", ")
                        )
                    }
                    None => base,
                }
            }
        }
    }

    /// An order of the communicator's ranks in which the cables are a line or a ring, if there is one and they are no more
    /// than that.
    fn better_order(&self, members: &[usize]) -> Option<Vec<usize>> {
        let size = members.len();
        let mut joined: Vec<Vec<usize>> = vec![Vec::new(); size];
        for ((one, other), _) in self.within(members) {
            joined[one].push(other);
            joined[other].push(one);
        }
        if joined.iter().any(|peers| peers.len() > 2) {
            return None;
        }
        let start = (0..size).find(|&rank| joined[rank].len() == 1).unwrap_or(0);
        let mut order = vec![start];
        let mut last = start;
        while let Some(&next) = joined[last].iter().find(|peer| !order.contains(peer)) {
            order.push(next);
            last = next;
        }
        (order.len() == size).then_some(order)
    }

    /// What is reckoned with where not every message goes over cables of its own.
    fn shared(&self, members: &[usize]) -> Tuning {
        let machine = |rank: usize| self.machines.get(rank);
        let crowd = |rank: usize| self.machines.iter().filter(|&one| Some(one) == machine(rank)).count();
        // Ranks of other communicators want the cores too.
        let crowd = members.iter().map(|&rank| crowd(rank)).max().unwrap_or(1);
        match self.uncabled(members) {
            LinkKind::Local => Tuning::threads(crowd, self.cores),
            LinkKind::Shm => Tuning::shared_memory(crowd, self.cores),
            LinkKind::Verbs => Tuning::thunderbolt(Cabling::Shared, 1),
            LinkKind::Tcp if members.iter().all(|&rank| machine(rank) == machine(members[0])) => {
                Tuning::tcp_on_one_machine(crowd, self.cores)
            }
            LinkKind::Tcp => Tuning::tcp_between_machines(),
        }
    }

    /// The slowest kind of link among the pairs that have no cable; verbs if there is none.
    fn uncabled(&self, members: &[usize]) -> LinkKind {
        let size = members.len();
        let mut on_machine: HashMap<usize, usize> = HashMap::new();
        for &rank in members {
            *on_machine.entry(self.machines[rank]).or_default() += 1;
        }
        let mut near: usize = on_machine.values().map(|count| count * (count - 1) / 2).sum();
        let mut far = size * size.saturating_sub(1) / 2 - near;
        for ((one, other), _) in self.within(members) {
            if self.machines[members[one]] == self.machines[members[other]] {
                near -= 1;
            } else {
                far -= 1;
            }
        }
        let slowest = [(near, self.near), (far, self.far)].into_iter().filter(|(pairs, _)| *pairs > 0);
        // A group of one reckons with its machine's kind.
        let none = if size == 1 { self.near } else { LinkKind::Verbs };
        slowest.map(|(_, kind)| kind).max().unwrap_or(none)
    }

    /// The cabled pairs among these ranks, by their place in the communicator.
    fn within(&self, members: &[usize]) -> impl Iterator<Item = ((usize, usize), Cables)> {
        let place: HashMap<usize, usize> =
            members.iter().enumerate().map(|(place, &rank)| (rank, place)).collect();
        self.cables
            .iter()
            .filter_map(move |((low, high), &cables)| Some(((*place.get(low)?, *place.get(high)?), cables)))
    }

    fn pair(&self, one: usize, other: usize) -> Option<Cables> {
        self.cables.get(&(one.min(other), one.max(other))).copied()
    }
}

/// What pairs without a cable take, by what was asked for: of one machine, and of two.
pub(crate) fn without_cable(choice: LinkChoice) -> (LinkKind, LinkKind) {
    match choice {
        LinkChoice::Only(kind) if kind != LinkKind::Verbs => (kind, kind),
        LinkChoice::Only(_) | LinkChoice::Auto => (LinkKind::Tcp, LinkKind::Tcp),
    }
}

/// The first `count` pairs of neighbours around a ring of `size`.
fn neighbours(size: usize, count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).map(move |rank| (rank, (rank + 1) % size))
}

/// Counts of cables, as words.
struct Range(HashSet<usize>);

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (least, most) = (self.0.iter().min().unwrap_or(&0), self.0.iter().max().unwrap_or(&0));
        match (least, most) {
            (1, 1) => f.write_str("1 cable"),
            _ if least == most => write!(f, "{least} cables"),
            _ => write!(f, "{least} to {most} cables"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::{self, Algorithm, Collective, Shape};

    /// A matrix with the given cables, each on devices of its own.
    fn matrix(size: usize, cables: &[(usize, usize)]) -> DeviceMatrix {
        let mut rows = vec![vec![Vec::new(); size]; size];
        for (number, &(one, other)) in cables.iter().enumerate() {
            rows[one][other].push(format!("d{number}"));
            rows[other][one].push(format!("d{number}"));
        }
        DeviceMatrix::from_rows(rows).expect("well formed")
    }

    fn apart(size: usize) -> Topology {
        let machines: Vec<usize> = (0..size).collect();
        Topology::new(&machines, LinkKind::Tcp, LinkKind::Tcp, 2, Overrides::default())
    }

    fn cabled(size: usize, cables: &[(usize, usize)]) -> Topology {
        apart(size).with_cables(&matrix(size, cables))
    }

    fn mesh(size: usize) -> Vec<(usize, usize)> {
        (0..size).flat_map(|one| (one + 1..size).map(move |other| (one, other))).collect()
    }

    fn ring(size: usize) -> Vec<(usize, usize)> {
        neighbours(size, size).collect()
    }

    fn all(size: usize) -> Vec<usize> {
        (0..size).collect()
    }

    #[test]
    fn shapes_are_told_by_their_cables() {
        for size in 2..8 {
            assert_eq!(cabled(size, &[]).layout(&all(size)), CableLayout::None);
            assert_eq!(cabled(size, &mesh(size)).layout(&all(size)), CableLayout::Mesh);
        }
        for size in 4..8 {
            assert_eq!(cabled(size, &ring(size)).layout(&all(size)), CableLayout::Ring);
            let more = [ring(size), vec![(0, 2)]].concat();
            assert_eq!(
                cabled(size, &more).layout(&all(size)),
                CableLayout::Ring,
                "cables across are left alone"
            );
        }
        for size in 3..8 {
            let line: Vec<_> = neighbours(size, size - 1).collect();
            assert_eq!(cabled(size, &line).layout(&all(size)), CableLayout::Line);
            assert_eq!(cabled(size, &line[1..]).layout(&all(size)), CableLayout::Partial);
        }
    }

    #[test]
    fn one_device_for_several_peers_is_a_switch_and_no_mesh() {
        let one = r#"[[null, "rxe0", "rxe0"], ["rxe0", null, "rxe0"], ["rxe0", "rxe0", null]]"#;
        let topology = apart(3).with_cables(&DeviceMatrix::parse(one).expect("well formed"));
        assert_eq!(topology.layout(&all(3)), CableLayout::Switched);
        assert_eq!(topology.tuning(&all(3)).cabling, Cabling::Shared);
    }

    #[test]
    fn a_wish_for_a_ring_leaves_the_other_cables_alone() {
        let topology = apart(4).with_cables(&matrix(4, &mesh(4)).neighbours_only());
        assert_eq!(topology.layout(&all(4)), CableLayout::Ring);
        assert_eq!((topology.cables(0, 2), topology.cables(0, 3), topology.cables(2, 1)), (0, 1, 1));
    }

    #[test]
    fn a_part_of_a_ring_has_the_shape_that_is_left() {
        let topology = cabled(6, &ring(6));
        for (members, layout) in [
            (&[0, 1][..], CableLayout::Mesh),
            (&[1, 2, 3], CableLayout::Line),
            (&[3, 2, 1], CableLayout::Line),
            (&[4, 5, 0, 1], CableLayout::Line),
            (&[0, 2, 4], CableLayout::None),
            (&[0, 1, 3, 4], CableLayout::Partial),
            (&[1, 0, 2], CableLayout::Partial),
            (&[5], CableLayout::None),
            (&[2, 3, 4, 5, 0, 1], CableLayout::Ring),
            (&[5, 4, 3, 2, 1, 0], CableLayout::Ring),
        ] {
            assert_eq!(topology.layout(members), layout, "{members:?}");
        }
        assert_eq!(topology.tuning(&[0, 2, 4]), apart(6).tuning(&[0, 2, 4]), "TCP between machines");
    }

    #[test]
    fn more_cables_make_the_same_shape_faster() {
        let once = cabled(4, &ring(4)).tuning(&all(4));
        let twice = cabled(4, &[ring(4), ring(4)].concat()).tuning(&all(4));
        assert_eq!((once.cabling, twice.cabling), (Cabling::Ring, Cabling::Ring));
        assert_eq!(twice.byte_ps, once.byte_ps / 2);
        // The slowest pair decides.
        let uneven = cabled(4, &[ring(4), vec![(0, 1)]].concat()).tuning(&all(4));
        assert_eq!(uneven, once);
    }

    #[test]
    fn without_cables_the_kind_and_the_machines_decide() {
        let here =
            |near, far, machines: &[usize]| Topology::new(machines, near, far, 2, Overrides::default());
        let (tcp, shm, local) = (LinkKind::Tcp, LinkKind::Shm, LinkKind::Local);
        assert_eq!(here(tcp, tcp, &[7; 4]).tuning(&all(4)), Tuning::tcp_on_one_machine(4, 2));
        assert_eq!(
            here(tcp, tcp, &[7; 4]).tuning(&[1, 3]),
            Tuning::tcp_on_one_machine(4, 2),
            "others run too"
        );
        assert_eq!(here(tcp, tcp, &[7, 7, 8, 8]).tuning(&all(4)), Tuning::tcp_between_machines());
        assert_eq!(here(tcp, tcp, &[7, 7, 8, 8]).tuning(&[2, 3]), Tuning::tcp_on_one_machine(2, 2));
        assert_eq!(here(shm, tcp, &[7, 7, 8, 8]).tuning(&all(4)), Tuning::tcp_between_machines());
        assert_eq!(here(shm, tcp, &[7, 7, 8, 8]).tuning(&[0, 1]), Tuning::shared_memory(2, 2));
        assert_eq!(here(local, local, &[7; 3]).tuning(&all(3)), Tuning::threads(3, 2));
        assert_eq!(here(local, local, &[7; 1]).tuning(&all(1)), Tuning::threads(1, 2));
    }

    #[test]
    fn the_wrong_order_of_ranks_is_recognised() {
        let crossed = cabled(4, &[(0, 2), (2, 1), (1, 3)]);
        assert_eq!(crossed.layout(&all(4)), CableLayout::Partial);
        let why = crossed.why(&all(4));
        assert!(why.contains("3 of 6 pairs") && why.contains("order 0, 2, 1, 3"), "{why}");
        assert_eq!(crossed.layout(&[0, 2, 1, 3]), CableLayout::Line);
        let star = cabled(4, &[(0, 1), (0, 2), (0, 3)]);
        assert!(!star.why(&all(4)).contains("order 0"), "{}", star.why(&all(4)));
        assert_eq!(star.tuning(&all(4)), apart(4).tuning(&all(4)));
    }

    /// Any cables between up to 7 ranks, and some of the ranks in any order.
    fn groups() -> impl Strategy<Value = (usize, Vec<(usize, usize)>, Vec<usize>)> {
        (2..8usize).prop_flat_map(|size| {
            let pairs = mesh(size);
            let chosen = prop_oneof![
                proptest::sample::subsequence(pairs.clone(), 0..=pairs.len()),
                Just(ring(size)),
                Just(neighbours(size, size - 1).collect::<Vec<_>>()),
                Just(pairs),
            ];
            let members =
                proptest::sample::subsequence((0..size).collect::<Vec<_>>(), 1..=size).prop_shuffle();
            (Just(size), chosen, members)
        })
    }

    proptest! {
        #[test]
        fn plans_that_reckon_with_cables_of_their_own_use_no_pair_without_one(
            (size, cables, members) in groups(),
            count in prop_oneof![Just(1usize), Just(100), Just(1 << 20)],
            collective in 0..5usize,
        ) {
            let topology = cabled(size, &cables);
            let tuning = topology.tuning(&members);
            let ranks = members.len();
            let parts = vec![count; ranks];
            let collective = match collective {
                0 => Collective::Barrier,
                1 => Collective::AllReduce { count },
                2 => Collective::AllGather { counts: parts },
                3 => Collective::ReduceScatter { counts: parts },
                _ => Collective::Broadcast { root: count % ranks, count },
            };
            for rank in 0..ranks {
                let shape = Shape { collective: collective.clone(), rank, size: ranks, in_place: false, raw_size: 4, acc_size: 4, ordered: false };
                let choice = plan::choose(&shape, &tuning);
                let plan = plan::make(&shape, choice.algorithm).expect("what is chosen can be planned");
                let sent_to = plan.steps.iter().filter_map(|step| match step.action {
                    plan::Action::Send { to, .. } => Some(to),
                    _ => None,
                });
                for peer in sent_to.filter(|_| tuning.cabling != Cabling::Shared) {
                    prop_assert!(topology.cables(members[rank], members[peer]) > 0, "{} over {:?}", choice.algorithm, cables);
                }
            }
        }

        #[test]
        fn turning_the_ranks_around_changes_no_shape((size, cables, members) in groups()) {
            let topology = cabled(size, &cables);
            let mut turned = members.clone();
            turned.reverse();
            prop_assert_eq!(topology.layout(&members), topology.layout(&turned));
            prop_assert_eq!(topology.tuning(&members), topology.tuning(&turned));
        }

        #[test]
        fn an_order_that_is_proposed_makes_a_line_or_a_ring((size, cables, members) in groups()) {
            let topology = cabled(size, &cables);
            if topology.layout(&members) == CableLayout::Partial
                && let Some(order) = topology.better_order(&members)
            {
                let better: Vec<usize> = order.into_iter().map(|place| members[place]).collect();
                prop_assert!(matches!(topology.layout(&better), CableLayout::Line | CableLayout::Ring));
            }
        }
    }

    #[test]
    fn only_local_plans_run_alone() {
        let tuning = cabled(4, &ring(4)).tuning(&[2]);
        let shape = Shape {
            collective: Collective::AllReduce { count: 9 },
            rank: 0,
            size: 1,
            in_place: true,
            raw_size: 4,
            acc_size: 4,
            ordered: false,
        };
        assert_eq!(plan::choose(&shape, &tuning).algorithm, Algorithm::Local);
    }
}
