//! The five kinds of layers, each as matmuls over rows and aggregated rows. The last matmul of each layer also adds
//! the residual and applies the activation; the steps before it differ.

use crate::parameter::{Maker, Parameter};
use crate::*;
use esker_types::random::Key;

/// Slope of the leaky ReLU over attention scores, as in the paper.
pub(crate) const ATTENTION_SLOPE: f32 = 0.2;

/// A layer's parameters, by kind.
pub(crate) enum Convolution<B: Backend> {
    /// Node rows only.
    Linear { weight: Parameter<B>, bias: Parameter<B> },
    /// `aggregate(x) A + x S + b`.
    Sage { neighbours: Parameter<B>, bias: Parameter<B>, own: Parameter<B>, aggregator: Aggregator },
    /// `normalised sum(x) W + b`.
    Gcn { weight: Parameter<B>, bias: Parameter<B>, aggregator: Aggregator },
    /// `relu((sum + (1 + epsilon) x) F + f) S + s`.
    Gin { first: Affinity<B>, second: Affinity<B>, aggregator: Aggregator },
    /// `attention(drop(x W)) + b`.
    Gat {
        weight: Parameter<B>,
        source: Parameter<B>,
        target: Parameter<B>,
        bias: Parameter<B>,
        heads: usize,
        average: bool,
        dropout: f32,
        projected_dropout: f32,
    },
}

/// A weight and its bias.
pub(crate) struct Affinity<B: Backend> {
    weight: Parameter<B>,
    bias: Parameter<B>,
}

/// The residual that is added to a layer's sum.
pub(crate) enum Residual<B: Backend> {
    None,
    Identity,
    Weight(Parameter<B>),
}

/// Values that a forward pass keeps for its backward pass.
pub(crate) enum Kept<B: Backend> {
    Nothing,
    Aggregated { rows: B::Matrix, winners: Option<B::Matrix> },
    Gin { rows: B::Matrix, hidden: B::Matrix },
    Gat { hidden: B::Matrix, attention: AttentionKept<B> },
}

/// Arguments of every pass over a layer.
pub(crate) struct Call<'a, B: Backend> {
    pub backend: &'a B,
    pub graph: &'a B::Graph,
    pub input: &'a B::Matrix,
    /// The source of dropout masks in training.
    pub key: Option<Key>,
    /// Whether the adjacency has all neighbours. Then degrees are those of the whole graph, whatever training uses.
    pub whole: bool,
}

impl<B: Backend> Convolution<B> {
    /// New parameters of layer `layer`.
    pub fn new(
        config: &ModelConfig,
        layer: usize,
        (input, output): (usize, usize),
        maker: &mut Maker<'_, B>,
    ) -> Self {
        match config.kind {
            Kind::Mlp => Convolution::Linear {
                weight: maker.linear("weight", output, input),
                bias: maker.linear_bias("bias", output, input),
            },
            Kind::Sage => Convolution::Sage {
                neighbours: maker.linear("neighbours.weight", output, input),
                bias: maker.linear_bias("neighbours.bias", output, input),
                own: maker.linear("self.weight", output, input),
                aggregator: match config.aggregator {
                    NeighbourAggregator::Mean => Aggregator::Mean,
                    NeighbourAggregator::Max => Aggregator::Max,
                    NeighbourAggregator::Sum => Aggregator::Sum,
                },
            },
            Kind::Gcn => Convolution::Gcn {
                weight: maker.glorot("weight", output, input),
                bias: maker.constant("bias", output, 0.0),
                aggregator: Aggregator::Gcn(config.gcn_degree),
            },
            Kind::Gin => Convolution::Gin {
                first: Affinity {
                    weight: maker.linear("first.weight", output, input),
                    bias: maker.linear_bias("first.bias", output, input),
                },
                second: Affinity {
                    weight: maker.linear("second.weight", output, output),
                    bias: maker.linear_bias("second.bias", output, output),
                },
                aggregator: Aggregator::SumWithSelf(1.0 + config.gin_epsilon),
            },
            Kind::Gat => {
                let average = layer + 1 == config.layers || config.head_merge == HeadMerge::Average;
                let last = layer + 1 == config.layers;
                let heads = config.output_heads.filter(|_| last).unwrap_or(config.heads);
                let columns = if average { output * heads } else { output };
                // Glorot over one head's columns and the heads, like the initial vectors of PyG's GATConv.
                let bound = (6.0 / (heads + columns / heads) as f32).sqrt();
                Convolution::Gat {
                    weight: maker.glorot("weight", columns, input),
                    source: maker.uniform("source", 1, columns, bound),
                    target: maker.uniform("target", 1, columns, bound),
                    bias: maker.constant("bias", output, 0.0),
                    heads,
                    average,
                    dropout: config.attention_dropout,
                    projected_dropout: config.projected_dropout,
                }
            }
        }
    }

