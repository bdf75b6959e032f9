//! Plans the cache of each lap, and lays out what its batches read: their rows in ascending order, as packing appends them,
//! and for each batch a placement per row and the slots that keep some of them.

use super::super::outputs::{self, OutputRows, OutputSizes};
use super::super::plain::Plain;
use super::super::samples::Samples;
use super::super::write::PackWork;
use super::super::{Entry, Largest, blocks_for, file, log::id_dtype};
use super::{LapEntry, RunEntry, RunSource};
use crate::superbatch::PlanUses;
use crate::{FetchError, PlanFile, Result, StoredRow};
use esker_plan::{AccessTrace, Belady, LAPS, Placement, Placements, RequestCount};
use esker_store::{ArrayWriter, BlockArray, FileEntry};
use esker_types::{ByteCount, Dtype, NodeId, Unit};
use serde::{Deserialize, Serialize};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the arrays of one access or one kept row while a run is laid out and packed.
const WORD_BYTES: u64 = 4;

/// What to plan and pack, decided before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunLayout {
    /// The samples that parts refer to.
    pub sources: Vec<RunSource>,
    /// The laps.
    pub laps: Vec<LapLayout>,
    /// Slots of the cache.
    pub slots: u64,
    /// The disk budget, if one was given.
    pub disk_bytes_allowed: Option<u64>,
}

/// A sequence of batches with a plan of its own.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LapLayout {
    /// What it consists of, in order.
    pub parts: Vec<PartOfLap>,
    /// Whether it begins again after its end, with what it left in the cache.
    pub repeats: bool,
}

/// The batches of one epoch of some samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartOfLap {
    /// The index of the samples.
    pub source: usize,
    /// The epoch in them.
    pub epoch: u64,
}

/// The result of laying out. Its arrays are in the work directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LaidRun {
    pub layout: RunLayout,
    pub sizes: OutputSizes,
    pub batches: u64,
    pub accesses: u64,
    pub misses: u64,
    pub kept: u64,
    pub around: u64,
    pub largest: Largest,
    /// Finished arrays.
    pub files: Vec<FileEntry>,
}

/// Largest memory of planning and laying out, in bytes.
pub(crate) fn memory_bytes<W: StoredRow>(
    nodes: u64,
    slots: u64,
    batches: u64,
    largest: u64,
    repeats: bool,
) -> u64 {
    let planned = if repeats { batches.saturating_mul(LAPS as u64) } else { batches };
    let laps = if repeats { Belady::<W>::lap_bytes_for(slots, planned) } else { 0 };
    let index = planned.saturating_mul(PlanFile::bytes_per_batch() + 16);
    // The batches of all laps, those of one twice; before, those of the samples.
    let entries = batches.saturating_mul((2 * size_of::<RunEntry>() + size_of::<Entry>()) as u64);
    // Rows of a batch with their positions, sorted; kept rows; narrow next uses.
    let batch = largest.saturating_mul(2 * 16 + 8 + 4 + 8 + 2);
    Belady::<W>::bytes_for(nodes, slots, planned, largest)
        .saturating_add(laps)
        .saturating_add(index)
        .saturating_add(entries)
        .saturating_add(batch)
        .saturating_add(outputs::memory_bytes(1, 1))
}

/// Disk space of what is made of some samples, without them: while it is planned, or while it is packed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RunBytes {
    pub accesses: u64,
    pub misses: u64,
    pub kept: u64,
    pub batches: u64,
}

impl RunBytes {
    pub fn of<W: StoredRow>(&self, row_bytes: u64, repeats: bool) -> u64 {
        let id = size_of::<W>() as u64;
        let lasting = (self.accesses + self.kept) * WORD_BYTES
            + (self.misses + self.kept) * id
            + self.batches * (2 * RunEntry::COLUMNS * 8 + outputs::Output::COLUMNS * 8);
        let laps = if repeats { LAPS as u64 } else { 1 };
        let counts = (self.accesses * laps).min((self.batches * laps).pow(2) / 2);
        let planning = self.accesses * laps * WORD_BYTES + counts * size_of::<RequestCount>() as u64;
        let blocks = self.misses * row_bytes / BlockArray::BLOCK_BYTES + self.batches;
        // Checksums of blocks: in the array, and twice while they are replaced.
        let packing = blocks * (BlockArray::BLOCK_BYTES + 3 * 8);
        lasting + lasting / 4096 + 6 * (3 << 12) + planning.max(packing)
    }
}

/// The accesses of the batches of a lap.
struct LapTrace<'a, W> {
    entries: &'a [RunEntry],
    accesses: &'a [Plain<W>],
    rows: u64,
}

impl<W: StoredRow> AccessTrace for LapTrace<'_, W> {
    type Row = W;
    type Error = FetchError;

    fn batches(&self) -> u32 {
        self.entries.len() as u32
    }

    fn read(&mut self, batch: u32, rows: &mut Vec<W>) -> Result<()> {
        let entry = &self.entries[batch as usize];
        let accesses = &self.accesses[entry.source as usize];
        accesses.read(entry.accesses_at, entry.nodes as usize, rows)?;
        // The planner's tables have an element per row.
        match rows.iter().all(|row| (row.index() as u64) < self.rows) {
            true => Ok(()),
            false => Err(FetchError::Damaged {
                path: accesses.path().to_path_buf(),
                what: format!("the rows of epoch {}, batch {}", entry.epoch, entry.batch),
            }),
        }
    }
}

