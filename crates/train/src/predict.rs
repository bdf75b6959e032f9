//! Predictions and embeddings of nodes by the model of a run.

use crate::evaluate::Context;
use crate::whole::WholeCounters;
use crate::{EvaluationMode, Learner, OpenRun, Result, TrainError};
use esker_nn::{Backend, Shape};
use esker_sample::order::{Batching, Sequential};
use esker_sample::{NodeBatches, Seeds};
use esker_strategies::Inference;
use esker_types::NodeId;
use std::sync::Arc;

/// Receives nodes, their classes and their probabilities or values.
pub type TakePredictions<'a> = &'a mut dyn FnMut(&[NodeId], &[u32], &[f32]) -> Result<()>;

/// Receives nodes and their rows.
pub type TakeEmbeddings<'a> = &'a mut dyn FnMut(&[NodeId], &[f32]) -> Result<()>;

/// Predicts `nodes`, ascending, or every node. Passes nodes, classes and probabilities (values, for real labels) to
/// `take`, some at a time and in order. With all neighbours, returns what was read and written.
pub fn predict<B: Backend + Clone + 'static>(
    run: &mut OpenRun<B>,
    nodes: Option<&Arc<Vec<NodeId>>>,
    mode: EvaluationMode,
    take: TakePredictions,
) -> Result<Option<WholeCounters>> {
    let layers = run.config.model.layers;
    infer(run, nodes, layers, mode, &mut |learner, nodes, logits| {
        let classes = learner.predictions(logits);
        take(nodes, &classes, logits)
    })
}

/// Computes the rows that layer `layer`, counted from 1, gives `nodes`, ascending, or every node: after norm and
/// activation, as the next layer reads them. Those of the last layer are logits.
pub fn embeddings<B: Backend + Clone + 'static>(
    run: &mut OpenRun<B>,
    nodes: Option<&Arc<Vec<NodeId>>>,
    layer: usize,
    mode: EvaluationMode,
    take: TakeEmbeddings,
) -> Result<Option<WholeCounters>> {
    let layers = run.config.model.layers;
    if layer == 0 || layer > layers {
        return Err(TrainError::NoLayer { layer, layers });
    }
    infer(run, nodes, layer, mode, &mut |_, nodes, rows| take(nodes, rows))
}

/// Receives the rows of nodes.
type TakeOutput<'a, B> = &'a mut dyn FnMut(&Learner<B>, &[NodeId], &mut [f32]) -> Result<()>;

fn infer<B: Backend + Clone + 'static>(
    run: &mut OpenRun<B>,
    nodes: Option<&Arc<Vec<NodeId>>>,
    layers: usize,
    mode: EvaluationMode,
    take: TakeOutput<B>,
) -> Result<Option<WholeCounters>> {
    let (stop, progress) = (run.stop_signal(), run.progress());
    let is_asked = || stop.is_asked();
    let mut context = Context { progress: &*progress, ..run.context(&is_asked) };
    let learner = context.learner;
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
                let (nodes, mut rows) = learner.infer_seeds(batch, layers)?;
                take(learner, &nodes, &mut rows)?;
            }
            Ok(None)
        }
        EvaluationMode::Full => {
            let mut values = Vec::new();
            let counters =
                context.infer_whole(nodes, layers, None, &mut |nodes: &[NodeId], rows: &B::Matrix| {
                    values.resize(rows.rows() * rows.columns(), 0.0);
                    learner.read(rows, 0, &mut values)?;
                    take(learner, nodes, &mut values)
                })?;
            Ok(Some(counters))
        }
    }
}
