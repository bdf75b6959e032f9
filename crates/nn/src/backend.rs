//! The operations that a device must provide for the layers: some dozen, over matrices on the device. Layer code has
//! no access to the numbers themselves. To support another device, implement [`Device`] and this trait; nothing else
//! changes.

use crate::{CpuCounters, Degree, Dropout, Post, Result};
use esker_device::Device;
use esker_types::random::Key;

/// How the rows of a node's neighbours are aggregated into one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregator {
    /// Mean of the neighbours; zeros if there are none.
    Mean,
    /// Sum of the neighbours.
    Sum,
    /// Maximum per column; zeros if there are no neighbours. The first of equal neighbours gets the gradient.
    Max,
    /// Sum of the neighbours plus this multiple of the node's own row (GIN).
    SumWithSelf(f32),
    /// Symmetric normalisation with self-loops (GCN). Degrees in the whole graph are
    /// [`Adjacency::input_degrees`](esker_device::Adjacency). With sampled degrees, rows that are not outputs of the
    /// layer have only their self-loop, as with PyG's loaders and `trim_to_layer`.
    Gcn(Degree),
}

/// The rows that a matmul reads.
pub enum TermRows<'a, B: Backend> {
    /// The last rows of a matrix.
    Rows(&'a B::Matrix),
    /// Aggregated rows of neighbours, one row per output. The neighbours' rows are never stored as a matrix.
    Aggregate {
        /// The adjacency.
        graph: &'a B::Graph,
        /// One row per input.
        input: &'a B::Matrix,
        /// How to aggregate.
        aggregator: Aggregator,
        /// Receives the aggregated rows if a backward pass will need them.
        kept: Option<&'a mut B::Matrix>,
        /// For [`Aggregator::Max`]: the position of each winner among the node's neighbours, as the bits of a u32.
        winners: Option<&'a mut B::Matrix>,
    },
}

/// One matmul of a sum.
pub struct Term<'a, B: Backend> {
    /// Its rows.
    pub source: TermRows<'a, B>,
    /// The weight, one row per output column, as in PyTorch.
    pub weight: &'a B::Matrix,
}

/// `output = post(sum of source x weight transposed + bias + last rows of `add`)`.
pub struct Affine<'a, B: Backend> {
    /// The matmuls; may be empty.
    pub terms: Vec<Term<'a, B>>,
    /// Whether the output already contains a part of the sum.
    pub accumulate: bool,
    /// Added to every row.
    pub bias: Option<&'a B::Matrix>,
    /// Its last rows are added (an identity residual).
    pub add: Option<&'a B::Matrix>,
    /// Applied last.
    pub post: Post,
}

/// A matmul of the backward pass: `weight gradient = gradient transposed x last rows of source`.
pub struct WeightTerm<'a, B: Backend> {
    /// The matrix that the weight was multiplied with.
    pub source: &'a B::Matrix,
    /// Overwritten.
    pub weight_gradient: &'a mut B::Matrix,
}

/// A term of the gradient of a layer's input.
pub enum InputTerm<'a, B: Backend> {
    /// `gradient x weight`, for the last rows.
    Rows {
        /// Gradient of the sum.
        gradient: &'a B::Matrix,
        /// The weight.
        weight: &'a B::Matrix,
    },
    /// The gradient itself, for the last rows.
    Identity {
        /// Gradient of the sum.
        gradient: &'a B::Matrix,
    },
    /// `gradient x weight`, distributed to the neighbours.
    Aggregate {
        /// As in the forward pass.
        graph: &'a B::Graph,
        /// Gradient of the sum.
        gradient: &'a B::Matrix,
        /// The weight.
        weight: &'a B::Matrix,
        /// As in the forward pass.
        aggregator: Aggregator,
        /// As kept by the forward pass.
        winners: Option<&'a B::Matrix>,
    },
}

/// Attention of GAT over the neighbours and the node itself. Neighbours equal to the node count once, as its
/// self-loop.
pub struct Attention<'a, B: Backend> {
    /// The adjacency.
    pub graph: &'a B::Graph,
    /// Number of heads.
    pub heads: usize,
    /// Whether heads are averaged; otherwise they are concatenated.
    pub average: bool,
    /// Projected input rows, with `heads` parts per row.
    pub hidden: &'a B::Matrix,
    /// Weights of a row as neighbour; one row.
    pub source_vector: &'a B::Matrix,
    /// Weights of a row as target; one row.
    pub target_vector: &'a B::Matrix,
    /// Slope of the leaky ReLU below 0.
    pub slope: f32,
    /// Dropout of attention weights.
    pub dropout: Option<Dropout>,
}

