//! The whole topology in memory, with ids and offsets in 32 bits if they fit.

use super::disk::check_ids;
use super::lookup::{self, check_edge, check_incoming, check_nodes};
use super::{
    Direction, Edge, EdgeLookup, Fetched, HopNeighbours, IncomingNeighbours, Neighbours, RequestedEntries,
    StoredId, Topology,
};
use crate::{Result, SampleError};
use esker_io::{prefer_large_pages, prefetch};
use esker_store::{ArrayFile, Dataset, StoreError, file};
use esker_types::{ByteCount, Dtype, EdgeId, NodeId};
use rayon::prelude::*;

/// Elements read at a time if an array is narrowed while it is loaded.
const CHUNK: usize = 1 << 16;
/// Elements of a large array that a thread loads at a time, each with a stream of its own.
const LOADED_ELEMENTS: usize = if cfg!(test) { 1 << 8 } else { 1 << 24 };
/// Positions in a node's adjacency are 32 bits, over both directions together.
const MOST_DEGREE: u64 = 1 << 31;
/// How far ahead offsets are prefetched if only degrees are read.
const PREFETCH_DEGREES: usize = 16;

/// Numbers in 32 bits if all fit, else in 64.
#[derive(Debug, Clone)]
enum PackedNumbers {
    Narrow(Vec<u32>),
    Wide(Vec<u64>),
}

impl PackedNumbers {
    #[inline(always)]
    fn get(&self, index: usize) -> u64 {
        match self {
            PackedNumbers::Narrow(numbers) => numbers[index] as u64,
            PackedNumbers::Wide(numbers) => numbers[index],
        }
    }

    #[inline(always)]
    fn prefetch(&self, index: usize) {
        match self {
            PackedNumbers::Narrow(numbers) => prefetch(numbers, index),
            PackedNumbers::Wide(numbers) => prefetch(numbers, index),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            PackedNumbers::Narrow(numbers) => numbers.len() as u64 * 4,
            PackedNumbers::Wide(numbers) => numbers.len() as u64 * 8,
        }
    }

    fn of(numbers: &[u64]) -> PackedNumbers {
        match numbers.iter().all(|number| *number <= u32::MAX as u64) {
            true => PackedNumbers::Narrow(numbers.iter().map(|number| *number as u32).collect()),
            false => PackedNumbers::Wide(numbers.to_vec()),
        }
    }

    /// Loads an array of u32 or u64. `most` is the largest number allowed in it.
    fn load(array: &ArrayFile, most: u64) -> Result<PackedNumbers> {
        let rows = array.entry().rows as usize;
        if most > u32::MAX as u64 {
            let mut wide = zeros::<u64>(rows);
            load_parts(&mut wide, |first, part| Ok(array.elements(first)?.fill_ids(part).map(drop)?))?;
            return Ok(PackedNumbers::Wide(wide));
        }
        let mut narrow = zeros::<u32>(rows);
        if array.entry().dtype == Dtype::U32 {
            load_parts(&mut narrow, |first, part| Ok(array.elements(first)?.fill(part).map(drop)?))?;
            return Ok(PackedNumbers::Narrow(narrow));
        }
        load_parts(&mut narrow, |first, part| {
            let (mut elements, mut wide) = (array.elements(first)?, vec![0u64; CHUNK.min(part.len())]);
            for part in part.chunks_mut(CHUNK) {
                elements.fill(&mut wide[..part.len()])?;
                for (slot, number) in part.iter_mut().zip(&wide) {
                    *slot = u32::try_from(*number)
                        .map_err(|_| out_of_range(array, format!("numbers up to {most}"), *number))?;
                }
            }
            Ok(())
        })?;
        Ok(PackedNumbers::Narrow(narrow))
    }
}

/// Fills an array part by part, with the threads of the current rayon pool. `load` gets the index of a part's first
/// element. Of several errors it returns that of the first part.
fn load_parts<T: Send>(all: &mut [T], load: impl Fn(u64, &mut [T]) -> Result<()> + Sync) -> Result<()> {
    let parts = all.par_chunks_mut(LOADED_ELEMENTS).enumerate();
    let loaded: Vec<Result<()>> =
        parts.map(|(number, part)| load((number * LOADED_ELEMENTS) as u64, part)).collect();
    loaded.into_iter().collect()
}

