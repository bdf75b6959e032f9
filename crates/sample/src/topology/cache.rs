//! The neighbours of chosen nodes, in memory (Ginex section 3.2). One bit per node marks the chosen nodes. The start of
//! a node's neighbours is found from the number of chosen nodes before it. This takes a fraction of a table with one
//! address per node. A file has the neighbours in the same layout as memory, so they can be dropped and read again in
//! one sequential read.

use super::StoredId;
use super::counts::GraphWork;
use super::disk::DiskGraph;
use super::elias_fano::{EliasFano, EliasFanoBuilder};
use crate::{Result, SampleError};
use esker_io::{ScratchFile, prefer_large_pages, prefetch};
use esker_store::StoreError;
use esker_types::{NodeId, Unit};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Words of the bitmap per running count of members.
const BLOCK_WORDS: usize = 8;
/// Nodes of a block of the bitmap.
const BLOCK_NODES: u64 = 64 * BLOCK_WORDS as u64;
/// Nodes between checks for a stop.
const CHUNK: usize = 1 << 16;
/// Entries read at a time.
const LOAD_ENTRIES: usize = 1 << 20;
/// Cached entries that a reader copies at a time: this part of the memory, between these bounds. A node with more
/// neighbours is copied at once.
const RANGE_PART: u64 = 128;
const RANGE_ENTRIES: Range<u64> = 1 << 16..1 << 21;
/// Nodes of a range at most.
const RANGE_NODES: u64 = 1 << 20;
/// Memory of a stream of adjacency.
const STREAM_BYTES: u64 = 1 << 20;

/// Which nodes' neighbours are cached, and where each node's start.
#[derive(Debug)]
pub struct CacheIndex {
    members: Vec<u64>,
    /// Number of members before each block of the bitmap.
    before: Vec<u64>,
    starts: EliasFano,
    entries: u64,
    count: u64,
}

impl CacheIndex {
    /// Largest size in bytes for a graph of `nodes` nodes and `entries` adjacency entries.
    pub fn bytes_for(nodes: u64, entries: u64) -> u64 {
        let words = nodes.div_ceil(64);
        words * 8 + (words / BLOCK_WORDS as u64 + 1) * 8 + EliasFano::bytes_for(nodes + 1, entries)
    }

    /// Chooses the nodes that `takes` accepts. It is called in node order with each node's degree, for nodes with
    /// neighbours.
    pub fn choose(
        graph: &DiskGraph,
        work: &GraphWork,
        mut takes: impl FnMut(NodeId, u64) -> Result<bool>,
    ) -> Result<CacheIndex> {
        let mut members = vec![0u64; graph.nodes().div_ceil(64) as usize];
        let (mut count, mut entries) = (0, 0);
        for (node, degree) in graph.degrees().enumerate() {
            if degree > 0 && takes(NodeId(node as u64), degree)? {
                members[node / 64] |= 1 << (node % 64);
                count += 1;
                entries += degree;
            }
            if node.is_multiple_of(CHUNK) {
                work.check_stop()?;
            }
        }
        let mut starts = EliasFanoBuilder::new(count + 1, entries);
        let (mut before, mut seen, mut start) = (Vec::new(), 0, 0);
        for (node, degree) in graph.degrees().enumerate() {
            let word = members[node / 64];
            if node.is_multiple_of(64 * BLOCK_WORDS) {
                before.push(seen);
            }
            if node.is_multiple_of(64) {
                seen += word.count_ones() as u64;
            }
            if word >> (node % 64) & 1 == 1 {
                starts.push(start);
                start += degree;
            }
        }
        starts.push(start);
        Ok(CacheIndex { members, before, starts: starts.finish(), entries, count })
    }

