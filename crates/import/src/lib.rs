//! Foreign formats and generators, turned into datasets inside a memory budget. The only crate that knows
//! foreign formats.
//!
//! A format reader describes what it found as an [`source::ImportSource`]; [`build`] streams that into a dataset:
//! edges through an external sort by target, rows straight through, everything resumable.
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
// The name that tests of other crates still have for it.
pub use build::ImportJob as Job;
pub use error::{ImportError, Place, Result};
pub use request::{EdgeColumnNames, Request, SplitChoice};
pub use workspace::ImportWorkspace;

/// Below this an import is refused: code, stacks and IO buffers alone take most of it.
pub const MINIMUM_MEMORY_BYTES: u64 = 48 << 20;
