//! Reading batches of a packed directory: a sample and its words, then the rows in one go, then all of it checked and put
//! together.

use super::open::read_options;
use super::plain::Plain;
use super::{Packed, blocks_for, file, shared_row_sum, shared_start};
use crate::{FetchError, Result, RowFormat};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Piece, Queue, prefetch};
use esker_sample::trace::Records;
use esker_sample::{Position, Sample};
use esker_store::{BlockArray, StoreError};
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

const BLOCK: u64 = BlockArray::BLOCK_BYTES;
/// Rows assembled by one thread before it takes the next.
const CHUNK_ROWS: usize = 512;
/// Rows asked for ahead, and lines of each.
const ROWS_AHEAD: usize = 8;
const LINES_AHEAD: usize = 4;
const LINE_BYTES: usize = 64;
/// Batches larger than this are not in the processor's caches any more when they are trained on.
const CACHED_BYTES: usize = 32 << 20;

/// Memory for the rows that a batch reads, as stored.
pub trait RowsBuffer {
    /// All of it, starting on a page.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl RowsBuffer for AlignedBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// What was loaded of a batch before its rows.
#[derive(Debug, Default)]
pub struct PackedBatch {
    /// Its number in the directory.
    pub number: usize,
    /// Where each row is: a slot of the cache in memory, or behind all slots a place among the rows that are read.
    pub words: Vec<u32>,
    /// Its places in the segment's cache.
    shared: Vec<u32>,
}

/// What a reader did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PackCounters {
    /// Reads from the disk.
    pub reads: u64,
    /// Bytes they brought.
    pub bytes: u64,
}

/// Reads batches. Stays with the thread that made it.
pub struct PackReader {
    packed: Arc<Packed>,
    samples: Plain<u8>,
    words: Plain<u32>,
    shared: Plain<u32>,
    records: Records,
    record: Vec<u8>,
    queue: Option<Queue>,
    pieces: Vec<Piece>,
}

impl Packed {
    /// A reader for the calling thread.
    pub fn reader(self: &Arc<Packed>) -> Result<PackReader> {
        Ok(PackReader {
            samples: Plain::array(&self.directory, file::SAMPLES)?,
            words: Plain::array(&self.directory, file::WORDS)?,
            shared: Plain::array(&self.directory, file::SHARED)?,
            packed: self.clone(),
            records: Records::default(),
            record: Vec::new(),
            queue: None,
            pieces: Vec::new(),
        })
    }

    /// Bytes that a reader that loads samples takes beside them: a decoder has the batch in order of discovery, its record,
    /// and its ids once more; arrays double as they grow.
    pub fn loader_bytes(largest: &super::Largest) -> u64 {
        largest.sample_bytes * 3 + largest.nodes * 24 + largest.record_bytes * 2
    }

    /// Bytes that a reader that reads rows takes beside them.
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

    fn damaged(&self, number: usize, file: &str, what: &str) -> FetchError {
        let entry = &self.entries[number];
        FetchError::Damaged {
            path: self.directory.join(format!("{file}.bin")).display().to_string(),
            what: format!("{what} of epoch {}, batch {}", entry.epoch, entry.batch),
        }
    }

