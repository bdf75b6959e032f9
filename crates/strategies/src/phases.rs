//! One stream of batches from the phases of a run. Training continues from epoch to epoch. Evaluations run in between
//! and at the end, each from its first batch.

use crate::{
    Batch, BatchSource, CheckpointSink, EvaluationCounters, EvaluationSchedule, Feedback, Inference,
    InputTable, Job, Phase, Result, RunPosition, SourceCounters, StrategyError,
};
use esker_device::Device;
use esker_fetch::pipeline::StageTimes;

/// The batches of training, or of one evaluation.
pub(crate) trait PhaseSource<D: Device>: Send {
    /// The next batch; `None` after the last.
    fn next(&mut self) -> Result<Option<Batch<D>>>;

    /// See [`BatchSource::counters`].
    fn counters(&self) -> SourceCounters;

    /// See [`BatchSource::stages`].
    fn stages(&self) -> Vec<StageTimes> {
        self.counters().stages
    }

    /// See [`BatchSource::apply`].
    fn apply(&mut self, feedback: Feedback<D>) -> Result<()> {
        drop(feedback);
        Ok(())
    }

    /// See [`BatchSource::lag`]. Without feedback there is no limit.
    fn lag(&self) -> usize {
        usize::MAX
    }

    /// See [`BatchSource::save`].
    fn save(&self, _: &mut dyn CheckpointSink) -> Result<()> {
        Ok(())
    }

    /// See [`BatchSource::save_for_inference`].
    fn save_for_inference(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.save(to)
    }

    /// Whether it yields the batches of evaluations too, in the order of the run.
    fn evaluates(&self) -> bool {
        false
    }

    /// Frees its memory for an evaluation that it does not yield. Returns whether it must then be restarted.
    fn rest(&mut self) -> bool {
        false
    }

    /// Continues at a later position. Only for sources that evaluate or rest.
    fn restart(&mut self, at: RunPosition) -> Result<()> {
        unreachable!("only sources that evaluate or rest are restarted, not at {at}")
    }

    /// No more batches are requested: files for them can be removed. Only for sources that evaluate.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A graph for inference on any seeds.
pub(crate) trait InferenceGraph<D: Device>: Send {
    /// Opens an evaluation.
    fn infer(&self, job: &Job, over: &Inference) -> Result<Box<dyn PhaseSource<D>>>;

    /// Opens the table of input rows.
    fn table(&self) -> Result<InputTable>;
}

/// A run, phase after phase.
pub(crate) struct Phases<D: Device> {
    job: Job,
    /// Kept to the end: a checkpoint may need its state during the test.
    training: Box<dyn PhaseSource<D>>,
    graph: Box<dyn InferenceGraph<D>>,
    /// The current evaluation.
    inference: Option<Box<dyn PhaseSource<D>>>,
    /// The next batch.
    next: Option<RunPosition>,
    /// Whether training rests while an evaluation has its memory.
    rests: bool,
    /// What evaluations of their own sources have read, as far as they have ended.
    evaluated: EvaluationCounters,
}

impl<D: Device> Phases<D> {
    /// A run from a position on. `training` yields training batches from there. An evaluation starts with its first
    /// batch.
    pub fn new(
        job: &Job,
        from: RunPosition,
        training: Box<dyn PhaseSource<D>>,
        graph: impl InferenceGraph<D> + 'static,
    ) -> Phases<D> {
        let next = Some(Phases::<D>::first_of(from));
        let (graph, evaluated) = (Box::new(graph), EvaluationCounters::default());
        Phases { job: job.clone(), training, graph, inference: None, next, rests: false, evaluated }
    }

    /// The first batch of a run from a position on. An evaluation starts with its first batch.
    pub fn first_of(from: RunPosition) -> RunPosition {
        match from.phase {
            Phase::Train { .. } => from,
            phase => RunPosition::start_of(phase),
        }
    }

