//! A batch as a loader hands it out: plain memory that belongs to the caller, in the order of PyTorch Geometric.

use crate::{Result, TrainError};
use esker_device::{Device, HostRows};
use esker_sample::{HopOrdered, Position, Sample};
use esker_strategies::{Batch, FixedRows, NamedColumn};
use esker_types::Dtype;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Freed rows of batches that are kept for later ones.
const KEPT: usize = 2;

/// A batch that was handed out.
#[derive(Debug)]
pub struct LoadedBatch {
    /// Its epoch and number, among those of this process.
    pub at: Position,
    /// Its seeds, as indices of the loader's.
    pub items: Vec<u64>,
    /// Nodes and edges, by hop. Hops after a fan-out of 0 are there, and empty.
    pub graph: HopOrdered,
    /// Feature rows of its nodes, if the loader has any.
    pub rows: Option<BatchValues>,
    /// Values of its nodes and edges, in the order of both.
    pub columns: Vec<HandedColumn>,
}

/// Feature rows of a batch, row-major. Their memory serves a later batch, unless the loader is gone.
#[derive(Debug)]
pub struct BatchValues {
    values: Vec<f32>,
    /// Numbers per row.
    pub dim: usize,
    home: Weak<FreedRows>,
}

/// Values of nodes or edges, as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandedColumn {
    /// Its name in the dataset.
    pub name: String,
    /// Whether there is a value per node. Otherwise there is one per edge.
    pub by_node: bool,
    /// The type of the values.
    pub dtype: Dtype,
    /// Values per node or edge.
    pub width: usize,
    /// The values.
    pub bytes: Vec<u8>,
}

/// Memory of rows that the caller has dropped.
#[derive(Debug, Default)]
pub(super) struct FreedRows(Mutex<Vec<Vec<f32>>>);

impl FreedRows {
    /// Empty memory for this many numbers. Freed memory is used if it is large enough.
    fn take(&self, numbers: usize) -> Vec<f32> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().position(|values| values.capacity() >= numbers);
        let mut values = match fits {
            Some(index) => free.swap_remove(index),
            // One that is too small goes, so that no more is kept than batches need.
            None => {
                free.pop();
                Vec::new()
            }
        };
        values.clear();
        values.reserve_exact(numbers);
        values
    }

    fn put(&self, values: Vec<f32>) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT {
            free.push(values);
        }
    }
}

impl Deref for BatchValues {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl Drop for BatchValues {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            home.put(std::mem::take(&mut self.values));
        }
    }
}

/// What a loader adds to batches.
pub(super) struct Handover {
    /// Hops of a batch, with those after a fan-out of 0.
    pub hops: usize,
    /// Numbers per feature row.
    pub dim: usize,
    /// Memory that the caller returned.
    pub memory: Arc<FreedRows>,
}

impl Handover {
    /// Takes a batch out of its pipeline, into memory of its own. The pipeline's memory is free when this returns.
    pub fn take<D: Device>(&self, mut batch: Batch<D>, items: Vec<u64>) -> Result<LoadedBatch> {
        let (at, sample) = (batch.at.position(), batch.blocks.sample());
        let sample = sample.expect("a loader asks for samples in host memory");
        let mut graph = HopOrdered::of(sample);
        graph.nodes_by_hop.resize(self.hops + 1, 0);
        graph.edges_by_hop.resize(self.hops, 0);
        let columns = std::mem::take(&mut batch.input.columns);
        let columns = columns.into_iter().map(|column| moved(column, &graph)).collect();
        let rows = match batch.input.fixed.take() {
            None => None,
            Some(FixedRows::Host(mut rows)) => Some(self.rows(sample, rows.values_mut(), &graph)),
            // Devices with memory of their own may cache rows there.
            Some(FixedRows::Cached(_)) => return Err(TrainError::LoaderDevice),
        };
        Ok(LoadedBatch { at, items, graph, rows, columns })
    }

    fn rows(&self, sample: &Sample, rows: &[f32], graph: &HopOrdered) -> BatchValues {
        assert_eq!(rows.len(), sample.node_ids.len() * self.dim, "a batch has a row per node");
        let mut values = self.memory.take(graph.nodes.len() * self.dim);
        for run in &graph.node_runs {
            values.extend_from_slice(&rows[run.start * self.dim..run.end * self.dim]);
        }
        BatchValues { values, dim: self.dim, home: Arc::downgrade(&self.memory) }
    }
}

/// A column in the order of a batch that is handed out.
fn moved(column: NamedColumn, graph: &HopOrdered) -> HandedColumn {
    let NamedColumn { name, by_node, dtype, width, bytes } = column;
    let runs: &[Range<usize>] = if by_node { &graph.node_runs } else { &graph.edge_runs };
    let row = width * dtype.bytes() as usize;
    let count: usize = runs.iter().map(|run| run.len()).sum();
    let mut ordered = Vec::with_capacity(count * row);
    for run in runs {
        ordered.extend_from_slice(&bytes[run.start * row..run.end * row]);
    }
    HandedColumn { name, by_node, dtype, width, bytes: ordered }
}