/// The batches of a lap. `samples` has those of each source, by epoch.
fn entries_of(layout: &LapLayout, lap: u64, samples: &[Vec<Entry>]) -> Vec<RunEntry> {
    let of_part = |part: &PartOfLap| {
        let all = &samples[part.source];
        let before = |epoch: u64| all.partition_point(|entry| entry.epoch < epoch);
        let (source, some) = (part.source as u64, &all[before(part.epoch)..before(part.epoch + 1)]);
        some.iter().map(move |entry| RunEntry {
            source,
            epoch: entry.epoch,
            batch: entry.batch,
            nodes: entry.nodes,
            accesses_at: entry.words_at,
            sample_at: entry.sample_at,
            sample_bytes: entry.sample_bytes,
            sample_sum: entry.sample_sum,
            lap,
            ..RunEntry::default()
        })
    };
    layout.parts.iter().flat_map(of_part).collect()
}

/// Plans and lays out all laps. `allowed` is the disk space for everything that is made.
pub(crate) fn lay_out<W: StoredRow>(
    directories: (&Path, &Path),
    samples: &[Samples],
    layout: &RunLayout,
    (rows, row_bytes): (u64, u64),
    allowed: u64,
    work: &PackWork,
) -> Result<LaidRun> {
    let (directory, work_directory) = directories;
    let accesses = samples.iter().map(Samples::accesses).collect::<Result<Vec<Plain<W>>>>()?;
    let sources = layout.sources.iter().zip(samples);
    let sampled = sources.map(|(source, samples)| samples.entries(source.epochs));
    let sampled = sampled.collect::<Result<Vec<Vec<Entry>>>>()?;
    let laps: Vec<Vec<RunEntry>> =
        (0..).zip(&layout.laps).map(|(lap, one)| entries_of(one, lap, &sampled)).collect();
    drop(sampled);
    let batches: u64 = laps.iter().map(|entries| entries.len() as u64).sum();
    let mut writing = Writing::<W>::create(directory, work_directory, row_bytes)?;
    for source in samples {
        let sampled = source.of_epochs(u64::MAX).largest;
        writing.largest = writing.largest.max(&sampled);
    }
    writing.repeats = layout.laps.iter().any(|lap| lap.repeats);
    writing.allowed = allowed;
    work.progress.stage("plan", Some(batches), Unit::Count("batches"));
    let mut index = ArrayWriter::create(directory, file::BATCHES, Dtype::U64, RunEntry::COLUMNS)?;
    for (mut entries, lap) in laps.into_iter().zip(&layout.laps) {
        let trace = LapTrace { entries: &entries.clone(), accesses: &accesses, rows };
        writing.lap(trace, &mut entries, layout.slots, lap.repeats, work)?;
        index.write_elements(bytemuck::cast_slice::<RunEntry, u64>(&entries))?;
    }
    work.progress.finish();
    let index = index.finish()?;
    writing.finish(layout, index)
}

/// The arrays being written.
struct Writing<'a, W> {
    words: ArrayWriter,
    kept: ArrayWriter,
    kept_rows: ArrayWriter,
    laps: ArrayWriter,
    outputs: OutputRows<W>,
    folder: &'a Path,
    row_bytes: u64,
    allowed: u64,
    repeats: bool,
    /// So far.
    made: RunBytes,
    around: u64,
    largest: Largest,
    /// Rows that a batch reads, with their positions in it; rows that it keeps.
    reads: Vec<(W, u32)>,
    rows: Vec<W>,
}

