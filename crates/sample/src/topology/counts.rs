//! How often each node is a neighbour, of all nodes or of those in other partitions than its own. It is counted by
//! several readers of the adjacency at a time, and stored as derived data of the dataset, so that later runs find it.

use super::{Direction, DiskGraph, StoredId};
use crate::partition::{PartitionStream, StoredPartitioning};
use crate::{Result, SampleError};
use esker_io::{ScratchFile, prefetch};
use esker_store::{ArrayFile, ArrayWriter, Dataset, Elements, Staging, StoreError};
use esker_types::{Dtype, NodeId, Progress, StopSignal, Unit};
use rayon::prelude::*;
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Entries read at a time by one reader.
const CHUNK: usize = 1 << 16;
/// Memory of a reader: its streams, and a chunk of ids.
const READER_BYTES: u64 = (1 << 20) + CHUNK as u64 * 8 + PartitionStream::BYTES;
/// Entries of a piece, which one reader counts. Opening one costs little, and readers end at about the same time.
const PIECE: u64 = 1 << 22;
/// How far ahead counts are prefetched.
const PREFETCH_DISTANCE: usize = 16;
/// The kind of this derived data, its version, and its array.
const KIND: &str = "neighbour-counts";
const VERSION: u32 = 1;
const COUNTS: &str = "counts";

/// Threads, memory and control of long work on the adjacency.
#[derive(Clone, Copy)]
pub struct GraphWork<'a> {
    /// Folder of temporary files.
    pub folder: &'a Path,
    /// Memory in bytes.
    pub most_bytes: u64,
    /// Threads.
    pub pool: &'a rayon::ThreadPool,
    /// Ends the work.
    pub stop: &'a StopSignal,
    /// Gets stages.
    pub progress: &'a dyn Progress,
    /// Bytes between two safe points of a sort, instead of the default: tests kill the process there.
    pub safe_point_bytes: Option<u64>,
}

/// Bytes that a sort writes between two safe points.
const SAFE_POINT_BYTES: u64 = 2 << 30;

impl GraphWork<'_> {
    /// Bytes that a sort writes between two safe points: what a kill costs.
    pub fn safe_point_bytes(&self) -> u64 {
        self.safe_point_bytes.unwrap_or(SAFE_POINT_BYTES)
    }

    /// Fails if a stop was requested.
    pub(crate) fn check_stop(&self) -> Result<()> {
        if self.stop.is_asked() { Err(SampleError::Stopped) } else { Ok(()) }
    }

    /// Number of readers with this much memory each. They get an eighth of the memory.
    pub(super) fn readers(&self, reader_bytes: u64) -> usize {
        let threads = self.pool.current_num_threads().max(1) as u64;
        (self.most_bytes / 8 / reader_bytes.max(1)).clamp(1, threads) as usize
    }
}

/// Whose neighbours are counted.
#[derive(Debug, Clone, Copy)]
pub enum CountedNeighbours<'a> {
    /// Those of all nodes (Ginex).
    All,
    /// Those of nodes in other partitions: the edges that come from there (OUTRE).
    Cross(&'a StoredPartitioning),
}

/// How often each node is a neighbour: the reads that caching its own neighbours would save. It is counted in passes
/// over the adjacency, each for as many nodes as fit in memory.
#[derive(Debug)]
pub struct EntryCounts {
    stored: StoredCounts,
    nodes: u64,
}

#[derive(Debug)]
enum StoredCounts {
    /// Derived data of the dataset.
    Kept(ArrayFile),
    /// The dataset cannot be written, or there is no room.
    Scratch(ScratchFile),
}

