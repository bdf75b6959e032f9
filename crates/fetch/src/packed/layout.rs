//! Lays out packed rows by a given layout: which rows a batch has to itself and in which order, which rows it shares
//! with its segment, and the placement of each row of each batch.

use super::outputs::{self, OutputRows, OutputSizes};
use super::plain::Plain;
use super::samples::Samples;
use super::write::{PackWork, PackWriter};
use super::{Entry, Largest, SegmentEntry, file, shared_start};
use crate::{FetchError, Result, RowFormat, StoredRow};
use esker_plan::{Hottest, MOST_READ, Placement, SegmentRows, SegmentSizes, ranks};
use esker_store::{ArrayWriter, FileEntry};
use esker_types::{Dtype, SlotIndex, Unit};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// What to pack, decided before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackLayout {
    /// The first epochs of the samples, this many.
    pub epochs: u64,
    /// Whether more were requested than fit the disk.
    pub limited_by_disk: bool,
    /// Rows that could be cached in memory if that many were accessed.
    pub slots_asked: u64,
    /// Batches per segment. With 1, every batch has all its rows to itself.
    pub segment: u32,
    /// The disk budget, if one was given.
    pub disk_bytes_allowed: Option<u64>,
    /// Whether shared rows are ordered by the batches that access them. Otherwise by id.
    pub by_hash: bool,
    /// Pairs of a number of rows and the accesses to that many of the most accessed rows.
    pub coverage: Vec<[u64; 2]>,
    /// The packed rows whose cached rows these use. Then no cached rows are stored here.
    #[serde(default)]
    pub cached_by: Option<String>,
}

/// The result of laying out. Its arrays are in the work directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Laid {
    pub layout: PackLayout,
    pub batches: u64,
    pub slots: u64,
    pub misses: u64,
    pub shared: u64,
    pub largest: Largest,
    /// Number of parts of the file of rows, each with ascending rows. The cache for memory comes first.
    pub outputs: u64,
    /// Blocks of the file of rows.
    pub blocks: u64,
    /// Finished arrays.
    pub files: Vec<FileEntry>,
}

impl Laid {
    pub fn sizes(&self) -> OutputSizes {
        OutputSizes { outputs: self.outputs, blocks: self.blocks }
    }
}

/// Array of entries that are laid out.
pub(crate) const LAID: &str = "laid-entries";

/// Largest memory of laying out, in bytes.
pub(crate) fn memory_bytes(
    nodes: u64,
    row_bytes: u64,
    batches: u64,
    largest_nodes: u64,
    threads: u64,
) -> u64 {
    let tables = Hottest::bytes_for(nodes)
        + SegmentSizes::bytes_for(nodes, batches).max(SegmentRows::bytes_for(nodes));
    // For a batch: its nodes, their words, the arrays being sorted and the sorted ones. For a batch that is written
    // meanwhile: the sorted ones.
    let batch = largest_nodes * (8 + 4 + 2 * 16 + 8 + 4) + largest_nodes * (4 + 8 + 4);
    let caches = outputs::memory_bytes(nodes, row_bytes);
    tables + (batch * 2 * threads.max(1)).max(caches) + batches * (size_of::<Entry>() as u64 + 64)
}

/// The layout of one batch.
struct BatchLayout<W> {
    words: Vec<u32>,
    /// Its own rows, ascending.
    packed: Vec<W>,
    /// Its positions in the segment's cache, ascending.
    shared: Vec<u32>,
    words_sum: u64,
    shared_sum: u64,
}

