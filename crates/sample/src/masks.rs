//! Finds the pairs of an edge and a negative that are true edges: of the graph, or of the batch.
//!
//! In the graph, a pair's target is looked up in the incoming adjacency, for the whole batch at once and each node once.
//! The sources found there are compared with the sources of the target's chunk, its partners. In the batch, the ends that
//! its own edges have for a given end and relation are looked up among the chunk's negatives.

use crate::Result;
use crate::negatives::{Negatives, Side};
use crate::topology::{Edge, EdgeLookup, IncomingNeighbours, Sources, StoredId};
use crate::true_ends::TrueEnds;
use esker_types::NodeId;
use std::sync::Arc;

/// One end of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PairEnd {
    node: NodeId,
    chunk: u32,
    /// The relation of its edge. A negative has none and matches any.
    relation: Option<u32>,
    /// Index of the edge in the batch, or of the negative in its chunk.
    index: u32,
}

impl PairEnd {
    fn takes(&self, relation: u32) -> bool {
        self.relation.is_none_or(|own| own == relation)
    }
}

/// The ends of all pairs of a batch.
#[derive(Debug, Default)]
struct CandidatePairs {
    /// The targets of all pairs, ascending.
    targets: Vec<PairEnd>,
    /// The sources of all pairs, chunk after chunk, ascending inside a chunk.
    sources: Vec<PairEnd>,
    /// Start of each chunk in `sources`, and the end of the last chunk.
    source_starts: Vec<usize>,
}

/// Puts the pairs that are true edges, or the edge itself, in `out.masked`. `out` has the negatives already. Edge ends
/// and negatives must be nodes of the graph.
pub(crate) fn mask_graph(
    graph: &impl EdgeLookup,
    edges: &[Edge],
    side: Side,
    out: &mut Negatives,
) -> Result<()> {
    out.masked.reset(edges.len(), out.per_chunk);
    if out.per_chunk == 0 {
        return Ok(());
    }
    let CandidatePairs { targets, sources, source_starts } = pair(edges, side, out);
    let (mut nodes, mut starts) = (Vec::new(), Vec::new());
    for (at, end) in targets.iter().enumerate() {
        if nodes.last() != Some(&end.node) {
            nodes.push(end.node);
            starts.push(at);
        }
    }
    starts.push(targets.len());
    let masked = &mut out.masked;
    graph.incoming(&nodes, &mut |at, adjacency| {
        let same_node = &targets[starts[at]..starts[at + 1]];
        for same_chunk in same_node.chunk_by(|one, other| one.chunk == other.chunk) {
            let chunk = same_chunk[0].chunk as usize;
            let partners = &sources[source_starts[chunk]..source_starts[chunk + 1]];
            find(adjacency, partners, &mut |partners, relation| {
                for target in same_chunk.iter().filter(|end| end.takes(relation)) {
                    let found = partners.iter().filter(|end| end.takes(relation));
                    found.for_each(|source| match side {
                        Side::Target => masked.mask(source.index, target.index),
                        Side::Source => masked.mask(target.index, source.index),
                    });
                }
            });
        }
    })
}

/// Puts the pairs that are edges of the batch in `out.masked`. `out` has the negatives already.
pub(crate) fn mask_batch(edges: &[Edge], side: Side, out: &mut Negatives) {
    out.masked.reset(edges.len(), out.per_chunk);
    if out.per_chunk == 0 {
        return;
    }
    let ends = BatchEnds::new(edges, side);
    let Negatives { chunk_edges, per_chunk, nodes, masked, .. } = out;
    let chunks = edges.chunks(*chunk_edges).zip(nodes.chunks(*per_chunk));
    for (chunk, (own, negatives)) in chunks.enumerate() {
        let mut drawn: Vec<(NodeId, u32)> = negatives.iter().copied().zip(0..).collect();
        drawn.sort_unstable();
        for (edge, index) in own.iter().zip((chunk * *chunk_edges) as u32..) {
            for end in ends.of(edge) {
                let start = drawn.partition_point(|(node, _)| *node < end);
                let found = drawn[start..].iter().take_while(|(node, _)| *node == end);
                found.for_each(|(_, negative)| masked.mask(index, *negative));
            }
        }
    }
}