impl EntryCounts {
    /// Finds the counts of a graph, or counts its entries. With `keeps`, the result becomes derived data of the
    /// dataset. If that fails, it goes to a temporary file.
    pub fn find_or_count<W: StoredId>(
        graph: &DiskGraph,
        of: CountedNeighbours<'_>,
        keeps: bool,
        work: &GraphWork,
    ) -> Result<EntryCounts> {
        if let Some(found) = EntryCounts::find(graph, of) {
            return Ok(found);
        }
        if keeps {
            match count_and_keep::<W>(graph, of, work) {
                Err(SampleError::Stopped) => return Err(SampleError::Stopped),
                // The dataset is read-only, the disk is full, or another process counts. If the adjacency itself
                // cannot be read, counting again finds out.
                Err(_) => {}
                Ok(()) => {
                    if let Some(found) = EntryCounts::find(graph, of) {
                        return Ok(found);
                    }
                }
            }
        }
        EntryCounts::count::<W>(graph, of, work)
    }

    /// The counts in the dataset, if it has those of its adjacency as it is now.
    fn find(graph: &DiskGraph, of: CountedNeighbours<'_>) -> Option<EntryCounts> {
        let (name, parameters) = identity(graph.direction(), of);
        let found = graph.dataset().derived(&name, KIND, &parameters)?;
        let is_whole = |array: &ArrayFile| {
            let entry = array.entry();
            (entry.name.as_str(), entry.dtype, entry.rows) == (COUNTS, Dtype::U32, graph.nodes())
        };
        let array = found.arrays.into_iter().find(is_whole)?;
        Some(EntryCounts { stored: StoredCounts::Kept(array), nodes: graph.nodes() })
    }

    /// Counts the entries of a graph to a temporary file.
    pub fn count<W: StoredId>(
        graph: &DiskGraph,
        of: CountedNeighbours<'_>,
        work: &GraphWork,
    ) -> Result<EntryCounts> {
        let failed = |error| SampleError::from(StoreError::io(work.folder)(error));
        let file = ScratchFile::create(work.folder).map_err(failed)?;
        let mut at = 0;
        each_count::<W>(graph, of, work, |counts| {
            file.write_at(bytemuck::cast_slice(counts), at * 4).map_err(failed)?;
            at += counts.len() as u64;
            Ok(())
        })?;
        Ok(EntryCounts { stored: StoredCounts::Scratch(file), nodes: graph.nodes() })
    }

    /// The counts from the first node to the last.
    pub fn stream(&self) -> CountStream<'_> {
        CountStream { counts: self, elements: None, chunk: Vec::new(), at: 0, next: 0 }
    }
}

/// Name and parameters of the counts of a direction.
fn identity(direction: Direction, of: CountedNeighbours<'_>) -> (String, serde_json::Value) {
    let short = direction.short();
    match of {
        CountedNeighbours::All => {
            (format!("neighbour-counts-{short}"), json!({ "direction": short, "version": VERSION }))
        }
        CountedNeighbours::Cross(stored) => (
            format!("cross-counts-{short}-{}", stored.name()),
            json!({ "direction": short, "version": VERSION, "partitions": stored.digest() }),
        ),
    }
}

/// Counts to derived data of the dataset.
fn count_and_keep<W: StoredId>(graph: &DiskGraph, of: CountedNeighbours<'_>, work: &GraphWork) -> Result<()> {
    let (name, parameters) = identity(graph.direction(), of);
    let dataset: &Dataset = graph.dataset();
    let staging = dataset.derive(&name)?;
    // What a killed process left is not used.
    let written = staging.journal(&dataset.inputs_of(KIND, &parameters)).map_err(SampleError::from);
    let written = written.and_then(|_| write_counts::<W>(graph, of, work, &staging));
    match written {
        Ok(entry) => Ok(staging.publish_derived(dataset, KIND, parameters, vec![entry])?),
        Err(error) => {
            // Nothing stays of it: the disk may be full.
            let _ = staging.discard();
            Err(error)
        }
    }
}

fn write_counts<W: StoredId>(
    graph: &DiskGraph,
    of: CountedNeighbours<'_>,
    work: &GraphWork,
    staging: &Staging,
) -> Result<esker_store::FileEntry> {
    let mut writer = ArrayWriter::create(staging.directory(), COUNTS, Dtype::U32, 1)?;
    each_count::<W>(graph, of, work, |counts| Ok(writer.write_elements(counts)?))?;
    Ok(writer.finish()?)
}

