//! Yields superbatch after superbatch (Figure 9 of the paper): sample the next one while this one is planned, then
//! gather this one.
//!
//! A phase starts when a batch is requested and none is left, so no phase has memory between superbatches. The main
//! loop has three stages. First, load a sample and its plan. Second, read the rows that the plan reads, directly into
//! the batch. Third, copy the others from the cache and copy the kept rows into it. Reading does not depend on the
//! cache, so the disk reads the next batch while this one is assembled.

use super::Opened;
use super::sizes::SAMPLES_PREFETCHED;
use super::superbatch::{Spent, Superbatch, tidy};
use crate::neighbours::LoadedNeighbours;
use crate::phases::PhaseSource;
use crate::source::Stages;
use crate::{Batch, FixedRows, Input, Job, Result, SourceCounters, StrategyError};
use esker_device::{Device, HostRows};
use esker_fetch::pipeline::{Permits, Pipeline, Recycled, Recycler, StageClock, StageTimes, caught};
use esker_fetch::{HostCache, Missed, PlanFile, RowReader, StoredRow};
use esker_plan::Placements;
use esker_sample::bulk::positions;
use esker_sample::{Batches, NeighbourCounters, Position, Sample, StoredId, Targets};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Stages as counted over all superbatches.
const STAGES: [&str; 5] = ["sample", "plan", "load", "read", "assemble"];

/// Row counters.
#[derive(Default)]
pub(super) struct RowCounters {
    pub rows: AtomicU64,
    pub hits: AtomicU64,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub read_nanos: AtomicU64,
}

impl RowCounters {
    /// Counts a read.
    fn read<R>(
        &self,
        reader: &mut RowReader,
        work: impl FnOnce(&mut RowReader) -> esker_fetch::Result<R>,
    ) -> Result<R> {
        let before = reader.counters();
        let done = work(reader)?;
        let after = reader.counters();
        self.reads.fetch_add(after.reads - before.reads, Ordering::Relaxed);
        self.read_bytes.fetch_add(after.read_bytes - before.read_bytes, Ordering::Relaxed);
        self.read_nanos.fetch_add((after.busy - before.busy).as_nanos() as u64, Ordering::Relaxed);
        Ok(done)
    }
}

/// A sample with its placements.
struct LoadedPlan {
    at: Position,
    sample: Recycled<Sample>,
    placements: Recycled<Placements>,
    targets: Targets,
}

/// Training batches, superbatch after superbatch.
pub(super) struct Superbatches<D: Device, W> {
    opened: Opened,
    job: Job,
    device: D,
    /// Start of the next superbatch to sample.
    next: Position,
    /// Sampled, and gathered next.
    ready: Option<Superbatch<W>>,
    main: Option<MainLoop<D>>,
    rows: Arc<RowCounters>,
    /// Neighbour counters at the start.
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
    trace: Option<Spent>,
    started: Instant,
}

