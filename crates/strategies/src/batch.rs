//! What a source yields: a batch, which has everything that a step needs, and the feedback of the step. Buffers and the
//! permit return to their source when a batch is dropped, so that a source never exceeds its memory budget.

use crate::{Result, RunPosition};
use esker_device::{Adjacency, AdjacencyShape, BatchOf, Device, HiddenRows, Shape};
use esker_fetch::pipeline::{Permit, Recycled, StageTimes};
use esker_sample::{LayerView, Position, Sample, Targets};
use esker_types::{Dtype, NodeId};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A batch for training, evaluation or a loader.
pub struct Batch<D: Device> {
    /// Its position in the run.
    pub at: RunPosition,
    /// Its nodes and their neighbours.
    pub blocks: Blocks<D>,
    /// The input rows of its nodes.
    pub input: Input<D>,
    /// What it is trained or evaluated on.
    pub targets: Targets,
    /// What the step exchanges with stores.
    pub exchange: Exchange<D>,
    /// Its permit to be in flight.
    pub permit: Permit,
}

impl<D: Device> Batch<D> {
    /// A batch from a sample in host memory, without an exchange.
    pub fn of_sample(
        at: Position,
        sample: Recycled<Sample>,
        targets: Targets,
        input: Input<D>,
        permit: Permit,
    ) -> Batch<D> {
        let (blocks, exchange) = (Blocks::Host(sample), Exchange::none());
        Batch { at: at.into(), blocks, input, targets, exchange, permit }
    }
}

/// Nodes and neighbours of a batch.
pub enum Blocks<D: Device> {
    /// A sample in host memory.
    Host(Recycled<Sample>),
    /// The same, with its graphs ready to be uploaded.
    Staged(StagedBlocks<D>),
    /// Graphs that are on the device already, one per layer.
    Device(DeviceBlocks<D>),
}

/// A sample, and its graphs in memory that the device reads fastest.
pub struct StagedBlocks<D: Device> {
    /// The sample.
    pub sample: Recycled<Sample>,
    /// One graph per layer, the first layer's first.
    pub graphs: Vec<D::StagedGraph>,
}

impl<D: Device> StagedBlocks<D> {
    /// Stages the graphs of a sample.
    pub fn graphs_of(device: &D, sample: &Sample) -> Vec<D::StagedGraph> {
        (0..sample.layers()).map(|layer| device.stage_graph(&adjacency(&sample.layer(layer)))).collect()
    }
}

/// The adjacency of a layer in the form that a device takes.
pub fn adjacency<'a>(view: &LayerView<'a>) -> Adjacency<'a> {
    Adjacency {
        inputs: view.inputs.len(),
        outputs: view.outputs.len(),
        nbr_offsets: view.nbr_offsets,
        nbrs: bytemuck::cast_slice(view.nbrs),
        base: view.inputs.start,
        input_degrees: view.input_degrees,
    }
}

/// Graphs on the device, and what the host knows of them.
pub struct DeviceBlocks<D: Device> {
    /// One graph per layer, the first layer's first.
    pub graphs: Vec<D::Graph>,
    /// Neighbours in all of them.
    pub edges: u64,
    /// The seed nodes, in the given order.
    pub seeds: Vec<NodeId>,
    /// Their rows in the output of the last layer.
    pub seed_rows: Vec<u32>,
}

impl<D: Device> Blocks<D> {
    /// The sample, if it is in host memory.
    pub fn sample(&self) -> Option<&Sample> {
        match self {
            Blocks::Host(sample) => Some(sample),
            Blocks::Staged(blocks) => Some(&blocks.sample),
            Blocks::Device(_) => None,
        }
    }

    /// Number of nodes whose rows the first layer reads.
    pub fn nodes(&self) -> u64 {
        match self {
            Blocks::Host(sample) => sample.node_ids.len() as u64,
            Blocks::Staged(blocks) => blocks.sample.node_ids.len() as u64,
            Blocks::Device(blocks) => blocks.graphs.first().map_or(0, |graph| graph.inputs() as u64),
        }
    }

    /// Number of neighbours.
    pub fn edges(&self) -> u64 {
        match self {
            Blocks::Host(sample) => sample.edge_count(),
            Blocks::Staged(blocks) => blocks.sample.edge_count(),
            Blocks::Device(blocks) => blocks.edges,
        }
    }

    /// The seed nodes, and their rows in the output of the last layer.
    pub fn seeds(&self) -> (Vec<NodeId>, Vec<u32>) {
        match self {
            Blocks::Host(sample) => seed_rows(sample),
            Blocks::Staged(blocks) => seed_rows(&blocks.sample),
            Blocks::Device(blocks) => (blocks.seeds.clone(), blocks.seed_rows.clone()),
        }
    }
}

