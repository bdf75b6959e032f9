//! The order of a run's epochs and evaluations in laps, and the number of each of its batches.

use crate::diskgnn::evaluation::job_over;
use crate::{Inference, Job, Phase, RunPosition};
use esker_fetch::packed::{LapLayout, PartOfLap};
use esker_sample::Position;

/// The laps of a run. A part is an epoch of training or an evaluation.
pub(super) struct Course {
    pub laps: Vec<LapLayout>,
    /// The jobs whose samples parts are made of: training, then evaluations that differ from each other.
    pub sources: Vec<Job>,
    /// The first batch of each part, over all laps.
    firsts: Vec<usize>,
    /// The parts of each sampled epoch: its training, and the validation after it.
    training: Vec<usize>,
    validations: Vec<Option<usize>>,
    /// The parts of evaluations in laps of their own, or at the end.
    validation: Option<usize>,
    last_validation: Option<usize>,
    test: Option<usize>,
    /// The epochs of the run. The validation after them is the last one.
    run_epochs: u64,
    /// Whether evaluations are among its parts.
    pub evaluates: bool,
    /// Batches so far, while it is made.
    count: usize,
}

impl Course {
    /// The course of a job with this many distinct epochs. Later epochs repeat them.
    pub fn of(job: &Job, epochs: u64) -> Course {
        let mut sampled = job.clone();
        sampled.outline.epochs_sampled = Some(epochs);
        let schedule = &job.schedule;
        let evaluations = [&schedule.validation, &schedule.last_validation, &schedule.test];
        let mut course = Course {
            laps: Vec::new(),
            sources: vec![sampled],
            firsts: Vec::new(),
            training: Vec::new(),
            validations: Vec::new(),
            validation: None,
            last_validation: None,
            test: None,
            run_epochs: job.epochs,
            evaluates: evaluations.into_iter().flatten().all(|over| over.rows),
            count: 0,
        };
        let repeats = epochs < job.epochs;
        let mut lap = LapLayout { parts: Vec::new(), repeats };
        for epoch in 0..epochs {
            let part = course.add(&mut lap, PartOfLap { source: 0, epoch });
            course.training.push(part);
            let validation = schedule.validation.as_ref().filter(|_| is_validated(job, epochs, epoch));
            let part = validation.and_then(|over| course.add_evaluation(job, &mut lap, over));
            course.validations.push(part);
        }
        let mut tail = LapLayout::default();
        if repeats {
            course.laps.push(std::mem::take(&mut lap));
            if let Some(over) = schedule.validation.as_ref().filter(|_| misses_some(job, epochs)) {
                course.validation = course.add_evaluation(job, &mut tail, over);
                course.close(&mut tail);
            }
        } else {
            tail = lap;
        }
        let at_the_end = |over: &Option<Inference>, course: &mut Course, lap: &mut LapLayout| {
            over.as_ref().and_then(|over| course.add_evaluation(job, lap, over))
        };
        course.last_validation = at_the_end(&schedule.last_validation, &mut course, &mut tail);
        course.test = at_the_end(&schedule.test, &mut course, &mut tail);
        course.close(&mut tail);
        course
    }

    /// Adds a lap, if it has parts.
    fn close(&mut self, lap: &mut LapLayout) {
        let lap = std::mem::take(lap);
        self.laps.extend(Some(lap).filter(|lap| !lap.parts.is_empty()));
    }

    /// Adds a part to a lap. Parts are added in order. Returns its number.
    fn add(&mut self, lap: &mut LapLayout, part: PartOfLap) -> usize {
        lap.parts.push(part);
        self.firsts.push(self.count);
        self.count += self.sources[part.source].batches.count(part.epoch) as usize;
        self.firsts.len() - 1
    }

    /// Adds an evaluation, if this course has evaluations.
    fn add_evaluation(&mut self, job: &Job, lap: &mut LapLayout, over: &Inference) -> Option<usize> {
        if !self.evaluates {
            return None;
        }
        let evaluation = job_over(job, over, 0);
        let header = evaluation.trace_header();
        let known = self.sources.iter().skip(1).position(|source| source.trace_header() == header);
        let source = known.map_or(self.sources.len(), |known| known + 1);
        if known.is_none() {
            self.sources.push(evaluation);
        }
        Some(self.add(lap, PartOfLap { source, epoch: 0 }))
    }

    /// Number of distinct epochs.
    pub fn epochs(&self) -> u64 {
        self.training.len() as u64
    }

    /// Number of batches of all laps.
    pub fn batches(&self) -> u64 {
        self.count as u64
    }

    /// Whether a lap repeats.
    pub fn repeats(&self) -> bool {
        self.laps.iter().any(|lap| lap.repeats)
    }

    /// The number of a batch. A batch of an evaluation that has no part is a bug.
    pub fn number(&self, at: RunPosition) -> usize {
        let of_epoch = |epoch: u64| (epoch % self.epochs()) as usize;
        let part = match at.phase {
            Phase::Train { epoch } => Some(self.training[of_epoch(epoch)]),
            Phase::Validation { epoch } if epoch == self.run_epochs => self.last_validation,
            Phase::Validation { epoch } => self.validations[of_epoch(epoch)].or(self.validation),
            Phase::Test => self.test,
        };
        self.firsts[part.expect("evaluations are planned before their batches are requested")]
            + at.batch as usize
    }

    /// The position at which a batch was sampled. Later epochs of training repeat the sampled ones.
    pub fn sampled_at(&self, at: RunPosition) -> Position {
        let position = at.position();
        match at.phase {
            Phase::Train { .. } => Position { epoch: position.epoch % self.epochs(), ..position },
            _ => position,
        }
    }
}

/// Whether a validation follows a sampled epoch, every time that it is trained. A validation that follows it only sometimes
/// is not part of what repeats.
fn is_validated(job: &Job, epochs: u64, epoch: u64) -> bool {
    let every = job.schedule.every;
    match epochs < job.epochs {
        true => {
            every == 1 || (every > 0 && epochs.is_multiple_of(every) && (epoch + 1).is_multiple_of(every))
        }
        false => job.validates_after(epoch),
    }
}

/// Whether some validation follows an epoch that is not validated every time.
fn misses_some(job: &Job, epochs: u64) -> bool {
    let every = job.schedule.every;
    let last = job.epochs.saturating_sub(1) % epochs.max(1);
    every > 0 && ((every > 1 && !epochs.is_multiple_of(every)) || !is_validated(job, epochs, last))
}
