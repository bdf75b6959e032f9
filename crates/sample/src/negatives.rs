//! Negatives for link prediction (Marius++ section 3). The edges of a chunk share the same corrupted ends, drawn
//! uniformly or by in-degree from a pool of nodes. Pairs that are true edges are reported, so that a loss can leave
//! them out.
//!
//! Negative `j` of chunk `c` is a function of (seed, epoch, batch, chunk, side, j), with the key and the integers of
//! [`crate::draw`] and the purpose 0x6e6567617469. docs/sample.md specifies it word by word.

use crate::draw::{PURPOSE_NEGATIVES, below};
use crate::masks::{self, BatchEnds, EndsOf};
use crate::order::identity_of_nodes;
use crate::topology::lookup::check_nodes;
use crate::topology::{Edge, EdgeLookup};
use crate::true_ends::TrueEnds;
use crate::{Position, Result, SampleError};
use esker_types::random::Key;
use esker_types::{EdgeId, NodeId};
use std::fmt::{self, Debug};
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

pub use crate::masks::{KnownEnds, MaskedPairs};

/// The nodes that negatives are drawn from.
#[derive(Debug, Clone)]
pub enum NegativePool {
    /// Every node of the graph.
    All,
    /// These nodes. A node that is in here twice weighs twice, also by degree.
    Nodes(Vec<NodeId>),
    /// Nodes that change during an epoch: for instance, the residents of a partition buffer.
    PerBatch(Arc<dyn PoolOfBatch>),
}

/// Nodes that negatives are drawn from, by batch.
pub trait PoolOfBatch: Debug + Send + Sync {
    /// The nodes of a batch, as a function of its position and nothing else. `None` for every node of the graph.
    fn pool(&self, at: Position) -> Result<Option<Arc<dyn NegativeNodes>>>;

    /// A short text that identifies the pool. Over one graph, pools with equal texts have equal nodes for every batch.
    fn identity(&self) -> String;
}

/// Nodes to draw from, and the edges into them.
pub trait NegativeNodes: Debug + Send + Sync {
    /// Number of nodes.
    fn node_count(&self) -> u64;

    /// Number of edges into them.
    fn edge_count(&self) -> u64;

    /// A node, for a uniform draw.
    fn node(&self, index: u64) -> NodeId;

    /// The target of an edge, for a draw by degree.
    fn target(&self, edge: u64) -> NodeId;

    /// Where true edges between these nodes and the ends of the batch are found, if not in the graph.
    fn lookup(&self) -> Option<&dyn EdgeLookup> {
        None
    }
}

/// Which end of an edge is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Its source.
    Source,
    /// Its target.
    Target,
}

/// How negatives are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NegativeSettings {
    /// The random seed.
    pub seed: u64,
    /// Chunks per batch, at least 1. The edges of a chunk share negatives.
    pub chunks: u32,
    /// Negatives per chunk drawn uniformly.
    pub uniform: u32,
    /// Negatives per chunk drawn by in-degree, whichever side they replace. They follow the uniform ones.
    pub by_degree: u32,
}

/// Which pairs of an edge and a negative a loss leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NegativeMask {
    /// None. If every node is a negative, the edge itself is still left out, because its score is the positive one.
    None,
    /// Those that are edges of the batch.
    Batch,
    /// Those that are edges of the graph, or the edge itself.
    #[default]
    Graph,
}

impl fmt::Display for NegativeMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NegativeMask::None => "none",
            NegativeMask::Batch => "batch",
            NegativeMask::Graph => "graph",
        })
    }
}

impl FromStr for NegativeMask {
    type Err = String;
    fn from_str(word: &str) -> Result<NegativeMask, String> {
        let all = [NegativeMask::None, NegativeMask::Batch, NegativeMask::Graph];
        let found = all.into_iter().find(|mask| mask.to_string() == word);
        found.ok_or_else(|| format!("`{word}` is not a mask; write none, batch or graph"))
    }
}

/// The negatives of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Negatives {
    /// Edges per chunk. The last chunk may have fewer.
    pub chunk_edges: usize,
    /// Negatives per chunk; with `all_nodes`, the number of nodes.
    pub per_chunk: usize,
    /// Whether every node of the graph is a negative of every edge. Then `nodes` is empty, and a negative's index is its
    /// node id.
    pub all_nodes: bool,
    /// The negatives, chunk after chunk.
    pub nodes: Vec<NodeId>,
    /// Pairs to leave out, of an edge of the batch and a negative of its chunk.
    pub masked: MaskedPairs,
    /// Where those are looked up if every node is a negative.
    pub known: Option<KnownEnds>,
}

