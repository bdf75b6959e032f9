//! Graphs that a [`HopSampler`](super::HopSampler) reads: adjacency in memory, its own or borrowed.

use crate::topology::{InMemory, Neighbours, StoredId};
use crate::{Result, SampleError};
use esker_io::prefetch;
use esker_types::{EdgeId, NodeId};
use rayon::prelude::*;

/// Positions in a node's adjacency are 32 bits.
const MOST_DEGREE: u64 = 1 << 31;
/// Numbers that a thread checks at a time.
const CHECKED_TOGETHER: usize = 1 << 16;

/// Adjacency in memory, read node by node.
pub trait HopGraph: Sync {
    /// How neighbours are stored.
    type StoredId: StoredId;

    /// Nodes of the graph; ids are below it.
    fn nodes(&self) -> u64;

    /// Edges of the graph; ids are below it.
    fn edges(&self) -> u64;

    /// Entries of the adjacency. An edge counts as often as it occurs there.
    fn entries(&self) -> u64;

    /// How many entries come before those of a node, in the order of nodes.
    fn start(&self, node: NodeId) -> u64;

    /// Prefetches where the adjacency of a node starts.
    fn prefetch(&self, node: NodeId);

    /// The neighbours of a node. Their number is below 2^32.
    fn list(&self, node: NodeId) -> Neighbours<'_, Self::StoredId>;

    /// The edge at a position in the adjacency of a node.
    fn edge(&self, node: NodeId, position: u32) -> EdgeId;

    /// Prefetches what [`HopGraph::edge`] reads.
    fn prefetch_edge(&self, node: NodeId, position: u32);
}

impl<G: HopGraph> HopGraph for &G {
    type StoredId = G::StoredId;
    fn nodes(&self) -> u64 {
        (**self).nodes()
    }
    fn edges(&self) -> u64 {
        (**self).edges()
    }
    fn entries(&self) -> u64 {
        (**self).entries()
    }
    #[inline(always)]
    fn start(&self, node: NodeId) -> u64 {
        (**self).start(node)
    }
    #[inline(always)]
    fn prefetch(&self, node: NodeId) {
        (**self).prefetch(node);
    }
    #[inline(always)]
    fn list(&self, node: NodeId) -> Neighbours<'_, G::StoredId> {
        (**self).list(node)
    }
    #[inline(always)]
    fn edge(&self, node: NodeId, position: u32) -> EdgeId {
        (**self).edge(node, position)
    }
    #[inline(always)]
    fn prefetch_edge(&self, node: NodeId, position: u32) {
        (**self).prefetch_edge(node, position);
    }
}

impl<W: StoredId> HopGraph for InMemory<W> {
    type StoredId = W;
    fn nodes(&self) -> u64 {
        crate::Topology::nodes(self)
    }
    fn edges(&self) -> u64 {
        crate::EdgeLookup::edge_count(self)
    }
    fn entries(&self) -> u64 {
        crate::Topology::entries(self)
    }
    #[inline(always)]
    fn start(&self, node: NodeId) -> u64 {
        self.start_of(node)
    }
    #[inline(always)]
    fn prefetch(&self, node: NodeId) {
        self.prefetch_list(node);
    }
    #[inline(always)]
    fn list(&self, node: NodeId) -> Neighbours<'_, W> {
        InMemory::list(self, node)
    }
    #[inline(always)]
    fn edge(&self, node: NodeId, position: u32) -> EdgeId {
        self.edge_at(node, position)
    }
    #[inline(always)]
    fn prefetch_edge(&self, node: NodeId, position: u32) {
        self.prefetch_edge_at(node, position);
    }
}

/// Integers that somebody else owns, in either width. Arrays of numpy and torch are signed.
#[derive(Debug, Clone, Copy)]
pub enum BorrowedNumbers<'a> {
    /// 32 bits.
    Narrow(&'a [i32]),
    /// 64 bits.
    Wide(&'a [i64]),
}

impl BorrowedNumbers<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            BorrowedNumbers::Narrow(numbers) => numbers.len(),
            BorrowedNumbers::Wide(numbers) => numbers.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number at an index.
    #[inline(always)]
    pub fn get(&self, index: usize) -> i64 {
        match self {
            BorrowedNumbers::Narrow(numbers) => numbers[index] as i64,
            BorrowedNumbers::Wide(numbers) => numbers[index],
        }
    }

    #[inline(always)]
    fn prefetch(&self, index: usize) {
        match self {
            BorrowedNumbers::Narrow(numbers) => prefetch(numbers, index),
            BorrowedNumbers::Wide(numbers) => prefetch(numbers, index),
        }
    }

    /// The first number outside `0..bound`, with its index.
    fn outside(&self, bound: u64) -> Option<(usize, i64)> {
        let (chunks, is_outside) = (self.len().div_ceil(CHECKED_TOGETHER), |number: i64| {
            // A negative number is a large one.
            number as u64 >= bound
        });
        (0..chunks).into_par_iter().find_map_first(|chunk| {
            let start = chunk * CHECKED_TOGETHER;
            let mut chunk = start..(start + CHECKED_TOGETHER).min(self.len());
            chunk.find(|index| is_outside(self.get(*index))).map(|index| (index, self.get(index)))
        })
    }
}

