//! The adjacency while batches are sampled in advance: all in memory if it fits, else on disk with caches. A static
//! cache has the neighbours of the best nodes (Ginex, section 3.2). With batches by groups of partitions, a dynamic one
//! has the neighbours of the nodes of a batch's group (OUTRE, section 4.2). Both share the memory of neighbours.
//!
//! A strategy calls [`NeighbourStore::prepare`] once and [`NeighbourStore::load`] in every sampling phase. Samplers call
//! `Sampler::begin` before each batch, as `Bulk` does; the dynamic cache follows from that.

use crate::sampling::ResidentTopology;
use crate::{Job, JobOutline, MemoryTable, Result, StrategyError};
use esker_plan::TopByScore;
use esker_sample::partition::StoredPartitioning;
use esker_sample::{
    AnyTopology, CacheIndex, CountedNeighbours, DiskGraph, EntryCounts, GraphWork, GroupCache, GroupRoom,
    InMemory, NeighbourCache, NeighbourCacheFile, OnDisk, PartitionedAdjacency, SampleError, StoredId,
};
use esker_types::{ByteCount, Unit};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Bytes per node on disk for counts, while the nodes to cache are chosen.
const COUNT_BYTES: u64 = 4;
/// Counts stay in the dataset for later runs if they take at most this part of a disk budget.
const KEPT_PART: u64 = 64;
/// Nodes between reports of progress.
const ADVANCE_NODES: u64 = 1 << 16;

/// Which neighbours are cached if adjacency does not fit in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NeighbourPolicy {
    /// Those of nodes that are a neighbour of many and have few themselves: out-degree over in-degree (Ginex).
    Ginex,
    /// The same, counting only edges that come from other partitions (OUTRE).
    Cross,
    /// Those of the partitions of a batch's group, and in the memory left those of `Cross` (OUTRE).
    Group,
}

impl fmt::Display for NeighbourPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NeighbourPolicy::Ginex => "ginex",
            NeighbourPolicy::Cross => "cross",
            NeighbourPolicy::Group => "group",
        })
    }
}

/// The partitioning of a job whose batches come by groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobPartitioning {
    /// Its name.
    pub name: String,
    /// Number of partitions.
    pub partitions: u32,
    /// Edges between partitions, of a thousand, if they are known.
    pub cut_permille: Option<u32>,
}

/// With more edges between partitions, of a thousand, a static cache of the same size was hit more often
/// (docs/partition.md): with 62% of the edges cut, groups lose up to 4 points; with half of them, they win up to 5.
const MOST_CUT_PERMILLE: u32 = 550;

impl JobOutline {
    /// Which neighbours are cached: as requested, or by default those that were hit most per byte.
    pub(crate) fn neighbour_policy(&self) -> NeighbourPolicy {
        match (self.out_of_core.neighbour_policy, &self.out_of_core.partitioning) {
            (_, None) => NeighbourPolicy::Ginex,
            (Some(policy), Some(_)) => policy,
            (None, Some(with)) if with.cut_permille.is_some_and(|cut| cut > MOST_CUT_PERMILLE) => {
                NeighbourPolicy::Ginex
            }
            (None, Some(_)) => NeighbourPolicy::Group,
        }
    }

    /// Bytes on disk of adjacency by partition, if it may be used.
    pub(crate) fn adjacency_disk_bytes(&self) -> u64 {
        let partitioning = self.out_of_core.partitioning.as_ref();
        let used = partitioning.filter(|_| self.neighbour_policy() == NeighbourPolicy::Group);
        // What fits in memory is not stored by partition.
        let most = self.out_of_core.neighbour_cache_bytes.unwrap_or(self.strategy_bytes);
        let used = used.filter(|_| AnyTopology::bytes_for(&self.dataset, self.direction) > most);
        used.map_or(0, |with| {
            PartitionedAdjacency::disk_bytes(&self.dataset, self.direction, with.partitions)
        })
    }

    /// The disk budget beside adjacency by partition.
    pub(crate) fn disk_bytes_left(&self) -> u64 {
        self.out_of_core.disk_bytes.saturating_sub(self.adjacency_disk_bytes())
    }