impl Negatives {
    /// Positions in `nodes` of the negatives of an edge of the batch. Empty if every node is a negative.
    pub fn of_edge(&self, edge: usize) -> Range<usize> {
        if self.all_nodes {
            return 0..0;
        }
        let start = edge / self.chunk_edges.max(1) * self.per_chunk;
        start..start + self.per_chunk
    }
}

/// Largest number of negatives per batch: they become seed nodes, whose local indices have 32 bits.
const MOST_NEGATIVES: u64 = 1 << 31;

/// Draws negatives from a pool. `G` is any graph with edge look-up, borrowed or shared.
#[derive(Debug, Clone)]
pub struct NegativeSampler<G> {
    graph: G,
    pool: PreparedPool,
    settings: NegativeSettings,
    mask: NegativeMask,
    identity: String,
}

/// A pool, ready for drawing.
#[derive(Debug, Clone)]
enum PreparedPool {
    All,
    Nodes(Arc<ListedNodes>),
    PerBatch(Arc<dyn PoolOfBatch>),
}

/// Chosen nodes. A node that is listed twice weighs twice.
#[derive(Debug)]
pub struct ListedNodes {
    nodes: Arc<Vec<NodeId>>,
    /// Running sums of their in-degrees, if negatives are drawn by degree.
    degree_ends: Vec<u64>,
}

impl ListedNodes {
    /// These nodes of a graph, for draws by degree too or only for uniform ones.
    pub fn new(
        graph: &(impl EdgeLookup + ?Sized),
        nodes: Arc<Vec<NodeId>>,
        by_degree: bool,
    ) -> Result<ListedNodes> {
        check_nodes(nodes.iter().copied(), graph.node_count())?;
        let mut degree_ends = Vec::new();
        if by_degree {
            graph.in_degrees(&nodes, &mut degree_ends)?;
            let mut sum = 0;
            for degree in &mut degree_ends {
                sum += *degree;
                *degree = sum;
            }
        }
        Ok(ListedNodes { nodes, degree_ends })
    }
}

impl NegativeNodes for ListedNodes {
    fn node_count(&self) -> u64 {
        self.nodes.len() as u64
    }

    fn edge_count(&self) -> u64 {
        self.degree_ends.last().copied().unwrap_or(0)
    }

    fn node(&self, index: u64) -> NodeId {
        self.nodes[index as usize]
    }

    fn target(&self, edge: u64) -> NodeId {
        self.nodes[self.degree_ends.partition_point(|end| *end <= edge)]
    }
}

impl<G: EdgeLookup> NegativeSampler<G> {
    /// A sampler over `pool`. The graph needs incoming adjacency, alone or with outgoing adjacency, to find true edges.
    pub fn new(graph: G, pool: NegativePool, settings: NegativeSettings) -> Result<NegativeSampler<G>> {
        if !graph.has_incoming() {
            return Err(SampleError::OnlyOutgoing);
        }
        let NegativeSettings { seed, chunks, uniform, by_degree } = settings;
        if chunks == 0 || uniform.checked_add(by_degree).is_none() {
            return Err(SampleError::NegativeCounts { uniform, by_degree, chunks });
        }
        let of_pool = match &pool {
            NegativePool::All => "all".to_string(),
            NegativePool::Nodes(nodes) => identity_of_nodes(nodes),
            NegativePool::PerBatch(pool) => format!("per-batch({})", pool.identity()),
        };
        let identity = format!(
            "negatives(seed={seed},chunks={chunks},uniform={uniform},by_degree={by_degree},pool={of_pool})"
        );
        let mask = NegativeMask::Graph;
        let mut sampler = NegativeSampler { graph, pool: PreparedPool::All, settings, mask, identity };
        match pool {
            NegativePool::All => {
                sampler.check_pool(sampler.graph.node_count(), sampler.graph.edge_count())?
            }
            NegativePool::Nodes(nodes) => {
                let listed = ListedNodes::new(&sampler.graph, Arc::new(nodes), by_degree > 0)?;
                sampler.check_pool(listed.node_count(), listed.edge_count())?;
                sampler.pool = PreparedPool::Nodes(Arc::new(listed));
            }
            NegativePool::PerBatch(pool) => sampler.pool = PreparedPool::PerBatch(pool),
        }
        Ok(sampler)
    }

