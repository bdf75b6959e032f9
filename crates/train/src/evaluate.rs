//! Evaluates a model on validation and test nodes: with sampled neighbourhoods through the strategy, or with all
//! neighbours, layer by layer.

use crate::early::EarlyRows;
use crate::link::{Links, RankRows, SplitRanks};
use crate::memory::{Bytes, DeviceRoom};
use crate::metrics::Metrics;
use crate::state::SavedWith;
use crate::task::{LabelledNodes, SplitName};
use crate::{EvaluationMode, Learner, OpenRun, Result, RunConfig, Task, TrainError};
use esker_nn::Backend;
use esker_nn::LinkMath;
use esker_sample::order::{Batching, Sequential};
use esker_sample::{NodeBatches, Seeds};
use esker_strategies::{Batch, BatchSource, Inference, Job, Phase, RunPosition, Strategy, StrategyError};
use esker_types::{NodeId, Progress};
use std::path::Path;
use std::sync::Arc;

/// The parts of a run that evaluation needs.
pub(crate) struct Context<'a, B: Backend> {
    pub config: &'a RunConfig,
    pub task: &'a Task,
    pub job: &'a Job,
    pub strategy: &'a mut dyn Strategy<B>,
    pub learner: &'a Learner<B>,
    /// Memory of whole-graph inference.
    pub whole_bytes: Bytes,
    /// Rows that are read already.
    pub early_rows: Option<EarlyRows>,
    /// Memory besides [`Context::whole_bytes`] of output that waits to be written.
    pub output_bytes: u64,
    /// Directory of hidden rows that do not fit in memory.
    pub scratch: &'a Path,
    /// Receives the progress of inference over the whole graph.
    pub progress: &'a dyn Progress,
    /// Called once per batch or tile. `true` ends the evaluation with [`TrainError::Stopped`].
    pub stop: &'a dyn Fn() -> bool,
    /// Device memory for batches that are larger than expected.
    pub device_room: Option<DeviceRoom>,
    /// Whether training changes the rows that the first layer reads.
    pub trains_rows: bool,
    /// The state that the model was saved with, if it was loaded from a run.
    pub state: Option<&'a SavedWith>,
    /// Links, if they are learned.
    pub links: Option<Links>,
    /// Where their representations are while they are ranked.
    pub ranking: RankRows,
}

/// Batches over the nodes of a split in their given order.
pub(crate) fn inference_over(config: &RunConfig, nodes: &LabelledNodes) -> Result<Inference> {
    inference_of(config, 0, Some(nodes.nodes()))
}

/// Batches over some nodes in their given order, or over all of so many.
pub(crate) fn inference_of(
    config: &RunConfig,
    all: u64,
    nodes: Option<&Arc<Vec<NodeId>>>,
) -> Result<Inference> {
    let count = nodes.map_or(all, |nodes| nodes.len() as u64);
    let order = Sequential(Batching::new(count, config.batch, false)?);
    let seeds = nodes.map_or(Seeds::AllNodes(all), |nodes| Seeds::Shared(nodes.clone()));
    let (settings, largest_batch) = (config.eval_settings(), config.batch.min(count));
    let batches = Arc::new(NodeBatches::new(order, seeds)?);
    Ok(Inference { batches, largest_batch, settings, rows: true, sampling_bytes: None })
}

impl<B: LinkMath> Context<'_, B> {
    /// The metrics of a split; `None` if none of its nodes has a label or evaluation is off. Sampled batches come from
    /// `source`, whose next phase is the given one, or else from a separate source.
    pub fn evaluate(
        &mut self,
        split: SplitName,
        mode: EvaluationMode,
        source: Option<(&mut dyn BatchSource<B>, Phase)>,
    ) -> Result<Option<Metrics>> {
        if let Some(edges) =
            self.links.as_ref().map(|links| links.task.split(split).map_or(0, |edges| edges.len()))
        {
            let ranks = self.rank(split, mode, source)?;
            return Ok(ranks.map(|ranks| ranks.metrics(edges as u64)));
        }
        let nodes = self.task.split(split);
        if nodes.labelled() == 0 {
            return Ok(None);
        }
        match (mode, source) {
            (EvaluationMode::None, _) => Ok(None),
            (EvaluationMode::Full, source) => Ok(Some(self.full(split, source.map(|(source, _)| source))?)),
            (EvaluationMode::Sampled, Some((source, phase))) => Ok(Some(self.sampled(split, source, phase)?)),
            (EvaluationMode::Sampled, None) => {
                let over = inference_over(self.config, nodes)?;
                let mut source = self.open_inference(&over)?;
                Ok(Some(self.sampled(split, &mut *source, Phase::Test)?))
            }
        }
    }

    /// Batches over any seeds, with the state that the model was saved with.
    pub fn open_inference(&mut self, over: &Inference) -> Result<Box<dyn BatchSource<B>>> {
        let (strategy, job) = (&mut *self.strategy, self.job);
        match self.state {
            None => Ok(strategy.inference(job, over, None)?),
            Some(saved) => {
                saved.open(&self.config.strategy.to_string(), |state| strategy.inference(job, over, state))
            }
        }
    }

    /// Checks that a batch fits the memory of a device that has its own.
    pub(crate) fn check_device(&self, batch: &Batch<B>) -> Result<()> {
        let trains = self.job.largest_batch > 0;
        self.device_room.iter().try_for_each(|room| room.check(batch, trains))
    }

    /// Evaluates as many batches as the nodes of a split make.
    fn sampled(
        &mut self,
        split: SplitName,
        source: &mut dyn BatchSource<B>,
        phase: Phase,
    ) -> Result<Metrics> {
        let mut tally = self.learner.objective().tally(split);
        let nodes = self.task.split(split).nodes().len() as u64;
        for batch in 0..nodes.div_ceil(self.config.batch) {
            let at = RunPosition { phase, batch };
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            let Some(batch) = source.next()?.filter(|batch| batch.at == at) else {
                return Err(StrategyError::Ended { at: Box::new(at) }.into());
            };
            self.check_device(&batch)?;
            self.learner.evaluate(batch, split, &mut tally)?;
        }
        Ok(tally.finish())
    }

    fn full(&mut self, split: SplitName, source: Option<&mut dyn BatchSource<B>>) -> Result<Metrics> {
        let (mut tally, learner) = (self.learner.objective().tally(split), self.learner);
        let nodes = self.task.split(split).nodes().clone();
        let layers = self.config.model.layers;
        self.infer_whole(Some(&nodes), layers, source, &mut |block, logits| {
            learner.compare_nodes(logits, split, block, &mut tally)
        })?;
        Ok(tally.finish())
    }
}

/// Evaluates the best model of a run on a split. Fails with [`TrainError::Stopped`] if a stop was requested.
pub fn evaluate_run<B: LinkMath>(
    run: &mut OpenRun<B>,
    split: SplitName,
    mode: EvaluationMode,
) -> Result<Option<Metrics>> {
    let (stop, progress) = (run.stop_signal(), run.progress());
    let is_asked = || stop.is_asked();
    let mut context = Context { progress: &*progress, ..run.context(&is_asked) };
    context.evaluate(split, mode, None)
}

/// Ranks the edges of a split with the best model of a run on links: by side and relation, too.
pub fn rank_run<B: LinkMath>(
    run: &mut OpenRun<B>,
    split: SplitName,
    mode: EvaluationMode,
) -> Result<Option<SplitRanks>> {
    let (stop, progress) = (run.stop_signal(), run.progress());
    let is_asked = || stop.is_asked();
    let mut context = Context { progress: &*progress, ..run.context(&is_asked) };
    context.rank(split, mode, None)
}
