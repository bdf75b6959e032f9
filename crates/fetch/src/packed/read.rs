//! Reads batches of a packed directory: first a sample and its words, then the rows together. All of it is verified,
//! and then the batch is assembled.

use super::open::read_options;
use super::{Packed, blocks_for, file, shared_row_sum, shared_start};
use crate::{FetchError, Result};
use crossbeam_channel::bounded;
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Piece, Queue};
use esker_plan::Placements;
use esker_sample::trace::SampleRecords;
use esker_sample::{Position, Sample};
use esker_store::{BlockArray, StoreError};
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

const BLOCK: u64 = BlockArray::BLOCK_BYTES;
/// Bytes of the rows set aside for memory that are read at a time.
const CACHED_BYTES: u64 = 8 << 20;
/// A batch that is loaded, except for its rows.
#[derive(Debug, Default)]
pub struct PackedBatch {
    /// Its number in the directory.
    pub number: usize,
    /// The source of each row: a slot of the cache in memory, or the rows that are read.
    pub placements: Placements,
    /// Its positions in the segment's cache.
    shared: Vec<u32>,
}

/// Counters of a reader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PackCounters {
    /// Disk reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// Reads batches. It stays on the thread that made it.
pub struct PackReader {
    packed: Arc<Packed>,
    records: SampleRecords,
    record: Vec<u8>,
    queue: Option<Queue>,
    pieces: Vec<Piece>,
}

impl Packed {
    /// A reader for the calling thread.
    pub fn reader(self: &Arc<Packed>) -> Result<PackReader> {
        Ok(PackReader {
            packed: self.clone(),
            records: SampleRecords::new(self.record_format),
            record: Vec::new(),
            queue: None,
            pieces: Vec::new(),
        })
    }

    /// Bytes that loading samples takes in addition to them, in records of either format. A decoder has the batch in order
    /// of discovery, its record, and its ids again. Arrays grow by doubling.
    pub fn loader_bytes(largest: &super::Largest) -> u64 {
        largest.sample_bytes * 3 + largest.nodes * 24 + largest.record_bytes * 2
    }

    /// Bytes that reading rows takes in addition to them.
    pub fn reader_bytes(largest: &super::Largest) -> u64 {
        let pieces = largest.shared_rows * 2 * size_of::<Piece>() as u64;
        pieces + read_options().memory_bytes(largest.shared_rows + largest.packed_rows / 512 + 1)
    }

    /// Bytes of memory for the rows of the largest batch.
    pub fn rows_bytes_for(largest: &super::Largest, row_bytes: u64) -> u64 {
        rows_bytes(largest.packed_rows, largest.shared_rows, row_bytes)
    }

    /// Bytes of memory for the rows that any batch reads.
    pub fn rows_bytes(&self) -> u64 {
        Packed::rows_bytes_for(&self.packing.largest, self.packing.row_bytes)
    }

    fn damaged(&self, number: usize, name: &str, what: &str) -> FetchError {
        let entry = &self.entries[number];
        let home = if name == file::SAMPLES { self.samples.path().parent() } else { None };
        let path = home.unwrap_or(&self.directory).join(format!("{name}.bin"));
        FetchError::Damaged { path, what: format!("{what} of epoch {}, batch {}", entry.epoch, entry.batch) }
    }

    /// Starts to read what [`PackReader::load`] will need of the batch at a position, if it is not in the page cache.
    /// Records are megabytes, and the kernel's own read-ahead asks for little at a time.
    pub fn read_ahead(&self, at: Position) {
        let Some(entry) = self.number(at).map(|number| &self.entries[number]) else { return };
        self.samples.read_ahead(entry.sample_at, entry.sample_bytes);
        self.words.read_ahead(entry.words_at, entry.nodes);
        self.shared.read_ahead(entry.shared_at, entry.shared_rows);
    }

    /// Verifies the rows of a batch, with the threads of the current rayon pool.
    pub fn check_rows(&self, batch: &PackedBatch, rows: &mut [u8]) -> Result<()> {
        let entry = &self.entries[batch.number];
        let row_bytes = self.packing.row_bytes;
        let blocks = blocks_for(entry.packed_rows, row_bytes);
        let known = &self.sums[entry.block as usize..(entry.block + blocks) as usize];
        let right = are_own_rows(rows, entry.packed_rows * row_bytes, known);
        if !right {
            return Err(self.damaged(batch.number, file::ROWS, "rows"));
        }
        if entry.shared_rows > 0 {
            let start = (shared_start(entry.packed_rows, row_bytes) * row_bytes) as usize;
            let shared = rows[start..].par_chunks_exact(row_bytes as usize).zip(&batch.shared);
            let sums = shared.map(|(row, place)| shared_row_sum(row, *place as u64));
            if sums.reduce(|| 0, u64::wrapping_add) != entry.shared_rows_sum {
                return Err(self.damaged(batch.number, file::ROWS, "rows from the segment's cache"));
            }
        }
        Ok(())
    }

