//! Rows packed for a whole run: an optimal cache decides which rows each batch reads, and only these are stored, batch
//! by batch, as they are read. The cache changes from batch to batch, so that a batch also has the slots that keep some of
//! its rows. `docs/format.md` specifies the directory.
//!
//! A run is one or more laps. A lap is a sequence of parts (an epoch, an evaluation) with a plan of its own. One that repeats finds in the cache what the lap before it left for it. [`RunWriter`] plans and packs,
//! [`RunReader`] reads what batches miss, and [`RunCache`] applies hits and keeps, in the order of batches. The content of the
//! cache follows from the plan and a batch, so it can be restored anywhere.

mod cache;
mod layout;
mod open;
mod read;
mod write;

pub use cache::RunCache;
pub use layout::{LapLayout, PartOfLap, RunLayout};
pub use open::RunRows;
pub use read::{RunBatch, RunReader};
pub use write::RunWriter;

use super::Largest;
use esker_sample::trace::TraceHeader;
use serde::{Deserialize, Serialize};

/// The kind of this derived data in its manifest.
pub(crate) const KIND: &str = "esker";
/// The encoding of its arrays.
pub(crate) const ENCODING: u32 = 1;

/// Samples that some parts of a run are made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSource {
    /// The sibling directory that has them.
    pub name: String,
    /// What was sampled, and how.
    pub sampling: TraceHeader,
    /// Epochs of it that are used.
    pub epochs: u64,
}

/// The parameters in a directory's manifest: what it was made with and what it contains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunPlan {
    /// The encoding of its arrays. A directory with another one is made again.
    pub encoding: u32,
    /// What was laid out.
    pub layout: RunLayout,
    /// Number of batches of all laps.
    pub batches: u64,
    /// Bytes of a row as stored.
    pub row_bytes: u64,
    /// Rows that batches access.
    pub accesses: u64,
    /// Rows that they read.
    pub misses: u64,
    /// Rows of these that are kept.
    pub kept: u64,
    /// Rows that stay from lap to lap, read before the first one.
    pub around: u64,
    /// The largest of all batches.
    pub largest: Largest,
}

/// A batch in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct RunEntry {
    /// Its samples, and its position in them.
    pub source: u64,
    pub epoch: u64,
    pub batch: u64,
    /// Rows that it accesses, and where they are listed in its samples.
    pub nodes: u64,
    pub accesses_at: u64,
    /// Start, length and checksum of its record.
    pub sample_at: u64,
    pub sample_bytes: u64,
    pub sample_sum: u64,
    /// Start of its words, and their checksum.
    pub words_at: u64,
    pub words_sum: u64,
    /// Start of the slots of kept rows, and of these rows, their number, and a checksum of each.
    pub kept_at: u64,
    pub kept: u64,
    pub kept_sum: u64,
    pub kept_rows_sum: u64,
    /// The first block of the rows that it reads, and their number.
    pub block: u64,
    pub packed_rows: u64,
    pub lap: u64,
}

impl RunEntry {
    pub const COLUMNS: u64 = size_of::<RunEntry>() as u64 / 8;
}

/// A lap in the index. Row `i` of those that stay is in slot `i` at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct LapEntry {
    pub first: u64,
    pub batches: u64,
    /// Start of the rows that stay from its end to its start, and of their slots at its end, their number, and a checksum
    /// of each.
    pub around_at: u64,
    pub around: u64,
    pub ends_sum: u64,
    pub around_sum: u64,
}

impl LapEntry {
    pub const COLUMNS: u64 = size_of::<LapEntry>() as u64 / 8;
}
