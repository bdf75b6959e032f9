//! A model, its objective, its optimizer and the threads they compute with: one batch in, one loss out, and the
//! feedback to the source.

use crate::inputs::InputMix;
use crate::metrics::Tally;
use crate::objective::{BatchTargets, Losses, Network, Objective, Picked};
use crate::task::SplitName;
use crate::{Result, RunConfig, StageTimes, Step, TrainError};
use esker_nn::{
    Adjacency, AdjacencyShape, Backend, Kind, Model, Named, Optimizer, Shape, export_parameters,
    load_parameters,
};
use esker_sample::{LayerView, Targets};
use esker_strategies::{Batch, Blocks, Feedback, FixedRows, InputTable, Pull, Push, Pushed, adjacency};
use esker_types::NodeId;
use rayon::ThreadPool;
use std::sync::Arc;

/// A model in training.
pub struct Learner<B: Backend> {
    backend: B,
    network: Network<B>,
    optimizer: Optimizer<B>,
    pool: Arc<ThreadPool>,
}

impl<B: Backend + Clone + 'static> Learner<B> {
    /// A model with new parameters, for feature rows of `features` columns. It computes with the threads of the run.
    pub fn new(
        backend: B,
        config: &RunConfig,
        features: usize,
        objective: Box<dyn Objective<B>>,
        pool: Arc<ThreadPool>,
    ) -> Result<Learner<B>> {
        let columns = config.input_columns(features);
        let model = Model::new(&backend, &config.model, columns, objective.outputs(), config.seed)?;
        let inputs = InputMix::new(&backend, config, features);
        let network = Network { model, inputs, objective };
        let optimizer = Optimizer::new(&network, &config.optimizer)?;
        backend.check()?;
        Ok(Learner { backend, network, optimizer, pool })
    }

    /// The backend it computes on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The model.
    pub fn model(&self) -> &Model<B> {
        &self.network.model
    }

    /// The objective.
    pub fn objective(&self) -> &dyn Objective<B> {
        &*self.network.objective
    }

    /// Times so far of the parts of an asynchronous device.
    pub fn device_stages(&self) -> Vec<StageTimes> {
        let busy = self.backend.busy_seconds().into_iter();
        busy.map(|(name, busy)| StageTimes { name: name.to_string(), busy, ..StageTimes::default() })
            .collect()
    }

    /// Turns logits into probabilities or values, in place, with the threads of the run. Returns classes, if there are
    /// any.
    pub fn predictions(&self, logits: &mut [f32]) -> Vec<u32> {
        let objective = self.objective();
        self.pool.install(|| objective.predictions(logits))
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Trains on a batch, or starts to: the loss may come later. The feedback must be applied before the next step. A
    /// batch without labels changes nothing, but still makes its exchange.
    pub fn step(&mut self, mut batch: Batch<B>, rate: f64) -> Result<(Step<B>, Feedback<B>)> {
        let threads = self.threads();
        on(threads.as_deref(), move || {
            let (seeds, rows) = batch.blocks.seeds();
            let of = BatchTargets { targets: &batch.targets, seeds: &seeds, rows: &rows };
            let picked = self.network.objective.pick(SplitName::Train, &of)?;
            let nodes = batch.blocks.nodes();
            let mut back = Feedback { at: batch.at, rate: None, pushed: Vec::new(), input_gradient: None };
            if picked.is_empty() && batch.exchange.is_none() {
                // A device that caches rows of this batch does so when it assembles them.
                if let Some(FixedRows::Cached(_)) = batch.input.fixed {
                    drop(self.network.inputs.rows(&self.backend, &mut batch.input));
                }
                return Ok((Step { batch, nodes, rate, numbers: None }, back));
            }
            let graphs = self.graphs(&mut batch.blocks);
            let slots = batch.input.live_slots().map(<[u32]>::to_vec);
            let mixed = self.network.inputs.rows(&self.backend, &mut batch.input);
            let (input, step) = (&mixed.rows, self.optimizer.steps());
            if graphs.is_empty() {
                let (losses, gradient) = self.pass(input, &picked, step)?;
                let gradient = self.network.inputs.backward(&self.backend, &mixed, gradient);
                let norm = self.optimizer.step(&mut self.network, rate)?;
                back.rate = Some(rate);
                back.input_gradient = Some(pushed(slots, gradient));
                return Ok((Step { batch, nodes, rate, numbers: Some((losses, norm)) }, back));
            }
            let exchanged = batch.exchange.layers();
            let (mut pushes, backend) = (std::mem::take(&mut batch.exchange.pushes), &self.backend);
            let pulls = &batch.exchange.pulls;
            let model = &mut self.network.model;
            let activations = model.forward_with(&graphs, input, step, &exchanged, |layer, hidden| {
                let pulled = pulls.iter().filter(|pull| pull.layer == layer);
                pulled.for_each(|pull| write_pulled(backend, pull, hidden));
                if let Some(at) = pushes.iter().position(|push| push.layer == layer) {
                    back.pushed.push(read_pushed(backend, pushes.swap_remove(at), hidden));
                }
            });
            if picked.is_empty() {
                self.backend.check()?;
                return Ok((Step { batch, nodes, rate, numbers: None }, back));
            }
            let Network { model, objective, .. } = &mut self.network;
            let (mut losses, mut gradient) = objective.loss(model, activations.logits(), &picked, step)?;
            objective.penalize(&picked, activations.logits(), &mut gradient, &mut losses)?;
            let requested = batch.exchange.input_gradient;
            let of_input =
                model.backward_with(&graphs, input, activations, gradient, requested, |layer, gradient| {
                    // Pulled rows were not computed, so no gradient flows through them.
                    let pulled = pulls.iter().filter(|pull| pull.layer == layer);
                    pulled.for_each(|pull| backend.scatter_rows(None, &pull.rows, gradient));
                });
            let inputs = &mut self.network.inputs;
            let of_input = of_input.map(|gradient| inputs.backward(&self.backend, &mixed, gradient));
            let norm = self.optimizer.step(&mut self.network, rate)?;
            back.rate = Some(rate);
            back.input_gradient = of_input.map(|rows| pushed(slots, rows));
            Ok((Step { batch, nodes, rate, numbers: Some((losses, norm)) }, back))
        })
    }

    /// A step of a model without layers: the objective reads the input rows. Returns the gradient of the input.
    fn pass(&mut self, input: &B::Matrix, picked: &Picked, step: u64) -> Result<(Losses<B>, B::Matrix)> {
        let Network { model, objective, .. } = &mut self.network;
        let dropped = model.drop_input(input, step);
        let output = dropped.as_ref().map_or(input, |(rows, _)| rows);
        let (mut losses, mut gradient) = objective.loss(model, output, picked, step)?;
        if let Some((rows, post)) = &dropped {
            self.backend.weight_gradients(&mut gradient, Some((rows, *post)), Vec::new(), None);
        }
        // Rows as they are stored, as kbc and LibKGE penalise embeddings.
        objective.penalize(picked, input, &mut gradient, &mut losses)?;
        Ok((losses, gradient))
    }

    /// Predicts a batch of a split and compares it with its labels.
    pub fn evaluate(&self, mut batch: Batch<B>, split: SplitName, tally: &mut Tally) -> Result<()> {
        on(self.threads().as_deref(), move || {
            let (seeds, rows) = batch.blocks.seeds();
            let graphs = self.graphs(&mut batch.blocks);
            let input = self.network.inputs.rows(&self.backend, &mut batch.input).rows;
            let logits = self.network.model.infer(&graphs, &input);
            let of = BatchTargets { targets: &batch.targets, seeds: &seeds, rows: &rows };
            self.compare(&logits, split, &of, tally)
        })
    }

    /// Compares logits of nodes with their labels.
    pub fn compare(
        &self,
        logits: &B::Matrix,
        split: SplitName,
        of: &BatchTargets<'_>,
        tally: &mut Tally,
    ) -> Result<()> {
        let Picked::Nodes { rows, labels } = self.network.objective.pick(split, of)? else {
            return Err(TrainError::LinkBatch);
        };
        tally.add(&self.read_rows(logits, &rows)?, &labels);
        Ok(())
    }

    /// The same for logits of nodes in order.
    pub fn compare_nodes(
        &self,
        logits: &B::Matrix,
        split: SplitName,
        nodes: &[NodeId],
        tally: &mut Tally,
    ) -> Result<()> {
        let rows: Vec<u32> = (0..nodes.len() as u32).collect();
        let of = BatchTargets { targets: &Targets::Nodes, seeds: nodes, rows: &rows };
        on(self.threads().as_deref(), || self.compare(logits, split, &of, tally))
    }

    /// Predicts a batch with the first `layers` layers. Returns its seed nodes and their rows, one after the other:
    /// logits, if these are all layers.
    pub fn infer_seeds(&self, mut batch: Batch<B>, layers: usize) -> Result<(Vec<NodeId>, Vec<f32>)> {
        on(self.threads().as_deref(), move || {
            let (nodes, mut rows) = batch.blocks.seeds();
            let graphs = self.graphs(&mut batch.blocks);
            let input = self.network.inputs.rows(&self.backend, &mut batch.input).rows;
            let output = self.network.model.infer_some(&graphs[..layers], &input);
            // Outputs of the last layer are the last outputs of every layer.
            let last = graphs.last().map_or(0, |graph| graph.outputs());
            let before = (output.rows() - last) as u32;
            rows.iter_mut().for_each(|row| *row += before);
            Ok((nodes, self.read_rows(&output, &rows)?))
        })
    }

    /// Reads the numbers of a matrix from row `first` on.
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

    /// Runs a computation on the device: with the threads of the run, if they compute.
    pub(crate) fn compute<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        on(self.threads().as_deref(), work)
    }

    /// The threads that compute. `None` if a device computes by itself: its caller must not wait for threads that fetch
    /// rows.
    fn threads(&self) -> Option<Arc<ThreadPool>> {
        self.backend.in_host_memory().then(|| self.pool.clone())
    }

    /// Runs something with the threads of the run.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// The rows of all nodes that the first layer reads, from what a source has.
    pub(crate) fn input_table(&self, table: InputTable) -> Result<InputTable> {
        self.network.inputs.table(&self.backend, table)
    }

    /// Parameters and running statistics of the model, and parameters of its input and of the objective.
    pub fn export_model(&self) -> Result<Vec<Named>> {
        let mut all = self.network.model.export();
        let inputs: Vec<_> = self.network.inputs.parameter().into_iter().collect();
        all.extend(export_parameters(&self.backend, &inputs));
        all.extend(export_parameters(&self.backend, &self.network.objective.parameters()));
        self.backend.check()?;
        Ok(all)
    }

    /// Steps and the optimizer's state.
    pub fn export_optimizer(&self) -> Result<(u64, Vec<Named>)> {
        let all = self.optimizer.export(&self.network);
        self.backend.check()?;
        Ok(all)
    }

    /// Loads a model's parameters.
    pub fn load_model(&mut self, from: &[Named]) -> Result<()> {
        self.network.model.load(from)?;
        let inputs = self.network.inputs.parameter_mut().into_iter().collect();
        load_parameters(&self.backend, from, inputs)?;
        Ok(load_parameters(&self.backend, from, self.network.objective.parameters_mut())?)
    }

    /// Loads an optimizer's state.
    pub fn load_optimizer(&mut self, steps: u64, from: &[Named]) -> Result<()> {
        Ok(self.optimizer.load(&self.network, steps, from)?)
    }

    /// The graph of every layer: uploaded, or already on the device.
    fn graphs(&self, blocks: &mut Blocks<B>) -> Vec<B::Graph> {
        let model = self.model();
        let layers = model.layer_count();
        match blocks {
            Blocks::Device(blocks) => std::mem::take(&mut blocks.graphs),
            blocks if model.config().kind == Kind::Mlp => {
                (0..layers).map(|_| self.without_neighbours(blocks.nodes() as usize)).collect()
            }
            Blocks::Staged(blocks) => {
                let staged = std::mem::take(&mut blocks.graphs).into_iter();
                staged.map(|graph| self.backend.upload_graph(graph)).collect()
            }
            Blocks::Host(sample) => (0..layers).map(|layer| self.graph(&sample.layer(layer))).collect(),
        }
    }

    fn graph(&self, view: &LayerView) -> B::Graph {
        self.backend.graph(&adjacency(view))
    }

    /// A graph of rows without neighbours.
    fn without_neighbours(&self, rows: usize) -> B::Graph {
        self.backend.graph(&Adjacency::without_neighbours(&Adjacency::no_offsets(rows)))
    }
}

/// Runs something with these threads, or on the calling thread.
fn on<R: Send>(threads: Option<&ThreadPool>, work: impl FnOnce() -> R + Send) -> R {
    match threads {
        Some(threads) => threads.install(work),
        None => work(),
    }
}

/// The gradient of the input: of live rows by slot, or of fixed rows by node.
fn pushed<B: Backend>(slots: Option<Vec<u32>>, rows: B::Matrix) -> Pushed<B> {
    let slots = slots.unwrap_or_else(|| (0..rows.rows() as u32).collect());
    Pushed { slots, rows }
}

/// Overwrites computed rows with pulled rows.
fn write_pulled<B: Backend>(backend: &B, pull: &Pull<B>, hidden: &mut B::Matrix) {
    let rows = pull.table.gather(backend, &pull.slots);
    backend.scatter_rows(Some(&rows), &pull.rows, hidden);
}

/// Copies the rows to be pushed.
fn read_pushed<B: Backend>(backend: &B, push: Push, hidden: &B::Matrix) -> Pushed<B> {
    let mut rows = backend.matrix(push.rows.len(), hidden.columns());
    backend.gather_rows(hidden, &push.rows, &mut rows);
    Pushed { slots: push.slots, rows }
}
