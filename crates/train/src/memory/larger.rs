//! Batches that are larger than expected, on a device with its own memory. They are found before anything of them is
//! uploaded, and end the run with the budget that would do.

use super::Planned;
use crate::{Result, TrainError};
use esker_nn::Device;
use esker_strategies::{Batch, JobOutline, Phase, RunPosition};
use esker_types::ByteCount;

/// Cached rows leave one part in this many of what they could have to batches that are larger than expected, and at most
/// so many batches.
const LARGER_PART: u64 = 8;
const LARGER_BATCHES: u64 = 4;

/// The largest batch that was expected, and the device memory that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ExpectedBatch {
    nodes: u64,
    edges: u64,
    bytes: u64,
}

impl ExpectedBatch {
    /// Device memory that a batch takes beyond the expected one.
    fn more_for(&self, nodes: u64, edges: u64) -> u64 {
        let share =
            |found: u64, expected: u64| found.saturating_sub(expected) as f64 / expected.max(1) as f64;
        (share(nodes, self.nodes).max(share(edges, self.edges)) * self.bytes as f64).ceil() as u64
    }
}

/// Device memory for batches that are larger than expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRoom {
    training: ExpectedBatch,
    evaluation: ExpectedBatch,
    /// Memory that nothing else uses.
    spare_bytes: u64,
    /// The budget, and by how much it must grow for each byte that is short.
    budget_bytes: u64,
    growth: u64,
}

impl DeviceRoom {
    /// Checks that a batch fits.
    pub(crate) fn check<D: Device>(&self, batch: &Batch<D>, trains: bool) -> Result<()> {
        self.check_size(batch.at, batch.blocks.nodes(), batch.blocks.edges(), trains)
    }

    fn check_size(&self, at: RunPosition, nodes: u64, edges: u64, trains: bool) -> Result<()> {
        let expected = match at.phase {
            Phase::Train { .. } if trains => &self.training,
            _ => &self.evaluation,
        };
        let Some(short) =
            expected.more_for(nodes, edges).checked_sub(self.spare_bytes).filter(|more| *more > 0)
        else {
            return Ok(());
        };
        let needed = ByteCount(self.budget_bytes.saturating_add(short.saturating_mul(self.growth)));
        let allowed = ByteCount(self.budget_bytes);
        Err(TrainError::LargeDeviceBatch { at: Box::new(at), trains, nodes, needed, allowed })
    }
}

impl Planned<'_> {
    /// What cached rows leave to batches that are larger than expected, out of what is left of the device's memory.
    pub(super) fn left_to_larger(&self, job: &JobOutline, left: u64) -> Result<u64> {
        let [training, evaluation] = self.expected(job)?;
        let batches = training.bytes.max(evaluation.bytes).saturating_mul(LARGER_BATCHES);
        // Sizes that fan-outs allow are never exceeded.
        Ok(if job.known.is_some() { (left / LARGER_PART).min(batches) } else { 0 })
    }

    /// The room for larger batches, if the device has a memory of its own.
    pub(super) fn device_room(
        &self,
        job: &JobOutline,
        spare_bytes: u64,
        budget_bytes: u64,
    ) -> Result<Option<DeviceRoom>> {
        if self.device.in_host_memory {
            return Ok(None);
        }
        let [training, evaluation] = self.expected(job)?;
        let growth = if self.caches_rows(job)? { LARGER_PART } else { 1 };
        Ok(Some(DeviceRoom { training, evaluation, spare_bytes, budget_bytes, growth }))
    }

    /// The largest batches of training and evaluation.
    fn expected(&self, job: &JobOutline) -> Result<[ExpectedBatch; 2]> {
        let adjacency = self.adjacency_bytes(job);
        let missed = if self.caches_rows(job)? { self.missed_bytes(job) } else { 0 };
        let bound = job.training_bound();
        let rows = bound.nodes.saturating_mul(job.dim() * 4);
        let step = self.step_bytes(job)?.2;
        let bytes =
            [rows, adjacency, missed, step].iter().fold(0, |sum: u64, more| sum.saturating_add(*more));
        let training = ExpectedBatch { nodes: bound.nodes, edges: bound.edges, bytes };
        let evaluation = match (job.evaluation_bound(), self.inference_bytes(job)?) {
            (Some(bound), Some((inference, rows))) => {
                let bytes = inference.saturating_add(rows).saturating_add(adjacency).saturating_add(missed);
                ExpectedBatch { nodes: bound.nodes, edges: bound.edges, bytes }
            }
            _ => ExpectedBatch::default(),
        };
        Ok([training, evaluation])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;

    fn room(spare_bytes: u64, growth: u64) -> DeviceRoom {
        let expected = |bytes| ExpectedBatch { nodes: 100, edges: 400, bytes };
        let (training, evaluation) = (expected(1000), expected(10));
        DeviceRoom { training, evaluation, spare_bytes, budget_bytes: 5000, growth }
    }

    fn refused(room: &DeviceRoom, phase: Phase, nodes: u64, edges: u64) -> Option<u64> {
        match room.check_size(RunPosition { phase, batch: 0 }, nodes, edges, true) {
            Ok(()) => None,
            Err(TrainError::LargeDeviceBatch { needed, .. }) => Some(needed.0),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn only_what_exceeds_the_spare_memory_is_refused() {
        let train = Phase::Train { epoch: 0 };
        assert_eq!(refused(&room(0, 1), train, 100, 400), None);
        assert_eq!(refused(&room(0, 1), train, 101, 400), Some(5010));
        assert_eq!(refused(&room(0, 1), train, 50, 800), Some(6000));
        assert_eq!(refused(&room(10, 1), train, 101, 400), None);
        assert_eq!(refused(&room(10, 8), train, 150, 500), Some(5000 + 490 * 8));
        assert_eq!(refused(&room(0, 1), Phase::Test, 200, 400), Some(5010));
    }
}
