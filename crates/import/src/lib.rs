//! Foreign formats and generators, turned into datasets inside a memory budget. The only crate that knows
//! foreign formats.
//!
//! A format reader describes what it found as an [`source::ImportSource`]; [`build`] streams that into a dataset:
//! edges through an external sort by target, rows straight through, everything resumable.
//!
//! # The life of a dataset
//!
//! ```text
//!  foreign files ── formats/X.rs ──> ImportSource ── build/ ──> NAME.partial ── rename ──> NAME
//!                   (describes)      (streams)       (sorts,     arrays, then
//!  flags ────────── generate/ ─────────────────────> writes)     the manifest
//! ```
//!
//! 1. `Format::inputs` names the files; with the request they make the job's **fingerprint**. `Staging::begin` locks
//!    `NAME.partial`; its **journal** belongs to that fingerprint, or everything in there is thrown away.
//! 2. `Format::open` describes what it found as an `ImportSource`: streams of edges, rows, labels, ids, names that can be opened as
//!    often as needed. Formats with string ids number them first (`dictionary.rs`), on disk if they must.
//! 3. `build/` treats edges (reverse, duplicates, self-loops, component), packs them into fixed-size records, sorts them by
//!    (target, source) with `sort.rs`, and writes lists and columns in one pass over the merge. Rows pass straight through
//!    `rows.rs` in chunks. Each finished step is recorded in the journal; runs and feature rows also in between.
//! 4. `Manifest::complete` names the content by its checksums; `Staging::publish` writes the manifest last, opens the result
//!    as a user would, marks it complete, renames. Replacing a dataset is one exchange of names.
//!
//! Generated graphs skip the sort: `generate/model.rs` makes everything about a node a function of the seed and its number,
//! so lists come out in order, from any thread.
//!
//! # What always holds
//!
//! - Everything sized by the graph goes through the `Budget` or is refused with the smallest budget that would
//!   do: sort buffers, the union-find of `--largest-component`, split bitmaps, in-memory dictionaries, pickles
//!   (`ImportWorkspace::hold`).
//! - An edge's id is its position in `in-neighbours`, so columns by edge need no look-up on the way in.
//! - Ids from foreign files are `u64` and unchecked until `CheckedEdges` has compared them with the node count.
//! - Pickles are parsed, never executed; unknown globals are refused by name.
#![forbid(unsafe_code)]

pub mod build;
pub mod dictionary;
mod error;
#[cfg(test)]
mod fixture;
pub mod formats;
pub mod generate;
pub mod given;
pub mod hostile;
pub mod read;
mod request;
pub mod sort;
pub mod source;
mod string_sort;
mod workspace;

pub(crate) use read::{csr, delimited, idlist, input, npy, parquet_file, parquet_rows, pickle, torch};

pub use build::{ImportJob, import};
pub use error::{ImportError, Location, Result};
pub use request::{EdgeColumnNames, Request, SplitChoice};
pub use workspace::ImportWorkspace;

/// Below this an import is refused: code, stacks and IO buffers alone take most of it.
pub const MINIMUM_MEMORY_BYTES: u64 = 48 << 20;
