//! What a source yields: a batch, which says everything that a step needs, and what flows back from the step. Buffers and the
//! permit go back to where they came from when a batch is dropped, so that a source never holds more than it promised.

use crate::{Result, RunPosition};
use esker_device::{AdjacencyShape, BatchOf, Device, Shape};
use esker_fetch::pipeline::{Permit, Recycled};
use esker_sample::{Position, Sample, Targets};
use esker_types::{Dtype, NodeId};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A batch that can be trained on, evaluated, or handed to a loader.
pub struct Batch<D: Device> {
    /// Which batch of the run.
    pub at: RunPosition,
    /// Its nodes and who is whose neighbour.
    pub blocks: Blocks<D>,
    /// The rows of its nodes.
    pub input: Input<D>,
    /// What it is trained or evaluated on.
    pub targets: Targets,
    /// What is exchanged with stores during the step.
    pub exchange: Exchange<D>,
    /// Its place among the batches on their way.
    pub permit: Permit,
}

impl<D: Device> Batch<D> {
    /// A batch of a sample in host memory, which exchanges nothing.
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
    /// Graphs that are on the device already, a graph a layer.
    Device(DeviceBlocks<D>),
}

/// Graphs on the device, and what the host knows of them.
pub struct DeviceBlocks<D: Device> {
    /// A graph a layer, the first layer's first.
    pub graphs: Vec<D::Graph>,
    /// Neighbours in all of them.
    pub edges: u64,
    /// The seeds, as given.
    pub seeds: Vec<NodeId>,
    /// Their rows in the output of the last layer.
    pub seed_rows: Vec<u32>,
}

impl<D: Device> Blocks<D> {
    /// The sample, where it is in host memory.
    pub fn sample(&self) -> Option<&Sample> {
        match self {
            Blocks::Host(sample) => Some(sample),
            Blocks::Device(_) => None,
        }
    }

    /// Nodes whose rows the first layer reads.
    pub fn nodes(&self) -> u64 {
        match self {
            Blocks::Host(sample) => sample.node_ids.len() as u64,
            Blocks::Device(blocks) => blocks.graphs.first().map_or(0, |graph| graph.inputs() as u64),
        }
    }

    /// Neighbours.
    pub fn edges(&self) -> u64 {
        match self {
            Blocks::Host(sample) => sample.edge_count(),
            Blocks::Device(blocks) => blocks.edges,
        }
    }

