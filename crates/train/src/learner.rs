//! A model, its optimizer and the threads they compute with: one batch in, one loss out.

use crate::task::{BatchLabels, LabelKind, LabelledNodes};
use crate::{Result, RunConfig, TrainError};
use esker_nn::{
    Backend, CpuBackend, CpuGraph, CpuMatrix, Deferred, Kind, Lists, Model, Named, Optimizer, Shape,
};
use esker_sample::{LayerView, Sample};
use esker_strategies::{Batch, RowBuffer, RowMaker};
use esker_types::NodeId;
use rayon::ThreadPool;
use std::sync::Arc;

/// Rows in memory that the CPU trains on.
pub struct CpuRows(pub CpuMatrix);

impl RowBuffer for CpuRows {
    fn values_mut(&mut self) -> &mut [f32] {
        self.0.values_mut()
    }
}

/// A model that learns.
pub struct Learner {
    backend: CpuBackend,
    model: Model<CpuBackend>,
    optimizer: Optimizer<CpuBackend>,
    pool: Arc<ThreadPool>,
    kind: LabelKind,
    outputs: usize,
}

/// What a batch of evaluation gave: logits of the rows that have a label.
pub struct Judged {
    /// Row after row.
    pub logits: Vec<f32>,
    /// Their labels.
    pub labels: BatchLabels,
}

