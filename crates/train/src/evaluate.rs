//! What a model is worth on validation and test nodes: with sampled neighbourhoods through the strategy, or with all
//! neighbours, layer by layer.

use crate::memory::Bytes;
use crate::metrics::{Metrics, Tally};
use crate::task::{LabelledNodes, SplitBatches, SplitName};
use crate::{BatchRows, EvaluationMode, Learner, OpenRun, Result, RunConfig, TrainError};
use esker_nn::Backend;
use esker_sample::order::{Batching, Sequential};
use esker_strategies::{Evaluation, Job, Strategy};
use std::path::Path;
use std::sync::Arc;

/// What evaluation needs of a run.
pub(crate) struct Context<'a, B: Backend> {
    pub config: &'a RunConfig,
    pub job: &'a Job,
    pub strategy: &'a mut dyn Strategy<BatchRows<B>>,
    pub learner: &'a Learner<B>,
    /// What inference over the whole graph may hold for a block, and for hidden rows.
    pub whole_bytes: Bytes,
    /// Where hidden rows go that do not fit.
    pub scratch: &'a Path,
    /// Asked once a batch or block: `true` ends the evaluation with [`TrainError::Stopped`].
    pub stop: &'a dyn Fn() -> bool,
}

/// Batches over nodes as they come.
pub(crate) fn evaluation_over(config: &RunConfig, nodes: &LabelledNodes) -> Result<Evaluation> {
    let batching = Batching::new(nodes.nodes().len() as u64, config.batch, false)?;
    let batches = SplitBatches { order: Sequential(batching), nodes: nodes.nodes().clone() };
    let (settings, largest_batch) = (config.eval_settings(), config.batch.min(nodes.nodes().len() as u64));
    Ok(Evaluation { batches: Arc::new(batches), largest_batch, settings, rows: true, sampling_bytes: None })
}

impl<B: Backend + Clone + 'static> Context<'_, B> {
    /// The metrics of some nodes; `None` where there are none or nobody wants them.
    pub fn evaluate(&mut self, nodes: &LabelledNodes, mode: EvaluationMode) -> Result<Option<Metrics>> {
        if nodes.labelled() == 0 {
            return Ok(None);
        }
        match mode {
            EvaluationMode::None => Ok(None),
            EvaluationMode::Sampled => Ok(Some(self.sampled(nodes)?)),
            EvaluationMode::Full => Ok(Some(self.full(nodes)?)),
        }
    }

    fn sampled(&mut self, nodes: &LabelledNodes) -> Result<Metrics> {
        let (kind, outputs) = self.learner.task();
        let mut tally = Tally::new(kind, outputs, nodes.nodes().len());
        let mut source = self.strategy.evaluation(self.job, &evaluation_over(self.config, nodes)?)?;
        while let Some(batch) = source.next()? {
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            let judged = self.learner.judge(batch, nodes)?;
            tally.add(&judged.logits, &judged.labels);
        }
        Ok(tally.finish())
    }

    fn full(&mut self, nodes: &LabelledNodes) -> Result<Metrics> {
        let (kind, outputs) = self.learner.task();
        let (mut tally, learner) = (Tally::new(kind, outputs, nodes.nodes().len()), self.learner);
        self.infer_whole(Some(nodes.nodes()), &mut |block, logits| {
            let rows: Vec<u32> = (0..block.len() as u32).collect();
            let (rows, labels) = nodes.pick(kind, block, &rows);
            let judged = learner.install(|| learner.compare(logits, &rows, labels))?;
            tally.add(&judged.logits, &judged.labels);
            Ok(())
        })?;
        Ok(tally.finish())
    }
}

/// Evaluates the best model of a run on a split.
pub fn evaluate_run<B: Backend + Clone + 'static>(
    run: &mut OpenRun<B>,
    split: SplitName,
    mode: EvaluationMode,
) -> Result<Option<Metrics>> {
    let nodes = run.task.split(split).clone();
    run.context(&|| false).evaluate(&nodes, mode)
}
