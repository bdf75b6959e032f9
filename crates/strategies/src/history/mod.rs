//! A history of hidden rows (OUTRE, section 5): what enters the last layer, after norm and activation and before dropout,
//! for chosen nodes. A batch pushes such rows when it computes them. A later batch pulls a row that is fresh instead of
//! computing it, and so needs fewer neighbours and fewer feature rows. No gradient flows through a pulled row.
//!
//! Whether a row is fresh depends on when it was pushed, not on what it is. So pulls are decided ahead of training, in
//! the order of batches, from a stamp per row: `stamps.rs`. `ahead.rs` does this for strategies that sample batch by
//! batch. Rows are pulled and pushed inside the step, through the exchange of a batch: `source.rs` adds it to the batches
//! of any strategy whose samples have pulled nodes.
//!
//! The rows are on the training device. A set of nodes gives each its slot, and every slot has a stamp: the paper has
//! three words for each node of the graph.

mod ahead;
mod choose;
mod profile;
mod replay;
mod source;
mod stamps;

pub(crate) use ahead::{Decider, PullsAhead};
pub use choose::choose_nodes;
pub use profile::{DividedMemory, HistoryProfile, weighted_rows};
pub(crate) use source::{HistorySource, OpenHistory};
use stamps::PulledMarks;
pub(crate) use stamps::{SharedStamps, Stamps};

use crate::{CheckpointReader, ExchangeNeeds, Job, JobOutline, MemoryTable, Needs, Result, RowsOfLayer};
use esker_sample::{Bound, NodeSet, Settings};
use esker_types::grouped;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Names of the state in a checkpoint.
const ROWS: &str = "history";
const STAMPS: &str = "history-stamps";
/// Stamps are in memory as of the last step, as of the last sampled batch, and while a superbatch is decided.
const STAMPS_IN_MEMORY: u64 = 3;
/// Rows are written to checkpoints this many bytes at a time.
const SAVED_BYTES: u64 = 1 << 20;

/// The size of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryOutline {
    /// Nodes that have a row.
    pub rows: u64,
    /// A row is pulled while fewer batches than this have passed since it was pushed.
    pub staleness: u32,
    /// The layer that reads the rows: the last.
    pub layer: usize,
    /// Numbers per row.
    pub columns: usize,
}

/// Counters of a history so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HistoryCounters {
    /// Rows that were pulled instead of being computed.
    pub pulls: u64,
    /// Rows that were pushed.
    pub pushes: u64,
    /// Batches since pulled rows were pushed, all together.
    pub ages: u64,
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
        format!("hidden rows of {rows} nodes are kept and used for fewer than {staleness} batches")
    }
}

impl JobOutline {
    /// The bounds of the first hop of training batches: of the rows that enter the last layer.
    fn first_hop_bound(&self) -> Bound {
        self.bound(&first_hop(&self.settings), self.largest_batch)
    }
}

/// How the first hop is sampled.
fn first_hop(settings: &Settings) -> Settings {
    let fanouts = settings.fanouts.iter().take(1).copied().collect();
    Settings { fanouts, ..settings.clone() }
}

/// Adds the host memory of a history, if the job trains with one.
pub(crate) fn add_host_memory(job: &JobOutline, table: &mut MemoryTable) {
    let Some(history) = job.history.filter(|_| job.largest_batch > 0) else { return };
    let nodes = job.dataset.manifest().nodes.count;
    let (set, stamps) = (NodeSet::bytes_for(nodes), history.rows * 4 * STAMPS_IN_MEMORY);
    // Slots and local indices of what a batch pulls and pushes, and the batches that are decided.
    let exchanged = job.first_hop_bound().nodes.saturating_mul(8 * 2);
    let bytes = set.saturating_add(stamps).saturating_add(exchanged).saturating_add(SAVED_BYTES);
    table.add_from("history: nodes and stamps", bytes, "a bit a node, three stamps of 4 bytes a row");
}

/// Adds what a history needs apart from that: rows on the device, and the exchange of steps.
pub(crate) fn add_needs(job: &JobOutline, needs: &mut Needs) {
    let Some(history) = job.history.filter(|_| job.largest_batch > 0) else { return };
    let bytes = history.rows.saturating_mul(history.columns as u64 * 4);
    let from = format!("{} nodes x {} x 4 bytes", grouped(history.rows), history.columns);
    needs.device.add_from("history: hidden rows", bytes, from);
    let rows = RowsOfLayer { layer: history.layer, rows: job.first_hop_bound().nodes };
    needs.exchange = ExchangeNeeds { pull: Some(rows), push: Some(rows), ..needs.exchange };
}

/// Memory of deciding ahead batch by batch: a sampler of first hops, and marks of batches in flight.
pub(crate) fn deciding_bytes(job: &JobOutline) -> u64 {
    match job.history.filter(|_| job.largest_batch > 0) {
        None => 0,
        Some(_) => {
            let bound = job.first_hop_bound();
            bound.bytes(1).saturating_add(bound.nodes / 8 * (job.prefetch_depth + job.samplers) as u64)
        }
    }
}

/// Memory of what is decided about the batches of a superbatch.
pub(crate) fn marks_bytes(job: &JobOutline, batches: u64) -> u64 {
    match job.history.filter(|_| job.largest_batch > 0) {
        None => 0,
        Some(_) => (job.first_hop_bound().nodes / 8 + 32).saturating_mul(batches),
    }
}

/// Leaves the state of a history in a checkpoint unread: inference has no use for it.
pub(crate) fn leave(state: Option<&mut dyn CheckpointReader>) -> Result<()> {
    if let Some(state) = state {
        state.take(ROWS)?;
        state.take(STAMPS)?;
    }
    Ok(())
}
