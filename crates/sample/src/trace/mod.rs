//! Samples on disk: written once, read forwards and backwards, any number of times, without the graph.
//!
//! A record holds a sample in order of discovery, so most of it need not be said: a list names its new nodes by id and
//! the others by place, new nodes get the next places, and canonical order follows. `docs/sample.md` draws every bit.

mod bits;
mod file;
mod record;

pub use file::{Cursor, SampleRecords, TraceEntry, TraceHeader, TraceReader, TraceSummary, TraceWriter};
