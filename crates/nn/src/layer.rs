//! A layer: a convolution with residual, norm, activation and dropout.

use crate::convolution::{Call, Convolution, Kept, Residual};
use crate::parameter::{Maker, Parameter};
use crate::*;
use esker_types::random::Key;

/// Weight of a batch in the running statistics, and the epsilon added to variances: PyTorch's defaults.
const BATCH_MOMENTUM: f32 = 0.1;
const NORM_EPSILON: f32 = 1e-5;

/// One layer of a model.
pub(crate) struct Layer<B: Backend> {
    convolution: Convolution<B>,
    residual: Residual<B>,
    norm: Option<Norm<B>>,
    activation: Activation,
    dropout: f32,
    output_columns: usize,
}

struct Norm<B: Backend> {
    scale: Parameter<B>,
    shift: Parameter<B>,
    /// Mean and variance, for batch norm.
    running: Option<[Parameter<B>; 2]>,
}

/// A layer's output, and the values that its backward pass needs.
pub struct Saved<B: Backend> {
    /// The rows of the layer's outputs. Rows may be replaced before the next layer reads them, if their gradients are
    /// set to zero in the backward pass.
    pub output: B::Matrix,
    pub(crate) key: Option<Key>,
    post: Post,
    normalised: Option<(B::Matrix, B::Matrix)>,
    kept: Kept<B>,
    lengthened: Option<Lengthened<B>>,
}

/// What the next layer reads, if that is more than the layer's output: rows that are not computed, then the output.
struct Lengthened<B: Backend> {
    rows: B::Matrix,
    dropout: Option<Dropout>,
}

impl<B: Backend> Lengthened<B> {
    fn post(&self) -> Post {
        Post { activation: Activation::Identity, dropout: self.dropout }
    }
}

impl<B: Backend> Saved<B> {
    /// The rows that the next layer reads.
    pub(crate) fn read(&self) -> &B::Matrix {
        self.lengthened.as_ref().map_or(&self.output, |lengthened| &lengthened.rows)
    }

    pub(crate) fn read_mut(&mut self) -> &mut B::Matrix {
        self.lengthened.as_mut().map_or(&mut self.output, |lengthened| &mut lengthened.rows)
    }

    /// Makes room before the output for rows that are not computed, so that there are `rows` in all. They must be
    /// written before the next layer reads them. Dropout then follows for all of them.
    pub(crate) fn lengthen(&mut self, backend: &B, rows: usize) {
        let own = self.output.rows();
        if rows > own {
            let mut all = backend.matrix(rows, self.output.columns());
            backend.scatter_rows(Some(&self.output), &last_rows(rows, own), &mut all);
            self.lengthened = Some(Lengthened { rows: all, dropout: self.post.dropout.take() });
        }
    }

    /// Applies the dropout that was deferred.
    pub(crate) fn drop_out(&mut self, backend: &B) {
        match (&mut self.lengthened, self.post.dropout) {
            (Some(Lengthened { rows, dropout: Some(dropout) }), _) => {
                *rows = dropped(backend, rows, *dropout)
            }
            (None, Some(dropout)) => self.output = dropped(backend, &self.output, dropout),
            _ => {}
        }
    }

    /// The gradient of the output, from that of the rows that the next layer read.
    pub(crate) fn shorten(&self, backend: &B, mut gradient: B::Matrix) -> B::Matrix {
        let Some(lengthened) = &self.lengthened else { return gradient };
        if lengthened.dropout.is_some() {
            let post = Some((&lengthened.rows, lengthened.post()));
            backend.weight_gradients(&mut gradient, post, Vec::new(), None);
        }
        let own = self.output.rows();
        let mut of_output = backend.matrix(own, gradient.columns());
        backend.gather_rows(&gradient, &last_rows(gradient.rows(), own), &mut of_output);
        of_output
    }
}

/// The last `count` of `rows` rows.
fn last_rows(rows: usize, count: usize) -> Vec<u32> {
    ((rows - count) as u32..rows as u32).collect()
}

/// Rows with some numbers dropped.
pub(crate) fn dropped<B: Backend>(backend: &B, rows: &B::Matrix, dropout: Dropout) -> B::Matrix {
    let post = Post { activation: Activation::Identity, dropout: Some(dropout) };
    let mut out = backend.matrix(rows.rows(), rows.columns());
    let call = Affine { terms: Vec::new(), accumulate: false, bias: None, add: Some(rows), post };
    backend.affine(call, &mut out);
    out
}

impl<B: Backend> Layer<B> {
    pub fn new(
        config: &ModelConfig,
        layer: usize,
        widths: (usize, usize),
        maker: &mut Maker<'_, B>,
    ) -> Layer<B> {
        let (input, output) = widths;
        let last = layer + 1 == config.layers;
        let convolution = Convolution::new(config, layer, widths, maker);
        let residual = match config.residual {
            false => Residual::None,
            true if input == output => Residual::Identity,
            true => Residual::Weight(maker.linear("residual.weight", output, input)),
        };
        let norm = (!last && config.norm != NormKind::None).then(|| Norm {
            scale: maker.constant("norm.scale", output, 1.0),
            shift: maker.constant("norm.shift", output, 0.0),
            running: (config.norm == NormKind::Batch).then(|| {
                [
                    maker.constant("norm.running_mean", output, 0.0),
                    maker.constant("norm.running_variance", output, 1.0),
                ]
            }),
        });
        let (activation, dropout) =
            if last { (Activation::Identity, 0.0) } else { (config.activation, config.dropout) };
        Layer { convolution, residual, norm, activation, dropout, output_columns: output }
    }

