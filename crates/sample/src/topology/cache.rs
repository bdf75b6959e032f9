//! The neighbours of chosen nodes, in memory (Ginex section 3.2). One bit per node marks the chosen nodes. The start of
//! a node's neighbours is found from the number of chosen nodes before it. This takes a fraction of a table with one
//! address per node. A file has the neighbours in the same layout as memory, so they can be dropped and read again in
//! one sequential read.

use super::disk::DiskGraph;
use super::elias_fano::{EliasFano, EliasFanoBuilder};
use super::{StoredId, count_u32};
use crate::{Result, SampleError};
use esker_io::{ScratchFile, prefer_large_pages, prefetch};
use esker_store::StoreError;
use esker_types::{NodeId, StopSignal};
use std::path::Path;
use std::sync::Arc;

/// Words of the bitmap per running count of members.
const BLOCK_WORDS: usize = 8;
/// Entries copied at a time.
const CHUNK: usize = 1 << 16;

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

    /// Chooses the nodes that `takes` accepts. It is called in node order with each node's degree.
    pub fn choose(
        graph: &DiskGraph,
        mut takes: impl FnMut(NodeId, u64) -> Result<bool>,
    ) -> Result<CacheIndex> {
        let mut members = vec![0u64; graph.nodes().div_ceil(64) as usize];
        let (mut count, mut entries) = (0, 0);
        for node in 0..graph.nodes() {
            let degree = graph.degree(NodeId(node));
            if degree > 0 && takes(NodeId(node), degree)? {
                members[(node / 64) as usize] |= 1 << (node % 64);
                count += 1;
                entries += degree;
            }
        }
        let mut starts = EliasFanoBuilder::new(count + 1, entries);
        let (mut before, mut seen, mut start) = (Vec::new(), 0, 0);
        for (at, word) in members.iter().enumerate() {
            if at.is_multiple_of(BLOCK_WORDS) {
                before.push(seen);
            }
            seen += word.count_ones() as u64;
            let mut left = *word;
            while left != 0 {
                let node = at as u64 * 64 + left.trailing_zeros() as u64;
                starts.push(start);
                start += graph.degree(NodeId(node));
                left &= left - 1;
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
    /// Copies the neighbours from the dataset to an unlinked temporary file in `folder`, in one pass over each
    /// direction.
    pub fn write<W: StoredId>(
        graph: &DiskGraph,
        index: CacheIndex,
        folder: &Path,
        stop: &StopSignal,
    ) -> Result<NeighbourCacheFile> {
        let file =
            ScratchFile::create(folder).map_err(|error| SampleError::from(StoreError::io(folder)(error)))?;
        // With both directions, a node has two runs. Each direction fills its runs in a separate pass.
        for part in 0..graph.parts() {
            check_stop(stop)?;
            let mut stream = graph.stream(part)?;
            let (mut pending, mut at) = (Vec::with_capacity(CHUNK), 0u64);
            let put = |pending: &mut Vec<W>, start: u64| -> Result<()> {
                let bytes = bytemuck::cast_slice::<W, u8>(pending);
                file.write_at(bytes, start * size_of::<W>() as u64).map_err(StoreError::io(folder))?;
                pending.clear();
                Ok(())
            };
            let mut pending_start = 0;
            for node in 0..graph.nodes() {
                let node = NodeId(node);
                let Some((start, _)) = index.range(node) else { continue };
                let (first, end) = graph.bounds(part, node);
                let start = start + if part == 1 { graph.part_degree(0, node) } else { 0 };
                if pending_start + pending.len() as u64 != start || pending.len() >= CHUNK {
                    put(&mut pending, pending_start)?;
                    pending_start = start;
                    check_stop(stop)?;
                }
                stream.skip_to(first, &mut at)?;
                stream.append(end - first, &mut at, &mut pending)?;
            }
            put(&mut pending, pending_start)?;
        }
        Ok(NeighbourCacheFile { index: Arc::new(index), file })
    }

    /// The index of the cached nodes.
    pub fn index(&self) -> &CacheIndex {
        &self.index
    }

    /// Reads the whole file into memory.
    pub fn load<W: StoredId>(&self) -> Result<NeighbourCache<W>> {
        let mut lists = vec![W::default(); self.index.entries as usize];
        prefer_large_pages(&mut lists);
        let mut offset = 0;
        for chunk in lists.chunks_mut(CHUNK * 4) {
            let bytes = bytemuck::cast_slice_mut::<W, u8>(chunk);
            self.file.read_at(bytes, offset).map_err(StoreError::io(self.file.folder()))?;
            offset += bytes.len() as u64;
        }
        Ok(NeighbourCache { index: self.index.clone(), lists })
    }
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

/// How often each node is a neighbour: the reads that caching its own neighbours would save. It is counted in passes
/// over the adjacency, each for as many nodes as fit in `most_bytes`, and stored in a file.
#[derive(Debug)]
pub struct EntryCounts {
    file: ScratchFile,
    nodes: u64,
}

impl EntryCounts {
    /// Counts the entries of a graph.
    pub fn count<W: StoredId>(
        graph: &DiskGraph,
        folder: &Path,
        most_bytes: u64,
        stop: &StopSignal,
    ) -> Result<EntryCounts> {
        let file =
            ScratchFile::create(folder).map_err(|error| SampleError::from(StoreError::io(folder)(error)))?;
        let nodes = graph.nodes();
        let at_once = (most_bytes / 4).max(1 << 12).min(nodes.max(1)) as usize;
        let mut words = vec![W::default(); CHUNK];
        for first in (0..nodes).step_by(at_once) {
            let mut counts = vec![0u32; at_once.min((nodes - first) as usize)];
            for part in 0..graph.parts() {
                let mut stream = graph.stream(part)?;
                loop {
                    let filled = stream.fill(&mut words)?;
                    if filled == 0 {
                        break;
                    }
                    count_u32(&words[..filled], first, &mut counts);
                    check_stop(stop)?;
                }
            }
            for (chunk, at) in counts.chunks(CHUNK).zip((first..).step_by(CHUNK)) {
                file.write_at(bytemuck::cast_slice(chunk), at * 4).map_err(StoreError::io(folder))?;
            }
        }
        Ok(EntryCounts { file, nodes })
    }

    /// The counts from the first node to the last.
    pub fn stream(&self) -> CountStream<'_> {
        CountStream { counts: self, chunk: Vec::new(), at: 0, next: 0 }
    }
}

/// Fails if a stop was requested.
fn check_stop(stop: &StopSignal) -> Result<()> {
    if stop.is_asked() { Err(SampleError::Stopped) } else { Ok(()) }
}

/// A stream of counts in node order.
pub struct CountStream<'a> {
    counts: &'a EntryCounts,
    chunk: Vec<u32>,
    at: usize,
    next: u64,
}

impl CountStream<'_> {
    /// The count of the next node.
    pub fn take(&mut self) -> Result<u32> {
        if self.at == self.chunk.len() {
            self.chunk.resize((self.counts.nodes - self.next).min(CHUNK as u64) as usize, 0);
            let file = &self.counts.file;
            let bytes = bytemuck::cast_slice_mut(&mut self.chunk);
            file.read_at(bytes, self.next * 4).map_err(StoreError::io(file.folder()))?;
            self.next += self.chunk.len() as u64;
            self.at = 0;
        }
        self.at += 1;
        Ok(self.chunk[self.at - 1])
    }
}
