//! The neighbours of a group of partitions in memory (OUTRE, section 4.2): the dynamic neighbour cache. Batches of a
//! group mostly meet nodes of its own partitions. Their neighbours are read in one go when the group begins, and those of
//! the next group while batches of this one are sampled.
//!
//! Samplers may be in several groups at a time. Each has at most one group; a group that nobody has gives way to the next.
//! Nobody waits for another sampler: a batch whose group finds no room reads from disk. So samples never depend on it.

use super::by_partition::PartitionedAdjacency;
use super::{DiskGraph, StoredId};
use crate::order::BatchGroup;
use crate::{Batches, Position, Result, SampleError};
use esker_io::{Options, Piece, Queue, prefetch};
use esker_store::{PAYLOAD_OFFSET, StoreError};
use esker_types::{NodeId, PartitionId};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// The start of a node's neighbours that is not one.
const EMPTY: u32 = u32::MAX;
/// Partitions that are read together, for the memory of reading.
const READ_PIECES: u64 = 256;
/// Epochs whose groups are measured.
const MOST_EPOCHS: u64 = 100;

/// A node, and where its neighbours start.
#[derive(Debug, Clone, Copy)]
struct GroupSlot<W> {
    node: W,
    start: u32,
}

/// The neighbours of the nodes of some partitions.
#[derive(Debug)]
pub struct GroupNeighbours<W> {
    /// An open hash table of a power of two slots.
    table: Vec<GroupSlot<W>>,
    shift: u32,
    words: Vec<W>,
}

/// Partitions are long: few large reads in flight suffice, and little memory.
pub(super) fn read_options() -> Options {
    let large = 128 << 10;
    Options {
        depth: 16,
        max_bytes: large,
        in_flight_bytes: 4 * large,
        staging_bytes: 4 * large,
        ..Options::default()
    }
}

fn slots_for(nodes: u64) -> u64 {
    // At most two thirds of the slots are taken.
    (nodes + nodes / 2 + 1).next_power_of_two()
}

impl<W: StoredId> GroupNeighbours<W> {
    /// Bytes of so many nodes and words.
    pub fn bytes_for(nodes: u64, words: u64) -> u64 {
        let table = slots_for(nodes).saturating_mul(size_of::<GroupSlot<W>>() as u64);
        words.saturating_mul(size_of::<W>() as u64).saturating_add(table)
    }

    /// A node's neighbours, followed by others.
    #[inline(always)]
    pub(super) fn list(&self, node: NodeId) -> Option<&[W]> {
        let (mut at, mask) = (self.slot(node), self.table.len() - 1);
        loop {
            let slot = self.table[at];
            if slot.start == EMPTY {
                return None;
            }
            if slot.node.node() == node {
                return Some(&self.words[slot.start as usize..]);
            }
            at = (at + 1) & mask;
        }
    }

    #[inline(always)]
    pub(super) fn prefetch(&self, node: NodeId) {
        prefetch(&self.table, self.slot(node));
    }

    #[inline(always)]
    fn slot(&self, node: NodeId) -> usize {
        // The shift is 64 for a single slot.
        node.0.wrapping_mul(0x9E37_79B9_7F4A_7C15).checked_shr(self.shift).unwrap_or(0) as usize
    }

