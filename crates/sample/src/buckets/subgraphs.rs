//! Subgraphs of the residents of steps, built from edge buckets: what samplers, negatives and batches of links see.

use super::BucketWords;
use crate::node_partitions::NodePartitions;
use crate::order::BatchStep;
use crate::topology::{
    Edge, Fetched, RequestedEntries, StepSubgraphs, StoredId, Subgraph, SubgraphBuilder, SubgraphHop,
    SubgraphShape, Topology, TopologyWorkspace, resident_nodes,
};
use crate::{Batches, Position, Result, SampleError};
use esker_types::{EdgeBucket, EdgeId, NodeId, PartitionId};
use std::sync::{Arc, Mutex, PoisonError};

/// A step: its epoch, and its number in there.
type StepId = (u64, usize);

/// A step's subgraph, and the words of its buckets.
#[derive(Debug)]
struct KeptStep<W> {
    step: StepId,
    subgraph: Arc<Subgraph<W>>,
    words: BucketWords<W>,
}

/// The subgraph of the current step. Whoever samples a step sets its subgraph first.
#[derive(Debug)]
pub struct BucketSubgraphs<W> {
    kept: Mutex<Option<Arc<KeptStep<W>>>>,
    words: usize,
}

/// The subgraphs of a graph with ids of either width.
#[derive(Debug, Clone)]
pub enum StepGraphs {
    /// Ids of 32 bits.
    Narrow(Arc<BucketSubgraphs<u32>>),
    /// Ids of 64 bits.
    Wide(Arc<BucketSubgraphs<u64>>),
}

impl<W: StoredId> BucketSubgraphs<W> {
    /// No subgraph yet.
    pub fn new(relations: bool) -> Arc<BucketSubgraphs<W>> {
        Arc::new(BucketSubgraphs { kept: Mutex::default(), words: 2 + usize::from(relations) })
    }

    /// The subgraph of these partitions, from the buckets between them.
    pub fn build(
        partitions: &NodePartitions,
        resident: &[PartitionId],
        buckets: &BucketWords<W>,
        shape: SubgraphShape,
    ) -> Result<Subgraph<W>> {
        let (members, words) = (resident_nodes(partitions, resident)?, 2 + usize::from(shape.relations));
        let mut builder = SubgraphBuilder::new(members, shape);
        // Lists are in the order of edge ids: by target, then by source. Parallel edges are in one bucket, in their order.
        for own in buckets.values() {
            own.chunks_exact(words).for_each(|edge| builder.count(edge[1].node(), edge[0].node()));
        }
        for own in buckets.values() {
            for edge in own.chunks_exact(words) {
                let (target, source) = (edge[0].node(), edge[1].node());
                let number = |node: NodeId| builder.members().slot(node).unwrap_or(0) as u64;
                let key = EdgeId(number(target) << 32 | number(source));
                let relation = edge.get(2).map_or(0, |relation| relation.node().0 as u32);
                builder.place(key, &Edge { source, target, relation });
            }
        }
        Ok(builder.finish())
    }

    /// Sets the subgraph of a step, and the buckets it was built from.
    pub fn set(&self, step: &BatchStep, subgraph: Arc<Subgraph<W>>, words: BucketWords<W>) {
        let step = (step.epoch(), step.number);
        let kept = Some(Arc::new(KeptStep { step, subgraph, words }));
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    }

    /// Forgets the subgraph: its step is over.
    pub fn clear(&self) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn find(&self, step: &BatchStep) -> Result<Arc<KeptStep<W>>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.clone().filter(|kept| kept.step == (step.epoch(), step.number));
        found.ok_or(SampleError::NotResident { node: 0 })
    }

    /// Appends edges of a step: each by its bucket and its index there.
    pub(super) fn edges(
        &self,
        step: &BatchStep,
        items: impl Iterator<Item = (EdgeBucket, u64)>,
        out: &mut Vec<Edge>,
    ) -> Result<()> {
        let kept = self.find(step)?;
        for (bucket, index) in items {
            let at = index as usize * self.words;
            let edge = kept.words.get(&bucket).and_then(|words| words.get(at..at + self.words));
            let Some(edge) = edge else {
                return Err(SampleError::BucketEdge { from: bucket.source.0, to: bucket.target.0 });
            };
            let relation = edge.get(2).map_or(0, |relation| relation.node().0 as u32);
            out.push(Edge { source: edge[1].node(), target: edge[0].node(), relation });
        }
        Ok(())
    }
}

impl<W: StoredId> StepSubgraphs<W> for BucketSubgraphs<W> {
    fn of_step(&self, step: &BatchStep) -> Result<Arc<Subgraph<W>>> {
        Ok(self.find(step)?.subgraph.clone())
    }
}

/// The topology of steps: a sampler sees the residents of its batch's step.
#[derive(Debug, Clone)]
pub struct BucketTopology<W> {
    nodes: u64,
    edges: u64,
    subgraphs: Arc<BucketSubgraphs<W>>,
}

impl<W: StoredId> BucketTopology<W> {
    /// Of a graph with so many nodes and edges.
    pub fn new(nodes: u64, edges: u64, subgraphs: &Arc<BucketSubgraphs<W>>) -> BucketTopology<W> {
        BucketTopology { nodes, edges, subgraphs: subgraphs.clone() }
    }
}

/// The subgraph of the current batch.
#[derive(Debug)]
pub struct CurrentSubgraph<W>(Option<Arc<Subgraph<W>>>);

impl<W> Default for CurrentSubgraph<W> {
    fn default() -> CurrentSubgraph<W> {
        CurrentSubgraph(None)
    }
}

impl<W> TopologyWorkspace for CurrentSubgraph<W> {
    // Subgraphs are counted by whoever makes them.
    fn bytes(&self) -> u64 {
        0
    }
}

impl<W: StoredId> Topology for BucketTopology<W> {
    type StoredId = W;
    type Workspace = CurrentSubgraph<W>;
    type HopInMemory<'a> = SubgraphHop<'a, W>;

    fn nodes(&self) -> u64 {
        self.nodes
    }

    fn entries(&self) -> u64 {
        2 * self.edges
    }

    fn has_relations(&self) -> bool {
        self.subgraphs.words > 2
    }

    fn hop_in_memory<'a>(
        &'a self,
        nodes: &'a [NodeId],
        workspace: &'a CurrentSubgraph<W>,
    ) -> Result<Option<SubgraphHop<'a, W>>> {
        workspace.0.as_ref().map(|subgraph| subgraph.hop(nodes)).transpose()
    }

    fn degrees(&self, nodes: &[NodeId], workspace: &CurrentSubgraph<W>, out: &mut Vec<u32>) -> Result<()> {
        match &workspace.0 {
            Some(subgraph) => subgraph.degrees(nodes, out),
            None => Err(SampleError::NotResident { node: nodes.first().map_or(0, |node| node.0) }),
        }
    }

    fn begin(&self, batches: &dyn Batches, at: Position, workspace: &mut CurrentSubgraph<W>) -> Result<()> {
        workspace.0 = match batches.step(at) {
            Some(step) => Some(self.subgraphs.of_step(&step)?),
            None => None,
        };
        Ok(())
    }

    /// Never asked for: hops are in memory.
    fn fetch(
        &self,
        requested: RequestedEntries<'_>,
        _: &mut CurrentSubgraph<W>,
        _: &mut Fetched<W>,
    ) -> Result<()> {
        Err(SampleError::NotResident { node: requested.nodes.first().map_or(0, |node| node.0) })
    }
}
