//! Where neighbour lists come from. Lists in memory are read as they lie. For others a sampler asks for the degrees of a
//! hop's nodes, draws, and fetches the entries drawn, all at once: a topology on disk reads no more than their blocks.

mod cache;
mod disk;
mod elias_fano;
pub(crate) mod lookup;
mod memory;

pub use cache::{CacheIndex, CountStream, EntryCounts, NeighbourCache, NeighbourCacheFile};
pub use disk::{DiskGraph, DiskWorkspace, NeighbourCounters, OnDisk};
pub use lookup::{EdgeLookup, IncomingNeighbours, Sources};
pub use memory::{AnyTopology, InMemory};

use crate::Result;
use esker_types::{EdgeId, NodeId};

/// A node id as lists store it: `u32` or `u64`.
pub trait StoredId: bytemuck::Pod + Default + Send + Sync + Ord + std::fmt::Debug {
    /// The node.
    fn node(self) -> NodeId;
    /// The word of a node that is known to fit.
    fn of(node: NodeId) -> Self;
    /// Words as a [`Sources`].
    fn sources(words: &[Self]) -> Sources<'_>;
    /// The place in an array by node.
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

/// Along which edges neighbours are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Sources of edges into a node.
    Incoming,
    /// Targets of edges out of a node.
    Outgoing,
    /// The incoming list, then the outgoing one, as one list.
    Both,
}

/// An edge by its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// Where it starts.
    pub source: NodeId,
    /// Where it ends.
    pub target: NodeId,
    /// Its relation; 0 where there are none.
    pub relation: u32,
}

/// A node's stored list: two runs, each sorted by neighbour, then by edge id. The second is empty unless neighbours
/// in both directions are requested.
#[derive(Debug, Clone, Copy)]
pub struct Neighbours<'a, W> {
    /// Positions from 0.
    pub first: &'a [W],
    /// Positions behind those of `first`.
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

/// Neighbour lists of a graph, or of the part of it that is at hand.
pub trait Topology: Send + Sync {
    /// How neighbours are stored.
    type StoredId: StoredId;
    /// Memory that fetching needs, kept between hops.
    type Workspace: TopologyWorkspace;
    /// The lists of one hop, where they lie in memory; else [`NotAtHand`].
    type AtHand<'a>: HopNeighbours<StoredId = Self::StoredId>
    where
        Self: 'a;

    /// Nodes of the graph; ids are below it.
    fn nodes(&self) -> u64;

    /// Edges that lists hold, each as often as lists name it.
    fn entries(&self) -> u64;

    /// Whether edges have relations.
    fn has_relations(&self) -> bool;

    /// The lists of `nodes`, where they lie in memory. `None`: a sampler asks for [`degrees`](Topology::degrees), draws
    /// positions, and then [`fetch`](Topology::fetch)es what stands there and nothing else.
    fn at_hand<'a>(&'a self, nodes: &'a [NodeId]) -> Option<Self::AtHand<'a>>;

    /// Appends the degrees of `nodes`.
    fn degrees(&self, nodes: &[NodeId], out: &mut Vec<u32>) -> Result<()>;

    /// Replaces `out` by what stands at positions of the lists of `nodes`: `lengths` of them for each node, ascending. A
    /// topology on disk reads all of them together here.
    fn fetch(
        &self,
        requested: RequestedEntries<'_>,
        workspace: &mut Self::Workspace,
        out: &mut Fetched<Self::StoredId>,
    ) -> Result<()>;
}

/// Entries of neighbour lists that a hop needs.
#[derive(Debug, Clone, Copy)]
pub struct RequestedEntries<'a> {
    /// Whose lists.
    pub nodes: &'a [NodeId],
    /// How many entries of each.
    pub lengths: &'a [u32],
    /// Their positions, node after node.
    pub positions: &'a [u32],
    /// Whether edge ids are requested too.
    pub edges: bool,
    /// Whether relations are requested too.
    pub relations: bool,
}

/// Entries of neighbour lists, in the order in which they were requested.
#[derive(Debug, Default)]
pub struct Fetched<W> {
    /// Neighbours.
    pub words: Vec<W>,
    /// Edges, where requested.
    pub edges: Vec<EdgeId>,
    /// Relations, where requested.
    pub relations: Vec<u32>,
}

/// Memory that a topology keeps for a sampler. A topology on disk keeps a queue, which stays with its thread.
pub trait TopologyWorkspace: Default {
    /// Bytes it holds.
    fn bytes(&self) -> u64;
}

impl TopologyWorkspace for () {
    fn bytes(&self) -> u64 {
        0
    }
}

/// The lists of a hop's nodes, by place in the hop, in memory.
pub trait HopNeighbours: Sync {
    /// How neighbours are stored.
    type StoredId: StoredId;

    /// Says that the list at this place is requested soon. Places after the last do no harm.
    fn prefetch(&self, at: usize);

    /// The list of the node at this place.
    fn list(&self, at: usize) -> Neighbours<'_, Self::StoredId>;

    /// The edge at a position of the list at this place.
    fn edge(&self, at: usize, position: u32) -> EdgeId;

    /// The kind of that edge; 0 where there are no kinds.
    fn relation(&self, at: usize, position: u32) -> u32;
}

/// The lists of a topology whose lists are never at hand: there is no such value.
#[derive(Debug, Clone, Copy)]
pub struct NotAtHand<W>(std::convert::Infallible, std::marker::PhantomData<W>);

impl<W: StoredId> HopNeighbours for NotAtHand<W> {
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

/// Counts the words that name nodes from `first` on, as far as there are counts.
fn count_u32<W: StoredId>(words: &[W], first: u64, counts: &mut [u32]) {
    for word in words {
        if let Some(count) = counts.get_mut(word.node().0.wrapping_sub(first) as usize) {
            *count = count.saturating_add(1);
        }
    }
}

/// A topology behind a reference or a shared pointer is one.
macro_rules! is_topology_too {
    ($pointer:ty) => {
        impl<T: Topology> Topology for $pointer {
            type StoredId = T::StoredId;
            type Workspace = T::Workspace;
            type AtHand<'a>
                = T::AtHand<'a>
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
            fn at_hand<'a>(&'a self, nodes: &'a [NodeId]) -> Option<T::AtHand<'a>> {
                (**self).at_hand(nodes)
            }
            fn degrees(&self, nodes: &[NodeId], out: &mut Vec<u32>) -> Result<()> {
                (**self).degrees(nodes, out)
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
