//! Lets batches into memory by their bytes. Prefetched batches are as many as fit. A batch that is larger than expected
//! waits for others to leave. One that does not fit alone is refused, with the budget that would do.

use crate::{BatchRoom, JobOutline, Result, RunPosition, StrategyError};
use esker_fetch::pipeline::{Permit, Permits, Stage};
use esker_types::ByteCount;

/// Permits per batch of the expected size, if little memory is spare. Smaller batches take fewer.
const UNITS: u64 = 64;
/// The most permits.
const MOST_UNITS: u64 = 4096;

/// Permits for the rows of batches, counted in bytes.
pub(crate) struct BatchPermits {
    permits: Permits,
    /// Units that one batch may take. Steps in flight keep theirs while the next batch is waited for.
    most: u64,
    unit_bytes: u64,
    /// Nodes of the largest batch that was expected, and bytes of a row in memory.
    expected: u64,
    row_bytes: u64,
    room: BatchRoom,
    in_flight: u64,
    trains: bool,
}

impl BatchPermits {
    /// Room for `depth` batches of the expected size, `in_flight` of them in steps, and for more if memory is spare. The
    /// other half of what is spare is for samplers.
    pub fn new(job: &JobOutline, expected: u64, depth: usize, in_flight: usize) -> BatchPermits {
        let (row_bytes, expected) = ((job.dim() * 4).max(1), expected.max(1));
        let batch_bytes = expected.saturating_mul(row_bytes);
        let all_bytes = batch_bytes.saturating_mul(depth as u64).saturating_add(job.room.spare_bytes / 2);
        let unit_bytes = batch_bytes.div_ceil(UNITS).max(all_bytes.div_ceil(MOST_UNITS));
        let units = (all_bytes / unit_bytes).max(batch_bytes.div_ceil(unit_bytes) * depth as u64);
        BatchPermits {
            permits: Permits::new(units as usize),
            most: units / (1 + in_flight as u64),
            in_flight: in_flight as u64,
            trains: job.largest_batch > 0,
            unit_bytes,
            expected,
            row_bytes,
            room: job.room,
        }
    }

    /// Waits until a batch of so many nodes fits. `None` if nobody waits for it any more.
    pub fn take(&self, stage: &Stage, at: RunPosition, nodes: u64) -> Result<Option<Permit>> {
        let units = self.units_of(nodes);
        if units > self.most {
            // With more memory, units are slightly larger.
            let short = (units - self.most + 2).saturating_mul(self.unit_bytes + self.unit_bytes / 64);
            let short = short.saturating_mul(2 * (1 + self.in_flight));
            return Err(StrategyError::LargeBatch {
                at: Box::new(at),
                trains: self.trains,
                nodes: Some(nodes),
                needed: ByteCount(self.room.budget_bytes.saturating_add(short)),
                allowed: ByteCount(self.room.budget_bytes),
            });
        }
        Ok(stage.permit_of(&self.permits, units as usize))
    }

    /// A step on a batch that is larger than expected takes more, too.
    fn units_of(&self, nodes: u64) -> u64 {
        let bytes = nodes * self.row_bytes + self.room.more_for(nodes, self.expected);
        bytes.div_ceil(self.unit_bytes).max(1)
    }
}
