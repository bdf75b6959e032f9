//! Carries out plans: brings the feature rows of a batch to the device that trains on them, and moves batches from
//! stage to stage.
//!
//! [`FeatureRows`] are the rows of a dataset, in memory or memory-mapped. [`DiskRows`] are on disk: a [`RowReader`]
//! reads the rows that a plan reads, and a [`HostCache`] stores the rows that the plan keeps. An [`AccessFile`] and a
//! [`PlanFile`] store what is accessed and planned. [`ColumnFiles`] are any other arrays of a dataset. [`partitions`] reads and writes rows by
//! node partition, in large pieces. [`pipeline`]
//! connects stages that work at the same time and measures what each waits for. Nothing here decides which rows to
//! fetch, or when.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::duplicate_mod, reason = "`model` compiles `pipeline` once more"))]

mod cache;
mod columns;
mod disk;
mod error;
mod format;
#[cfg(test)]
mod model;
pub mod packed;
pub mod partitions;
pub mod pipeline;
#[cfg(test)]
mod pipeline_tests;
mod rows;
mod superbatch;
mod sync;

pub use cache::{HostCache, Missed};
pub use columns::{ColumnFiles, ColumnReader};
pub use disk::{DiskRows, RowReader};
pub use error::{FetchError, Result};
pub use format::RowFormat;
pub use rows::FeatureRows;
pub use superbatch::{AccessFile, PlanFile, PlanUses, StoredRow};
