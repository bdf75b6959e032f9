//! Counters of ginex. Those of rows are separate for training and evaluation: an epoch's figures do not depend on the
//! validation after it. Times of stages are of both.

use crate::Phase;
use crate::row_counters::RowCounters;
use esker_fetch::pipeline::StageTimes;
use esker_sample::NeighbourCounters;

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

    /// Those of evaluations.
    pub fn evaluation(&self) -> &RowCounters {
        &self.0[1]
    }
}

/// Adds what was counted from `before` to `now`.
pub(super) fn add_neighbours(sum: &mut NeighbourCounters, before: NeighbourCounters, now: NeighbourCounters) {
    sum.lists += now.lists - before.lists;
    sum.cached += now.cached - before.cached;
    sum.reads += now.reads - before.reads;
    sum.read_bytes += now.read_bytes - before.read_bytes;
    sum.grouped += now.grouped - before.grouped;
    sum.group_read_bytes += now.group_read_bytes - before.group_read_bytes;
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