    /// Its parameters, in the order of their names in a checkpoint.
    pub fn parameters(&self) -> Vec<&Parameter<B>> {
        match self {
            Convolution::Linear { weight, bias } | Convolution::Gcn { weight, bias, .. } => {
                vec![weight, bias]
            }
            Convolution::Sage { neighbours, bias, own, .. } => vec![neighbours, bias, own],
            Convolution::Gin { first, second, .. } => {
                vec![&first.weight, &first.bias, &second.weight, &second.bias]
            }
            Convolution::Gat { weight, source, target, bias, .. } => vec![weight, source, target, bias],
        }
    }

    /// The same, mutable.
    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        match self {
            Convolution::Linear { weight, bias } | Convolution::Gcn { weight, bias, .. } => {
                vec![weight, bias]
            }
            Convolution::Sage { neighbours, bias, own, .. } => vec![neighbours, bias, own],
            Convolution::Gin { first, second, .. } => {
                vec![&mut first.weight, &mut first.bias, &mut second.weight, &mut second.bias]
            }
            Convolution::Gat { weight, source, target, bias, .. } => vec![weight, source, target, bias],
        }
    }

    /// Writes `post(convolution + residual)`. Keeps the values for a backward pass if `keep`.
    pub fn forward(
        &self,
        call: &Call<'_, B>,
        residual: &Residual<B>,
        post: Post,
        keep: bool,
        output: &mut B::Matrix,
    ) -> Kept<B> {
        let (backend, graph, input) = (call.backend, call.graph, call.input);
        let (outputs, depth) = (graph.outputs(), input.columns());
        let keeper = |requested: bool| (keep && requested).then(|| backend.matrix(outputs, depth));
        match self {
            Convolution::Linear { weight, bias } => {
                let terms = vec![rows_term(input, weight)];
                close((backend, input), residual, post, terms, false, bias, output);
                Kept::Nothing
            }
            Convolution::Sage { neighbours, bias, own, aggregator } => {
                let (mut rows, mut winners) = (keeper(true), keeper(*aggregator == Aggregator::Max));
                let terms = vec![
                    aggregate_term(call, *aggregator, rows.as_mut(), winners.as_mut(), neighbours),
                    rows_term(input, own),
                ];
                close((backend, input), residual, post, terms, false, bias, output);
                rows.map_or(Kept::Nothing, |rows| Kept::Aggregated { rows, winners })
            }
            Convolution::Gcn { weight, bias, aggregator } => {
                let mut rows = keeper(true);
                let aggregator = if call.whole { Aggregator::Gcn(Degree::Whole) } else { *aggregator };
                let terms = vec![aggregate_term(call, aggregator, rows.as_mut(), None, weight)];
                close((backend, input), residual, post, terms, false, bias, output);
                rows.map_or(Kept::Nothing, |rows| Kept::Aggregated { rows, winners: None })
            }
            Convolution::Gin { first, second, aggregator } => {
                let mut rows = keeper(true);
                let mut hidden = backend.matrix(outputs, first.weight.value.rows());
                let terms = vec![aggregate_term(call, *aggregator, rows.as_mut(), None, &first.weight)];
                let bias = Some(&first.bias.value);
                backend.affine(
                    Affine { terms, accumulate: false, bias, add: None, post: GIN_POST },
                    &mut hidden,
                );
                let terms = vec![rows_term(&hidden, &second.weight)];
                close((backend, input), residual, post, terms, false, &second.bias, output);
                rows.map_or(Kept::Nothing, |rows| Kept::Gin { rows, hidden })
            }
            Convolution::Gat { bias, .. } => {
                let hidden = self.project(backend, input, call.key);
                let attention = backend.attention(&self.attention(call, &hidden), output);
                close((backend, input), residual, post, Vec::new(), true, bias, output);
                if keep { Kept::Gat { hidden, attention } } else { Kept::Nothing }
            }
        }
    }

    /// Sets the gradients of all parameters from the gradient of the output, and returns that of the input if
    /// `needs_input_gradient`. `post` is given if the forward pass applied it in its last matmul.
    pub fn backward(
        &mut self,
        call: &Call<'_, B>,
        residual: &mut Residual<B>,
        kept: &Kept<B>,
        post: Option<(&B::Matrix, Post)>,
        mut gradient: B::Matrix,
        needs_input_gradient: bool,
    ) -> Option<B::Matrix> {
        let (backend, input) = (call.backend, call.input);
        let gradient = &mut gradient;
        match (&mut *self, kept) {
            (Convolution::Linear { weight, bias }, _) => {
                let terms = vec![WeightTerm { source: input, weight_gradient: &mut weight.gradient }];
                open(call, residual, post, terms, bias, gradient);
            }
            (Convolution::Sage { neighbours, bias, own, .. }, Kept::Aggregated { rows, .. }) => {
                let terms = vec![
                    WeightTerm { source: rows, weight_gradient: &mut neighbours.gradient },
                    WeightTerm { source: input, weight_gradient: &mut own.gradient },
                ];
                open(call, residual, post, terms, bias, gradient);
            }
            (Convolution::Gcn { weight, bias, .. }, Kept::Aggregated { rows, .. }) => {
                let terms = vec![WeightTerm { source: rows, weight_gradient: &mut weight.gradient }];
                open(call, residual, post, terms, bias, gradient);
            }
            (Convolution::Gin { second, .. }, Kept::Gin { hidden, .. }) => {
                let terms = vec![WeightTerm { source: hidden, weight_gradient: &mut second.weight.gradient }];
                open(call, residual, post, terms, &mut second.bias, gradient);
            }
            (Convolution::Gat { bias, .. }, Kept::Gat { .. }) => {
                open(call, residual, post, Vec::new(), bias, gradient);
            }
            _ => unreachable!("what was kept comes from this layer"),
        }
        let inner = self.inner_backward(call, kept, gradient);
        if !needs_input_gradient {
            return None;
        }
        let mut terms = self.input_terms(call, kept, gradient, inner.as_ref());
        match residual {
            Residual::None => {}
            Residual::Identity => terms.push(InputTerm::Identity { gradient }),
            Residual::Weight(weight) => terms.push(InputTerm::Rows { gradient, weight: &weight.value }),
        }
        let mut input_gradient = backend.matrix(input.rows(), input.columns());
        backend.input_gradient(&terms, &mut input_gradient);
        Some(input_gradient)
    }

    /// The backward pass of the part before the last matmul, for the kinds that have one: sets its parameters'
    /// gradients, and returns the gradient from which its input terms start.
    fn inner_backward(
        &mut self,
        call: &Call<'_, B>,
        kept: &Kept<B>,
        gradient: &B::Matrix,
    ) -> Option<B::Matrix> {
        let backend = call.backend;
        match (&mut *self, kept) {
            (Convolution::Gin { first, second, .. }, Kept::Gin { rows, hidden }) => {
                let mut inner = backend.matrix(hidden.rows(), hidden.columns());
                backend.input_gradient(
                    &[InputTerm::Rows { gradient, weight: &second.weight.value }],
                    &mut inner,
                );
                let terms = vec![WeightTerm { source: rows, weight_gradient: &mut first.weight.gradient }];
                let bias = Some(&mut first.bias.gradient);
                backend.weight_gradients(&mut inner, Some((hidden, GIN_POST)), terms, bias);
                Some(inner)
            }
            (Convolution::Gat { .. }, Kept::Gat { hidden, attention }) => {
                let mut inner = backend.matrix(hidden.rows(), hidden.columns());
                let mut vectors = [(); 2].map(|_| backend.matrix(1, hidden.columns()));
                let [source_vector, target_vector] = &mut vectors;
                let into = AttentionGradients { hidden: &mut inner, source_vector, target_vector };
                backend.attention_backward(&self.attention(call, hidden), attention, gradient, into);
                let post = self.projected_post(call.key);
                let post = (!post.is_none()).then_some((hidden, post));
                let Convolution::Gat { weight, source, target, .. } = self else { return None };
                [source.gradient, target.gradient] = vectors;
                let terms = vec![WeightTerm { source: call.input, weight_gradient: &mut weight.gradient }];
                backend.weight_gradients(&mut inner, post, terms, None);
                Some(inner)
            }
            _ => None,
        }
    }

    fn input_terms<'a>(
        &'a self,
        call: &Call<'a, B>,
        kept: &'a Kept<B>,
        gradient: &'a B::Matrix,
        inner: Option<&'a B::Matrix>,
    ) -> Vec<InputTerm<'a, B>> {
        let graph = call.graph;
        let aggregate = |gradient, weight: &'a Parameter<B>, aggregator, winners| InputTerm::Aggregate {
            graph,
            gradient,
            weight: &weight.value,
            aggregator,
            winners,
        };
        match (self, kept, inner) {
            (Convolution::Linear { weight, .. }, ..) => {
                vec![InputTerm::Rows { gradient, weight: &weight.value }]
            }
            (Convolution::Sage { neighbours, own, aggregator, .. }, Kept::Aggregated { winners, .. }, _) => {
                vec![
                    InputTerm::Rows { gradient, weight: &own.value },
                    aggregate(gradient, neighbours, *aggregator, winners.as_ref()),
                ]
            }
            (Convolution::Gcn { weight, aggregator, .. }, ..) => {
                vec![aggregate(gradient, weight, *aggregator, None)]
            }
            (Convolution::Gin { first, aggregator, .. }, _, Some(inner)) => {
                vec![aggregate(inner, &first.weight, *aggregator, None)]
            }
            (Convolution::Gat { weight, .. }, _, Some(inner)) => {
                vec![InputTerm::Rows { gradient: inner, weight: &weight.value }]
            }
            _ => unreachable!("what was kept comes from this layer"),
        }
    }

    /// The projected rows of a GAT layer.
    pub fn project(&self, backend: &B, input: &B::Matrix, key: Option<Key>) -> B::Matrix {
        let Convolution::Gat { weight, .. } = self else { unreachable!("only GAT projects first") };
        let mut hidden = backend.matrix(input.rows(), weight.value.rows());
        let terms = vec![rows_term(input, weight)];
        let post = self.projected_post(key);
        backend.affine(Affine { terms, accumulate: false, bias: None, add: None, post }, &mut hidden);
        hidden
    }

    /// Writes `post(convolution + residual)` from aggregated rows, which for GAT are the result of attention. `own` are
    /// the nodes' rows.
    pub fn apply(
        &self,
        backend: &B,
        own: &B::Matrix,
        aggregated: Option<B::Matrix>,
        residual: &Residual<B>,
        post: Post,
        output: &mut B::Matrix,
    ) {
        let at = (backend, own);
        match (self, aggregated) {
            (Convolution::Linear { weight, bias }, _) => {
                close(at, residual, post, vec![rows_term(own, weight)], false, bias, output);
            }
            (Convolution::Sage { neighbours, bias, own: weight, .. }, Some(rows)) => {
                let terms = vec![rows_term(&rows, neighbours), rows_term(own, weight)];
                close(at, residual, post, terms, false, bias, output);
            }
            (Convolution::Gcn { weight, bias, .. }, Some(rows)) => {
                close(at, residual, post, vec![rows_term(&rows, weight)], false, bias, output);
            }
            (Convolution::Gin { first, second, .. }, Some(rows)) => {
                let mut hidden = backend.matrix(rows.rows(), first.weight.value.rows());
                let (terms, bias) = (vec![rows_term(&rows, &first.weight)], Some(&first.bias.value));
                let affine = Affine { terms, accumulate: false, bias, add: None, post: GIN_POST };
                backend.affine(affine, &mut hidden);
                let terms = vec![rows_term(&hidden, &second.weight)];
                close(at, residual, post, terms, false, &second.bias, output);
            }
            (Convolution::Gat { bias, .. }, Some(attended)) => {
                *output = attended;
                close(at, residual, post, Vec::new(), true, bias, output);
            }
            (_, None) => unreachable!("layers with neighbours get aggregated rows"),
        }
    }

    /// Applied to the projected rows of a GAT layer before the attention.
    fn projected_post(&self, key: Option<Key>) -> Post {
        let Convolution::Gat { projected_dropout, .. } = self else {
            unreachable!("only GAT projects first")
        };
        let dropout = key.and_then(|key| Dropout::new(*projected_dropout, key.with(2)));
        Post { activation: Activation::Identity, dropout }
    }

    /// The attention of a GAT layer.
    fn attention<'a>(&'a self, call: &Call<'a, B>, hidden: &'a B::Matrix) -> Attention<'a, B> {
        let Convolution::Gat { source, target, heads, average, dropout, .. } = self else {
            unreachable!("only GAT attends")
        };
        Attention {
            graph: call.graph,
            heads: *heads,
            average: *average,
            hidden,
            source_vector: &source.value,
            target_vector: &target.value,
            slope: ATTENTION_SLOPE,
            dropout: call.key.and_then(|key| Dropout::new(*dropout, key.with(1))),
        }
    }
}