    /// Passes the rows set aside for memory to `take`, part by part and verified: the first slot of each part and its
    /// bytes. While threads of the current rayon pool verify and take one part, the next one is read.
    pub fn cached_rows(&self, mut take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let (slots, row_bytes) = (self.packing.slots, self.packing.row_bytes);
        let part = super::outputs::whole_rows(row_bytes, CACHED_BYTES);
        let bytes = (blocks_for(part.min(slots), row_bytes) * BLOCK) as usize;
        let (free, to_read) = bounded::<AlignedBuffer>(2);
        let (send, read) = bounded(1);
        // Both ends are dropped when this returns, so that the thread ends, too.
        std::thread::scope(move |scope| {
            scope.spawn(move || {
                // A queue stays on its thread.
                let mut queue = self.files.queue().map_err(StoreError::from);
                for first in (0..slots).step_by(part as usize) {
                    // Without a buffer nobody waits for the rows any more.
                    let Ok(mut buffer) = to_read.recv() else { return };
                    let done = match &mut queue {
                        Ok(queue) => self.read_cached(queue, first, part.min(slots - first), &mut buffer),
                        Err(_) => break,
                    };
                    if send.send((first, buffer, done)).is_err() {
                        return;
                    }
                }
                if let Err(error) = queue {
                    let nothing = AlignedBuffer::new(0, DIRECT_ALIGN);
                    let _ = send.send((0, nothing, Err(error.into())));
                }
            });
            for _ in 0..2 {
                let _ = free.send(AlignedBuffer::new(bytes, DIRECT_ALIGN));
            }
            for (first, buffer, done) in read {
                done?;
                let rows = part.min(slots - first);
                self.check_cached(first, rows, &buffer)?;
                take(first, &buffer[..(rows * row_bytes) as usize])?;
                let _ = free.send(buffer);
            }
            Ok(())
        })
    }

    /// Reads a part of the rows set aside for memory.
    fn read_cached(&self, queue: &mut Queue, first: u64, rows: u64, buffer: &mut [u8]) -> Result<()> {
        let row_bytes = self.packing.row_bytes;
        let bytes = blocks_for(rows, row_bytes) * BLOCK;
        let piece = Piece { offset: BlockArray::offset(first * row_bytes / BLOCK), bytes, at: 0 };
        Ok(queue.read(0, &[piece], &mut buffer[..bytes as usize]).map_err(StoreError::from)?)
    }

    /// Verifies a part of the rows set aside for memory.
    fn check_cached(&self, first: u64, rows: u64, buffer: &[u8]) -> Result<()> {
        let row_bytes = self.packing.row_bytes;
        let bytes = (blocks_for(rows, row_bytes) * BLOCK) as usize;
        let sums = &self.sums[(first * row_bytes / BLOCK) as usize..];
        let blocks = buffer[..bytes].par_chunks_exact(BLOCK as usize).zip(sums);
        if blocks.into_par_iter().all(|(content, sum)| BlockArray::sum(content) == *sum) {
            return Ok(());
        }
        Err(FetchError::Damaged {
            path: self.rows.path().to_path_buf(),
            what: format!("the cache for memory, rows {first} to {}", first + rows - 1),
        })
    }
}

/// Whether the first `own` bytes of `rows` are a batch's own rows by the checksums of their blocks, with the threads of
/// the current rayon pool.
pub(crate) fn are_own_rows(rows: &[u8], own: u64, known: &[u64]) -> bool {
    // The rest of the last block is zeros and need not be read. Rows of the segment may be in that memory.
    let whole = (own / BLOCK) as usize;
    let fits = |(block, sum): (&[u8], &u64)| BlockArray::sum(block) == *sum;
    let wholes = rows[..whole * BLOCK as usize].par_chunks_exact(BLOCK as usize);
    let right = wholes.zip(&known[..whole]).all(fits);
    if whole == known.len() {
        return right;
    }
    let mut last = vec![0u8; BLOCK as usize];
    let rest = &rows[whole * BLOCK as usize..own as usize];
    last[..rest.len()].copy_from_slice(rest);
    right && fits((&last, &known[whole]))
}

/// Bytes of memory for a batch with this many own rows and shared rows.
pub(crate) fn rows_bytes(packed: u64, shared: u64, row_bytes: u64) -> u64 {
    (shared_start(packed, row_bytes) * row_bytes + shared * row_bytes)
        .max((packed * row_bytes).next_multiple_of(DIRECT_ALIGN as u64))
        .next_multiple_of(DIRECT_ALIGN as u64)
}

