//! The training batches: sampled among the residents of their step, with the feature rows and the slots of their nodes.

use super::read::{BytesRead, StepData, StepRows, steps};
use super::steps::StepVisit;
use super::table::PartitionTable;
use crate::permits::BatchPermits;
use crate::phases::PhaseSource;
use crate::sampling::{larger_than_expected, samples_of};
use crate::source::Stages;
use crate::{
    Batch, CheckpointSink, Feedback, FixedRows, Input, Job, LiveRows, PartitionedGraph, Result,
    SourceCounters, StrategyError,
};
use esker_device::{Device, HostRows};
use esker_fetch::partitions::PartitionedFeatures;
use esker_fetch::pipeline::{Pipeline, Recycled, Recycler, Stage};
use esker_sample::{BucketSubgraphs, BucketTopology, Position, Sample, Sampler, StoredId, Targets};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What batches are made of.
pub(super) struct MariusParts<D: Device> {
    pub device: D,
    pub graph: PartitionedGraph,
    pub features: Option<Arc<PartitionedFeatures>>,
    pub table: Option<Arc<PartitionTable<D>>>,
}

/// A sampled batch, and where its rows are.
struct SampledBatch {
    at: Position,
    sample: Recycled<Sample>,
    targets: Targets,
    rows: Arc<StepRows>,
}

/// The step that is sampled, and those that follow. The step is dropped first: whoever reads the next may wait for it.
struct StepsInTurn<W: StoredId> {
    current: Option<(StepVisit, Arc<StepRows>, u64)>,
    steps: Pipeline<StepData<W>, StrategyError>,
    subgraphs: Arc<BucketSubgraphs<W>>,
}

impl<W: StoredId> StepsInTurn<W> {
    /// The next batch, and where the rows of its step are; `None` after the last.
    fn next(&mut self, stage: &Stage) -> Result<Option<(Position, Arc<StepRows>)>> {
        loop {
            match &mut self.current {
                Some((visit, rows, next)) if *next < visit.batches.end => {
                    *next += 1;
                    return Ok(Some((Position { epoch: visit.epoch, batch: *next - 1 }, rows.clone())));
                }
                _ => {
                    // What left is free before the next step is taken.
                    self.current = None;
                    self.subgraphs.clear();
                    let next = self.steps.receive_for(stage).transpose()?;
                    let Some(StepData { visit, subgraph, words, rows }) = next else { return Ok(None) };
                    self.subgraphs.set(&visit.step, subgraph, words);
                    let first = visit.batches.start;
                    self.current = Some((visit, rows, first));
                }
            }
        }
    }
}

/// Samples the batches of each step from the subgraph of its residents.
fn sampled<W: StoredId>(
    job: &Job,
    steps: Pipeline<StepData<W>, StrategyError>,
    subgraphs: Arc<BucketSubgraphs<W>>,
) -> Result<Pipeline<SampledBatch, StrategyError>> {
    let samples = samples_of(job);
    let manifest = job.dataset.manifest();
    let topology = BucketTopology::new(manifest.nodes.count, manifest.edges.count, &subgraphs);
    let bytes = job.training_bound().bytes(samples as u64).saturating_add(job.room.spare_bytes / 4);
    let sampler = Sampler::new(topology, job.settings.clone(), bytes)?;
    let mut sampler = sampler.with_samples(samples as u64);
    let (samples, job) = (Recycler::<Sample>::new(samples), job.clone());
    let (mut steps, mut seeds) = (StepsInTurn { current: None, steps, subgraphs }, Vec::new());
    Ok(Pipeline::start("sample", 1, move |stage| {
        let Some((at, rows)) = steps.next(stage)? else { return Ok(None) };
        let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
        job.batches.seeds(at, &mut seeds)?;
        sampler.begin(&*job.batches, at)?;
        let sampled = sampler.sample(at, &seeds, &mut sample);
        sampled.map_err(|error| larger_than_expected(&job, at.into(), error))?;
        Ok(Some(SampledBatch { at, sample, targets: job.batches.targets(at)?, rows }))
    }))
}

