//! Samples on disk: written once, read forwards and backwards, any number of times, without the graph.
//!
//! A record has a sample in order of discovery, so most of it is implied: a node's neighbours are ids if they are new,
//! and local indices if not. New nodes get the next local indices, and canonical order follows. `docs/sample.md`
//! specifies every bit.

mod bits;
mod file;
mod record;

pub use file::{Cursor, SampleRecords, TraceEntry, TraceHeader, TraceReader, TraceSummary, TraceWriter};