fn lay_batch<W: StoredRow>(
    nodes: &[W],
    hottest: &Hottest,
    segment: Option<&SegmentRows>,
    row_bytes: u64,
) -> Result<BatchLayout<W>> {
    let mut words = vec![0u32; nodes.len()];
    let (mut packed, mut shared) = (Vec::new(), Vec::new());
    for (at, node) in nodes.iter().enumerate() {
        if let Some(soon) = nodes.get(at + 16) {
            esker_io::prefetch(hottest.slots(), soon.index());
        }
        match hottest.slot(*node) {
            Some(slot) => words[at] = Placement::Hit(SlotIndex(slot)).encode(),
            None => match segment.and_then(|segment| segment.place(*node)) {
                Some(place) => shared.push((place, at as u32)),
                None => packed.push((*node, at as u32)),
            },
        }
    }
    radsort::sort_by_key(&mut packed, |(node, _)| node.index() as u64);
    radsort::sort_by_key(&mut shared, |(place, _)| *place);
    let first_shared = shared_start(packed.len() as u64, row_bytes);
    let read = first_shared + shared.len() as u64;
    if read >= MOST_READ as u64 {
        return Err(FetchError::BatchRows { rows: read, most: MOST_READ - 1 });
    }
    for (index, (_, at)) in packed.iter().enumerate() {
        words[*at as usize] = Placement::Read(index as u32).encode();
    }
    for (index, (_, at)) in shared.iter().enumerate() {
        words[*at as usize] = Placement::Read((first_shared + index as u64) as u32).encode();
    }
    let shared: Vec<u32> = shared.into_iter().map(|(place, _)| place).collect();
    Ok(BatchLayout {
        words_sum: xxh3_64(bytemuck::cast_slice(&words)),
        shared_sum: xxh3_64(bytemuck::cast_slice(&shared)),
        words,
        packed: packed.into_iter().map(|(node, _)| node).collect(),
        shared,
    })
}

/// Lays out all rows: those with a slot in `hottest` for memory, the others by the layout.
pub(crate) fn lay_out<W: StoredRow>(
    writer: &PackWriter,
    samples: &Samples,
    hottest: &Hottest,
    layout: &PackLayout,
    format: &RowFormat,
    work: &PackWork,
) -> Result<Laid> {
    let row_bytes = format.row_bytes() as u64;
    let mut entries = samples.entries(layout.epochs)?;
    let accesses = samples.accesses::<W>()?;
    let mut writing = Writing::<W> {
        words: ArrayWriter::create(writer.directory(), file::WORDS, Dtype::U32, 1)?,
        shared: ArrayWriter::create(writer.directory(), file::SHARED, Dtype::U32, 1)?,
        segments: ArrayWriter::create(
            writer.directory(),
            file::SEGMENTS,
            Dtype::U64,
            size_of::<SegmentEntry>() as u64 / 8,
        )?,
        outputs: OutputRows::create(&writer.work(), row_bytes)?,
        largest: samples.of_epochs(layout.epochs).largest,
        shared_at: 0,
    };
    work.progress.stage("lay rows out", Some(entries.len() as u64), Unit::Count("batches"));
    if layout.cached_by.is_none() {
        writing.outputs.add_hottest(hottest, &writer.work())?;
    }
    let segment = layout.segment.max(1) as usize;
    let mut sharing = (segment > 1).then(|| SegmentRows::new(format.rows()));
    let batches_of_cache = if sharing.is_some() { segment } else { entries.len().max(1) };
    for (number, batches) in entries.chunks_mut(batches_of_cache).enumerate() {
        match &mut sharing {
            Some(sharing) => writing.add_segment(sharing, batches, hottest, layout, &accesses, work)?,
            None => {
                let none = vec![SegmentEntry::default(); batches.len()];
                writing.segments.write(bytemuck::cast_slice(&none))?;
            }
        }
        let segment_of = |batch: usize| if segment > 1 { number } else { batch } as u64;
        let lay = |entry: &Entry| {
            let mut nodes: Vec<W> = Vec::new();
            accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
            lay_batch(&nodes, hottest, sharing.as_ref(), row_bytes)
        };
        writing.add_batches(batches, lay, segment_of, work)?;
    }
    let mut laid = ArrayWriter::create(&writer.work(), LAID, Dtype::U64, Entry::COLUMNS)?;
    laid.write_elements(bytemuck::cast_slice::<Entry, u64>(&entries))?;
    laid.finish()?;
    let (outputs, blocks) = writing.outputs.finish()?;
    let files = vec![writing.words.finish()?, writing.shared.finish()?, writing.segments.finish()?];
    work.progress.finish();
    Ok(Laid {
        layout: layout.clone(),
        batches: entries.len() as u64,
        slots: hottest.cached(),
        misses: entries.iter().map(|entry| entry.packed_rows + entry.shared_rows).sum(),
        shared: writing.shared_at,
        largest: writing.largest,
        outputs,
        blocks,
        files,
    })
}