/// Counts the entries of a graph and passes the counts on, in node order.
fn each_count<W: StoredId>(
    graph: &DiskGraph,
    of: CountedNeighbours<'_>,
    work: &GraphWork,
    mut take: impl FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    let (nodes, readers) = (graph.nodes(), work.readers(READER_BYTES));
    let left = work.most_bytes.saturating_sub((readers as u64 - 1) * READER_BYTES);
    // A count, and the partition of the node.
    let node_bytes = if let CountedNeighbours::All = of { 4 } else { 8 };
    let at_once = (left / node_bytes).max(1 << 12).min(nodes.max(1));
    let passes = nodes.div_ceil(at_once);
    work.progress.stage("count neighbours", Some(graph.entries() * passes), Unit::Count("neighbours"));
    let (mut counts, mut own): (Vec<AtomicU32>, Vec<u32>) = (Vec::new(), Vec::new());
    counts.resize_with(at_once as usize, AtomicU32::default);
    let mut chunk = Vec::with_capacity(CHUNK);
    for first in (0..nodes).step_by(at_once as usize) {
        let counts = &mut counts[..at_once.min(nodes - first) as usize];
        if let CountedNeighbours::Cross(stored) = of {
            let mut partitions = stored.stream_from(NodeId(first))?;
            own.clear();
            own.reserve_exact(counts.len());
            for _ in 0..counts.len() {
                own.push(partitions.take()?);
            }
        }
        work.pool.install(|| {
            counts.par_iter_mut().for_each(|count| *count.get_mut() = 0);
            CountPass { graph, of, work, readers, first, counts, own: &own }.run::<W>()
        })?;
        for some in counts.chunks(CHUNK) {
            chunk.clear();
            chunk.extend(some.iter().map(|count| count.load(Ordering::Relaxed)));
            take(&chunk)?;
        }
    }
    work.progress.finish();
    Ok(())
}

/// Counts the entries that are nodes from `first` on, as far as there are counts.
struct CountPass<'a> {
    graph: &'a DiskGraph,
    of: CountedNeighbours<'a>,
    work: &'a GraphWork<'a>,
    readers: usize,
    first: u64,
    counts: &'a [AtomicU32],
    /// Partitions of the counted nodes, if they matter.
    own: &'a [u32],
}

impl CountPass<'_> {
    fn run<W: StoredId>(&self) -> Result<()> {
        let (next, pieces) = (AtomicU64::new(0), self.graph.part_entries().div_ceil(PIECE));
        (0..self.readers).into_par_iter().try_for_each(|_| {
            // On the heap: threads have small stacks.
            let mut words: Vec<W> = Vec::new();
            words.resize(CHUNK, W::default());
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces * self.graph.parts() as u64 {
                    return Ok(());
                }
                self.piece((piece / pieces) as usize, piece % pieces * PIECE, &mut words)?;
            }
        })
    }

    /// Counts the entries of a part from `start` on.
    fn piece<W: StoredId>(&self, part: usize, start: u64, words: &mut [W]) -> Result<()> {
        let mut left = PIECE.min(self.graph.part_entries() - start);
        let mut stream = self.graph.stream_from(part, start)?;
        let mut owners = match self.of {
            CountedNeighbours::All => None,
            CountedNeighbours::Cross(stored) => Some(Owners::from(self.graph, stored, part, start)?),
        };
        while left > 0 {
            self.work.check_stop()?;
            let some = left.min(CHUNK as u64) as usize;
            let filled = stream.fill(&mut words[..some])?;
            let words = &words[..filled];
            match &mut owners {
                None => self.count(words, 0..filled, |_| true),
                Some(owners) => owners.each_run(filled, |partition, range| {
                    self.count(words, range, |index| self.own[index] != partition);
                })?,
            }
            self.work.progress.advance(filled as u64);
            left -= filled as u64;
        }
        Ok(())
    }

    #[inline(always)]
    fn count<W: StoredId>(&self, words: &[W], range: Range<usize>, is_counted: impl Fn(usize) -> bool) {
        match self.readers {
            1 => self.count_with(words, range, is_counted, add_alone),
            _ => self.count_with(words, range, is_counted, add_shared),
        }
    }

    #[inline(always)]
    fn count_with<W: StoredId>(
        &self,
        words: &[W],
        range: Range<usize>,
        is_counted: impl Fn(usize) -> bool,
        add: impl Fn(&AtomicU32),
    ) {
        let index = |word: &W| word.node().0.wrapping_sub(self.first) as usize;
        for at in range {
            // An addition that others see waits for its cache line, so it had better be there.
            if let Some(soon) = words.get(at + PREFETCH_DISTANCE) {
                prefetch(self.counts, index(soon));
                prefetch(self.own, index(soon));
            }
            let index = index(&words[at]);
            if let Some(count) = self.counts.get(index).filter(|_| is_counted(index)) {
                add(count);
            }
        }
    }
}

