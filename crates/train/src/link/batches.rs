//! Batches of links: edges of the graph in a pseudo-random order, with negatives for both sides.

use crate::link::{EdgeWeights, LinkConfig, Links, NegativeCount, TargetEdges};
use crate::memory::Purpose;
use crate::partition_orders::OrderOverPartitions;
use crate::{OrderName, Result, RunConfig, TrainError};
use esker_sample::negatives::{
    AllNodes, NegativeMask, NegativePool, NegativeSampler, NegativeSettings, Side,
};
use esker_sample::order::{BatchGroup, BatchStep, Batching, Order, Sequential, Shuffled, StepBatching};
use esker_sample::{
    Batches, BucketLinks, BucketPool, BucketSubgraphs, Edge, EdgeLookup, GraphSize, LinkBatches, Position,
    Queries, SampleError, Seeds, StepGraphs, StoredId, Targets, TrueEnds, TrueEndsRequest,
};
use esker_store::Dataset;
use esker_strategies::{LoadedTopology, PartitionedGraph, Residents};
use esker_types::{NodeId, StopSignal};
use std::sync::Arc;

/// The training batches of a run on links. Inference has no use for them, nor for what their masks need.
pub(crate) fn link_batches(
    config: &RunConfig,
    link: &LinkConfig,
    dataset: &Dataset,
    topology: &LoadedTopology,
    residents: Option<&Residents>,
    purpose: Purpose,
    stop: &StopSignal,
) -> Result<Arc<dyn Batches>> {
    let graph = topology.lookup().expect("links load their topology first");
    let edges = graph.edge_count();
    let batching = Batching::new(edges, config.batch, config.drop_last)?;
    if batching.batches() == 0 {
        return Err(TrainError::NoFullBatch { batch: config.batch, nodes: edges as usize });
    }
    let order = order_of_edges(config, dataset, &*graph, batching, purpose)?;
    let mut batches = LinkBatches::new(order.clone(), Seeds::AllEdges(edges), graph.clone())?;
    // Without neighbours there is nothing to be dropped from.
    if link.target_edges == TargetEdges::Drop && !config.fanout.is_empty() {
        batches = batches.dropping_targets();
    }
    let trains = purpose == Purpose::Train;
    let masks_all = link.negatives == NegativeCount::All && link.mask == NegativeMask::Graph;
    let weighs = link.edge_weights == EdgeWeights::Subsampling;
    let known = match trains && (masks_all || weighs) {
        true => Some(Arc::new(known_edges(dataset, stop)?)),
        false => None,
    };
    if let Some(known) = known.clone().filter(|_| weighs) {
        batches = batches.counting(known);
    }
    match link.negatives {
        NegativeCount::Shared { uniform, by_degree, chunks } => {
            let pool = match residents.and_then(|residents| residents.pool(topology, order)) {
                Some(pool) => NegativePool::PerBatch(pool),
                None => NegativePool::All,
            };
            for (side, settings) in shared_settings(config, link, [uniform, by_degree], chunks) {
                let negatives = NegativeSampler::new(graph.clone(), pool.clone(), settings)?;
                batches = batches.with_negatives(side, negatives.with_mask(link.mask));
            }
            Ok(Arc::new(batches))
        }
        NegativeCount::All => {
            let mask = if trains { link.mask } else { NegativeMask::None };
            let known = known.filter(|_| masks_all);
            let nodes = graph.node_count();
            for side in [Side::Target, Side::Source] {
                batches = batches.with_negatives(side, AllNodes::new(nodes, mask, known.clone())?);
            }
            Ok(Arc::new(WithAllNodes { batches, nodes }))
        }
    }
}

/// The training batches of a run whose edges are in buckets on disk.
pub(crate) fn bucket_batches(
    config: &RunConfig,
    link: &LinkConfig,
    dataset: &Dataset,
    over: &OrderOverPartitions,
    graph: &PartitionedGraph,
) -> Result<Arc<dyn Batches>> {
    let batching = Arc::new(over.batching(config, graph.counts.counts())?);
    let manifest = dataset.manifest();
    let size = GraphSize { nodes: manifest.nodes.count, edges: manifest.edges.count };
    match &graph.steps {
        StepGraphs::Narrow(subgraphs) => links_of_buckets(config, link, size, &batching, graph, subgraphs),
        StepGraphs::Wide(subgraphs) => links_of_buckets(config, link, size, &batching, graph, subgraphs),
    }
}

fn links_of_buckets<W: StoredId>(
    config: &RunConfig,
    link: &LinkConfig,
    size: GraphSize,
    batching: &Arc<StepBatching>,
    graph: &PartitionedGraph,
    subgraphs: &Arc<BucketSubgraphs<W>>,
) -> Result<Arc<dyn Batches>> {
    let partitions = &graph.partitions;
    let mut batches =
        BucketLinks::new(batching.clone(), partitions.count(), partitions.identity(), subgraphs);
    if link.target_edges == TargetEdges::Drop && !config.fanout.is_empty() {
        batches = batches.dropping_targets();
    }
    let NegativeCount::Shared { uniform, by_degree, chunks } = link.negatives else {
        return Err(TrainError::ResidentAllNodes);
    };
    if link.edge_weights == EdgeWeights::Subsampling {
        return Err(TrainError::BucketEdgeWeights);
    }
    for (side, settings) in shared_settings(config, link, [uniform, by_degree], chunks) {
        let pool = NegativePool::PerBatch(Arc::new(BucketPool::new(batching, subgraphs)));
        let negatives = NegativeSampler::new(size, pool, settings)?;
        batches = batches.with_negatives(side, negatives.with_mask(link.mask));
    }
    Ok(Arc::new(batches))
}

/// Negatives that the edges of a chunk share, uniform ones and those by degree, for either side.
fn shared_settings(
    config: &RunConfig,
    link: &LinkConfig,
    of_targets: [u32; 2],
    chunks: u32,
) -> [(Side, NegativeSettings); 2] {
    let of =
        |[uniform, by_degree]: [u32; 2]| NegativeSettings { seed: config.seed, chunks, uniform, by_degree };
    [(Side::Target, of(of_targets)), (Side::Source, of(link.source_negatives.unwrap_or(of_targets)))]
}

/// The order of all edges.
fn order_of_edges(
    config: &RunConfig,
    dataset: &Dataset,
    graph: &dyn EdgeLookup,
    batching: Batching,
    purpose: Purpose,
) -> Result<Arc<dyn Order>> {
    Ok(match (config.order, config.order_over_partitions(dataset)?) {
        (_, Some(over)) if purpose == Purpose::Train => Arc::new(over.of_edges(config, graph)?),
        (OrderName::Sequential, _) => Arc::new(Sequential(batching)),
        (OrderName::Groups, _) => return Err(TrainError::LinkOrder),
        _ => Arc::new(Shuffled { batching, seed: config.seed }),
    })
}

/// The true ends of every edge that trains.
fn known_edges(dataset: &Dataset, stop: &StopSignal) -> Result<TrueEnds> {
    let edges = dataset.manifest().edges.count;
    // What the memory table has for them.
    let most_bytes = Links::true_end_bytes(edges, edges);
    let request = TrueEndsRequest { dataset, queries: Queries::Graph, held_out: false, most_bytes };
    Ok(TrueEnds::build_until(&request, &|| stop.is_asked())?)
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

    fn step(&self, at: Position) -> Option<BatchStep> {
        self.batches.step(at)
    }

    fn identity(&self) -> String {
        format!("{} and all nodes", self.batches.identity())
    }
}
