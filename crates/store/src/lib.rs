//! The dataset directory: create, open, verify, and a place for derived data.
#![forbid(unsafe_code)]

mod error;
mod journal;

pub use error::{Result, StoreError};
pub use journal::Journal;
