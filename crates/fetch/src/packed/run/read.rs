//! Reads batches of a run: first a sample and its placements, then the rows that it misses, in one read.

use super::super::read::are_own_rows;
use super::super::{PackCounters, blocks_for, file};
use super::{RunEntry, RunRows};
use crate::Result;
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Piece, Queue};
use esker_plan::Placements;
use esker_sample::Sample;
use esker_sample::trace::SampleRecords;
use esker_store::{BlockArray, StoreError};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A batch that is loaded, except for its rows.
#[derive(Debug, Default)]
pub struct RunBatch {
    /// Its number in the directory.
    pub number: usize,
    /// The source of each row: a slot of the cache, or the rows that are read. And the slots that keep some of them.
    pub placements: Placements,
}

/// Reads batches. It stays on the thread that made it.
pub struct RunReader {
    run: Arc<RunRows>,
    records: Vec<SampleRecords>,
    record: Vec<u8>,
    queue: Option<Queue>,
}

impl RunRows {
    /// A reader for the calling thread.
    pub fn reader(self: &Arc<RunRows>) -> RunReader {
        let records = self.samples.iter().map(|(_, format)| SampleRecords::new(*format)).collect();
        RunReader { run: self.clone(), records, record: Vec::new(), queue: None }
    }

    /// Starts to read what [`RunReader::load`] will need of a batch, if it is not in the page cache.
    pub fn read_ahead(&self, number: usize) {
        let Some(entry) = self.entries.get(number) else { return };
        self.samples[entry.source as usize].0.read_ahead(entry.sample_at, entry.sample_bytes);
        self.words.read_ahead(entry.words_at, entry.nodes);
        self.kept.read_ahead(entry.kept_at, entry.kept);
    }

    /// Verifies the rows of a batch, with the threads of the current rayon pool.
    pub fn check_rows(&self, batch: &RunBatch, rows: &[u8]) -> Result<()> {
        let entry = &self.entries[batch.number];
        let row_bytes = self.plan.row_bytes;
        let blocks = blocks_for(entry.packed_rows, row_bytes);
        let known = &self.sums[entry.block as usize..(entry.block + blocks) as usize];
        match are_own_rows(rows, entry.packed_rows * row_bytes, known) {
            true => Ok(()),
            false => Err(self.damaged(batch.number, file::ROWS, "rows")),
        }
    }
}

/// The queue of a reader that reads rows.
fn opened<'a>(queue: &'a mut Option<Queue>, run: &RunRows) -> Result<&'a mut Queue> {
    Ok(match queue {
        Some(queue) => queue,
        none => none.insert(run.files.queue().map_err(StoreError::from)?),
    })
}

impl RunReader {
    /// Loads the sample and the placements of a batch.
    pub fn load(&mut self, number: usize, sample: &mut Sample, batch: &mut RunBatch) -> Result<()> {
        let run = &*self.run;
        let entry = &run.entries[number];
        batch.number = number;
        let source = entry.source as usize;
        let samples = &run.samples[source].0;
        samples.read(entry.sample_at, entry.sample_bytes as usize, &mut self.record)?;
        if xxh3_64(&self.record) != entry.sample_sum {
            return Err(run.damaged(number, file::SAMPLES, "sample"));
        }
        let sampling = &run.plan.layout.sources[source].sampling;
        self.records[source].decode(sampling, &self.record, samples.path(), sample)?;
        let placements = &mut batch.placements;
        run.words.read(entry.words_at, entry.nodes as usize, &mut placements.words)?;
        run.kept.read(entry.kept_at, entry.kept as usize, &mut placements.kept)?;
        if xxh3_64(bytemuck::cast_slice(&placements.kept)) != entry.kept_sum {
            return Err(run.damaged(number, file::KEPT, "slots"));
        }
        let whole = xxh3_64(bytemuck::cast_slice(&placements.words)) == entry.words_sum
            && placements.are_valid(run.plan.layout.slots, entry.packed_rows)
            && sample.node_ids.len() as u64 == entry.nodes;
        if !whole {
            return Err(run.damaged(number, file::WORDS, "words"));
        }
        Ok(())
    }

    fn entry(&self, batch: &RunBatch) -> &RunEntry {
        &self.run.entries[batch.number]
    }

    /// Bytes that were read to load a batch: its sample and its placements.
    pub fn loaded_bytes(&self, batch: &RunBatch) -> u64 {
        let entry = self.entry(batch);
        entry.sample_bytes + (entry.nodes + entry.kept) * 4
    }

    /// Registers with the kernel a buffer that many batches are read to.
    pub fn register(&mut self, buffer: &AlignedBuffer) -> Result<()> {
        opened(&mut self.queue, &self.run)?.register(buffer);
        Ok(())
    }

    /// Reads the rows of a loaded batch.
    pub fn read(&mut self, batch: &RunBatch, rows: &mut [u8]) -> Result<PackCounters> {
        let entry = &self.run.entries[batch.number];
        // Whole pages, so that the kernel reads directly into `rows`.
        let bytes = (entry.packed_rows * self.run.plan.row_bytes).next_multiple_of(DIRECT_ALIGN as u64);
        if bytes == 0 {
            return Ok(PackCounters::default());
        }
        let queue = opened(&mut self.queue, &self.run)?;
        let before = queue.counters();
        let piece = Piece { offset: BlockArray::offset(entry.block), bytes, at: 0 };
        queue.read(0, &[piece], rows).map_err(StoreError::from)?;
        let after = queue.counters();
        Ok(PackCounters { reads: after.reads - before.reads, bytes: after.read_bytes - before.read_bytes })
    }
}
