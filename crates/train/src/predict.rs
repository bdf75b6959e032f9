//! Predictions of nodes by the model of a run.

use crate::{EvaluationMode, OpenRun, Result, TrainError};
use esker_nn::{Backend, Shape};
use esker_sample::order::{Batching, Sequential};
use esker_sample::{NodeBatches, Seeds};
use esker_strategies::Inference;
use esker_types::NodeId;
use std::sync::Arc;

/// Receives nodes, their classes and their probabilities or values.
pub type TakePredictions<'a> = &'a mut dyn FnMut(&[NodeId], &[u32], &[f32]) -> Result<()>;

/// Predicts `nodes`, ascending, or every node. Passes nodes, classes and probabilities (values, for real labels) to
/// `take`, block by block and in order.
pub fn predict<B: Backend + Clone + 'static>(
    run: &mut OpenRun<B>,
    nodes: Option<&Arc<Vec<NodeId>>>,
    mode: EvaluationMode,
    take: TakePredictions,
) -> Result<()> {
    let stop = run.stop_signal();
    let is_asked = || stop.is_asked();
    let mut context = run.context(&is_asked);
    let learner = context.learner;
    let mut hand_over = |nodes: &[NodeId], logits: Vec<f32>| {
        let (classes, values) = learner.objective().predictions(logits);
        take(nodes, &classes, &values)
    };
    match mode {
        EvaluationMode::Sampled | EvaluationMode::None => {
            let all = context.job.dataset.manifest().nodes.count;
            let count = nodes.map_or(all, |nodes| nodes.len() as u64);
            let order = Sequential(Batching::new(count, context.config.batch, false)?);
            let seeds = nodes.map_or(Seeds::AllNodes(all), |nodes| Seeds::Shared(nodes.clone()));
            let over = Inference {
                batches: Arc::new(NodeBatches::new(order, seeds)?),
                largest_batch: context.config.batch,
                settings: context.config.eval_settings(),
                rows: true,
                sampling_bytes: None,
            };
            let mut source = context.open_inference(&over)?;
            while let Some(batch) = source.next()? {
                if stop.is_asked() {
                    return Err(TrainError::Stopped);
                }
                let (nodes, logits) = learner.infer_seeds(batch)?;
                hand_over(&nodes, logits)?;
            }
            Ok(())
        }
        EvaluationMode::Full => {
            context.infer_whole(nodes, None, &mut |nodes: &[NodeId], logits: &B::Matrix| {
                let mut values = vec![0.0; logits.rows() * logits.columns()];
                learner.read(logits, 0, &mut values)?;
                hand_over(nodes, values)
            })
        }
    }
}