    /// Reads the neighbours of some partitions: as many of them as fit, in their order.
    fn load(
        stored: &PartitionedAdjacency,
        graph: &DiskGraph,
        partitions: &[PartitionId],
        most_bytes: u64,
        queue: &mut Queue,
    ) -> Result<GroupNeighbours<W>> {
        let (mut nodes, mut count, mut taken) = (0, 0, Vec::with_capacity(partitions.len()));
        for partition in partitions {
            let (range, more) = (stored.words_of(*partition), stored.nodes_of(*partition));
            let with = (nodes + more, count + range.end - range.start);
            if GroupNeighbours::<W>::bytes_for(with.0, with.1) <= most_bytes && with.1 < EMPTY as u64 {
                (nodes, count) = with;
                taken.push((range, more));
            }
        }
        let (mut words, mut pieces, mut at) = (vec![W::default(); count as usize], Vec::new(), 0);
        let width = size_of::<W>() as u64;
        for (range, _) in &taken {
            let bytes = (range.end - range.start) * width;
            if bytes > 0 {
                pieces.push(Piece { offset: PAYLOAD_OFFSET + range.start * width, bytes, at });
            }
            at += bytes;
        }
        let before = queue.counters();
        queue.read(0, &pieces, bytemuck::cast_slice_mut(&mut words)).map_err(StoreError::from)?;
        let after = queue.counters();
        graph.count_group(after.reads - before.reads, after.read_bytes - before.read_bytes);
        let slots = slots_for(nodes);
        let table = vec![GroupSlot { node: W::default(), start: EMPTY }; slots as usize];
        let mut group = GroupNeighbours { table, shift: 64 - slots.ilog2(), words };
        let mut start = 0;
        for (range, nodes) in taken {
            let end = start + (range.end - range.start) as usize;
            group.add(stored, graph, start..end, nodes as usize)?;
            start = end;
        }
        Ok(group)
    }

    /// Adds the nodes of a partition whose words are in `range`.
    fn add(
        &mut self,
        stored: &PartitionedAdjacency,
        graph: &DiskGraph,
        range: std::ops::Range<usize>,
        nodes: usize,
    ) -> Result<()> {
        let wrong = |expected: &str, found: String| SampleError::Adjacency {
            path: stored.path(),
            expected: expected.into(),
            found,
        };
        let words = &self.words[range.clone()];
        if let Some(word) = words.iter().find(|word| word.node().0 >= graph.nodes()) {
            return Err(wrong("ids of nodes", word.node().0.to_string()));
        }
        if let Some(pair) = words[..nodes].windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(wrong(
                "ascending nodes of a partition",
                format!("{:?} after {:?}", pair[1], pair[0]),
            ));
        }
        let (mut start, mask) = (range.start + nodes, self.table.len() - 1);
        for at in range.start..range.start + nodes {
            let node = self.words[at];
            let mut slot = self.slot(node.node());
            while self.table[slot].start != EMPTY {
                slot = (slot + 1) & mask;
            }
            self.table[slot] = GroupSlot { node, start: start as u32 };
            start += graph.degree(node.node()) as usize;
        }
        match start == range.end {
            true => Ok(()),
            false => Err(wrong("the neighbours of a partition's nodes", "another number of them".into())),
        }
    }
}

/// A group by epoch and number.
type GroupId = (u64, u64);

/// A group that a sampler has.
pub(super) type TakenGroup<W> = (GroupId, Arc<GroupNeighbours<W>>);

enum GroupState<W> {
    Loading,
    Loaded(Arc<GroupNeighbours<W>>),
    /// Whoever asks first gets the error.
    Failed(Option<SampleError>),
}

struct HeldGroup<W> {
    id: GroupId,
    state: GroupState<W>,
}

impl<W> HeldGroup<W> {
    fn is_free(&self) -> bool {
        match &self.state {
            GroupState::Loading => false,
            GroupState::Loaded(group) => Arc::strong_count(group) == 1,
            GroupState::Failed(_) => true,
        }
    }
}

/// Groups in memory, and what a thread is loading.
struct HeldGroups<W> {
    groups: Mutex<Vec<HeldGroup<W>>>,
    changed: Condvar,
    most: usize,
}

/// How many groups are in memory at a time, and how large they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupRoom {
    /// Groups in memory.
    pub groups: u64,
    /// Bytes of the largest.
    pub group_bytes: u64,
}

impl GroupRoom {
    /// Memory of reading groups, apart from the groups.
    fn reading_bytes() -> u64 {
        read_options().memory_bytes(READ_PIECES)
    }

