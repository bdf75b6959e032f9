//! The batches of a planned run: load a sample with its placements, read what it misses in one read, assemble the batch and
//! keep rows. Several workers take batches in turn for the first two. The last stage takes them in order, because the cache
//! changes.

use super::{Opened, PlannedRun};
use crate::direct::Reads;
use crate::diskgnn::sizes::{Training, WORKER_PREFETCH};
use crate::job::run_positions;
use crate::phases::PhaseSource;
use crate::row_counters::RowCounters;
use crate::source::Stages;
use crate::{
    Batch, Blocks, EvaluationCounters, Exchange, FixedRows, Input, Job, Phase, Result, RunPosition,
    SourceCounters, StrategyError,
};
use esker_device::{Device, HostRows};
use esker_fetch::packed::{PackCounters, RunBatch, RunCache, RunReader};
use esker_fetch::pipeline::{AnyBusy, Permit, Permits, Pipeline, Recycled, Recycler, Stage};
use esker_io::{AlignedBuffer, DIRECT_ALIGN};
use esker_sample::{Sample, Targets};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Counters of training or of evaluation.
#[derive(Default)]
struct ReadTally {
    rows: RowCounters,
    /// The time in which any worker reads.
    reading: AnyBusy,
}

impl ReadTally {
    fn read(&self, found: PackCounters) {
        self.rows.reads.fetch_add(found.reads, Ordering::Relaxed);
        self.rows.read_bytes.fetch_add(found.bytes, Ordering::Relaxed);
    }

    fn of_evaluation(&self, row_bytes: u64) -> EvaluationCounters {
        let read_seconds = self.reading.passed().as_secs_f64();
        EvaluationCounters { read_seconds, ..self.rows.of_evaluation(row_bytes) }
    }
}

/// A batch with its sample loaded.
struct LoadedRunBatch {
    at: RunPosition,
    sample: Recycled<Sample>,
    batch: Recycled<RunBatch>,
    targets: Targets,
    permit: Option<Permit>,
}

/// A batch with the rows read that it misses.
struct ReadRunBatch {
    loaded: LoadedRunBatch,
    missed: Recycled<Option<AlignedBuffer>>,
}

/// The batches of a run in one stream. Evaluations with packed rows are among them.
pub(super) struct PlannedStages<D: Device> {
    /// `None` while an evaluation without packed rows has their memory.
    stages: Option<Stages<D>>,
    /// The counters when they ended.
    counted: SourceCounters,
    evaluates: bool,
    /// Opens the stages at a position.
    open: Box<dyn Fn(RunPosition) -> Result<Stages<D>> + Send>,
}

impl<D: Device> PlannedStages<D> {
    /// The batches of a run from a position on.
    pub fn open(opened: &Opened, job: &Job, from: RunPosition, device: &D) -> Result<PlannedStages<D>> {
        let run = opened.run.clone().expect("rows are packed before batches are requested");
        let evaluates = run.course.evaluates;
        let (job, device, reads, training) =
            (job.clone(), device.clone(), opened.reads.clone(), opened.training);
        // Counters continue if the stages are opened again.
        let counts: Arc<[ReadTally; 2]> = Arc::default();
        let open = move |from: RunPosition| {
            let shared = Shared {
                permits: Permits::new(training.depth),
                counts: counts.clone(),
                run: run.clone(),
                sequential: job.out_of_core.sequential,
                reads: reads.clone(),
            };
            shared.stages(&job, from, training, &device)
        };
        let (stages, counted) = (Some(open(from)?), SourceCounters::default());
        Ok(PlannedStages { stages, counted, evaluates, open: Box::new(open) })
    }
}

impl<D: Device> PhaseSource<D> for PlannedStages<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        self.stages.as_mut().map_or(Ok(None), Stages::next)
    }

    fn counters(&self) -> SourceCounters {
        self.stages.as_ref().map_or_else(|| self.counted.clone(), Stages::counters)
    }

    fn rest(&mut self) -> bool {
        self.counted = self.counters();
        self.stages = None;
        true
    }

    fn evaluates(&self) -> bool {
        self.evaluates
    }

    fn restart(&mut self, at: RunPosition) -> Result<()> {
        // Those before end first, and free their memory.
        self.stages = None;
        self.stages = Some((self.open)(at)?);
        Ok(())
    }
}

/// State that stages share.
#[derive(Clone)]
struct Shared {
    run: PlannedRun,
    reads: Reads,
    permits: Permits,
    /// Those of training, and those of evaluations.
    counts: Arc<[ReadTally; 2]>,
    /// No prefetching: a batch gets its permit before anything of it is loaded.
    sequential: bool,
}

