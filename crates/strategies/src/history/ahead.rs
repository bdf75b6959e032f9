//! Decides pulls ahead of training, in the order of batches, hop by hop. The first hops of a batch are all that this needs:
//! what is pulled at a hop depends on stamps of that hop, and on what is pulled at the hops before.

use super::profile::stopped;
use super::{BatchWork, History, PulledMarks, SharedStamps, Stamps, first_hops};
use crate::job::run_positions;
use crate::{Job, Phase, Result, RunPosition};
use esker_sample::bulk::{BatchPulls, Bulk};
use esker_sample::{Batches, Carry, Position, Sample, Sampler, Settings, Topology};
use esker_types::{NodeId, StopSignal};
use std::collections::VecDeque;

/// How the first hops are drawn, without what only later steps need.
fn drawn(settings: &Settings, hops: usize) -> Settings {
    Settings { carry: Carry::default(), ..first_hops(settings, hops) }
}

/// Decides batch by batch, for samplers that take batches in turn.
pub(crate) struct Decider<T: Topology> {
    job: Job,
    history: History,
    stamps: Stamps,
    /// Of one hop, of two hops, and so on.
    samplers: Vec<Sampler<T>>,
    positions: Box<dyn Iterator<Item = RunPosition> + Send>,
    /// Decided, and not taken yet: at most one batch per sampler.
    decided: VecDeque<(RunPosition, PulledMarks)>,
    seeds: Vec<NodeId>,
    sample: Sample,
}

impl<T: Topology + Clone> Decider<T> {
    /// Decides from a position on, where stamps are these.
    pub fn new(
        topology: T,
        job: &Job,
        history: History,
        stamps: Stamps,
        from: RunPosition,
    ) -> Result<Decider<T>> {
        let hops = history.outline.hops;
        let spare = job.room.spare_bytes / 16 / hops.max(1) as u64;
        let sampler = |hops: usize| {
            let bytes = job.first_hops_bound(hops).bytes(1).saturating_add(spare);
            Sampler::new(topology.clone(), drawn(&job.settings, hops), bytes)
        };
        let trained = run_positions(job, from).filter(|at| matches!(at.phase, Phase::Train { .. }));
        Ok(Decider {
            samplers: (1..=hops).map(sampler).collect::<Result<_, _>>()?,
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
            let mut marks = PulledMarks::default();
            for sampler in &mut self.samplers {
                sampler.begin(&*self.job.batches, drawn)?;
                let sampled = marks.sample(sampler, drawn, &self.seeds, &mut self.sample);
                sampled.map_err(|error| crate::sampling::larger_than_expected(&self.job, next, error))?;
                self.history.decide(&mut self.stamps, &self.sample, &mut marks);
            }
            self.stamps.end_batch();
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

    /// Decides training batches. First hops of all of them are drawn in parallel, then those up to the second with what is
    /// pulled at the first, and so on. Stamps are advanced by batches that are really sampled, later on: the disk budget
    /// may end a superbatch before. So a stop loses nothing here: what was decided is decided again.
    pub fn decide<'a, T: Topology>(
        &self,
        bulk: &Bulk<'_, T, dyn Batches + '_>,
        positions: &'a [Position],
        stop: &StopSignal,
    ) -> Result<DecidedBatches<'a>> {
        let mut decided = DecidedBatches { positions, marks: vec![PulledMarks::default(); positions.len()] };
        for hops in 1..=self.history.outline.hops {
            let settings = drawn(bulk.settings, hops);
            let first_hops = Bulk { settings: &settings, ..*bulk };
            // Each hop has stamps of its own.
            let (mut stamps, mut next) = (self.stamps.clone(), decided.marks.clone());
            let mut marks = next.iter_mut();
            let is_pulled = |at, hop, index, _: NodeId| decided.is_pulled(at, hop, index);
            let pulls = (hops > 1).then_some(&is_pulled as &BatchPulls<'_>);
            first_hops.run_with_pulls(bulk.threads, positions.iter().copied(), pulls, |_, sample| {
                let marks = marks.next().expect("marks for every batch");
                self.history.decide(&mut stamps, sample, marks);
                stamps.end_batch();
                stopped(stop)
            })?;
            decided.marks = next;
        }
        self.compare(bulk, positions, stop)?;
        Ok(decided)
    }

    /// Samples some batches without pulls, to know what these save.
    fn compare<T: Topology>(
        &self,
        bulk: &Bulk<'_, T, dyn Batches + '_>,
        positions: &[Position],
        stop: &StopSignal,
    ) -> Result<()> {
        let compared = positions.iter().copied().filter(|at| BatchWork::is_compared(*at));
        bulk.run_with(bulk.threads, compared, |at, sample| {
            self.applied.work.put(at, sample);
            stopped(stop)
        })
    }
}

/// What some batches pull.
pub(crate) struct DecidedBatches<'a> {
    /// Ascending.
    positions: &'a [Position],
    marks: Vec<PulledMarks>,
}

impl DecidedBatches<'_> {
    /// Whether a batch pulls the node of a hop with this index.
    pub fn is_pulled(&self, at: Position, hop: usize, index: usize) -> bool {
        let batch = self.positions.binary_search(&at).expect("all batches that are sampled were decided");
        self.marks[batch].is_pulled(hop, index)
    }
}
