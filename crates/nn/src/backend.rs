//! What a device must compute for the layers: some dozen operations over matrices that live on it. Layer code holds no number
//! itself, so that a second device is a second implementation of [`Device`] and of this trait, and nothing else.

use crate::{CpuCounters, Degree, Dropout, Post, Result};
use esker_device::Device;
use esker_types::random::Key;

/// How a node's neighbours become one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregator {
    /// Mean of the neighbours; zeros without any.
    Mean,
    /// Sum of the neighbours.
    Sum,
    /// Largest of each column; zeros without neighbours. Of equals the first in the list gets the gradient.
    Max,
    /// Sum of the neighbours and this multiple of the node's own row (GIN).
    SumWithSelf(f32),
    /// Symmetric normalisation with self-loops (GCN). Degrees in the whole graph are [`Adjacency::input_degrees`](esker_device::Adjacency).
    /// By sampled degrees, rows without a list have only their self-loop, as under PyG's loaders with `trim_to_layer`.
    Gcn(Degree),
}

/// The rows that a matmul reads.
pub enum TermRows<'a, B: Backend> {
    /// The last rows of a matrix.
    Rows(&'a B::Matrix),
    /// Neighbours' rows brought together, one row an output; never stored as a matrix of neighbours.
    Aggregate {
        /// Who is whose neighbour.
        graph: &'a B::Graph,
        /// A row an input.
        input: &'a B::Matrix,
        /// How.
        aggregator: Aggregator,
        /// Where the aggregated rows go when a backward pass will want them.
        kept: Option<&'a mut B::Matrix>,
        /// For [`Aggregator::Max`]: the place in the list of each winner, as the bits of a u32.
        winners: Option<&'a mut B::Matrix>,
    },
}

/// One matmul of a sum.
pub struct Term<'a, B: Backend> {
    /// Its rows.
    pub source: TermRows<'a, B>,
    /// The weight, a row an output column, as in PyTorch.
    pub weight: &'a B::Matrix,
}

/// `output = post(sum of source x weight transposed + bias + last rows of `add`)`.
pub struct Affine<'a, B: Backend> {
    /// The matmuls; there may be none.
    pub terms: Vec<Term<'a, B>>,
    /// Whether the output already holds a part of the sum.
    pub accumulate: bool,
    /// Added to every row.
    pub bias: Option<&'a B::Matrix>,
    /// Its last rows are added (an identity residual).
    pub add: Option<&'a B::Matrix>,
    /// Applied in the end.
    pub post: Post,
}

/// A matmul of the backward pass: `weight gradient = gradient transposed x last rows of source`.
pub struct WeightTerm<'a, B: Backend> {
    /// What the weight was multiplied with.
    pub source: &'a B::Matrix,
    /// Overwritten.
    pub weight_gradient: &'a mut B::Matrix,
}

/// What the gradient of a layer's input is a sum of.
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
    /// `gradient x weight`, handed back to the neighbours.
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

/// Attention of GAT over the lists and each node itself; neighbours equal to the node count once, as its self-loop.
pub struct Attention<'a, B: Backend> {
    /// Who is whose neighbour.
    pub graph: &'a B::Graph,
    /// Heads.
    pub heads: usize,
    /// Heads are averaged; else laid side by side.
    pub average: bool,
    /// Projected input rows, `heads` parts each.
    pub hidden: &'a B::Matrix,
    /// Weighs a row as neighbour; one row.
    pub source_vector: &'a B::Matrix,
    /// Weighs a row as target; one row.
    pub target_vector: &'a B::Matrix,
    /// Slope of the leaky ReLU below 0.
    pub slope: f32,
    /// Dropout of attention weights.
    pub dropout: Option<Dropout>,
}

/// What attention keeps for its backward pass.
pub struct AttentionKept<B: Backend> {
    /// Softmax weights: a row an edge, then a row an output for its self-loop.
    pub weights: B::Matrix,
    /// Scores as neighbour, a row an input.
    pub source_scores: B::Matrix,
    /// Scores as target, a row an output.
    pub target_scores: B::Matrix,
}

/// Gradients of attention, all overwritten.
pub struct AttentionGradients<'a, B: Backend> {
    /// A row an input.
    pub hidden: &'a mut B::Matrix,
    /// One row.
    pub source_vector: &'a mut B::Matrix,
    /// One row.
    pub target_vector: &'a mut B::Matrix,
}