impl<D: Device, W: StoredId + StoredRow> Superbatches<D, W> {
    pub fn new(opened: Opened, job: &Job, from: Position, device: &D) -> Result<Superbatches<D, W>> {
        tidy(job, from)?;
        Ok(Superbatches {
            lists_before: opened.lists.graph.counters(),
            opened,
            job: job.clone(),
            device: device.clone(),
            next: from,
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
        // A position after the last batch of an epoch is the first of the next epoch.
        let Some(from) = positions(&*self.job.batches, self.next, self.job.epochs).next() else {
            return Ok(None);
        };
        let found = match Superbatch::find(&self.job, from)? {
            None => {
                if lists.is_none() {
                    let started = Instant::now();
                    *lists = Some(self.opened.lists.load(&self.job)?);
                    self.switched += started.elapsed().as_secs_f64();
                }
                let (job, sizes) = (&self.job, &self.opened.sizes);
                let lists = lists.as_ref().expect("lists were just loaded");
                self.sampling.busy(|| caught(STAGES[0], || Superbatch::sample(job, sizes, lists, from)))?
            }
            found => found,
        };
        if let Some(found) = &found {
            self.next = found.behind();
        }
        Ok(found)
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
        let left = batch.count();
        let (loaded, spent) = self.load(batch, plan, depth);
        let read = self.read(loaded, depth);
        let (disk, pool, counters) =
            (self.opened.reads.rows.clone(), self.opened.reads.pool.clone(), self.rows.clone());
        let mut cache = HostCache::new(slots, disk.format());
        let pipeline = read.then(STAGES[4], depth.saturating_sub(2), move |_, (placements, mut batch)| {
            if let Some(FixedRows::Host(rows)) = &mut batch.input.fixed {
                let (format, values) = (disk.format(), rows.values_mut());
                pool.install(|| cache.assemble_and_keep(&placements, Missed::InPlace, format, values));
            }
            let placed = placements.counts();
            counters.rows.fetch_add(placed.hits + placed.reads, Ordering::Relaxed);
            counters.hits.fetch_add(placed.hits, Ordering::Relaxed);
            Ok(Some(batch))
        });
        let stages = Stages::new(&self.job, &self.job.settings, pipeline, |stages| SourceCounters {
            stages,
            ..SourceCounters::default()
        })?;
        Ok(MainLoop { stages, left, trace: Some(spent), started: Instant::now() })
    }

    /// The first stage: loads samples and their placements.
    fn load(
        &self,
        batch: Superbatch<W>,
        plan: PlanFile,
        depth: usize,
    ) -> (Pipeline<LoadedPlan, StrategyError>, Spent) {
        let (count, first, batches) = (batch.count(), batch.first, self.job.batches.clone());
        let (trace, spent) = batch.into_trace();
        let samples = Recycler::<Sample>::new(depth + SAMPLES_PREFETCHED);
        let plans = Recycler::<Placements>::new(depth + SAMPLES_PREFETCHED);
        let (mut cursor, mut number) = (trace.into_cursor(), 0);
        let loaded = Pipeline::start(STAGES[2], 1, move |stage| {
            if number == count {
                return Ok(None);
            }
            let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
            let Some(mut placements) = stage.take(&plans) else { return Ok(None) };
            let at = cursor.read(first + number, &mut sample)?;
            plan.get(number as u32, &mut placements)?;
            placements.insert_skipped(&sample.unneeded);
            number += 1;
            let targets = batches.targets(at)?;
            Ok(Some(LoadedPlan { at, sample, placements, targets }))
        });
        (loaded, spent)
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
                let LoadedPlan { at, sample, placements, targets } = loaded;
                let mut rows = device.host_rows(sample.node_ids.len(), dim);
                counters
                    .read(reader, |reader| reader.read(&sample.node_ids, &placements, rows.values_mut()))?;
                let input = Input::fixed(FixedRows::Host(rows));
                let batch = Batch::of_sample(at, sample, targets, input, permit);
                Ok(Some((placements, batch)))
            },
        )
    }

    /// Ends the main loop after the last batch of a superbatch. Its threads have ended, their memory is free, and its
    /// trace is not needed any more.
    fn close_main(&mut self) -> Result<()> {
        let Some(mut main) = self.main.take() else { return Ok(()) };
        self.looped += main.started.elapsed().as_secs_f64();
        self.spent = self.stage_times(&main);
        let trace = main.trace.take();
        drop(main);
        trace.map_or(Ok(()), Spent::remove)
    }

    /// The times of all stages, including those of `main`.
    fn stage_times(&self, main: &MainLoop<D>) -> Vec<StageTimes> {
        let running = main.stages.times();
        let mut all = self.spent.clone();
        // If a loader requests columns, a separate stage reads them.
        for found in &running {
            if !all.iter().any(|stage| stage.name == found.name) {
                all.push(StageTimes { name: found.name.clone(), ..StageTimes::default() });
            }
        }
        for stage in &mut all {
            if let Some(found) = running.iter().find(|found| found.name == stage.name) {
                stage.items += found.items;
                stage.busy += found.busy;
                stage.starved += found.starved;
                stage.blocked += found.blocked;
            }
        }
        all
    }
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
            self.close_main()?;
        }
        Ok(batch)
    }

    fn end(&mut self) -> Result<()> {
        self.close_main()?;
        self.ready.take().map_or(Ok(()), |ready| ready.into_trace().1.remove())
    }

    fn counters(&self) -> SourceCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (rows, lists, before) = (&*self.rows, self.opened.lists.graph.counters(), self.lists_before);
        let mut stages = self.main.as_ref().map_or_else(|| self.spent.clone(), |main| self.stage_times(main));
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
