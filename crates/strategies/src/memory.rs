//! Everything in RAM. This is the reference: every exact strategy must yield the same batches and bytes.

use crate::resident::{self, ResidentRows, ResidentStrategy};
use crate::{JobOutline, Needs, Result};
use esker_fetch::FeatureRows;
use esker_store::Dataset;

/// Features in RAM.
pub struct InRam;

impl ResidentRows for InRam {
    fn open(&self, dataset: &Dataset) -> Result<FeatureRows> {
        Ok(FeatureRows::load(dataset, u64::MAX)?)
    }

    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        needs(job)
    }
}

/// The memory it needs.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    match job.features {
        true => resident::needs(job, &[("features", FeatureRows::bytes_in_memory(&job.dataset)?)]),
        false => resident::needs(job, &[]),
    }
}

/// Topology and features in RAM.
pub fn strategy<D>(device: D) -> ResidentStrategy<D, InRam> {
    ResidentStrategy::new(device, InRam)
}
