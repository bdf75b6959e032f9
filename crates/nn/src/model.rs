use crate::convolution::Call;
use crate::layer::{Layer, dropped};
use crate::parameter::{Maker, named, restore};
use crate::*;
use esker_types::random::Key;

/// The outputs of every layer in a training step, and the values that the backward pass needs.
pub struct Activations<B: Backend> {
    layers: Vec<Saved<B>>,
    /// The input after dropout, and the dropout.
    input: Option<(B::Matrix, Post)>,
}

impl<B: Backend> Activations<B> {
    /// The output of the last layer.
    pub fn logits(&self) -> &B::Matrix {
        &self.layers.last().expect("a model has at least one layer").output
    }
}

/// A stack of layers. Layer `l` of `L` reads graph `l`; the first graph is the largest.
pub struct Model<B: Backend> {
    backend: B,
    config: ModelConfig,
    key: Key,
    layers: Vec<Layer<B>>,
}

impl<B: Backend + Clone> Model<B> {
    /// A model with new parameters: a function of the configuration, the widths and the random seed.
    pub fn new(
        backend: &B,
        config: &ModelConfig,
        input_columns: usize,
        output_columns: usize,
        seed: u64,
    ) -> Result<Model<B>> {
        config.check(input_columns, output_columns)?;
        let key = Key::new(seed);
        let layers = (0..config.layers).map(|layer| {
            let widths = config.widths(layer, input_columns, output_columns);
            let prefix = format!("layers.{layer}.");
            let mut maker = Maker { backend, key: key.with(0).with(layer as u64), prefix, made: 0 };
            Layer::new(config, layer, widths, &mut maker)
        });
        Ok(Model {
            backend: backend.clone(),
            config: config.clone(),
            key: key.with(1),
            layers: layers.collect(),
        })
    }

    /// The configuration it was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Number of layers.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Host copies of all parameters and running statistics, for a checkpoint.
    pub fn export(&self) -> Vec<Named> {
        let statistics = self.layers.iter().flat_map(Layer::statistics);
        self.parameters()
            .into_iter()
            .chain(statistics)
            .map(|p| named(&self.backend, &p.name, &p.value))
            .collect()
    }

    /// Loads the result of `export`. Names and shapes must match this model.
    pub fn load(&mut self, from: &[Named]) -> Result<()> {
        let backend = self.backend.clone();
        for layer in &mut self.layers {
            for parameter in layer.parameters_mut() {
                restore(&backend, from, &parameter.name, &mut parameter.value)?;
            }
            for statistic in layer.statistics_mut() {
                restore(&backend, from, &statistic.name, &mut statistic.value)?;
            }
        }
        Ok(())
    }

    /// One layer of a training step. Its output may be read, and rows of it replaced, before the next layer.
    pub fn forward_layer(
        &mut self,
        layer: usize,
        graph: &B::Graph,
        input: &B::Matrix,
        step: u64,
    ) -> Saved<B> {
        self.forward_one(layer, graph, input, step, false)
    }

    fn forward_one(
        &mut self,
        layer: usize,
        graph: &B::Graph,
        input: &B::Matrix,
        step: u64,
        dropout_later: bool,
    ) -> Saved<B> {
        let key = Some(self.dropout_key(layer, step));
        let call = Call { backend: &self.backend, graph, input, key, whole: false };
        self.layers[layer].forward(&call, dropout_later)
    }

    /// The backward pass of `forward_layer`, with the same graph and input. Sets the layer's gradients from that of
    /// its output, and returns that of its input if `needs_input_gradient`. Skipping it for the first layer saves the most.
    pub fn backward_layer(
        &mut self,
        layer: usize,
        graph: &B::Graph,
        input: &B::Matrix,
        saved: Saved<B>,
        gradient: B::Matrix,
        needs_input_gradient: bool,
    ) -> Option<B::Matrix> {
        let call = Call { backend: &self.backend, graph, input, key: saved.key, whole: false };
        self.layers[layer].backward(&call, saved, gradient, needs_input_gradient)
    }

