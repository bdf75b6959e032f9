//! What batches of edges and their negatives ask of a graph: edges by id, in-degrees, incoming adjacency. A graph in memory,
//! on disk, or a part of a graph can answer. Questions come many at a time, so that a graph on disk reads them together.

use super::{Direction, Edge};
use crate::{Result, SampleError};
use esker_types::{EdgeId, NodeId};

/// Looks up edges. A part of a graph answers for the nodes that it holds and refuses others with an error.
pub trait EdgeLookup: Send + Sync {
    /// Nodes of the graph; ids are below it.
    fn node_count(&self) -> u64;

    /// Edges of the graph; ids are below it.
    fn edge_count(&self) -> u64;

    /// Whether incoming adjacency is there. Without it the questions below have no answer.
    fn has_incoming(&self) -> bool;

    /// Appends the edges with these ids.
    fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()>;

    /// Appends the targets of the edges with these ids: a graph that keeps its offsets in memory reads nothing.
    fn targets_by_id(&self, ids: &[EdgeId], out: &mut Vec<NodeId>) -> Result<()> {
        let mut edges = Vec::with_capacity(ids.len());
        self.edges_by_id(ids, &mut edges)?;
        out.extend(edges.iter().map(|edge| edge.target));
        Ok(())
    }

    /// Appends the in-degrees of nodes.
    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()>;

    /// Bytes that a question about so many edges takes for itself while it is answered.
    fn lookup_bytes(&self, edges: u64) -> u64 {
        let _ = edges;
        0
    }

    /// Hands over the incoming adjacency of `nodes`, which ascend: `take` gets an index into `nodes` and the adjacency of
    /// that node, whole or in several pieces.
    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()>;
}

/// The incoming adjacency of a node, or a piece of it: sources ascend.
#[derive(Debug, Clone, Copy)]
pub struct IncomingNeighbours<'a> {
    /// Where its edges start.
    pub sources: Sources<'a>,
    /// The relation of each edge; `None` where there are no relations, and all are 0.
    pub relations: Option<&'a [u32]>,
}

/// Node ids as wide as they are stored.
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

/// Refuses questions about incoming adjacency where there is none.
pub(super) fn check_incoming(direction: Direction) -> Result<()> {
    match direction {
        Direction::Incoming | Direction::Both => Ok(()),
        Direction::Outgoing => Err(SampleError::request(
            "incoming adjacency is looked up in outgoing adjacency",
            "load the topology with incoming adjacency, or with both",
        )),
    }
}

/// Refuses an edge id where adjacency of this direction and so many edges cannot find it.
pub(super) fn check_edge(edge: EdgeId, direction: Direction, count: u64) -> Result<()> {
    if direction != Direction::Outgoing && edge.0 < count {
        return Ok(());
    }
    Err(SampleError::request(
        format!("edge {} is looked up in {direction:?} lists of {count} edges", edge.0),
        "use edge ids of this graph, and incoming adjacency or both",
    ))
}

/// The node whose incoming adjacency holds entry `edge`, `start` being where each node's begins.
pub(super) fn target_of(edge: EdgeId, nodes: u64, start: impl Fn(usize) -> u64) -> NodeId {
    // The last node whose adjacency starts at or before the edge.
    let (mut low, mut high) = (0, nodes as usize);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if start(middle) <= edge.0 { low = middle } else { high = middle }
    }
    NodeId(low as u64)
}

/// What a pointer leads to can be asked through it.
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
