//! Rows laid out on disk as batches will access them (DiskGNN): batches are sampled ahead, the rows accessed most are set aside
//! for memory, and the others are stored batch by batch, so that one read brings them; where that takes too much room, rows
//! that several batches of a segment want lie once in a cache of the segment. `docs/format.md` draws the directory.
//!
//! A [`SampleLog`] keeps samples as they come, and [`Samples`] are what it made. For these a [`PackWriter`] makes a directory of
//! packed rows, by a [`PackLayout`] that it is told: it lays rows out, packs them in one pass over the features and puts what
//! is not stored in that order into its own. Killed at any moment, both go on where they were, and the result is the same to the
//! byte. [`Packed`] is the result, a [`PackReader`] reads batches of it and checks what it reads.
//!
//! # What always holds
//!
//! - Samples and packed rows are a function of dataset, batches, slots and segment: not of memory, threads or
//!   kills. Where every row goes is known before the first is packed, so blocks are written in any order
//!   (`BlockArray`) and their checksums taken then. What a batch reads is checked before it is used.

mod layout;
mod log;
mod open;
mod order;
mod outputs;
mod pack;
mod plain;
mod read;
mod samples;
mod write;

#[cfg(test)]
mod tests;

pub use layout::PackLayout;
pub use log::SampleLog;
pub use open::Packed;
pub use read::{PackCounters, PackReader, PackedBatch};
pub use samples::{EpochSampled, SAMPLES_KIND, Sampled, Samples};
pub use write::{PackSizes, PackWork, PackWriter, PackedBytes, SafePoints};

use esker_sample::trace::TraceHeader;
use serde::{Deserialize, Serialize};

/// What derived data of this kind calls itself.
pub const KIND: &str = "diskgnn";

/// How placements are written; others are not read.
pub const ENCODING: u32 = 2;

/// Arrays of the directory.
mod file {
    pub const SAMPLES: &str = "samples";
    pub const ACCESSES: &str = "accesses";
    pub const ENTRIES: &str = "entries";
    pub const WORDS: &str = "words";
    pub const SHARED: &str = "shared";
    pub const ROWS: &str = "rows";
    pub const BATCHES: &str = "batches";
    pub const SEGMENTS: &str = "segments";
}

/// What a directory was made with and holds: the parameters of its manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packing {
    /// The encoding of placements: [`ENCODING`], or it is remade.
    pub encoding: u32,
    /// What was sampled, and how.
    pub sampling: TraceHeader,
    /// The directory beside this one that has the samples; else they are in this one.
    pub samples: Option<String>,
    /// Each epoch, where the samples are in this directory.
    pub epochs_sampled: Vec<EpochSampled>,
    /// Epochs packed.
    pub epochs: u64,
    /// Whether more were requested than the disk took.
    pub limited_by_disk: bool,
    /// Batches of all of them.
    pub batches: u64,
    /// Bytes of a row as stored.
    pub row_bytes: u64,
    /// Rows set aside for memory, and how many might have been.
    pub slots: u64,
    /// See there.
    pub slots_asked: u64,
    /// The disk budget that somebody gave.
    pub disk_bytes_allowed: Option<u64>,
    /// Batches of a segment; 1: every batch has all its rows to itself.
    pub segment: u32,
    /// Rows requested by all batches.
    pub accesses: u64,
    /// Of those, rows that are not in memory.
    pub misses: u64,
    /// Of those, rows that come from caches of segments.
    pub shared: u64,
    /// Rows, and the accesses to so many of them, the rows accessed most: what other numbers of slots would miss.
    pub coverage: Vec<[u64; 2]>,
    /// The largest of all batches.
    pub largest: Largest,
}

/// The most that a batch has, each of any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Largest {
    /// Nodes.
    pub nodes: u64,
    /// Bytes of its sample in memory.
    pub sample_bytes: u64,
    /// Bytes of its record.
    pub record_bytes: u64,
    /// Rows of its own on disk.
    pub packed_rows: u64,
    /// Rows in the cache of its segment.
    pub shared_rows: u64,
}

/// One batch, as the index has it: a row of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Entry {
    pub epoch: u64,
    pub batch: u64,
    /// Rows that it accesses: its nodes without those that no layer needs.
    pub nodes: u64,
    /// Where its record starts, its bytes and their checksum.
    pub sample_at: u64,
    pub sample_bytes: u64,
    pub sample_sum: u64,
    /// The checksum of its words, which start behind those of all batches before.
    pub words_at: u64,
    pub words_sum: u64,
    /// The first block of its own rows, and how many those are.
    pub block: u64,
    pub packed_rows: u64,
    /// Its segment, and where the list of its rows there starts.
    pub segment: u64,
    pub shared_at: u64,
    pub shared_rows: u64,
    /// The checksum of that list, and of the rows themselves.
    pub shared_sum: u64,
    pub shared_rows_sum: u64,
}

impl Entry {
    pub const COLUMNS: u64 = size_of::<Entry>() as u64 / 8;

    /// What is known of it before rows are laid out.
    pub fn as_logged(&self) -> Entry {
        let Entry { epoch, batch, nodes, sample_at, sample_bytes, sample_sum, words_at, .. } = *self;
        Entry { epoch, batch, nodes, sample_at, sample_bytes, sample_sum, words_at, ..Entry::default() }
    }
}

/// A segment's cache: the first of its blocks, and its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct SegmentEntry {
    pub block: u64,
    pub rows: u64,
}

/// The place in a batch's memory, counted in rows, where rows of its segment start: behind all pages of its own.
pub(crate) fn shared_start(packed_rows: u64, row_bytes: u64) -> u64 {
    (packed_rows * row_bytes).next_multiple_of(esker_io::DIRECT_ALIGN as u64).div_ceil(row_bytes.max(1))
}

/// Blocks that so many rows take.
pub(crate) fn blocks_for(rows: u64, row_bytes: u64) -> u64 {
    (rows * row_bytes).div_ceil(esker_store::BlockArray::BLOCK_BYTES)
}

/// The checksum of a shared row in its place.
pub(crate) fn shared_row_sum(row: &[u8], place: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(row, place)
}
