//! A model, its optimizer and the threads they compute with: one batch in, one loss out.

use crate::held::BackendHolder;
use crate::task::{BatchLabels, LabelKind, LabelledNodes};
use crate::{Result, RunConfig, StageTimes, Step, TrainError};
use esker_nn::{Backend, HostRows, Kind, Lists, Model, Named, Optimizer, Shape};
use esker_sample::{LayerView, Sample};
use esker_strategies::{Batch, RowBuffer, RowHolder, RowMaker};
use esker_types::NodeId;
use rayon::ThreadPool;
use std::sync::Arc;

/// Rows of a batch in host memory, where the processor that trains takes them from.
pub struct BatchRows<B: Backend>(pub B::Rows);

impl<B: Backend + 'static> RowBuffer for BatchRows<B> {
    fn values_mut(&mut self) -> &mut [f32] {
        self.0.values_mut()
    }
}

/// A model that learns.
pub struct Learner<B: Backend> {
    backend: B,
    model: Model<B>,
    optimizer: Optimizer<B>,
    pool: Arc<ThreadPool>,
    kind: LabelKind,
    inputs: usize,
    outputs: usize,
}

/// What a batch of evaluation gave: logits of the rows that have a label.
pub struct Judged {
    /// Row after row.
    pub logits: Vec<f32>,
    /// Their labels.
    pub labels: BatchLabels,
}

impl<B: Backend + Clone + 'static> Learner<B> {
    /// A model with fresh parameters.
    pub fn new(
        backend: B,
        config: &RunConfig,
        inputs: usize,
        outputs: usize,
        kind: LabelKind,
    ) -> Result<Learner<B>> {
        let model = Model::new(&backend, &config.model, inputs, outputs, config.seed)?;
        let optimizer = Optimizer::new(&model, &config.optimizer)?;
        let threads = config.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| {
            TrainError::config(
                format!("{threads} threads could not be started: {error}"),
                "ask for fewer with --threads",
            )
        })?;
        backend.check()?;
        Ok(Learner { backend, model, optimizer, pool: Arc::new(pool), kind, inputs, outputs })
    }

    /// Makes room for rows where the processor takes them from.
    pub fn row_maker(&self) -> RowMaker<BatchRows<B>> {
        let backend = self.backend.clone();
        Arc::new(move |rows, columns| BatchRows(backend.rows(rows, columns)))
    }

    /// Holds rows for all batches where the processor reads them best, up to so many bytes of them in its own memory.
    pub fn row_holder(&self, device_bytes: u64) -> Arc<dyn RowHolder<BatchRows<B>>> {
        Arc::new(BackendHolder { backend: self.backend.clone(), device_bytes })
    }

    /// Where it computes.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The model.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    /// What labels mean, and how many columns logits have.
    pub fn task(&self) -> (LabelKind, usize) {
        (self.kind, self.outputs)
    }

    /// What parts of a processor that works on its own did with their time so far.
    pub fn device_stages(&self) -> Vec<StageTimes> {
        let busy = self.backend.busy_seconds().into_iter();
        busy.map(|(name, busy)| StageTimes { name: name.to_string(), busy, ..StageTimes::default() })
            .collect()
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Trains on a batch, or begins to: the loss may come later.
    pub fn step(
        &mut self,
        mut batch: Batch<BatchRows<B>>,
        labels: &LabelledNodes,
        rate: f64,
    ) -> Result<Step<B>> {
        let pool = self.pool.clone();
        pool.install(move || {
            let (rows, picked) = self.pick(&batch.sample, labels);
            if rows.is_empty() {
                return Ok(Step { batch, rate, numbers: None });
            }
            let graphs = self.graphs(&batch.sample);
            let (input, step) = (self.land(&mut batch), self.optimizer.steps());
            let activations = self.model.forward(&graphs, &input, step);
            let (loss, gradient) = self.model.loss(activations.logits(), &rows, picked.as_labels())?;
            self.model.backward(&graphs, &input, activations, gradient, false);
            let length = self.optimizer.step(&mut self.model, rate)?;
            Ok(Step { batch, rate, numbers: Some((loss, length)) })
        })
    }

    /// Infers a batch and compares its seeds with their labels.
    pub fn judge(&self, mut batch: Batch<BatchRows<B>>, labels: &LabelledNodes) -> Result<Judged> {
        self.pool.install(move || {
            let (rows, picked) = self.pick(&batch.sample, labels);
            let logits = self.model.infer(&self.graphs(&batch.sample), &self.land(&mut batch));
            self.compare(&logits, &rows, picked)
        })
    }

    /// Infers a batch: its seeds, and their logits row after row.
    pub fn infer_seeds(&self, mut batch: Batch<BatchRows<B>>) -> Result<(Vec<NodeId>, Vec<f32>)> {
        self.pool.install(move || {
            let (nodes, rows) = seed_rows(&batch.sample);
            let logits = self.model.infer(&self.graphs(&batch.sample), &self.land(&mut batch));
            Ok((nodes, self.read_rows(&logits, &rows)?))
        })
    }

    /// Puts rows of logits beside their labels.
    pub fn compare(&self, logits: &B::Matrix, rows: &[u32], labels: BatchLabels) -> Result<Judged> {
        Ok(Judged { logits: self.read_rows(logits, rows)?, labels })
    }

    /// The numbers of a matrix from row `first` on.
    pub fn read(&self, matrix: &B::Matrix, first: usize, values: &mut [f32]) -> Result<()> {
        self.backend.read(matrix, first, values);
        Ok(self.backend.check()?)
    }

    fn read_rows(&self, matrix: &B::Matrix, rows: &[u32]) -> Result<Vec<f32>> {
        let mut picked = self.backend.matrix(rows.len(), matrix.columns());
        self.backend.gather_rows(matrix, rows, &mut picked);
        let mut values = vec![0.0; rows.len() * matrix.columns()];
        self.read(&picked, 0, &mut values)?;
        Ok(values)
    }

    /// Brings a batch's feature rows to the processor.
    pub(crate) fn land(&self, batch: &mut Batch<BatchRows<B>>) -> B::Matrix {
        self.backend.land(batch.take_rows().0, self.inputs)
    }

    /// One layer over the lists of a one-hop sample, for inference layer by layer.
    pub fn infer_layer(&self, layer: usize, sample: &Sample, input: &B::Matrix) -> B::Matrix {
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
    pub fn export_model(&self) -> Result<Vec<Named>> {
        let all = self.model.export();
        self.backend.check()?;
        Ok(all)
    }

    /// Steps and the optimizer's state.
    pub fn export_optimizer(&self) -> Result<(u64, Vec<Named>)> {
        let all = self.optimizer.export(&self.model);
        self.backend.check()?;
        Ok(all)
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
    fn graphs(&self, sample: &Sample) -> Vec<B::Graph> {
        let layers = self.model.layer_count();
        if self.model.config().kind == Kind::Mlp {
            return (0..layers).map(|_| self.no_lists(sample.node_ids.len())).collect();
        }
        (0..layers).map(|layer| self.graph(&sample.layer(layer))).collect()
    }

    fn graph(&self, view: &LayerView) -> B::Graph {
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
    fn no_lists(&self, rows: usize) -> B::Graph {
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