    /// Number of nodes whose neighbours are cached.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Number of cached entries.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        (self.members.len() + self.before.len()) as u64 * 8
            + EliasFano::bytes_for(self.count + 1, self.entries)
    }

    /// Whether a node's neighbours are cached.
    #[inline(always)]
    pub fn contains(&self, node: NodeId) -> bool {
        self.members[node.index() / 64] >> (node.index() % 64) & 1 == 1
    }

    #[inline(always)]
    pub(super) fn prefetch(&self, node: NodeId) {
        prefetch(&self.members, node.index() / 64);
    }

    /// Entries of the members before a block of the bitmap.
    fn entries_before(&self, block: u64) -> u64 {
        match self.before.get(block as usize) {
            Some(members) if *members < self.count => self.starts.pair(*members as usize).0,
            _ => self.entries,
        }
    }

    /// Start and end of a member's neighbours.
    #[inline(always)]
    fn range(&self, node: NodeId) -> Option<(u64, u64)> {
        let (word, bit) = (node.index() / 64, node.index() % 64);
        if self.members[word] >> bit & 1 == 0 {
            return None;
        }
        let block = word / BLOCK_WORDS;
        let whole: u32 = self.members[block * BLOCK_WORDS..word].iter().map(|word| word.count_ones()).sum();
        let rank =
            self.before[block] + u64::from(whole + (self.members[word] & ((1 << bit) - 1)).count_ones());
        Some(self.starts.pair(rank as usize))
    }
}

/// The neighbours of chosen nodes on disk, one node after the other.
#[derive(Debug)]
pub struct NeighbourCacheFile {
    index: Arc<CacheIndex>,
    file: ScratchFile,
}

impl NeighbourCacheFile {
    /// Copies the neighbours from the dataset to an unlinked temporary file. Several readers copy ranges of nodes while
    /// the ranges before are written.
    pub fn write<W: StoredId>(
        graph: &DiskGraph,
        index: CacheIndex,
        work: &GraphWork,
    ) -> Result<NeighbourCacheFile> {
        let failed = |error| SampleError::from(StoreError::io(work.folder)(error));
        let file = ScratchFile::create(work.folder).map_err(failed)?;
        let width = size_of::<W>() as u64;
        let entries = (work.most_bytes / RANGE_PART / width).clamp(RANGE_ENTRIES.start, RANGE_ENTRIES.end);
        // One range is written while the next is read.
        let readers = work.readers(2 * entries * width + STREAM_BYTES);
        work.progress.stage("cache neighbours", Some(index.entries), Unit::Count("neighbours"));
        let mut ranges = CopyRanges { index: &index, next: 0, nodes: graph.nodes(), entries };
        let (mut before, mut start) = (Vec::new(), 0u64);
        loop {
            work.check_stop()?;
            let some: Vec<Range<u64>> = ranges.by_ref().take(readers).collect();
            let copied: Vec<Result<Vec<W>>> = std::mem::take(&mut before);
            let is_last = some.is_empty();
            let (written, read) = work.pool.install(|| {
                let write = || {
                    for lists in copied {
                        let lists = lists?;
                        file.write_at(bytemuck::cast_slice(&lists), start * width).map_err(failed)?;
                        start += lists.len() as u64;
                        work.progress.advance(lists.len() as u64);
                    }
                    Ok::<(), SampleError>(())
                };
                rayon::join(write, || some.into_par_iter().map(|nodes| copy(graph, &index, nodes)).collect())
            });
            written?;
            before = read;
            if is_last {
                break;
            }
        }
        work.progress.finish();
        assert_eq!(start, index.entries, "every neighbour of a cached node is copied");
        Ok(NeighbourCacheFile { index: Arc::new(index), file })
    }

    /// The index of the cached nodes.
    pub fn index(&self) -> &CacheIndex {
        &self.index
    }

    /// Reads the whole file into memory, with the threads of the current rayon pool.
    pub fn load<W: StoredId>(&self) -> Result<NeighbourCache<W>> {
        let mut lists = vec![W::default(); self.index.entries as usize];
        prefer_large_pages(&mut lists);
        lists.par_chunks_mut(LOAD_ENTRIES).enumerate().try_for_each(|(number, chunk)| {
            let offset = (number * LOAD_ENTRIES * size_of::<W>()) as u64;
            let bytes = bytemuck::cast_slice_mut::<W, u8>(chunk);
            self.file.read_at(bytes, offset).map_err(StoreError::io(self.file.folder()))
        })?;
        Ok(NeighbourCache { index: self.index.clone(), lists })
    }
}

/// Cuts all nodes into ranges with about as many cached entries each.
struct CopyRanges<'a> {
    index: &'a CacheIndex,
    next: u64,
    nodes: u64,
    entries: u64,
}

