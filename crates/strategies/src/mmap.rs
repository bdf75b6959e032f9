//! Topology in RAM, features mapped: the kernel reads them through its page cache, a page for each row that is not there. What
//! people do without Esker, made as well as it can be, and the baseline that other strategies are measured against. Mapped
//! pages are the page cache's memory, not ours: the budget does not hold them, a cgroup counts them.

use crate::batch::{RowBuffer, RowMaker};
use crate::resident::{Hold, ResidentStrategy};
use crate::{Job, MemoryTable, Result};
use esker_fetch::FeatureRows;
use esker_store::Dataset;

/// Features in the page cache.
pub struct InPageCache;

impl Hold for InPageCache {
    fn memory(&self, _: &Job, _: &mut MemoryTable) -> Result<()> {
        Ok(())
    }

    fn open(&self, dataset: &Dataset) -> Result<FeatureRows> {
        Ok(FeatureRows::map(dataset)?)
    }
}

/// Topology in RAM, features in the page cache.
pub fn strategy<R: RowBuffer>(rows: RowMaker<R>) -> ResidentStrategy<R, InPageCache> {
    ResidentStrategy::new(rows, InPageCache)
}
