//! Upper bounds on the memory of a training step and of an inference block. They are found by running the real layers
//! on a backend that only counts, so they cannot diverge from the layers. Scratch memory of operations is counted as
//! in the CPU or the GPU backend.

use crate::cpu::{CHUNK_ROWS, VECTOR_CHUNKS, group_count, packed_words, pooled_words};
use crate::*;
use esker_types::random::Key;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The size of a batch, or a bound on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepShape {
    /// Rows that layer `l` reads; the last entry is the number of rows that the last layer writes.
    pub rows: Vec<usize>,
    /// Edges of layer `l`.
    pub edges: Vec<usize>,
    /// Rows that the loss reads.
    pub seeds: usize,
    /// Whether adjacencies have whole-graph degrees.
    pub degrees: bool,
    /// Whether the gradient of the input rows is needed.
    pub input_gradient: bool,
    /// Rows of layers' inputs that are replaced, at most one entry per layer.
    pub pulled: Vec<ExchangedRows>,
    /// Rows of layers' inputs that are copied, and stay until the step is over.
    pub pushed: Vec<ExchangedRows>,
    /// The device whose memory is counted.
    pub memory: MemoryOf,
}

/// Rows of a layer's input that a step exchanges with another component.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangedRows {
    /// The layer that reads them.
    pub layer: usize,
    /// Largest number of rows.
    pub rows: usize,
}

/// The device whose memory is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryOf {
    /// The host, with threads that compute.
    Host {
        /// Number of threads.
        threads: usize,
    },
    /// A GPU's own memory, by the precision of its matmuls.
    Device(Precision),
}

impl MemoryOf {
    /// Bytes of so many words in use. The pool of a GPU may be a quarter larger.
    pub(crate) fn pooled_bytes(self, words: usize) -> u64 {
        match self {
            MemoryOf::Host { .. } => words as u64 * 4,
            MemoryOf::Device(_) => (words + words / 4) as u64 * 4,
        }
    }
}

/// Upper bounds in bytes. The memory that `gemm` uses for packing (about 1 MiB per thread) is not included, nor is what the
/// host's pool of matrices has beyond those in use ([`Device::set_reuse_bytes`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBytes {
    /// Parameters and their gradients.
    pub model: u64,
    /// State of the optimizer.
    pub optimizer: u64,
    /// A training step: input rows, adjacency, activations, gradients.
    pub step: u64,
    /// Inference of one layer over a block of this shape, for the layer that takes most: input rows, adjacency,
    /// output.
    pub inference: u64,
    /// Inference of a batch through all layers: its rows, all adjacencies, the outputs of two layers.
    pub batch_inference: u64,
}

/// Largest memory of training and inference on batches of this shape.
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
    let counting = Counting { tally: Arc::default(), memory: shape.memory };
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
    drop(model.infer(&graphs, &input));
    let batch = counting.peak() - resident;
    one_step(&counting, &mut model, shape, &graphs, &input)?;
    let step = counting.peak() - resident;
    drop(state);
    let bytes = |words: usize| shape.memory.pooled_bytes(words);
    Ok(MemoryBytes {
        model: bytes(model_words),
        optimizer: bytes(optimizer_words),
        step: bytes(step),
        inference: bytes(inference),
        batch_inference: bytes(batch),
    })
}

/// A training step with its exchange.
fn one_step(
    counting: &Counting,
    model: &mut Model<Counting>,
    shape: &StepShape,
    graphs: &[CountedGraph],
    input: &CountedMatrix,
) -> Result<()> {
    let mut copies = Vec::new();
    let exchanged: Vec<usize> =
        shape.pulled.iter().chain(&shape.pushed).map(|exchanged| exchanged.layer).collect();
    let activations = model.forward_with(graphs, input, 0, &exchanged, |layer, hidden| {
        let of = |rows: &[ExchangedRows]| rows.iter().copied().find(|exchanged| exchanged.layer == layer);
        // The rows, and the number and slot of each.
        let copy = |rows: usize| [counting.matrix(rows, hidden.columns), counting.matrix(rows, 2)];
        if let Some(pulled) = of(&shape.pulled) {
            // Rows that are not computed are put before the others, in a copy of these, with the index of each.
            copies.push([counting.matrix(hidden.rows, hidden.columns), counting.matrix(hidden.rows, 1)]);
            drop(copy(pulled.rows));
        }
        copies.extend(of(&shape.pushed).map(|pushed| copy(pushed.rows)));
    });
    let classes = vec![0; shape.seeds];
    let (_, gradient) = model.loss(activations.logits(), &classes, Labels::Classes(&classes))?;
    let of_input = shape.input_gradient;
    model.backward_with(graphs, input, activations, gradient, of_input, |layer, gradient| {
        if shape.pulled.iter().any(|pulled| pulled.layer == layer) {
            drop([counting.matrix(gradient.rows, gradient.columns), counting.matrix(gradient.rows, 1)]);
        }
    });
    Ok(())
}

