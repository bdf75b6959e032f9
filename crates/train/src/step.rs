//! Training steps that a device works on: what one needs lives until it is done, and losses come out in order.

use crate::Result;
use esker_nn::{Backend, Deferred};
use esker_strategies::{Batch, RunPosition};
use std::collections::VecDeque;

/// A step that was handed to the device. It has its batch, so that nobody else gets the batch's memory before the work on it
/// is done.
pub struct Step<B: Backend> {
    pub(crate) batch: Batch<B>,
    pub(crate) nodes: u64,
    pub(crate) rate: f64,
    /// The loss, and the norm of the gradient where it is clipped; none when nothing has a label.
    pub(crate) numbers: Option<(B::Number, Option<B::Number>)>,
}

/// A step that is done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepDone {
    /// The batch.
    pub at: RunPosition,
    /// Its nodes.
    pub nodes: u64,
    /// The learning rate.
    pub rate: f64,
    /// The loss; none when nothing has a label.
    pub loss: Option<f64>,
}

impl<B: Backend> Step<B> {
    /// Waits until the step is done, and gives its batch back.
    pub fn wait(self) -> Result<StepDone> {
        let loss = match self.numbers {
            None => None,
            Some((loss, norm)) => {
                let loss = loss.wait()?;
                norm.map(Deferred::wait).transpose()?;
                Some(loss)
            }
        };
        Ok(StepDone { at: self.batch.at, nodes: self.nodes, rate: self.rate, loss })
    }
}

/// Steps that nobody has waited for yet: no more than the device allows, and no more than the lag of their source.
pub struct InFlight<B: Backend> {
    steps: VecDeque<Step<B>>,
    most: usize,
}

impl<B: Backend> InFlight<B> {
    /// For a source with this lag.
    pub fn new(lag: usize) -> InFlight<B> {
        InFlight { steps: VecDeque::new(), most: B::STEPS_IN_FLIGHT.min(lag) }
    }

    /// Takes a step up; where there are too many, waits for the first of them.
    pub fn push(&mut self, step: Step<B>) -> Result<Option<StepDone>> {
        self.steps.push_back(step);
        if self.steps.len() > self.most { self.finish_one() } else { Ok(None) }
    }

    /// Waits for the first step; `None` when there is none.
    pub fn finish_one(&mut self) -> Result<Option<StepDone>> {
        self.steps.pop_front().map(Step::wait).transpose()
    }

    /// Whether every step is done.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}