/// Whose neighbours the entries of a part are, from some entry on.
struct Owners<'a> {
    graph: &'a DiskGraph,
    part: usize,
    partitions: PartitionStream,
    /// The next entry, its node, that node's partition, and where its entries end.
    at: u64,
    node: u64,
    partition: u32,
    end: u64,
}

impl Owners<'_> {
    fn from<'a>(
        graph: &'a DiskGraph,
        stored: &StoredPartitioning,
        part: usize,
        start: u64,
    ) -> Result<Owners<'a>> {
        let node = graph.owner(part, start);
        let mut partitions = stored.stream_from(node)?;
        let (partition, end) = (partitions.take()?, graph.bounds(part, node).1);
        Ok(Owners { graph, part, partitions, at: start, node: node.0, partition, end })
    }

    /// The next `count` entries: runs of entries of one node, each with the node's partition.
    fn each_run(&mut self, count: usize, mut take: impl FnMut(u32, Range<usize>)) -> Result<()> {
        let mut done = 0;
        while done < count {
            while self.at == self.end {
                self.node += 1;
                self.end = self.graph.bounds(self.part, NodeId(self.node)).1;
                self.partition = self.partitions.take()?;
            }
            let run = (self.end - self.at).min((count - done) as u64);
            take(self.partition, done..done + run as usize);
            self.at += run;
            done += run as usize;
        }
        Ok(())
    }
}

/// Adds one, up to the largest number. Nobody else adds.
fn add_alone(count: &AtomicU32) {
    count.store(count.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
}

/// The same while others add. Whoever makes the number wrap around restores it, so it ends as the largest number.
fn add_shared(count: &AtomicU32) {
    if count.fetch_add(1, Ordering::Relaxed) == u32::MAX {
        count.store(u32::MAX, Ordering::Relaxed);
    }
}

/// A stream of counts in node order.
pub struct CountStream<'a> {
    counts: &'a EntryCounts,
    /// Derived data, once it is read: opening it for every chunk would take longer than reading.
    elements: Option<Elements>,
    chunk: Vec<u32>,
    at: usize,
    next: u64,
}

impl CountStream<'_> {
    /// The count of the next node.
    pub fn take(&mut self) -> Result<u32> {
        if self.at == self.chunk.len() {
            self.chunk.resize((self.counts.nodes - self.next).min(CHUNK as u64) as usize, 0);
            self.read()?;
            self.next += self.chunk.len() as u64;
            self.at = 0;
        }
        self.at += 1;
        Ok(self.chunk[self.at - 1])
    }

    /// Fills the chunk.
    fn read(&mut self) -> Result<()> {
        match &self.counts.stored {
            StoredCounts::Kept(array) => {
                let elements = match &mut self.elements {
                    Some(elements) => elements,
                    none => none.insert(array.elements(self.next)?),
                };
                elements.fill(&mut self.chunk)?;
            }
            StoredCounts::Scratch(file) => {
                let read = file.read_at(bytemuck::cast_slice_mut(&mut self.chunk), self.next * 4);
                read.map_err(StoreError::io(file.folder()))?;
            }
        }
        Ok(())
    }
}
