//! Where neighbour lists come from. A sampler asks for all lists of a hop at once and then reads them by the node's
//! place in the hop: a topology on disk can read them together, resident partitions can look them up, memory does nothing.

mod memory;

pub use memory::{AnyTopology, InMemory};

use crate::Result;
use esker_types::{EdgeId, NodeId};

/// A node id as lists store it: `u32` or `u64`.
pub trait Word: bytemuck::Pod + Default + Send + Sync + Ord + std::fmt::Debug {
    /// The node.
    fn node(self) -> NodeId;
    /// The word of a node that is known to fit.
    fn of(node: NodeId) -> Self;
    /// The place in an array by node.
    #[inline(always)]
    fn index(self) -> usize {
        self.node().index()
    }
}

impl Word for u32 {
    #[inline(always)]
    fn node(self) -> NodeId {
        NodeId(self as u64)
    }
    #[inline(always)]
    fn of(node: NodeId) -> u32 {
        node.0 as u32
    }
}

impl Word for u64 {
    #[inline(always)]
    fn node(self) -> NodeId {
        NodeId(self)
    }
    #[inline(always)]
    fn of(node: NodeId) -> u64 {
        node.0
    }
}

/// Along which edges neighbours are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Its kind; 0 where there are no kinds.
    pub relation: u32,
}

/// A node's stored list: two runs, each sorted by neighbour, then by edge id. The second is empty unless neighbours
/// in both directions are wanted.
#[derive(Debug, Clone, Copy)]
pub struct List<'a, W> {
    /// Positions from 0.
    pub first: &'a [W],
    /// Positions behind those of `first`.
    pub second: &'a [W],
}

impl<W: Word> List<'_, W> {
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
pub trait Topology: Sync {
    /// How neighbours are stored.
    type Word: Word;
    /// Memory for the lists of a hop, kept between hops.
    type Workspace: Default + Send;
    /// The lists of one hop.
    type Hop<'a>: HopLists<Word = Self::Word>
    where
        Self: 'a;

    /// Nodes of the graph; ids are below it.
    fn nodes(&self) -> u64;

    /// Edges that lists hold, each as often as lists name it.
    fn entries(&self) -> u64;

    /// Whether edges have kinds.
    fn has_relations(&self) -> bool;

    /// Makes the lists of `nodes` readable: a topology on disk reads them here, all at once.
    fn hop<'a>(&'a self, nodes: &'a [NodeId], workspace: &'a mut Self::Workspace) -> Result<Self::Hop<'a>>;
}

/// The lists of a hop's nodes, by place in the hop.
pub trait HopLists: Sync {
    /// How neighbours are stored.
    type Word: Word;

    /// Says that the list at this place is wanted soon. Places behind the last do no harm.
    fn prefetch(&self, at: usize);

    /// The list of the node at this place.
    fn list(&self, at: usize) -> List<'_, Self::Word>;

    /// The edge at a position of the list at this place.
    fn edge(&self, at: usize, position: u32) -> EdgeId;

    /// The kind of that edge; 0 where there are no kinds.
    fn relation(&self, at: usize, position: u32) -> u32;
}
