//! The position of a run: a batch of a training epoch or of an evaluation.

use esker_sample::Position;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::fmt;

/// A part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// An epoch of training.
    Train {
        /// The epoch, from 0.
        epoch: u64,
    },
    /// The validation after an epoch. At the end there may be one more, of the final model.
    Validation {
        /// The epoch. For the validation at the end, the number of epochs.
        epoch: u64,
    },
    /// The test at the end.
    Test,
}

impl Phase {
    fn key(self) -> (u64, u8) {
        match self {
            Phase::Train { epoch } => (epoch, 0),
            Phase::Validation { epoch } => (epoch, 1),
            Phase::Test => (u64::MAX, 2),
        }
    }
}

/// Phases are in the order of a run.
impl Ord for Phase {
    fn cmp(&self, other: &Phase) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for Phase {
    fn partial_cmp(&self, other: &Phase) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A batch of a run. Positions are in the order of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RunPosition {
    /// The phase.
    pub phase: Phase,
    /// The batch, from 0.
    pub batch: u64,
}

/// For messages. It counts from 1.
impl fmt::Display for RunPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let batch = self.batch + 1;
        match self.phase {
            Phase::Train { epoch } => write!(f, "batch {batch} of epoch {}", epoch + 1),
            Phase::Validation { epoch } => {
                write!(f, "batch {batch} of the validation after epoch {}", epoch + 1)
            }
            Phase::Test => write!(f, "batch {batch} of the test"),
        }
    }
}

impl RunPosition {
    /// The first batch of a run.
    pub const START: RunPosition = RunPosition::train(0, 0);

    /// A training batch.
    pub const fn train(epoch: u64, batch: u64) -> RunPosition {
        RunPosition { phase: Phase::Train { epoch }, batch }
    }

    /// The first batch of a phase.
    pub const fn start_of(phase: Phase) -> RunPosition {
        RunPosition { phase, batch: 0 }
    }

    /// The position for samplers. Evaluations have one epoch.
    pub fn position(self) -> Position {
        let epoch = match self.phase {
            Phase::Train { epoch } => epoch,
            Phase::Validation { .. } | Phase::Test => 0,
        };
        Position { epoch, batch: self.batch }
    }
}

impl From<Position> for RunPosition {
    fn from(at: Position) -> RunPosition {
        RunPosition::train(at.epoch, at.batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_come_in_the_order_of_a_run() {
        let phases = [
            Phase::Train { epoch: 0 },
            Phase::Validation { epoch: 0 },
            Phase::Train { epoch: 1 },
            Phase::Validation { epoch: 1 },
            Phase::Validation { epoch: 2 },
            Phase::Test,
        ];
        assert!(phases.is_sorted() && phases.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(RunPosition::train(0, 9) < RunPosition::start_of(Phase::Validation { epoch: 0 }));
        assert!(RunPosition::train(1, 0) > RunPosition::train(0, 9));
    }
}