/// Zeroed memory on large pages, not yet touched.
fn zeros<T: bytemuck::Pod>(count: usize) -> Vec<T> {
    let mut zeros = vec![T::zeroed(); count];
    prefer_large_pages(&mut zeros);
    zeros
}

fn out_of_range(array: &ArrayFile, expected: String, found: u64) -> SampleError {
    StoreError::inconsistent(array.path(), expected, found).into()
}

/// Adjacency in one direction.
#[derive(Debug, Clone)]
struct DirectedAdjacency<W> {
    offsets: PackedNumbers,
    neighbours: Vec<W>,
    /// Edge ids, if they are not the positions themselves.
    edges: Option<PackedNumbers>,
}

impl<W: StoredId> DirectedAdjacency<W> {
    fn load(
        dataset: &Dataset,
        offsets: &str,
        neighbours: &str,
        edges: Option<&str>,
    ) -> Result<DirectedAdjacency<W>> {
        let manifest = dataset.manifest();
        let (nodes, count) = (manifest.nodes.count, manifest.edges.count);
        let array = |name: &str| dataset.array(name).ok_or_else(|| lookup::no_adjacency(dataset, name));
        let (offset_array, neighbour_array) = (array(offsets)?, array(neighbours)?);
        let offsets = PackedNumbers::load(offset_array, count)?;
        let mut before = 0;
        for index in 0..=nodes as usize {
            let offset = offsets.get(index);
            let is_end = (index == 0 && offset != 0) || (index == nodes as usize && offset != count);
            if offset < before || offset > count || is_end {
                let expected = format!("rising offsets from 0 to {count}");
                return Err(out_of_range(offset_array, expected, offset));
            }
            if offset - before > MOST_DEGREE {
                let expected = format!("nodes with at most {MOST_DEGREE} neighbours");
                return Err(out_of_range(offset_array, expected, offset - before));
            }
            before = offset;
        }
        let mut words = zeros::<W>(count as usize);
        load_parts(&mut words, |first, part| {
            neighbour_array.elements(first)?.fill(part)?;
            check_ids(part, nodes, neighbour_array)
        })?;
        let edges = match edges {
            Some(name) => Some(PackedNumbers::load(array(name)?, count)?),
            None => None,
        };
        Ok(DirectedAdjacency { offsets, neighbours: words, edges })
    }

    fn of(lists: &[Vec<u64>]) -> DirectedAdjacency<W> {
        let mut offsets = vec![0];
        let mut neighbours = Vec::new();
        for list in lists {
            neighbours.extend(list.iter().map(|node| W::of(NodeId(*node))));
            offsets.push(neighbours.len() as u64);
        }
        DirectedAdjacency { offsets: PackedNumbers::of(&offsets), neighbours, edges: None }
    }

    #[inline(always)]
    fn list(&self, node: NodeId) -> &[W] {
        let start = self.offsets.get(node.index()) as usize;
        &self.neighbours[start..self.offsets.get(node.index() + 1) as usize]
    }

    fn edge(&self, node: NodeId, position: usize) -> EdgeId {
        let at = self.offsets.get(node.index()) as usize + position;
        EdgeId(self.edges.as_ref().map_or(at as u64, |edges| edges.get(at)))
    }

    fn bytes(&self) -> u64 {
        let edges = self.edges.as_ref().map_or(0, PackedNumbers::bytes);
        self.offsets.bytes() + edges + std::mem::size_of_val(&self.neighbours[..]) as u64
    }
}

/// A topology that is wholly in memory.
#[derive(Debug, Clone)]
pub struct InMemory<W> {
    nodes: u64,
    first: DirectedAdjacency<W>,
    second: Option<DirectedAdjacency<W>>,
    relations: Option<Vec<u32>>,
    direction: Direction,
}

