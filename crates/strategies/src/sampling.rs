//! A topology in memory and its samplers: the first stage of the strategies that have one.

use crate::job::positions_of;
use crate::{Job, JobOutline, Result, StrategyError};
use esker_fetch::pipeline::{Pipeline, Recycled, Recycler};
use esker_sample::{AnyTopology, Batches, InMemory, Position, Sample, Sampler, Settings, StoredId, Targets};
use std::sync::Arc;

/// Samples beyond the batches with rows in memory: one being made, one waiting.
const SAMPLES_PREFETCHED: usize = 2;

/// Memory of each sampler.
pub(crate) fn sampling_bytes(
    job: &JobOutline,
    settings: &Settings,
    batch: u64,
    depth: usize,
    samplers: usize,
) -> u64 {
    job.bound(settings, batch).bytes(samples_of(depth, samplers) as u64)
}

/// Samples for reuse per sampler. Samplers take batches in turn.
fn samples_of(depth: usize, samplers: usize) -> usize {
    depth.div_ceil(samplers.max(1)) + SAMPLES_PREFETCHED
}

/// A topology with ids of either width, shared by sources.
pub(crate) enum ResidentTopology {
    Narrow(Arc<InMemory<u32>>),
    Wide(Arc<InMemory<u64>>),
}

impl ResidentTopology {
    /// Loads it.
    pub fn load(job: &Job) -> Result<ResidentTopology> {
        Ok(match AnyTopology::load(&job.dataset, job.direction, u64::MAX)? {
            AnyTopology::Narrow(graph) => ResidentTopology::Narrow(Arc::new(graph)),
            AnyTopology::Wide(graph) => ResidentTopology::Wide(Arc::new(graph)),
        })
    }

    /// Samples the batches of a walk, several at a time if it has several samplers.
    pub fn sampled(&self, walk: &Walk) -> Result<Pipeline<SampledBatch, StrategyError>> {
        let workers = (0..walk.samplers).map(|number| match self {
            ResidentTopology::Narrow(graph) => sample_stage(graph, walk, number),
            ResidentTopology::Wide(graph) => sample_stage(graph, walk, number),
        });
        Ok(Pipeline::in_turn(workers.collect::<Result<Vec<_>>>()?))
    }
}

/// The batches of a source, and how to sample them.
pub(crate) struct Walk {
    pub batches: Arc<dyn Batches>,
    pub from: Position,
    pub epochs: u64,
    pub epochs_sampled: u64,
    pub settings: Settings,
    pub most_bytes: u64,
    pub depth: usize,
    pub rows: bool,
    pub samplers: usize,
}

/// A sample in flight.
pub(crate) struct SampledBatch {
    pub at: Position,
    pub sample: Recycled<Sample>,
    pub targets: Targets,
}

/// One of the samplers that take batches in turn.
fn sample_stage<W: StoredId>(
    graph: &Arc<InMemory<W>>,
    walk: &Walk,
    number: usize,
) -> Result<Pipeline<SampledBatch, StrategyError>> {
    let count = samples_of(walk.depth, walk.samplers);
    let sampler = Sampler::new(graph.clone(), walk.settings.clone(), walk.most_bytes)?;
    let mut sampler = sampler.with_samples(count as u64);
    let (samples, batches) = (Recycler::<Sample>::new(count), walk.batches.clone());
    let mut positions =
        positions_of(batches.clone(), walk.from, walk.epochs).skip(number).step_by(walk.samplers);
    let (mut seeds, repeat) = (Vec::new(), walk.epochs_sampled.max(1));
    Ok(Pipeline::start("sample", 1, move |stage| {
        let Some(at) = positions.next() else { return Ok(None) };
        let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
        let drawn = Position { epoch: at.epoch % repeat, ..at };
        batches.seeds(drawn, &mut seeds)?;
        sampler.sample(drawn, &seeds, &mut sample)?;
        Ok(Some(SampledBatch { at, sample, targets: batches.targets(drawn)? }))
    }))
}