impl Shared {
    /// The stages of a run from a position on.
    fn stages<D: Device>(
        self,
        job: &Job,
        from: RunPosition,
        training: Training,
        device: &D,
    ) -> Result<Stages<D>> {
        let workers = (0..training.workers).map(|number| {
            let (evaluates, run, ahead) = (self.run.course.evaluates, self.run.clone(), !self.sequential);
            let yielded = move |at: &RunPosition| evaluates || matches!(at.phase, Phase::Train { .. });
            let mut positions =
                run_positions(job, from).filter(yielded).skip(number).step_by(training.workers);
            // A worker loads one batch while this stage has listed the next two: the disk reads their samples meanwhile.
            let listed = Pipeline::start("list", 1, move |_| {
                let next = positions.next();
                let numbers = next.into_iter().filter(|_| ahead).map(|at| run.course.number(at));
                numbers.for_each(|number| run.rows.read_ahead(number));
                Ok::<_, StrategyError>(next)
            });
            let samples = training.depth.div_ceil(training.workers) + WORKER_PREFETCH;
            self.read(self.load(listed, job, samples), training.buffers)
        });
        let read = Pipeline::in_turn(workers.collect());
        let (shared, opening, device) = (self.clone(), self.clone(), device.clone());
        let pipeline = read.then_with(
            "assemble",
            training.depth.saturating_sub(2),
            move || Ok(RunCache::new(opening.run.rows, &opening.reads.rows)?),
            move |stage, cache, read| shared.assemble(stage, cache, read, &device),
        );
        let (counts, row_bytes) = (self.counts, self.run.rows.plan().row_bytes);
        Stages::new(job, &job.settings, pipeline, move |stages| {
            let [trained, evaluated] = &*counts;
            let found = trained.of_evaluation(row_bytes);
            SourceCounters {
                stages,
                rows: found.rows,
                bytes_useful: found.bytes_useful,
                bytes_read: found.bytes_read,
                reads: found.reads,
                sample_bytes_read: trained.rows.sample_bytes.load(Ordering::Relaxed),
                hits: vec![("host".to_string(), found.hits)],
                read_seconds: found.read_seconds,
                evaluation: evaluated.of_evaluation(row_bytes),
                ..SourceCounters::default()
            }
        })
    }

    /// Loads samples and placements.
    fn load(
        &self,
        listed: Pipeline<RunPosition, StrategyError>,
        job: &Job,
        samples: usize,
    ) -> Pipeline<LoadedRunBatch, StrategyError> {
        let (shared, opening, job) = (self.clone(), self.run.rows.clone(), job.clone());
        let (samples, loads) = (Recycler::<Sample>::new(samples), Recycler::<RunBatch>::new(WORKER_PREFETCH));
        listed.then_with(
            "load",
            0,
            move || Ok(opening.reader()),
            move |stage, reader: &mut RunReader, at: RunPosition| {
                let permit = match shared.sequential {
                    true => match stage.permit(&shared.permits) {
                        None => return Ok(None),
                        permit => permit,
                    },
                    false => None,
                };
                let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
                let Some(mut batch) = stage.take(&loads) else { return Ok(None) };
                let batches = match job.inference(at.phase) {
                    None => &job.batches,
                    Some(over) => &over.batches,
                };
                let course = &shared.run.course;
                reader.load(course.number(at), &mut sample, &mut batch)?;
                let bytes = &shared.counts_of(at).rows.sample_bytes;
                bytes.fetch_add(reader.loaded_bytes(&batch), Ordering::Relaxed);
                let targets = batches.targets(course.sampled_at(at))?;
                Ok(Some(LoadedRunBatch { at, sample, batch, targets, permit }))
            },
        )
    }

    /// Reads the rows that batches miss. That does not depend on the cache, so it runs ahead.
    fn read(
        &self,
        loaded: Pipeline<LoadedRunBatch, StrategyError>,
        buffers: usize,
    ) -> Pipeline<ReadRunBatch, StrategyError> {
        let (shared, opening) = (self.clone(), self.run.rows.clone());
        let buffers = Recycler::<Option<AlignedBuffer>>::new(buffers);
        let most_bytes = self.run.rows.rows_bytes() as usize;
        loaded.then_with(
            "read",
            0,
            move || Ok(opening.reader()),
            move |stage, reader: &mut RunReader, loaded: LoadedRunBatch| {
                let Some(mut missed) = stage.take(&buffers) else { return Ok(None) };
                if missed.is_none() {
                    reader.register(missed.insert(AlignedBuffer::new(most_bytes, DIRECT_ALIGN)))?;
                }
                let (counts, rows) = (shared.counts_of(loaded.at), missed.as_deref_mut().unwrap_or_default());
                counts.read(counts.reading.busy(|| reader.read(&loaded.batch, rows))?);
                Ok(Some(ReadRunBatch { loaded, missed }))
            },
        )
    }

    /// The last stage: verifies rows, assembles them with cached ones in host memory, and keeps those that the plan keeps.
    fn assemble<D: Device>(
        &self,
        stage: &Stage,
        cache: &mut RunCache,
        read: ReadRunBatch,
        device: &D,
    ) -> Result<Option<Batch<D>>> {
        let ReadRunBatch { loaded: LoadedRunBatch { at, sample, batch, targets, permit }, missed } = read;
        let Some(permit) = permit.or_else(|| stage.permit(&self.permits)) else { return Ok(None) };
        let (missed, pool) = (missed.as_deref().unwrap_or_default(), &self.reads.pool);
        let (placements, counts) = (&batch.placements, self.counts_of(at));
        pool.install(|| self.run.rows.check_rows(&batch, missed))?;
        let mut rows = device.host_rows(placements.words.len(), self.reads.rows.format().dim());
        counts.read(cache.assemble(batch.number, placements, missed, rows.values_mut(), pool)?);
        counts.rows.placed(placements.counts());
        let (input, exchange) = (Input::fixed(FixedRows::Host(rows)), Exchange::none());
        Ok(Some(Batch { at, blocks: Blocks::Host(sample), input, targets, exchange, permit }))
    }

    fn counts_of(&self, at: RunPosition) -> &ReadTally {
        &self.counts[usize::from(!matches!(at.phase, Phase::Train { .. }))]
    }
}
