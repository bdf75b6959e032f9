//! A history of hidden rows (OUTRE, section 5): what enters the last layer, after norm and activation and before dropout,
//! for chosen nodes. A batch pushes such rows when it computes them. A later batch pulls a row that is fresh instead of
//! computing it, and so needs fewer neighbours and fewer feature rows. No gradient flows through a pulled row.
//!
//! The paper keeps what enters the last layer, for neighbours of targets: one hop. With more hops, a node has a row per
//! layer: what enters layer L - h is pulled for nodes that are met at hop h. `esker_sample` says what they are computed for.
//!
//! Whether a row is fresh depends on when it was pushed, not on what it is. So pulls are decided ahead of training, in
//! the order of batches, from a stamp per row: `stamps.rs`. `ahead.rs` does this for strategies that sample batch by
//! batch. Rows are pulled and pushed inside the step, through the exchange of a batch: `source.rs` adds it to the batches
//! of any strategy whose samples have pulled nodes. `saving.rs` compares some batches with what they would be without pulls.
//!
//! The rows are on the training device. A set of nodes gives each its slots, and every slot has a stamp: the paper has
//! three words for each node of the graph.

mod ahead;
mod choose;
mod profile;
mod replay;
mod saving;
mod source;
mod stamps;

pub(crate) use ahead::{Decider, PullsAhead};
pub use choose::choose_nodes;
pub use profile::{DividedMemory, HistoryProfile, weighted_rows};
pub(crate) use saving::BatchWork;
pub use saving::{SavedWork, WorkCounts};
pub(crate) use source::{HistorySource, OpenHistory};
pub(crate) use stamps::SharedStamps;
use stamps::{PulledMarks, Stamps};

use crate::{CheckpointReader, Job, JobOutline, MemoryTable, Needs, Result, RowsOfLayer};
use esker_device::HiddenShape;
use esker_sample::{Bound, NodeSet, Settings};
use esker_types::{Dtype, grouped};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Names of the state in a checkpoint.
const ROWS: &str = "history";
const HALF_ROWS: &str = "history-f16";
const STAMPS: &str = "history-stamps";
/// Stamps are in memory as of the last step, as of the last sampled batch, and while a superbatch is decided.
const STAMPS_IN_MEMORY: u64 = 3;
/// Rows are written to checkpoints this many bytes at a time.
const SAVED_BYTES: u64 = 1 << 20;

/// The size of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryOutline {
    /// Nodes that have rows.
    pub rows: u64,
    /// A row is pulled while fewer batches than this have passed since it was pushed.
    pub staleness: u32,
    /// The layer that reads the rows of the first hop: the last.
    pub layer: usize,
    /// Hops with pulled nodes, from the first on. Each has a row per node. At most as many as there are layers before the
    /// last.
    pub hops: usize,
    /// Numbers per row.
    pub columns: usize,
    /// How they are stored: f32 or f16.
    pub dtype: Dtype,
    /// Memory for rows on a device that has its own. The others are in pinned host memory. `u64::MAX`: all on the device.
    pub device_bytes: u64,
}

impl HistoryOutline {
    /// The store of its rows.
    pub(crate) fn shape(&self) -> HiddenShape {
        let HistoryOutline { columns, dtype, device_bytes, .. } = *self;
        HiddenShape { slots: self.slots(), columns, dtype, device_bytes }
    }

    /// Rows of all hops.
    pub fn slots(&self) -> u64 {
        self.rows.saturating_mul(self.hops as u64)
    }

    /// Bytes of a stored row.
    pub fn row_bytes(&self) -> u64 {
        self.columns as u64 * self.dtype.bytes()
    }

    /// The layer that reads what is pulled at a hop.
    pub fn layer_of(&self, hop: usize) -> usize {
        self.layer + 1 - hop
    }

    /// The name of its rows in a checkpoint.
    fn state_name(&self) -> &'static str {
        if self.dtype == Dtype::F16 { HALF_ROWS } else { ROWS }
    }
}

/// Counters of a history so far.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct HistoryCounters {
    /// Rows that were pulled instead of being computed.
    pub pulls: u64,
    /// Rows that were pushed.
    pub pushes: u64,
    /// Batches since pulled rows were pushed, all together.
    pub ages: u64,
    /// Pushed rows that replaced one.
    #[serde(default)]
    pub refreshed: u64,
    /// How far these moved, all together: the norm of the difference over that of the row before.
    #[serde(default)]
    pub drift: f64,
    /// What pulls saved, in the batches that were compared.
    #[serde(default)]
    pub saved: SavedWork,
}

/// A history and its nodes.
#[derive(Clone)]
pub(crate) struct History {
    pub outline: HistoryOutline,
    pub nodes: Arc<NodeSet>,
}

impl History {
    /// The history of a job that has one. Panics if its nodes are not chosen yet.
    pub fn of(job: &Job) -> Option<History> {
        let outline = job.outline.history.filter(|_| job.largest_batch > 0)?;
        let nodes = job.history.clone().expect("the nodes of a history are chosen before it is used");
        Some(History { outline, nodes })
    }

