//! Batches of links whose edges are in buckets: the same batches as those of all edges in memory, by the same order.

use super::subgraphs::BucketSubgraphs;
use crate::negatives::{NegativeNodes, NegativeSampler, Negatives, PoolOfBatch, Side};
use crate::order::{BatchStep, StepBatching, StepItem};
use crate::topology::{EdgeLookup, IncomingNeighbours, StepSubgraphs};
use crate::{Batches, Edge, LinkBatch, Position, Result, SampleError, StoredId, Targets};
use esker_types::{EdgeBucket, EdgeId, NodeId, PartitionId};
use std::sync::Arc;

/// A graph of which only the size is known: negatives come from the residents of a step, and true edges, too.
#[derive(Debug, Clone, Copy)]
pub struct GraphSize {
    /// Number of nodes.
    pub nodes: u64,
    /// Number of edges.
    pub edges: u64,
}

impl EdgeLookup for GraphSize {
    fn node_count(&self) -> u64 {
        self.nodes
    }

    fn edge_count(&self) -> u64 {
        self.edges
    }

    fn has_incoming(&self) -> bool {
        true
    }

    fn edges_by_id(&self, ids: &[EdgeId], _: &mut Vec<Edge>) -> Result<()> {
        ids.first().map_or(Ok(()), |_| Err(SampleError::OnlyOutgoing))
    }

    fn in_degrees(&self, _: &[NodeId], _: &mut Vec<u64>) -> Result<()> {
        Err(SampleError::OnlyOutgoing)
    }

    fn incoming(&self, _: &[NodeId], _: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()> {
        Err(SampleError::OnlyOutgoing)
    }
}

/// Negatives from the resident nodes of a batch's step.
#[derive(Debug)]
pub struct BucketPool<W> {
    batching: Arc<StepBatching>,
    subgraphs: Arc<BucketSubgraphs<W>>,
}

impl<W: StoredId> BucketPool<W> {
    /// The residents of the steps of these batches.
    pub fn new(batching: &Arc<StepBatching>, subgraphs: &Arc<BucketSubgraphs<W>>) -> BucketPool<W> {
        BucketPool { batching: batching.clone(), subgraphs: subgraphs.clone() }
    }
}

impl<W: StoredId> PoolOfBatch for BucketPool<W> {
    fn pool(&self, at: Position) -> Result<Option<Arc<dyn NegativeNodes>>> {
        match self.batching.step(at.epoch, at.batch) {
            Some(step) => Ok(Some(self.subgraphs.of_step(&step)?)),
            None => Ok(None),
        }
    }

    fn identity(&self) -> String {
        "residents".to_string()
    }
}

/// Batches of the edges of steps.
#[derive(Debug)]
pub struct BucketLinks<W> {
    batching: Arc<StepBatching>,
    partitions: u32,
    identity: String,
    subgraphs: Arc<BucketSubgraphs<W>>,
    targets: Option<NegativeSampler<GraphSize>>,
    sources: Option<NegativeSampler<GraphSize>>,
    drops_targets: bool,
}

impl<W: StoredId> BucketLinks<W> {
    /// Batches by `batching`, whose units of work are the buckets between `partitions` partitions. `identity` names the
    /// partitions.
    pub fn new(
        batching: Arc<StepBatching>,
        partitions: u32,
        identity: String,
        subgraphs: &Arc<BucketSubgraphs<W>>,
    ) -> BucketLinks<W> {
        let subgraphs = subgraphs.clone();
        BucketLinks {
            batching,
            partitions,
            identity,
            subgraphs,
            targets: None,
            sources: None,
            drops_targets: false,
        }
    }

    /// The same batches, with negatives for a side added.
    pub fn with_negatives(mut self, side: Side, negatives: NegativeSampler<GraphSize>) -> BucketLinks<W> {
        match side {
            Side::Target => self.targets = Some(negatives),
            Side::Source => self.sources = Some(negatives),
        }
        self
    }

    /// The same batches, whose samples leave out the batch's edges and their reverses.
    pub fn dropping_targets(mut self) -> BucketLinks<W> {
        self.drops_targets = true;
        self
    }

    fn edges(&self, at: Position, out: &mut Vec<Edge>) -> Result<()> {
        let mut items = Vec::new();
        self.batching.items(at.epoch, at.batch, &mut items)?;
        let Some(step) = self.batching.step(at.epoch, at.batch) else { return Ok(()) };
        let count = self.partitions as usize;
        let of = |item: &StepItem| {
            let [source, target] = [item.unit / count, item.unit % count].map(|at| PartitionId(at as u32));
            (EdgeBucket { source, target }, item.index)
        };
        out.clear();
        self.subgraphs.edges(&step, items.iter().map(of), out)
    }

    fn link(&self, at: Position) -> Result<LinkBatch> {
        let mut link = LinkBatch::default();
        self.edges(at, &mut link.edges)?;
        let draw =
            |negatives: &Option<NegativeSampler<GraphSize>>, side: Side, out: &mut Negatives| match negatives
            {
                Some(negatives) => negatives.draw(at, &link.edges, side, out),
                None => Ok(()),
            };
        let (mut targets, mut sources) = (Negatives::default(), Negatives::default());
        draw(&self.targets, Side::Target, &mut targets)?;
        draw(&self.sources, Side::Source, &mut sources)?;
        (link.targets, link.sources) = (targets, sources);
        link.targets_start = 2 * link.edges.len();
        link.sources_start = link.targets_start + link.targets.nodes.len();
        Ok(link)
    }
}

impl<W: StoredId> Batches for BucketLinks<W> {
    fn count(&self, epoch: u64) -> u64 {
        self.batching.epoch(epoch).batches()
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        let mut edges = Vec::new();
        self.edges(at, &mut edges)?;
        out.clear();
        out.extend(edges.iter().flat_map(|edge| [edge.source, edge.target]));
        for (negatives, side) in [(&self.targets, Side::Target), (&self.sources, Side::Source)] {
            if let Some(negatives) = negatives {
                negatives.draw_nodes(at, edges.len(), side, out)?;
            }
        }
        Ok(())
    }

    fn targets(&self, at: Position) -> Result<Targets> {
        self.link(at).map(|link| Targets::Links(Arc::new(link)))
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<()> {
        out.clear();
        match self.drops_targets {
            true => self.edges(at, out),
            false => Ok(()),
        }
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        self.batching.step(at.epoch, at.batch)
    }

    fn identity(&self) -> String {
        let side = |negatives: &Option<NegativeSampler<GraphSize>>| {
            negatives.as_ref().map_or("none".to_string(), NegativeSampler::identity)
        };
        let dropped = if self.drops_targets { " target-edges:drop" } else { "" };
        let (targets, sources) = (side(&self.targets), side(&self.sources));
        format!(
            "links {} {} targets:{targets} sources:{sources}{dropped}",
            self.batching.identity(),
            self.identity
        )
    }
}