    /// Memory of the index of adjacency by partition, if it may be used.
    pub(crate) fn adjacency_index_bytes(&self) -> u64 {
        let partitioning = self.out_of_core.partitioning.as_ref();
        let used = partitioning.filter(|_| self.neighbour_policy() == NeighbourPolicy::Group);
        used.map_or(0, |with| PartitionedAdjacency::index_bytes(with.partitions))
    }
}

/// Budgets of adjacency.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NeighbourBudget {
    /// Memory during sampling. With `all`, the whole adjacency fits.
    pub bytes: u64,
    pub all: bool,
    /// Memory while the nodes to cache are chosen.
    pub choosing_bytes: u64,
    /// Disk space for the copy of cached neighbours, and for counts while they are chosen. `None` for no limit.
    pub disk_bytes: Option<u64>,
    /// Batches that are sampled at a time.
    pub samplers: usize,
}

impl NeighbourBudget {
    /// The requested cache size, or all of `left`. A phase may use `phase_bytes`.
    pub fn within(job: &JobOutline, left: u64, phase_bytes: u64) -> Result<NeighbourBudget> {
        let asked = job.out_of_core.neighbour_cache_bytes;
        if let Some(asked) = asked.filter(|asked| *asked > left) {
            let (asked, left) = (ByteCount(asked), ByteCount(left));
            return Err(StrategyError::Cache { flag: "--neighbour-cache", asked, left });
        }
        let bytes = asked.unwrap_or(left);
        let all = AnyTopology::bytes_for(&job.dataset, job.direction) <= bytes;
        Ok(NeighbourBudget { bytes, all, choosing_bytes: phase_bytes, disk_bytes: None, samplers: 1 })
    }
}

/// The adjacency between phases.
pub(crate) struct NeighbourStore {
    pub graph: Arc<DiskGraph>,
    kind: NeighboursKept,
    groups: Option<StoredGroups>,
}

/// Adjacency by partition, and how much of it is in memory during sampling.
struct StoredGroups {
    adjacency: Arc<PartitionedAdjacency>,
    room: GroupRoom,
}

enum NeighboursKept {
    /// It fits a phase and is read as a whole.
    All,
    /// The neighbours of the best nodes are in a file.
    Some(NeighbourCacheFile),
    /// There is no room for a cache.
    None,
}

/// Chooses the nodes whose neighbours are cached, up to this many entries.
fn choose<W: StoredId>(
    job: &Job,
    graph: &DiskGraph,
    of: CountedNeighbours<'_>,
    entries: u64,
    work: &GraphWork,
) -> Result<CacheIndex> {
    let (nodes, asked) = (graph.nodes(), &job.out_of_core);
    let fits = !asked.disk_bytes_explicit || nodes * COUNT_BYTES <= asked.disk_bytes / KEPT_PART;
    // If packed rows go elsewhere, nothing is added to the dataset.
    let keeps = fits && asked.prepared.is_none();
    let counts = EntryCounts::find_or_count::<W>(graph, of, keeps, work)?;
    job.progress.stage("choose cached neighbours", Some(2 * nodes), Unit::Count("nodes"));
    let (mut top, mut count, mut seen) = (TopByScore::new(), counts.stream(), NodesSeen { job, count: 0 });
    for (node, degree) in (0..).zip(graph.degrees()) {
        top.see(count.take()? as u64, degree);
        seen.up_to(node);
    }
    top.set_budget(entries);
    let (mut count, mut next, mut seen) = (counts.stream(), 0, NodesSeen { job, count: 0 });
    let index = CacheIndex::choose(graph, work, |node, degree| {
        // Nodes without neighbours are not offered.
        while next < node.0 {
            count.take()?;
            next += 1;
        }
        next += 1;
        seen.up_to(node.0);
        Ok(top.takes(count.take()? as u64, degree))
    })?;
    job.progress.finish();
    Ok(index)
}

/// Reports progress now and then.
struct NodesSeen<'a> {
    job: &'a Job,
    count: u64,
}