/// The training batches of a run from a position on.
pub(super) struct MariusSource<D: Device> {
    stages: Stages<D>,
    table: Option<Arc<PartitionTable<D>>>,
}

impl<D: Device> MariusSource<D> {
    pub fn open<W: StoredId>(
        job: &Job,
        parts: &MariusParts<D>,
        subgraphs: &Arc<BucketSubgraphs<W>>,
        from: Position,
    ) -> Result<MariusSource<D>> {
        let (bytes, gathered) = (Arc::new(BytesRead::default()), Arc::new(AtomicU64::new(0)));
        let steps = steps::<W>(job, &parts.graph, parts.features.as_ref(), from, &bytes);
        let sampled = sampled(job, steps, subgraphs.clone())?;
        let permits = BatchPermits::new(job, job.most_nodes(), job.prefetch_depth, job.steps_in_flight);
        let (features, table, device) = (parts.features.clone(), parts.table.clone(), parts.device.clone());
        let (pool, count, live) = (job.pool.clone(), gathered.clone(), table.clone());
        let queue = job.prefetch_depth.saturating_sub(2);
        let pipeline = sampled.then("gather", queue, move |stage, batch: SampledBatch| {
            let SampledBatch { at, sample, targets, rows } = batch;
            let nodes = sample.node_ids.len();
            let Some(permit) = permits.take(stage, at.into(), nodes as u64)? else { return Ok(None) };
            let mut input = Input::none();
            if let (Some(features), Some(of_step)) = (&features, &rows.features) {
                let mut values = device.host_rows(nodes, features.format().dim());
                let gather =
                    || features.gather(&rows.resident, of_step, &sample.node_ids, values.values_mut());
                pool.install(gather)?;
                count.fetch_add(nodes as u64, Ordering::Relaxed);
                input.fixed = Some(FixedRows::Host(values));
            }
            if let Some(table) = &live {
                let slots = rows.resident.rows_of(&sample.node_ids)?;
                input.live = Some(LiveRows { table: table.live().clone(), slots });
            }
            let mut batch = Batch::of_sample(at, sample, targets, input, permit);
            batch.exchange.input_gradient = live.is_some();
            Ok(Some(batch))
        });
        let (counted, row_bytes) = (table.clone(), job.row_bytes());
        let stages = Stages::new(job, &job.settings, pipeline, move |stages| {
            let of_table = counted.as_ref().map(|table| table.counters()).unwrap_or_default();
            let rows = gathered.load(Ordering::Relaxed);
            SourceCounters {
                stages,
                rows,
                bytes_useful: rows * row_bytes,
                bytes_read: bytes.features.load(Ordering::Relaxed) + of_table.bytes_read,
                bytes_written: of_table.bytes_written,
                neighbour_bytes_read: bytes.edges.load(Ordering::Relaxed),
                read_seconds: of_table.busy_nanoseconds as f64 / 1e9,
                ..SourceCounters::default()
            }
        })?;
        Ok(MariusSource { stages, table })
    }
}

impl<D: Device> PhaseSource<D> for MariusSource<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(batch) = self.stages.next()? else { return Ok(None) };
        if let Some(table) = &self.table {
            table.begin(batch.at.position())?;
        }
        Ok(Some(batch))
    }

    fn counters(&self) -> SourceCounters {
        self.stages.counters()
    }

    fn apply(&mut self, mut feedback: Feedback<D>) -> Result<()> {
        match &self.table {
            Some(table) => table.apply(&mut feedback),
            None => Ok(()),
        }
    }

    fn lag(&self) -> usize {
        self.table.as_ref().map_or(usize::MAX, |table| table.lag())
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.table.as_ref().map_or(Ok(()), |table| table.save(to, true))
    }

    fn save_for_inference(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.table.as_ref().map_or(Ok(()), |table| table.save(to, false))
    }
}