    /// The same sampler with another mask. Without this call, pairs that are edges of the graph are masked.
    pub fn with_mask(mut self, mask: NegativeMask) -> NegativeSampler<G> {
        self.mask = mask;
        self
    }

    /// Draws negatives for the edges of a batch, and finds the pairs to mask.
    pub fn draw(&self, at: Position, edges: &[Edge], side: Side, out: &mut Negatives) -> Result<()> {
        let ends = edges.iter().flat_map(|edge| [edge.source, edge.target]);
        check_nodes(ends, self.graph.node_count())?;
        out.chunk_edges = self.chunk_edges(edges.len());
        out.per_chunk = self.per_chunk();
        out.all_nodes = false;
        out.known = None;
        out.nodes.clear();
        let pool = self.pool_of(at)?;
        self.draw_from(pool.as_deref(), at, edges.len(), side, &mut out.nodes)?;
        match self.mask {
            NegativeMask::None => out.masked.clear(),
            NegativeMask::Batch => masks::mask_batch(edges, side, out),
            NegativeMask::Graph => match pool.as_ref().and_then(|pool| pool.lookup()) {
                Some(lookup) => masks::mask_graph(&lookup, edges, side, out)?,
                None => masks::mask_graph(&self.graph, edges, side, out)?,
            },
        }
        Ok(())
    }

    /// Appends the negatives of a batch of `edges` edges, chunk after chunk, without looking for true edges.
    pub fn draw_nodes(&self, at: Position, edges: usize, side: Side, out: &mut Vec<NodeId>) -> Result<()> {
        self.draw_from(self.pool_of(at)?.as_deref(), at, edges, side, out)
    }

    fn draw_from(
        &self,
        pool: Option<&dyn NegativeNodes>,
        at: Position,
        edges: usize,
        side: Side,
        out: &mut Vec<NodeId>,
    ) -> Result<()> {
        let chunks = edges.div_ceil(self.chunk_edges(edges)) as u64;
        let count = chunks.saturating_mul(self.per_chunk() as u64);
        if count > MOST_NEGATIVES || edges as u64 > MOST_NEGATIVES {
            return Err(SampleError::TooManyNegatives { edges, negatives: count });
        }
        out.reserve(count as usize);
        let key = Key::new(self.settings.seed).with(PURPOSE_NEGATIVES).with(at.epoch).with(at.batch);
        for chunk in 0..chunks {
            let key = key.with(chunk).with(matches!(side, Side::Target) as u64);
            let (uniform, all) = (self.settings.uniform as u64, self.per_chunk() as u64);
            match pool {
                Some(pool) => {
                    let (nodes, edges) = (pool.node_count(), pool.edge_count());
                    out.extend((0..uniform).map(|index| pool.node(below(key, index, nodes))));
                    out.extend((uniform..all).map(|index| pool.target(below(key, index, edges))));
                }
                None => {
                    let (nodes, edges) = (self.graph.node_count(), self.graph.edge_count());
                    out.extend((0..uniform).map(|index| NodeId(below(key, index, nodes))));
                    // The target of an edge that is drawn uniformly.
                    let drawn: Vec<EdgeId> =
                        (uniform..all).map(|index| EdgeId(below(key, index, edges))).collect();
                    self.graph.targets_by_id(&drawn, out)?;
                }
            }
        }
        Ok(())
    }

    /// A short text that identifies the sampler. Over one graph, samplers with equal texts draw equal negatives.
    pub fn identity(&self) -> String {
        match self.mask {
            NegativeMask::Graph => self.identity.clone(),
            mask => format!("{} mask={mask}", self.identity),
        }
    }

    fn chunk_edges(&self, edges: usize) -> usize {
        edges.div_ceil(self.settings.chunks as usize).max(1)
    }

    fn per_chunk(&self) -> usize {
        self.settings.uniform as usize + self.settings.by_degree as usize
    }

    /// The pool of a batch; `None` if it draws from all nodes.
    fn pool_of(&self, at: Position) -> Result<Option<Arc<dyn NegativeNodes>>> {
        let pool: Option<Arc<dyn NegativeNodes>> = match &self.pool {
            PreparedPool::All => None,
            PreparedPool::Nodes(listed) => Some(listed.clone()),
            PreparedPool::PerBatch(pool) => pool.pool(at)?,
        };
        if let Some(pool) = &pool {
            self.check_pool(pool.node_count(), pool.edge_count())?;
        }
        Ok(pool)
    }