/// A width of ids in borrowed memory: `i32` or `i64`.
pub trait BorrowedId: bytemuck::Pod + Send + Sync {
    /// The same bits as an id of Esker.
    type Stored: StoredId;
    /// An array of this width.
    fn numbers(of: &[Self]) -> BorrowedNumbers<'_>;
}

impl BorrowedId for i32 {
    type Stored = u32;
    fn numbers(of: &[i32]) -> BorrowedNumbers<'_> {
        BorrowedNumbers::Narrow(of)
    }
}

impl BorrowedId for i64 {
    type Stored = u64;
    fn numbers(of: &[i64]) -> BorrowedNumbers<'_> {
        BorrowedNumbers::Wide(of)
    }
}

/// Incoming adjacency in somebody else's memory, as `to_csc` of PyG makes it. Everything is checked once, when it is made.
/// The caller keeps the memory unchanged as long as this lives, which the borrow says.
#[derive(Debug, Clone, Copy)]
pub struct BorrowedCsc<'a, W> {
    offsets: BorrowedNumbers<'a>,
    sources: &'a [W],
    edges: Option<BorrowedNumbers<'a>>,
}

impl<'a, W: StoredId> BorrowedCsc<'a, W> {
    /// A graph from its `colptr`, its `row`, and the edge of each entry (`perm`); without the latter, entries are numbered
    /// as they are. Offsets must ascend from 0 to the number of entries, sources be below the number of nodes, and edges
    /// below that of entries.
    pub fn new<I: BorrowedId<Stored = W>>(
        offsets: BorrowedNumbers<'a>,
        sources: &'a [I],
        edges: Option<BorrowedNumbers<'a>>,
    ) -> Result<BorrowedCsc<'a, W>> {
        let nodes = check_offsets(offsets, sources.len())?;
        if let Some((index, found)) = I::numbers(sources).outside(nodes) {
            let expected = format!("node ids from 0 to {}", nodes.saturating_sub(1));
            let found = format!("{found} at index {index}");
            return Err(SampleError::Csc { what: "sources (`row`)", expected, found });
        }
        if let Some(edges) = edges {
            let count = sources.len();
            if edges.len() != count {
                let expected = format!("{count}, one for each entry");
                return Err(SampleError::Csc {
                    what: "edge numbers (`perm`)",
                    expected,
                    found: edges.len().to_string(),
                });
            }
            if let Some((index, found)) = edges.outside(count as u64) {
                let expected = format!("numbers from 0 to {}", count - 1);
                let found = format!("{found} at index {index}");
                return Err(SampleError::Csc { what: "edge numbers (`perm`)", expected, found });
            }
        }
        Ok(BorrowedCsc { offsets, sources: bytemuck::cast_slice(sources), edges })
    }
}

/// Checks offsets and returns the number of nodes.
fn check_offsets(offsets: BorrowedNumbers, entries: usize) -> Result<u64> {
    let what = "offsets (`colptr`)";
    let wrong = |expected: String, found: String| Err(SampleError::Csc { what, expected, found });
    let Some(nodes) = offsets.len().checked_sub(1) else {
        return wrong("one more than there are nodes".into(), "none".into());
    };
    let (first, last) = (offsets.get(0), offsets.get(nodes));
    if first != 0 || last != entries as i64 {
        return wrong(format!("from 0 to {entries}, the entries there are"), format!("{first} to {last}"));
    }
    let chunks = nodes.div_ceil(CHECKED_TOGETHER);
    let bad = (0..chunks).into_par_iter().find_map_first(|chunk| {
        let start = chunk * CHECKED_TOGETHER;
        (start..(start + CHECKED_TOGETHER).min(nodes)).find_map(|node| {
            let (from, to) = (offsets.get(node), offsets.get(node + 1));
            (from < 0 || to < from || (to - from) as u64 >= MOST_DEGREE).then_some((node, from, to))
        })
    });
    match bad {
        Some((node, from, to)) => wrong(
            "numbers that ascend, by less than 2^31 a node".into(),
            format!("{from} and {to} at indices {node} and {}", node + 1),
        ),
        None => Ok(nodes as u64),
    }
}

impl<W: StoredId> HopGraph for BorrowedCsc<'_, W> {
    type StoredId = W;

    fn nodes(&self) -> u64 {
        self.offsets.len() as u64 - 1
    }

    fn edges(&self) -> u64 {
        self.sources.len() as u64
    }

    fn entries(&self) -> u64 {
        self.sources.len() as u64
    }

    #[inline(always)]
    fn start(&self, node: NodeId) -> u64 {
        self.offsets.get(node.index()) as u64
    }

    #[inline(always)]
    fn prefetch(&self, node: NodeId) {
        self.offsets.prefetch(node.index());
    }

    #[inline(always)]
    fn list(&self, node: NodeId) -> Neighbours<'_, W> {
        let (from, to) = (self.offsets.get(node.index()), self.offsets.get(node.index() + 1));
        Neighbours { first: &self.sources[from as usize..to as usize], second: &[] }
    }

    #[inline(always)]
    fn edge(&self, node: NodeId, position: u32) -> EdgeId {
        let entry = self.offsets.get(node.index()) as usize + position as usize;
        EdgeId(self.edges.map_or(entry as u64, |edges| edges.get(entry) as u64))
    }

    #[inline(always)]
    fn prefetch_edge(&self, node: NodeId, position: u32) {
        if let Some(edges) = self.edges {
            edges.prefetch(self.offsets.get(node.index()) as usize + position as usize);
        }
    }
}