/// The queue of a reader that reads rows.
fn opened<'a>(queue: &'a mut Option<Queue>, packed: &Packed) -> Result<&'a mut Queue> {
    Ok(match queue {
        Some(queue) => queue,
        none => none.insert(packed.files.queue().map_err(StoreError::from)?),
    })
}

impl PackReader {
    /// Loads the sample and the words of the batch at a position.
    pub fn load(&mut self, at: Position, sample: &mut Sample, batch: &mut PackedBatch) -> Result<()> {
        let packed = &*self.packed;
        let number = packed.number(at).ok_or_else(|| FetchError::Damaged {
            path: packed.directory.join(format!("{}.bin", file::BATCHES)),
            what: format!("epoch {}, batch {}: it is not there", at.epoch, at.batch),
        })?;
        let entry = &packed.entries[number];
        batch.number = number;
        packed.samples.read(entry.sample_at, entry.sample_bytes as usize, &mut self.record)?;
        if xxh3_64(&self.record) != entry.sample_sum {
            return Err(packed.damaged(number, file::SAMPLES, "sample"));
        }
        let home: &Path = packed.samples.path();
        self.records.decode(&packed.packing.sampling, &self.record, home, sample)?;
        packed.words.read(entry.words_at, entry.nodes as usize, &mut batch.placements.words)?;
        packed.shared.read(entry.shared_at, entry.shared_rows as usize, &mut batch.shared)?;
        let row_bytes = packed.packing.row_bytes.max(1);
        let read = match entry.shared_rows {
            0 => entry.packed_rows,
            shared => shared_start(entry.packed_rows, row_bytes) + shared,
        };
        let whole = xxh3_64(bytemuck::cast_slice(&batch.placements.words)) == entry.words_sum
            && batch.placements.are_valid(packed.packing.slots, read)
            && sample.node_ids.len() as u64 == entry.nodes;
        if !whole {
            return Err(packed.damaged(number, file::WORDS, "words"));
        }
        let rows = packed.segments[entry.segment as usize].rows;
        let whole = xxh3_64(bytemuck::cast_slice(&batch.shared)) == entry.shared_sum
            && batch.shared.iter().all(|place| (*place as u64) < rows);
        if !whole {
            return Err(packed.damaged(number, file::SHARED, "list of shared rows"));
        }
        Ok(())
    }

    /// Bytes that were read to load a batch: its sample and its placements.
    pub fn loaded_bytes(&self, batch: &PackedBatch) -> u64 {
        let entry = &self.packed.entries[batch.number];
        entry.sample_bytes + (entry.nodes + entry.shared_rows) * 4
    }

    /// Bytes of memory for the rows of a loaded batch.
    pub fn rows_bytes(&self, batch: &PackedBatch) -> usize {
        let entry = &self.packed.entries[batch.number];
        rows_bytes(entry.packed_rows, entry.shared_rows, self.packed.packing.row_bytes) as usize
    }

    /// Registers with the kernel a buffer that many batches are read to.
    pub fn register(&mut self, buffer: &AlignedBuffer) -> Result<()> {
        opened(&mut self.queue, &self.packed)?.register(buffer);
        Ok(())
    }

    /// Reads the rows of a loaded batch: its own rows in one read, then those of its segment, nearby ones together.
    pub fn read(&mut self, batch: &PackedBatch, rows: &mut [u8]) -> Result<PackCounters> {
        let packed = &*self.packed;
        let entry = &packed.entries[batch.number];
        let row_bytes = packed.packing.row_bytes;
        let queue = opened(&mut self.queue, packed)?;
        self.pieces.clear();
        // Whole pages, so that the kernel reads directly into `rows`.
        let bytes = (entry.packed_rows * row_bytes).next_multiple_of(DIRECT_ALIGN as u64);
        if bytes > 0 {
            self.pieces.push(Piece { offset: BlockArray::offset(entry.block), bytes, at: 0 });
        }
        let cache = BlockArray::offset(packed.segments[entry.segment as usize].block);
        let mut at = shared_start(entry.packed_rows, row_bytes) * row_bytes;
        for run in batch.shared.chunk_by(|one, next| one + 1 == *next) {
            let bytes = run.len() as u64 * row_bytes;
            self.pieces.push(Piece { offset: cache + run[0] as u64 * row_bytes, bytes, at });
            at += bytes;
        }
        let before = queue.counters();
        queue.read(0, &self.pieces, rows).map_err(StoreError::from)?;
        let after = queue.counters();
        Ok(PackCounters { reads: after.reads - before.reads, bytes: after.read_bytes - before.read_bytes })
    }
}
