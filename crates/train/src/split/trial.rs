//! What work takes: some batches go through the strategy's own stages and through training, with a model that is then
//! dropped. So each stage is measured beside the others, as it runs in an epoch.

use crate::open::FirstBatches;
use crate::task::Task;
use crate::{Learner, Result, RunConfig, StageTimes};
use esker_nn::Backend;
use esker_plan::{WorkSeconds, fitted_line};
use esker_strategies::{EvaluationSchedule, Job, RunPosition, weighted_rows};
use esker_types::Unit;
use std::sync::Arc;
use std::time::Instant;

/// Batches that are measured.
const TRIAL_BATCHES: u64 = 16;
/// The first steps allocate.
const WARM_STEPS: usize = 2;

/// What batches are measured with.
pub(super) struct Trial<'a, B: Backend> {
    pub backend: &'a B,
    pub task: &'a Task,
    pub dim: usize,
    /// What computing a row of each layer takes, in rows of the first.
    pub weights: &'a [f64],
}

impl<B: Backend + Clone + 'static> Trial<'_, B> {
    /// Trains on some batches without a history.
    pub fn measure(&self, config: &RunConfig, job: &Job) -> Result<WorkSeconds> {
        let (job, mut strategy) = (first_batches(job), config.strategy.build(self.backend.clone()));
        strategy.prepare(&job)?;
        let mut source = strategy.batches(&job, RunPosition::START, None)?;
        let task = Box::new(self.task.clone());
        let mut learner = Learner::new(self.backend.clone(), config, self.dim, task, job.pool.clone())?;
        job.progress.stage("measure some batches", Some(job.batches.count(0)), Unit::Count("batches"));
        let (mut edges, mut rows, mut steps) = (0, 0, Vec::new());
        while let Some(batch) = source.next()? {
            edges += batch.blocks.edges();
            rows += batch.blocks.nodes();
            let computed = batch.blocks.sample().map_or(0.0, |sample| weighted_rows(sample, self.weights));
            let started = Instant::now();
            let (step, feedback) = learner.step(batch, config.lr)?;
            source.apply(feedback)?;
            step.wait()?;
            steps.push((computed, started.elapsed().as_secs_f64()));
            job.progress.advance(1);
        }
        job.progress.finish();
        let counters = source.counters();
        let warm = if steps.len() > 2 * WARM_STEPS { WARM_STEPS } else { 0 };
        let (batch, computed) = fitted_line(&steps[warm..]);
        let each = |name: &str, count: u64| busy(&counters.stages, name) / count.max(1) as f64;
        let hits: u64 = counters.hits.iter().map(|(_, hits)| hits).sum();
        Ok(WorkSeconds {
            edge: each("sample", edges),
            planned: each("plan", rows),
            loaded: each("load", edges),
            row: each("read", counters.rows.saturating_sub(hits)),
            assembled: each("assemble", rows),
            batch,
            computed,
        })
    }
}

/// The first batches of a job, without a history and without evaluation.
fn first_batches(job: &Job) -> Job {
    let mut job = job.clone();
    (job.outline.history, job.history) = (None, None);
    job.schedule = EvaluationSchedule::default();
    job.batches = Arc::new(FirstBatches { all: job.batches.clone(), batches: TRIAL_BATCHES });
    job.epochs = 1;
    job
}

fn busy(stages: &[StageTimes], name: &str) -> f64 {
    stages.iter().filter(|stage| stage.name == name).map(|stage| stage.busy).sum()
}
