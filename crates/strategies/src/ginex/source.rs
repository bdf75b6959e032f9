//! Yields superbatch after superbatch (Figure 9 of the paper): sample the next one while this one is planned, then
//! gather this one.
//!
//! A phase starts when a batch is requested and none is left, so no phase has memory between superbatches. The main
//! loop has three stages. First, load a sample and its plan. Second, read the rows that the plan reads, directly into
//! the batch. Third, copy the others from the cache and copy the kept rows into it. Reading does not depend on the
//! cache, so the disk reads the next batch while this one is assembled.
//!
//! Batches of evaluation go through the same stages and the same cache, in the order of the run. So the first of them
//! are read while the last ones of an epoch are trained on.

use super::Opened;
use super::building::Making;
use super::counters::{PhaseCounters, add_neighbours, sum_times};
use super::evaluation::{self, Evaluations};
use super::sizes::{SAMPLES_PREFETCHED, Sizes};
use super::superbatch::{Spent, Step, Superbatch, find, path_of, tidy};
use crate::neighbours::LoadedNeighbours;
use crate::phases::PhaseSource;
use crate::source::Stages;
use crate::{Batch, FixedRows, Input, Job, Phase, Result, RunPosition, SourceCounters, StrategyError};
use esker_device::{Device, HostRows};
use esker_fetch::pipeline::{Permits, Pipeline, Recycled, Recycler, StageClock, StageTimes, caught};
use esker_fetch::{HostCache, Missed, PlanFile, StoredRow};
use esker_plan::Placements;
use esker_sample::trace::{Cursor, TraceReader};
use esker_sample::{Batches, NeighbourCounters, Sample, StoredId, Targets};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Stages as counted over all superbatches.
const STAGES: [&str; 5] = ["sample", "plan", "load", "read", "assemble"];

/// A sample with its placements.
struct LoadedPlan {
    at: RunPosition,
    sample: Recycled<Sample>,
    placements: Recycled<Placements>,
    targets: Targets,
    /// Whether its rows are requested.
    rows: bool,
}

/// The batches of a run, superbatch after superbatch.
pub(super) struct Superbatches<D: Device, W> {
    opened: Opened,
    job: Job,
    device: D,
    /// Start of the next superbatch to sample, unless the run has ended.
    next: Option<RunPosition>,
    /// The samples of evaluations, from the first superbatch on.
    kept: Option<Evaluations<W>>,
    /// Sampled, and gathered next.
    ready: Option<Superbatch<W>>,
    main: Option<MainLoop<D>>,
    rows: Arc<PhaseCounters>,
    /// Neighbour counters at the start, and what was sampled for evaluations since then.
    lists_before: NeighbourCounters,
    sampling: Arc<StageClock>,
    planning: Arc<StageClock>,
    /// Stage times of finished main loops.
    spent: Vec<StageTimes>,
    /// Seconds of sampling and planning together, of loading caches, and of finished main loops.
    inspected: f64,
    switched: f64,
    looped: f64,
}

/// A superbatch being gathered.
struct MainLoop<D: Device> {
    stages: Stages<D>,
    left: usize,
    trace: Spent,
    started: Instant,
}

impl<D: Device, W: StoredId + StoredRow> Superbatches<D, W> {
    pub fn new(opened: Opened, job: &Job, from: RunPosition, device: &D) -> Result<Superbatches<D, W>> {
        tidy(job, from)?;
        Ok(Superbatches {
            lists_before: opened.lists.graph.counters(),
            opened,
            job: job.clone(),
            device: device.clone(),
            next: Some(from),
            kept: None,
            ready: None,
            main: None,
            rows: Arc::default(),
            sampling: StageClock::new(STAGES[0]),
            planning: StageClock::new(STAGES[1]),
            spent: STAGES.map(|name| StageTimes { name: name.into(), ..StageTimes::default() }).to_vec(),
            inspected: 0.0,
            switched: 0.0,
            looped: 0.0,
        })
    }