/// Counts the words that the CPU backend would use.
#[derive(Clone)]
struct Counting {
    tally: Arc<Mutex<WordTally>>,
    memory: MemoryOf,
}

#[derive(Default)]
struct WordTally {
    used: usize,
    peak: usize,
}

/// Words in use until dropped.
struct Held {
    words: usize,
    tally: Arc<Mutex<WordTally>>,
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

impl AdjacencyShape for CountedGraph {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }
}

impl Counting {
    fn hold(&self, words: usize) -> Held {
        let words = match self.memory {
            MemoryOf::Host { .. } => pooled_words(words),
            MemoryOf::Device(_) => esker_cuda::pooled_bytes(words * 4) / 4,
        };
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

    /// Resets the peak.
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
            if let MemoryOf::Device(_) = self.memory {
                // During the sort: owners, counts, and keys and values before and after a pass.
                let kept = [self.hold(graph.inputs + 1), self.hold(graph.edges)];
                let sorting = [graph.edges; 4].into_iter().chain([graph.edges / 16 + 128, graph.edges]);
                let mut sorting: Vec<Held> = sorting.map(|words| self.hold(words)).collect();
                let edges = sorting.swap_remove(0);
                return kept.into_iter().chain([edges]).collect();
            }
            vec![self.hold(graph.inputs + 1), self.hold(graph.edges), self.hold(graph.edges)]
        });
    }

    /// Scratch memory of a matmul of these two matrices, given by rows and columns.
    fn matmul(&self, factors: [(usize, usize); 2]) -> Vec<Held> {
        match self.memory {
            MemoryOf::Host { .. } => {
                let (rows, columns) = factors[1];
                vec![self.hold(packed_words(rows, columns))]
            }
            MemoryOf::Device(Precision::Bf16) => {
                factors.iter().map(|(rows, columns)| self.hold((rows * columns).div_ceil(2))).collect()
            }
            MemoryOf::Device(_) => Vec::new(),
        }
    }

    /// Scratch memory of column sums on a GPU: two 64-bit numbers in 256 parts, means and variances.
    fn column_sums(&self, columns: usize) -> Vec<Held> {
        match self.memory {
            MemoryOf::Host { .. } => Vec::new(),
            MemoryOf::Device(_) => {
                [1024 * columns, columns, columns].map(|words| self.hold(words)).into_iter().collect()
            }
        }
    }

    fn scale(&self, graph: &CountedGraph, aggregator: Aggregator) {
        if matches!(aggregator, Aggregator::Gcn(_)) {
            graph.scales.get_or_init(|| self.hold(graph.inputs));
        }
    }
}

impl HostRows for CountedMatrix {
    fn values_mut(&mut self) -> &mut [f32] {
        &mut []
    }
}

/// Stores of hidden rows are counted by their owner.
enum NoHidden {}

impl HiddenRows for NoHidden {
    type Matrix = CountedMatrix;

    fn shape(&self) -> HiddenShape {
        match *self {}
    }

    fn pull(&self, _: &[u32], _: &mut CountedMatrix) {
        match *self {}
    }

    fn push(&mut self, _: &CountedMatrix, _: &[u32], _: &[bool]) {
        match *self {}
    }

    fn drift(&self) -> Result<f64, DeviceError> {
        match *self {}
    }

    fn read(&self, _: u64, _: &mut [u8]) {
        match *self {}
    }

    fn write(&mut self, _: u64, _: &[u8]) {
        match *self {}
    }
}

