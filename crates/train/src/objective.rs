//! What a model is trained for. An objective owns its targets, loss, tally and parameters. Steps and evaluation use it
//! and know nothing else about labels.

use crate::metrics::{Tally, largest};
use crate::task::{BatchLabels, LabelKind, SplitName, Task};
use crate::{Result, TrainError};
use esker_nn::{Backend, Model, Parameter, Trained};
use esker_sample::Targets;
use esker_types::NodeId;
use rayon::prelude::*;

/// What a model is trained for.
pub trait Objective<B: Backend>: Send + Sync {
    /// Columns of the model's output.
    fn outputs(&self) -> usize;

    /// Picks what a batch of a split is compared with.
    fn pick(&self, split: SplitName, of: &BatchTargets<'_>) -> Result<Picked>;

    /// The loss of the picked rows, and the gradient of the model's output.
    fn loss(&self, model: &Model<B>, output: &B::Matrix, picked: &Picked) -> Result<(B::Number, B::Matrix)>;

    /// An empty tally for predictions over a split.
    fn tally(&self, split: SplitName) -> Tally;

    /// Turns rows of the model's output into probabilities or values, in place, and returns their classes, if there are
    /// any. It runs on the rayon pool of its caller.
    fn predictions(&self, output: &mut [f32]) -> Vec<u32>;

    /// Its own parameters, in a fixed order.
    fn parameters(&self) -> Vec<&Parameter<B>> {
        Vec::new()
    }

    /// The same, mutable.
    fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        Vec::new()
    }
}

/// The targets of a batch.
pub struct BatchTargets<'a> {
    /// Nodes, or links.
    pub targets: &'a Targets,
    /// The seed nodes.
    pub seeds: &'a [NodeId],
    /// Their rows in the model's output.
    pub rows: &'a [u32],
}

/// What a batch is compared with: rows of the model's output, and their labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Picked {
    /// Rows of the model's output; they may repeat.
    pub rows: Vec<u32>,
    /// The label of each.
    pub labels: BatchLabels,
}

impl Picked {
    /// Whether no row has a label.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// The objective of node labels.
impl<B: Backend> Objective<B> for Task {
    fn outputs(&self) -> usize {
        self.outputs
    }

    fn pick(&self, split: SplitName, of: &BatchTargets<'_>) -> Result<Picked> {
        let Targets::Nodes = of.targets else {
            return Err(TrainError::LinkBatch);
        };
        let (rows, labels) = self.split(split).pick(self.kind, of.seeds, of.rows);
        Ok(Picked { rows, labels })
    }

    fn loss(&self, model: &Model<B>, output: &B::Matrix, picked: &Picked) -> Result<(B::Number, B::Matrix)> {
        Ok(model.loss(output, &picked.rows, picked.labels.as_labels())?)
    }

    fn tally(&self, split: SplitName) -> Tally {
        Tally::new(self.kind, self.outputs, self.split(split).nodes().len())
    }

    fn predictions(&self, values: &mut [f32]) -> Vec<u32> {
        let row_classes = |row: &mut [f32]| {
            let class = largest(row) as u32;
            softmax(row);
            class
        };
        match self.kind {
            LabelKind::Classes => values
                .par_chunks_exact_mut(self.outputs)
                .with_min_len(ROWS_PER_TASK)
                .map(row_classes)
                .collect(),
            LabelKind::Multilabel => {
                let rows = values.par_chunks_mut(self.outputs.max(1) * ROWS_PER_TASK);
                rows.for_each(|rows| {
                    rows.iter_mut().for_each(|value| *value = 1.0 / (1.0 + (-*value).exp()))
                });
                Vec::new()
            }
            LabelKind::Real => Vec::new(),
        }
    }
}

/// Rows of the model's output per parallel task.
const ROWS_PER_TASK: usize = 64;

fn softmax(row: &mut [f32]) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|value| *value = (*value - most).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|value| *value /= sum);
}

/// A model and its objective: what an optimizer updates.
pub(crate) struct Network<B: Backend> {
    pub model: Model<B>,
    pub objective: Box<dyn Objective<B>>,
}

impl<B: Backend + Clone> Trained<B> for Network<B> {
    fn backend(&self) -> &B {
        self.model.backend()
    }

    fn parameters(&self) -> Vec<&Parameter<B>> {
        self.model.parameters().into_iter().chain(self.objective.parameters()).collect()
    }

    fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        self.model.parameters_mut().into_iter().chain(self.objective.parameters_mut()).collect()
    }
}
