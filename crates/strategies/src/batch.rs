//! What a source yields: a sample and the rows of its nodes. Buffers go back to where they came from when a batch is
//! dropped, so that a source never holds more than it promised.

use crate::{Result, SourceCounters};
use esker_fetch::pipeline::Buffers;
use esker_sample::{Position, Sample};
use std::sync::Arc;

/// Where rows are put: memory of the processor that trains, or memory it reads from.
pub trait RowBuffer: Send + 'static {
    /// The numbers, row after row.
    fn values_mut(&mut self) -> &mut [f32];
}

impl RowBuffer for Vec<f32> {
    fn values_mut(&mut self) -> &mut [f32] {
        self
    }
}

/// Makes room for so many rows of so many numbers.
pub type RowMaker<R> = Arc<dyn Fn(usize, usize) -> R + Send + Sync>;

/// A batch that can be trained on.
pub struct Batch<R> {
    /// Which batch of the run.
    pub at: Position,
    /// Its nodes and lists.
    pub sample: Sample,
    /// A row a node, until they are taken.
    pub(crate) rows: Option<R>,
    /// Where the sample goes in the end, and a place among the batches held.
    pub(crate) samples: Buffers<Sample>,
    pub(crate) places: Buffers<()>,
}

impl<R> Batch<R> {
    /// A row a node. Asking for rows that were taken is a bug.
    pub fn rows(&self) -> &R {
        self.rows.as_ref().expect("rows are asked for before they are taken")
    }

    /// Hands the rows over, once. The batch keeps its place among those held until it is dropped.
    pub fn take_rows(&mut self) -> R {
        self.rows.take().expect("rows are taken once")
    }
}

impl<R> Drop for Batch<R> {
    fn drop(&mut self) {
        self.samples.put(std::mem::take(&mut self.sample));
        self.places.put(());
    }
}

/// Batches, in order.
pub trait BatchSource<R>: Send {
    /// The next batch; `None` behind the last. The batch before it must be dropped, or at most
    /// [`crate::Job::batches_held`] are ever there.
    fn next(&mut self) -> Result<Option<Batch<R>>>;

    /// What was counted so far.
    fn counters(&self) -> SourceCounters;
}
