//! What a training step and an inference block take at most, found by running them on a backend that only counts: it
//! cannot fall out of step with the layers. Bytes are those of the CPU backend.

use crate::cpu::{CHUNK_ROWS, VECTOR_CHUNKS, group_count, packed_words, pooled_words};
use crate::*;
use esker_types::random::Key;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The size of a batch, or a bound on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepShape {
    /// Rows that layer `l` reads; the last entry is what the last layer writes.
    pub rows: Vec<usize>,
    /// Neighbours in the lists of layer `l`.
    pub edges: Vec<usize>,
    /// Rows that the loss reads.
    pub seeds: usize,
    /// Whether lists carry whole-graph degrees.
    pub degrees: bool,
    /// Whether the gradient of the input rows is asked for.
    pub input_gradient: bool,
    /// Threads that compute.
    pub threads: usize,
}

/// Bytes at most; what `gemm` packs (about 1 MiB a thread) comes on top.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBytes {
    /// Parameters and their gradients.
    pub model: u64,
    /// State of the optimizer.
    pub optimizer: u64,
    /// A training step: input rows, lists, activations, gradients.
    pub step: u64,
    /// Inference of one layer over a block of this shape, the layer that takes most: input rows, lists, output.
    pub inference: u64,
}

/// What training and inference on batches of this shape take at most.
pub fn memory_bytes(
    config: &ModelConfig,
    optimizer: &OptimizerConfig,
    input_columns: usize,
    output_columns: usize,
    shape: &StepShape,
) -> Result<MemoryBytes> {
    assert!(
        shape.rows.len() == config.layers + 1 && shape.edges.len() == config.layers,
        "a shape for each layer"
    );
    let counting = Counting { tally: Arc::default(), threads: shape.threads.max(1) };
    let mut model = Model::new(&counting, config, input_columns, output_columns, 0)?;
    let model_words = counting.used();
    let state = Optimizer::new(&model, optimizer)?;
    let optimizer_words = counting.used() - model_words;
    let resident = counting.used();

    let mut inference = 0;
    for layer in 0..config.layers {
        counting.restart();
        let input = counting.matrix(shape.rows[layer], config.widths(layer, input_columns, output_columns).0);
        model.infer_layer(layer, &counting.counted_graph(shape, layer), &input);
        inference = inference.max(counting.peak() - resident);
    }
    counting.restart();
    let input = counting.matrix(shape.rows[0], input_columns);
    let graphs: Vec<CountedGraph> =
        (0..config.layers).map(|layer| counting.counted_graph(shape, layer)).collect();
    let activations = model.forward(&graphs, &input, 0);
    let classes = vec![0; shape.seeds];
    let (_, gradient) = model.loss(activations.logits(), &classes, Labels::Classes(&classes))?;
    model.backward(&graphs, &input, activations, gradient, shape.input_gradient);
    let step = counting.peak() - resident;
    drop(state);
    // The pool may hold a quarter more than is in use.
    let bytes = |words: usize| (words + words / 4) as u64 * 4;
    Ok(MemoryBytes {
        model: bytes(model_words),
        optimizer: bytes(optimizer_words),
        step: bytes(step),
        inference: bytes(inference),
    })
}

/// Counts the words that the CPU backend would hold.
#[derive(Clone)]
struct Counting {
    tally: Arc<Mutex<Tally>>,
    threads: usize,
}

#[derive(Default)]
struct Tally {
    used: usize,
    peak: usize,
}

/// Words in use until dropped.
struct Held {
    words: usize,
    tally: Arc<Mutex<Tally>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).used -= self.words;
    }
}

struct CountedMatrix {
    rows: usize,
    columns: usize,
    _held: Held,
}

impl Shape for CountedMatrix {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }
}

struct CountedGraph {
    inputs: usize,
    outputs: usize,
    edges: usize,
    _held: Vec<Held>,
    transposed: OnceLock<Vec<Held>>,
    scales: OnceLock<Held>,
}

impl ListShape for CountedGraph {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }
}

impl Counting {
    fn hold(&self, words: usize) -> Held {
        let words = pooled_words(words);
        let mut tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        tally.used += words;
        tally.peak = tally.peak.max(tally.used);
        Held { words, tally: self.tally.clone() }
    }

    fn used(&self) -> usize {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).used
    }

    fn peak(&self) -> usize {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).peak
    }

    /// Forgets the peak so far.
    fn restart(&self) {
        let mut tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        tally.peak = tally.used;
    }

    fn counted_graph(&self, shape: &StepShape, layer: usize) -> CountedGraph {
        let (inputs, outputs, edges) = (shape.rows[layer], shape.rows[layer + 1], shape.edges[layer]);
        let mut held = vec![self.hold(outputs + 1), self.hold(edges)];
        held.extend(shape.degrees.then(|| self.hold(inputs)));
        let (transposed, scales) = (OnceLock::new(), OnceLock::new());
        CountedGraph { inputs, outputs, edges, _held: held, transposed, scales }
    }

    fn transpose(&self, graph: &CountedGraph) {
        graph.transposed.get_or_init(|| {
            vec![self.hold(graph.inputs + 1), self.hold(graph.edges), self.hold(graph.edges)]
        });
    }

    fn scale(&self, graph: &CountedGraph, aggregator: Aggregator) {
        if matches!(aggregator, Aggregator::GcnWhole | Aggregator::GcnSampled) {
            graph.scales.get_or_init(|| self.hold(graph.inputs));
        }
    }
}