    /// A layer, for inference over a whole graph with neighbours that come in parts.
    pub fn whole_layer(&self, layer: usize) -> WholeLayer<'_, B> {
        WholeLayer { backend: &self.backend, layer: &self.layers[layer] }
    }

    /// One layer over an adjacency of all neighbours, without dropout and with running statistics, keeping nothing:
    /// for whole graphs, layer by layer. GCN normalises by whole-graph degrees here, which the adjacency must have.
    pub fn infer_layer(&self, layer: usize, graph: &B::Graph, input: &B::Matrix) -> B::Matrix {
        self.infer_one(layer, graph, input, true)
    }

    fn infer_one(&self, layer: usize, graph: &B::Graph, input: &B::Matrix, whole: bool) -> B::Matrix {
        self.layers[layer].infer(&Call { backend: &self.backend, graph, input, key: None, whole })
    }

    /// All layers of a training step.
    pub fn forward(&mut self, graphs: &[B::Graph], input: &B::Matrix, step: u64) -> Activations<B> {
        self.forward_with(graphs, input, step, &[], |_, _| {})
    }

    /// Like [`Model::forward`], with a callback. `between` is called for each layer in `exchanged` (never the first),
    /// with the layer's number and its input rows, after norm and activation and before dropout. It may copy or
    /// overwrite rows. If the layer reads more rows than the one before it writes, the first ones are not computed: it
    /// must write them.
    pub fn forward_with(
        &mut self,
        graphs: &[B::Graph],
        input: &B::Matrix,
        step: u64,
        exchanged: &[usize],
        mut between: impl FnMut(usize, &mut B::Matrix),
    ) -> Activations<B> {
        assert_eq!(graphs.len(), self.layers.len(), "a graph a layer");
        let dropped = self.drop_input(input, step);
        let input = dropped.as_ref().map_or(input, |(rows, _)| rows);
        let mut all: Vec<Saved<B>> = Vec::with_capacity(graphs.len());
        for (layer, graph) in graphs.iter().enumerate() {
            if let Some(before) = all.last_mut().filter(|_| exchanged.contains(&layer)) {
                before.lengthen(&self.backend, graph.inputs());
                between(layer, before.read_mut());
                before.drop_out(&self.backend);
            }
            let input = all.last().map_or(input, Saved::read);
            let saved = self.forward_one(layer, graph, input, step, exchanged.contains(&(layer + 1)));
            all.push(saved);
        }
        Activations { layers: all, input: dropped }
    }

    /// The input rows after dropout, if the configuration has input dropout. Without layers this is all of a step.
    pub fn drop_input(&self, input: &B::Matrix, step: u64) -> Option<(B::Matrix, Post)> {
        // Follows the last layer's key: no layer uses it.
        let key = self.dropout_key(self.layers.len(), step);
        let dropout = Dropout::new(self.config.input_dropout, key)?;
        let post = Post { activation: Activation::Identity, dropout: Some(dropout) };
        Some((dropped(&self.backend, input, dropout), post))
    }

    /// The backward pass of all layers. Sets every gradient from that of the logits, and returns that of the input if
    /// `needs_input_gradient`.
    pub fn backward(
        &mut self,
        graphs: &[B::Graph],
        input: &B::Matrix,
        activations: Activations<B>,
        logits_gradient: B::Matrix,
        needs_input_gradient: bool,
    ) -> Option<B::Matrix> {
        self.backward_with(graphs, input, activations, logits_gradient, needs_input_gradient, |_, _| {})
    }

    /// Like [`Model::backward`], with a callback. `between` is called with the number of each layer but the first, and
    /// with the gradient of the layer's input rows. It must zero the gradient of overwritten rows.
    pub fn backward_with(
        &mut self,
        graphs: &[B::Graph],
        input: &B::Matrix,
        activations: Activations<B>,
        logits_gradient: B::Matrix,
        needs_input_gradient: bool,
        mut between: impl FnMut(usize, &mut B::Matrix),
    ) -> Option<B::Matrix> {
        let Activations { layers: mut all, input: dropped } = activations;
        let input = dropped.as_ref().map_or(input, |(rows, _)| rows);
        let mut gradient = Some(logits_gradient);
        for layer in (0..self.layers.len()).rev() {
            let (Some(saved), Some(above)) = (all.pop(), gradient.take()) else {
                unreachable!("every layer but the first was asked for its input's gradient")
            };
            let input = all.last().map_or(input, Saved::read);
            let want = needs_input_gradient || layer > 0;
            gradient = self.backward_layer(layer, &graphs[layer], input, saved, above, want);
            if let Some(gradient) = gradient.as_mut().filter(|_| layer > 0) {
                between(layer, gradient);
            }
            if let Some(before) = all.last() {
                gradient = gradient.map(|gradient| before.shorten(&self.backend, gradient));
            }
        }
        if let (Some(gradient), Some((rows, post))) = (&mut gradient, &dropped) {
            self.backend.weight_gradients(gradient, Some((rows, *post)), Vec::new(), None);
        }
        gradient
    }

    /// All layers, without keeping anything.
    pub fn infer(&self, graphs: &[B::Graph], input: &B::Matrix) -> B::Matrix {
        assert_eq!(graphs.len(), self.layers.len(), "a graph a layer");
        self.infer_some(graphs, input)
    }

    /// As many layers as there are graphs, from the first on.
    pub fn infer_some(&self, graphs: &[B::Graph], input: &B::Matrix) -> B::Matrix {
        assert!(!graphs.is_empty() && graphs.len() <= self.layers.len(), "a graph a layer");
        let mut rows = self.infer_one(0, &graphs[0], input, false);
        for (layer, graph) in graphs.iter().enumerate().skip(1) {
            rows = self.infer_one(layer, graph, &rows, false);
        }
        rows
    }

    /// The mean loss of `rows` of the logits (which may repeat), and its gradient.
    pub fn loss(
        &self,
        logits: &B::Matrix,
        rows: &[u32],
        labels: Labels<'_>,
    ) -> Result<(B::Number, B::Matrix)> {
        let mut gradient = self.backend.matrix(logits.rows(), logits.columns());
        let loss = self.backend.loss(logits, rows, labels, &mut gradient)?;
        Ok((loss, gradient))
    }

    fn dropout_key(&self, layer: usize, step: u64) -> Key {
        self.key.with(step).with(layer as u64)
    }
}

impl<B: Backend + Clone> Trained<B> for Model<B> {
    fn backend(&self) -> &B {
        &self.backend
    }

    fn parameters(&self) -> Vec<&Parameter<B>> {
        self.layers.iter().flat_map(Layer::parameters).collect()
    }

    fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        self.layers.iter_mut().flat_map(Layer::parameters_mut).collect()
    }
}