/// The arrays being written.
struct Writing<W> {
    words: ArrayWriter,
    shared: ArrayWriter,
    segments: ArrayWriter,
    outputs: OutputRows<W>,
    largest: Largest,
    shared_at: u64,
}

impl<W: StoredRow> Writing<W> {
    /// Finds the rows that a segment's batches share, and adds them as its cache.
    fn add_segment(
        &mut self,
        sharing: &mut SegmentRows,
        batches: &[Entry],
        hottest: &Hottest,
        layout: &PackLayout,
        accesses: &Plain<W>,
        work: &PackWork,
    ) -> Result<()> {
        let mut nodes: Vec<W> = Vec::new();
        sharing.begin();
        for (entry, rank) in batches.iter().zip(ranks(batches.len() as u32)) {
            work.check_stop()?;
            accesses.read(entry.words_at, entry.nodes as usize, &mut nodes)?;
            sharing.see(rank, nodes.iter().copied().filter(|node| hottest.slot(*node).is_none()));
        }
        sharing.close(layout.by_hash);
        let rows = sharing.shared();
        let cache = SegmentEntry { block: self.outputs.add_cache(rows)?, rows: rows.len() as u64 };
        Ok(self.segments.write(bytemuck::bytes_of(&cache))?)
    }

    /// Lays out some batches while the previous ones are written.
    fn add_batches(
        &mut self,
        batches: &mut [Entry],
        lay: impl Fn(&Entry) -> Result<BatchLayout<W>> + Sync + Send,
        segment_of: impl Fn(usize) -> u64 + Sync,
        work: &PackWork,
    ) -> Result<()>
    where
        W: Send,
    {
        let at_a_time = work.pool.current_num_threads().max(1) * 2;
        let mut before: (usize, &mut [Entry], Vec<Result<BatchLayout<W>>>) = (0, &mut [], Vec::new());
        for (turn, some) in batches.chunks_mut(at_a_time).enumerate() {
            work.check_stop()?;
            let (first, written, laid) = before;
            let (done, all) = work.pool.install(|| {
                let write = || self.add_laid(first, written, laid, &segment_of, work);
                rayon::join(write, || some.par_iter().map(&lay).collect())
            });
            done?;
            before = (turn * at_a_time, some, all);
        }
        let (first, written, laid) = before;
        self.add_laid(first, written, laid, &segment_of, work)
    }

    /// Writes batches that are laid out. The first of them is batch `first` of its segment.
    fn add_laid(
        &mut self,
        first: usize,
        batches: &mut [Entry],
        all: Vec<Result<BatchLayout<W>>>,
        segment_of: &(impl Fn(usize) -> u64 + Sync),
        work: &PackWork,
    ) -> Result<()> {
        for ((at, entry), laid) in batches.iter_mut().enumerate().zip(all) {
            let laid = laid?;
            self.words.write_elements(&laid.words)?;
            self.shared.write_elements(&laid.shared)?;
            (entry.words_sum, entry.shared_sum) = (laid.words_sum, laid.shared_sum);
            entry.packed_rows = laid.packed.len() as u64;
            entry.shared_rows = laid.shared.len() as u64;
            entry.segment = segment_of(first + at);
            entry.shared_at = self.shared_at;
            entry.block = self.outputs.add(&laid.packed)?;
            self.shared_at += entry.shared_rows;
            self.largest.packed_rows = self.largest.packed_rows.max(entry.packed_rows);
            self.largest.shared_rows = self.largest.shared_rows.max(entry.shared_rows);
            work.progress.advance(1);
        }
        Ok(())
    }
}