impl HostRows for CountedMatrix {
    fn values_mut(&mut self) -> &mut [f32] {
        &mut []
    }
}

impl Backend for Counting {
    type Matrix = CountedMatrix;
    type Graph = CountedGraph;
    type Rows = CountedMatrix;
    type Number = Ready;

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn rows(&self, rows: usize, columns: usize) -> CountedMatrix {
        self.matrix(rows, columns)
    }

    fn land(&self, rows: CountedMatrix, _: usize) -> CountedMatrix {
        rows
    }

    fn matrix(&self, rows: usize, columns: usize) -> CountedMatrix {
        CountedMatrix { rows, columns, _held: self.hold(rows * columns) }
    }

    fn write(&self, _: &mut CountedMatrix, _: usize, _: &[f32]) {}
    fn read(&self, _: &CountedMatrix, _: usize, _: &mut [f32]) {}
    fn fill(&self, _: &mut CountedMatrix, _: f32) {}
    fn fill_uniform(&self, _: &mut CountedMatrix, _: Key, _: f32) {}
    fn gather_rows(&self, _: &CountedMatrix, _: &[u32], _: &mut CountedMatrix) {}
    fn scatter_rows(&self, _: Option<&CountedMatrix>, _: &[u32], _: &mut CountedMatrix) {}

    fn graph(&self, lists: &Lists<'_>) -> CountedGraph {
        let shape = StepShape {
            rows: vec![lists.inputs, lists.outputs],
            edges: vec![lists.edge_count()],
            seeds: 0,
            degrees: !lists.input_degrees.is_empty(),
            input_gradient: false,
            threads: self.threads,
        };
        self.counted_graph(&shape, 0)
    }

    fn affine(&self, call: Affine<'_, Self>, output: &mut CountedMatrix) {
        let mut scratch = Vec::new();
        for term in &call.terms {
            scratch.push(self.hold(packed_words(term.weight.columns, term.weight.rows)));
            if let Source::Aggregate { graph, aggregator, kept, .. } = &term.source {
                self.scale(graph, *aggregator);
                let chunks = self.threads.min(output.rows.div_ceil(CHUNK_ROWS));
                let rows = CHUNK_ROWS.min(output.rows);
                let chunks = if kept.is_some() { 0 } else { chunks };
                scratch.extend((0..chunks).map(|_| self.hold(rows * term.weight.columns)));
            }
        }
    }

    fn weight_gradients(
        &self,
        gradient: &mut CountedMatrix,
        _: Option<(&CountedMatrix, Post)>,
        terms: Vec<WeightTerm<'_, Self>>,
        bias: Option<&mut CountedMatrix>,
    ) {
        let size = |matrix: &CountedMatrix| matrix.rows * matrix.columns;
        let weights: usize = terms.iter().map(|term| size(term.weight_gradient)).sum();
        let total = weights + bias.map_or(0, |bias| size(bias));
        self.hold(group_count(gradient.rows, total) * total);
    }

    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut CountedMatrix) {
        let mut held = Vec::new();
        for term in terms {
            match term {
                InputTerm::Identity { .. } => {}
                InputTerm::Rows { weight, .. } => {
                    held.push(self.hold(packed_words(weight.rows, weight.columns)))
                }
                InputTerm::Aggregate { graph, gradient, weight, aggregator, .. } => {
                    self.transpose(graph);
                    self.scale(graph, *aggregator);
                    let _packed = self.hold(packed_words(weight.rows, weight.columns));
                    held.push(self.hold(gradient.rows * input_gradient.columns));
                }
            }
        }
    }

    fn attention(&self, call: &Attention<'_, Self>, _: &mut CountedMatrix) -> AttentionKept<Self> {
        AttentionKept {
            weights: self.matrix(call.graph.edges + call.graph.outputs, call.heads),
            source_scores: self.matrix(call.graph.inputs, call.heads),
            target_scores: self.matrix(call.graph.outputs, call.heads),
        }
    }

    fn attention_backward(
        &self,
        call: &Attention<'_, Self>,
        _: &AttentionKept<Self>,
        _: &CountedMatrix,
        _: AttentionGradients<'_, Self>,
    ) {
        let (graph, heads) = (call.graph, call.heads);
        self.transpose(graph);
        let rows = [graph.edges + graph.outputs, graph.outputs, graph.inputs];
        let _held = rows.map(|rows| self.hold(rows * heads));
        self.hold(VECTOR_CHUNKS * call.hidden.columns);
    }

    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut CountedMatrix,
        _: &mut CountedMatrix,
    ) -> CountedMatrix {
        match call.by {
            Normaliser::Layer => self.matrix(values.rows, 1),
            _ => self.matrix(1, values.columns),
        }
    }

    fn normalise_backward(&self, _: NormaliseBackward<'_, Self>, _: &mut CountedMatrix) {}

    fn loss(
        &self,
        logits: &CountedMatrix,
        rows: &[u32],
        _: Labels<'_>,
        _: &mut CountedMatrix,
    ) -> Result<Ready> {
        // The gradient of each row, and its loss in f64.
        let _held = [self.hold(rows.len() * logits.columns), self.hold(rows.len() * 2)];
        Ok(Ready(0.0))
    }

    fn update(&self, _: &Update, _: Vec<Moved<'_, Self>>) -> Result<Option<Ready>> {
        Ok(None)
    }

    fn peak_bytes(&self) -> u64 {
        self.peak() as u64 * 4
    }
}