/// A bit for each pair of an edge and a negative of its chunk: a graph of any shape takes the same memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MaskedPairs {
    /// Words of each edge; 0 if no pair is masked.
    words_each: usize,
    words: Vec<u64>,
}

impl MaskedPairs {
    /// Bytes for so many edges with so many negatives each.
    pub fn bytes_for(edges: u64, negatives: u64) -> u64 {
        edges.saturating_mul(negatives.div_ceil(64)).saturating_mul(8)
    }

    /// Without any pair, and room for none.
    pub(crate) fn clear(&mut self) {
        self.words_each = 0;
        self.words.clear();
    }

    /// Without any pair, and room for those of so many edges with so many negatives each.
    fn reset(&mut self, edges: usize, negatives: usize) {
        self.words_each = negatives.div_ceil(64);
        self.words.clear();
        self.words.resize(edges * self.words_each, 0);
    }

    fn mask(&mut self, edge: u32, negative: u32) {
        self.words[edge as usize * self.words_each + negative as usize / 64] |= 1 << (negative % 64);
    }

    /// The masked negatives of an edge, ascending.
    pub fn of_edge(&self, edge: usize) -> impl Iterator<Item = u32> + '_ {
        let words = &self.words[edge * self.words_each..][..self.words_each];
        words.iter().zip((0u32..).step_by(64)).flat_map(|(word, first)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let at = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(first + at)
            })
        })
    }
}

/// The true ends of a batch's edges where every node is a negative of each. They are looked up: an edge may have as many
/// as there are nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownEnds {
    pub(crate) side: Side,
    pub(crate) of: EndsOf,
}

/// Which ends are true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndsOf {
    /// The edge's own.
    Edge,
    /// Those of edges of the batch.
    Batch(BatchEnds),
    /// Those of edges of the graph, and the edge's own.
    Graph(Arc<TrueEnds>),
}

impl KnownEnds {
    /// Passes on the true ends of an edge of the batch, its own among them, each once.
    fn for_each(&self, edge: &Edge, take: &mut dyn FnMut(u32)) {
        match &self.of {
            EndsOf::Edge => take(end_of(edge, self.side).2.0 as u32),
            EndsOf::Batch(ends) => ends.of(edge).for_each(|end| take(end.0 as u32)),
            EndsOf::Graph(known) => {
                let (own, ends) =
                    (end_of(edge, self.side).2.0 as u32, known.of(edge, self.side).unwrap_or_default());
                let (before, after) = ends.split_at(ends.partition_point(|end| *end < own));
                before.iter().for_each(|end| take(*end));
                if after.first() != Some(&own) {
                    take(own);
                }
                after.iter().for_each(|end| take(*end));
            }
        }
    }
}

impl Negatives {
    /// Passes on the negatives that the edge at this index of its batch leaves out, each once: indices in its chunk, or
    /// nodes where every node is a negative.
    pub fn for_each_masked(&self, index: usize, edge: &Edge, take: &mut dyn FnMut(u32)) {
        match &self.known {
            Some(known) => known.for_each(edge, take),
            None => self.masked.of_edge(index).for_each(take),
        }
    }

    /// All of them, for the edges of the batch: (edge, negative), ascending. They may be very many.
    pub fn masked_pairs(&self, edges: &[Edge]) -> Vec<(u32, u32)> {
        let mut pairs = Vec::new();
        for (edge, index) in edges.iter().zip(0u32..) {
            self.for_each_masked(index as usize, edge, &mut |negative| pairs.push((index, negative)));
        }
        pairs
    }
}

/// The replaced ends of a batch's edges, by the end that stays and the relation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BatchEnds {
    side: Side,
    /// The end that stays, the relation, the replaced end; ascending, each once.
    ends: Vec<(NodeId, u32, NodeId)>,
}

impl BatchEnds {
    pub fn new(edges: &[Edge], side: Side) -> BatchEnds {
        let mut ends: Vec<_> = edges.iter().map(|edge| end_of(edge, side)).collect();
        ends.sort_unstable();
        ends.dedup();
        BatchEnds { side, ends }
    }

