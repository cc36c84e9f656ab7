//! Groups of threads in one process.
#![forbid(unsafe_code)]

use std::{
    io,
    sync::{Arc, Weak},
};

use super::{Communicator, group::assemble, roundup::Roundup, shrink::Lineage};
use crate::{
    bootstrap::{control::Control, watcher::Watcher},
    engine::{Health, Timeouts},
    error::{Error, Result},
    link::{self, LinkKind, Receiver, Sender, verbs::Registry},
    os::{self, Waker},
    plan::Overrides,
    topology::Topology,
};

/// Makes a group of `size` ranks in this process, joined by links in memory, one communicator for each of `size` threads.
///
/// # Errors
/// [`Error::InvalidArgument`] if `size` is 0 or more than 1024, [`Error::System`] if the operating system has no descriptors
/// left.
///
/// ```
/// let group = raccl::local_group(3)?;
/// let sums = std::thread::scope(|threads| {
///     let ranks: Vec<_> = group
///         .iter()
///         .map(|comm| {
///             threads.spawn(|| {
///                 let mut value = [comm.rank() as u32 + 1];
///                 comm.all_reduce(&mut value, raccl::Prod).map(|()| value[0])
///             })
///         })
///         .collect();
///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<_>, _>>()
/// })?;
/// assert_eq!(sums, [6, 6, 6]);
/// # Ok::<(), raccl::Error>(())
/// ```
pub fn local_group(size: usize) -> Result<Vec<Communicator>> {
    /// Every pair has a link; more ranks than this is a mistake.
    const MOST: usize = 1024;
    if size == 0 || size > MOST {
        let reason = format!("a local group has 1 to {MOST} ranks, not {size}");
        return Err(Error::InvalidArgument { operation: "local_group", rank: 0, reason });
    }
    let topology = Topology::new(
        &vec![(); size],
        LinkKind::Local,
        LinkKind::Local,
        os::available_cores(),
        Overrides::default(),
    );
    threads(topology, |low, high| Ok(link::local::pair(Arc::clone(low), Arc::clone(high))))
}

/// The two ends of a link.
type Ends = ((Sender, Receiver), (Sender, Receiver));

/// Makes a group in this process over links of any kind, with plans for a topology.
pub(super) fn threads(
    topology: Topology,
    mut link: impl FnMut(&Arc<Waker>, &Arc<Waker>) -> io::Result<Ends>,
) -> Result<Vec<Communicator>> {
    let system = |what, rank, source: io::Error| Error::System { what, rank, source: source.into() };
    let size = topology.size();
    let topology = Arc::new(topology);
    let mut wakers = Vec::new();
    for rank in 0..size {
        wakers.push(Arc::new(Waker::new().map_err(|source| system("making a waker", rank, source))?));
    }
    let mut senders: Vec<Vec<Option<Sender>>> =
        (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    let mut receivers: Vec<Vec<Option<Receiver>>> =
        (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for low in 0..size {
        for high in low + 1..size {
            let ends =
                link(&wakers[low], &wakers[high]).map_err(|source| system("making a link", low, source))?;
            let (first, second) = ends;
            (senders[low][high], receivers[low][high]) = (Some(first.0), Some(first.1));
            (senders[high][low], receivers[high][low]) = (Some(second.0), Some(second.1));
        }
    }
    let senders: Vec<Arc<[Option<Sender>]>> = senders.into_iter().map(Arc::from).collect();
    let healths: Vec<Arc<Health>> = (0..size)
        .map(|rank| Arc::new(Health::new(rank, Arc::clone(&wakers[rank]), Arc::clone(&senders[rank]))))
        .collect();
    let roundup = Roundup::new(size);
    let ranks = receivers.into_iter().enumerate().map(|(rank, receivers)| {
        let watcher = |peer: usize| {
            let watcher: Arc<dyn Watcher> = Arc::clone(&healths[peer]) as Arc<dyn Watcher>;
            (peer != rank).then(|| Arc::downgrade(&watcher))
        };
        let peers: Vec<Option<Weak<dyn Watcher>>> = (0..size).map(watcher).collect();
        let own: Arc<dyn Watcher> = Arc::clone(&healths[rank]) as Arc<dyn Watcher>;
        let control = Control::local(rank, own, peers);
        let parts = crate::engine::Parts {
            rank,
            epoch: 1,
            senders: Arc::clone(&senders[rank]),
            receivers,
            registry: Arc::new(Registry::without_devices()),
            health: Arc::clone(&healths[rank]),
            waker: Arc::clone(&wakers[rank]),
            control,
            policy: crate::engine::Policy::new(size, os::available_cores()),
        };
        let lineage = Lineage::Threads(roundup.seat(rank));
        assemble(parts, Arc::clone(&topology), Timeouts::default(), lineage)
    });
    ranks.collect()
}
