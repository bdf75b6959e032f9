//! Feature rows laid out on disk in the order in which batches access them (DiskGNN). Batches are sampled in advance.
//! The most accessed rows are set aside for memory. The others are stored batch by batch, so that one read brings them.
//! If that takes too much disk, rows that several batches of a segment access are stored once, in a cache of the
//! segment. `docs/format.md` specifies the directory.
//!
//! A [`SampleLog`] writes samples as they come and results in [`Samples`]. For these a [`PackWriter`] makes a directory
//! of packed rows, by a given [`PackLayout`]: it lays rows out, packs them in one pass over the features, and then
//! reorders the rows that are not stored in feature order. Both resume after a kill at any moment, and the result is
//! the same byte for byte. [`Packed`] is the result. A [`PackReader`] reads batches of it and verifies what it reads.
//!
//! # What always holds
//!
//! - Samples and packed rows are a function of dataset, batches, slots and segment. They do not depend on memory,
//!   threads or kills. The position of every row is known before the first is packed. So blocks are written in any
//!   order (`BlockArray`), and their checksums are computed then. What a batch reads is verified before it is used.

mod layout;
mod log;
mod open;
mod order;
mod outputs;
mod pack;
mod plain;
mod read;
mod run;
mod samples;
mod write;

#[cfg(test)]
mod tests;

pub use layout::PackLayout;
pub use log::SampleLog;
pub use open::Packed;
pub use read::{PackCounters, PackReader, PackedBatch};
pub use run::{
    LapLayout, PartOfLap, RunBatch, RunCache, RunLayout, RunPlan, RunReader, RunRows, RunSource, RunWriter,
};
pub use samples::{EpochSampled, Sampled, Samples};
pub use write::{PackSizes, PackWork, PackWriter, PackedBytes, SafePoints};

use esker_sample::trace::{RecordFormat, TraceHeader};
use serde::{Deserialize, Serialize};

/// The kind of this derived data in its manifest.
pub const KIND: &str = "diskgnn";

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
    pub const KEPT: &str = "kept";
    pub const KEPT_ROWS: &str = "kept-rows";
    pub const LAPS: &str = "laps";
}

/// The parameters in a directory's manifest: what it was made with and what it contains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packing {
    /// The encoding: the number of the format of its samples' records. Placements are the same in all. A directory
    /// with an unknown encoding is made again.
    pub encoding: u32,
    /// What was sampled, and how.
    pub sampling: TraceHeader,
    /// The sibling directory that has the samples. `None`: they are in this directory.
    pub samples: Option<String>,
    /// The epochs, if the samples are in this directory.
    pub epochs_sampled: Vec<EpochSampled>,
    /// Number of epochs packed.
    pub epochs: u64,
    /// Whether more epochs were requested than fit the disk.
    pub limited_by_disk: bool,
    /// Number of batches in all of them.
    pub batches: u64,
    /// Bytes of a row as stored.
    pub row_bytes: u64,
    /// Number of rows set aside for memory.
    pub slots: u64,
    /// Number of rows that could have been set aside.
    pub slots_asked: u64,
    /// The disk budget, if one was given.
    pub disk_bytes_allowed: Option<u64>,
    /// Batches per segment. With 1, every batch has all its rows to itself.
    pub segment: u32,
    /// Rows accessed by all batches.
    pub accesses: u64,
    /// Accesses to rows that are not set aside for memory.
    pub misses: u64,
    /// Misses that come from caches of segments.
    pub shared: u64,
    /// Pairs of a number of rows and the accesses to that many of the most accessed rows: what other numbers of slots
    /// would miss.
    pub coverage: Vec<[u64; 2]>,
    /// The packed rows whose cached rows these use: slots are theirs, and no cached rows are stored here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_by: Option<String>,
    /// The largest of all batches.
    pub largest: Largest,
}

impl Packing {
    /// The format of its samples' records. `None` if it is not known, and nothing can be read.
    pub fn record_format(&self) -> Option<RecordFormat> {
        RecordFormat::of_number(self.encoding)
    }
}

/// The maximum over batches of each size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Largest {
    /// Nodes.
    pub nodes: u64,
    /// Bytes of its sample in memory.
    pub sample_bytes: u64,
    /// Bytes of its record.
    pub record_bytes: u64,
    /// Its own rows on disk.
    pub packed_rows: u64,
    /// Rows in the cache of its segment.
    pub shared_rows: u64,
}

impl Largest {
    /// The larger of both, each of any batch.
    pub fn max(&self, other: &Largest) -> Largest {
        Largest {
            nodes: self.nodes.max(other.nodes),
            sample_bytes: self.sample_bytes.max(other.sample_bytes),
            record_bytes: self.record_bytes.max(other.record_bytes),
            packed_rows: self.packed_rows.max(other.packed_rows),
            shared_rows: self.shared_rows.max(other.shared_rows),
        }
    }
}

/// A batch in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Entry {
    pub epoch: u64,
    pub batch: u64,
    /// Rows that it accesses: its nodes, except those that no layer needs.
    pub nodes: u64,
    /// Start, length and checksum of its record.
    pub sample_at: u64,
    pub sample_bytes: u64,
    pub sample_sum: u64,
    /// Start of its words, after those of all previous batches, and their checksum.
    pub words_at: u64,
    pub words_sum: u64,
    /// The first block of its own rows, and their number.
    pub block: u64,
    pub packed_rows: u64,
    /// Its segment, and the start of its positions in the segment's cache.
    pub segment: u64,
    pub shared_at: u64,
    pub shared_rows: u64,
    /// The checksum of those positions, and of the rows themselves.
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

/// A segment's cache: its first block, and its number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct SegmentEntry {
    pub block: u64,
    pub rows: u64,
}

/// The row index in a batch's memory at which rows of its segment start: after all pages of its own rows.
pub(crate) fn shared_start(packed_rows: u64, row_bytes: u64) -> u64 {
    (packed_rows * row_bytes).next_multiple_of(esker_io::DIRECT_ALIGN as u64).div_ceil(row_bytes.max(1))
}

/// Number of blocks for this many rows.
pub(crate) fn blocks_for(rows: u64, row_bytes: u64) -> u64 {
    (rows * row_bytes).div_ceil(esker_store::BlockArray::BLOCK_BYTES)
}

/// The checksum of a shared row and its position.
pub(crate) fn shared_row_sum(row: &[u8], place: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(row, place)
}