    /// The next superbatch, of an earlier process or sampled now. Neighbours are loaded when the first is sampled.
    fn sample(&mut self, lists: &mut Option<LoadedNeighbours<W>>) -> Result<Option<Superbatch<W>>> {
        // A position after the last batch of a phase is the first of the next one.
        let Some(from) = self.next.and_then(|next| self.job.first_batch(next)) else { return Ok(None) };
        let kept = match self.kept.take() {
            Some(kept) => kept,
            None => self.keep(lists, from)?,
        };
        let disk_bytes = self.opened.sizes.disk_bytes.saturating_sub(kept.disk_bytes() / 2);
        let job = self.job.clone();
        let making = Making { job: &job, kept: &kept, disk_bytes, all: None };
        let window = making.window(&self.opened.sizes, from);
        let sampled = match making.first_sampled(&window) {
            None => Superbatch::of_kept(&making, window)?,
            Some(first) => match find(&job, first)? {
                Some((trace, path)) => Superbatch::reread(&making, window, trace, path)?,
                None => {
                    let is_evaluation = !matches!(first.phase, Phase::Train { .. });
                    self.sampled(lists, is_evaluation, |lists, sizes| {
                        Superbatch::sample(&making, sizes, lists, window, path_of(&job, first))
                    })?
                }
            },
        };
        self.kept = Some(kept);
        self.next = sampled.behind();
        Ok(Some(sampled))
    }

    /// The samples of evaluations, of an earlier process or sampled now.
    fn keep(&mut self, lists: &mut Option<LoadedNeighbours<W>>, from: RunPosition) -> Result<Evaluations<W>> {
        let job = self.job.clone();
        let mut kept = Evaluations::reopen(&job, from)?;
        for phase in kept.missing(&job, from) {
            self.sampled(lists, true, |lists, sizes| kept.sample(&job, sizes, lists, phase))?;
        }
        Ok(kept)
    }

    /// Samples with the neighbours that this phase has in memory. They are loaded first, if they are not there. What
    /// evaluations sample is not counted.
    fn sampled<R>(
        &mut self,
        lists: &mut Option<LoadedNeighbours<W>>,
        is_evaluation: bool,
        work: impl FnOnce(&LoadedNeighbours<W>, &Sizes) -> Result<R>,
    ) -> Result<R> {
        if lists.is_none() {
            let started = Instant::now();
            *lists = Some(self.opened.lists.load(&self.job)?);
            self.switched += started.elapsed().as_secs_f64();
        }
        let lists = lists.as_ref().expect("lists were just loaded");
        let before = self.opened.lists.graph.counters();
        let done = self.sampling.busy(|| caught(STAGES[0], || work(lists, &self.opened.sizes)));
        if is_evaluation {
            add_neighbours(&mut self.lists_before, before, self.opened.lists.graph.counters());
        }
        done
    }