    /// One evaluation and nothing else.
    pub fn alone(job: &Job, over: &Inference, graph: impl InferenceGraph<D> + 'static) -> Result<Phases<D>> {
        let (source, mut job) = (graph.infer(job, over)?, job.clone());
        (job.outline.epochs, job.schedule) =
            (0, EvaluationSchedule { test: Some(over.clone()), ..EvaluationSchedule::default() });
        let next = Some(RunPosition::start_of(Phase::Test));
        let (training, graph, evaluated) =
            (Box::new(NoTraining), Box::new(graph), EvaluationCounters::default());
        Ok(Phases { job, training, graph, inference: Some(source), next, rests: false, evaluated })
    }

    /// Ends the source of the current evaluation, if it has its own.
    fn end_inference(&mut self) {
        if let Some(inference) = self.inference.take() {
            self.evaluated += inference.counters().evaluation;
        }
    }

    /// Moves on to the next phase.
    fn leave(&mut self, phase: Phase) {
        self.end_inference();
        self.next = self.job.phase_after(phase).map(RunPosition::start_of);
    }
}

impl<D: Device> BatchSource<D> for Phases<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        while let Some(at) = self.next {
            if at.batch >= self.job.count(at.phase) {
                self.leave(at.phase);
                continue;
            }
            let batch = match self.job.inference(at.phase) {
                Some(over) if !self.training.evaluates() => match &mut self.inference {
                    Some(inference) => inference.next()?,
                    none => {
                        self.rests |= self.training.rest();
                        none.insert(self.graph.infer(&self.job, over)?).next()?
                    }
                },
                _ => {
                    if std::mem::take(&mut self.rests) {
                        self.training.restart(at)?;
                    }
                    self.training.next()?
                }
            };
            let Some(mut batch) = batch else { return Err(StrategyError::Ended { at: Box::new(at) }) };
            assert_eq!(batch.at.position(), at.position(), "batches come in the order of the run");
            batch.at = at;
            self.next = Some(RunPosition { batch: at.batch + 1, ..at });
            return Ok(Some(batch));
        }
        Ok(None)
    }

    fn apply(&mut self, feedback: Feedback<D>) -> Result<()> {
        self.training.apply(feedback)
    }

    fn lag(&self) -> usize {
        self.training.lag()
    }

    fn skip_to(&mut self, at: RunPosition) -> Result<()> {
        if self.training.evaluates() {
            let Some(now) = self.next.filter(|next| *next < at) else { return Ok(()) };
            self.next = self.job.first_batch(at);
            // Batches that are prefetched are used, unless some are left out.
            return match self.next {
                Some(next) if self.job.first_batch(now) != Some(next) => self.training.restart(next),
                Some(_) => Ok(()),
                None => self.training.end(),
            };
        }
        // When training is over, its remaining batches need not be waited for.
        let training_is_over = at.phase >= Phase::Validation { epoch: self.job.epochs };
        while let Some(next) = self.next.filter(|next| *next < at) {
            let left_out = match next.phase {
                _ if next.batch >= self.job.count(next.phase) => true,
                Phase::Train { .. } => training_is_over,
                Phase::Validation { .. } | Phase::Test => next.phase < at.phase,
            };
            match left_out {
                true => self.leave(next.phase),
                false => drop(self.next()?),
            }
        }
        Ok(())
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.training.save(to)
    }

    fn save_for_inference(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.training.save_for_inference(to)
    }

    fn table(&mut self) -> Result<InputTable> {
        self.graph.table()
    }

    fn counters(&self) -> SourceCounters {
        let mut counters = self.training.counters();
        counters.evaluation += self.evaluated;
        if let Some(inference) = &self.inference {
            counters.evaluation += inference.counters().evaluation;
        }
        counters
    }

    fn stages(&self) -> Vec<StageTimes> {
        self.training.stages()
    }
}

/// The training of a job that does not train.
struct NoTraining;

impl<D: Device> PhaseSource<D> for NoTraining {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        Ok(None)
    }

    fn counters(&self) -> SourceCounters {
        SourceCounters::default()
    }
}