    /// Whether there is likely room for a group, before adjacency is stored by partition: for one of mean size.
    pub fn is_likely<W: StoredId>(
        graph: &DiskGraph,
        batches: &dyn Batches,
        partitions: u32,
        most_bytes: u64,
    ) -> bool {
        let Some(group) = batches.group(Position { epoch: 0, batch: 0 }) else { return false };
        let mean =
            |all: u64| (all as u128 * group.partitions.len() as u128 / partitions.max(1) as u128) as u64;
        let (nodes, words) = (mean(graph.nodes()), mean(graph.nodes() + graph.entries()));
        GroupNeighbours::<W>::bytes_for(nodes, words).saturating_add(GroupRoom::reading_bytes()) <= most_bytes
    }

    /// The largest group of some epochs, and the room that so many samplers need, within `most_bytes`.
    pub fn within<W: StoredId>(
        stored: &PartitionedAdjacency,
        batches: &dyn Batches,
        epochs: u64,
        samplers: usize,
        most_bytes: u64,
    ) -> GroupRoom {
        let mut group_bytes = 0;
        for epoch in 0..epochs.min(MOST_EPOCHS) {
            let mut batch = 0;
            while let Some(group) = batches.group(Position { epoch, batch }) {
                let sizes = group.partitions.iter().map(|at| (stored.nodes_of(*at), stored.words_of(*at)));
                let (nodes, words) = sizes.fold((0, 0), |(nodes, words), (more, range)| {
                    (nodes + more, words + range.end - range.start)
                });
                group_bytes = group_bytes.max(GroupNeighbours::<W>::bytes_for(nodes, words));
                batch = group.batches.end;
            }
        }
        // One for each sampler, and one that is read ahead.
        let left = most_bytes.saturating_sub(GroupRoom::reading_bytes());
        let groups = (left / group_bytes.max(1)).min(samplers as u64 + 1);
        GroupRoom { groups, group_bytes }
    }

    /// Bytes of all groups together, and of reading them; 0 if there is no room for any.
    pub fn bytes(&self) -> u64 {
        match self.groups {
            0 => 0,
            groups => (groups * self.group_bytes).saturating_add(GroupRoom::reading_bytes()),
        }
    }
}

/// The groups of a topology on disk. A thread reads them.
pub struct GroupCache<W> {
    held: Arc<HeldGroups<W>>,
    /// Ends the thread when it is dropped.
    requests: Option<Sender<BatchGroup>>,
    loader: Option<JoinHandle<()>>,
}

impl<W: StoredId> GroupCache<W> {
    /// Starts without groups.
    pub fn new(
        stored: Arc<PartitionedAdjacency>,
        graph: Arc<DiskGraph>,
        room: GroupRoom,
    ) -> Result<GroupCache<W>> {
        let groups = Mutex::new(Vec::new());
        let held = Arc::new(HeldGroups { groups, changed: Condvar::new(), most: room.groups as usize });
        let (requests, asked) = channel();
        let asked = Some(asked);
        let loader = GroupLoader { held: held.clone(), stored: stored.clone(), graph, room, asked };
        let thread = std::thread::Builder::new().name("load groups".into());
        let thread = thread.spawn(move || loader.run()).map_err(SampleError::io(&stored.path()))?;
        Ok(GroupCache { held, requests: Some(requests), loader: Some(thread) })
    }

    /// The group of a batch, which is read if it is not there; `None` if there is no room for it. The group after it is
    /// read ahead if there is room.
    pub(super) fn take(&self, group: BatchGroup, batches: &dyn Batches) -> Result<Option<TakenGroup<W>>> {
        let id = (group.epoch, group.number);
        let after = Position { epoch: group.epoch, batch: group.batches.end };
        let is_asked = self.ask(group, id);
        let taken = if is_asked { self.wait(id)? } else { None };
        // Those before this one are not needed any more, unless a sampler has them.
        if let Some(next) = batches.group(after).filter(|_| taken.is_some()) {
            self.ask(next, id);
        }
        Ok(taken.map(|group| (id, group)))
    }