impl Learner {
    /// A model with fresh parameters.
    pub fn new(config: &RunConfig, inputs: usize, outputs: usize, kind: LabelKind) -> Result<Learner> {
        let backend = CpuBackend::new();
        let model = Model::new(&backend, &config.model, inputs, outputs, config.seed)?;
        let optimizer = Optimizer::new(&model, &config.optimizer)?;
        let threads = config.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| {
            TrainError::config(
                format!("{threads} threads could not be started: {error}"),
                "ask for fewer with --threads",
            )
        })?;
        Ok(Learner { backend, model, optimizer, pool: Arc::new(pool), kind, outputs })
    }

    /// Makes room for rows where the model reads them.
    pub fn row_maker(&self) -> RowMaker<CpuRows> {
        let backend = self.backend.clone();
        Arc::new(move |rows, columns| CpuRows(backend.matrix(rows, columns)))
    }

    /// Where it computes.
    pub fn backend(&self) -> &CpuBackend {
        &self.backend
    }

    /// The model.
    pub fn model(&self) -> &Model<CpuBackend> {
        &self.model
    }

    /// What labels mean, and how many columns logits have.
    pub fn task(&self) -> (LabelKind, usize) {
        (self.kind, self.outputs)
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Trains on a batch; returns its loss, or nothing when none of its seeds has a label.
    pub fn step(&mut self, batch: &Batch<CpuRows>, labels: &LabelledNodes, rate: f64) -> Result<Option<f64>> {
        let pool = self.pool.clone();
        pool.install(|| {
            let (rows, picked) = self.pick(&batch.sample, labels);
            if rows.is_empty() {
                return Ok(None);
            }
            let graphs = self.graphs(&batch.sample);
            let (input, step) = (&batch.rows.0, self.optimizer.steps());
            let activations = self.model.forward(&graphs, input, step);
            let (loss, gradient) = self.model.loss(activations.logits(), &rows, picked.as_labels())?;
            self.model.backward(&graphs, input, activations, gradient, false);
            self.optimizer.step(&mut self.model, rate)?;
            Ok(Some(loss.wait()?))
        })
    }

    /// Infers a batch and compares its seeds with their labels.
    pub fn judge(&self, batch: &Batch<CpuRows>, labels: &LabelledNodes) -> Result<Judged> {
        self.pool.install(|| {
            let (rows, picked) = self.pick(&batch.sample, labels);
            let logits = self.model.infer(&self.graphs(&batch.sample), &batch.rows.0);
            Ok(self.compare(&logits, &rows, picked))
        })
    }

    /// Infers a batch: its seeds, and their logits row after row.
    pub fn infer_seeds(&self, batch: &Batch<CpuRows>) -> (Vec<NodeId>, Vec<f32>) {
        let (nodes, rows) = seed_rows(&batch.sample);
        let picked = self.pool.install(|| {
            let logits = self.model.infer(&self.graphs(&batch.sample), &batch.rows.0);
            let mut picked = self.backend.matrix(rows.len(), logits.columns());
            self.backend.gather_rows(&logits, &rows, &mut picked);
            picked
        });
        (nodes, picked.values().to_vec())
    }

    /// Puts rows of logits beside their labels.
    pub fn compare(&self, logits: &CpuMatrix, rows: &[u32], labels: BatchLabels) -> Judged {
        let mut picked = self.backend.matrix(rows.len(), logits.columns());
        self.backend.gather_rows(logits, rows, &mut picked);
        Judged { logits: picked.values().to_vec(), labels }
    }

    /// One layer over the lists of a one-hop sample, for inference layer by layer.
    pub fn infer_layer(&self, layer: usize, sample: &Sample, input: &CpuMatrix) -> CpuMatrix {
        self.pool.install(|| {
            let graph = match sample.layers() {
                0 => self.no_lists(sample.node_ids.len()),
                _ => self.graph(&sample.layer(0)),
            };
            self.model.infer_layer(layer, &graph, input)
        })
    }

    /// Runs something with the learner's threads.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Parameters and running statistics.
    pub fn export_model(&self) -> Vec<Named> {
        self.model.export()
    }

    /// Steps and the optimizer's state.
    pub fn export_optimizer(&self) -> (u64, Vec<Named>) {
        self.optimizer.export(&self.model)
    }

    /// Takes up a model's parameters.
    pub fn load_model(&mut self, from: &[Named]) -> Result<()> {
        Ok(self.model.load(from)?)
    }

    /// Takes up an optimizer's state.
    pub fn load_optimizer(&mut self, steps: u64, from: &[Named]) -> Result<()> {
        Ok(self.optimizer.load(&self.model, steps, from)?)
    }

    /// Rows of the last layer's output that seeds with a label have, and their labels.
    fn pick(&self, sample: &Sample, labels: &LabelledNodes) -> (Vec<u32>, BatchLabels) {
        let (nodes, rows) = seed_rows(sample);
        labels.pick(self.kind, &nodes, &rows)
    }

    /// The lists of every layer.
    fn graphs(&self, sample: &Sample) -> Vec<CpuGraph> {
        let layers = self.model.layer_count();
        if self.model.config().kind == Kind::Mlp {
            return (0..layers).map(|_| self.no_lists(sample.node_ids.len())).collect();
        }
        (0..layers).map(|layer| self.graph(&sample.layer(layer))).collect()
    }

    fn graph(&self, view: &LayerView) -> CpuGraph {
        self.backend.graph(&Lists {
            inputs: view.inputs.len(),
            outputs: view.outputs.len(),
            nbr_offsets: view.nbr_offsets,
            nbrs: bytemuck::cast_slice(view.nbrs),
            base: view.inputs.start,
            input_degrees: view.input_degrees,
        })
    }

    /// Rows without neighbours.
    fn no_lists(&self, rows: usize) -> CpuGraph {
        let nbr_offsets = vec![0; rows + 1];
        self.backend.graph(&Lists {
            inputs: rows,
            outputs: rows,
            nbr_offsets: &nbr_offsets,
            nbrs: &[],
            base: 0,
            input_degrees: &[],
        })
    }
}

/// The seeds, and their rows in the last layer's output.
fn seed_rows(sample: &Sample) -> (Vec<NodeId>, Vec<u32>) {
    let first = match sample.layers() {
        0 => 0,
        layers => sample.layer(layers - 1).outputs.start,
    };
    let nodes = sample.seeds.iter().map(|seed| sample.node_ids[seed.index()]).collect();
    (nodes, sample.seeds.iter().map(|seed| seed.0 - first).collect())
}
