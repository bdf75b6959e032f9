//! Edge look-up for link prediction: edges by id, in-degrees, incoming adjacency. Graphs in memory, on disk, or parts
//! of a graph can implement it. Each call has many requests, so that a graph on disk reads them together.

use super::{Direction, Edge};
use crate::{Result, SampleError};
use esker_store::Dataset;
use esker_types::{EdgeId, NodeId};

/// Looks up edges. A part of a graph knows only its own nodes and fails for others.
pub trait EdgeLookup: Send + Sync {
    /// Nodes of the graph; ids are below it.
    fn node_count(&self) -> u64;

    /// Edges of the graph; ids are below it.
    fn edge_count(&self) -> u64;

    /// Whether there is incoming adjacency. Without it the methods below fail.
    fn has_incoming(&self) -> bool;

    /// Appends the edges with these ids.
    fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()>;

    /// Appends the targets of the edges with these ids. A graph with its offsets in memory reads nothing for this.
    fn targets_by_id(&self, ids: &[EdgeId], out: &mut Vec<NodeId>) -> Result<()> {
        let mut edges = Vec::with_capacity(ids.len());
        self.edges_by_id(ids, &mut edges)?;
        out.extend(edges.iter().map(|edge| edge.target));
        Ok(())
    }

    /// Appends the in-degrees of nodes.
    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()>;

    /// Temporary bytes that a look-up of `edges` edges takes.
    fn lookup_bytes(&self, edges: u64) -> u64 {
        let _ = edges;
        0
    }

    /// Passes the incoming adjacency of `nodes` to `take`; `nodes` ascend. `take` gets an index into `nodes` and that
    /// node's adjacency, whole or in several pieces.
    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()>;
}

/// The incoming adjacency of a node, or a piece of it. Sources ascend.
#[derive(Debug, Clone, Copy)]
pub struct IncomingNeighbours<'a> {
    /// The source of each edge.
    pub sources: Sources<'a>,
    /// The relation of each edge. `None` if the graph has no relations: all are 0.
    pub relations: Option<&'a [u32]>,
}

/// Node ids in their stored width.
#[derive(Debug, Clone, Copy)]
pub enum Sources<'a> {
    /// 32 bits each.
    Narrow(&'a [u32]),
    /// 64 bits each.
    Wide(&'a [u64]),
}

/// Refuses ids that are not nodes of a graph of `count` nodes.
pub(crate) fn check_nodes(mut nodes: impl Iterator<Item = NodeId>, count: u64) -> Result<()> {
    match nodes.find(|node| node.0 >= count) {
        Some(node) => Err(SampleError::Seed { found: node.0, last: count.saturating_sub(1) }),
        None => Ok(()),
    }
}

/// Fails if there is no incoming adjacency.
pub(super) fn check_incoming(direction: Direction) -> Result<()> {
    match direction {
        Direction::Incoming | Direction::Both => Ok(()),
        Direction::Outgoing => Err(SampleError::OnlyOutgoing),
    }
}

/// Fails if an edge id cannot be found in adjacency of this direction and `count` edges.
pub(super) fn check_edge(edge: EdgeId, direction: Direction, count: u64) -> Result<()> {
    if direction != Direction::Outgoing && edge.0 < count {
        return Ok(());
    }
    Err(SampleError::NoSuchEdge { edge: edge.0, direction, edges: count })
}

/// The error for a dataset without an array that a direction needs.
pub(super) fn no_adjacency(dataset: &Dataset, array: &str) -> SampleError {
    SampleError::NoAdjacency { dataset: dataset.directory().to_path_buf(), array: array.to_string() }
}

/// The target of edge `edge`. `start` gives the first incoming edge of each node.
pub(super) fn target_of(edge: EdgeId, nodes: u64, start: impl Fn(usize) -> u64) -> NodeId {
    // The last node whose adjacency starts at or before the edge.
    let (mut low, mut high) = (0, nodes as usize);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if start(middle) <= edge.0 { low = middle } else { high = middle }
    }
    NodeId(low as u64)
}

/// A pointer to a look-up is a look-up too.
macro_rules! looks_up_too {
    ($pointer:ty) => {
        impl<T: EdgeLookup + ?Sized> EdgeLookup for $pointer {
            fn node_count(&self) -> u64 {
                (**self).node_count()
            }
            fn edge_count(&self) -> u64 {
                (**self).edge_count()
            }
            fn has_incoming(&self) -> bool {
                (**self).has_incoming()
            }
            fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()> {
                (**self).edges_by_id(ids, out)
            }
            fn targets_by_id(&self, ids: &[EdgeId], out: &mut Vec<NodeId>) -> Result<()> {
                (**self).targets_by_id(ids, out)
            }
            fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()> {
                (**self).in_degrees(nodes, out)
            }
            fn lookup_bytes(&self, edges: u64) -> u64 {
                (**self).lookup_bytes(edges)
            }
            fn incoming(
                &self,
                nodes: &[NodeId],
                take: &mut dyn FnMut(usize, IncomingNeighbours<'_>),
            ) -> Result<()> {
                (**self).incoming(nodes, take)
            }
        }
    };
}
looks_up_too!(&T);
looks_up_too!(std::sync::Arc<T>);
