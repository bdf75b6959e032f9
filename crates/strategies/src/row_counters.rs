//! Counters of rows that a strategy reads one by one.

use crate::{EvaluationCounters, Result};
use esker_fetch::RowReader;
use esker_plan::PlacementCounts;
use std::sync::atomic::{AtomicU64, Ordering};

/// Row counters.
#[derive(Default)]
pub(crate) struct RowCounters {
    pub rows: AtomicU64,
    pub hits: AtomicU64,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub read_nanos: AtomicU64,
    /// Bytes of samples and placements.
    pub sample_bytes: AtomicU64,
}

impl RowCounters {
    /// Counts a read.
    pub fn read<R>(
        &self,
        reader: &mut RowReader,
        work: impl FnOnce(&mut RowReader) -> esker_fetch::Result<R>,
    ) -> Result<R> {
        let before = reader.counters();
        let done = work(reader)?;
        let after = reader.counters();
        self.reads.fetch_add(after.reads - before.reads, Ordering::Relaxed);
        self.read_bytes.fetch_add(after.read_bytes - before.read_bytes, Ordering::Relaxed);
        self.read_nanos.fetch_add((after.busy - before.busy).as_nanos() as u64, Ordering::Relaxed);
        Ok(done)
    }

    /// Counts the rows of a batch.
    pub fn placed(&self, placed: PlacementCounts) {
        self.rows.fetch_add(placed.hits + placed.reads, Ordering::Relaxed);
        self.hits.fetch_add(placed.hits, Ordering::Relaxed);
    }

    /// What evaluations have read, if these are theirs.
    pub fn of_evaluation(&self, row_bytes: u64) -> EvaluationCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EvaluationCounters {
            rows: get(&self.rows),
            hits: get(&self.hits),
            bytes_useful: get(&self.rows) * row_bytes,
            bytes_read: get(&self.read_bytes),
            reads: get(&self.reads),
            read_seconds: get(&self.read_nanos) as f64 * 1e-9,
        }
    }
}
