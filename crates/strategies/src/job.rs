//! What is to be trained on, as every strategy is told it, once: all batches of training, validation and test are known from it.

use crate::{JobOutline, Phase, Result, RunPosition, StrategyError};
use esker_sample::trace::TraceHeader;
use esker_sample::{Batches, Position, Settings};
use esker_types::{Progress, Silent, StopSignal};
use rayon::ThreadPool;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What to yield batches of.
#[derive(Clone)]
pub struct Job {
    /// Its size.
    pub outline: JobOutline,
    /// Which seeds each batch of training has, and in which order batches come.
    pub batches: Arc<dyn Batches>,
    /// Batches of validation and test, and when they come.
    pub schedule: EvaluationSchedule,
    /// The threads of the run. There are no others that compute.
    pub pool: Arc<ThreadPool>,
    /// Where work before training reports how far it is.
    pub progress: Arc<dyn Progress + Send + Sync>,
    /// Asked by whoever wants the run to end: work before training and sampling ahead end soon, with nothing lost.
    pub stop: StopSignal,
}

/// When a run evaluates with sampled neighbourhoods, and on what. Nothing where it does not.
#[derive(Clone, Default)]
pub struct EvaluationSchedule {
    /// Validation after epochs.
    pub validation: Option<Inference>,
    /// After each so many epochs, and after the last; 0 for never.
    pub every: u64,
    /// Validation of the model that is kept, in the end.
    pub last_validation: Option<Inference>,
    /// Test, in the end.
    pub test: Option<Inference>,
}

/// Batches over seeds that are not trained on.
#[derive(Clone)]
pub struct Inference {
    /// Which seeds.
    pub batches: Arc<dyn Batches>,
    /// Seeds of the largest batch.
    pub largest_batch: u64,
    /// How neighbours are drawn.
    pub settings: Settings,
    /// Whether feature rows are needed; else batches come without.
    pub rows: bool,
    /// What sampling may hold, where it is known better than from the fan-outs.
    pub sampling_bytes: Option<u64>,
}

impl Deref for Job {
    type Target = JobOutline;
    fn deref(&self) -> &JobOutline {
        &self.outline
    }
}

impl DerefMut for Job {
    fn deref_mut(&mut self) -> &mut JobOutline {
        &mut self.outline
    }
}

impl Job {
    /// A job that trains on these batches and evaluates nothing, with threads of its own.
    pub fn new(outline: JobOutline, batches: Arc<dyn Batches>) -> Result<Job> {
        let threads = outline.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| StrategyError::Threads { threads, problem: error.to_string() })?;
        Ok(Job {
            outline,
            batches,
            schedule: EvaluationSchedule::default(),
            pool: Arc::new(pool),
            progress: Arc::new(Silent),
            stop: StopSignal::default(),
        })
    }

    /// What a trace of its batches says of itself.
    pub(crate) fn trace_header(&self) -> TraceHeader {
        let manifest = self.dataset.manifest();
        TraceHeader {
            dataset: manifest.id.clone(),
            nodes: manifest.nodes.count,
            edges: manifest.edges.count,
            relations: manifest.edges.relations.as_ref().map_or(0, |relations| relations.count),
            direction: self.direction,
            batches: self.batches.identity(),
            settings: self.settings.clone(),
        }
    }

    /// Where the batch at a position is drawn: further epochs repeat those that are sampled.
    pub fn drawn_at(&self, at: Position) -> Position {
        Position { epoch: self.epochs_sampled.map_or(at.epoch, |epochs| at.epoch % epochs.max(1)), ..at }
    }

    /// Whether validation comes after an epoch; it comes after the last in any case.
    pub fn validates_after(&self, epoch: u64) -> bool {
        let every = self.schedule.every;
        every > 0 && ((epoch + 1).is_multiple_of(every) || epoch + 1 == self.epochs)
    }

    /// The phase after another.
    pub fn phase_after(&self, phase: Phase) -> Option<Phase> {
        let schedule = &self.schedule;
        let first = match phase {
            Phase::Train { epoch } if schedule.validation.is_some() && self.validates_after(epoch) => {
                return Some(Phase::Validation { epoch });
            }
            Phase::Train { epoch } | Phase::Validation { epoch } => epoch + 1,
            Phase::Test => return None,
        };
        let last = Phase::Validation { epoch: self.epochs };
        match first < self.epochs {
            true => Some(Phase::Train { epoch: first }),
            false if schedule.last_validation.is_some() && phase < last => Some(last),
            false => schedule.test.as_ref().map(|_| Phase::Test),
        }
    }

    /// The batches of a phase that evaluates.
    pub fn inference(&self, phase: Phase) -> Option<&Inference> {
        match phase {
            Phase::Train { .. } => None,
            Phase::Validation { epoch } if epoch == self.epochs => self.schedule.last_validation.as_ref(),
            Phase::Validation { .. } => self.schedule.validation.as_ref(),
            Phase::Test => self.schedule.test.as_ref(),
        }
    }

    /// How many batches a phase has.
    pub fn count(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Train { epoch } => self.batches.count(epoch),
            other => self.inference(other).map_or(0, |over| over.batches.count(0)),
        }
    }

    /// The positions of training from one on, for a thread of its own.
    pub(crate) fn training_from(&self, from: Position) -> impl Iterator<Item = Position> + Send + use<> {
        positions_of(self.batches.clone(), from, self.epochs)
    }

    /// The position of training from which a run goes on: that of a validation is the first of the next epoch.
    pub(crate) fn training_position(&self, from: RunPosition) -> Position {
        match from.phase {
            Phase::Train { epoch } => Position { epoch, batch: from.batch },
            Phase::Validation { epoch } => Position { epoch: epoch + 1, batch: 0 },
            Phase::Test => Position { epoch: self.epochs, batch: 0 },
        }
    }
}

/// The positions of some epochs, for a thread of its own.
pub(crate) fn positions_of(
    batches: Arc<dyn Batches>,
    from: Position,
    epochs: u64,
) -> impl Iterator<Item = Position> + Send {
    (from.epoch..epochs).flat_map(move |epoch| {
        let first = if epoch == from.epoch { from.batch } else { 0 };
        (first..batches.count(epoch)).map(move |batch| Position { epoch, batch })
    })
}
