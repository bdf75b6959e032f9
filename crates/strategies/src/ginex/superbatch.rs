//! A superbatch: some batches sampled to a trace, and a plan for their rows (sections 3.1 and 3.4).
//!
//! A trace gets its final name when it is complete, and its header describes its content. So a resumed run uses what an
//! earlier one sampled, and removes what belongs to another job. Accesses and plans follow from the trace and are
//! computed again.

use super::sizes::{Sizes, disk_bytes};
use crate::neighbours::LoadedNeighbours;
use crate::{Job, Result, StrategyError};
use esker_fetch::{AccessFile, FetchError, PlanFile, StoredRow};
use esker_plan::{Belady, PlanTally};
use esker_sample::bulk::{Bulk, positions};
use esker_sample::trace::{TraceReader, TraceWriter};
use esker_sample::{Position, Sample, SampleError, StoredId, Topology};
use esker_store::StoreError;
use std::fs;
use std::path::{Path, PathBuf};

/// Some sampled batches.
pub(super) struct Superbatch<W> {
    pub trace: TraceReader,
    path: PathBuf,
    /// The first sample of the trace that is used.
    pub first: usize,
    /// Rows of the batches from `first` on.
    pub accesses: AccessFile<W>,
    /// Bytes of the largest of their samples.
    pub sample_bytes: u64,
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

impl From<FetchError> for End {
    fn from(error: FetchError) -> End {
        End::Failed(error.into())
    }
}

const ENDING: &str = "trace";

/// The directory of traces.
fn folder(job: &Job) -> PathBuf {
    job.out_of_core.scratch.join("superbatches")
}

/// Creates the directory. Removes files that are not traces of this job, or not from `from` on.
pub(super) fn tidy(job: &Job, from: Position) -> Result<()> {
    let folder = folder(job);
    fs::create_dir_all(&folder).map_err(StoreError::io(&folder))?;
    let expected = job.trace_header();
    for entry in fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
        let path = entry.map_err(StoreError::io(&folder))?.path();
        let trace = TraceReader::open(&path).ok().filter(|trace| *trace.header() == expected);
        let useful = trace.and_then(|trace| trace.entries().last().map(|last| last.at >= from));
        if useful != Some(true) {
            fs::remove_file(&path).map_err(StoreError::io(&path))?;
        }
    }
    Ok(())
}

