//! A wrapper around the stages of a strategy that yields their batches.

use crate::phases::PhaseSource;
use crate::{Batch, Job, Result, SourceCounters, StrategyError, columns};
use esker_device::Device;
use esker_fetch::pipeline::{Pipeline, StageTimes};
use esker_sample::Settings;

/// Adds a strategy's counters to the times of its stages.
type Count = Box<dyn Fn(Vec<StageTimes>) -> SourceCounters + Send>;

/// Batches out of a pipeline.
pub(crate) struct Stages<D: Device> {
    pipeline: Pipeline<Batch<D>, StrategyError>,
    count: Count,
}

impl<D: Device> Stages<D> {
    /// Yields the batches of a pipeline, with the columns that the job requests. `count` adds counters to the times of
    /// its stages.
    pub fn new(
        job: &Job,
        settings: &Settings,
        pipeline: Pipeline<Batch<D>, StrategyError>,
        count: impl Fn(Vec<StageTimes>) -> SourceCounters + Send + 'static,
    ) -> Result<Stages<D>> {
        let pipeline = columns::added(job, settings, pipeline)?;
        Ok(Stages { pipeline, count: Box::new(count) })
    }

    /// The times of its stages.
    pub fn times(&self) -> Vec<StageTimes> {
        self.pipeline.times()
    }
}

impl<D: Device> PhaseSource<D> for Stages<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        self.pipeline.receive().transpose()
    }

    fn counters(&self) -> SourceCounters {
        (self.count)(self.pipeline.times())
    }
}
