//! A superbatch: some batches in the order of the run, their samples in traces, and a plan for their rows (sections 3.1
//! and 3.4). Training batches are sampled to a trace of its own. Batches of evaluation are in traces that are kept
//! (`evaluation.rs`).
//!
//! A trace gets its final name when it is complete, and its header describes its content. So a resumed run uses what an
//! earlier one sampled, and removes what belongs to another job. Accesses and plans follow from the trace and are
//! computed again.

use super::building::{Building, Making};
use super::evaluation::job_of;
use super::sizes::Sizes;
use crate::history::PullsAhead;
use crate::neighbours::LoadedNeighbours;
use crate::{CachePolicy, Job, Phase, Result, RunPosition, StrategyError};
use esker_fetch::{AccessFile, PlanFile, StoredRow};
use esker_plan::{Belady, Placements, PlanTally, StaticRows};
use esker_sample::bulk::{BatchPulls, Bulk};
use esker_sample::trace::{RecordFormat, TraceHeader, TraceReader, TraceWriter};
use esker_sample::{Position, Sample, SampleError, StoredId, Topology};
use esker_store::StoreError;
use esker_types::NodeId;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Some sampled batches.
pub(super) struct Superbatch<W> {
    pub steps: Vec<PlannedBatch>,
    /// The trace that was made for it, if any.
    pub own: Option<OwnTrace>,
    /// The rows of its batches.
    pub accesses: AccessFile<W>,
    /// Bytes of the largest of their samples.
    pub sample_bytes: u64,
}

/// A batch of a superbatch.
pub(super) struct PlannedBatch {
    pub at: RunPosition,
    /// The trace that has its sample, and the sample's index there.
    pub trace: Arc<TraceReader>,
    pub sample: usize,
}

/// The trace of a superbatch alone.
pub(super) struct OwnTrace {
    pub trace: Arc<TraceReader>,
    pub path: PathBuf,
    /// Whether its last sample is in the superbatch. Otherwise another one continues with it.
    pub is_used_up: bool,
}

/// Why sampling ended.
enum End {
    /// The disk budget is exhausted.
    Full,
    /// A stop was requested.
    Stopped,
    Failed(StrategyError),
}

impl From<SampleError> for End {
    fn from(error: SampleError) -> End {
        End::Failed(error.into())
    }
}

impl From<StrategyError> for End {
    fn from(error: StrategyError) -> End {
        End::Failed(error)
    }
}

/// The directory of traces.
pub(super) fn folder(job: &Job) -> PathBuf {
    job.out_of_core.scratch.join("superbatches")
}

/// The path of the trace of a superbatch whose first sampled batch is at `first`.
pub(super) fn path_of(job: &Job, first: RunPosition) -> PathBuf {
    let batch = first.batch;
    folder(job).join(match first.phase {
        Phase::Train { epoch } => format!("{epoch}-{batch}.trace"),
        Phase::Validation { epoch } => format!("validation-{epoch}-{batch}.trace"),
        Phase::Test => format!("test-{batch}.trace"),
    })
}

/// Creates the directory. Removes files that are not traces of this job's training, or not from `from` on.
pub(super) fn tidy(job: &Job, from: RunPosition) -> Result<()> {
    let folder = folder(job);
    fs::create_dir_all(&folder).map_err(StoreError::io(&folder))?;
    let (expected, from) = (job.trace_header(), job.training_position(from));
    for entry in fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
        let path = entry.map_err(StoreError::io(&folder))?.path();
        let trace = TraceReader::open(&path).ok().filter(|trace| is_of(trace, &expected));
        let useful = trace.and_then(|trace| trace.entries().last().map(|last| last.at >= from));
        if useful != Some(true) {
            fs::remove_file(&path).map_err(StoreError::io(&path))?;
        }
    }
    Ok(())
}

