//! Yields superbatch after superbatch (Figure 9 of the paper): sample the next one while this one is planned, then
//! gather this one.
//!
//! A phase starts when a batch is requested and none is left, so no phase has memory between superbatches.

use super::Opened;
use super::building::Making;
use super::counters::{PhaseCounters, add_neighbours, sum_times};
use super::evaluation::{self, Evaluations};
use super::gather::{MainLoop, STAGES, SuperbatchGathering};
use super::sizes::Sizes;
use super::superbatch::{Spent, Superbatch, find, path_of, tidy};
use crate::history::PullsAhead;
use crate::neighbours::LoadedNeighbours;
use crate::phases::PhaseSource;
use crate::{Batch, Job, Phase, Result, RunPosition, SourceCounters};
use esker_device::Device;
use esker_fetch::StoredRow;
use esker_fetch::pipeline::{StageClock, StageTimes, caught};
use esker_plan::StaticRows;
use esker_sample::{NeighbourCounters, StoredId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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
    /// What decides pulls, if there is a history.
    ahead: Option<PullsAhead>,
    /// The rows of a static cache, once they are chosen.
    stay: Option<StaticRows>,
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

impl<D: Device, W: StoredId + StoredRow> Superbatches<D, W> {
    pub fn new(
        opened: Opened,
        job: &Job,
        from: RunPosition,
        device: &D,
        ahead: Option<PullsAhead>,
    ) -> Result<Superbatches<D, W>> {
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
            ahead,
            stay: None,
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
                Some((trace, path)) => Superbatch::reread(&making, window, trace, path, self.ahead.as_mut())?,
                None => {
                    let is_evaluation = !matches!(first.phase, Phase::Train { .. });
                    let mut ahead = self.ahead.take();
                    let sampled = self.sampled(lists, is_evaluation, |lists, sizes| {
                        let ahead = ahead.as_mut().filter(|_| !is_evaluation);
                        Superbatch::sample(&making, sizes, lists, window, path_of(&job, first), ahead)
                    });
                    self.ahead = ahead;
                    sampled?
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
        // The rows of the superbatch before are free, and sampling gets their memory.
        self.device.release_free();
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
        let (planning, job, mut stay) = (self.planning.clone(), self.job.clone(), self.stay.take());
        // Plans this superbatch while the next is sampled.
        let (planned, next) = std::thread::scope(|scope| {
            let planned = || planning.busy(|| caught(STAGES[1], || current.plan(&job, slots, &mut stay)));
            let plan = scope.spawn(planned);
            let next = self.sample(&mut lists);
            (plan.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), next)
        });
        (self.stay, self.ready) = (stay, next?);
        let (plan, _) = planned?;
        drop(lists);
        // Samplers and the planner leave many small blocks, and gathering gets their memory.
        esker_io::trim_freed_memory();
        self.inspected += started.elapsed().as_secs_f64() - (self.switched - switched);
        let started = Instant::now();
        let (job, rows, device) = (&self.job, &self.rows, &self.device);
        let gathering = SuperbatchGathering { reads: &self.opened.reads, job, device, rows, depth, slots };
        self.main = Some(gathering.start(current, plan)?);
        self.switched += started.elapsed().as_secs_f64();
        Ok(true)
    }

    /// Ends the main loop. Its threads have ended, and their memory is free. Returns its trace.
    fn close_main(&mut self) -> Option<Spent> {
        let main = self.main.take()?;
        self.looped += main.started.elapsed().as_secs_f64();
        self.spent = sum_times(&self.spent, &main.stages.times());
        Some(main.trace)
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
        if let Some(ahead) = &mut self.ahead {
            ahead.restart();
        }
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
            bytes_written: 0,
            stages,
            rows: get(&rows.rows),
            bytes_useful: get(&rows.rows) * self.opened.reads.rows.format().row_bytes() as u64,
            bytes_read: get(&rows.read_bytes),
            reads: get(&rows.reads),
            sample_bytes_read: get(&rows.sample_bytes),
            hits: vec![("host".into(), get(&rows.hits))],
            read_seconds: get(&rows.read_nanos) as f64 * 1e-9,
            phases: vec![
                ("inspect".into(), self.inspected),
                ("switch".into(), self.switched),
                ("main loop".into(), looped),
            ],
            neighbour_requests: lists.lists - before.lists,
            neighbour_hits: lists.cached - before.cached,
            neighbour_group_hits: lists.grouped - before.grouped,
            neighbour_group_bytes_read: lists.group_read_bytes - before.group_read_bytes,
            neighbour_reads: lists.reads - before.reads,
            neighbour_bytes_read: lists.read_bytes - before.read_bytes,
            evaluation: self
                .rows
                .evaluation()
                .of_evaluation(self.opened.reads.rows.format().row_bytes() as u64),
            history: None,
        }
    }
}