    fn check_pool(&self, nodes: u64, edges: u64) -> Result<()> {
        let NegativeSettings { uniform, by_degree, .. } = self.settings;
        if (uniform == 0 || nodes > 0) && (by_degree == 0 || edges > 0) {
            return Ok(());
        }
        Err(SampleError::EmptyPool { nodes, edges })
    }
}

/// Every node of the graph is a negative of every edge. They are not named, and do not become seed nodes: whoever
/// scores them has a row for each node.
#[derive(Debug, Clone)]
pub struct AllNodes {
    nodes: u64,
    mask: NegativeMask,
    known: Option<Arc<TrueEnds>>,
}

impl AllNodes {
    /// All of `nodes` nodes. The mask `graph` needs `known`, the true ends in the graph of every edge to come.
    pub fn new(nodes: u64, mask: NegativeMask, known: Option<Arc<TrueEnds>>) -> Result<AllNodes> {
        if nodes > 1 << 32 {
            return Err(SampleError::TooManyCandidates { nodes });
        }
        if mask == NegativeMask::Graph && known.is_none() {
            return Err(SampleError::UnknownTrueEnds);
        }
        Ok(AllNodes { nodes, mask, known })
    }

    /// Fills in the form and where the pairs to mask are found. The edge itself is always masked: its score is the
    /// positive one.
    pub fn draw(&self, edges: &[Edge], side: Side, out: &mut Negatives) -> Result<()> {
        check_nodes(edges.iter().flat_map(|edge| [edge.source, edge.target]), self.nodes)?;
        out.chunk_edges = edges.len().max(1);
        out.per_chunk = self.nodes as usize;
        out.all_nodes = true;
        out.nodes.clear();
        out.masked.clear();
        let of = match (self.mask, &self.known) {
            (NegativeMask::None, _) => EndsOf::Edge,
            (NegativeMask::Batch, _) => EndsOf::Batch(BatchEnds::new(edges, side)),
            (NegativeMask::Graph, Some(known)) if edges.iter().all(|edge| known.of(edge, side).is_some()) => {
                EndsOf::Graph(known.clone())
            }
            (NegativeMask::Graph, _) => return Err(SampleError::UnknownTrueEnds),
        };
        out.known = Some(KnownEnds { side, of });
        Ok(())
    }

