//! Carries plans out: brings the rows that a batch needs to where it is trained on, and moves batches from stage to stage.
//!
//! [`FeatureRows`] are the rows of a dataset, held in memory or mapped. [`DiskRows`] are on disk: a [`RowReader`] reads those
//! that a plan reads, a [`HostCache`] holds what the plan keeps, and an [`AccessFile`] and a [`PlanFile`] hold what was
//! accessed and planned. [`ColumnFiles`] are any other arrays of a dataset. [`pipeline`] joins stages that work at the same time and counts what each waits for. Nothing
//! here decides which rows, or when.
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