/// What rows or columns are normalised by.
pub enum Normaliser<'a, B: Backend> {
    /// Each row by its own mean and variance.
    Layer,
    /// Each column by its mean and variance in this batch, which move the running ones by `momentum`.
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
    /// By what.
    pub by: Normaliser<'a, B>,
    /// Added to variances.
    pub epsilon: f32,
    /// One row.
    pub scale: &'a B::Matrix,
    /// One row.
    pub shift: &'a B::Matrix,
    /// Applied in the end.
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
    /// What the forward pass wrote.
    pub output: &'a B::Matrix,
    /// What it applied.
    pub post: Post,
    /// Overwritten.
    pub scale_gradient: &'a mut B::Matrix,
    /// Overwritten.
    pub shift_gradient: &'a mut B::Matrix,
}

/// What logits are compared with.
#[derive(Debug, Clone, Copy)]
pub enum Labels<'a> {
    /// A class a row: softmax cross-entropy.
    Classes(&'a [u32]),
    /// 0 or 1 for each column of each row, NaN where unknown: sigmoid cross-entropy.
    Binary(&'a [f32]),
    /// A number for each column of each row, NaN where unknown: mean squared error.
    Values(&'a [f32]),
}

/// One step of one parameter; the numbers that depend on the step are already worked out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Gradient descent; one state matrix when `momentum` is above 0.
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

/// How a parameter moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// The rule.
    pub rule: Rule,
    /// Learning rate.
    pub rate: f32,
    /// All gradients together are shortened to this length first, where given.
    pub clip_norm: Option<f32>,
    /// Then each is cut to this size (clipping by value); infinite for no limit.
    pub gradient_limit: f32,
    /// Added to the gradient, times the value.
    pub weight_decay: f32,
    /// The value is multiplied by this before the step (AdamW); else 1.
    pub shrink: f32,
}

/// A parameter to be moved.
pub struct Moved<'a, B: Backend> {
    /// The numbers.
    pub value: &'a mut B::Matrix,
    /// By what they move.
    pub gradient: &'a B::Matrix,
    /// What the rule keeps.
    pub state: &'a mut [B::Matrix],
}

/// The math of a device. Every operation gives the same bits however many threads carry it out. Shapes that do not fit are bugs
/// of the caller and assert.
pub trait Backend: Device {
    /// What threads of the host have done so far, where that is counted.
    fn counted(&self) -> Option<CpuCounters> {
        None
    }
    /// Sets number `i` to one uniform between plus and minus `bound`, from word `i` of the key's stream.
    fn fill_uniform(&self, matrix: &mut Self::Matrix, key: Key, bound: f32);

    /// Products, sums, activation and dropout of a layer.
    fn affine(&self, call: Affine<'_, Self>, output: &mut Self::Matrix);
    /// Turns the gradient of an output of [`Backend::affine`] into the gradient of its sum (in place, where `post` gives what the
    /// forward pass wrote and applied), and computes from it the gradients of weights and bias.
    fn weight_gradients(
        &self,
        gradient: &mut Self::Matrix,
        post: Option<(&Self::Matrix, Post)>,
        terms: Vec<WeightTerm<'_, Self>>,
        bias_gradient: Option<&mut Self::Matrix>,
    );
    /// The gradient of an input, overwritten with the sum of the terms.
    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut Self::Matrix);

    /// Attention; the output has a row an output of the graph.
    fn attention(&self, call: &Attention<'_, Self>, output: &mut Self::Matrix) -> AttentionKept<Self>;
    /// Gradients of attention from the gradient of its output.
    fn attention_backward(
        &self,
        call: &Attention<'_, Self>,
        kept: &AttentionKept<Self>,
        gradient: &Self::Matrix,
        into: AttentionGradients<'_, Self>,
    );

    /// Normalises `values` in place and writes the scaled, shifted and activated result. Returns the reciprocal
    /// deviations, one a row or column.
    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut Self::Matrix,
        output: &mut Self::Matrix,
    ) -> Self::Matrix;
    /// Turns the gradient of the output into that of what was normalised, in place.
    fn normalise_backward(&self, call: NormaliseBackward<'_, Self>, gradient: &mut Self::Matrix);

    /// The mean loss of `rows` of the logits (which may repeat), and its gradient, overwritten; other rows get zeros.
    fn loss(
        &self,
        logits: &Self::Matrix,
        rows: &[u32],
        labels: Labels<'_>,
        gradient: &mut Self::Matrix,
    ) -> Result<Self::Number>;

    /// Moves parameters by their gradients. Returns the length of all gradients before clipping, where `clip_norm` asks for it;
    /// with a length that is infinite or no number nothing moves.
    fn update(&self, update: &Update, parameters: Vec<Moved<'_, Self>>) -> Result<Option<Self::Number>>;
}
