//! A topology that sees, in batches of a step over partitions, resident nodes only. Other batches, such as those of
//! evaluation, see the whole graph.

use super::subgraph::{SubgraphBuilder, SubgraphHop, SubgraphShape};
use super::{
    Fetched, HopNeighbours, InMemory, Neighbours, RequestedEntries, StoredId, Subgraph, Topology,
    TopologyWorkspace,
};
use crate::negatives::{NegativeNodes, PoolOfBatch};
use crate::order::BatchStep;
use crate::{Batches, NodePartitions, NodeSet, Order, Position, Result, SampleError};
use esker_types::{EdgeId, NodeId, PartitionId};
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

/// The subgraph of the resident nodes of each step.
pub trait StepSubgraphs<W>: Debug + Send + Sync {
    /// That of a step. Batches of earlier steps may still be sampled.
    fn of_step(&self, step: &BatchStep) -> Result<Arc<Subgraph<W>>>;
}

/// Subgraphs of a graph in memory, each made when its first batch is sampled.
#[derive(Debug)]
pub struct SubgraphsInMemory<W> {
    graph: Arc<InMemory<W>>,
    partitions: NodePartitions,
    shape: SubgraphShape,
    /// The last ones.
    kept: Mutex<Vec<KeptSubgraph<W>>>,
    most_kept: usize,
}

/// A subgraph in memory.
#[derive(Debug)]
struct KeptSubgraph<W> {
    /// Ascending.
    partitions: Vec<PartitionId>,
    subgraph: Arc<Subgraph<W>>,
}

impl<W: StoredId> SubgraphsInMemory<W> {
    /// Subgraphs of a graph. `most_kept` of them stay in memory, for samplers that are in different steps.
    pub fn new(
        graph: Arc<InMemory<W>>,
        partitions: NodePartitions,
        edge_ids: bool,
        most_kept: usize,
    ) -> SubgraphsInMemory<W> {
        let shape =
            SubgraphShape { direction: graph.direction(), relations: graph.has_relations(), edge_ids };
        SubgraphsInMemory { graph, partitions, shape, kept: Mutex::default(), most_kept: most_kept.max(1) }
    }

    fn build(&self, partitions: &[PartitionId]) -> Result<Subgraph<W>> {
        let members = resident_nodes(&self.partitions, partitions)?;
        let mut builder = SubgraphBuilder::new(members.clone(), self.shape);
        for node in members.iter() {
            self.graph.each_edge_of(node, |_, edge| builder.count(edge.source, edge.target));
        }
        for node in members.iter() {
            self.graph.each_edge_of(node, |id, edge| builder.place(id, &edge));
        }
        Ok(builder.finish())
    }
}

/// The nodes of some partitions. Fails if they are too many to number.
pub fn resident_nodes(partitions: &NodePartitions, resident: &[PartitionId]) -> Result<NodeSet> {
    let count: u64 = resident.iter().map(|partition| partitions.size_of(*partition)).sum();
    if count > u32::MAX as u64 {
        return Err(SampleError::TooManyResident { nodes: count });
    }
    let of = |partition: &PartitionId| partitions.positions(*partition);
    let positions = resident.iter().flat_map(of);
    Ok(NodeSet::of_members(partitions.nodes(), positions.map(|position| partitions.node_at(position))))
}

impl<W: StoredId> StepSubgraphs<W> for SubgraphsInMemory<W> {
    fn of_step(&self, step: &BatchStep) -> Result<Arc<Subgraph<W>>> {
        let mut partitions = step.step().resident.clone();
        partitions.sort_unstable();
        // Samplers wait for the one that builds what they need.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = kept.iter().find(|kept| kept.partitions == partitions) {
            return Ok(found.subgraph.clone());
        }
        if kept.len() == self.most_kept {
            kept.remove(0);
        }
        let subgraph = Arc::new(self.build(&partitions)?);
        kept.push(KeptSubgraph { partitions, subgraph: subgraph.clone() });
        Ok(subgraph)
    }
}

/// A topology with the subgraphs of steps.
#[derive(Debug, Clone)]
pub struct ByStep<T: Topology> {
    whole: T,
    subgraphs: Arc<dyn StepSubgraphs<T::StoredId>>,
}

impl<T: Topology> ByStep<T> {
    /// Batches of steps are sampled from `subgraphs`, others from `whole`.
    pub fn new(whole: T, subgraphs: Arc<dyn StepSubgraphs<T::StoredId>>) -> ByStep<T> {
        ByStep { whole, subgraphs }
    }
}

/// The subgraph of the current batch, if it belongs to a step, and the memory of the whole topology.
#[derive(Debug)]
pub struct StepWorkspace<M, W> {
    whole: M,
    subgraph: Option<Arc<Subgraph<W>>>,
}

