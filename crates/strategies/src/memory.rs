//! Everything in RAM. The reference: every exact strategy must yield the same batches and bytes.

use crate::batch::{BatchSource, RowBuffer, RowMaker};
use crate::resident::{self, Resident};
use crate::{Evaluation, Job, MemoryTable, Result, Strategy};
use esker_fetch::FeatureRows;
use esker_sample::Position;
use esker_types::NodeId;

/// Topology and features in RAM.
pub struct Memory<R> {
    rows: RowMaker<R>,
    graph: Option<Resident>,
}

impl<R> Memory<R> {
    pub fn new(rows: RowMaker<R>) -> Memory<R> {
        Memory { rows, graph: None }
    }
}

impl<R: RowBuffer> Strategy<R> for Memory<R> {
    fn memory(&self, job: &Job) -> Result<MemoryTable> {
        let mut table = MemoryTable::default();
        table.add("features", FeatureRows::bytes_in_memory(&job.dataset)?);
        table.extend(resident::memory(job));
        Ok(table)
    }

    fn prepare(&mut self, job: &Job) -> Result<()> {
        let rows = FeatureRows::load(&job.dataset, u64::MAX)?;
        self.graph = Some(Resident::open(job, rows)?);
        Ok(())
    }

    fn batches(&mut self, job: &Job, from: Position) -> Result<Box<dyn BatchSource<R>>> {
        resident::prepared(&self.graph).batches(job, from, &self.rows)
    }

    fn evaluation(&mut self, job: &Job, over: &Evaluation) -> Result<Box<dyn BatchSource<R>>> {
        resident::prepared(&self.graph).evaluation(job, over, &self.rows)
    }

    fn rows(&mut self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        resident::prepared(&self.graph).rows(nodes, values)
    }
}
