//! Superbatch after superbatch (Figure 9 of the paper): sample the next while this one is planned, then gather this one.
//!
//! A phase starts when a batch is asked for and none is left, so nothing holds a phase's memory between superbatches. The
//! main loop has three stages: load a sample and its plan; read the rows that the plan reads, straight into the
//! batch; take the others from the cache and put into it what stays. Reading needs nothing of the cache, so the disk works on
//! the next batch while this one is assembled.

use super::Prepared;
use super::sizes::SAMPLES_AHEAD;
use super::superbatch::{Spent, Superbatch, tidy};
use crate::batch::{Batch, BatchSource, RowBuffer, RowMaker};
use crate::lists::Loaded;
use crate::{Job, Result, SourceCounters, StrategyError};
use crossbeam_channel::{Sender, bounded};
use esker_fetch::pipeline::{Buffers, Pipeline, StageClock, StageTimes};
use esker_fetch::{HostCache, Missed, PlanFile, StoredRow};
use esker_plan::Placements;
use esker_sample::bulk::positions;
use esker_sample::{ListCounters, Position, Sample, Word};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Stages as they are counted over all superbatches.
const STAGES: [&str; 5] = ["sample", "plan", "load", "read", "assemble"];

/// What is counted of rows.
#[derive(Default)]
pub(super) struct RowCounters {
    pub rows: AtomicU64,
    pub hits: AtomicU64,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub read_nanos: AtomicU64,
}

/// A sample with its plan.
type LoadedBatch = (Position, Sample, Placements);

/// Batches of a run.
pub(super) struct Source<R, W> {
    graph: Prepared<W>,
    job: Job,
    make_rows: RowMaker<R>,
    /// Where the next superbatch to sample starts.
    next: Position,
    /// Sampled, and to be gathered next.
    ready: Option<Superbatch<W>>,
    main: Option<MainLoop<R>>,
    rows: Arc<RowCounters>,
    /// What had been read of lists before.
    lists_before: ListCounters,
    sampling: Arc<StageClock>,
    planning: Arc<StageClock>,
    /// Stages of main loops that are over.
    spent: Vec<StageTimes>,
    /// Seconds of sampling and planning together, of loading caches, and of main loops that are over.
    inspected: f64,
    switched: f64,
    looped: f64,
}

/// A superbatch being gathered.
struct MainLoop<R> {
    /// Dropped first: stages that wait for buffers give up.
    stop: Option<Sender<()>>,
    pipeline: Option<Pipeline<Batch<R>, StrategyError>>,
    left: usize,
    trace: Option<Spent>,
    started: Instant,
}

