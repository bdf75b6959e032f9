//! Training steps that a processor works on: what one needs lives until it is done, and losses come out in order.

use crate::{BatchRows, Result};
use esker_nn::{Backend, Deferred};
use esker_sample::Position;
use esker_strategies::Batch;
use std::collections::VecDeque;

/// A step that was handed to the processor. It holds its batch, so that nobody else gets the batch's memory before the
/// work on it is done.
pub struct Step<B: Backend + 'static> {
    pub(crate) batch: Batch<BatchRows<B>>,
    pub(crate) rate: f64,
    /// The loss, and the length of the gradient where it is clipped; none when no seed has a label.
    pub(crate) numbers: Option<(B::Number, Option<B::Number>)>,
}

/// A step that is done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepDone {
    /// The batch.
    pub at: Position,
    /// Its nodes.
    pub nodes: u64,
    /// The learning rate.
    pub rate: f64,
    /// The loss; none when no seed has a label.
    pub loss: Option<f64>,
}

impl<B: Backend + 'static> Step<B> {
    /// Waits until the step is done, and gives its batch back.
    pub fn wait(self) -> Result<StepDone> {
        let (at, nodes) = (self.batch.at, self.batch.sample.node_ids.len() as u64);
        let loss = match self.numbers {
            None => None,
            Some((loss, length)) => {
                let loss = loss.wait()?;
                length.map(Deferred::wait).transpose()?;
                Some(loss)
            }
        };
        Ok(StepDone { at, nodes, rate: self.rate, loss })
    }
}

/// Steps that nobody has waited for yet, [`Backend::STEPS_AHEAD`] at most.
pub struct InFlight<B: Backend + 'static> {
    steps: VecDeque<Step<B>>,
}

impl<B: Backend + 'static> Default for InFlight<B> {
    fn default() -> InFlight<B> {
        InFlight { steps: VecDeque::new() }
    }
}

impl<B: Backend + 'static> InFlight<B> {
    /// Takes a step up; where there are too many, waits for the first of them.
    pub fn push(&mut self, step: Step<B>) -> Result<Option<StepDone>> {
        self.steps.push_back(step);
        if self.steps.len() > B::STEPS_AHEAD { self.finish_one() } else { Ok(None) }
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