    /// A readable description.
    pub fn note(&self) -> String {
        let (rows, staleness) = (grouped(self.nodes.count()), self.outline.staleness);
        let layers = match self.outline.hops {
            1 => String::new(),
            hops => format!(", of {hops} layers each,"),
        };
        format!("hidden rows of {rows} nodes{layers} are kept and used for fewer than {staleness} batches")
    }
}

impl JobOutline {
    /// The history, if the job trains with one.
    fn used_history(&self) -> Option<HistoryOutline> {
        self.history.filter(|_| self.largest_batch > 0)
    }

    /// The bounds of the first hops of training batches: of the rows that enter the layer of that hop.
    fn first_hops_bound(&self, hops: usize) -> Bound {
        self.bound(&first_hops(&self.settings, hops), self.largest_batch)
    }

    /// Nodes of the first hops, of each number of hops that the history has, all together.
    fn exchanged_nodes(&self, history: &HistoryOutline) -> u64 {
        (1..=history.hops).fold(0, |sum: u64, hops| sum.saturating_add(self.first_hops_bound(hops).nodes))
    }
}

/// How the first hop is sampled.
fn first_hop(settings: &Settings) -> Settings {
    first_hops(settings, 1)
}

/// How the first hops are sampled.
fn first_hops(settings: &Settings, hops: usize) -> Settings {
    let fanouts = settings.fanouts.iter().take(hops).copied().collect();
    Settings { fanouts, ..settings.clone() }
}

/// Adds the host memory of a history, if the job trains with one.
pub(crate) fn add_host_memory(job: &JobOutline, table: &mut MemoryTable) {
    let Some(history) = job.used_history() else { return };
    let nodes = job.dataset.manifest().nodes.count;
    let (set, stamps) = (NodeSet::bytes_for(nodes), history.slots().saturating_mul(4 * STAMPS_IN_MEMORY));
    // Slots and local indices of what a batch pulls and pushes, and the batches that are decided.
    let exchanged = job.exchanged_nodes(&history).saturating_mul(8 * 2);
    let bytes = set.saturating_add(stamps).saturating_add(exchanged).saturating_add(SAVED_BYTES);
    table.add_from("history: nodes and stamps", bytes, "a bit a node, three stamps of 4 bytes a row");
    let pinned = history.slots() - history.shape().device_slots();
    if pinned > 0 {
        let from = format!("{} rows that the device has no room for", grouped(pinned));
        table.add_from("history: hidden rows, pinned", pinned.saturating_mul(history.row_bytes()), from);
    }
}

/// Adds what a history needs apart from that: rows on the device, and the exchange of steps.
pub(crate) fn add_needs(job: &JobOutline, needs: &mut Needs) {
    let Some(history) = job.used_history() else { return };
    let (row_bytes, on_device) = (history.row_bytes().next_multiple_of(4), history.shape().device_slots());
    let rows = match history.hops {
        1 => format!("{} nodes", grouped(history.rows)),
        hops => format!("{} nodes x {hops} layers", grouped(history.rows)),
    };
    let from = format!("{rows} x {} x {} bytes", history.columns, history.dtype.bytes());
    needs.device.add_from("history: hidden rows", on_device.saturating_mul(row_bytes), from);
    let rows =
        |hop: usize| RowsOfLayer { layer: history.layer_of(hop), rows: job.first_hops_bound(hop).nodes };
    let rows: Vec<RowsOfLayer> = (1..=history.hops).map(rows).collect();
    (needs.exchange.pulls, needs.exchange.pushes) = (rows.clone(), rows);
}

/// Memory of deciding ahead batch by batch: a sampler of first hops, and marks of batches in flight.
pub(crate) fn deciding_bytes(job: &JobOutline) -> u64 {
    let Some(history) = job.used_history() else { return 0 };
    let of_hops = (1..=history.hops).map(|hops| {
        let bound = job.first_hops_bound(hops);
        bound.bytes(1).saturating_add(bound.nodes / 8 * (job.prefetch_depth + job.samplers) as u64)
    });
    of_hops.fold(0, u64::saturating_add)
}

/// Memory of what is decided about the batches of a superbatch.
pub(crate) fn marks_bytes(job: &JobOutline, batches: u64) -> u64 {
    let Some(history) = job.used_history() else { return 0 };
    let marks = job.exchanged_nodes(&history) / 8 + 32 * history.hops as u64;
    marks.saturating_mul(batches)
}

/// Leaves the state of a history in a checkpoint unread: inference has no use for it.
pub(crate) fn leave(state: Option<&mut dyn CheckpointReader>) -> Result<()> {
    if let Some(state) = state {
        state.take(ROWS)?;
        state.take(HALF_ROWS)?;
        state.take(STAMPS)?;
    }
    Ok(())
}