/// A trace of an earlier process, or of an earlier superbatch, that contains a training batch.
pub(super) fn find(job: &Job, first: RunPosition) -> Result<Option<(TraceReader, PathBuf)>> {
    if !matches!(first.phase, Phase::Train { .. }) {
        return Ok(None);
    }
    let (folder, expected) = (folder(job), job.trace_header());
    for entry in fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
        let path = entry.map_err(StoreError::io(&folder))?.path();
        let Ok(trace) = TraceReader::open(&path) else { continue };
        if is_of(&trace, &expected) && index_of(&trace, first).is_some() {
            return Ok(Some((trace, path)));
        }
    }
    Ok(None)
}

/// Whether a trace can be used: it has the batches of this job, in records of today's format. Others take more memory.
fn is_of(trace: &TraceReader, expected: &TraceHeader) -> bool {
    trace.header() == expected && trace.format() == RecordFormat::default()
}

fn index_of(trace: &TraceReader, at: RunPosition) -> Option<usize> {
    trace.entries().iter().position(|entry| entry.at == at.position())
}

impl<W: StoredId + StoredRow> Superbatch<W> {
    /// A superbatch of kept evaluations, up to its disk budget.
    pub fn of_kept(making: &Making<'_, W>, window: Vec<RunPosition>) -> Result<Superbatch<W>> {
        let mut building = Building::new(making, window)?;
        building.add_kept(0)?;
        building.check_first(0)?;
        Ok(building.finish(None))
    }

    /// The batches of a window as far as an existing trace has them. It was made within the disk budget.
    pub fn reread(
        making: &Making<'_, W>,
        window: Vec<RunPosition>,
        trace: TraceReader,
        path: PathBuf,
        mut ahead: Option<&mut PullsAhead>,
    ) -> Result<Superbatch<W>> {
        let making = Making { disk_bytes: u64::MAX, all: None, ..*making };
        let mut building = Building::new(&making, window)?;
        building.add_kept(0)?;
        let mut index = building.rest.peek().and_then(|at| index_of(&trace, *at)).unwrap_or(0);
        let (mut cursor, mut sample) = (trace.forwards(), Sample::default());
        while let Some((at, entry)) = building.rest.peek().zip(trace.entries().get(index)) {
            if entry.at != at.position() {
                break;
            }
            cursor.read(index, &mut sample)?;
            building.add_sampled(index, &sample)?;
            if let Some(ahead) = &mut ahead {
                ahead.advance(&sample);
            }
            building.add_kept(0)?;
            index += 1;
        }
        drop(cursor);
        Ok(building.finish(Some((trace, path))))
    }

    /// Samples the batches of a window that are not kept to a trace at `path`, up to the disk budget. They are of one
    /// job: of training, or of one evaluation. With a history, `ahead` decides what is pulled.
    pub fn sample(
        making: &Making<'_, W>,
        sizes: &Sizes,
        lists: &LoadedNeighbours<W>,
        window: Vec<RunPosition>,
        path: PathBuf,
        ahead: Option<&mut PullsAhead>,
    ) -> Result<Superbatch<W>> {
        match lists {
            LoadedNeighbours::Memory(graph) => {
                Superbatch::sample_on(making, sizes, graph, window, path, ahead)
            }
            LoadedNeighbours::Disk(graph) => Superbatch::sample_on(making, sizes, graph, window, path, ahead),
        }
    }

