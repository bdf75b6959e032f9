//! Foreign formats and generators, turned into datasets inside a memory budget. The only crate that knows
//! foreign formats.
//!
//! A format reader describes what it found as a [`source::Source`]; [`build`] streams that into a dataset:
//! edges through an external sort by target, rows straight through, everything resumable.
#![forbid(unsafe_code)]

pub mod build;
pub mod csr;
pub mod delimited;
pub mod dictionary;
mod error;
#[cfg(test)]
mod fixture;
pub mod formats;
pub mod generate;
pub mod given;
pub mod hostile;
pub mod idlist;
pub mod input;
pub mod npy;
pub mod parquet_file;
pub mod parquet_rows;
pub mod pickle;
mod request;
pub mod sort;
pub mod source;
mod string_sort;
mod torch;
mod workspace;

pub use build::{Job, import};
pub use error::{ImportError, Place, Result};
pub use request::{EdgeColumnNames, Request, SplitChoice};
pub use workspace::Workspace;

/// Below this an import is refused: code, stacks and IO buffers alone take most of it.
pub const MINIMUM_MEMORY_BYTES: u64 = 48 << 20;
