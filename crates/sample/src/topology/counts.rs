//! How often each node is a neighbour. It is counted by several readers of the adjacency at a time, and stored as
//! derived data of the dataset, so that later runs find it.

use super::{Direction, DiskGraph, StoredId};
use crate::{Result, SampleError};
use esker_io::{ScratchFile, prefetch};
use esker_store::{ArrayFile, ArrayWriter, Dataset, Elements, Staging, StoreError};
use esker_types::{Dtype, Progress, StopSignal, Unit};
use rayon::prelude::*;
use serde_json::json;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Entries read at a time by one reader.
const CHUNK: usize = 1 << 16;
/// Memory of a reader: its stream, and a chunk of ids.
const READER_BYTES: u64 = (1 << 20) + CHUNK as u64 * 8;
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
}

impl GraphWork<'_> {
    /// Fails if a stop was requested.
    pub(super) fn check_stop(&self) -> Result<()> {
        if self.stop.is_asked() { Err(SampleError::Stopped) } else { Ok(()) }
    }

    /// Number of readers with this much memory each. They get an eighth of the memory.
    pub(super) fn readers(&self, reader_bytes: u64) -> usize {
        let threads = self.pool.current_num_threads().max(1) as u64;
        (self.most_bytes / 8 / reader_bytes.max(1)).clamp(1, threads) as usize
    }
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
        keeps: bool,
        work: &GraphWork,
    ) -> Result<EntryCounts> {
        if let Some(found) = EntryCounts::find(graph) {
            return Ok(found);
        }
        if keeps {
            match count_and_keep::<W>(graph, work) {
                Err(SampleError::Stopped) => return Err(SampleError::Stopped),
                // The dataset is read-only, the disk is full, or another process counts. If the adjacency itself
                // cannot be read, counting again finds out.
                Err(_) => {}
                Ok(()) => {
                    if let Some(found) = EntryCounts::find(graph) {
                        return Ok(found);
                    }
                }
            }
        }
        EntryCounts::count::<W>(graph, work)
    }

    /// The counts in the dataset, if it has those of its adjacency as it is now.
    fn find(graph: &DiskGraph) -> Option<EntryCounts> {
        let (name, parameters) = identity(graph.direction());
        let found = graph.dataset().derived(name, KIND, &parameters)?;
        let is_whole = |array: &ArrayFile| {
            let entry = array.entry();
            (entry.name.as_str(), entry.dtype, entry.rows) == (COUNTS, Dtype::U32, graph.nodes())
        };
        let array = found.arrays.into_iter().find(is_whole)?;
        Some(EntryCounts { stored: StoredCounts::Kept(array), nodes: graph.nodes() })
    }

    /// Counts the entries of a graph to a temporary file.
    pub fn count<W: StoredId>(graph: &DiskGraph, work: &GraphWork) -> Result<EntryCounts> {
        let failed = |error| SampleError::from(StoreError::io(work.folder)(error));
        let file = ScratchFile::create(work.folder).map_err(failed)?;
        let mut at = 0;
        each_count::<W>(graph, work, |counts| {
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
fn identity(direction: Direction) -> (&'static str, serde_json::Value) {
    let (name, short) = match direction {
        Direction::Incoming => ("neighbour-counts-in", "in"),
        Direction::Outgoing => ("neighbour-counts-out", "out"),
        Direction::Both => ("neighbour-counts-both", "both"),
    };
    (name, json!({ "direction": short, "version": VERSION }))
}

/// Counts to derived data of the dataset.
fn count_and_keep<W: StoredId>(graph: &DiskGraph, work: &GraphWork) -> Result<()> {
    let (name, parameters) = identity(graph.direction());
    let dataset: &Dataset = graph.dataset();
    let staging = dataset.derive(name)?;
    // What a killed process left is not used.
    let written = staging.journal(&dataset.inputs_of(KIND, &parameters)).map_err(SampleError::from);
    let written = written.and_then(|_| write_counts::<W>(graph, work, &staging));
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
    work: &GraphWork,
    staging: &Staging,
) -> Result<esker_store::FileEntry> {
    let mut writer = ArrayWriter::create(staging.directory(), COUNTS, Dtype::U32, 1)?;
    each_count::<W>(graph, work, |counts| Ok(writer.write_elements(counts)?))?;
    Ok(writer.finish()?)
}

/// Counts the entries of a graph and passes the counts on, in node order.
fn each_count<W: StoredId>(
    graph: &DiskGraph,
    work: &GraphWork,
    mut take: impl FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    let (nodes, readers) = (graph.nodes(), work.readers(READER_BYTES));
    let left = work.most_bytes.saturating_sub((readers as u64 - 1) * READER_BYTES);
    let at_once = (left / 4).max(1 << 12).min(nodes.max(1));
    let passes = nodes.div_ceil(at_once);
    work.progress.stage("count neighbours", Some(graph.entries() * passes), Unit::Count("neighbours"));
    let mut counts: Vec<AtomicU32> = Vec::new();
    counts.resize_with(at_once as usize, AtomicU32::default);
    let mut chunk = Vec::with_capacity(CHUNK);
    for first in (0..nodes).step_by(at_once as usize) {
        let counts = &mut counts[..at_once.min(nodes - first) as usize];
        work.pool.install(|| {
            counts.par_iter_mut().for_each(|count| *count.get_mut() = 0);
            count_pass::<W>(graph, work, readers, first, counts)
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
fn count_pass<W: StoredId>(
    graph: &DiskGraph,
    work: &GraphWork,
    readers: usize,
    first: u64,
    counts: &[AtomicU32],
) -> Result<()> {
    let (next, pieces) = (AtomicU64::new(0), graph.part_entries().div_ceil(PIECE));
    (0..readers).into_par_iter().try_for_each(|_| {
        // On the heap: threads have small stacks.
        let mut words: Vec<W> = Vec::new();
        words.resize(CHUNK, W::default());
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces * graph.parts() as u64 {
                return Ok(());
            }
            let (part, start) = ((piece / pieces) as usize, piece % pieces * PIECE);
            let mut left = PIECE.min(graph.part_entries() - start);
            let mut stream = graph.stream_from(part, start)?;
            while left > 0 {
                work.check_stop()?;
                let some = left.min(CHUNK as u64) as usize;
                let filled = stream.fill(&mut words[..some])?;
                match readers {
                    1 => count_words(&words[..filled], first, counts, add_alone),
                    _ => count_words(&words[..filled], first, counts, add_shared),
                }
                work.progress.advance(filled as u64);
                left -= filled as u64;
            }
        }
    })
}

#[inline(always)]
fn count_words<W: StoredId>(words: &[W], first: u64, counts: &[AtomicU32], add: impl Fn(&AtomicU32)) {
    let index = |word: &W| word.node().0.wrapping_sub(first) as usize;
    for (at, word) in words.iter().enumerate() {
        // An addition that others see waits for its cache line, so it had better be there.
        if let Some(soon) = words.get(at + PREFETCH_DISTANCE) {
            prefetch(counts, index(soon));
        }
        if let Some(count) = counts.get(index(word)) {
            add(count);
        }
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