impl<W: StoredId + StoredRow> Superbatch<W> {
    /// A trace of an earlier process that contains the batch at `from`.
    pub fn find(job: &Job, from: Position) -> Result<Option<Superbatch<W>>> {
        let folder = folder(job);
        let expected = job.trace_header();
        for entry in fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
            let path = entry.map_err(StoreError::io(&folder))?.path();
            let Ok(trace) = TraceReader::open(&path) else { continue };
            if *trace.header() != expected {
                continue;
            }
            if let Some(first) = trace.entries().iter().position(|entry| entry.at == from) {
                return Superbatch::reread(trace, path, first, &folder).map(Some);
            }
        }
        Ok(None)
    }

    /// Collects the accesses of an existing trace.
    fn reread(trace: TraceReader, path: PathBuf, first: usize, folder: &Path) -> Result<Superbatch<W>> {
        let (mut accesses, mut sample, mut sample_bytes) =
            (AccessFile::create(folder)?, Sample::default(), 0);
        let mut cursor = trace.forwards();
        for at in first..trace.entries().len() {
            cursor.read(at, &mut sample)?;
            accesses.append(&sample.node_ids, &sample.unneeded)?;
            sample_bytes = sample_bytes.max(sample.bytes());
        }
        accesses.close();
        drop(cursor);
        Ok(Superbatch { trace, path, first, accesses, sample_bytes })
    }

    /// Samples batches from `from` on, up to the length of a superbatch or its disk budget. `None` after the last.
    pub fn sample(
        job: &Job,
        sizes: &Sizes,
        lists: &LoadedNeighbours<W>,
        from: Position,
    ) -> Result<Option<Superbatch<W>>> {
        match lists {
            LoadedNeighbours::Memory(graph) => Superbatch::sample_on(job, sizes, graph, from),
            LoadedNeighbours::Disk(graph) => Superbatch::sample_on(job, sizes, graph, from),
        }
    }

    fn sample_on<T: Topology>(
        job: &Job,
        sizes: &Sizes,
        graph: &T,
        from: Position,
    ) -> Result<Option<Superbatch<W>>> {
        let all = positions(&*job.batches, from, job.epochs).take(sizes.superbatch as usize);
        let all: Vec<Position> = all.collect();
        let Some(first) = all.first() else { return Ok(None) };
        let folder = folder(job);
        let path = folder.join(format!("{}-{}.{ENDING}", first.epoch, first.batch));
        let mut writer = TraceWriter::create(&path, job.trace_header())?;
        let mut accesses = AccessFile::<W>::create(&folder)?;
        let (mut sample_bytes, mut count) = (0, 0u64);
        let bulk = Bulk {
            graph,
            batches: &*job.batches,
            settings: &job.settings,
            threads: sizes.workers,
            most_bytes: sizes.sampling_bytes,
        };
        let ended = bulk.run(all.iter().copied(), |at, sample| {
            let before = writer.bytes();
            // The size of the next batch is not known. This one's size is the best guess.
            let nodes = sample.node_ids.len() as u64;
            writer.write(at, sample)?;
            accesses.append(&sample.node_ids, &sample.unneeded)?;
            sample_bytes = sample_bytes.max(sample.bytes());
            count += 1;
            if job.stop.is_asked() {
                return Err(End::Stopped);
            }
            let (this, all) = (writer.bytes() - before, writer.bytes());
            let with_next = disk_bytes::<W>(count + 1, accesses.accesses() + nodes, all + this);
            match with_next > sizes.disk_bytes {
                true => Err(End::Full),
                false => Ok(()),
            }
        });
        let ended = match ended {
            Err(End::Failed(error)) => return Err(error),
            ended => ended,
        };
        let used = disk_bytes::<W>(count, accesses.accesses(), writer.bytes());
        if count == 1 && used > sizes.disk_bytes {
            let least = esker_types::ByteCount(used * 2 + used / 4);
            return Err(StrategyError::TraceDisk { folder, least });
        }
        // A partial superbatch is a superbatch too. A resumed run uses it.
        writer.finish()?;
        if matches!(ended, Err(End::Stopped)) {
            return Err(StrategyError::Stopped);
        }
        accesses.close();
        let trace = TraceReader::open(&path)?;
        Ok(Some(Superbatch { trace, path, first: 0, accesses, sample_bytes }))
    }

    /// Decides for every row of every batch where it comes from and whether it stays.
    pub fn plan(&self, job: &Job, slots: u64) -> Result<(PlanFile, PlanTally)> {
        let plan = PlanFile::create(&self.accesses)?;
        let mut planner = Belady::<W>::new(job.dataset.manifest().nodes.count, slots, self.count() as u32);
        let mut uses = plan.next_uses(0..self.count() as u32)?;
        let tally =
            planner.plan(&mut &self.accesses, &mut uses, |batch, placements| plan.put(batch, placements))?;
        Ok((plan, tally))
    }

    /// Number of batches from `first` on.
    pub fn count(&self) -> usize {
        self.trace.entries().len() - self.first
    }

    /// The position after its last batch, in the same epoch.
    pub fn behind(&self) -> Position {
        let last = self.trace.entries().last().map_or(Position { epoch: 0, batch: 0 }, |last| last.at);
        Position { batch: last.batch + 1, ..last }
    }

    /// Its trace and the trace's path, when nothing else of it is needed.
    pub fn into_trace(self) -> (TraceReader, Spent) {
        (self.trace, Spent(self.path))
    }
}

/// A trace that is not needed any more.
pub(super) struct Spent(PathBuf);

impl Spent {
    /// Removes it after every batch of it was yielded. Until then a resumed run may need it.
    pub fn remove(self) -> Result<()> {
        Ok(fs::remove_file(&self.0).map_err(StoreError::io(&self.0))?)
    }
}
