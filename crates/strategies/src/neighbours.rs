//! The adjacency while batches are sampled in advance: all in memory if it fits, else on disk with a cache of the best
//! nodes.

use crate::{Job, JobOutline, Result, StrategyError};
use esker_plan::TopByScore;
use esker_sample::{
    AnyTopology, CacheIndex, DiskGraph, EntryCounts, GraphWork, InMemory, NeighbourCache, NeighbourCacheFile,
    OnDisk, StoredId,
};
use esker_types::{ByteCount, Unit};
use std::sync::Arc;

/// Bytes per node on disk for counts, while the nodes to cache are chosen.
const COUNT_BYTES: u64 = 4;
/// Counts stay in the dataset for later runs if they take at most this part of a disk budget.
const KEPT_PART: u64 = 64;
/// Nodes between reports of progress.
const ADVANCE_NODES: u64 = 1 << 16;

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
        Ok(NeighbourBudget { bytes, all, choosing_bytes: phase_bytes, disk_bytes: None })
    }
}

/// The adjacency between phases.
pub(crate) struct NeighbourStore {
    pub graph: Arc<DiskGraph>,
    kind: NeighboursKept,
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
fn choose<W: StoredId>(job: &Job, graph: &DiskGraph, entries: u64, work: &GraphWork) -> Result<CacheIndex> {
    let (nodes, asked) = (graph.nodes(), &job.out_of_core);
    let fits = !asked.disk_bytes_explicit || nodes * COUNT_BYTES <= asked.disk_bytes / KEPT_PART;
    // If packed rows go elsewhere, nothing is added to the dataset.
    let keeps = fits && asked.prepared.is_none();
    let counts = EntryCounts::find_or_count::<W>(graph, keeps, work)?;
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
    Memory(InMemory<W>),
    Disk(OnDisk<W>),
}

impl NeighbourStore {
    /// Chooses the nodes to cache: by out-degree over in-degree, until the budget is full (section 3.2).
    pub fn prepare<W: StoredId>(
        job: &Job,
        room: NeighbourBudget,
        graph: Arc<DiskGraph>,
    ) -> Result<NeighbourStore> {
        let entry_bytes = size_of::<W>() as u64;
        let nodes = graph.nodes();
        let index_bytes = CacheIndex::bytes_for(nodes, graph.entries());
        let on_disk = room.disk_bytes.map(|bytes| bytes.saturating_sub(nodes * COUNT_BYTES) / entry_bytes);
        let entries = room.bytes.saturating_sub(index_bytes) / entry_bytes;
        let entries = entries.min(on_disk.unwrap_or(u64::MAX));
        if room.all || entries == 0 {
            let kind = if room.all { NeighboursKept::All } else { NeighboursKept::None };
            return Ok(NeighbourStore { graph, kind });
        }
        let work = GraphWork {
            folder: &job.out_of_core.scratch,
            // Until training starts, a phase's memory is free.
            most_bytes: room.choosing_bytes.saturating_sub(TopByScore::BYTES),
            pool: &job.pool,
            stop: &job.stop,
            progress: &*job.progress,
        };
        let index = choose::<W>(job, &graph, entries, &work)?;
        // The index and what is copied are in memory at the same time.
        let work = GraphWork { most_bytes: work.most_bytes.saturating_sub(index.bytes()), ..work };
        let lists = NeighbourCacheFile::write::<W>(&graph, index, &work)?;
        Ok(NeighbourStore { graph, kind: NeighboursKept::Some(lists) })
    }

    /// Loads what a sampling phase has in memory.
    pub fn load<W: StoredId>(&self, job: &Job) -> Result<LoadedNeighbours<W>> {
        let cache: Option<Arc<NeighbourCache<W>>> = match &self.kind {
            NeighboursKept::All => {
                return Ok(LoadedNeighbours::Memory(InMemory::load(&job.dataset, job.direction)?));
            }
            NeighboursKept::Some(lists) => Some(Arc::new(job.pool.install(|| lists.load())?)),
            NeighboursKept::None => None,
        };
        Ok(LoadedNeighbours::Disk(OnDisk::new(self.graph.clone(), cache)))
    }

    /// Bytes on disk in addition to the dataset.
    pub fn disk_bytes<W: StoredId>(&self) -> u64 {
        match &self.kind {
            NeighboursKept::Some(lists) => lists.index().entries() * size_of::<W>() as u64,
            _ => 0,
        }
    }

    /// A readable description.
    pub fn note(&self) -> String {
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
