//! Topology in RAM, features memory-mapped. The kernel reads them through its page cache, one page for each missing
//! row. This is the usual way without Esker, made as fast as possible, and the baseline for other strategies. Mapped
//! pages are page cache, not our memory: the budget does not include them, but a cgroup counts them.

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

/// The memory it needs.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    resident::needs(job, &[])
}

/// Topology in RAM, features in the page cache.
pub fn strategy<D>(device: D) -> ResidentStrategy<D, InPageCache> {
    ResidentStrategy::new(device, InPageCache)
}