impl<W: StoredId> InMemory<W> {
    /// Loads the adjacency of a dataset whose ids are stored as `W`, with the threads of the current rayon pool. It takes
    /// [`AnyTopology::bytes_for`] bytes.
    pub fn load(dataset: &Dataset, direction: Direction) -> Result<InMemory<W>> {
        let incoming = || DirectedAdjacency::load(dataset, file::IN_OFFSETS, file::IN_NEIGHBOURS, None);
        let outgoing = || {
            DirectedAdjacency::load(
                dataset,
                file::OUT_OFFSETS,
                file::OUT_NEIGHBOURS,
                Some(file::OUT_EDGE_IDS),
            )
        };
        let (first, second) = match direction {
            Direction::Incoming => (incoming()?, None),
            Direction::Outgoing => (outgoing()?, None),
            Direction::Both => (incoming()?, Some(outgoing()?)),
        };
        let relations = match dataset.array(file::EDGE_RELATION) {
            Some(array) => {
                let mut kinds = zeros::<u32>(array.entry().rows as usize);
                load_parts(&mut kinds, |first, part| Ok(array.elements(first)?.fill(part).map(drop)?))?;
                let relations = dataset.manifest().edges.relations.as_ref();
                let count = relations.map_or(0, |relations| relations.count);
                if let Some(kind) = kinds.iter().max().filter(|kind| **kind as u64 >= count) {
                    return Err(out_of_range(array, format!("kinds of edges below {count}"), *kind as u64));
                }
                Some(kinds)
            }
            None => None,
        };
        let edges = dataset.manifest().edges.count;
        for lists in [Some(&first), second.as_ref()].into_iter().flatten() {
            let found = lists
                .edges
                .as_ref()
                .and_then(|ids| (0..edges as usize).map(|at| ids.get(at)).find(|id| *id >= edges));
            if let (Some(found), Some(array)) = (found, dataset.array(file::OUT_EDGE_IDS)) {
                return Err(out_of_range(array, format!("edge ids below {edges}"), found));
            }
        }
        Ok(InMemory { nodes: dataset.manifest().nodes.count, first, second, relations, direction })
    }

    /// A graph from its sorted incoming adjacency, with the relation of each edge in the same order.
    pub fn from_adjacency(lists: &[Vec<u64>], relations: Option<Vec<u32>>) -> InMemory<W> {
        InMemory {
            nodes: lists.len() as u64,
            first: DirectedAdjacency::of(lists),
            second: None,
            relations,
            direction: Direction::Incoming,
        }
    }

    /// The same graph in another direction. For graphs made by [`InMemory::from_adjacency`].
    pub fn in_direction(self, direction: Direction) -> InMemory<W> {
        assert_eq!(self.direction, Direction::Incoming, "lists are turned once");
        let mut outgoing: Vec<Vec<(u64, u64)>> = vec![Vec::new(); self.nodes as usize];
        for target in 0..self.nodes {
            for (position, source) in self.first.list(NodeId(target)).iter().enumerate() {
                outgoing[source.index()].push((target, self.first.edge(NodeId(target), position).0));
            }
        }
        let targets = outgoing.iter().map(|list| list.iter().map(|(target, _)| *target).collect());
        let mut turned: DirectedAdjacency<W> = DirectedAdjacency::of(&targets.collect::<Vec<Vec<u64>>>());
        let ids: Vec<u64> = outgoing.iter().flatten().map(|(_, edge)| *edge).collect();
        turned.edges = Some(PackedNumbers::of(&ids));
        let (first, second) = match direction {
            Direction::Incoming => (self.first, None),
            Direction::Outgoing => (turned, None),
            Direction::Both => (self.first, Some(turned)),
        };
        InMemory { first, second, direction, ..self }
    }

