//! The steps of a run from a position on: who is resident in which slot, and which batches are trained meanwhile.

use crate::Job;
use esker_fetch::partitions::{SlotAssignment, SlotSwap};
use esker_sample::order::BatchStep;
use esker_sample::{Batches, Position};
use esker_types::PartitionId;
use std::ops::Range;
use std::sync::Arc;

/// A step, or what is left of it.
#[derive(Debug, Clone)]
pub(super) struct StepVisit {
    /// The step in its order.
    pub step: BatchStep,
    /// Its epoch, and its batches from the position on.
    pub epoch: u64,
    pub batches: Range<u64>,
    /// The partition of every slot.
    pub resident: Vec<PartitionId>,
    /// What changed since the step before.
    pub swaps: Vec<SlotSwap>,
}

impl StepVisit {
    pub fn has(&self, at: Position) -> bool {
        self.epoch == at.epoch && self.batches.contains(&at.batch)
    }

    pub fn is_last(&self, at: Position) -> bool {
        self.epoch == at.epoch && self.batches.end == at.batch + 1
    }
}

/// All steps with batches, in order. Slots depend on the position where it begins, and on nothing else.
pub(super) struct StepSequence {
    batches: Arc<dyn Batches>,
    epochs: u64,
    next: Position,
    slots: SlotAssignment,
}

impl StepSequence {
    pub fn new(job: &Job, from: Position) -> StepSequence {
        let (batches, epochs) = (job.batches.clone(), job.epochs);
        StepSequence { batches, epochs, next: from, slots: SlotAssignment::new() }
    }
}

impl Iterator for StepSequence {
    type Item = StepVisit;

    fn next(&mut self) -> Option<StepVisit> {
        while self.next.epoch < self.epochs && self.next.batch >= self.batches.count(self.next.epoch) {
            self.next = Position { epoch: self.next.epoch + 1, batch: 0 };
        }
        let Position { epoch, batch } = self.next;
        if epoch >= self.epochs {
            return None;
        }
        let step = self.batches.step(self.next)?;
        let batches = batch..step.batches().end;
        let swaps = self.slots.advance(&step.step().resident);
        self.next.batch = batches.end;
        Some(StepVisit { step, epoch, batches, resident: self.slots.resident(), swaps })
    }
}