    /// Makes sure that a group is there or on its way. A group that nobody has and that comes before `current` may give
    /// way. Returns whether there is room.
    fn ask(&self, group: BatchGroup, current: GroupId) -> bool {
        let id = (group.epoch, group.number);
        let mut groups = self.held.lock();
        if groups.iter().any(|held| held.id == id) {
            return true;
        }
        if groups.len() == self.held.most {
            let free = |held: &HeldGroup<W>| held.is_free() && (id == current || held.id < current);
            let oldest = (0..groups.len()).filter(|at| free(&groups[*at])).min_by_key(|at| groups[*at].id);
            let Some(oldest) = oldest else { return false };
            groups.swap_remove(oldest);
        }
        let sent = self.requests.as_ref().is_some_and(|requests| requests.send(group).is_ok());
        if sent {
            groups.push(HeldGroup { id, state: GroupState::Loading });
        }
        sent
    }

    /// Waits until a group is loaded. The thread that loads it waits for nobody.
    fn wait(&self, id: GroupId) -> Result<Option<Arc<GroupNeighbours<W>>>> {
        let mut groups = self.held.lock();
        loop {
            match groups.iter_mut().find(|held| held.id == id).map(|held| &mut held.state) {
                None => return Ok(None),
                Some(GroupState::Loaded(group)) => return Ok(Some(group.clone())),
                Some(GroupState::Failed(error)) => return error.take().map_or(Ok(None), Err),
                Some(GroupState::Loading) => {
                    groups = self.held.changed.wait(groups).unwrap_or_else(|poisoned| poisoned.into_inner());
                }
            }
        }
    }
}

impl<W> Drop for GroupCache<W> {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(loader) = self.loader.take() {
            let _ = loader.join();
        }
    }
}

impl<W> HeldGroups<W> {
    fn lock(&self) -> MutexGuard<'_, Vec<HeldGroup<W>>> {
        self.groups.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Reads groups, one after the other.
struct GroupLoader<W> {
    held: Arc<HeldGroups<W>>,
    stored: Arc<PartitionedAdjacency>,
    graph: Arc<DiskGraph>,
    room: GroupRoom,
    /// `None` when the thread ends.
    asked: Option<Receiver<BatchGroup>>,
}

impl<W: StoredId> GroupLoader<W> {
    fn run(self) {
        let mut queue = None;
        while let Some(Ok(group)) = self.asked.as_ref().map(Receiver::recv) {
            let loaded = self.load(&group, &mut queue);
            let mut groups = self.held.lock();
            let id = (group.epoch, group.number);
            if let Some(held) = groups.iter_mut().find(|held| held.id == id) {
                held.state = match loaded {
                    Ok(group) => GroupState::Loaded(Arc::new(group)),
                    Err(error) => GroupState::Failed(Some(error)),
                };
            }
            drop(groups);
            self.held.changed.notify_all();
        }
    }

    fn load(&self, group: &BatchGroup, queue: &mut Option<Queue>) -> Result<GroupNeighbours<W>> {
        let mut made = match queue.take() {
            Some(queue) => queue,
            None => self.stored.files()?.queue().map_err(StoreError::from)?,
        };
        let most = self.room.group_bytes;
        let loaded = GroupNeighbours::load(&self.stored, &self.graph, &group.partitions, most, &mut made)?;
        *queue = Some(made);
        Ok(loaded)
    }
}

/// If the thread ends for whatever reason, nobody waits for it.
impl<W> Drop for GroupLoader<W> {
    fn drop(&mut self) {
        // From here on, whoever asks learns that nobody listens.
        self.asked = None;
        for held in self.held.lock().iter_mut() {
            if let GroupState::Loading = held.state {
                held.state = GroupState::Failed(None);
            }
        }
        self.held.changed.notify_all();
    }
}