fn seed_rows(sample: &Sample) -> (Vec<NodeId>, Vec<u32>) {
    let first = match sample.layers() {
        0 => 0,
        layers => sample.layer(layers - 1).outputs.start,
    };
    let nodes = sample.seeds.iter().map(|seed| sample.node_ids[seed.index()]).collect();
    (nodes, sample.seeds.iter().map(|seed| seed.0 - first).collect())
}

/// The input rows of a batch's nodes.
pub struct Input<D: Device> {
    /// Rows that training does not change, assembled before the step.
    pub fixed: Option<FixedRows<D>>,
    /// Rows that training changes. They are gathered inside the step, so that it reads the results of all steps before
    /// it.
    pub live: Option<LiveRows<D>>,
    /// Columns by name, for a loader without a model.
    pub columns: Vec<NamedColumn>,
}

/// Rows that training does not change.
pub enum FixedRows<D: Device> {
    /// As f32, in host memory for upload to the device.
    Host(D::HostRows),
    /// As stored, in a cache of the device and in the memory that the batch was read to. The device assembles them.
    Cached(BatchOf<D>),
}

/// Rows of a table that training changes, one slot per node.
pub struct LiveRows<D: Device> {
    /// The table.
    pub table: Arc<dyn LiveSource<D>>,
    /// The slot of each node's row. It stays valid until the updates of this batch are applied.
    pub slots: Vec<u32>,
}

/// Values of the batch's nodes or edges, as stored: those that [`JobOutline::columns`](crate::JobOutline) names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedColumn {
    /// Its name in the dataset.
    pub name: String,
    /// Whether there is a value per node. Otherwise there is one per edge, in the order of the sample.
    pub by_node: bool,
    /// The type of the values.
    pub dtype: Dtype,
    /// Values per node or edge.
    pub width: usize,
    /// The values.
    pub bytes: Vec<u8>,
}

impl<D: Device> Input<D> {
    /// Rows that training does not change.
    pub fn fixed(rows: FixedRows<D>) -> Input<D> {
        Input { fixed: Some(rows), live: None, columns: Vec::new() }
    }

    /// Rows that training changes.
    pub fn live(rows: LiveRows<D>) -> Input<D> {
        Input { fixed: None, live: Some(rows), columns: Vec::new() }
    }

    /// No rows: the consumer of the batch has them already.
    pub fn none() -> Input<D> {
        Input { fixed: None, live: None, columns: Vec::new() }
    }

    /// The slots of live rows, if there are any.
    pub fn live_slots(&self) -> Option<&[u32]> {
        self.live.as_ref().map(|live| &live.slots[..])
    }

    /// Uploads the rows to the device, with `columns` numbers each. Panics unless the batch has exactly one kind of
    /// rows.
    pub fn upload(&mut self, device: &D, columns: usize) -> D::Matrix {
        match (self.fixed.take(), &self.live) {
            (Some(FixedRows::Host(rows)), None) => device.upload(rows, columns),
            (Some(FixedRows::Cached(batch)), None) => device.assemble(batch, columns),
            (None, Some(live)) => live.table.gather(device, &live.slots),
            (Some(_), Some(_)) => panic!("a batch has rows that training changes, or others"),
            (None, None) => panic!("rows are uploaded once"),
        }
    }
}

/// Where live rows come from.
pub trait LiveSource<D: Device>: Send + Sync {
    /// Copies of the rows of some slots, as of the last applied step. It is submitted to the device.
    fn gather(&self, device: &D, slots: &[u32]) -> D::Matrix;
}

/// A table on a device. Steps read it and its owner changes it, in the order of the steps. Every use is submitted to
/// the device while the lock is taken, and the device keeps that order.
pub struct LiveTable<D: Device> {
    rows: Mutex<D::Matrix>,
}

impl<D: Device> LiveTable<D> {
    /// A table of these rows.
    pub fn new(rows: D::Matrix) -> Arc<LiveTable<D>> {
        Arc::new(LiveTable { rows: Mutex::new(rows) })
    }

    /// The rows, for reading or changing.
    pub fn lock(&self) -> MutexGuard<'_, D::Matrix> {
        // A panic while it was locked has ended the run.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> LiveSource<D> for LiveTable<D> {
    fn gather(&self, device: &D, slots: &[u32]) -> D::Matrix {
        let rows = self.lock();
        let mut gathered = device.matrix(slots.len(), rows.columns());
        device.gather_rows(&rows, slots, &mut gathered);
        gathered
    }
}

/// Hidden rows on a device. Steps read them and their owner changes them, in the order of the steps, as with
/// [`LiveTable`].
pub struct HiddenTable<D: Device> {
    rows: Mutex<D::Hidden>,
}

impl<D: Device> HiddenTable<D> {
    /// A table of these rows.
    pub fn new(rows: D::Hidden) -> Arc<HiddenTable<D>> {
        Arc::new(HiddenTable { rows: Mutex::new(rows) })
    }

