//! Topology in RAM, features mapped: the kernel reads them through its page cache, a page for each row that is not there. What
//! people do without Esker, made as well as it can be, and the baseline that other strategies are measured against. Mapped
//! pages are the page cache's memory, not ours: the budget does not hold them, a cgroup counts them.

use crate::resident::{self, ResidentRows, ResidentStrategy};
use crate::{JobOutline, Needs, Result};
use esker_fetch::FeatureRows;
use esker_store::Dataset;

/// Features in the page cache.
pub struct InPageCache;

impl ResidentRows for InPageCache {
    fn open(&self, dataset: &Dataset) -> Result<FeatureRows> {
        Ok(FeatureRows::map(dataset)?)
    }

    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        needs(job)
    }
}

/// What it needs of memory.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    resident::needs(job, &[])
}

/// Topology in RAM, features in the page cache.
pub fn strategy<D>(device: D) -> ResidentStrategy<D, InPageCache> {
    ResidentStrategy::new(device, InPageCache)
}
