//! Carries plans out: brings the rows that a batch needs to where it is trained on, and moves batches from stage to stage.
//!
//! [`FeatureRows`] are the rows of a dataset, held in memory or mapped; [`pipeline`] joins stages that work at the same
//! time and counts what each waits for. Nothing here decides which rows, or when.
#![forbid(unsafe_code)]

mod error;
pub mod pipeline;
mod rows;

pub use error::{FetchError, Result};
pub use rows::FeatureRows;