    /// Replaced ends of all edges of the batch that share this edge's other end and relation, itself included; ascending.
    pub fn of(&self, edge: &Edge) -> impl Iterator<Item = NodeId> + '_ {
        let (stays, relation, _) = end_of(edge, self.side);
        let start = self.ends.partition_point(|end| (end.0, end.1) < (stays, relation));
        let same = self.ends[start..].iter().take_while(move |end| (end.0, end.1) == (stays, relation));
        same.map(|end| end.2)
    }
}

fn end_of(edge: &Edge, side: Side) -> (NodeId, u32, NodeId) {
    match side {
        Side::Source => (edge.target, edge.relation, edge.source),
        Side::Target => (edge.source, edge.relation, edge.target),
    }
}

/// Collects the pairs of each chunk. Pairs that are the edge itself go to `out.masked` right away.
fn pair(edges: &[Edge], side: Side, out: &mut Negatives) -> CandidatePairs {
    let mut pairs = CandidatePairs { source_starts: vec![0], ..CandidatePairs::default() };
    let chunks = edges.chunks(out.chunk_edges).zip(out.nodes.chunks(out.per_chunk));
    for (chunk, (edges, negatives)) in (0u32..).zip(chunks) {
        let end = |node, relation, index| PairEnd { node, chunk, relation, index };
        let mut drawn: Vec<PairEnd> =
            negatives.iter().zip(0..).map(|(node, index)| end(*node, None, index)).collect();
        drawn.sort_unstable();
        let mut kept = Vec::with_capacity(edges.len());
        for (edge, index) in edges.iter().zip(chunk * out.chunk_edges as u32..) {
            let (replaced, stays) = match side {
                Side::Source => (edge.source, edge.target),
                Side::Target => (edge.target, edge.source),
            };
            of_node(&drawn, replaced).iter().for_each(|negative| out.masked.mask(index, negative.index));
            kept.push(end(stays, Some(edge.relation), index));
        }
        kept.sort_unstable();
        let (targets, sources) = match side {
            Side::Target => (drawn, kept),
            Side::Source => (kept, drawn),
        };
        pairs.targets.extend(targets);
        pairs.sources.extend(sources);
        pairs.source_starts.push(pairs.sources.len());
    }
    pairs.targets.sort_unstable();
    pairs
}

/// The ends at a node; `ends` ascend.
fn of_node(ends: &[PairEnd], node: NodeId) -> &[PairEnd] {
    let start = ends.partition_point(|end| end.node < node);
    let count = ends[start..].iter().take_while(|end| end.node == node).count();
    &ends[start..start + count]
}

fn find(adjacency: IncomingNeighbours<'_>, partners: &[PairEnd], found: &mut impl FnMut(&[PairEnd], u32)) {
    match adjacency.sources {
        Sources::Narrow(sources) => find_in(sources, adjacency.relations, partners, found),
        Sources::Wide(sources) => find_in(sources, adjacency.relations, partners, found),
    }
}

/// Calls `found` for each source of the adjacency that has partners, with those partners and the edge's relation.
fn find_in<W: StoredId>(
    sources: &[W],
    relations: Option<&[u32]>,
    partners: &[PairEnd],
    found: &mut impl FnMut(&[PairEnd], u32),
) {
    let relation = |at: usize| relations.map_or(0, |relations| relations[at]);
    // Parallel edges of one relation count once.
    let is_repeat = |at: usize| at > 0 && sources[at - 1] == sources[at] && relation(at - 1) == relation(at);
    // If the adjacency is short, its sources are looked up among the partners. If it is long, the partners are searched
    // in it.
    if sources.len() < partners.len() {
        for at in (0..sources.len()).filter(|at| !is_repeat(*at)) {
            let same_node = of_node(partners, sources[at].node());
            if !same_node.is_empty() {
                found(same_node, relation(at));
            }
        }
        return;
    }
    for same_node in partners.chunk_by(|one, other| one.node == other.node) {
        let source = W::of(same_node[0].node);
        let start = sources.partition_point(|word| *word < source);
        let same_source = (start..sources.len()).take_while(|at| sources[*at] == source);
        same_source.filter(|at| !is_repeat(*at)).for_each(|at| found(same_node, relation(at)));
    }
}
