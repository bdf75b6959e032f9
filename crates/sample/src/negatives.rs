//! Negatives for link prediction (Marius++ section 3): the edges of a chunk share the same corrupted ends, drawn
//! uniformly or by degree from the nodes at hand; pairs that are true edges are listed, so that a loss can leave them out.
//!
//! Negative `j` of chunk `c` is a function of (seed, epoch, batch, chunk, side, j), with the key and the integers of
//! [`crate::draw`] and the purpose 0x6e6567617469.

use crate::draw::{PURPOSE_NEGATIVES, below};
use crate::topology::{Edge, InMemory, Topology, Word};
use crate::{Direction, Position, Result, SampleError};
use esker_types::random::Key;
use esker_types::{EdgeId, NodeId};

/// The nodes that negatives are drawn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pool {
    /// Every node of the graph.
    All,
    /// These: the resident ones, for instance.
    Nodes(Vec<NodeId>),
}

/// Which end of an edge is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Where it starts.
    Source,
    /// Where it ends.
    Target,
}

/// How negatives are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NegativeSettings {
    /// The seed.
    pub seed: u64,
    /// Chunks of a batch; the edges of a chunk share negatives.
    pub chunks: u32,
    /// Negatives of a chunk drawn uniformly.
    pub uniform: u32,
    /// Negatives of a chunk drawn by degree; they come behind the uniform ones.
    pub by_degree: u32,
}

/// The negatives of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Negatives {
    /// Edges of a chunk; the last may have fewer.
    pub chunk_edges: usize,
    /// Negatives of a chunk.
    pub per_chunk: usize,
    /// The negatives, chunk after chunk.
    pub nodes: Vec<NodeId>,
    /// Pairs that are true edges: (edge of the batch, negative of its chunk), ascending.
    pub masked: Vec<(u32, u32)>,
}

/// Draws negatives over a pool.
pub struct NegativeSampler<'g, W> {
    graph: &'g InMemory<W>,
    pool: Pool,
    settings: NegativeSettings,
    /// Sums of the degrees of a pool of chosen nodes.
    degree_ends: Vec<u64>,
    /// Edges of the chunk at hand by the end that stays: (end, relation, edge of the batch).
    sorted: Vec<(NodeId, u32, u32)>,
}