    fn sample_on<T: Topology>(
        making: &Making<'_, W>,
        sizes: &Sizes,
        graph: &T,
        window: Vec<RunPosition>,
        path: PathBuf,
        mut ahead: Option<&mut PullsAhead>,
    ) -> Result<Superbatch<W>> {
        let sampled = window.iter().filter(|at| making.kept.of(at.phase).is_none());
        let positions: Vec<Position> = sampled.map(|at| at.position()).collect();
        let mut building = Building::new(making, window)?;
        let is_full = building.add_kept(0)?;
        let Some(first) = building.rest.peek().copied().filter(|_| !is_full) else {
            building.check_first(0)?;
            return Ok(building.finish(None));
        };
        let job = job_of(making.job, first.phase);
        let mut writer = TraceWriter::create(&path, job.trace_header())?;
        let bulk = Bulk {
            graph,
            batches: &*job.batches,
            settings: &job.settings,
            threads: sizes.workers,
            most_bytes: sizes.sampling_bytes,
        };
        // First hops, then what is pulled, then the rest: only the second goes batch by batch.
        let decided = ahead.as_deref().map(|ahead| ahead.decide(&bulk, &positions, &job.stop)).transpose()?;
        let is_pulled = |at, hop, index, _: NodeId| {
            decided.as_ref().is_some_and(|decided| decided.is_pulled(at, hop, index))
        };
        let pulls = decided.is_some().then_some(&is_pulled as &BatchPulls<'_>);
        let (mut index, mut before) = (0, writer.bytes());
        let ended = bulk.run_with_pulls(sizes.workers, positions.iter().copied(), pulls, |at, sample| {
            writer.write(at, sample)?;
            let nodes = building.add_sampled(index, sample)?;
            ahead.iter_mut().for_each(|ahead| ahead.advance(sample));
            index += 1;
            if job.stop.is_asked() {
                return Err(End::Stopped);
            }
            let bytes = writer.bytes();
            let next_bytes = bytes - std::mem::replace(&mut before, bytes);
            match building.is_full(nodes, bytes, next_bytes) || building.add_kept(bytes)? {
                true => Err(End::Full),
                false => Ok(()),
            }
        });
        if let Err(End::Failed(error)) = ended {
            return Err(error);
        }
        building.check_first(writer.bytes())?;
        // A partial superbatch is a superbatch too. A resumed run uses it.
        writer.finish()?;
        if matches!(ended, Err(End::Stopped)) {
            return Err(StrategyError::Stopped);
        }
        let trace = TraceReader::open(&path)?;
        Ok(building.finish(Some((trace, path))))
    }

    /// Decides for every row of every batch where it comes from and whether it stays. `stay` has the rows of a static cache,
    /// once they are chosen.
    pub fn plan(
        &self,
        job: &Job,
        slots: u64,
        stay: &mut Option<StaticRows>,
    ) -> Result<(PlanFile, PlanTally)> {
        let plan = PlanFile::create(&self.accesses)?;
        if job.out_of_core.cache == CachePolicy::Static {
            let rows = job.dataset.manifest().nodes.count;
            let chosen = match stay.take() {
                Some(chosen) => chosen,
                None => StaticRows::choose(rows, &mut &self.accesses)?,
            };
            let put = |batch: u32, placements: &Placements| plan.put(batch, placements);
            let tally = stay.insert(chosen).plan(slots, &mut &self.accesses, put)?;
            return Ok((plan, tally));
        }
        let mut planner = Belady::<W>::new(job.dataset.manifest().nodes.count, slots, self.count() as u32);
        let mut uses = plan.next_uses(0..self.count() as u32)?;
        let tally =
            planner.plan(&mut &self.accesses, &mut uses, |batch, placements| plan.put(batch, placements))?;
        Ok((plan, tally))
    }

    /// Number of batches.
    pub fn count(&self) -> usize {
        self.steps.len()
    }

    /// The position after its last batch, in the same phase.
    pub fn behind(&self) -> Option<RunPosition> {
        self.steps.last().map(|last| RunPosition { batch: last.at.batch + 1, ..last.at })
    }

    /// The path of its own trace.
    pub fn path(&self) -> Option<&Path> {
        self.own.as_ref().map(|own| &*own.path)
    }

    /// Bytes on disk of its trace and accesses.
    pub fn kept_bytes(&self) -> u64 {
        let trace_bytes = self.own.as_ref().map_or(0, |own| own.trace.summary().bytes);
        trace_bytes + self.accesses.accesses() * AccessFile::<W>::BYTES
    }

    /// Its batches, and its trace to be removed after them, when nothing else of it is needed.
    pub fn into_steps(self) -> (Vec<PlannedBatch>, Spent) {
        (self.steps, Spent(self.own.filter(|own| own.is_used_up).map(|own| own.path)))
    }
}

/// The trace of a superbatch whose batches were all yielded.
pub(super) struct Spent(Option<PathBuf>);

impl Spent {
    /// Removes it. Until then a resumed run may need it.
    pub fn remove(self) -> Result<()> {
        match self.0 {
            Some(path) => Ok(fs::remove_file(&path).map_err(StoreError::io(&path))?),
            None => Ok(()),
        }
    }
}