impl Device for Counting {
    type Matrix = CountedMatrix;
    type Graph = CountedGraph;
    type StagedGraph = CountedGraph;
    type HostRows = CountedMatrix;
    type Cache = Infallible;
    type Hidden = NoHidden;
    type Number = Ready;
    const STEPS_IN_FLIGHT: usize = 0;

    fn in_host_memory(&self) -> bool {
        true
    }

    fn peak_bytes(&self) -> u64 {
        self.peak() as u64 * 4
    }

    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn host_rows(&self, rows: usize, columns: usize) -> CountedMatrix {
        self.matrix(rows, columns)
    }

    fn upload(&self, rows: CountedMatrix, _: usize) -> CountedMatrix {
        rows
    }

    fn assemble(&self, batch: Infallible, _: usize) -> CountedMatrix {
        match batch {}
    }

    fn hidden_rows(&self, _: HiddenShape) -> Result<NoHidden, DeviceError> {
        unreachable!("a step is counted, and not what it exchanges with")
    }

    fn matrix(&self, rows: usize, columns: usize) -> CountedMatrix {
        CountedMatrix { rows, columns, _held: self.hold(rows * columns) }
    }

    fn write(&self, _: &mut CountedMatrix, _: usize, _: &[f32]) {}
    fn read(&self, _: &CountedMatrix, _: usize, _: &mut [f32]) {}
    fn fill(&self, _: &mut CountedMatrix, _: f32) {}
    fn gather_rows(&self, _: &CountedMatrix, _: &[u32], _: &mut CountedMatrix) {}
    fn scatter_rows(&self, _: Option<&CountedMatrix>, _: &[u32], _: &mut CountedMatrix) {}
    fn add_rows(&self, _: &CountedMatrix, _: &[u32], _: f32, _: &mut CountedMatrix) {}
    fn copy_columns(&self, _: &CountedMatrix, _: usize, _: &mut CountedMatrix, _: usize, _: usize) {}

    fn stage_graph(&self, lists: &Adjacency<'_>) -> CountedGraph {
        let shape = StepShape {
            rows: vec![lists.inputs, lists.outputs],
            edges: vec![lists.edge_count()],
            seeds: 0,
            degrees: !lists.input_degrees.is_empty(),
            input_gradient: false,
            pulled: Vec::new(),
            pushed: Vec::new(),
            memory: self.memory,
        };
        self.counted_graph(&shape, 0)
    }

    fn upload_graph(&self, staged: CountedGraph) -> CountedGraph {
        staged
    }

    fn part_graph(&self, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> CountedGraph {
        self.graph(&Adjacency::part(inputs, nbr_offsets, nbrs))
    }
}

impl Backend for Counting {
    fn fill_uniform(&self, _: &mut CountedMatrix, _: Key, _: f32) {}

    fn affine(&self, call: Affine<'_, Self>, output: &mut CountedMatrix) {
        let mut scratch = Vec::new();
        for term in &call.terms {
            let (rows, depth) = (output.rows, term.weight.columns);
            if let TermRows::Aggregate { graph, aggregator, kept, .. } = &term.source {
                self.scale(graph, *aggregator);
                let (chunks, rows) = match self.memory {
                    _ if kept.is_some() => (0, 0),
                    MemoryOf::Host { threads } => {
                        (threads.max(1).min(rows.div_ceil(CHUNK_ROWS)), CHUNK_ROWS.min(rows))
                    }
                    MemoryOf::Device(_) => (1, rows),
                };
                scratch.extend((0..chunks).map(|_| self.hold(rows * depth)));
            }
            // The CPU keeps the packed weights of all terms; the GPU needs scratch memory for one matmul at a time.
            let held = self.matmul([(output.rows, depth), (depth, term.weight.rows)]);
            scratch.extend(held.into_iter().filter(|_| matches!(self.memory, MemoryOf::Host { .. })));
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
        if let MemoryOf::Device(_) = self.memory {
            // Column sums in parts, and then one matmul after the other.
            self.hold(gradient.rows.div_ceil(32) * gradient.columns);
            for term in &terms {
                let shape = |matrix: &CountedMatrix| (gradient.rows, matrix.columns);
                self.matmul([shape(gradient), shape(term.source)]);
            }
            return;
        }
        let weights: usize = terms.iter().map(|term| size(term.weight_gradient)).sum();
        let total = weights + bias.map_or(0, |bias| size(bias));
        self.hold(group_count(gradient.rows, total) * total);
    }

    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut CountedMatrix) {
        let on_host = matches!(self.memory, MemoryOf::Host { .. });
        let mut held = Vec::new();
        for term in terms {
            match term {
                InputTerm::Identity { .. } => {}
                InputTerm::Rows { gradient, weight } => {
                    let shapes = [(gradient.rows, weight.rows), (weight.rows, weight.columns)];
                    held.extend(self.matmul(shapes).into_iter().filter(|_| on_host));
                }
                InputTerm::Aggregate { graph, gradient, weight, aggregator, .. } => {
                    if on_host {
                        self.transpose(graph);
                    }
                    self.scale(graph, *aggregator);
                    let matmul = self.matmul([(gradient.rows, weight.rows), (weight.rows, weight.columns)]);
                    held.push(self.hold(gradient.rows * input_gradient.columns));
                    drop(matmul);
                    // A GPU transposes the adjacency after the matmul.
                    self.transpose(graph);
                }
            }
        }
    }

