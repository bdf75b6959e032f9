//! Predictions and embeddings of nodes by the model of a run.

use crate::evaluate::{Context, inference_of};
use crate::whole::WholeCounters;
use crate::{EvaluationMode, Learner, OpenRun, Result, TrainError};
use esker_nn::{LinkMath, Shape};
use esker_types::NodeId;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::Builder;

/// Receives nodes, their classes and their probabilities or values. It may keep the values, and leave another vector.
pub type TakePredictions<'a> = &'a mut (dyn FnMut(&[NodeId], &[u32], &mut Vec<f32>) -> Result<()> + Send);

/// Receives nodes and their rows. It may keep the rows, and leave another vector.
pub type TakeEmbeddings<'a> = &'a mut (dyn FnMut(&[NodeId], &mut Vec<f32>) -> Result<()> + Send);

/// Predicts `nodes`, ascending, or every node. Passes nodes, classes and probabilities (values, for real labels) to
/// `take`, some at a time and in order. With all neighbours, returns what was read and written.
pub fn predict<B: LinkMath>(
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
pub fn embeddings<B: LinkMath>(
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

/// Receives the rows of nodes. It may keep them, and leave another vector.
type TakeOutput<'a, B> = &'a mut (dyn FnMut(&Learner<B>, &[NodeId], &mut Vec<f32>) -> Result<()> + Send);

fn infer<B: LinkMath>(
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
            let over = inference_of(context.config, all, nodes)?;
            let mut source = context.open_inference(&over)?;
            while let Some(batch) = source.next()? {
                if stop.is_asked() {
                    return Err(TrainError::Stopped);
                }
                context.check_device(&batch)?;
                let (nodes, mut rows) = learner.infer_seeds(batch, layers)?;
                take(learner, &nodes, &mut rows)?;
            }
            Ok(None)
        }
        EvaluationMode::Full => {
            let work = |nodes: &[NodeId], values: &mut Vec<f32>| take(learner, nodes, values);
            let counters = beside(work, |hand_over| {
                context.infer_whole(nodes, layers, None, &mut |nodes: &[NodeId], rows: &B::Matrix| {
                    hand_over(nodes, &mut |values| {
                        values.resize(rows.rows() * rows.columns(), 0.0);
                        learner.read(rows, 0, values)
                    })
                })
            })?;
            Ok(Some(counters))
        }
    }
}

/// Passes nodes and their rows on. The closure fills in the rows.
type HandOver<'a> = &'a mut dyn FnMut(&[NodeId], &mut dyn FnMut(&mut Vec<f32>) -> Result<()>) -> Result<()>;

/// Nodes and their rows.
type HandedRows = (Vec<NodeId>, Vec<f32>);

/// Runs `work` on a thread of its own, on rows that `compute` hands over, while `compute` goes on with the next. An
/// error of either ends both; if both fail, it is the work's that is reported.
fn beside<R>(
    mut work: impl FnMut(&[NodeId], &mut Vec<f32>) -> Result<()> + Send,
    compute: impl FnOnce(HandOver<'_>) -> Result<R>,
) -> Result<R> {
    let (send, receive) = sync_channel::<HandedRows>(1);
    let (back, free) = sync_channel::<HandedRows>(3);
    std::thread::scope(|scope| {
        let worker = move || -> Result<()> {
            for (nodes, mut values) in receive {
                work(&nodes, &mut values)?;
                let _ = back.try_send((nodes, values));
            }
            Ok(())
        };
        let worker = Builder::new().name("output".to_string()).spawn_scoped(scope, worker);
        let worker = worker.map_err(|source| TrainError::Thread { source })?;
        let computed = compute(&mut |ids, fill| {
            let (mut nodes, mut values) = free.try_recv().unwrap_or_default();
            nodes.clear();
            nodes.extend_from_slice(ids);
            fill(&mut values)?;
            // Nobody receives any more if the work has failed. Its error is reported below.
            send.send((nodes, values)).map_err(|_| TrainError::Stopped)
        });
        drop(send);
        match worker.join() {
            Ok(worked) => worked.and(computed),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;

    /// Hands `count` rows over. Returns how many were.
    fn hand_over(count: u64, hand_over: HandOver<'_>) -> Result<u64> {
        for node in 0..count {
            hand_over(&[NodeId(node)], &mut |values| {
                values.clear();
                values.push(node as f32);
                Ok(())
            })?;
        }
        Ok(count)
    }

    #[test]
    fn rows_are_worked_on_in_order_while_more_are_made() {
        let mut found = Vec::new();
        let work = |nodes: &[NodeId], values: &mut Vec<f32>| {
            found.push((nodes[0].0, values[0]));
            Ok(())
        };
        assert_eq!(beside(work, |over| hand_over(100, over)).unwrap(), 100);
        assert!(found.into_iter().eq((0..100).map(|node| (node, node as f32))));
    }

    #[test]
    fn the_first_error_ends_both_and_is_reported() {
        let failing = |nodes: &[NodeId], _: &mut Vec<f32>| match nodes[0].0 {
            3 => Err(TrainError::NoLayer { layer: 3, layers: 2 }),
            _ => Ok(()),
        };
        let error = beside(failing, |over| hand_over(u64::MAX, over)).unwrap_err();
        assert!(matches!(error, TrainError::NoLayer { layer: 3, .. }), "{error}");
        let error = beside(|_, _| Ok(()), |_| Err::<(), _>(TrainError::Stopped)).unwrap_err();
        assert!(matches!(error, TrainError::Stopped));
    }
}
