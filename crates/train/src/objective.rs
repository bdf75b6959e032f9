//! What a model is trained for. An objective owns its targets, loss, tally and parameters. Steps and evaluation use it
//! and know nothing else about labels.

use crate::inputs::InputMix;
use crate::link::LinkObjective;
use crate::metrics::{Tally, largest};
use crate::task::{BatchLabels, LabelKind, SplitName, Task};
use crate::{Result, TrainError};
use esker_nn::{Backend, Device, Model, Parameter, Trained};
use esker_sample::{LinkBatch, Targets};
use esker_types::NodeId;
use rayon::prelude::*;
use std::sync::Arc;

/// What a model is trained for.
pub trait Objective<B: Backend>: Send + Sync {
    /// Columns of the model's output.
    fn outputs(&self) -> usize;

    /// Picks what a batch of a split is compared with.
    fn pick(&self, split: SplitName, of: &BatchTargets<'_>) -> Result<Picked>;

    /// The losses of what was picked, and the gradient of the model's output. It sets the gradients of its own
    /// parameters. `step` counts the steps before this one.
    fn loss(
        &mut self,
        model: &Model<B>,
        output: &B::Matrix,
        picked: &Picked,
        step: u64,
    ) -> Result<(Losses<B>, B::Matrix)>;

    /// Adds a penalty on rows of the model's output, or on the rows that it would have without dropout, after the loss of
    /// the same batch.
    fn penalize(&mut self, _: &Picked, _: &B::Matrix, _: &mut B::Matrix, _: &mut Losses<B>) -> Result<()> {
        Ok(())
    }

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

    /// The objective of links, if it is that.
    fn links(&self) -> Option<&LinkObjective<B>> {
        None
    }
}

/// Parts of a loss that were submitted to a device. Their sum, in order, is the loss.
pub type Losses<B> = Vec<<B as Device>::Number>;

/// The targets of a batch.
pub struct BatchTargets<'a> {
    /// Nodes, or links.
    pub targets: &'a Targets,
    /// The seed nodes.
    pub seeds: &'a [NodeId],
    /// Their rows in the model's output.
    pub rows: &'a [u32],
}

/// What a batch is compared with.
#[derive(Debug, Clone, PartialEq)]
pub enum Picked {
    /// Nodes that have a label.
    Nodes {
        /// Rows of the model's output; they may repeat.
        rows: Vec<u32>,
        /// The label of each.
        labels: BatchLabels,
    },
    /// Edges and their negatives.
    Links {
        /// The row of each seed node in the model's output; rows may repeat.
        rows: Vec<u32>,
        /// Edges and negatives, by their positions among the seed nodes.
        links: Arc<LinkBatch>,
    },
}

impl Picked {
    /// Whether there is nothing to be compared with.
    pub fn is_empty(&self) -> bool {
        match self {
            Picked::Nodes { rows, .. } => rows.is_empty(),
            Picked::Links { links, .. } => links.edges.is_empty(),
        }
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
        Ok(Picked::Nodes { rows, labels })
    }

    fn loss(
        &mut self,
        model: &Model<B>,
        output: &B::Matrix,
        picked: &Picked,
        _: u64,
    ) -> Result<(Losses<B>, B::Matrix)> {
        let Picked::Nodes { rows, labels } = picked else { return Err(TrainError::LinkBatch) };
        let (loss, gradient) = model.loss(output, rows, labels.as_labels())?;
        Ok((vec![loss], gradient))
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

/// A model, what it reads, and its objective: what an optimizer updates.
pub(crate) struct Network<B: Backend> {
    pub model: Model<B>,
    pub inputs: InputMix<B>,
    pub objective: Box<dyn Objective<B>>,
}

impl<B: Backend + Clone> Trained<B> for Network<B> {
    fn backend(&self) -> &B {
        self.model.backend()
    }

    fn parameters(&self) -> Vec<&Parameter<B>> {
        let own = self.model.parameters().into_iter().chain(self.inputs.parameter());
        own.chain(self.objective.parameters()).collect()
    }

    fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        let own = self.model.parameters_mut().into_iter().chain(self.inputs.parameter_mut());
        own.chain(self.objective.parameters_mut()).collect()
    }
}