    /// A node's neighbours.
    #[inline(always)]
    pub fn list(&self, node: NodeId) -> Neighbours<'_, W> {
        Neighbours {
            first: self.first.list(node),
            second: self.second.as_ref().map_or(&[], |s| s.list(node)),
        }
    }

    /// The edge at a position in a node's adjacency.
    #[inline(always)]
    pub(crate) fn edge_at(&self, node: NodeId, position: u32) -> EdgeId {
        let position = position as usize;
        match &self.second {
            None => self.first.edge(node, position),
            Some(second) => match position.checked_sub(self.first.list(node).len()) {
                Some(position) => second.edge(node, position),
                None => self.first.edge(node, position),
            },
        }
    }

    /// Prefetches what [`InMemory::edge_at`] reads in addition to offsets.
    #[inline(always)]
    pub(crate) fn prefetch_edge_at(&self, node: NodeId, position: u32) {
        // Edges of incoming adjacency are numbered as they are stored.
        if let Some(edges) = &self.first.edges {
            edges.prefetch(self.first.offsets.get(node.index()) as usize + position as usize);
        }
    }

    /// Prefetches where a node's adjacency starts.
    #[inline(always)]
    pub(crate) fn prefetch_list(&self, node: NodeId) {
        self.first.offsets.prefetch(node.index());
        if let Some(second) = &self.second {
            second.offsets.prefetch(node.index());
        }
    }

    /// How many entries come before those of a node.
    #[inline(always)]
    pub(crate) fn start_of(&self, node: NodeId) -> u64 {
        let of = |adjacency: &DirectedAdjacency<W>| adjacency.offsets.get(node.index());
        of(&self.first) + self.second.as_ref().map_or(0, of)
    }

    /// A node's degree in the whole graph.
    pub fn degree(&self, node: NodeId) -> u64 {
        self.list(node).len() as u64
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let second = self.second.as_ref().map_or(0, DirectedAdjacency::bytes);
        self.first.bytes() + second + self.relations.as_ref().map_or(0, |kinds| kinds.len() as u64 * 4)
    }

    /// The direction of its adjacency.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Ends and relation of an edge. It needs incoming adjacency: an edge id is a position there.
    pub fn edge(&self, edge: EdgeId) -> Result<Edge> {
        check_edge(edge, self.direction, self.first.neighbours.len() as u64)?;
        let source = self.first.neighbours[edge.0 as usize].node();
        Ok(Edge { source, target: self.target_of(edge), relation: self.kind(edge) })
    }

    /// The node that edge `edge` leads to.
    fn target_of(&self, edge: EdgeId) -> NodeId {
        lookup::target_of(edge, self.nodes, |node| self.first.offsets.get(node))
    }

    /// Passes on every edge into a node, or out of it where only outgoing adjacency is loaded.
    pub(super) fn each_edge_of(&self, node: NodeId, mut take: impl FnMut(EdgeId, Edge)) {
        for (position, other) in self.first.list(node).iter().enumerate() {
            let id = self.first.edge(node, position);
            let (source, target) = match self.direction {
                Direction::Outgoing => (node, other.node()),
                Direction::Incoming | Direction::Both => (other.node(), node),
            };
            take(id, Edge { source, target, relation: self.kind(id) });
        }
    }

    fn kind(&self, edge: EdgeId) -> u32 {
        self.relations.as_ref().map_or(0, |kinds| kinds[edge.0 as usize])
    }
}

impl<W: StoredId> Topology for InMemory<W> {
    type StoredId = W;
    type Workspace = ();
    type HopInMemory<'a> = InMemoryHop<'a, W>;

    fn nodes(&self) -> u64 {
        self.nodes
    }

    fn entries(&self) -> u64 {
        self.first.neighbours.len() as u64 * if self.second.is_some() { 2 } else { 1 }
    }

    fn has_relations(&self) -> bool {
        self.relations.is_some()
    }

    fn hop_in_memory<'a>(&'a self, nodes: &'a [NodeId], (): &'a ()) -> Result<Option<InMemoryHop<'a, W>>> {
        Ok(Some(InMemoryHop { graph: self, nodes }))
    }

    fn degrees(&self, nodes: &[NodeId], (): &(), out: &mut Vec<u32>) -> Result<()> {
        let lists = InMemoryHop { graph: self, nodes };
        (0..PREFETCH_DEGREES).for_each(|at| lists.prefetch(at));
        out.extend((0..nodes.len()).map(|at| {
            lists.prefetch(at + PREFETCH_DEGREES);
            lists.list(at).len() as u32
        }));
        Ok(())
    }

    fn fetch(&self, requested: RequestedEntries<'_>, (): &mut (), out: &mut Fetched<W>) -> Result<()> {
        out.words.clear();
        out.edges.clear();
        out.relations.clear();
        let (lists, mut start) = (InMemoryHop { graph: self, nodes: requested.nodes }, 0);
        for (at, length) in requested.lengths.iter().enumerate() {
            let positions = &requested.positions[start..start + *length as usize];
            start += positions.len();
            out.words.extend(positions.iter().map(|position| lists.list(at).at(*position as usize)));
            if requested.edges {
                out.edges.extend(positions.iter().map(|position| lists.edge(at, *position)));
            }
            if requested.relations {
                out.relations.extend(positions.iter().map(|position| lists.relation(at, *position)));
            }
        }
        Ok(())
    }
}

impl<W: StoredId> EdgeLookup for InMemory<W> {
    fn node_count(&self) -> u64 {
        self.nodes
    }

    fn edge_count(&self) -> u64 {
        self.first.neighbours.len() as u64
    }

    fn has_incoming(&self) -> bool {
        self.direction != Direction::Outgoing
    }

    fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()> {
        ids.iter().try_for_each(|edge| {
            out.push(self.edge(*edge)?);
            Ok(())
        })
    }

    fn targets_by_id(&self, ids: &[EdgeId], out: &mut Vec<NodeId>) -> Result<()> {
        ids.iter().try_for_each(|edge| {
            check_edge(*edge, self.direction, self.edge_count())?;
            out.push(self.target_of(*edge));
            Ok(())
        })
    }

    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()> {
        check_incoming(self.direction)?;
        check_nodes(nodes.iter().copied(), self.nodes)?;
        out.extend(nodes.iter().map(|node| self.first.list(*node).len() as u64));
        Ok(())
    }

    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()> {
        check_incoming(self.direction)?;
        check_nodes(nodes.iter().copied(), self.nodes)?;
        for (at, node) in nodes.iter().enumerate() {
            let sources = self.first.list(*node);
            // The id of an edge is its position in the incoming adjacency.
            let start = self.first.offsets.get(node.index()) as usize;
            let relations = self.relations.as_ref().map(|kinds| &kinds[start..start + sources.len()]);
            take(at, IncomingNeighbours { sources: W::sources(sources), relations });
        }
        Ok(())
    }
}

/// The neighbours of a hop, read directly from the graph.
#[derive(Debug, Clone, Copy)]
pub struct InMemoryHop<'a, W> {
    graph: &'a InMemory<W>,
    nodes: &'a [NodeId],
}

impl<W: StoredId> HopNeighbours for InMemoryHop<'_, W> {
    type StoredId = W;

    #[inline(always)]
    fn prefetch(&self, at: usize) {
        if let Some(node) = self.nodes.get(at) {
            self.graph.prefetch_list(*node);
        }
    }

    #[inline(always)]
    fn list(&self, at: usize) -> Neighbours<'_, W> {
        self.graph.list(self.nodes[at])
    }

    fn edge(&self, at: usize, position: u32) -> EdgeId {
        self.graph.edge_at(self.nodes[at], position)
    }

    fn relation(&self, at: usize, position: u32) -> u32 {
        if self.graph.relations.is_none() { 0 } else { self.graph.kind(self.edge(at, position)) }
    }
}

/// A dataset's topology with ids in their stored width.
#[derive(Debug, Clone)]
pub enum AnyTopology {
    /// 32-bit ids.
    Narrow(InMemory<u32>),
    /// 64-bit ids.
    Wide(InMemory<u64>),
}

impl AnyTopology {
    /// Bytes that [`AnyTopology::load`] will allocate.
    pub fn bytes_for(dataset: &Dataset, direction: Direction) -> u64 {
        let (nodes, edges) = (dataset.manifest().nodes.count, dataset.manifest().edges.count);
        let offset_bytes = if edges > u32::MAX as u64 { 8 } else { 4 };
        let id_bytes = dataset.manifest().id_dtype().bytes();
        let incoming = (nodes + 1) * offset_bytes + edges * id_bytes;
        let outgoing = incoming + edges * offset_bytes;
        let relations = if dataset.manifest().edges.relations.is_some() { edges * 4 } else { 0 };
        relations
            + match direction {
                Direction::Incoming => incoming,
                Direction::Outgoing => outgoing,
                Direction::Both => incoming + outgoing,
            }
    }

