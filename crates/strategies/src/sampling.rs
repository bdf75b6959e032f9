//! A topology in memory and its samplers: the first stage of the strategies that have one.

use crate::history::{BatchWork, Decider, History, SharedStamps};
use crate::job::run_positions;
use crate::residents::StepTopology;
use crate::{Inference, Job, JobOutline, Result, RunPosition, StrategyError};
use esker_fetch::pipeline::{Pipeline, Recycled, Recycler};
use esker_sample::{
    AnyTopology, Bound, Direction, EdgeLookup, InMemory, Position, Sample, SampleError, Sampler, Settings,
    StoredId, Targets, Topology,
};
use esker_store::Dataset;
use esker_types::{ByteCount, NodeId};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Samples beyond the batches with rows in memory: one being made, one waiting.
const SAMPLES_PREFETCHED: usize = 2;

/// Memory of each sampler of a run: of its samples, and of what training and evaluation are sampled with.
pub(crate) fn sampling_bytes(job: &JobOutline) -> u64 {
    let samples = samples_of(job) as u64;
    let training = (job.largest_batch > 0).then(|| job.training_bound());
    let evaluation = job.evaluation_bound();
    let bytes = |bound: &Option<Bound>, samples: u64| bound.as_ref().map_or(0, |bound| bound.bytes(samples));
    let with_samples = bytes(&training, samples).max(bytes(&evaluation, samples));
    // If both are sampled alike, one sampler serves both.
    let alike = job.evaluation.as_ref().is_none_or(|over| over.settings == job.settings);
    let other = if alike { 0 } else { bytes(&training, 0).min(bytes(&evaluation, 0)) };
    with_samples.saturating_add(other)
}

/// Samples for reuse per sampler. Samplers take batches in turn.
pub(crate) fn samples_of(job: &JobOutline) -> usize {
    job.prefetch_depth.div_ceil(job.samplers.max(1)) + SAMPLES_PREFETCHED
}

/// A topology with ids of either width, shared by sources.
#[derive(Clone)]
pub(crate) enum ResidentTopology {
    Narrow(Arc<InMemory<u32>>),
    Wide(Arc<InMemory<u64>>),
}

impl ResidentTopology {
    /// Loads it, unless the pilot did.
    pub fn load(job: &Job) -> Result<ResidentTopology> {
        if let Some(topology) = &job.topology.resident {
            return Ok(topology.clone());
        }
        job.pool.install(|| ResidentTopology::of(&job.dataset, job.direction))
    }

    /// Loads the topology of a dataset, with the current threads.
    pub fn of(dataset: &Dataset, direction: Direction) -> Result<ResidentTopology> {
        Ok(match AnyTopology::load(dataset, direction, u64::MAX)? {
            AnyTopology::Narrow(graph) => ResidentTopology::Narrow(Arc::new(graph)),
            AnyTopology::Wide(graph) => ResidentTopology::Wide(Arc::new(graph)),
        })
    }

    /// The topology, if its ids are stored as `W`.
    pub fn of_width<W: StoredId>(self) -> Option<Arc<InMemory<W>>> {
        let topology: Arc<dyn Any + Send + Sync> = match self {
            ResidentTopology::Narrow(graph) => graph,
            ResidentTopology::Wide(graph) => graph,
        };
        topology.downcast().ok()
    }

    /// Looks up its edges.
    pub fn lookup(&self) -> Arc<dyn EdgeLookup> {
        match self {
            ResidentTopology::Narrow(graph) => graph.clone(),
            ResidentTopology::Wide(graph) => graph.clone(),
        }
    }

    /// Samples the batches of a run from a position on, several at a time if it has several samplers. With a history,
    /// stamps are those of this position.
    pub fn sampled(
        &self,
        job: &Job,
        from: RunPosition,
        stamps: Option<&SharedStamps>,
    ) -> Result<Pipeline<SampledBatch, StrategyError>> {
        match (self, job.residents.as_ref().map(|residents| residents.topology(self))) {
            (_, Some(StepTopology::Narrow(graph))) => sampled_on(&graph.by_step, job, from, stamps),
            (_, Some(StepTopology::Wide(graph))) => sampled_on(&graph.by_step, job, from, stamps),
            (ResidentTopology::Narrow(graph), None) => sampled_on(graph, job, from, stamps),
            (ResidentTopology::Wide(graph), None) => sampled_on(graph, job, from, stamps),
        }
    }
}

/// What decides pulls, shared by samplers.
struct SharedDecider<T: Topology> {
    decider: Arc<Mutex<Decider<T>>>,
    /// What batches would be without pulls.
    work: BatchWork,
}

impl<T: Topology> Clone for SharedDecider<T> {
    fn clone(&self) -> Self {
        SharedDecider { decider: self.decider.clone(), work: self.work.clone() }
    }
}

impl<T: Topology + Clone> SharedDecider<T> {
    /// Samples a training batch with what it pulls, and some without.
    fn sample(
        &self,
        sampler: &mut Sampler<T>,
        (at, drawn): (RunPosition, Position),
        seeds: &[NodeId],
        sample: &mut Sample,
    ) -> Result<()> {
        // A sampler that panics ends the run.
        let marks = self.decider.lock().unwrap_or_else(PoisonError::into_inner).take(at)?;
        if BatchWork::is_compared(at.position()) {
            sampler.sample(drawn, seeds, sample)?;
            self.work.put(at.position(), sample);
        }
        Ok(marks.sample(sampler, drawn, seeds, sample)?)
    }
}

