//! The subgraph of the nodes that are resident at a time, and the edges between them: what training sees with a partition
//! buffer (Marius++ section 5.1).
//!
//! A node's neighbours are its stored ones without those that are not resident, in stored order. Negatives are drawn
//! from the resident nodes by ascending id, uniformly, or as the target of a resident edge by ascending edge id. So with
//! all nodes resident everything is as in the whole graph. A [`SubgraphBuilder`] takes edges in any order and from
//! anywhere, twice.

use super::lookup::{check_incoming, check_nodes};
use super::{Direction, Edge, EdgeLookup, HopNeighbours, IncomingNeighbours, Neighbours, StoredId};
use crate::negatives::NegativeNodes;
use crate::{NodeSet, Result, SampleError};
use esker_io::prefetch;
use esker_types::{EdgeId, NodeId};

/// Which columns of edges a subgraph has, and along which edges neighbours are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubgraphShape {
    /// The direction of adjacency.
    pub direction: Direction,
    /// Whether edges have relations.
    pub relations: bool,
    /// Whether edge ids are kept. Samples that carry them need them.
    pub edge_ids: bool,
}

/// The subgraph of some nodes.
#[derive(Debug)]
pub struct Subgraph<W> {
    members: NodeSet,
    /// The members, ascending.
    ids: Vec<W>,
    first: MemberAdjacency<W>,
    second: Option<MemberAdjacency<W>>,
    shape: SubgraphShape,
}

/// Adjacency of members in one direction, by their number.
#[derive(Debug, Clone)]
struct MemberAdjacency<W> {
    offsets: Vec<u64>,
    neighbours: Vec<W>,
    /// Empty if edges have none.
    relations: Vec<u32>,
    /// Empty if they are not kept.
    edge_ids: Vec<u64>,
}

impl<W: StoredId> Subgraph<W> {
    /// Bytes of a subgraph of so many of `nodes` nodes, with so many edges between them.
    pub fn bytes_for(nodes: u64, members: u64, edges: u64, shape: SubgraphShape) -> u64 {
        let width = size_of::<W>() as u64;
        let directions = if shape.direction == Direction::Both { 2 } else { 1 };
        // Edge ids are there while the subgraph is built.
        let edge_bytes = width + 8 + if shape.relations { 4 } else { 0 };
        let adjacency = (members + 1).saturating_mul(8).saturating_add(edges.saturating_mul(edge_bytes));
        NodeSet::bytes_for(nodes).saturating_add(members * width).saturating_add(directions * adjacency)
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let parts = [Some(&self.first), self.second.as_ref()];
        let adjacency: u64 = parts.into_iter().flatten().map(MemberAdjacency::bytes).sum();
        NodeSet::bytes_for(self.members.nodes()) + self.ids.len() as u64 * size_of::<W>() as u64 + adjacency
    }

    /// The resident nodes.
    pub fn members(&self) -> &NodeSet {
        &self.members
    }

    /// The resident nodes, ascending.
    pub fn ids(&self) -> &[W] {
        &self.ids
    }

    /// Edges between resident nodes.
    pub fn edges(&self) -> u64 {
        self.first.neighbours.len() as u64
    }

    /// The neighbours of some nodes. Fails if one is not resident.
    pub fn hop<'a>(&'a self, nodes: &'a [NodeId]) -> Result<SubgraphHop<'a, W>> {
        check_nodes(nodes.iter().copied(), self.members.nodes())?;
        match nodes.iter().find(|node| self.members.slot(**node).is_none()) {
            Some(node) => Err(SampleError::NotResident { node: node.0 }),
            None => Ok(SubgraphHop { graph: self, nodes }),
        }
    }

    /// Appends the degrees of some nodes among resident ones. Fails if one is not resident.
    pub fn degrees(&self, nodes: &[NodeId], out: &mut Vec<u32>) -> Result<()> {
        let hop = self.hop(nodes)?;
        out.extend((0..nodes.len()).map(|at| hop.list(at).len() as u32));
        Ok(())
    }

    /// The number of a node that is resident.
    #[inline(always)]
    fn number(&self, node: NodeId) -> usize {
        self.members.slot(node).unwrap_or(0) as usize
    }

    fn list(&self, number: usize) -> Neighbours<'_, W> {
        Neighbours {
            first: self.first.list(number),
            second: self.second.as_ref().map_or(&[], |second| second.list(number)),
        }
    }

    /// The adjacency of an entry, and where it is in there.
    fn entry(&self, node: NodeId, position: u32) -> (&MemberAdjacency<W>, usize) {
        let (number, position) = (self.number(node), position as usize);
        let first = self.first.list(number).len();
        match &self.second {
            Some(second) if position >= first => (second, second.offsets[number] as usize + position - first),
            _ => (&self.first, self.first.offsets[number] as usize + position),
        }
    }
}