    /// Samples, plans, and starts to gather. `false` after the last superbatch.
    fn turn(&mut self) -> Result<bool> {
        let (started, switched) = (Instant::now(), self.switched);
        let mut lists = None;
        let current = match self.ready.take() {
            Some(ready) => ready,
            None => match self.sample(&mut lists)? {
                Some(sampled) => sampled,
                None => return Ok(false),
            },
        };
        let largest = current.accesses.largest();
        let (depth, slots) = self.opened.sizes.gathering(&self.job, largest, current.sample_bytes)?;
        let (planning, job) = (self.planning.clone(), self.job.clone());
        // Plans this superbatch while the next is sampled.
        let (planned, next) = std::thread::scope(|scope| {
            let plan = scope.spawn(|| planning.busy(|| caught(STAGES[1], || current.plan(&job, slots))));
            let next = self.sample(&mut lists);
            (plan.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), next)
        });
        self.ready = next?;
        let (plan, _) = planned?;
        drop(lists);
        self.inspected += started.elapsed().as_secs_f64() - (self.switched - switched);
        let started = Instant::now();
        self.main = Some(self.gather(current, plan, depth, slots)?);
        self.switched += started.elapsed().as_secs_f64();
        Ok(true)
    }

    /// Starts the main loop of a superbatch.
    fn gather(&self, batch: Superbatch<W>, plan: PlanFile, depth: usize, slots: u64) -> Result<MainLoop<D>> {
        let (steps, trace) = batch.into_steps();
        let left = steps.len();
        let read = self.read(self.load(steps, plan, depth), depth);
        let (disk, pool, counters) =
            (self.opened.reads.rows.clone(), self.opened.reads.pool.clone(), self.rows.clone());
        let mut cache = HostCache::new(slots, disk.format());
        let pipeline = read.then(STAGES[4], depth.saturating_sub(2), move |_, (placements, mut batch)| {
            if let Some(FixedRows::Host(rows)) = &mut batch.input.fixed {
                let (format, values) = (disk.format(), rows.values_mut());
                pool.install(|| cache.assemble_and_keep(&placements, Missed::InPlace, format, values));
            }
            counters.of(batch.at.phase).placed(placements.counts());
            Ok(Some(batch))
        });
        let stages = Stages::new(&self.job, &self.job.settings, pipeline, |stages| SourceCounters {
            stages,
            ..SourceCounters::default()
        })?;
        Ok(MainLoop { stages, left, trace, started: Instant::now() })
    }

    /// The first stage: loads samples and their placements.
    fn load(&self, steps: Vec<Step>, plan: PlanFile, depth: usize) -> Pipeline<LoadedPlan, StrategyError> {
        let samples = Recycler::<Sample>::new(depth + SAMPLES_PREFETCHED);
        let plans = Recycler::<Placements>::new(depth + SAMPLES_PREFETCHED);
        let (job, mut steps, mut cursor) = (self.job.clone(), (0..).zip(steps), None);
        Pipeline::start(STAGES[2], 1, move |stage| {
            let Some((number, Step { at, trace, sample: index })) = steps.next() else { return Ok(None) };
            let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
            let Some(mut placements) = stage.take(&plans) else { return Ok(None) };
            cursor_of(&mut cursor, trace).read(index, &mut sample)?;
            let (rows, batches) = match job.inference(at.phase) {
                None => (true, &job.batches),
                Some(over) => (over.rows, &over.batches),
            };
            placements.clear();
            if rows {
                plan.get(number, &mut placements)?;
                placements.insert_skipped(&sample.unneeded);
            }
            let targets = batches.targets(at.position())?;
            Ok(Some(LoadedPlan { at, sample, placements, targets, rows }))
        })
    }

    /// The second stage: reads rows directly into the batch.
    fn read(
        &self,
        loaded: Pipeline<LoadedPlan, StrategyError>,
        depth: usize,
    ) -> Pipeline<(Recycled<Placements>, Batch<D>), StrategyError> {
        let (disk, device, counters, permits) =
            (self.opened.reads.rows.clone(), self.device.clone(), self.rows.clone(), Permits::new(depth));
        let dim = disk.format().dim();
        loaded.then_with(
            STAGES[3],
            depth.saturating_sub(2),
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

    /// Ends the main loop. Its threads have ended, and their memory is free. Returns its trace.
    fn close_main(&mut self) -> Option<Spent> {
        let main = self.main.take()?;
        self.looped += main.started.elapsed().as_secs_f64();
        self.spent = sum_times(&self.spent, &main.stages.times());
        Some(main.trace)
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

impl<D: Device, W: StoredId + StoredRow> PhaseSource<D> for Superbatches<D, W> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        if self.main.is_none() && !self.turn()? {
            return Ok(None);
        }
        let Some(main) = &mut self.main else { return Ok(None) };
        let batch = main.stages.next()?;
        main.left -= 1;
        if main.left == 0 {
            // Its trace is not needed any more, and after the last superbatch no trace is.
            self.close_main().map_or(Ok(()), Spent::remove)?;
            if self.ready.is_none() {
                evaluation::remove(&self.job)?;
            }
        }
        Ok(batch)
    }

    fn evaluates(&self) -> bool {
        true
    }

    fn restart(&mut self, at: RunPosition) -> Result<()> {
        drop(self.close_main());
        (self.ready, self.next) = (None, Some(at));
        tidy(&self.job, at)
    }

    fn end(&mut self) -> Result<()> {
        self.restart(RunPosition::start_of(Phase::Test))?;
        self.next = None;
        evaluation::remove(&self.job)
    }

    fn counters(&self) -> SourceCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (rows, lists, before) =
            (self.rows.training(), self.opened.lists.graph.counters(), self.lists_before);
        let running = self.main.as_ref().map_or_else(Vec::new, |main| main.stages.times());
        let mut stages = sum_times(&self.spent, &running);
        (stages[0], stages[1]) = (self.sampling.times(), self.planning.times());
        let looped =
            self.looped + self.main.as_ref().map_or(0.0, |main| main.started.elapsed().as_secs_f64());
        SourceCounters {
            stages,
            rows: get(&rows.rows),
            bytes_useful: get(&rows.rows) * self.opened.reads.rows.format().row_bytes() as u64,
            bytes_read: get(&rows.read_bytes),
            reads: get(&rows.reads),
            sample_bytes_read: 0,
            hits: vec![("host".into(), get(&rows.hits))],
            read_seconds: get(&rows.read_nanos) as f64 * 1e-9,
            phases: vec![
                ("inspect".into(), self.inspected),
                ("switch".into(), self.switched),
                ("main loop".into(), looped),
            ],
            neighbour_requests: lists.lists - before.lists,
            neighbour_hits: lists.cached - before.cached,
            neighbour_reads: lists.reads - before.reads,
            neighbour_bytes_read: lists.read_bytes - before.read_bytes,
        }
    }
}