impl Iterator for CopyRanges<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let (first, mut entries) = (self.next, 0);
        let end = (first + RANGE_NODES).min(self.nodes);
        while self.next < end && entries < self.entries {
            // Whole blocks at a time: looking up every node takes longer than reading it.
            if self.next.is_multiple_of(BLOCK_NODES) && self.next + BLOCK_NODES <= end {
                let block = self.next / BLOCK_NODES;
                let whole = self.index.entries_before(block + 1) - self.index.entries_before(block);
                if entries + whole <= self.entries {
                    entries += whole;
                    self.next += BLOCK_NODES;
                    continue;
                }
            }
            entries += self.index.range(NodeId(self.next)).map_or(0, |(start, end)| end - start);
            self.next += 1;
        }
        (first < self.next).then_some(first..self.next)
    }
}

/// The neighbours of the cached nodes of a range, one node after the other.
fn copy<W: StoredId>(graph: &DiskGraph, index: &CacheIndex, nodes: Range<u64>) -> Result<Vec<W>> {
    let cached = || nodes.clone().map(NodeId).filter(|node| index.contains(*node));
    let mut lists = vec![W::default(); cached().map(|node| graph.degree(node)).sum::<u64>() as usize];
    let Some(first_cached) = cached().next() else { return Ok(lists) };
    // With both directions a node has two runs. Each direction fills its own.
    for part in 0..graph.parts() {
        let (mut at, mut to) = (graph.bounds(part, first_cached).0, 0);
        let mut stream = graph.stream_from(part, at)?;
        for node in cached() {
            let (first, end) = graph.bounds(part, node);
            stream.skip_to(first, &mut at)?;
            let skipped = if part == 1 { graph.part_degree(0, node) } else { 0 };
            let start = to + skipped as usize;
            stream.take(&mut at, &mut lists[start..start + (end - first) as usize])?;
            to += graph.degree(node) as usize;
        }
    }
    Ok(lists)
}

/// The neighbours of chosen nodes in memory.
#[derive(Debug)]
pub struct NeighbourCache<W> {
    index: Arc<CacheIndex>,
    lists: Vec<W>,
}

impl<W: StoredId> NeighbourCache<W> {
    /// A node's neighbours, if they are cached.
    #[inline(always)]
    pub fn list(&self, node: NodeId) -> Option<&[W]> {
        let (start, end) = self.index.range(node)?;
        Some(&self.lists[start as usize..end as usize])
    }

    #[inline(always)]
    pub(super) fn prefetch(&self, node: NodeId) {
        self.index.prefetch(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The index of the nodes with entries.
    fn index_of(degrees: &[u64]) -> CacheIndex {
        let mut members = vec![0u64; degrees.len().div_ceil(64)];
        let count = degrees.iter().filter(|degree| **degree > 0).count() as u64;
        let entries = degrees.iter().sum();
        let mut starts = EliasFanoBuilder::new(count + 1, entries);
        let (mut before, mut seen, mut start) = (Vec::new(), 0, 0);
        for (node, degree) in degrees.iter().enumerate() {
            if (node as u64).is_multiple_of(BLOCK_NODES) {
                before.push(seen);
            }
            if *degree > 0 {
                members[node / 64] |= 1 << (node % 64);
                starts.push(start);
                (start, seen) = (start + degree, seen + 1);
            }
        }
        starts.push(start);
        CacheIndex { members, before, starts: starts.finish(), entries, count }
    }

    proptest! {
        /// Compares with the degrees themselves: every node is in one range, and a range ends with the node that fills it.
        #[test]
        fn ranges_have_every_node_once_and_about_as_many_entries(
            degrees in prop::collection::vec(prop_oneof![3 => Just(0u64), 3 => 1u64..30, 1 => 30u64..2000], 1..3000), limit in 1u64..20_000,
        ) {
            let index = index_of(&degrees);
            let nodes = degrees.len() as u64;
            let mut next = 0;
            for range in (CopyRanges { index: &index, next: 0, nodes, entries: limit }) {
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end > range.start);
                let own = &degrees[range.start as usize..range.end as usize];
                // Without its last node that has any, it is not full.
                let entries: u64 = own.iter().sum();
                let last = own.iter().rev().find(|degree| **degree > 0).copied().unwrap_or(0);
                prop_assert!(entries - last < limit, "{} of {}", entries, limit);
                prop_assert!(entries >= limit || range.end == nodes, "{} of {}", entries, limit);
                next = range.end;
            }
            prop_assert_eq!(next, nodes);
        }
    }
}
