//! Neighbour lists while batches are sampled ahead: all in memory where they fit, else on disk with the best in a cache.

use crate::{Job, Result, StrategyError};
use esker_plan::TopByScore;
use esker_sample::{
    AnyTopology, CacheIndex, CachedLists, DiskGraph, EntryCounts, InMemory, NeighbourCache, OnDisk, Word,
};
use esker_types::ByteCount;
use std::sync::Arc;

/// What lists may take.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ListRoom {
    /// For lists while batches are sampled; all of them fit where `all`.
    pub bytes: u64,
    pub all: bool,
    /// While it is chosen which are cached.
    pub choosing_bytes: u64,
}

impl ListRoom {
    /// What was asked for, or all of `left`, while a phase may hold `phase_bytes`.
    pub fn within(job: &Job, left: u64, phase_bytes: u64) -> Result<ListRoom> {
        let asked = job.out_of_core.neighbour_cache_bytes;
        if let Some(asked) = asked.filter(|asked| *asked > left) {
            let (asked, left) = (ByteCount(asked), ByteCount(left));
            return Err(StrategyError::request(
                format!("a neighbour cache of {asked} is asked for, and {left} are left for it"),
                "take a smaller --neighbour-cache, or allow more memory",
            ));
        }
        let bytes = asked.unwrap_or(left);
        let all = AnyTopology::bytes_for(&job.dataset, job.direction) <= bytes;
        Ok(ListRoom { bytes, all, choosing_bytes: phase_bytes })
    }
}

/// Where lists are between phases.
pub(crate) struct Lists {
    pub graph: Arc<DiskGraph>,
    kind: Kind,
}

enum Kind {
    /// They fit a phase, and are read whole.
    All,
    /// The best of them have a file of their own.
    Some(CachedLists),
    /// There is no room for any.
    None,
}

/// Lists as samplers use them.
pub(crate) enum Loaded<W> {
    Memory(InMemory<W>),
    Disk(OnDisk<W>),
}

impl Lists {
    /// Chooses what is cached: by out-degree over in-degree, until the room is full (section 3.2).
    pub fn prepare<W: Word>(job: &Job, room: ListRoom, graph: Arc<DiskGraph>) -> Result<Lists> {
        let entry_bytes = size_of::<W>() as u64;
        let (nodes, folder) = (graph.nodes(), &job.out_of_core.scratch);
        let index_bytes = CacheIndex::bytes_for(nodes, graph.entries());
        let entries = room.bytes.saturating_sub(index_bytes) / entry_bytes;
        if room.all || entries == 0 {
            let kind = if room.all { Kind::All } else { Kind::None };
            return Ok(Lists { graph, kind });
        }
        // Until training starts, a phase's memory is free.
        let counts =
            EntryCounts::count::<W>(&graph, folder, room.choosing_bytes.saturating_sub(TopByScore::BYTES))?;
        let (mut top, mut count) = (TopByScore::new(), counts.stream());
        for node in 0..nodes {
            top.see(count.take()? as u64, graph.degree(esker_types::NodeId(node)));
        }
        top.set_budget(entries);
        let mut next = (counts.stream(), 0);
        let index = CacheIndex::choose(&graph, |node, degree| {
            // Nodes without a list are not asked about.
            while next.1 < node.0 {
                next.0.take()?;
                next.1 += 1;
            }
            next.1 += 1;
            Ok(top.takes(next.0.take()? as u64, degree))
        })?;
        drop(top);
        let lists = CachedLists::write::<W>(&graph, index, folder)?;
        Ok(Lists { graph, kind: Kind::Some(lists) })
    }

    /// Reads what a phase of sampling has in memory.
    pub fn load<W: Word>(&self, job: &Job) -> Result<Loaded<W>> {
        let cache: Option<Arc<NeighbourCache<W>>> = match &self.kind {
            Kind::All => return Ok(Loaded::Memory(InMemory::load(&job.dataset, job.direction)?)),
            Kind::Some(lists) => Some(Arc::new(lists.load()?)),
            Kind::None => None,
        };
        Ok(Loaded::Disk(OnDisk::new(self.graph.clone(), cache)))
    }

    /// In words.
    pub fn note(&self) -> String {
        match &self.kind {
            Kind::All => "all neighbour lists in memory while sampling".into(),
            Kind::None => "no neighbour list in memory".into(),
            Kind::Some(lists) => {
                let share = lists.index().entries() as f64 / self.graph.entries().max(1) as f64 * 100.0;
                let count = esker_types::grouped(lists.index().count());
                format!(
                    "neighbour lists of {count} nodes in memory while sampling, {share:.0}% of all entries"
                )
            }
        }
    }
}