impl<R: RowBuffer, W: Word + StoredRow> Source<R, W> {
    pub fn new(
        graph: Prepared<W>,
        job: &Job,
        from: Position,
        make_rows: &RowMaker<R>,
    ) -> Result<Source<R, W>> {
        tidy(job, from)?;
        Ok(Source {
            lists_before: graph.lists.graph.counters(),
            graph,
            job: job.clone(),
            make_rows: make_rows.clone(),
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

    /// The next superbatch, from an earlier process or sampled now; lists are loaded when the first is sampled.
    fn sample(&mut self, lists: &mut Option<Loaded<W>>) -> Result<Option<Superbatch<W>>> {
        // A position behind the last batch of an epoch is the first of the next.
        let Some(from) = positions(&*self.job.batches, self.next, self.job.epochs).next() else {
            return Ok(None);
        };
        let found = match Superbatch::find(&self.job, from)? {
            None => {
                if lists.is_none() {
                    let started = Instant::now();
                    *lists = Some(self.graph.lists.load(&self.job)?);
                    self.switched += started.elapsed().as_secs_f64();
                }
                let (job, sizes) = (&self.job, &self.graph.sizes);
                let lists = lists.as_ref().expect("lists were just loaded");
                self.sampling.busy(|| Superbatch::sample(job, sizes, lists, from))?
            }
            found => found,
        };
        if let Some(found) = &found {
            self.next = found.behind();
        }
        Ok(found)
    }

    /// Samples, plans, and starts to gather; `false` behind the last superbatch.
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
        let (held, slots) = self.graph.sizes.gathering(&self.job, largest, current.sample_bytes)?;
        let (planning, job) = (self.planning.clone(), self.job.clone());
        // The plan of this superbatch while the next is sampled.
        let (planned, next) = std::thread::scope(|scope| {
            let plan = scope.spawn(|| planning.busy(|| current.plan(&job, slots)));
            let next = self.sample(&mut lists);
            (plan.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), next)
        });
        self.ready = next?;
        let (plan, _) = planned?;
        drop(lists);
        self.inspected += started.elapsed().as_secs_f64() - (self.switched - switched);
        let started = Instant::now();
        self.main = Some(self.gather(current, plan, held, slots)?);
        self.switched += started.elapsed().as_secs_f64();
        Ok(true)
    }

    /// Starts the main loop of a superbatch.
    fn gather(&self, batch: Superbatch<W>, plan: PlanFile, held: usize, slots: u64) -> Result<MainLoop<R>> {
        let (count, first) = (batch.count(), batch.first);
        let (trace, spent) = batch.into_trace();
        let (samples, places) = (Buffers::<Sample>::new(held + SAMPLES_AHEAD), Buffers::<()>::new(held));
        let plans = Buffers::<Placements>::new(held + SAMPLES_AHEAD);
        let (stop, stopped) = bounded::<()>(0);
        let (mut cursor, mut at) = (trace.into_cursor(), 0);
        let (free, free_plans, stop_loading) = (samples.clone(), plans.clone(), stopped.clone());
        let loaded = Pipeline::start(STAGES[2], 1, move |clock| {
            if at == count {
                return Ok(None);
            }
            let Some(mut sample) = clock.blocked(|| free.take(&stop_loading)) else { return Ok(None) };
            let Some(mut placements) = clock.blocked(|| free_plans.take(&stop_loading)) else {
                return Ok(None);
            };
            let position = cursor.read(first + at, &mut sample)?;
            plan.get(at as u32, &mut placements)?;
            placements.insert_skipped(&sample.unneeded);
            at += 1;
            Ok::<Option<LoadedBatch>, StrategyError>(Some((position, sample, placements)))
        });
        let (disk, make_rows, counters) =
            (self.graph.rows.clone(), self.make_rows.clone(), self.rows.clone());
        let dim = disk.format().dim();
        let (stop_reading, open_places) = (stopped.clone(), places.clone());
        let read = loaded.then_with(
            STAGES[3],
            held.saturating_sub(2),
            move || Ok(disk.reader()?),
            move |clock, reader, (at, sample, placements)| {
                if clock.blocked(|| open_places.take(&stop_reading)).is_none() {
                    return Ok(None);
                }
                let mut rows = make_rows(sample.node_ids.len(), dim);
                let before = reader.counters();
                reader.read(&sample.node_ids, &placements, rows.values_mut())?;
                let after = reader.counters();
                counters.reads.fetch_add(after.reads - before.reads, Ordering::Relaxed);
                counters.read_bytes.fetch_add(after.read_bytes - before.read_bytes, Ordering::Relaxed);
                let nanos = (after.busy - before.busy).as_nanos() as u64;
                counters.read_nanos.fetch_add(nanos, Ordering::Relaxed);
                Ok(Some((at, sample, placements, rows)))
            },
        );
        let (disk, pool, counters) = (self.graph.rows.clone(), self.graph.pool.clone(), self.rows.clone());
        let mut cache = HostCache::new(slots, disk.format());
        let pipeline =
            read.then(STAGES[4], held.saturating_sub(2), move |_, (at, sample, placements, mut rows)| {
                let (format, values) = (disk.format(), rows.values_mut());
                pool.install(|| cache.assemble_and_keep(&placements, Missed::InPlace, format, values));
                let placed = placements.counts();
                counters.rows.fetch_add(placed.hits + placed.reads, Ordering::Relaxed);
                counters.hits.fetch_add(placed.hits, Ordering::Relaxed);
                plans.put(placements);
                let (samples, places) = (samples.clone(), places.clone());
                Ok(Some(Batch { at, sample, rows: Some(rows), samples, places }))
            });
        let (stop, pipeline) = (Some(stop), Some(pipeline));
        Ok(MainLoop { stop, pipeline, left: count, trace: Some(spent), started: Instant::now() })
    }

    /// Behind the last batch of a superbatch its threads have ended: what they held is free, and its trace is not needed
    /// any more.
    fn close_main(&mut self) -> Result<()> {
        let Some(mut main) = self.main.take() else { return Ok(()) };
        self.looped += main.started.elapsed().as_secs_f64();
        self.spent = self.stage_times(&main);
        let trace = main.trace.take();
        drop(main);
        trace.map_or(Ok(()), Spent::remove)
    }

    /// All stages, those of `main` included.
    fn stage_times(&self, main: &MainLoop<R>) -> Vec<StageTimes> {
        let running = main.pipeline.as_ref().map(Pipeline::times).unwrap_or_default();
        let mut all = self.spent.clone();
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

impl<R: RowBuffer, W: Word + StoredRow> BatchSource<R> for Source<R, W> {
    fn next(&mut self) -> Result<Option<Batch<R>>> {
        if self.main.is_none() && !self.turn()? {
            return Ok(None);
        }
        let Some(main) = &mut self.main else { return Ok(None) };
        let batch = main.pipeline.as_mut().and_then(Pipeline::receive).transpose()?;
        main.left -= 1;
        if main.left == 0 {
            self.close_main()?;
        }
        Ok(batch)
    }

    fn counters(&self) -> SourceCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (rows, lists, before) = (&*self.rows, self.graph.lists.graph.counters(), self.lists_before);
        let mut stages = self.main.as_ref().map_or_else(|| self.spent.clone(), |main| self.stage_times(main));
        (stages[0], stages[1]) = (self.sampling.times(), self.planning.times());
        let looped =
            self.looped + self.main.as_ref().map_or(0.0, |main| main.started.elapsed().as_secs_f64());
        SourceCounters {
            stages,
            rows: get(&rows.rows),
            bytes_useful: get(&rows.rows) * self.graph.rows.format().row_bytes() as u64,
            bytes_read: get(&rows.read_bytes),
            reads: get(&rows.reads),
            hits: vec![("host".into(), get(&rows.hits))],
            read_seconds: get(&rows.read_nanos) as f64 * 1e-9,
            phases: vec![
                ("inspect".into(), self.inspected),
                ("switch".into(), self.switched),
                ("main loop".into(), looped),
            ],
            lists: lists.lists - before.lists,
            lists_cached: lists.cached - before.cached,
            list_reads: lists.reads - before.reads,
            list_bytes_read: lists.read_bytes - before.read_bytes,
        }
    }
}

impl<R> Drop for MainLoop<R> {
    fn drop(&mut self) {
        self.stop = None;
        self.pipeline = None;
    }
}