    /// The rows, for reading or changing.
    pub fn lock(&self) -> MutexGuard<'_, D::Hidden> {
        // A panic while it was locked has ended the run.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies of the rows of some slots, as f32.
    pub fn gather(&self, device: &D, slots: &[u32]) -> D::Matrix {
        let rows = self.lock();
        let mut gathered = device.matrix(slots.len(), rows.shape().columns);
        rows.pull(slots, &mut gathered);
        gathered
    }
}

/// What a step exchanges with stores of hidden rows, and whether its source needs the gradient of the input.
pub struct Exchange<D: Device> {
    /// Hidden rows that are taken from a store instead of being computed, at most one entry per layer. No gradient flows
    /// through them.
    pub pulls: Vec<Pull<D>>,
    /// Hidden rows that are sent to a store, at most one entry per layer.
    pub pushes: Vec<Push>,
    /// Whether the gradient of the input flows back.
    pub input_gradient: bool,
}

impl<D: Device> Exchange<D> {
    /// No exchange.
    pub fn none() -> Exchange<D> {
        Exchange { pulls: Vec::new(), pushes: Vec::new(), input_gradient: false }
    }

    /// The layers that read pulled or pushed rows.
    pub fn layers(&self) -> Vec<usize> {
        let pulled = self.pulls.iter().map(|pull| pull.layer);
        pulled.chain(self.pushes.iter().map(|push| push.layer)).collect()
    }

    /// Whether the step needs no exchange.
    pub fn is_none(&self) -> bool {
        self.pulls.is_empty() && self.pushes.is_empty() && !self.input_gradient
    }
}

/// Hidden rows that are pulled: after norm and activation, before dropout.
pub struct Pull<D: Device> {
    /// The layer that reads them. They replace outputs of the layer before it. Rows that the layer reads before those
    /// that the layer before it writes are not computed, and all of them must be pulled.
    pub layer: usize,
    /// Indices of these rows in that layer's input.
    pub rows: Vec<u32>,
    /// The table that they come from.
    pub table: Arc<HiddenTable<D>>,
    /// The slot of each row.
    pub slots: Vec<u32>,
}

/// Hidden rows that are pushed: after norm and activation, before dropout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// The layer that reads them.
    pub layer: usize,
    /// Indices of these rows in that layer's input.
    pub rows: Vec<u32>,
    /// The source's slot of each row.
    pub slots: Vec<u32>,
}

/// The feedback of a step. Every training batch has one, even if nothing is exchanged, so that a source can count.
pub struct Feedback<D: Device> {
    /// The batch.
    pub at: RunPosition,
    /// The learning rate of the step. `None` if no target had a label, so that no parameter changed. (Batch norm
    /// statistics did change if the batch went through the model for its exchange.)
    pub rate: Option<f64>,
    /// Hidden rows that were pushed, one per slot: an entry per layer of the exchange, in the order of layers.
    pub pushed: Vec<Pushed<D>>,
    /// The gradient of the input rows: one row per slot of live rows, or one row per node if rows are fixed. `None` if
    /// no target had a label.
    pub input_gradient: Option<Pushed<D>>,
}

/// Rows on the device, and their slots.
pub struct Pushed<D: Device> {
    /// The slots, as in the batch.
    pub slots: Vec<u32>,
    /// One row per slot.
    pub rows: D::Matrix,
}

/// The batches of a run, in order: training, validation after epochs, test.
pub trait BatchSource<D: Device>: Send {
    /// The next batch; `None` after the last. Batches keep their permits until they are dropped: see
    /// [`JobOutline::prefetch_depth`](crate::JobOutline). An evaluation has one batch at a time: it must be dropped
    /// before the next call.
    fn next(&mut self) -> Result<Option<Batch<D>>>;

    /// Takes the feedback of a step. It is called in the order of the steps, after the backward pass was submitted to
    /// the device and before the next step is. It submits its own work to the device and does not wait for it.
    fn apply(&mut self, feedback: Feedback<D>) -> Result<()>;

    /// Batch b sees the feedback of the batches up to b - lag. Steps in flight respect this.
    fn lag(&self) -> usize;

    /// Skips the batches before a later position: a run that stops early continues with its test.
    fn skip_to(&mut self, at: RunPosition) -> Result<()>;

    /// Writes the state for a checkpoint, as of the last applied step.
    fn save(&self, to: &mut dyn crate::CheckpointSink) -> Result<()>;

    /// Writes the part of the state that inference needs, which is saved with the best model.
    fn save_for_inference(&self, to: &mut dyn crate::CheckpointSink) -> Result<()> {
        self.save(to)
    }

    /// The current input rows in node order, as of the last applied step: for inference, ranking and export.
    fn table(&mut self) -> Result<crate::InputTable>;

    /// The counters so far. This may wait for the device.
    fn counters(&self) -> crate::SourceCounters;

    /// The times of its stages so far. It is called after every step, and never waits for the device.
    fn stages(&self) -> Vec<StageTimes>;
}