    /// Loads a dataset's adjacency. Fails if it does not fit `most_bytes`.
    pub fn load(dataset: &Dataset, direction: Direction, most_bytes: u64) -> Result<AnyTopology> {
        let needed = AnyTopology::bytes_for(dataset, direction);
        if needed > most_bytes {
            let what = format!("{} with its topology in memory", dataset.directory().display());
            let (needed, allowed) = (ByteCount(needed), ByteCount(most_bytes));
            return Err(SampleError::Memory { what, needed, allowed });
        }
        Ok(match dataset.manifest().id_dtype() {
            Dtype::U64 => AnyTopology::Wide(InMemory::load(dataset, direction)?),
            _ => AnyTopology::Narrow(InMemory::load(dataset, direction)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Sources;

    /// Arrays of several parts, each loaded with a stream of its own, against one stream.
    #[test]
    fn parts_that_threads_load_are_the_whole_array() {
        use esker_store::ArrayWriter;
        let directory = tempfile::tempdir().unwrap();
        for count in [1, 255, 256, 257, 5 * 256 + 3] {
            let numbers: Vec<u64> = (0..count as u64).map(|at| at * at % 70_000).collect();
            let narrow: Vec<u32> = numbers.iter().map(|number| *number as u32).collect();
            let mut wide = ArrayWriter::create(directory.path(), "wide", Dtype::U64, 1).unwrap();
            wide.write_elements(&numbers).unwrap();
            let wide = ArrayFile::open(directory.path(), &wide.finish().unwrap()).unwrap();
            let mut short = ArrayWriter::create(directory.path(), "short", Dtype::U32, 1).unwrap();
            short.write_elements(&narrow).unwrap();
            let short = ArrayFile::open(directory.path(), &short.finish().unwrap()).unwrap();
            let mut one_stream = vec![0u64; count];
            wide.elements(0).unwrap().fill_ids(&mut one_stream).unwrap();
            for (array, most) in [(&wide, 70_000), (&wide, u64::MAX), (&short, 70_000), (&short, u64::MAX)] {
                let loaded = PackedNumbers::load(array, most).unwrap();
                assert!(
                    (0..count).all(|at| loaded.get(at) == one_stream[at]),
                    "{count} numbers up to {most}"
                );
            }
        }
        let mut large = ArrayWriter::create(directory.path(), "large", Dtype::U64, 1).unwrap();
        let numbers: Vec<u64> =
            (0..2000).map(|at| if at == 700 || at == 1500 { 1 << (32 + at / 700) } else { at }).collect();
        large.write_elements(&numbers).unwrap();
        let large = ArrayFile::open(directory.path(), &large.finish().unwrap()).unwrap();
        let error = PackedNumbers::load(&large, 3000).unwrap_err().to_string();
        assert!(error.contains(&(1u64 << 33).to_string()), "the first that is too large: {error}");
    }

    /// Edges 1->0, 2->0 (relation 5), 2->0 (relation 6), 0->2.
    fn graph() -> InMemory<u32> {
        InMemory::from_adjacency(&[vec![1, 2, 2], vec![], vec![0]], Some(vec![4, 5, 6, 7]))
    }

    #[test]
    fn edges_are_found_by_id_and_by_their_ends() {
        let graph = graph();
        let edge =
            |source, target, relation| Edge { source: NodeId(source), target: NodeId(target), relation };
        assert_eq!(graph.edge(EdgeId(2)).unwrap(), edge(2, 0, 6));
        assert_eq!(graph.edge(EdgeId(3)).unwrap(), edge(0, 2, 7));
        assert!(graph.edge(EdgeId(4)).is_err());
        let contains = |edge: Edge| {
            let mut found = false;
            graph
                .incoming(&[edge.target], &mut |_, adjacency| {
                    let (Sources::Narrow(sources), Some(relations)) =
                        (adjacency.sources, adjacency.relations)
                    else {
                        panic!("narrow, with relations")
                    };
                    let mut edges = sources.iter().zip(relations);
                    found |=
                        edges.any(|(source, kind)| source.node() == edge.source && *kind == edge.relation);
                })
                .unwrap();
            found
        };
        assert!(contains(edge(2, 0, 5)) && contains(edge(2, 0, 6)));
        assert!(!contains(edge(2, 0, 4)) && !contains(edge(1, 2, 7)));
    }

    fn check_adjacency(direction: Direction, node: u64, expected: &[(u64, u64, u32)]) {
        let graph = graph().in_direction(direction);
        let nodes = [NodeId(node)];
        let hop = graph.hop_in_memory(&nodes, &()).unwrap().unwrap();
        let list = hop.list(0);
        let found: Vec<_> = (0..list.len())
            .map(|at| (list.at(at).node().0, hop.edge(0, at as u32).0, hop.relation(0, at as u32)))
            .collect();
        assert_eq!(found, expected, "{direction:?} {node}");
    }

    #[test]
    fn lists_of_every_direction_carry_edges_and_kinds() {
        check_adjacency(Direction::Incoming, 0, &[(1, 0, 4), (2, 1, 5), (2, 2, 6)]);
        check_adjacency(Direction::Outgoing, 2, &[(0, 1, 5), (0, 2, 6)]);
        check_adjacency(Direction::Both, 0, &[(1, 0, 4), (2, 1, 5), (2, 2, 6), (2, 3, 7)]);
        check_adjacency(Direction::Both, 1, &[(0, 0, 4)]);
    }
}
