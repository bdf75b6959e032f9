//! Imports other formats and generates graphs, within a memory budget. This is the only crate that knows other
//! formats.
//!
//! A format reader describes its input as a [`source::ImportSource`]. [`build`] streams that into a dataset: edges
//! through an external sort by target, rows directly. Everything is resumable.
//!
//! # The life of a dataset
//!
//! ```text
//!  foreign files ── formats/X.rs ──> ImportSource ── build/ ──> NAME.partial ── rename ──> NAME
//!                   (describes)      (streams)       (sorts,     arrays, then
//!  flags ────────── generate/ ─────────────────────> writes)     the manifest
//! ```
//!
//! 1. `Format::inputs` names the files. Together with the request they determine the job's **fingerprint**.
//!    `Staging::begin` locks `NAME.partial`. If the **journal** in it has another fingerprint, its content is deleted.
//! 2. `Format::open` describes the input as an `ImportSource`: streams of edges, rows, labels, ids and names that can
//!    be opened as often as needed. Formats with string ids number them first (`dictionary.rs`), on disk if necessary.
//! 3. `build/` treats edges (reverse, duplicates, self-loops, component), packs them into fixed-size records, sorts
//!    them by (target, source) with `sort.rs`, and writes adjacency and columns in one pass over the merge. Rows are
//!    streamed through `rows.rs` in chunks. Each finished step is recorded in the journal; runs and feature rows also
//!    in between.
//! 4. `Manifest::complete` computes the content id from the checksums. `Staging::publish` writes the manifest last,
//!    opens the result as a user would, marks it complete and renames it. Replacing a dataset is one atomic exchange
//!    of names.
//!
//! Generated graphs need no sort: in `generate/model.rs` everything about a node is a function of the random seed and
//! its id, so in-neighbours are generated in order, by any thread.
//!
//! # What always holds
//!
//! - Everything whose size depends on the graph is taken from the `Budget`, or the import is refused with the smallest
//!   budget that works: sort buffers, the union-find of `--largest-component`, split bitmaps, in-memory dictionaries,
//!   pickles (`ImportWorkspace::hold`).
//! - An edge's id is its position in `in-neighbours`, so columns by edge need no look-up during the import.
//! - Ids from input files are `u64` and unchecked until `CheckedEdges` has compared them with the node count.
//! - Pickles are parsed, never executed. An unknown global is refused, and the error names it.
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
pub use request::{EdgeColumnNames, HeldOutCount, HoldOut, Request, SplitChoice};
pub use workspace::ImportWorkspace;

/// An import with less memory is refused: code, stacks and I/O buffers alone take most of it.
pub const MINIMUM_MEMORY_BYTES: u64 = 48 << 20;