    /// The seeds, and their rows in the output of the last layer.
    pub fn seeds(&self) -> (Vec<NodeId>, Vec<u32>) {
        match self {
            Blocks::Host(sample) => seed_rows(sample),
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

/// The rows of a batch's nodes.
pub struct Input<D: Device> {
    /// Rows that training does not change, brought together ahead of the step.
    pub fixed: Option<FixedRows<D>>,
    /// Rows that training changes: gathered inside the step, so that it sees what the steps before it made of them.
    pub live: Option<LiveRows<D>>,
    /// Columns by name, for a loader that has no model.
    pub columns: Vec<NamedColumn>,
}

/// Rows that training does not change.
pub enum FixedRows<D: Device> {
    /// As f32, in host memory that the device uploads.
    Host(D::HostRows),
    /// As stored, in a cache of the device and in memory that the batch read to; the device assembles them.
    Cached(BatchOf<D>),
}

/// Rows of a table that training changes, a slot a node.
pub struct LiveRows<D: Device> {
    /// The table.
    pub table: Arc<LiveTable<D>>,
    /// The slot of each node's row. It stays valid until the updates of this batch are applied.
    pub slots: Vec<u32>,
}

/// Values of the batch's nodes, or of its edges, as stored: those that [`JobOutline::columns`](crate::JobOutline) names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedColumn {
    /// As the dataset calls it.
    pub name: String,
    /// Whether there is a value a node; else a value an edge, in the order of the sample.
    pub by_node: bool,
    /// How values are stored.
    pub dtype: Dtype,
    /// Values of each node or edge.
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

    /// No rows: whoever takes the batch has them already.
    pub fn none() -> Input<D> {
        Input { fixed: None, live: None, columns: Vec::new() }
    }

    /// The slots of live rows, where there are any.
    pub fn live_slots(&self) -> Option<&[u32]> {
        self.live.as_ref().map(|live| &live.slots[..])
    }

    /// The rows on the device, `columns` numbers each. Asserts that the batch has rows of one kind.
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

/// A table on a device that steps read and whoever owns it changes, in the order of the steps: every use is handed to the device
/// while the lock is held, and the device keeps the order.
pub struct LiveTable<D: Device> {
    rows: Mutex<D::Matrix>,
}

impl<D: Device> LiveTable<D> {
    /// A table of these rows.
    pub fn new(rows: D::Matrix) -> Arc<LiveTable<D>> {
        Arc::new(LiveTable { rows: Mutex::new(rows) })
    }

    /// The rows, to be read or changed.
    pub fn lock(&self) -> MutexGuard<'_, D::Matrix> {
        // A panic while it was held ended the run.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies of the rows of some slots.
    pub fn gather(&self, device: &D, slots: &[u32]) -> D::Matrix {
        let rows = self.lock();
        let mut gathered = device.matrix(slots.len(), rows.columns());
        device.gather_rows(&rows, slots, &mut gathered);
        gathered
    }
}

/// What a step exchanges with stores of hidden rows, and whether its source wants the gradient of the input.
pub struct Exchange<D: Device> {
    /// Hidden rows that are taken from a store instead of being computed; no gradient flows through them.
    pub pull: Option<Pull<D>>,
    /// Hidden rows that flow back.
    pub push: Option<Push>,
    /// Whether the gradient of the input flows back.
    pub input_gradient: bool,
}

impl<D: Device> Exchange<D> {
    /// Nothing.
    pub fn none() -> Exchange<D> {
        Exchange { pull: None, push: None, input_gradient: false }
    }

    /// The layers that read rows which are pulled or pushed.
    pub fn layers(&self) -> Vec<usize> {
        let pull = self.pull.as_ref().map(|pull| pull.layer);
        pull.into_iter().chain(self.push.as_ref().map(|push| push.layer)).collect()
    }

    /// Whether the step is the same without it.
    pub fn is_none(&self) -> bool {
        self.pull.is_none() && self.push.is_none() && !self.input_gradient
    }
}

/// Hidden rows that are pulled: as they are after norm and activation, before dropout.
pub struct Pull<D: Device> {
    /// The layer that reads them: what the layer before it wrote is replaced.
    pub layer: usize,
    /// Which rows of that layer's input.
    pub rows: Vec<u32>,
    /// Where they come from.
    pub table: Arc<LiveTable<D>>,
    /// The slot of each.
    pub slots: Vec<u32>,
}

/// Hidden rows that are pushed: as they are after norm and activation, before dropout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// The layer that reads them.
    pub layer: usize,
    /// Which rows of that layer's input.
    pub rows: Vec<u32>,
    /// What the source calls them.
    pub slots: Vec<u32>,
}

/// What flows back from a step. Every batch of training has one, whatever was asked for, so that a source can count.
pub struct Feedback<D: Device> {
    /// The batch.
    pub at: RunPosition,
    /// The learning rate of the step; none where no target had a label, and no parameter moved (statistics of batch norms did,
    /// where the batch went through the model to be exchanged).
    pub rate: Option<f64>,
    /// Hidden rows that were pushed, one a slot.
    pub pushed: Option<Pushed<D>>,
    /// The gradient of the input rows: a row a slot of the live rows, or a row a node where rows are fixed; none where no target
    /// had a label.
    pub input_gradient: Option<Pushed<D>>,
}

/// Rows on the device, and the slots they belong to.
pub struct Pushed<D: Device> {
    /// As the batch named them.
    pub slots: Vec<u32>,
    /// A row a slot.
    pub rows: D::Matrix,
}

/// The batches of a run, in order: training, validation after epochs, test.
pub trait BatchSource<D: Device>: Send {
    /// The next batch; `None` after the last. Batches that are not dropped keep their permits: see
    /// [`JobOutline::prefetch_depth`](crate::JobOutline). Of an evaluation there is one at a time: it is dropped before the next is
    /// asked for.
    fn next(&mut self) -> Result<Option<Batch<D>>>;

    /// Takes what flows back from a step. It is called in the order of the steps, right after the backward pass was handed to the
    /// device and before the next step is; it hands its own work to the device and does not wait for it.
    fn apply(&mut self, feedback: Feedback<D>) -> Result<()>;

    /// Batch b sees the feedback of the batches up to b - lag. Steps in flight keep to it.
    fn lag(&self) -> usize;

    /// Leaves out the batches before a later position: a run that stops early goes on with its test.
    fn skip_to(&mut self, at: RunPosition) -> Result<()>;

    /// Writes what a checkpoint must hold, as of the last applied step.
    fn save(&self, to: &mut dyn crate::CheckpointSink) -> Result<()>;

    /// The current input rows in the order of nodes, as of the last applied step: for inference, ranking, export.
    fn table(&mut self) -> Result<crate::InputTable>;

    /// What was counted so far.
    fn counters(&self) -> crate::SourceCounters;
}