fn sampled_on<T: SampledTopology>(
    graph: &T,
    job: &Job,
    from: RunPosition,
    stamps: Option<&SharedStamps>,
) -> Result<Pipeline<SampledBatch, StrategyError>> {
    let decider = match (History::of(job), stamps) {
        (Some(history), Some(stamps)) => {
            let now = stamps.lock().clone();
            let decider = Arc::new(Mutex::new(Decider::new(graph.clone(), job, history, now, from)?));
            Some(SharedDecider { decider, work: stamps.work.clone() })
        }
        _ => None,
    };
    let workers = (0..job.samplers.max(1)).map(|number| sample_stage(graph, job, from, number, &decider));
    Ok(Pipeline::in_turn(workers.collect::<Result<Vec<_>>>()?))
}

/// A topology that threads share, each with samplers of its own.
trait SampledTopology: Topology<Workspace: Send, StoredId: Send> + Clone + 'static {}
impl<T: Topology<Workspace: Send, StoredId: Send> + Clone + 'static> SampledTopology for T {}

/// A sample in flight.
pub(crate) struct SampledBatch {
    pub at: RunPosition,
    pub sample: Recycled<Sample>,
    pub targets: Targets,
}

/// One of the samplers that take batches in turn.
fn sample_stage<T: SampledTopology>(
    graph: &T,
    job: &Job,
    from: RunPosition,
    number: usize,
    decider: &Option<SharedDecider<T>>,
) -> Result<Pipeline<SampledBatch, StrategyError>> {
    let decider = decider.clone();
    let (samples, job) = (Recycler::<Sample>::new(samples_of(job)), job.clone());
    let mut positions = run_positions(&job, from).skip(number).step_by(job.samplers.max(1));
    let (mut samplers, mut seeds) = (PhaseSamplers { graph: graph.clone(), made: Vec::new() }, Vec::new());
    // Settings that cannot be sampled are refused at once.
    samplers.of(&job, job.inference(from.phase))?;
    Ok(Pipeline::start("sample", 1, move |stage| {
        let Some(at) = positions.next() else { return Ok(None) };
        let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
        let over = job.inference(at.phase);
        let (batches, drawn) = match over {
            None => (&job.batches, job.sampled_at(at.position())),
            Some(over) => (&over.batches, Position { epoch: 0, batch: at.batch }),
        };
        batches.seeds(drawn, &mut seeds)?;
        let sampler = samplers.of(&job, over)?;
        sampler.begin(&**batches, drawn)?;
        let sampled = match decider.as_ref().filter(|_| over.is_none()) {
            None => sampler.sample(drawn, &seeds, &mut sample).map_err(StrategyError::from),
            Some(decider) => decider.sample(sampler, (at, drawn), &seeds, &mut sample),
        };
        sampled.map_err(|error| match error {
            StrategyError::Sample(error) => larger_than_expected(&job, at, error),
            other => other,
        })?;
        Ok(Some(SampledBatch { at, sample, targets: batches.targets(drawn)? }))
    }))
}

/// A batch that the memory of the pilot's sizes does not hold. How much it needs in all is not known: twice what it
/// asked for so far is likely to do, and a quarter of what is spare is a sampler's.
pub(crate) fn larger_than_expected(job: &JobOutline, at: RunPosition, error: SampleError) -> StrategyError {
    match error {
        SampleError::Memory { needed, .. } if job.known.is_some() => {
            let (budget, samplers) = (job.room.budget_bytes, job.samplers.max(1) as u64);
            let needed = ByteCount(budget.saturating_add(needed.0.saturating_mul(8 * samplers)));
            let (at, trains, allowed) = (Box::new(at), job.largest_batch > 0, ByteCount(budget));
            StrategyError::LargeBatch { at, trains, nodes: None, needed, allowed }
        }
        error => error.into(),
    }
}

/// A sampler for each way to sample: training and evaluation may differ.
struct PhaseSamplers<T: Topology> {
    graph: T,
    made: Vec<(Settings, Sampler<T>)>,
}

impl<T: Topology + Clone> PhaseSamplers<T> {
    /// The sampler of an evaluation, or of training.
    fn of(&mut self, job: &Job, over: Option<&Inference>) -> Result<&mut Sampler<T>> {
        let settings = over.map_or(&job.settings, |over| &over.settings);
        let found = self.made.iter().position(|(made_for, _)| made_for == settings);
        let index = match found {
            Some(index) => index,
            None => {
                let samples = samples_of(job) as u64;
                let largest = over.map_or(job.largest_batch, |over| over.largest_batch);
                let largest = largest.max(job.largest_batch_of(settings));
                let bytes = || job.bound(settings, largest).bytes(samples);
                let bytes = over.and_then(|over| over.sampling_bytes).unwrap_or_else(bytes);
                // A batch may be larger than expected. Training and evaluation may have a sampler each.
                let bytes = bytes.saturating_add(job.room.spare_bytes / 4 / job.samplers.max(1) as u64);
                let sampler = Sampler::new(self.graph.clone(), settings.clone(), bytes)?;
                self.made.push((settings.clone(), sampler.with_samples(samples)));
                self.made.len() - 1
            }
        };
        Ok(&mut self.made[index].1)
    }
}
