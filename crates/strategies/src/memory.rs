//! Everything in RAM. The reference: every exact strategy must yield the same batches and bytes.

use crate::batch::{RowBuffer, RowMaker};
use crate::resident::{Hold, ResidentStrategy};
use crate::{Job, MemoryTable, Result};
use esker_fetch::FeatureRows;
use esker_store::Dataset;

/// Features in RAM.
pub struct InRam;

impl Hold for InRam {
    fn memory(&self, job: &Job, table: &mut MemoryTable) -> Result<()> {
        table.add("features", FeatureRows::bytes_in_memory(&job.dataset)?);
        Ok(())
    }

    fn open(&self, dataset: &Dataset) -> Result<FeatureRows> {
        Ok(FeatureRows::load(dataset, u64::MAX)?)
    }
}

/// Topology and features in RAM.
pub fn strategy<R: RowBuffer>(rows: RowMaker<R>) -> ResidentStrategy<R, InRam> {
    ResidentStrategy::new(rows, InRam)
}
