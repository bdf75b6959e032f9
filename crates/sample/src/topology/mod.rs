//! Where a node's neighbours come from. Adjacency in memory is read directly. For other topologies a sampler asks for
//! the degrees of a hop's nodes, draws positions, and fetches those entries, all at once. So a topology on disk reads
//! only their blocks.

mod by_partition;
mod by_step;
mod cache;
mod counts;
mod disk;
mod elias_fano;
mod group;
mod in_order;
pub(crate) mod lookup;
mod memory;
mod subgraph;

pub use by_partition::{AdjacencyRequest, PartitionedAdjacency};
pub use by_step::{
    ByStep, ResidentPool, StepHop, StepSubgraphs, StepWorkspace, SubgraphsInMemory, resident_nodes,
};
pub use cache::{CacheIndex, NeighbourCache, NeighbourCacheFile};
pub use counts::{CountStream, CountedNeighbours, EntryCounts, GraphWork};
pub use disk::{DiskGraph, DiskWorkspace, NeighbourCounters, OnDisk};
pub use group::{GroupCache, GroupNeighbours, GroupRoom};
pub(crate) use in_order::AdjacencyInOrder;
pub use lookup::{EdgeLookup, IncomingNeighbours, Sources};
pub use memory::{AnyTopology, InMemory};
pub use subgraph::{Subgraph, SubgraphBuilder, SubgraphHop, SubgraphShape};

use crate::{Batches, Position, Result};
use esker_types::{EdgeId, NodeId};

/// A node id as adjacency stores it: `u32` or `u64`.
pub trait StoredId: bytemuck::Pod + Default + Send + Sync + Ord + std::fmt::Debug {
    /// The node.
    fn node(self) -> NodeId;
    /// The stored id of a node that is known to fit.
    fn of(node: NodeId) -> Self;
    /// Words as a [`Sources`].
    fn sources(words: &[Self]) -> Sources<'_>;
    /// The index into an array with one element per node.
    #[inline(always)]
    fn index(self) -> usize {
        self.node().index()
    }
}

impl StoredId for u32 {
    #[inline(always)]
    fn node(self) -> NodeId {
        NodeId(self as u64)
    }
    #[inline(always)]
    fn of(node: NodeId) -> u32 {
        node.0 as u32
    }
    fn sources(words: &[u32]) -> Sources<'_> {
        Sources::Narrow(words)
    }
}

impl StoredId for u64 {
    #[inline(always)]
    fn node(self) -> NodeId {
        NodeId(self)
    }
    #[inline(always)]
    fn of(node: NodeId) -> u64 {
        node.0
    }
    fn sources(words: &[u64]) -> Sources<'_> {
        Sources::Wide(words)
    }
}

/// The direction of edges along which neighbours are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Sources of edges into a node.
    Incoming,
    /// Targets of edges out of a node.
    Outgoing,
    /// The incoming neighbours, then the outgoing ones.
    Both,
}

impl Direction {
    /// A short name, for files.
    pub(crate) fn short(self) -> &'static str {
        match self {
            Direction::Incoming => "in",
            Direction::Outgoing => "out",
            Direction::Both => "both",
        }
    }
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Direction::Incoming => "incoming",
            Direction::Outgoing => "outgoing",
            Direction::Both => "incoming and outgoing",
        })
    }
}

/// An edge by its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// Its source.
    pub source: NodeId,
    /// Its target.
    pub target: NodeId,
    /// Its relation; 0 if the graph has none.
    pub relation: u32,
}

/// A node's stored neighbours: two runs, each sorted by neighbour, then by edge id. The second run is empty unless both
/// directions are requested.
#[derive(Debug, Clone, Copy)]
pub struct Neighbours<'a, W> {
    /// The first run: positions from 0.
    pub first: &'a [W],
    /// The second run: positions after those of `first`.
    pub second: &'a [W],
}

impl<W: StoredId> Neighbours<'_, W> {
    /// The node's degree.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.first.len() + self.second.len()
    }

    /// Whether the node has no neighbours.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The neighbour at a position.
    #[inline(always)]
    pub fn at(&self, position: usize) -> W {
        match self.first.get(position) {
            Some(word) => *word,
            None => self.second[position - self.first.len()],
        }
    }
}

/// Adjacency of a graph, or of the part of it that is available.
pub trait Topology: Send + Sync {
    /// How neighbours are stored.
    type StoredId: StoredId;
    /// Memory that fetching needs, kept between hops.
    type Workspace: TopologyWorkspace;
    /// The neighbours of one hop, if adjacency is in memory; else [`NotInMemory`].
    type HopInMemory<'a>: HopNeighbours<StoredId = Self::StoredId>
    where
        Self: 'a;

    /// Nodes of the graph; ids are below it.
    fn nodes(&self) -> u64;

    /// Entries of the adjacency. An edge counts as often as it occurs there.
    fn entries(&self) -> u64;

    /// Whether edges have relations.
    fn has_relations(&self) -> bool;