impl NodesSeen<'_> {
    fn up_to(&mut self, node: u64) {
        if node - self.count >= ADVANCE_NODES {
            self.job.progress.advance(node - self.count);
            self.count = node;
        }
    }
}

/// The adjacency as samplers use it.
pub(crate) enum LoadedNeighbours<W> {
    Memory(Arc<InMemory<W>>),
    Disk(OnDisk<W>),
}

impl NeighbourStore {
    /// Stores adjacency by partition if the job uses it, and chooses the nodes to cache in the memory that is left, by
    /// score until the budget is full.
    pub fn prepare<W: StoredId>(
        job: &Job,
        room: NeighbourBudget,
        graph: Arc<DiskGraph>,
        policy: NeighbourPolicy,
    ) -> Result<NeighbourStore> {
        if room.all {
            return Ok(NeighbourStore { graph, kind: NeighboursKept::All, groups: None });
        }
        let work = GraphWork {
            folder: &job.out_of_core.scratch,
            // Until training starts, a phase's memory is free.
            most_bytes: room.choosing_bytes.saturating_sub(TopByScore::BYTES),
            pool: &job.pool,
            stop: &job.stop,
            progress: &*job.progress,
            safe_point_bytes: None,
        };
        let partitioning = match (&job.out_of_core.partitioning, policy) {
            (Some(with), NeighbourPolicy::Cross | NeighbourPolicy::Group) => {
                Some(StoredPartitioning::open(&job.dataset, &with.name)?)
            }
            _ => None,
        };
        let by_group = partitioning.as_ref().filter(|_| policy == NeighbourPolicy::Group);
        let groups = by_group.map(|stored| StoredGroups::prepare::<W>(job, room, &graph, stored, &work));
        let groups = groups.transpose()?.flatten();
        let taken = groups.as_ref().map_or(0, |groups| groups.room.bytes());
        let room = NeighbourBudget { bytes: room.bytes.saturating_sub(taken), ..room };
        let of = partitioning.as_ref().map_or(CountedNeighbours::All, CountedNeighbours::Cross);
        let kind = NeighboursKept::choose::<W>(job, room, &graph, of, work)?;
        Ok(NeighbourStore { graph, kind, groups })
    }

    /// Loads what a sampling phase has in memory.
    pub fn load<W: StoredId>(&self, job: &Job) -> Result<LoadedNeighbours<W>> {
        let cache: Option<Arc<NeighbourCache<W>>> = match &self.kind {
            NeighboursKept::All => {
                if let Some(lent) = job.topology.take_lent().and_then(ResidentTopology::of_width) {
                    return Ok(LoadedNeighbours::Memory(lent));
                }
                let load = || InMemory::load(&job.dataset, job.direction);
                return Ok(LoadedNeighbours::Memory(Arc::new(job.pool.install(load)?)));
            }
            NeighboursKept::Some(lists) => Some(Arc::new(job.pool.install(|| lists.load())?)),
            NeighboursKept::None => None,
        };
        let groups = self.groups.as_ref().map(|groups| {
            GroupCache::new(groups.adjacency.clone(), self.graph.clone(), groups.room).map(Arc::new)
        });
        Ok(LoadedNeighbours::Disk(OnDisk::new(self.graph.clone(), cache).with_groups(groups.transpose()?)))
    }

    /// Entries that [`NeighbourStore::load`] reads into memory.
    pub fn loaded_entries(&self) -> u64 {
        match &self.kind {
            NeighboursKept::All => self.graph.entries(),
            NeighboursKept::Some(lists) => lists.index().entries(),
            NeighboursKept::None => 0,
        }
    }

    /// Bytes on disk in addition to the dataset.
    pub fn disk_bytes<W: StoredId>(&self) -> u64 {
        match &self.kind {
            NeighboursKept::Some(lists) => lists.index().entries() * size_of::<W>() as u64,
            _ => 0,
        }
    }

    /// What it takes of the memory of sampling.
    pub fn memory(&self) -> MemoryTable {
        let mut table = MemoryTable::default();
        if let Some(StoredGroups { room, .. }) = &self.groups {
            let from = format!("{} groups, up to {} each", room.groups, ByteCount(room.group_bytes));
            table.add_from("neighbours of groups, while sampling", room.bytes(), from);
        }
        table
    }