/// Values that attention keeps for its backward pass.
pub struct AttentionKept<B: Backend> {
    /// Softmax weights: one row per edge, then one row per output for its self-loop.
    pub weights: B::Matrix,
    /// Scores as neighbour, one row per input.
    pub source_scores: B::Matrix,
    /// Scores as target, one row per output.
    pub target_scores: B::Matrix,
}

/// Gradients of attention, all overwritten.
pub struct AttentionGradients<'a, B: Backend> {
    /// One row per input.
    pub hidden: &'a mut B::Matrix,
    /// One row.
    pub source_vector: &'a mut B::Matrix,
    /// One row.
    pub target_vector: &'a mut B::Matrix,
}

/// How rows of neighbours are added to sums, a part of them at a time.
#[derive(Debug)]
pub enum Accumulator<'a, M> {
    /// Added.
    Sum,
    /// Added, each times its factor: one row per input, one column.
    Scaled(&'a M),
    /// The larger number stays.
    Max,
}

impl<M> Clone for Accumulator<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Accumulator<'_, M> {}

/// Attention over a part of the neighbours.
pub struct AttentionPart<'a, M> {
    /// Projected rows of this part.
    pub hidden: &'a M,
    /// Their scores as neighbours, one column per head.
    pub source_scores: &'a M,
    /// The scores of all targets, one column per head.
    pub target_scores: &'a M,
    /// Slope of the leaky ReLU below 0.
    pub slope: f32,
}

/// Attention over the neighbours seen so far, one row per target.
pub struct AttentionSums<M> {
    /// Weighted sums, all heads side by side. Weights are relative to `most`.
    pub rows: M,
    /// The largest score so far, one column per head; minus infinity at first.
    pub most: M,
    /// The sum of weights so far, one column per head.
    pub total: M,
}

/// The statistics that rows or columns are normalised by.
pub enum Normaliser<'a, B: Backend> {
    /// Each row by its own mean and variance.
    Layer,
    /// Each column by its mean and variance in this batch, which update the running ones with `momentum`.
    Batch {
        /// One row.
        running_mean: &'a mut B::Matrix,
        /// One row.
        running_variance: &'a mut B::Matrix,
        /// Weight of this batch.
        momentum: f32,
    },
    /// Each column by the running mean and variance.
    Running {
        /// One row.
        running_mean: &'a B::Matrix,
        /// One row.
        running_variance: &'a B::Matrix,
    },
}

/// `output = post(normalised x scale + shift)`.
pub struct Normalise<'a, B: Backend> {
    /// The statistics.
    pub by: Normaliser<'a, B>,
    /// Added to variances.
    pub epsilon: f32,
    /// One row.
    pub scale: &'a B::Matrix,
    /// One row.
    pub shift: &'a B::Matrix,
    /// Applied last.
    pub post: Post,
}

/// The backward pass of [`Normalise`].
pub struct NormaliseBackward<'a, B: Backend> {
    /// Whether rows were normalised, else columns.
    pub by_row: bool,
    /// As left by the forward pass.
    pub normalised: &'a B::Matrix,
    /// As left by the forward pass.
    pub deviations: &'a B::Matrix,
    /// One row.
    pub scale: &'a B::Matrix,
    /// Output of the forward pass.
    pub output: &'a B::Matrix,
    /// The `post` of the forward pass.
    pub post: Post,
    /// Overwritten.
    pub scale_gradient: &'a mut B::Matrix,
    /// Overwritten.
    pub shift_gradient: &'a mut B::Matrix,
}

/// The targets of a loss.
#[derive(Debug, Clone, Copy)]
pub enum Labels<'a> {
    /// One class per row: softmax cross-entropy.
    Classes(&'a [u32]),
    /// 0 or 1 for each column of each row, NaN if unknown: sigmoid cross-entropy.
    Binary(&'a [f32]),
    /// A number for each column of each row, NaN if unknown: mean squared error.
    Values(&'a [f32]),
}

/// The update rule of one parameter. The numbers that depend on the step are already computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Gradient descent; one state matrix if `momentum` is above 0.
    Sgd {
        /// Momentum.
        momentum: f32,
        /// Nesterov momentum.
        nesterov: bool,
    },
    /// Adam; two state matrices.
    Adam {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the denominator.
        epsilon: f32,
        /// 1 - beta1^step.
        correction1: f32,
        /// sqrt(1 - beta2^step).
        correction2_root: f32,
    },
    /// Adagrad; one state matrix.
    Adagrad {
        /// Added to the denominator.
        epsilon: f32,
    },
}

/// How to update a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// The rule.
    pub rule: Rule,
    /// Learning rate.
    pub rate: f32,
    /// If given, all gradients together are first scaled down to this norm.
    pub clip_norm: Option<f32>,
    /// Then each gradient is clipped to this absolute value; infinite for no limit.
    pub gradient_limit: f32,
    /// Added to the gradient, times the value.
    pub weight_decay: f32,
    /// The value is multiplied by this before the step (AdamW); else 1.
    pub shrink: f32,
}

