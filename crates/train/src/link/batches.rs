//! Batches of links: edges of the graph in a pseudo-random order, with negatives for both sides.

use crate::link::{LinkConfig, NegativeCount, TargetEdges};
use crate::memory::Purpose;
use crate::{OrderName, Result, RunConfig, TrainError};
use esker_sample::negatives::{
    AllNodes, NegativeMask, NegativePool, NegativeSampler, NegativeSettings, Side,
};
use esker_sample::order::{BatchGroup, Batching, Order, Sequential, Shuffled};
use esker_sample::{
    Batches, Edge, EdgeLookup, LinkBatches, Position, Queries, SampleError, Seeds, Targets, TrueEnds,
    TrueEndsRequest,
};
use esker_store::Dataset;
use esker_types::NodeId;
use std::sync::Arc;

/// The training batches of a run on links. Inference has no use for them, nor for what their masks need.
pub(crate) fn link_batches(
    config: &RunConfig,
    link: &LinkConfig,
    dataset: &Dataset,
    graph: Arc<dyn EdgeLookup>,
    purpose: Purpose,
) -> Result<Arc<dyn Batches>> {
    let edges = graph.edge_count();
    let batching = Batching::new(edges, config.batch, config.drop_last)?;
    if batching.batches() == 0 {
        return Err(TrainError::NoFullBatch { batch: config.batch, nodes: edges as usize });
    }
    let order: Arc<dyn Order> = match config.order {
        OrderName::Sequential => Arc::new(Sequential(batching)),
        OrderName::Shuffled => Arc::new(Shuffled { batching, seed: config.seed }),
        OrderName::Groups => return Err(TrainError::LinkOrder),
    };
    let mut batches = LinkBatches::new(order, Seeds::AllEdges(edges), graph.clone())?;
    // Without neighbours there is nothing to be dropped from.
    if link.target_edges == TargetEdges::Drop && !config.fanout.is_empty() {
        batches = batches.dropping_targets();
    }
    match link.negatives {
        NegativeCount::Shared { uniform, by_degree, chunks } => {
            let settings = NegativeSettings { seed: config.seed, chunks, uniform, by_degree };
            for side in [Side::Target, Side::Source] {
                let negatives = NegativeSampler::new(graph.clone(), NegativePool::All, settings)?;
                batches = batches.with_negatives(side, negatives.with_mask(link.mask));
            }
            Ok(Arc::new(batches))
        }
        NegativeCount::All => {
            let mask = if purpose == Purpose::Train { link.mask } else { NegativeMask::None };
            let known = match mask {
                NegativeMask::Graph => Some(Arc::new(known_edges(config, dataset)?)),
                _ => None,
            };
            let nodes = graph.node_count();
            for side in [Side::Target, Side::Source] {
                batches = batches.with_negatives(side, AllNodes::new(nodes, mask, known.clone())?);
            }
            Ok(Arc::new(WithAllNodes { batches, nodes }))
        }
    }
}

/// The true ends of every edge that trains.
fn known_edges(config: &RunConfig, dataset: &Dataset) -> Result<TrueEnds> {
    let request =
        TrueEndsRequest { dataset, queries: Queries::Graph, held_out: false, most_bytes: config.memory };
    Ok(TrueEnds::build(&request)?)
}

/// Batches whose seed nodes are followed by all nodes: every one of them is a candidate, and needs a row.
struct WithAllNodes<B> {
    batches: B,
    nodes: u64,
}

impl<B: Batches> Batches for WithAllNodes<B> {
    fn count(&self, epoch: u64) -> u64 {
        self.batches.count(epoch)
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        self.batches.seeds(at, out)?;
        out.extend((0..self.nodes).map(NodeId));
        Ok(())
    }

    fn targets(&self, at: Position) -> Result<Targets, SampleError> {
        self.batches.targets(at)
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<(), SampleError> {
        self.batches.dropped(at, out)
    }

    fn group(&self, at: Position) -> Option<BatchGroup> {
        self.batches.group(at)
    }

    fn identity(&self) -> String {
        format!("{} and all nodes", self.batches.identity())
    }
}
