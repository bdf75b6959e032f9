//! What a step samples and gathers from: the subgraph of its residents and their feature rows, read ahead on a thread of
//! their own. What stays resident is not read again.

use super::steps::{StepSequence, StepVisit};
use crate::{Job, PartitionedGraph, StrategyError};
use crossbeam_channel::{Receiver, Sender, bounded};
use esker_fetch::partitions::{PartitionRows, PartitionedFeatures, ResidentFeatures};
use esker_fetch::pipeline::Pipeline;
use esker_sample::{BucketSubgraphs, BucketWords, BufferRows, Position, ResidentBuckets, StoredId, Subgraph};
use esker_types::PartitionId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A step that can be sampled.
pub(super) struct StepData<W> {
    pub visit: StepVisit,
    pub subgraph: Arc<Subgraph<W>>,
    pub words: BucketWords<W>,
    pub rows: Arc<StepRows>,
}

/// Where the rows of a step are. Its batches keep it until they are gathered, when another step is sampled already.
pub(super) struct StepRows {
    pub resident: BufferRows,
    /// `None` if batches have no features.
    pub features: Option<Arc<PartitionRows>>,
    /// Dropped with the last batch: whoever reads a later step may wait for its memory.
    _held: Sender<()>,
}

/// Steps that may still be in memory, and who is resident in them.
type EarlierSteps = VecDeque<(Receiver<()>, Vec<PartitionId>)>;

/// Bytes read so far.
#[derive(Debug, Default)]
pub(super) struct BytesRead {
    pub edges: AtomicU64,
    pub features: AtomicU64,
}

/// The steps of a run, one read while the one before is sampled.
pub(super) fn steps<W: StoredId>(
    job: &Job,
    graph: &PartitionedGraph,
    features: Option<&Arc<PartitionedFeatures>>,
    from: Position,
    bytes: &Arc<BytesRead>,
) -> Pipeline<StepData<W>, StrategyError> {
    let (buckets, partitions, counts) =
        (graph.buckets().clone(), graph.partitions.clone(), graph.counts.clone());
    let (features, pool, bytes, shape) =
        (features.cloned(), job.pool.clone(), bytes.clone(), PartitionedGraph::shape(job));
    let (most_swaps, edges) =
        job.out_of_core.buffer.map_or_else(Default::default, |sizes| (sizes.each as usize, sizes.edges));
    let mut sequence = StepSequence::new(job, from);
    let listed = Pipeline::start("steps", 0, move |_| Ok::<_, StrategyError>(sequence.next()));
    listed.then_with(
        "read",
        0,
        move || {
            let features = features.as_ref().map(ResidentFeatures::new).transpose()?;
            Ok((ResidentBuckets::<W>::new(&buckets)?, features, EarlierSteps::new()))
        },
        move |stage, (buckets, features, earlier), visit: StepVisit| {
            // There is memory for a step and for what the next one adds. Between two epochs most partitions change, and
            // none is left for those that leave.
            let fits = |before: &[PartitionId]| {
                visit.swaps.len() <= most_swaps
                    && counts.among_either(before, &visit.resident) <= edges.with_next
            };
            let most_earlier = earlier.back().map_or(0, |(_, before)| fits(before) as usize);
            while earlier.len() > most_earlier {
                let Some((released, _)) = earlier.pop_front() else { break };
                stage.wait_for_drop(&released);
            }
            let (held, released) = bounded(0);
            earlier.push_back((released, visit.resident.clone()));
            let found = counts.among(&visit.resident);
            if found > edges.resident {
                return Err(StrategyError::ResidentEdges { found, allowed: edges.resident });
            }
            let words = buckets.advance(&visit.resident)?.clone();
            let build = || BucketSubgraphs::build(&partitions, &visit.resident, &words, shape);
            let subgraph = Arc::new(pool.install(build)?);
            bytes.edges.store(buckets.bytes_read(), Ordering::Relaxed);
            let of_features = match features {
                Some(features) => {
                    let rows = features.advance(&visit.resident)?;
                    bytes.features.store(features.bytes_read(), Ordering::Relaxed);
                    Some(rows)
                }
                None => None,
            };
            let resident = BufferRows::new(&partitions, &visit.resident);
            let rows = Arc::new(StepRows { resident, features: of_features, _held: held });
            Ok(Some(StepData { visit, subgraph, words, rows }))
        },
    )
}
