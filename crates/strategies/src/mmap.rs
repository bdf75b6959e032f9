//! Topology in RAM, features mapped: the kernel reads them through its page cache, a page for each row that is not there. What
//! people do without Esker, made as well as it can be, and the baseline that other strategies are measured against. Mapped
//! pages are the page cache's memory, not ours: the budget does not hold them, a cgroup counts them.

use crate::batch::{BatchSource, RowBuffer, RowMaker};
use crate::resident::{self, Resident};
use crate::{Evaluation, Job, MemoryTable, Result, Strategy};
use esker_fetch::FeatureRows;
use esker_sample::Position;
use esker_types::NodeId;

/// Topology in RAM, features in the page cache.
pub struct Mmap<R> {
    rows: RowMaker<R>,
    graph: Option<Resident>,
}

impl<R> Mmap<R> {
    pub fn new(rows: RowMaker<R>) -> Mmap<R> {
        Mmap { rows, graph: None }
    }
}

impl<R: RowBuffer> Strategy<R> for Mmap<R> {
    fn memory(&self, job: &Job) -> Result<MemoryTable> {
        Ok(resident::memory(job))
    }

    fn prepare(&mut self, job: &Job) -> Result<()> {
        let rows = FeatureRows::map(&job.dataset)?;
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