    pub fn parameters(&self) -> Vec<&Parameter<B>> {
        let mut all = self.convolution.parameters();
        if let Residual::Weight(weight) = &self.residual {
            all.push(weight);
        }
        all.extend(self.norm.iter().flat_map(|norm| [&norm.scale, &norm.shift]));
        all
    }

    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        let mut all = self.convolution.parameters_mut();
        if let Residual::Weight(weight) = &mut self.residual {
            all.push(weight);
        }
        all.extend(self.norm.iter_mut().flat_map(|norm| [&mut norm.scale, &mut norm.shift]));
        all
    }

    /// Statistics that are in a checkpoint and that no optimizer updates.
    pub fn statistics(&self) -> impl Iterator<Item = &Parameter<B>> {
        self.norm.iter().filter_map(|norm| norm.running.as_ref()).flatten()
    }

    pub fn statistics_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        self.norm.iter_mut().filter_map(|norm| norm.running.as_mut()).flatten()
    }

    fn post(&self, call: &Call<'_, B>) -> Post {
        let dropout = call.key.and_then(|key| Dropout::new(self.dropout, key.with(0)));
        Post { activation: self.activation, dropout }
    }

    /// The forward pass of a training step. If dropout is deferred, [`Saved::drop_out`] must follow.
    pub fn forward(&mut self, call: &Call<'_, B>, dropout_later: bool) -> Saved<B> {
        let backend = call.backend;
        let post = self.post(call);
        let now = Post { dropout: post.dropout.filter(|_| !dropout_later), ..post };
        let mut output = backend.matrix(call.graph.outputs(), self.output_columns);
        let Some(norm) = &mut self.norm else {
            let kept = self.convolution.forward(call, &self.residual, now, true, &mut output);
            return Saved { output, key: call.key, post, normalised: None, kept, lengthened: None };
        };
        let mut values = backend.matrix(call.graph.outputs(), self.output_columns);
        let kept = self.convolution.forward(call, &self.residual, Post::NONE, true, &mut values);
        let by = match &mut norm.running {
            None => Normaliser::Layer,
            Some([mean, variance]) => Normaliser::Batch {
                running_mean: &mut mean.value,
                running_variance: &mut variance.value,
                momentum: BATCH_MOMENTUM,
            },
        };
        let (scale, shift) = (&norm.scale.value, &norm.shift.value);
        let normalise = Normalise { by, epsilon: NORM_EPSILON, scale, shift, post: now };
        let deviations = backend.normalise(normalise, &mut values, &mut output);
        let normalised = Some((values, deviations));
        Saved { output, key: call.key, post, normalised, kept, lengthened: None }
    }

    pub fn infer(&self, call: &Call<'_, B>) -> B::Matrix {
        self.infer_with(call.backend, call.graph.outputs(), self.post(call), |post, output| {
            self.convolution.forward(call, &self.residual, post, false, output);
        })
    }

    /// The same for `rows` nodes from aggregated rows, which for GAT are the result of attention; `None` for layers
    /// without neighbours. `own` are the nodes' rows; they may be missing if nothing reads them.
    pub fn infer_aggregated(
        &self,
        backend: &B,
        rows: usize,
        own: &B::Matrix,
        aggregated: Option<B::Matrix>,
    ) -> B::Matrix {
        let post = Post { activation: self.activation, dropout: None };
        self.infer_with(backend, rows, post, |post, output| {
            self.convolution.apply(backend, own, aggregated, &self.residual, post, output);
        })
    }

    /// The convolution, then the norm.
    fn infer_with(
        &self,
        backend: &B,
        rows: usize,
        post: Post,
        convolve: impl FnOnce(Post, &mut B::Matrix),
    ) -> B::Matrix {
        let mut output = backend.matrix(rows, self.output_columns);
        let Some(norm) = &self.norm else {
            convolve(post, &mut output);
            return output;
        };
        let mut values = backend.matrix(rows, self.output_columns);
        convolve(Post::NONE, &mut values);
        let by = match &norm.running {
            None => Normaliser::Layer,
            Some([mean, variance]) => {
                Normaliser::Running { running_mean: &mean.value, running_variance: &variance.value }
            }
        };
        let (scale, shift) = (&norm.scale.value, &norm.shift.value);
        let normalise = Normalise { by, epsilon: NORM_EPSILON, scale, shift, post };
        backend.normalise(normalise, &mut values, &mut output);
        output
    }

    /// Its convolution.
    pub fn convolution(&self) -> &Convolution<B> {
        &self.convolution
    }

    /// Whether a node's own row is added to the result.
    pub fn has_residual(&self) -> bool {
        !matches!(self.residual, Residual::None)
    }

    pub fn backward(
        &mut self,
        call: &Call<'_, B>,
        saved: Saved<B>,
        mut gradient: B::Matrix,
        needs_input_gradient: bool,
    ) -> Option<B::Matrix> {
        let mut post = (!saved.post.is_none()).then_some((&saved.output, saved.post));
        if let (Some(norm), Some((normalised, deviations))) = (&mut self.norm, &saved.normalised) {
            post = None;
            let back = NormaliseBackward {
                by_row: norm.running.is_none(),
                normalised,
                deviations,
                scale: &norm.scale.value,
                output: &saved.output,
                post: saved.post,
                scale_gradient: &mut norm.scale.gradient,
                shift_gradient: &mut norm.shift.gradient,
            };
            call.backend.normalise_backward(back, &mut gradient);
        }
        self.convolution.backward(call, &mut self.residual, &saved.kept, post, gradient, needs_input_gradient)
    }
}
