//! Decides pulls ahead of training, in the order of batches. The first hop of a batch is all that this needs.

use super::{History, PulledMarks, SharedStamps, Stamps, first_hop};
use crate::job::run_positions;
use crate::{Job, Phase, Result, RunPosition};
use esker_sample::bulk::Bulk;
use esker_sample::{Batches, Carry, Position, Sample, Sampler, Settings, Topology};
use esker_types::NodeId;
use std::collections::VecDeque;

/// How the first hop is drawn, without what only later steps need.
fn drawn(settings: &Settings) -> Settings {
    Settings { carry: Carry::default(), ..first_hop(settings) }
}

/// Decides batch by batch, for samplers that take batches in turn.
pub(crate) struct Decider<T: Topology> {
    job: Job,
    history: History,
    stamps: Stamps,
    sampler: Sampler<T>,
    positions: Box<dyn Iterator<Item = RunPosition> + Send>,
    /// Decided, and not taken yet: at most one batch per sampler.
    decided: VecDeque<(RunPosition, PulledMarks)>,
    seeds: Vec<NodeId>,
    sample: Sample,
}

impl<T: Topology> Decider<T> {
    /// Decides from a position on, where stamps are these.
    pub fn new(
        topology: T,
        job: &Job,
        history: History,
        stamps: Stamps,
        from: RunPosition,
    ) -> Result<Decider<T>> {
        let bytes = super::deciding_bytes(job).saturating_add(job.room.spare_bytes / 16);
        let trained = run_positions(job, from).filter(|at| matches!(at.phase, Phase::Train { .. }));
        Ok(Decider {
            sampler: Sampler::new(topology, drawn(&job.settings), bytes)?,
            job: job.clone(),
            history,
            stamps,
            positions: Box::new(trained),
            decided: VecDeque::new(),
            seeds: Vec::new(),
            sample: Sample::default(),
        })
    }

    /// The decision about a training batch. Each is taken once.
    pub fn take(&mut self, at: RunPosition) -> Result<PulledMarks> {
        loop {
            if let Some(index) = self.decided.iter().position(|(decided, _)| *decided == at) {
                let (_, marks) = self.decided.remove(index).expect("it was just found");
                return Ok(marks);
            }
            let next = self.positions.next().expect("batches are taken from the position on, each once");
            let drawn = self.job.sampled_at(next.position());
            self.job.batches.seeds(drawn, &mut self.seeds)?;
            self.sampler.begin(&*self.job.batches, drawn)?;
            let sampled = self.sampler.sample(drawn, &self.seeds, &mut self.sample);
            sampled.map_err(|error| crate::sampling::larger_than_expected(&self.job, next, error))?;
            let marks = self.history.decide(&mut self.stamps, &self.sample);
            self.decided.push_back((next, marks));
        }
    }
}

/// Decides superbatch by superbatch.
pub(crate) struct PullsAhead {
    history: History,
    /// As of the last sampled batch.
    stamps: Stamps,
    /// As of the last step.
    applied: SharedStamps,
}

impl PullsAhead {
    /// From the batch after the last step on.
    pub fn new(history: History, applied: SharedStamps) -> PullsAhead {
        let stamps = applied.lock().clone();
        PullsAhead { history, stamps, applied }
    }

    /// Forgets what was sampled after the last step.
    pub fn restart(&mut self) {
        self.stamps.clone_from(&self.applied.lock());
    }

    /// A batch was sampled.
    pub fn advance(&mut self, sample: &Sample) {
        self.history.advance(&mut self.stamps, sample);
    }

    /// Decides training batches whose first hops are drawn in parallel. Stamps are advanced by batches that are really
    /// sampled, later on: the disk budget may end a superbatch before.
    pub fn decide<'a, T: Topology>(
        &self,
        bulk: &Bulk<'_, T, dyn Batches + '_>,
        positions: &'a [Position],
    ) -> Result<DecidedBatches<'a>> {
        let settings = drawn(bulk.settings);
        let first_hops = Bulk { settings: &settings, ..*bulk };
        let (mut stamps, mut marks) = (self.stamps.clone(), Vec::with_capacity(positions.len()));
        first_hops.run_with(bulk.threads, positions.iter().copied(), |_, sample| {
            marks.push(self.history.decide(&mut stamps, sample));
            Ok::<(), crate::StrategyError>(())
        })?;
        Ok(DecidedBatches { positions, marks })
    }
}

/// What some batches pull.
pub(crate) struct DecidedBatches<'a> {
    /// Ascending.
    positions: &'a [Position],
    marks: Vec<PulledMarks>,
}

impl DecidedBatches<'_> {
    /// Whether a batch pulls the node of hop 1 with this index.
    pub fn is_pulled(&self, at: Position, index: usize) -> bool {
        let batch = self.positions.binary_search(&at).expect("all batches that are sampled were decided");
        self.marks[batch].is_pulled(index)
    }
}
