//! The main loop of a superbatch, in three stages. First, load a sample and its plan. Second, read the rows that the
//! plan reads, directly into the batch. Third, copy the others from the cache and copy the kept rows into it. Reading
//! does not depend on the cache, so the disk reads the next batch while this one is assembled.
//!
//! Batches of evaluation go through the same stages and the same cache, in the order of the run. So the first of them
//! are read while the last ones of an epoch are trained on.

use super::counters::PhaseCounters;
use super::sizes::SAMPLES_PREFETCHED;
use super::superbatch::{PlannedBatch, Spent, Superbatch};
use crate::direct::Reads;
use crate::source::Stages;
use crate::{Batch, FixedRows, Input, Job, Result, RunPosition, SourceCounters, StrategyError};
use esker_device::{Device, HostRows};
use esker_fetch::pipeline::{Permits, Pipeline, Recycled, Recycler};
use esker_fetch::{HostCache, Missed, PlanFile, StoredRow};
use esker_plan::Placements;
use esker_sample::trace::{Cursor, TraceReader};
use esker_sample::{Batches, Sample, StoredId, Targets};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Stages as counted over all superbatches.
pub(super) const STAGES: [&str; 5] = ["sample", "plan", "load", "read", "assemble"];

/// A sample with its placements.
struct LoadedPlan {
    at: RunPosition,
    sample: Recycled<Sample>,
    placements: Recycled<Placements>,
    targets: Targets,
    /// Whether its rows are requested.
    rows: bool,
}

/// A superbatch being gathered.
pub(super) struct MainLoop<D: Device> {
    pub stages: Stages<D>,
    /// Batches that were not yielded yet.
    pub left: usize,
    /// Its trace, to be removed after them.
    pub trace: Spent,
    pub started: Instant,
}

/// What a main loop works with.
pub(super) struct SuperbatchGathering<'a, D> {
    pub reads: &'a Reads,
    pub job: &'a Job,
    pub device: &'a D,
    pub rows: &'a Arc<PhaseCounters>,
    /// Batches with rows in memory.
    pub depth: usize,
    /// Slots of the cache.
    pub slots: u64,
}

impl<D: Device> SuperbatchGathering<'_, D> {
    /// Starts the main loop of a superbatch.
    pub fn start<W: StoredId + StoredRow>(self, batch: Superbatch<W>, plan: PlanFile) -> Result<MainLoop<D>> {
        let (steps, trace) = batch.into_steps();
        let left = steps.len();
        let read = self.read(self.load(steps, plan));
        let (disk, pool, counters) = (self.reads.rows.clone(), self.reads.pool.clone(), self.rows.clone());
        let mut cache = HostCache::new(self.slots, disk.format());
        let pipeline =
            read.then(STAGES[4], self.depth.saturating_sub(2), move |_, (placements, mut batch)| {
                if let Some(FixedRows::Host(rows)) = &mut batch.input.fixed {
                    let (format, values) = (disk.format(), rows.values_mut());
                    pool.install(|| cache.assemble_and_keep(&placements, Missed::InPlace, format, values));
                }
                counters.of(batch.at.phase).placed(placements.counts());
                Ok(Some(batch))
            });
        let stages = Stages::new(self.job, &self.job.settings, pipeline, |stages| SourceCounters {
            stages,
            ..SourceCounters::default()
        })?;
        Ok(MainLoop { stages, left, trace, started: Instant::now() })
    }

    /// The first stage: loads samples and their placements.
    fn load(&self, steps: Vec<PlannedBatch>, plan: PlanFile) -> Pipeline<LoadedPlan, StrategyError> {
        let samples = Recycler::<Sample>::new(self.depth + SAMPLES_PREFETCHED);
        let plans = Recycler::<Placements>::new(self.depth + SAMPLES_PREFETCHED);
        let (job, counters) = (self.job.clone(), self.rows.clone());
        let (mut steps, mut cursor) = ((0..).zip(steps), None);
        Pipeline::start(STAGES[2], 1, move |stage| {
            let Some((number, PlannedBatch { at, trace, sample: index })) = steps.next() else {
                return Ok(None);
            };
            let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
            let Some(mut placements) = stage.take(&plans) else { return Ok(None) };
            let mut bytes = trace.record_bytes(index);
            cursor_of(&mut cursor, trace).read(index, &mut sample)?;
            let (rows, batches) = match job.inference(at.phase) {
                None => (true, &job.batches),
                Some(over) => (over.rows, &over.batches),
            };
            placements.clear();
            if rows {
                plan.get(number, &mut placements)?;
                bytes += (placements.words.len() + placements.kept.len()) as u64 * 4;
            }
            counters.of(at.phase).sample_bytes.fetch_add(bytes, Ordering::Relaxed);
            let targets = batches.targets(at.position())?;
            Ok(Some(LoadedPlan { at, sample, placements, targets, rows }))
        })
    }

    /// The second stage: reads rows directly into the batch.
    fn read(
        &self,
        loaded: Pipeline<LoadedPlan, StrategyError>,
    ) -> Pipeline<(Recycled<Placements>, Batch<D>), StrategyError> {
        let (disk, device, counters, permits) =
            (self.reads.rows.clone(), self.device.clone(), self.rows.clone(), Permits::new(self.depth));
        let dim = disk.format().dim();
        loaded.then_with(
            STAGES[3],
            self.depth.saturating_sub(2),
            move || Ok(disk.reader()?),
            move |stage, reader, loaded| {
                let Some(permit) = stage.permit(&permits) else { return Ok(None) };
                let LoadedPlan { at, sample, placements, targets, rows } = loaded;
                let input = match rows {
                    true => {
                        let (nodes, counters) = (&sample.node_ids, counters.of(at.phase));
                        let mut rows = device.host_rows(nodes.len(), dim);
                        counters.read(reader, |reader| reader.read(nodes, &placements, rows.values_mut()))?;
                        Input::fixed(FixedRows::Host(rows))
                    }
                    false => Input::none(),
                };
                let batch = Batch::of_sample(at.position(), sample, targets, input, permit);
                Ok(Some((placements, Batch { at, ..batch })))
            },
        )
    }
}

/// The cursor of a trace. There is one at a time, because each has a batch in memory.
fn cursor_of(
    current: &mut Option<(Arc<TraceReader>, Cursor<Arc<TraceReader>>)>,
    trace: Arc<TraceReader>,
) -> &mut Cursor<Arc<TraceReader>> {
    if current.as_ref().is_some_and(|(other, _)| !Arc::ptr_eq(other, &trace)) {
        *current = None;
    }
    &mut current.get_or_insert_with(|| (trace.clone(), trace.shared_cursor())).1
}