    /// Checks what was read for a batch, with the threads of the surrounding rayon pool.
    pub fn check_rows(&self, batch: &PackedBatch, rows: &mut [u8]) -> Result<()> {
        let entry = &self.entries[batch.number];
        let row_bytes = self.packing.row_bytes;
        let own = entry.packed_rows * row_bytes;
        let blocks = blocks_for(entry.packed_rows, row_bytes);
        // The end of the last block is zeros that need not be read; rows of the segment may lie in that memory.
        let whole = (own / BLOCK) as usize;
        let known = &self.sums[entry.block as usize..(entry.block + blocks) as usize];
        let fits = |(block, sum): (&[u8], &u64)| BlockArray::sum(block) == *sum;
        let wholes = rows[..whole * BLOCK as usize].par_chunks_exact(BLOCK as usize);
        let mut right = wholes.zip(&known[..whole]).all(fits);
        if whole < known.len() {
            let mut last = vec![0u8; BLOCK as usize];
            let rest = &rows[whole * BLOCK as usize..own as usize];
            last[..rest.len()].copy_from_slice(rest);
            right &= fits((&last, &known[whole]));
        }
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

    /// Hands the rows set aside for memory over, part by part, checked: the first slot of each part and its bytes.
    pub fn cached_rows(&self, mut take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let (slots, row_bytes) = (self.packing.slots, self.packing.row_bytes);
        let mut queue = self.files.queue().map_err(StoreError::from)?;
        let part = super::layout::part_rows(row_bytes);
        let blocks = blocks_for(part.min(slots), row_bytes);
        let mut buffer = AlignedBuffer::new((blocks * BLOCK) as usize, DIRECT_ALIGN);
        for first in (0..slots).step_by(part as usize) {
            let rows = part.min(slots - first);
            let block = first * row_bytes / BLOCK;
            let bytes = (blocks_for(rows, row_bytes) * BLOCK) as usize;
            let piece = Piece { offset: BlockArray::offset(block), bytes: bytes as u64, at: 0 };
            queue.read(0, &[piece], &mut buffer[..bytes]).map_err(StoreError::from)?;
            for (content, sum) in
                buffer[..bytes].chunks_exact(BLOCK as usize).zip(&self.sums[block as usize..])
            {
                if BlockArray::sum(content) != *sum {
                    return Err(FetchError::Damaged {
                        path: self.rows.path().display().to_string(),
                        what: format!("the cache for memory, rows {first} to {}", first + rows - 1),
                    });
                }
            }
            take(first, &buffer[..(rows * row_bytes) as usize])?;
        }
        Ok(())
    }
}

/// Bytes of memory for so many rows of a batch's own and so many of its segment's.
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
    /// Loads the sample and the words of the batch that was sampled at a position.
    pub fn load(&mut self, at: Position, sample: &mut Sample, batch: &mut PackedBatch) -> Result<()> {
        let packed = &*self.packed;
        let number = packed.number(at).ok_or_else(|| FetchError::Damaged {
            path: packed.directory.join(format!("{}.bin", file::BATCHES)).display().to_string(),
            what: format!("epoch {}, batch {}: it is not there", at.epoch, at.batch),
        })?;
        let entry = &packed.entries[number];
        batch.number = number;
        self.samples.read(entry.sample_at, entry.sample_bytes as usize, &mut self.record)?;
        if xxh3_64(&self.record) != entry.sample_sum {
            return Err(packed.damaged(number, file::SAMPLES, "sample"));
        }
        let home: &Path = self.samples.path();
        self.records.decode(&packed.packing.sampling, &self.record, home, sample)?;
        self.words.read(entry.words_at, entry.nodes as usize, &mut batch.words)?;
        self.shared.read(entry.shared_at, entry.shared_rows as usize, &mut batch.shared)?;
        let row_bytes = packed.packing.row_bytes.max(1);
        let places = packed.packing.slots
            + (entry.packed_rows + entry.shared_rows).max(if entry.shared_rows > 0 {
                shared_start(entry.packed_rows, row_bytes) + entry.shared_rows
            } else {
                0
            });
        let whole = xxh3_64(bytemuck::cast_slice(&batch.words)) == entry.words_sum
            && batch.words.iter().all(|word| (*word as u64) < places.max(1))
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

    /// Bytes of memory that the rows of a loaded batch take.
    pub fn rows_bytes(&self, batch: &PackedBatch) -> usize {
        let entry = &self.packed.entries[batch.number];
        rows_bytes(entry.packed_rows, entry.shared_rows, self.packed.packing.row_bytes) as usize
    }

    /// Tells the kernel of memory that many batches will be read to.
    pub fn register(&mut self, buffer: &AlignedBuffer) -> Result<()> {
        opened(&mut self.queue, &self.packed)?.register(buffer);
        Ok(())
    }

    /// Reads the rows of a loaded batch: its own in one go, then those of its segment, near ones together.
    pub fn read(&mut self, batch: &PackedBatch, rows: &mut [u8]) -> Result<PackCounters> {
        let packed = &*self.packed;
        let entry = &packed.entries[batch.number];
        let row_bytes = packed.packing.row_bytes;
        let queue = opened(&mut self.queue, packed)?;
        self.pieces.clear();
        // Whole pages, so that they land in place.
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

/// Puts a batch together from the cache in memory and the rows that were read, as f32, with the threads of the surrounding
/// rayon pool. Returns the rows that came from the cache.
pub fn assemble(words: &[u32], cached: &[u8], fresh: &[u8], format: &RowFormat, values: &mut [f32]) -> u64 {
    let (dim, row_bytes) = (format.dim(), format.row_bytes());
    assert_eq!(values.len(), words.len() * dim, "a row a word");
    let slots = cached.len().checked_div(row_bytes).unwrap_or(0);
    let hits = words.iter().filter(|word| (**word as usize) < slots).count() as u64;
    if dim == 0 {
        return hits;
    }
    let find = |word: u32| match word as usize {
        slot if slot < slots => (cached, slot * row_bytes),
        place => (fresh, (place - slots) * row_bytes),
    };
    let lines = row_bytes.div_ceil(LINE_BYTES).min(LINES_AHEAD);
    let many = size_of_val(values) > CACHED_BYTES;
    let chunks = values.par_chunks_mut(CHUNK_ROWS * dim).zip(words.par_chunks(CHUNK_ROWS));
    chunks.for_each(|(values, words)| {
        format.convert_rows(many, values, |at| {
            if let Some(soon) = words.get(at + ROWS_AHEAD) {
                let (memory, start) = find(*soon);
                (0..lines).for_each(|line| prefetch(memory, start + line * LINE_BYTES));
            }
            let (memory, start) = find(words[at]);
            &memory[start..start + row_bytes]
        });
    });
    hits
}
