//! Counters of ginex. Those of rows are separate for training and evaluation, and only training's are reported: an
//! epoch's figures do not depend on the validation after it. Times of stages are of both.

use crate::{Phase, Result};
use esker_fetch::RowReader;
use esker_fetch::pipeline::StageTimes;
use esker_plan::PlacementCounts;
use esker_sample::NeighbourCounters;
use std::sync::atomic::{AtomicU64, Ordering};

/// Row counters.
#[derive(Default)]
pub(super) struct RowCounters {
    pub rows: AtomicU64,
    pub hits: AtomicU64,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub read_nanos: AtomicU64,
    /// Bytes of samples and placements.
    pub sample_bytes: AtomicU64,
}

/// Row counters of training and of evaluation.
#[derive(Default)]
pub(super) struct PhaseCounters([RowCounters; 2]);

impl PhaseCounters {
    /// Those of a phase.
    pub fn of(&self, phase: Phase) -> &RowCounters {
        &self.0[usize::from(!matches!(phase, Phase::Train { .. }))]
    }

    /// Those of training.
    pub fn training(&self) -> &RowCounters {
        &self.0[0]
    }
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
}

/// Adds what was counted from `before` to `now`.
pub(super) fn add_neighbours(sum: &mut NeighbourCounters, before: NeighbourCounters, now: NeighbourCounters) {
    sum.lists += now.lists - before.lists;
    sum.cached += now.cached - before.cached;
    sum.reads += now.reads - before.reads;
    sum.read_bytes += now.read_bytes - before.read_bytes;
}

/// The times of finished stages and of running ones.
pub(super) fn sum_times(finished: &[StageTimes], running: &[StageTimes]) -> Vec<StageTimes> {
    let mut all = finished.to_vec();
    // If a loader requests columns, a separate stage reads them.
    for found in running {
        if !all.iter().any(|stage| stage.name == found.name) {
            all.push(StageTimes { name: found.name.clone(), ..StageTimes::default() });
        }
    }
    for stage in &mut all {
        if let Some(found) = running.iter().find(|found| found.name == stage.name) {
            stage.items += found.items;
            stage.busy += found.busy;
            stage.starved += found.starved;
            stage.blocked += found.blocked;
        }
    }
    all
}