/// A parameter to be updated.
pub struct Moved<'a, B: Backend> {
    /// The numbers.
    pub value: &'a mut B::Matrix,
    /// Their gradient.
    pub gradient: &'a B::Matrix,
    /// State of the rule.
    pub state: &'a mut [B::Matrix],
}

/// The math of a device. The results of every operation are bit-identical for any number of threads. Calls with shapes
/// that do not match are bugs and fail an assertion.
pub trait Backend: Device {
    /// Work of the host's threads so far, if it is counted.
    fn counted(&self) -> Option<CpuCounters> {
        None
    }
    /// Sets number `i` to a uniform random number between plus and minus `bound`, from word `i` of the key's stream.
    fn fill_uniform(&self, matrix: &mut Self::Matrix, key: Key, bound: f32);

    /// Matmuls, sums, activation and dropout of a layer.
    fn affine(&self, call: Affine<'_, Self>, output: &mut Self::Matrix);
    /// Converts the gradient of an output of [`Backend::affine`] into the gradient of its sum, in place, if `post`
    /// gives the output and the `post` of the forward pass. Computes the gradients of weights and bias from it.
    fn weight_gradients(
        &self,
        gradient: &mut Self::Matrix,
        post: Option<(&Self::Matrix, Post)>,
        terms: Vec<WeightTerm<'_, Self>>,
        bias_gradient: Option<&mut Self::Matrix>,
    );
    /// The gradient of an input, overwritten with the sum of the terms.
    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut Self::Matrix);

    /// Attention. The output has one row per output of the graph.
    fn attention(&self, call: &Attention<'_, Self>, output: &mut Self::Matrix) -> AttentionKept<Self>;
    /// Gradients of attention from the gradient of its output.
    fn attention_backward(
        &self,
        call: &Attention<'_, Self>,
        kept: &AttentionKept<Self>,
        gradient: &Self::Matrix,
        into: AttentionGradients<'_, Self>,
    );

    /// Adds the rows of a part of the neighbours to `sums`, which has one row per target, in the order of the
    /// neighbours. The result does not depend on how neighbours are cut into parts.
    fn accumulate(
        &self,
        graph: &Self::Graph,
        input: &Self::Matrix,
        by: Accumulator<'_, Self::Matrix>,
        sums: &mut Self::Matrix,
    );
    /// Multiplies each row by its factor: one row per row, one column.
    fn scale_rows(&self, factors: &Self::Matrix, rows: &mut Self::Matrix);
    /// Scores of rows: each head's part times that part of the vector.
    fn attention_scores(&self, rows: &Self::Matrix, vector: &Self::Matrix, heads: usize) -> Self::Matrix;
    /// Adds a part of the neighbours to attention, in their order, whatever the parts.
    fn attend_part(
        &self,
        graph: &Self::Graph,
        call: AttentionPart<'_, Self::Matrix>,
        sums: &mut AttentionSums<Self::Matrix>,
    );
    /// The result of attention after all parts. Heads are averaged or concatenated.
    fn attend_end(&self, sums: AttentionSums<Self::Matrix>, average: bool, output: &mut Self::Matrix);

    /// Normalises `values` in place and writes the scaled, shifted and activated result. Returns the reciprocal
    /// standard deviations, one per row or column.
    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut Self::Matrix,
        output: &mut Self::Matrix,
    ) -> Self::Matrix;
    /// Converts the gradient of the output into that of the input of the normalisation, in place.
    fn normalise_backward(&self, call: NormaliseBackward<'_, Self>, gradient: &mut Self::Matrix);

    /// The mean loss of `rows` of the logits (which may repeat), and its gradient, overwritten. Other rows get zeros.
    fn loss(
        &self,
        logits: &Self::Matrix,
        rows: &[u32],
        labels: Labels<'_>,
        gradient: &mut Self::Matrix,
    ) -> Result<Self::Number>;

    /// Updates parameters with their gradients. If `clip_norm` is given, returns the norm of all gradients before
    /// clipping. If the norm is infinite or NaN, no parameter is updated.
    fn update(&self, update: &Update, parameters: Vec<Moved<'_, Self>>) -> Result<Option<Self::Number>>;
}