/// Between the two linear layers of GIN.
const GIN_POST: Post = Post { activation: Activation::Relu, dropout: None };

fn rows_term<'a, B: Backend>(input: &'a B::Matrix, weight: &'a Parameter<B>) -> Term<'a, B> {
    Term { source: TermRows::Rows(input), weight: &weight.value }
}

fn aggregate_term<'a, B: Backend>(
    call: &Call<'a, B>,
    aggregator: Aggregator,
    kept: Option<&'a mut B::Matrix>,
    winners: Option<&'a mut B::Matrix>,
    weight: &'a Parameter<B>,
) -> Term<'a, B> {
    let source = TermRows::Aggregate { graph: call.graph, input: call.input, aggregator, kept, winners };
    Term { source, weight: &weight.value }
}

/// The last matmul of a layer.
fn close<'a, B: Backend>(
    (backend, input): (&'a B, &'a B::Matrix),
    residual: &'a Residual<B>,
    post: Post,
    mut terms: Vec<Term<'a, B>>,
    accumulate: bool,
    bias: &'a Parameter<B>,
    output: &mut B::Matrix,
) {
    let add = match residual {
        Residual::None => None,
        Residual::Identity => Some(input),
        Residual::Weight(weight) => {
            terms.push(rows_term(input, weight));
            None
        }
    };
    backend.affine(Affine { terms, accumulate, bias: Some(&bias.value), add, post }, output);
}

/// The backward pass of `close`, up to the gradient of the sum.
fn open<'a, B: Backend>(
    call: &Call<'a, B>,
    residual: &'a mut Residual<B>,
    post: Option<(&B::Matrix, Post)>,
    mut terms: Vec<WeightTerm<'a, B>>,
    bias: &'a mut Parameter<B>,
    gradient: &mut B::Matrix,
) {
    if let Residual::Weight(weight) = residual {
        terms.push(WeightTerm { source: call.input, weight_gradient: &mut weight.gradient });
    }
    call.backend.weight_gradients(gradient, post, terms, Some(&mut bias.gradient));
}