    /// A short text that identifies the negatives.
    pub fn identity(&self) -> String {
        format!("negatives(all-nodes={},mask={})", self.nodes, self.mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference;
    use crate::{Direction, InMemory};
    use proptest::prelude::*;

    const AT: Position = Position { epoch: 2, batch: 7 };

    fn graph(lists: &[Vec<u64>]) -> InMemory<u32> {
        let edges = lists.iter().map(Vec::len).sum::<usize>() as u32;
        // Relations ascend among equal neighbours, as in stored adjacency.
        let mut kinds: Vec<u32> = Vec::new();
        for list in lists {
            for (at, source) in list.iter().enumerate() {
                let again = at > 0 && list[at - 1] == *source;
                kinds.push(if again { kinds[kinds.len() - 1] + (at as u32 % 2) } else { at as u32 % 2 });
            }
        }
        assert_eq!(kinds.len() as u32, edges);
        InMemory::from_adjacency(lists, Some(kinds))
    }

    fn lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
        let list = prop::collection::vec(0u64..20, 0..30).prop_map(|mut list| {
            list.sort_unstable();
            list
        });
        prop::collection::vec(list, 20)
    }

    fn settings(seed: u64, chunks: u32, uniform: u32, by_degree: u32) -> NegativeSettings {
        NegativeSettings { seed, chunks, uniform, by_degree }
    }

    fn edge((source, target, relation): (u64, u64, u32)) -> Edge {
        Edge { source: NodeId(source), target: NodeId(target), relation }
    }

    proptest! {
        #[test]
        fn masks_equal_a_look_at_every_pair(
            lists in lists(), picks in prop::collection::vec((0u64..20, 0u64..20, 0u32..3), 1..40), side: bool, both: bool,
        ) {
            let direction = if both { Direction::Both } else { Direction::Incoming };
            let graph = graph(&lists).in_direction(direction);
            let side = if side { Side::Source } else { Side::Target };
            let edges: Vec<Edge> = picks.into_iter().map(edge).collect();
            let mut out = Negatives::default();
            let sampler = NegativeSampler::new(&graph, NegativePool::All, settings(1, 3, 9, 0)).unwrap();
            sampler.draw(AT, &edges, side, &mut out).unwrap();
            let count = lists.iter().map(Vec::len).sum::<usize>() as u64;
            let all: Vec<Edge> = (0..count).map(|edge| graph.edge(EdgeId(edge)).unwrap()).collect();
            let mut expected = Vec::new();
            for (index, edge) in edges.iter().enumerate() {
                for (negative, node) in out.nodes[out.of_edge(index)].iter().enumerate() {
                    let corrupted = match side {
                        Side::Source => Edge { source: *node, ..*edge },
                        Side::Target => Edge { target: *node, ..*edge },
                    };
                    if corrupted == *edge || all.contains(&corrupted) {
                        expected.push((index as u32, negative as u32));
                    }
                }
            }
            prop_assert_eq!(out.masked_pairs(&edges), expected);
        }

        #[test]
        fn negatives_are_what_the_text_says(
            lists in lists(), seed: u64, chunks in 1u32..6, count in 1usize..20, pool in prop::collection::vec(0u64..20, 0..8),
            both: bool,
        ) {
            let edges_in = |node: u64| lists[node as usize].len() as u64;
            let direction = if both { Direction::Both } else { Direction::Incoming };
            let graph = graph(&lists).in_direction(direction);
            let whole: Vec<u64> = (0..20).collect();
            let (given, listed) = match pool[..] {
                [] => (NegativePool::All, &whole),
                _ => (NegativePool::Nodes(pool.iter().copied().map(NodeId).collect()), &pool),
            };
            let total: u64 = listed.iter().map(|node| edges_in(*node)).sum();
            let by_degree = if total > 0 { 4 } else { 0 };
            let sampler = NegativeSampler::new(&graph, given, settings(seed, chunks, 3, by_degree)).unwrap();
            for (side, side_word) in [(Side::Source, 0), (Side::Target, 1)] {
                let mut out = Negatives::default();
                sampler.draw(AT, &vec![edge((0, 1, 0)); count], side, &mut out).unwrap();
                let chunk_edges = count.div_ceil(chunks as usize);
                let mut expected = Vec::new();
                for chunk in 0..count.div_ceil(chunk_edges) as u64 {
                    let key = reference::key(seed, &[0x6e65_6761_7469, AT.epoch, AT.batch, chunk, side_word]);
                    for j in 0..3 {
                        expected.push(NodeId(listed[reference::below(key, j, listed.len() as u64) as usize]));
                    }
                    for j in 3..3 + by_degree as u64 {
                        let mut entry = reference::below(key, j, total);
                        let mut place = 0;
                        while entry >= edges_in(listed[place]) {
                            entry -= edges_in(listed[place]);
                            place += 1;
                        }
                        expected.push(NodeId(listed[place]));
                    }
                }
                prop_assert_eq!(out.nodes, expected);
                prop_assert_eq!((out.chunk_edges, out.per_chunk), (chunk_edges, 3 + by_degree as usize));
            }
        }
    }

    /// Tests how often each node is drawn against its weight, by the 99.9% quantile for 19 degrees of freedom.
    fn check_shares(pool: NegativePool, by_degree: bool, weights: &[f64]) {
        let lists: Vec<Vec<u64>> = (0..20).map(|node| (0..node).collect()).collect();
        let graph = InMemory::<u32>::from_adjacency(&lists, None);
        let (uniform, weighted) = if by_degree { (0, 5000) } else { (5000, 0) };
        let sampler = NegativeSampler::new(&graph, pool, settings(4, 4, uniform, weighted)).unwrap();
        let mut out = Negatives::default();
        sampler.draw(AT, &[edge((0, 1, 0)); 4], Side::Target, &mut out).unwrap();
        assert_eq!((out.nodes.len(), out.chunk_edges), (20_000, 1));
        let (mut counts, total) = ([0f64; 20], weights.iter().sum::<f64>());
        out.nodes.iter().for_each(|node| counts[node.index()] += 1.0);
        let mut sum = 0.0;
        for (count, weight) in counts.iter().zip(weights) {
            let expected = 20_000.0 * weight / total;
            assert!(*weight > 0.0 || *count == 0.0);
            sum += if *weight > 0.0 { (count - expected).powi(2) / expected } else { 0.0 };
        }
        assert!(sum < 43.8, "{sum} {counts:?}");
    }

    #[test]
    fn negatives_are_uniform_or_by_degree_over_the_pool() {
        let all = [1.0; 20];
        let by_degree: Vec<f64> = (0..20).map(|node| node as f64).collect();
        let odd: Vec<NodeId> = (0..20).filter(|node| node % 2 == 1).map(NodeId).collect();
        let of_odd = |weights: &[f64]| -> Vec<f64> {
            weights
                .iter()
                .enumerate()
                .map(|(node, weight)| if node % 2 == 1 { *weight } else { 0.0 })
                .collect()
        };
        check_shares(NegativePool::All, false, &all);
        check_shares(NegativePool::All, true, &by_degree);
        check_shares(NegativePool::Nodes(odd.clone()), false, &of_odd(&all));
        check_shares(NegativePool::Nodes(odd), true, &of_odd(&by_degree));
    }

    #[test]
    fn a_node_listed_twice_weighs_twice() {
        let pool: Vec<NodeId> = [1, 3, 3, 19].map(NodeId).to_vec();
        let weights = |weights: [f64; 3]| {
            let mut all = [0.0; 20];
            [1, 3, 19].into_iter().zip(weights).for_each(|(node, weight): (usize, f64)| all[node] = weight);
            all
        };
        check_shares(NegativePool::Nodes(pool.clone()), false, &weights([1.0, 2.0, 1.0]));
        check_shares(NegativePool::Nodes(pool), true, &weights([1.0, 6.0, 19.0]));
    }

    #[test]
    fn a_pool_that_cannot_be_drawn_from_is_refused() {
        let graph = InMemory::<u32>::from_adjacency(&[vec![], vec![0]], None);
        let refused =
            |pool| NegativeSampler::new(&graph, pool, settings(1, 1, 1, 1)).err().unwrap().to_string();
        assert!(refused(NegativePool::Nodes(vec![])).contains("0 nodes"));
        assert!(refused(NegativePool::Nodes(vec![NodeId(0)])).contains("0 incoming edges"));
        assert!(refused(NegativePool::Nodes(vec![NodeId(2)])).contains("nodes 0 to 1"));
        assert!(NegativeSampler::new(&graph, NegativePool::All, settings(1, 1, 1, 1)).is_ok());
        // In-degrees count, even if outgoing adjacency is loaded: node 0 has one outgoing edge.
        let both = graph.clone().in_direction(Direction::Both);
        assert!(
            NegativeSampler::new(&both, NegativePool::Nodes(vec![NodeId(0)]), settings(1, 1, 0, 1)).is_err()
        );
        assert!(NegativeSampler::new(&both, NegativePool::All, settings(1, 1, 0, 1)).is_ok());
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let graph = InMemory::<u32>::from_adjacency(&[vec![], vec![0]], None);
        let refused = |graph, chunks, by_degree| {
            let settings = settings(1, chunks, 1, by_degree);
            NegativeSampler::new(graph, NegativePool::All, settings).err().unwrap().to_string()
        };
        assert!(refused(&graph, 0, 1).contains("0 chunks"));
        assert!(refused(&graph, 1, u32::MAX).contains("fewer than 2^32"));
        let outgoing = graph.clone().in_direction(Direction::Outgoing);
        assert!(refused(&outgoing, 1, 1).contains("incoming adjacency, or with both"));
        let many = NegativeSampler::new(&graph, NegativePool::All, settings(1, 2, u32::MAX, 0)).unwrap();
        let said = many.draw_nodes(AT, 2, Side::Target, &mut Vec::new()).unwrap_err().to_string();
        assert!(said.contains("more than 2^31"), "{said}");
    }

    #[test]
    fn edges_between_what_are_no_nodes_are_refused() {
        let graph = InMemory::<u32>::from_adjacency(&[vec![1, 1], vec![0]], None);
        let sampler = NegativeSampler::new(&graph, NegativePool::All, settings(1, 1, 4, 0)).unwrap();
        let mut out = Negatives::default();
        // 2^32 + 1 would be node 1 if it were cut to 32 bits.
        for (source, target) in [(2, 0), (0, 2), ((1 << 32) + 1, 0), (u64::MAX, u64::MAX)] {
            for side in [Side::Source, Side::Target] {
                let edges = [edge((0, 1, 0)), edge((source, target, 0))];
                let said = sampler.draw(AT, &edges, side, &mut out).unwrap_err().to_string();
                assert!(said.contains("nodes 0 to 1"), "{said}");
            }
        }
        sampler.draw(AT, &[], Side::Target, &mut out).unwrap();
        assert_eq!((out.nodes.len(), out.masked_pairs(&[]).len()), (0, 0));
    }
}
