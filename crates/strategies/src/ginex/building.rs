//! How a superbatch is put together: which batches it may have, and batch after batch what it accesses, up to its disk
//! budget.

use super::evaluation::Evaluations;
use super::sizes::{Sizes, disk_bytes};
use super::superbatch::{OwnTrace, PlannedBatch, Superbatch, folder};
use crate::job::run_positions;
use crate::{Job, Phase, Result, RunPosition, StrategyError};
use esker_fetch::{AccessFile, StoredRow};
use esker_sample::trace::TraceReader;
use esker_sample::{Sample, StoredId};
use esker_types::ByteCount;
use std::iter::Peekable;
use std::path::PathBuf;
use std::sync::Arc;
use std::vec::IntoIter;

/// What a superbatch is made of.
pub(super) struct Making<'a, W> {
    pub job: &'a Job,
    pub kept: &'a Evaluations<W>,
    /// Disk budget of its files.
    pub disk_bytes: u64,
    /// The number of batches, if it is only useful with all of them. Sampling then ends as soon as it is known that
    /// their samples do not fit.
    pub all: Option<u64>,
}

impl<W: StoredId + StoredRow> Making<'_, W> {
    /// The batches of a superbatch from `from` on, if the disk budget allows them: training, and evaluations that are
    /// kept. One that is not kept has superbatches of its own.
    pub fn window(&self, sizes: &Sizes, from: RunPosition) -> Vec<RunPosition> {
        let is_together =
            |phase: Phase| matches!(phase, Phase::Train { .. }) || self.kept.of(phase).is_some();
        let all = run_positions(self.job, from).take(sizes.superbatch as usize);
        match is_together(from.phase) {
            true => all.take_while(|at| is_together(at.phase)).collect(),
            false => all.take_while(|at| at.phase == from.phase).collect(),
        }
    }

    /// The first batch of a window that must be sampled.
    pub fn first_sampled(&self, window: &[RunPosition]) -> Option<RunPosition> {
        window.iter().copied().find(|at| self.kept.of(at.phase).is_none())
    }
}

/// A superbatch while batches are added to it.
pub(super) struct Building<'a, W> {
    making: &'a Making<'a, W>,
    /// The batches that come next.
    pub rest: Peekable<IntoIter<RunPosition>>,
    /// Batches, the index of their samples, and the trace if it is not the superbatch's own.
    steps: Vec<(RunPosition, usize, Option<Arc<TraceReader>>)>,
    accesses: AccessFile<W>,
    sample_bytes: u64,
}

impl<'a, W: StoredId + StoredRow> Building<'a, W> {
    pub fn new(making: &'a Making<'a, W>, window: Vec<RunPosition>) -> Result<Building<'a, W>> {
        let accesses = AccessFile::create(&folder(making.job))?;
        let (rest, steps) = (window.into_iter().peekable(), Vec::new());
        Ok(Building { making, rest, steps, accesses, sample_bytes: 0 })
    }

    /// Adds the batches of kept evaluations that come next. Returns whether the disk budget is then exhausted.
    /// `trace_bytes` is the size of the superbatch's own trace so far.
    pub fn add_kept(&mut self, trace_bytes: u64) -> Result<bool> {
        while let Some(at) = self.rest.peek().copied() {
            let Some(kept) = self.making.kept.of(at.phase) else { break };
            let (step, before) = (&kept.steps[at.batch as usize], self.accesses.accesses());
            self.accesses.append_from(&kept.accesses, at.batch as u32)?;
            self.sample_bytes = self.sample_bytes.max(kept.sample_bytes);
            self.steps.push((at, step.sample, Some(step.trace.clone())));
            self.rest.next();
            if self.is_full(self.accesses.accesses() - before, trace_bytes, 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Adds the next batch, whose sample has this index in the superbatch's own trace. Returns its number of rows.
    pub fn add_sampled(&mut self, index: usize, sample: &Sample) -> Result<u64> {
        let at = self.rest.next().expect("samples come in the order of the window");
        match self.making.job.inference(at.phase).is_none_or(|over| over.rows) {
            true => self.accesses.append(&sample.node_ids, &[])?,
            false => self.accesses.append(&[], &[])?,
        }
        self.sample_bytes = self.sample_bytes.max(sample.bytes());
        self.steps.push((at, index, None));
        Ok(sample.node_ids.len() as u64)
    }

    /// Whether the disk budget does not allow another batch. The size of the next batch is not known. The last one's is
    /// the best guess.
    pub fn is_full(&self, nodes: u64, trace_bytes: u64, next_bytes: u64) -> bool {
        let (count, accesses) = (self.steps.len() as u64, self.accesses.accesses());
        let needed = match self.making.all {
            Some(all) => (trace_bytes + accesses * AccessFile::<W>::BYTES) / count * all,
            None => disk_bytes::<W>(count + 1, accesses + nodes, trace_bytes + next_bytes),
        };
        needed > self.making.disk_bytes
    }

    /// Refuses a disk budget that is too small for a single batch.
    pub fn check_first(&self, trace_bytes: u64) -> Result<()> {
        let used = disk_bytes::<W>(self.steps.len() as u64, self.accesses.accesses(), trace_bytes);
        if self.steps.len() == 1 && used > self.making.disk_bytes && self.making.all.is_none() {
            // Two superbatches, beside evaluations that are kept.
            let least = ByteCount(used.saturating_mul(3));
            return Err(StrategyError::TraceDisk { folder: folder(self.making.job), least });
        }
        Ok(())
    }

    pub fn finish(mut self, own: Option<(TraceReader, PathBuf)>) -> Superbatch<W> {
        self.accesses.close();
        let last = self.steps.iter().rev().find(|(.., kept)| kept.is_none()).map(|(_, index, _)| index + 1);
        let own = own.map(|(trace, path)| {
            let is_used_up = last == Some(trace.entries().len());
            OwnTrace { trace: Arc::new(trace), path, is_used_up }
        });
        let steps = self.steps.into_iter().map(|(at, sample, kept)| {
            let own = || own.as_ref().expect("a batch that is not kept is in the own trace").trace.clone();
            PlannedBatch { at, trace: kept.unwrap_or_else(own), sample }
        });
        let steps = steps.collect();
        Superbatch { steps, own, accesses: self.accesses, sample_bytes: self.sample_bytes }
    }
}