impl<M: Default, W> Default for StepWorkspace<M, W> {
    fn default() -> StepWorkspace<M, W> {
        StepWorkspace { whole: M::default(), subgraph: None }
    }
}

impl<M: TopologyWorkspace, W> TopologyWorkspace for StepWorkspace<M, W> {
    // Subgraphs are counted by whoever makes them.
    fn bytes(&self) -> u64 {
        self.whole.bytes()
    }
}

/// The neighbours of a hop, of either graph.
#[derive(Debug, Clone, Copy)]
pub enum StepHop<'a, H, W> {
    /// Of the whole graph.
    Whole(H),
    /// Of resident nodes.
    Resident(SubgraphHop<'a, W>),
}

impl<H: HopNeighbours> HopNeighbours for StepHop<'_, H, H::StoredId> {
    type StoredId = H::StoredId;

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        match self {
            StepHop::Whole(hop) => hop.prefetch(at),
            StepHop::Resident(hop) => hop.prefetch(at),
        }
    }

    #[inline(always)]
    fn list(&self, at: usize) -> Neighbours<'_, H::StoredId> {
        match self {
            StepHop::Whole(hop) => hop.list(at),
            StepHop::Resident(hop) => hop.list(at),
        }
    }

    fn edge(&self, at: usize, position: u32) -> EdgeId {
        match self {
            StepHop::Whole(hop) => hop.edge(at, position),
            StepHop::Resident(hop) => hop.edge(at, position),
        }
    }

    fn relation(&self, at: usize, position: u32) -> u32 {
        match self {
            StepHop::Whole(hop) => hop.relation(at, position),
            StepHop::Resident(hop) => hop.relation(at, position),
        }
    }
}

impl<T: Topology> Topology for ByStep<T> {
    type StoredId = T::StoredId;
    type Workspace = StepWorkspace<T::Workspace, T::StoredId>;
    type HopInMemory<'a>
        = StepHop<'a, T::HopInMemory<'a>, T::StoredId>
    where
        Self: 'a;

    fn nodes(&self) -> u64 {
        self.whole.nodes()
    }

    fn entries(&self) -> u64 {
        self.whole.entries()
    }

    fn has_relations(&self) -> bool {
        self.whole.has_relations()
    }

    fn hop_in_memory<'a>(
        &'a self,
        nodes: &'a [NodeId],
        workspace: &'a Self::Workspace,
    ) -> Result<Option<Self::HopInMemory<'a>>> {
        match &workspace.subgraph {
            Some(subgraph) => Ok(Some(StepHop::Resident(subgraph.hop(nodes)?))),
            None => Ok(self.whole.hop_in_memory(nodes, &workspace.whole)?.map(StepHop::Whole)),
        }
    }

    fn degrees(&self, nodes: &[NodeId], workspace: &Self::Workspace, out: &mut Vec<u32>) -> Result<()> {
        match &workspace.subgraph {
            Some(subgraph) => subgraph.degrees(nodes, out),
            None => self.whole.degrees(nodes, &workspace.whole, out),
        }
    }

    fn begin(&self, batches: &dyn Batches, at: Position, workspace: &mut Self::Workspace) -> Result<()> {
        // Not held while the next is made.
        workspace.subgraph = None;
        workspace.subgraph = match batches.step(at) {
            Some(step) => Some(self.subgraphs.of_step(&step)?),
            None => None,
        };
        self.whole.begin(batches, at, &mut workspace.whole)
    }

    fn fetch(
        &self,
        requested: RequestedEntries<'_>,
        workspace: &mut Self::Workspace,
        out: &mut Fetched<T::StoredId>,
    ) -> Result<()> {
        self.whole.fetch(requested, &mut workspace.whole, out)
    }
}

/// Negatives from the resident nodes of a batch's step.
pub struct ResidentPool<O, W> {
    order: O,
    subgraphs: Arc<dyn StepSubgraphs<W>>,
}

impl<O: Order, W: StoredId> ResidentPool<O, W> {
    /// The residents of the steps of an order.
    pub fn new(order: O, subgraphs: Arc<dyn StepSubgraphs<W>>) -> ResidentPool<O, W> {
        ResidentPool { order, subgraphs }
    }
}

impl<O: Order, W: StoredId> Debug for ResidentPool<O, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResidentPool").field("subgraphs", &self.subgraphs).finish_non_exhaustive()
    }
}

impl<O: Order, W: StoredId> PoolOfBatch for ResidentPool<O, W> {
    fn pool(&self, at: Position) -> Result<Option<Arc<dyn NegativeNodes>>> {
        match self.order.step(at.epoch, at.batch) {
            Some(step) => Ok(Some(self.subgraphs.of_step(&step)?)),
            None => Ok(None),
        }
    }

    fn identity(&self) -> String {
        "residents".to_string()
    }
}