impl<'a, W: StoredRow> Writing<'a, W> {
    fn create(directory: &Path, folder: &'a Path, row_bytes: u64) -> Result<Writing<'a, W>> {
        Ok(Writing {
            words: ArrayWriter::create(directory, file::WORDS, Dtype::U32, 1)?,
            kept: ArrayWriter::create(directory, file::KEPT, Dtype::U32, 1)?,
            kept_rows: ArrayWriter::create(directory, file::KEPT_ROWS, id_dtype::<W>(), 1)?,
            laps: ArrayWriter::create(directory, file::LAPS, Dtype::U64, LapEntry::COLUMNS)?,
            outputs: OutputRows::create(folder, row_bytes)?,
            folder,
            row_bytes,
            allowed: 0,
            repeats: false,
            made: RunBytes::default(),
            around: 0,
            largest: Largest::default(),
            reads: Vec::new(),
            rows: Vec::new(),
        })
    }

    /// Plans a lap and writes what its batches do.
    fn lap(
        &mut self,
        mut trace: LapTrace<'_, W>,
        entries: &mut [RunEntry],
        slots: u64,
        repeats: bool,
        work: &PackWork,
    ) -> Result<()> {
        let (first, count) = (self.made.batches, entries.len() as u32);
        let planned = if repeats { count.saturating_mul(LAPS) } else { count };
        let mut planner = Belady::<W>::new(trace.rows, slots, planned);
        let around = match repeats && count > 0 {
            true => planner.between_laps(&mut trace, &mut self.next_uses(entries, LAPS)?.uses()?)?,
            false => Vec::new(),
        };
        let uses = self.next_uses(entries, 1)?;
        let mut nodes = Vec::new();
        let mut again = LapTrace { entries: trace.entries, accesses: trace.accesses, rows: trace.rows };
        let (_, ends) = planner.plan_lap(&mut trace, &mut uses.uses()?, &around, |number, placements| {
            work.check_stop()?;
            again.read(number, &mut nodes)?;
            self.batch(&nodes, placements.clone(), &mut entries[number as usize])?;
            work.progress.advance(1);
            Ok(())
        })?;
        let rows: Vec<W> = around.iter().map(|row| W::of(NodeId(*row))).collect();
        let entry = LapEntry {
            first,
            batches: count as u64,
            around_at: self.made.kept + self.around,
            around: rows.len() as u64,
            ends_sum: xxh3_64(bytemuck::cast_slice(&ends)),
            around_sum: xxh3_64(bytemuck::cast_slice(&rows)),
        };
        self.kept.write_elements(&ends)?;
        self.kept_rows.write_elements(&rows)?;
        self.around += entry.around;
        Ok(self.laps.write(bytemuck::bytes_of(&entry))?)
    }

    /// Room on disk for the next uses of a lap, several times.
    fn next_uses(&self, entries: &[RunEntry], laps: u32) -> Result<LapUses> {
        let rows = (0..laps).flat_map(|_| entries.iter().map(|entry| entry.nodes));
        let batches = entries.len() as u32 * laps;
        Ok(LapUses { file: PlanFile::for_batches(self.folder, rows)?, batches })
    }

    /// Writes what a batch does: its rows are read in ascending order.
    fn batch(&mut self, nodes: &[W], mut placements: Placements, entry: &mut RunEntry) -> Result<()> {
        self.reads.clear();
        self.rows.clear();
        for (at, (node, word)) in nodes.iter().zip(&placements.words).enumerate() {
            if Placement::is_read(*word) {
                self.reads.push((*node, at as u32));
            }
            if let Placement::Keep(_) = Placement::decode(*word) {
                self.rows.push(*node);
            }
        }
        entry.kept_at = self.made.kept + self.around;
        entry.kept = self.rows.len() as u64;
        entry.kept_sum = xxh3_64(bytemuck::cast_slice(&placements.kept));
        entry.kept_rows_sum = xxh3_64(bytemuck::cast_slice(&self.rows));
        self.kept.write_elements(&placements.kept)?;
        self.kept_rows.write_elements(&self.rows)?;
        radsort::sort_by_key(&mut self.reads, |(node, _)| node.index() as u64);
        self.rows.clear();
        for (index, (node, at)) in (0u32..).zip(&self.reads) {
            let word = &mut placements.words[*at as usize];
            *word = match Placement::decode(*word) {
                Placement::Keep(_) => Placement::Keep(index).encode(),
                _ => Placement::Read(index).encode(),
            };
            self.rows.push(*node);
        }
        entry.words_at = self.made.accesses;
        entry.words_sum = xxh3_64(bytemuck::cast_slice(&placements.words));
        entry.packed_rows = self.rows.len() as u64;
        entry.block = self.outputs.add(&self.rows)?;
        self.words.write_elements(&placements.words)?;
        self.largest.packed_rows = self.largest.packed_rows.max(entry.packed_rows);
        self.made.accesses += entry.nodes;
        self.made.misses += entry.packed_rows;
        self.made.kept += entry.kept;
        self.made.batches += 1;
        let needed = self.made.of::<W>(self.row_bytes, self.repeats);
        match needed <= self.allowed {
            true => Ok(()),
            false => {
                let (needed, allowed) = (ByteCount(needed), ByteCount(self.allowed));
                Err(FetchError::Disk { needed, allowed })
            }
        }
    }

    fn finish(self, layout: &RunLayout, entries: FileEntry) -> Result<LaidRun> {
        let (outputs, blocks) = self.outputs.finish()?;
        let RunBytes { accesses, misses, kept, batches } = self.made;
        let files = vec![
            self.words.finish()?,
            self.kept.finish()?,
            self.kept_rows.finish()?,
            self.laps.finish()?,
            entries,
        ];
        debug_assert!(blocks_for(misses, self.row_bytes) <= blocks);
        Ok(LaidRun {
            layout: layout.clone(),
            sizes: OutputSizes { outputs, blocks },
            batches,
            accesses,
            misses,
            kept,
            around: self.around,
            largest: self.largest,
            files,
        })
    }
}

/// Storage for next uses, which the planner reads back.
struct LapUses {
    file: PlanFile,
    batches: u32,
}

impl LapUses {
    fn uses(&self) -> Result<PlanUses<'_>> {
        self.file.next_uses(0..self.batches)
    }
}