    /// The neighbours of `nodes`, if adjacency is in memory. On `None` a sampler asks for
    /// [`degrees`](Topology::degrees), draws positions, and then [`fetch`](Topology::fetch)es the entries at those
    /// positions only.
    fn hop_in_memory<'a>(
        &'a self,
        nodes: &'a [NodeId],
        workspace: &'a Self::Workspace,
    ) -> Result<Option<Self::HopInMemory<'a>>>;

    /// Appends the degrees of `nodes`.
    fn degrees(&self, nodes: &[NodeId], workspace: &Self::Workspace, out: &mut Vec<u32>) -> Result<()>;

    /// Prepares for a batch: whoever samples it calls this first. A topology that knows groups of partitions brings those
    /// of the batch's group into memory; samples do not depend on it. One that sees resident nodes only ([`ByStep`])
    /// takes those of the batch's step.
    fn begin(&self, _batches: &dyn Batches, _at: Position, _: &mut Self::Workspace) -> Result<()> {
        Ok(())
    }

    /// Replaces `out` by the entries at the requested positions: for each node `lengths` of them, ascending. A topology
    /// on disk reads all of them together here.
    fn fetch(
        &self,
        requested: RequestedEntries<'_>,
        workspace: &mut Self::Workspace,
        out: &mut Fetched<Self::StoredId>,
    ) -> Result<()>;
}

/// Adjacency entries that a hop needs.
#[derive(Debug, Clone, Copy)]
pub struct RequestedEntries<'a> {
    /// The nodes.
    pub nodes: &'a [NodeId],
    /// Number of entries per node.
    pub lengths: &'a [u32],
    /// Positions of the entries, node after node.
    pub positions: &'a [u32],
    /// Whether edge ids are requested too.
    pub edges: bool,
    /// Whether relations are requested too.
    pub relations: bool,
}

/// Fetched adjacency entries, in the order of the request.
#[derive(Debug, Default)]
pub struct Fetched<W> {
    /// Neighbours.
    pub words: Vec<W>,
    /// Edge ids, if requested.
    pub edges: Vec<EdgeId>,
    /// Relations, if requested.
    pub relations: Vec<u32>,
}

/// Memory that a topology keeps for a sampler. A topology on disk keeps a queue, which stays with its thread.
pub trait TopologyWorkspace: Default {
    /// Allocated bytes.
    fn bytes(&self) -> u64;
}

impl TopologyWorkspace for () {
    fn bytes(&self) -> u64 {
        0
    }
}

/// The neighbours of a hop's nodes in memory, by index of the node in the hop.
pub trait HopNeighbours: Sync {
    /// How neighbours are stored.
    type StoredId: StoredId;

    /// Prefetches node `at`. Indices beyond the last node are allowed.
    fn prefetch(&self, at: usize);

    /// The neighbours of node `at`.
    fn list(&self, at: usize) -> Neighbours<'_, Self::StoredId>;

    /// The edge at a position in the adjacency of node `at`.
    fn edge(&self, at: usize, position: u32) -> EdgeId;

    /// The relation of that edge; 0 if the graph has none.
    fn relation(&self, at: usize, position: u32) -> u32;
}

/// The neighbours of a topology that is never in memory. There is no value of this type.
#[derive(Debug, Clone, Copy)]
pub struct NotInMemory<W>(std::convert::Infallible, std::marker::PhantomData<W>);

impl<W: StoredId> HopNeighbours for NotInMemory<W> {
    type StoredId = W;
    fn prefetch(&self, _: usize) {
        match self.0 {}
    }
    fn list(&self, _: usize) -> Neighbours<'_, W> {
        match self.0 {}
    }
    fn edge(&self, _: usize, _: u32) -> EdgeId {
        match self.0 {}
    }
    fn relation(&self, _: usize, _: u32) -> u32 {
        match self.0 {}
    }
}

/// A reference or shared pointer to a topology is a topology.
macro_rules! is_topology_too {
    ($pointer:ty) => {
        impl<T: Topology> Topology for $pointer {
            type StoredId = T::StoredId;
            type Workspace = T::Workspace;
            type HopInMemory<'a>
                = T::HopInMemory<'a>
            where
                Self: 'a;
            fn nodes(&self) -> u64 {
                (**self).nodes()
            }
            fn entries(&self) -> u64 {
                (**self).entries()
            }
            fn has_relations(&self) -> bool {
                (**self).has_relations()
            }
            fn hop_in_memory<'a>(
                &'a self,
                nodes: &'a [NodeId],
                work: &'a T::Workspace,
            ) -> Result<Option<T::HopInMemory<'a>>> {
                (**self).hop_in_memory(nodes, work)
            }
            fn degrees(&self, nodes: &[NodeId], work: &T::Workspace, out: &mut Vec<u32>) -> Result<()> {
                (**self).degrees(nodes, work, out)
            }
            fn begin(&self, batches: &dyn Batches, at: Position, work: &mut T::Workspace) -> Result<()> {
                (**self).begin(batches, at, work)
            }
            fn fetch(
                &self,
                requested: RequestedEntries<'_>,
                work: &mut T::Workspace,
                out: &mut Fetched<T::StoredId>,
            ) -> Result<()> {
                (**self).fetch(requested, work, out)
            }
        }
    };
}
is_topology_too!(&T);
is_topology_too!(std::sync::Arc<T>);