    fn attention(&self, call: &Attention<'_, Self>, output: &mut CountedMatrix) -> AttentionKept<Self> {
        let weights = (call.graph.edges + call.graph.outputs) * call.heads;
        let _scratch = match self.memory {
            MemoryOf::Host { .. } => Vec::new(),
            // Weights after dropout, and concatenated heads before they are averaged.
            MemoryOf::Device(_) => {
                let averaged = if call.average { output.rows * call.hidden.columns } else { 0 };
                vec![self.hold(weights), self.hold(averaged)]
            }
        };
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
        let on_host = matches!(self.memory, MemoryOf::Host { .. });
        if on_host {
            self.transpose(graph);
        }
        let rows = [graph.edges + graph.outputs, graph.outputs, graph.inputs];
        let _held = rows.map(|rows| self.hold(rows * heads));
        if !on_host {
            let spread = if call.average { graph.outputs * call.hidden.columns } else { 0 };
            let _more = [self.hold((graph.edges + graph.outputs) * heads), self.hold(spread)];
            // The adjacency is transposed while all of these exist.
            self.transpose(graph);
            self.hold(2048 * call.hidden.columns);
            return;
        }
        self.hold(VECTOR_CHUNKS * call.hidden.columns);
    }

    fn accumulate(
        &self,
        _: &CountedGraph,
        _: &CountedMatrix,
        _: Accumulator<'_, CountedMatrix>,
        _: &mut CountedMatrix,
    ) {
    }

    fn scale_rows(&self, _: &CountedMatrix, _: &mut CountedMatrix) {}

    fn attention_scores(&self, rows: &CountedMatrix, _: &CountedMatrix, heads: usize) -> CountedMatrix {
        self.matrix(rows.rows, heads)
    }

    fn attend_part(
        &self,
        _: &CountedGraph,
        _: AttentionPart<'_, CountedMatrix>,
        _: &mut AttentionSums<CountedMatrix>,
    ) {
    }

    fn attend_end(&self, _: AttentionSums<CountedMatrix>, _: bool, _: &mut CountedMatrix) {}

    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut CountedMatrix,
        _: &mut CountedMatrix,
    ) -> CountedMatrix {
        let _scratch = self.column_sums(values.columns);
        match call.by {
            Normaliser::Layer => self.matrix(values.rows, 1),
            _ => self.matrix(1, values.columns),
        }
    }

    fn normalise_backward(&self, _: NormaliseBackward<'_, Self>, gradient: &mut CountedMatrix) {
        self.column_sums(gradient.columns);
    }

    fn loss(
        &self,
        logits: &CountedMatrix,
        rows: &[u32],
        _: Labels<'_>,
        _: &mut CountedMatrix,
    ) -> Result<Ready> {
        // The gradient of each row, and its loss in f64.
        let _held = [self.hold(rows.len() * logits.columns), self.hold(rows.len() * 2 + 2)];
        // Rows and labels to be uploaded to a GPU.
        let _labels =
            matches!(self.memory, MemoryOf::Device(_)).then(|| self.hold(rows.len() * (1 + logits.columns)));
        Ok(Ready(0.0))
    }

    fn update(&self, _: &Update, _: Vec<Moved<'_, Self>>) -> Result<Option<Ready>> {
        Ok(None)
    }
}
