//! Samples on disk: written once, read forwards and backwards, any number of times, without the graph.
//!
//! There are two formats of records, a small one and a fast one ([`RecordFormat`]). `docs/sample.md` specifies every bit.

mod bits;
mod columns;
mod distinct;
mod file;
mod gaps;
mod parts;
mod records;

pub use file::{Cursor, TraceEntry, TraceHeader, TraceReader, TraceSummary, TraceWriter};
pub use records::{RecordFormat, SampleRecords};
