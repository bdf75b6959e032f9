//! The samples of evaluations. Their seeds and draws are the same every time, so each evaluation is sampled once,
//! before the first superbatch, and its trace is kept until the run ends. A resumed run uses it again. Superbatches
//! then only read it: between training batches, an evaluation costs no sampling.
//!
//! Kept traces take part of the disk budget. An evaluation that exceeds this part is sampled again each time, in
//! superbatches of its own.

use super::building::Making;
use super::sizes::Sizes;
use super::superbatch::Superbatch;
use crate::neighbours::LoadedNeighbours;
use crate::{Job, Phase, Result, RunPosition};
use esker_fetch::{AccessFile, StoredRow};
use esker_sample::StoredId;
use esker_sample::trace::TraceReader;
use esker_store::StoreError;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Kept traces take at most one part in this many of the disk budget. The rest is for superbatches.
pub(super) const KEPT_PART: u64 = 4;
/// Names of the evaluations' traces: validation after epochs, validation at the end, test.
const NAMES: [&str; 3] = ["validation", "last-validation", "test"];

/// The samples of evaluations that are kept.
pub(super) struct Evaluations<W> {
    all: [Option<Superbatch<W>>; NAMES.len()],
    /// Epochs of the run. The validation after them is the last one.
    epochs: u64,
}

/// The directory of kept traces.
fn folder(job: &Job) -> PathBuf {
    job.out_of_core.scratch.join("evaluation")
}

fn path(job: &Job, kind: usize) -> PathBuf {
    folder(job).join(format!("{}.trace", NAMES[kind]))
}

/// The kind of evaluation of a phase.
fn kind(epochs: u64, phase: Phase) -> Option<usize> {
    match phase {
        Phase::Train { .. } => None,
        Phase::Validation { epoch } if epoch == epochs => Some(1),
        Phase::Validation { .. } => Some(0),
        Phase::Test => Some(2),
    }
}

/// The evaluations from a position on: the last phase of each kind.
fn to_come(job: &Job, from: RunPosition) -> impl Iterator<Item = Phase> {
    let last_epoch = job.epochs.checked_sub(1).filter(|epoch| job.validates_after(*epoch));
    let validation = last_epoch.map(|epoch| Phase::Validation { epoch });
    let phases = [validation, Some(Phase::Validation { epoch: job.epochs }), Some(Phase::Test)];
    phases.into_iter().flatten().filter(move |phase| *phase >= from.phase && job.count(*phase) > 0)
}

/// The batches of a phase.
fn batches_of(job: &Job, phase: Phase) -> Vec<RunPosition> {
    (0..job.count(phase)).map(|batch| RunPosition { phase, batch }).collect()
}

/// A job with the batches and settings of a phase.
pub(super) fn job_of(job: &Job, phase: Phase) -> Job {
    let mut job = job.clone();
    if let Some(over) = job.inference(phase).cloned() {
        (job.batches, job.outline.settings) = (over.batches, over.settings);
        // Evaluations pull nothing.
        job.outline.history = None;
    }
    job
}

/// Removes all kept traces.
pub(super) fn remove(job: &Job) -> Result<()> {
    let folder = folder(job);
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(StoreError::io(&folder)(error).into()),
        _ => Ok(()),
    }
}

impl<W: StoredId + StoredRow> Evaluations<W> {
    /// No evaluation is kept.
    pub fn none(job: &Job) -> Evaluations<W> {
        Evaluations { all: Default::default(), epochs: job.epochs }
    }

    /// Those that an earlier process kept and that are to come from a position on. Removes all other files.
    pub fn reopen(job: &Job, from: RunPosition) -> Result<Evaluations<W>> {
        let mut kept = Evaluations::none(job);
        let folder = folder(job);
        fs::create_dir_all(&folder).map_err(StoreError::io(&folder))?;
        for phase in to_come(job, from) {
            let Some(kind) = kind(job.epochs, phase) else { continue };
            let Ok(trace) = TraceReader::open(&path(job, kind)) else { continue };
            let (entries, window) = (trace.entries(), batches_of(job, phase));
            let is_whole = entries.iter().map(|entry| entry.at).eq(window.iter().map(|at| at.position()));
            let accesses: u64 = entries.iter().map(|entry| entry.nodes).sum();
            let fits = trace.summary().bytes + accesses * AccessFile::<W>::BYTES <= kept.allowed(job);
            if is_whole && fits && *trace.header() == job_of(job, phase).trace_header() {
                let making = Making { job, kept: &Evaluations::none(job), disk_bytes: u64::MAX, all: None };
                kept.all[kind] = Some(Superbatch::reread(&making, window, trace, path(job, kind), None)?);
            }
        }
        let useful = |path: &PathBuf| kept.all.iter().flatten().any(|one| one.path() == Some(&**path));
        for entry in fs::read_dir(&folder).map_err(StoreError::io(&folder))? {
            let path = entry.map_err(StoreError::io(&folder))?.path();
            if !useful(&path) {
                fs::remove_file(&path).map_err(StoreError::io(&path))?;
            }
        }
        Ok(kept)
    }

    /// The evaluations from a position on that are not kept.
    pub fn missing(&self, job: &Job, from: RunPosition) -> Vec<Phase> {
        to_come(job, from).filter(|phase| self.of(*phase).is_none()).collect()
    }

    /// Samples an evaluation and keeps its trace if the disk budget allows it.
    pub fn sample(
        &mut self,
        job: &Job,
        sizes: &Sizes,
        lists: &LoadedNeighbours<W>,
        phase: Phase,
    ) -> Result<()> {
        let Some(kind) = kind(self.epochs, phase) else { return Ok(()) };
        let (window, none) = (batches_of(job, phase), Evaluations::none(job));
        let count = window.len();
        let making = Making { job, kept: &none, disk_bytes: self.allowed(job), all: Some(count as u64) };
        let sampled = Superbatch::sample(&making, sizes, lists, window, path(job, kind), None)?;
        if sampled.count() == count {
            self.all[kind] = Some(sampled);
            return Ok(());
        }
        job.progress.note(&format!(
            "the samples of the {} exceed a quarter of the disk budget: they are drawn again each time",
            NAMES[kind].replace('-', " "),
        ));
        sampled.into_steps().1.remove()
    }

    /// The samples of a phase, if they are kept.
    pub fn of(&self, phase: Phase) -> Option<&Superbatch<W>> {
        kind(self.epochs, phase).and_then(|kind| self.all[kind].as_ref())
    }

    /// Bytes on disk.
    pub fn disk_bytes(&self) -> u64 {
        self.all.iter().flatten().map(Superbatch::kept_bytes).sum()
    }

    /// Bytes on disk that further evaluations may take.
    fn allowed(&self, job: &Job) -> u64 {
        (job.disk_bytes_left() / KEPT_PART).saturating_sub(self.disk_bytes())
    }
}