impl<'g, W: Word> NegativeSampler<'g, W> {
    /// A sampler over `pool`. The graph needs incoming lists: they tell true edges.
    pub fn new(
        graph: &'g InMemory<W>,
        pool: Pool,
        settings: NegativeSettings,
    ) -> Result<NegativeSampler<'g, W>> {
        if graph.direction() != Direction::Incoming {
            let problem = format!("negatives are drawn over {:?} lists", graph.direction());
            return Err(SampleError::request(problem, "load the topology with incoming lists"));
        }
        let (mut degree_ends, mut sum) = (Vec::new(), 0);
        let nodes = match &pool {
            Pool::All => graph.nodes(),
            Pool::Nodes(nodes) => nodes.len() as u64,
        };
        match &pool {
            Pool::All => sum = graph.entries(),
            Pool::Nodes(nodes) => {
                if let Some(node) = nodes.iter().find(|node| node.0 >= graph.nodes()) {
                    return Err(SampleError::Seed { found: node.0, last: graph.nodes().saturating_sub(1) });
                }
                degree_ends.extend(nodes.iter().map(|node| {
                    sum += graph.degree(*node);
                    sum
                }));
            }
        }
        if (settings.uniform > 0 && nodes == 0) || (settings.by_degree > 0 && sum == 0) {
            let problem = format!("negatives are drawn from {nodes} nodes with {sum} edges");
            return Err(SampleError::request(
                problem,
                "give nodes to draw from; by degree, nodes that have edges",
            ));
        }
        Ok(NegativeSampler { graph, pool, settings, degree_ends, sorted: Vec::new() })
    }

    /// Draws negatives for the edges of a batch.
    pub fn draw(&mut self, at: Position, edges: &[Edge], side: Side, out: &mut Negatives) {
        let Negatives { chunk_edges, per_chunk, nodes, masked } = out;
        *chunk_edges = edges.len().div_ceil(self.settings.chunks.max(1) as usize).max(1);
        *per_chunk = (self.settings.uniform + self.settings.by_degree) as usize;
        nodes.clear();
        masked.clear();
        let key = Key::new(self.settings.seed).with(PURPOSE_NEGATIVES).with(at.epoch).with(at.batch);
        for (chunk, edges_of_chunk) in edges.chunks(*chunk_edges).enumerate() {
            let key = key.with(chunk as u64).with(matches!(side, Side::Target) as u64);
            let start = nodes.len();
            nodes.extend((0..self.settings.uniform).map(|index| self.uniform(key, index as u64)));
            let weighted = self.settings.uniform..self.settings.uniform + self.settings.by_degree;
            nodes.extend(weighted.map(|index| self.by_degree(key, index as u64)));
            self.mask(edges_of_chunk, chunk * *chunk_edges, &nodes[start..], side, masked);
        }
        masked.sort_unstable();
    }

    fn uniform(&self, key: Key, index: u64) -> NodeId {
        match &self.pool {
            Pool::All => NodeId(below(key, index, self.graph.nodes())),
            Pool::Nodes(nodes) => nodes[below(key, index, nodes.len() as u64) as usize],
        }
    }

    /// The node that a list entry drawn uniformly belongs to.
    fn by_degree(&self, key: Key, index: u64) -> NodeId {
        match &self.pool {
            Pool::All => self.graph.target_of(EdgeId(below(key, index, self.graph.entries()))),
            Pool::Nodes(nodes) => {
                let sum = self.degree_ends[self.degree_ends.len() - 1];
                let entry = below(key, index, sum);
                nodes[self.degree_ends.partition_point(|end| *end <= entry)]
            }
        }
    }

    /// Lists the pairs of a chunk that are true edges, or the edge itself.
    fn mask(
        &mut self,
        edges: &[Edge],
        first: usize,
        nodes: &[NodeId],
        side: Side,
        out: &mut Vec<(u32, u32)>,
    ) {
        let with_end = |edge: &Edge, node: NodeId| match side {
            Side::Source => Edge { source: node, ..*edge },
            Side::Target => Edge { target: node, ..*edge },
        };
        self.sorted.clear();
        self.sorted.extend(edges.iter().zip(first as u32..).map(|(edge, index)| match side {
            Side::Source => (edge.target, edge.relation, index),
            Side::Target => (edge.source, edge.relation, index),
        }));
        self.sorted.sort_unstable();
        for (negative, node) in nodes.iter().enumerate() {
            let same = |edge: &Edge| with_end(edge, *node) == *edge;
            // A short list is looked up among the chunk's edges, a long one is searched for each edge.
            if side == Side::Target && self.graph.degree(*node) < edges.len() as u64 {
                self.mask_by_list(*node, negative as u32, out);
                let own = edges
                    .iter()
                    .zip(first as u32..)
                    .filter(|(edge, _)| same(edge) && !self.graph.contains(**edge));
                out.extend(own.map(|(_, index)| (index, negative as u32)));
            } else {
                let is_true = |edge: &Edge| same(edge) || self.graph.contains(with_end(edge, *node));
                let found = edges.iter().zip(first as u32..).filter(|(edge, _)| is_true(edge));
                out.extend(found.map(|(_, index)| (index, negative as u32)));
            }
        }
    }

    /// The chunk's edges whose source and kind stand in the incoming list of `node`.
    fn mask_by_list(&self, node: NodeId, negative: u32, out: &mut Vec<(u32, u32)>) {
        let mut before = None;
        for (position, word) in self.graph.list(node).first.iter().enumerate() {
            let wanted = (word.node(), self.graph.relation_of(node, position));
            // Parallel edges of one kind are one fact.
            if before.replace(wanted) == Some(wanted) {
                continue;
            }
            let start = self.sorted.partition_point(|(end, kind, _)| (*end, *kind) < wanted);
            let found = self.sorted[start..].iter().take_while(|(end, kind, _)| (*end, *kind) == wanted);
            out.extend(found.map(|(_, _, edge)| (*edge, negative)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AT: Position = Position { epoch: 2, batch: 7 };

    fn graph(lists: &[Vec<u64>]) -> InMemory<u32> {
        let edges = lists.iter().map(Vec::len).sum::<usize>() as u32;
        // Kinds ascend inside equal neighbours, as stored lists have them.
        let mut kinds: Vec<u32> = Vec::new();
        for list in lists {
            for (at, source) in list.iter().enumerate() {
                let again = at > 0 && list[at - 1] == *source;
                kinds.push(if again { kinds[kinds.len() - 1] + (at as u32 % 2) } else { at as u32 % 2 });
            }
        }
        assert_eq!(kinds.len() as u32, edges);
        InMemory::from_lists(lists, Some(kinds))
    }

    fn lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
        let list = prop::collection::vec(0u64..20, 0..30).prop_map(|mut list| {
            list.sort_unstable();
            list
        });
        prop::collection::vec(list, 20)
    }

    proptest! {
        #[test]
        fn masks_equal_a_look_at_every_pair(lists in lists(), picks in prop::collection::vec((0u64..20, 0u64..20, 0u32..3), 1..40), side: bool) {
            let graph = graph(&lists);
            let side = if side { Side::Source } else { Side::Target };
            let edges: Vec<Edge> = picks.iter().map(|(source, target, relation)| Edge { source: NodeId(*source), target: NodeId(*target), relation: *relation }).collect();
            let settings = NegativeSettings { seed: 1, chunks: 3, uniform: 9, by_degree: 0 };
            let mut out = Negatives::default();
            NegativeSampler::new(&graph, Pool::All, settings).unwrap().draw(AT, &edges, side, &mut out);
            let all: Vec<Edge> = (0..graph.entries()).map(|edge| graph.edge(EdgeId(edge)).unwrap()).collect();
            let mut expected = Vec::new();
            for (index, edge) in edges.iter().enumerate() {
                let chunk = index / out.chunk_edges;
                for (negative, node) in out.nodes[chunk * 9..][..9].iter().enumerate() {
                    let corrupted = match side {
                        Side::Source => Edge { source: *node, ..*edge },
                        Side::Target => Edge { target: *node, ..*edge },
                    };
                    if corrupted == *edge || all.contains(&corrupted) {
                        expected.push((index as u32, negative as u32));
                    }
                }
            }
            prop_assert_eq!(out.masked, expected);
        }
    }

    /// How often each node is drawn, against what its weight gives; 99.9% quantile for 19 degrees of freedom.
    fn check_shares(pool: Pool, by_degree: bool, weights: &[f64]) {
        let lists: Vec<Vec<u64>> = (0..20).map(|node| (0..node).collect()).collect();
        let graph = InMemory::<u32>::from_lists(&lists, None);
        let (uniform, weighted) = if by_degree { (0, 5000) } else { (5000, 0) };
        let settings = NegativeSettings { seed: 4, chunks: 4, uniform, by_degree: weighted };
        let edges = vec![Edge { source: NodeId(0), target: NodeId(1), relation: 0 }; 4];
        let mut out = Negatives::default();
        NegativeSampler::new(&graph, pool, settings).unwrap().draw(AT, &edges, Side::Target, &mut out);
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
        check_shares(Pool::All, false, &all);
        check_shares(Pool::All, true, &by_degree);
        check_shares(Pool::Nodes(odd.clone()), false, &of_odd(&all));
        check_shares(Pool::Nodes(odd), true, &of_odd(&by_degree));
    }

    #[test]
    fn a_pool_that_cannot_be_drawn_from_is_refused() {
        let graph = InMemory::<u32>::from_lists(&[vec![], vec![0]], None);
        let settings = NegativeSettings { seed: 1, chunks: 1, uniform: 1, by_degree: 1 };
        let refused = |pool| NegativeSampler::new(&graph, pool, settings).err().unwrap().to_string();
        assert!(refused(Pool::Nodes(vec![])).contains("0 nodes"));
        assert!(refused(Pool::Nodes(vec![NodeId(0)])).contains("0 edges"));
        assert!(refused(Pool::Nodes(vec![NodeId(2)])).contains("nodes 0 to 1"));
        assert!(NegativeSampler::new(&graph, Pool::All, settings).is_ok());
    }
}
