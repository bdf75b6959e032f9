//! What the first layer reads of features X and embeddings Z: f(X, Z).

use crate::embeddings::InputRows;
use crate::{Result, RunConfig};
use esker_nn::{Affine, Backend, Parameter, Post, Shape, Term, TermRows, WeightTerm};
use esker_strategies::{Input, InputTable};
use esker_types::random::Key;
use std::sync::Arc;

/// The stream of random numbers of its weight.
const INITIAL: u64 = 7;
/// Features and embeddings that are read at a time to be summed for all nodes: a megabyte, where a piece of nodes with
/// wide features would be many times the rows that come of it.
const PIECE_NUMBERS: usize = 1 << 18;

/// Turns the rows of a batch into the input of the first layer.
pub(crate) struct InputMix<B: Backend> {
    /// `None` if there are features or embeddings alone.
    kind: Option<InputRows>,
    /// Columns of feature rows.
    features: usize,
    /// Columns of the result.
    columns: usize,
    /// Of features that are summed with embeddings: one row per column of an embedding.
    weight: Option<Parameter<B>>,
}

/// The input of a step.
pub(crate) struct MixedRows<B: Backend> {
    /// What the first layer reads.
    pub rows: B::Matrix,
    /// Features, if their weight needs a gradient.
    features: Option<B::Matrix>,
}

impl<B: Backend> InputMix<B> {
    /// For feature rows of so many columns.
    pub fn new(backend: &B, config: &RunConfig, features: usize) -> InputMix<B> {
        let kind = config.embeddings.as_ref().map(|rows| rows.inputs);
        let columns = config.input_columns(features);
        let weight = (kind == Some(InputRows::Summed)).then(|| {
            let (mut value, mut gradient) =
                (backend.matrix(columns, features), backend.matrix(columns, features));
            let bound = 1.0 / (features.max(1) as f32).sqrt();
            backend.fill_uniform(&mut value, Key::new(config.seed).with(INITIAL), bound);
            backend.fill(&mut gradient, 0.0);
            Parameter { name: "input.weight".into(), value, gradient }
        });
        InputMix { kind: kind.filter(|kind| *kind != InputRows::Embeddings), features, columns, weight }
    }

    /// The rows of a batch, on the device.
    pub fn rows(&self, backend: &B, input: &mut Input<B>) -> MixedRows<B> {
        let Some(kind) = self.kind else {
            return MixedRows { rows: input.upload(backend, self.columns), features: None };
        };
        let live = input.live.take();
        let embeddings = live.as_ref().map(|live| live.table.gather(backend, &live.slots));
        input.live = None;
        let features = input.upload(backend, self.features);
        input.live = live;
        let embeddings = embeddings.expect("a batch of a run with embeddings names their slots");
        match (kind, &self.weight) {
            (InputRows::Summed, Some(weight)) => {
                let mut rows = backend.matrix(features.rows(), self.columns);
                sum(backend, &features, weight, &embeddings, &mut rows);
                MixedRows { rows, features: Some(features) }
            }
            _ => MixedRows { rows: join(backend, &features, &embeddings), features: None },
        }
    }

    /// Turns the gradient of the rows into that of the embeddings, and sets that of the weight.
    pub fn backward(&mut self, backend: &B, mixed: &MixedRows<B>, mut gradient: B::Matrix) -> B::Matrix {
        match (self.kind, &mut self.weight, &mixed.features) {
            (Some(InputRows::Summed), Some(weight), Some(features)) => {
                let weight_gradient = &mut weight.gradient;
                let terms = vec![WeightTerm { source: features, weight_gradient }];
                backend.weight_gradients(&mut gradient, None, terms, None);
                gradient
            }
            (Some(InputRows::Concatenated), ..) => last_columns(backend, &gradient, self.features),
            _ => gradient,
        }
    }

    pub fn parameter(&self) -> Option<&Parameter<B>> {
        self.weight.as_ref()
    }

    pub fn parameter_mut(&mut self) -> Option<&mut Parameter<B>> {
        self.weight.as_mut()
    }

    /// The same over rows of all nodes. `table` has features and embeddings side by side, if a batch has both.
    pub fn table(&self, backend: &B, table: InputTable) -> Result<InputTable> {
        let Some(weight) = &self.weight else { return Ok(table) };
        let (features, columns) = (self.features, self.columns);
        let mut numbers = vec![0.0; columns * features];
        backend.read(&weight.value, 0, &mut numbers);
        backend.check()?;
        let (backend, numbers, table) = (backend.clone(), Arc::new(numbers), Arc::new(table));
        let nodes = table.nodes();
        Ok(InputTable::new(nodes, columns, move || {
            let (backend, mut read) = (backend.clone(), table.reader()?);
            let mut weight = backend.matrix(columns, features);
            backend.write(&mut weight, 0, &numbers);
            let (mut both, width) = (Vec::new(), features + columns);
            let piece = (PIECE_NUMBERS / width.max(1)).max(1);
            Ok(Box::new(move |nodes, values| {
                for (nodes, values) in nodes.chunks(piece).zip(values.chunks_mut(piece * columns)) {
                    both.resize(nodes.len() * width, 0.0);
                    read(nodes, &mut both)?;
                    let part = |from: usize, count: usize| {
                        let rows = both.chunks_exact(width);
                        let numbers: Vec<f32> =
                            rows.flat_map(|row| &row[from..from + count]).copied().collect();
                        let mut matrix = backend.matrix(nodes.len(), count);
                        backend.write(&mut matrix, 0, &numbers);
                        matrix
                    };
                    let (left, right) = (part(0, features), part(features, columns));
                    let mut rows = backend.matrix(nodes.len(), columns);
                    let source = TermRows::Rows(&left);
                    let terms = vec![Term { source, weight: &weight }];
                    let add = Some(&right);
                    backend.affine(
                        Affine { terms, accumulate: false, bias: None, add, post: Post::NONE },
                        &mut rows,
                    );
                    backend.read(&rows, 0, values);
                }
                Ok(backend.check()?)
            }))
        }))
    }
}

/// Features through a weight, plus embeddings.
fn sum<B: Backend>(
    backend: &B,
    features: &B::Matrix,
    weight: &Parameter<B>,
    embeddings: &B::Matrix,
    rows: &mut B::Matrix,
) {
    let terms = vec![Term { source: TermRows::Rows(features), weight: &weight.value }];
    let add = Some(embeddings);
    backend.affine(Affine { terms, accumulate: false, bias: None, add, post: Post::NONE }, rows);
}

/// Both side by side.
fn join<B: Backend>(backend: &B, left: &B::Matrix, right: &B::Matrix) -> B::Matrix {
    let mut joined = backend.matrix(left.rows(), left.columns() + right.columns());
    backend.copy_columns(left, 0, &mut joined, 0, left.columns());
    backend.copy_columns(right, 0, &mut joined, left.columns(), right.columns());
    joined
}

/// The columns from `first` on.
fn last_columns<B: Backend>(backend: &B, matrix: &B::Matrix, first: usize) -> B::Matrix {
    let mut part = backend.matrix(matrix.rows(), matrix.columns() - first);
    backend.copy_columns(matrix, first, &mut part, 0, matrix.columns() - first);
    part
}