impl<W: StoredId> MemberAdjacency<W> {
    #[inline(always)]
    fn list(&self, number: usize) -> &[W] {
        &self.neighbours[self.offsets[number] as usize..self.offsets[number + 1] as usize]
    }

    fn bytes(&self) -> u64 {
        let (offsets, relations) = (self.offsets.len() as u64 * 8, self.relations.len() as u64 * 4);
        offsets
            + relations
            + self.edge_ids.len() as u64 * 8
            + std::mem::size_of_val(&self.neighbours[..]) as u64
    }
}

/// Builds a subgraph: count every edge between members, then place every one of them.
#[derive(Debug)]
pub struct SubgraphBuilder<W> {
    members: NodeSet,
    shape: SubgraphShape,
    first: MemberLists<W>,
    second: Option<MemberLists<W>>,
}

/// The adjacency of one direction while it is built.
#[derive(Debug)]
struct MemberLists<W> {
    adjacency: MemberAdjacency<W>,
    /// Whether members have their sources, or else their targets.
    is_incoming: bool,
    /// The next entry of each member; empty while edges are counted.
    next: Vec<u64>,
}

impl<W: StoredId> SubgraphBuilder<W> {
    /// A subgraph of these nodes.
    pub fn new(members: NodeSet, shape: SubgraphShape) -> SubgraphBuilder<W> {
        let count = members.count() as usize;
        let second = (shape.direction == Direction::Both).then(|| MemberLists::new(count, false));
        let first = MemberLists::new(count, shape.direction != Direction::Outgoing);
        SubgraphBuilder { members, shape, first, second }
    }

    /// The resident nodes.
    pub fn members(&self) -> &NodeSet {
        &self.members
    }

    /// Counts an edge. Edges of other nodes are left out.
    #[inline]
    pub fn count(&mut self, source: NodeId, target: NodeId) {
        if let (Some(source), Some(target)) = (self.members.slot(source), self.members.slot(target)) {
            self.first.count(source, target);
            if let Some(second) = &mut self.second {
                second.count(source, target);
            }
        }
    }

    /// Places an edge that was counted. All edges are counted before one is placed. Edges of other nodes are left out.
    #[inline]
    pub fn place(&mut self, id: EdgeId, edge: &Edge) {
        let (Some(source), Some(target)) = (self.members.slot(edge.source), self.members.slot(edge.target))
        else {
            return;
        };
        let relations = self.shape.relations;
        self.first.place((source, target), id, edge, relations);
        if let Some(second) = &mut self.second {
            second.place((source, target), id, edge, relations);
        }
    }

    /// The subgraph of what was placed.
    pub fn finish(self) -> Subgraph<W> {
        let SubgraphBuilder { members, shape, first, second } = self;
        let finish = |lists: MemberLists<W>| lists.finish(shape);
        let ids = members.iter().map(W::of).collect();
        Subgraph { members, ids, first: finish(first), second: second.map(finish), shape }
    }
}

impl<W: StoredId> MemberLists<W> {
    fn new(members: usize, is_incoming: bool) -> MemberLists<W> {
        let adjacency = MemberAdjacency {
            offsets: vec![0; members + 1],
            neighbours: Vec::new(),
            relations: Vec::new(),
            edge_ids: Vec::new(),
        };
        MemberLists { adjacency, is_incoming, next: Vec::new() }
    }

    #[inline(always)]
    fn count(&mut self, source: u32, target: u32) {
        let own = if self.is_incoming { target } else { source };
        self.adjacency.offsets[own as usize + 1] += 1;
    }

    /// Turns counts into offsets.
    fn start(&mut self, relations: bool) {
        let offsets = &mut self.adjacency.offsets;
        (1..offsets.len()).for_each(|at| offsets[at] += offsets[at - 1]);
        self.next = offsets[..offsets.len() - 1].to_vec();
        let edges = offsets[offsets.len() - 1] as usize;
        self.adjacency.neighbours = vec![W::default(); edges];
        self.adjacency.edge_ids = vec![0; edges];
        self.adjacency.relations = vec![0; if relations { edges } else { 0 }];
    }

    #[inline(always)]
    fn place(&mut self, (source, target): (u32, u32), id: EdgeId, edge: &Edge, relations: bool) {
        if self.next.is_empty() {
            self.start(relations);
        }
        let (own, neighbour) = if self.is_incoming { (target, edge.source) } else { (source, edge.target) };
        let at = self.next[own as usize] as usize;
        self.next[own as usize] += 1;
        self.adjacency.neighbours[at] = W::of(neighbour);
        self.adjacency.edge_ids[at] = id.0;
        if relations {
            self.adjacency.relations[at] = edge.relation;
        }
    }

