//! Training steps in flight on a device. A step keeps what it needs until it is done, and losses come out in order.

use crate::Result;
use crate::objective::Losses;
use esker_nn::{Backend, Deferred};
use esker_strategies::{Batch, RunPosition};
use std::collections::VecDeque;

/// A step that was submitted to the device. It owns its batch, so that the batch's memory is not reused before the step
/// is done.
pub struct Step<B: Backend> {
    pub(crate) batch: Batch<B>,
    pub(crate) nodes: u64,
    pub(crate) rate: f64,
    /// The parts of the loss, and the gradient norm if it is clipped. `None` if no target has a label.
    pub(crate) numbers: Option<(Losses<B>, Option<B::Number>)>,
}

/// A finished step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepDone {
    /// The batch.
    pub at: RunPosition,
    /// Number of nodes.
    pub nodes: u64,
    /// The learning rate.
    pub rate: f64,
    /// The loss. `None` if no target has a label.
    pub loss: Option<f64>,
}

impl<B: Backend> Step<B> {
    /// Waits until the step is done, and drops its batch.
    pub fn wait(self) -> Result<StepDone> {
        let loss = match self.numbers {
            None => None,
            Some((losses, norm)) => {
                let mut sum = None;
                for part in losses {
                    let part = part.wait()?;
                    sum = Some(sum.map_or(part, |sum: f64| sum + part));
                }
                norm.map(Deferred::wait).transpose()?;
                sum
            }
        };
        Ok(StepDone { at: self.batch.at, nodes: self.nodes, rate: self.rate, loss })
    }
}

/// Steps that are not waited for yet: at most as many as the device allows, and at most the lag of their source.
pub struct InFlight<B: Backend> {
    steps: VecDeque<Step<B>>,
    most: usize,
}

impl<B: Backend> InFlight<B> {
    /// For a source with this lag.
    pub fn new(lag: usize) -> InFlight<B> {
        InFlight { steps: VecDeque::new(), most: B::STEPS_IN_FLIGHT.min(lag) }
    }

    /// Adds a step. If there are too many, waits for the first of them.
    pub fn push(&mut self, step: Step<B>) -> Result<Option<StepDone>> {
        self.steps.push_back(step);
        if self.steps.len() > self.most { self.finish_one() } else { Ok(None) }
    }

    /// Waits for the first step. `None` if there is none.
    pub fn finish_one(&mut self) -> Result<Option<StepDone>> {
        self.steps.pop_front().map(Step::wait).transpose()
    }

    /// Whether every step is done.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}