    /// A readable description.
    pub fn note(&self) -> String {
        let groups = self.groups.as_ref().map_or(String::new(), |groups| {
            let (room, bytes) = (groups.room, ByteCount(groups.adjacency.bytes()));
            let (count, each) = (room.groups, ByteCount(room.group_bytes));
            format!("those of {count} groups of partitions, up to {each} each, from {bytes} on disk; ")
        });
        groups + &self.static_note()
    }

    fn static_note(&self) -> String {
        match &self.kind {
            NeighboursKept::All => "all neighbours in memory while sampling".into(),
            NeighboursKept::None => "no neighbours in memory".into(),
            NeighboursKept::Some(lists) => {
                let share = lists.index().entries() as f64 / self.graph.entries().max(1) as f64 * 100.0;
                let count = esker_types::grouped(lists.index().count());
                format!("neighbours of {count} nodes in memory while sampling, {share:.0}% of all entries")
            }
        }
    }
}

impl NeighboursKept {
    /// Chooses the nodes to cache and copies their neighbours.
    fn choose<W: StoredId>(
        job: &Job,
        room: NeighbourBudget,
        graph: &DiskGraph,
        of: CountedNeighbours<'_>,
        work: GraphWork<'_>,
    ) -> Result<NeighboursKept> {
        let (entry_bytes, nodes) = (size_of::<W>() as u64, graph.nodes());
        let index_bytes = CacheIndex::bytes_for(nodes, graph.entries());
        let on_disk = room.disk_bytes.map(|bytes| bytes.saturating_sub(nodes * COUNT_BYTES) / entry_bytes);
        let entries = room.bytes.saturating_sub(index_bytes) / entry_bytes;
        let entries = entries.min(on_disk.unwrap_or(u64::MAX));
        if entries == 0 {
            return Ok(NeighboursKept::None);
        }
        let index = choose::<W>(job, graph, of, entries, &work)?;
        // The index and what is copied are in memory at the same time.
        let work = GraphWork { most_bytes: work.most_bytes.saturating_sub(index.bytes()), ..work };
        Ok(NeighboursKept::Some(NeighbourCacheFile::write::<W>(graph, index, &work)?))
    }
}

impl StoredGroups {
    /// Stores adjacency by partition, and finds the room of groups. `None` if memory or disk have none; if groups were
    /// requested explicitly, too little disk is an error.
    fn prepare<W: StoredId>(
        job: &Job,
        room: NeighbourBudget,
        graph: &DiskGraph,
        stored: &StoredPartitioning,
        work: &GraphWork<'_>,
    ) -> Result<Option<StoredGroups>> {
        if !GroupRoom::is_likely::<W>(graph, &*job.batches, stored.partitions(), room.bytes) {
            job.progress.note("the neighbours of groups are not cached: there is no memory for a group");
            return Ok(None);
        }
        let asked = &job.out_of_core;
        let needed = PartitionedAdjacency::disk_bytes(&job.dataset, job.direction, stored.partitions());
        if needed > asked.disk_bytes {
            let (needed, allowed) = (ByteCount(needed), ByteCount(asked.disk_bytes));
            if asked.neighbour_policy.is_some() {
                return Err(StrategyError::AdjacencyDisk { needed, allowed });
            }
            job.progress.note(&format!(
                "the neighbours of groups are not cached: stored by partition they take {needed}, and the disk budget is {allowed}"
            ));
            return Ok(None);
        }
        let adjacency = match PartitionedAdjacency::find_or_make::<W>(graph, stored, work) {
            Err(error @ SampleError::Store(_)) if asked.neighbour_policy.is_none() => {
                job.progress.note(&format!("the neighbours of groups are not cached: {error}"));
                return Ok(None);
            }
            made => Arc::new(made?),
        };
        let room = GroupRoom::within::<W>(&adjacency, &*job.batches, job.epochs, room.samplers, room.bytes);
        Ok((room.groups > 0).then_some(StoredGroups { adjacency, room }))
    }
}