    /// Puts every list in stored order, which is that of edge ids: in either direction, lists are sorted by neighbour and
    /// then by edge id, and edge ids ascend by target, then by source.
    fn finish(mut self, shape: SubgraphShape) -> MemberAdjacency<W> {
        let ends = self.adjacency.offsets.iter().skip(1);
        let placed =
            if self.next.is_empty() { ends.clone().all(|count| *count == 0) } else { ends.eq(&self.next) };
        assert!(placed, "every edge that was counted is placed");
        let MemberAdjacency { offsets, neighbours, relations, edge_ids } = &mut self.adjacency;
        let mut order: Vec<usize> = Vec::new();
        for list in offsets.windows(2) {
            let list = list[0] as usize..list[1] as usize;
            if edge_ids[list.clone()].is_sorted() {
                continue;
            }
            order.clear();
            order.extend(list.clone());
            order.sort_by_key(|at| edge_ids[*at]);
            arrange(neighbours, &order, list.start);
            arrange(edge_ids, &order, list.start);
            if shape.relations {
                arrange(relations, &order, list.start);
            }
        }
        if !shape.edge_ids {
            *edge_ids = Vec::new();
        }
        self.adjacency
    }
}

/// Puts the values at `order` in this order, from `start` on.
fn arrange<T: Copy>(values: &mut [T], order: &[usize], start: usize) {
    let sorted: Vec<T> = order.iter().map(|at| values[*at]).collect();
    values[start..start + sorted.len()].copy_from_slice(&sorted);
}

/// The neighbours of a hop in a subgraph.
#[derive(Debug, Clone, Copy)]
pub struct SubgraphHop<'a, W> {
    graph: &'a Subgraph<W>,
    nodes: &'a [NodeId],
}

impl<W: StoredId> HopNeighbours for SubgraphHop<'_, W> {
    type StoredId = W;

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        if let Some(node) = self.nodes.get(at) {
            prefetch(&self.graph.first.offsets, self.graph.number(*node));
        }
    }

    #[inline(always)]
    fn list(&self, at: usize) -> Neighbours<'_, W> {
        self.graph.list(self.graph.number(self.nodes[at]))
    }

    fn edge(&self, at: usize, position: u32) -> EdgeId {
        let (adjacency, entry) = self.graph.entry(self.nodes[at], position);
        EdgeId(*adjacency.edge_ids.get(entry).expect("edge ids are kept where samples carry them"))
    }

    fn relation(&self, at: usize, position: u32) -> u32 {
        let (adjacency, entry) = self.graph.entry(self.nodes[at], position);
        adjacency.relations.get(entry).copied().unwrap_or(0)
    }
}

/// Resident nodes are what negatives are drawn from. It needs incoming adjacency to draw by degree, and for true edges.
impl<W: StoredId> NegativeNodes for Subgraph<W> {
    fn node_count(&self) -> u64 {
        self.ids.len() as u64
    }

    fn edge_count(&self) -> u64 {
        self.edges()
    }

    fn node(&self, index: u64) -> NodeId {
        self.ids[index as usize].node()
    }

    fn target(&self, edge: u64) -> NodeId {
        let number = self.first.offsets.partition_point(|start| *start <= edge) - 1;
        self.ids[number].node()
    }

    fn lookup(&self) -> Option<&dyn EdgeLookup> {
        Some(self)
    }
}

/// Resident nodes know their edges to each other. Edges are not found by their ids.
impl<W: StoredId> EdgeLookup for Subgraph<W> {
    fn node_count(&self) -> u64 {
        self.members.nodes()
    }

    fn edge_count(&self) -> u64 {
        self.edges()
    }

    fn has_incoming(&self) -> bool {
        self.shape.direction != Direction::Outgoing
    }

    fn edges_by_id(&self, ids: &[EdgeId], _: &mut Vec<Edge>) -> Result<()> {
        match ids.first() {
            Some(edge) => {
                let (direction, edges) = (self.shape.direction, self.edges());
                Err(SampleError::NoSuchEdge { edge: edge.0, direction, edges })
            }
            None => Ok(()),
        }
    }

    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()> {
        check_incoming(self.shape.direction)?;
        self.hop(nodes)?;
        out.extend(nodes.iter().map(|node| self.first.list(self.number(*node)).len() as u64));
        Ok(())
    }

    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()> {
        check_incoming(self.shape.direction)?;
        self.hop(nodes)?;
        for (at, node) in nodes.iter().enumerate() {
            let number = self.number(*node);
            let (start, end) = (self.first.offsets[number] as usize, self.first.offsets[number + 1] as usize);
            let relations = self.shape.relations.then(|| &self.first.relations[start..end]);
            take(at, IncomingNeighbours { sources: W::sources(self.first.list(number)), relations });
        }
        Ok(())
    }
}
