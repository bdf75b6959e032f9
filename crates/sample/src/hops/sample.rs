//! A sample in the order of PyG's loaders.

use crate::Result;
use crate::memory::{Ledger, held};
use esker_types::{EdgeId, NodeId};
use xxhash_rust::xxh3::Xxh3;

/// A sampled neighbourhood in the order of hops. The next batch reuses its buffers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HopSample {
    /// The seeds as given, then every other node once, in order of discovery: that of `sources`. In disjoint samples a node
    /// may be in several trees, and is listed once for each.
    pub nodes: Vec<NodeId>,
    /// The tree of each node, which is the number of its seed. Empty unless samples are disjoint.
    pub trees: Vec<u32>,
    /// The neighbour at each edge, as an index into `nodes`. Of repeated seeds the first is meant.
    pub sources: Vec<u32>,
    /// The node at each edge whose neighbour was sampled, as an index into `nodes`; ascending.
    pub targets: Vec<u32>,
    /// The id of each edge. Edges of a target ascend by their position in its adjacency.
    pub edges: Vec<EdgeId>,
    /// How many nodes each hop discovered, the seeds first: one more than there are hops.
    pub nodes_by_hop: Vec<usize>,
    /// How many edges each hop sampled. Empty if edges are induced or bidirectional: these belong to no hop.
    pub edges_by_hop: Vec<usize>,
}

impl HopSample {
    /// Allocated bytes, including room for later batches.
    pub fn allocated_bytes(&self) -> u64 {
        let words = held(&self.trees) + held(&self.sources) + held(&self.targets);
        words + held(&self.nodes) + held(&self.edges) + held(&self.nodes_by_hop) + held(&self.edges_by_hop)
    }

    /// Bytes of its arrays.
    pub fn bytes(&self) -> u64 {
        let words = self.trees.len() + self.sources.len() + self.targets.len();
        let wide = self.nodes.len() + self.edges.len() + self.nodes_by_hop.len() + self.edges_by_hop.len();
        words as u64 * 4 + wide as u64 * 8
    }

    /// A hash of lengths and contents of every array. Equal samples have equal digests.
    pub fn digest(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut array = |numbers: &mut dyn ExactSizeIterator<Item = u64>| {
            hash.update(&(numbers.len() as u64).to_le_bytes());
            numbers.for_each(|number| hash.update(&number.to_le_bytes()));
        };
        array(&mut self.nodes.iter().map(|node| node.0));
        for words in [&self.trees, &self.sources, &self.targets] {
            array(&mut words.iter().map(|word| *word as u64));
        }
        array(&mut self.edges.iter().map(|edge| edge.0));
        for counts in [&self.nodes_by_hop, &self.edges_by_hop] {
            array(&mut counts.iter().map(|count| *count as u64));
        }
        hash.digest()
    }

    /// Adds the reverse of every edge, and takes every pair of nodes once: by target, then by source. Of equal pairs the
    /// first stays, edges before those that are reversed. Then edges belong to no hop.
    pub(super) fn make_bidirectional(&mut self, ledger: &mut Ledger) -> Result<()> {
        let count = self.sources.len();
        let mut pairs: Vec<(u64, EdgeId)> = Vec::new();
        // Sorting takes as much again.
        ledger.charge(2 * (2 * count * size_of::<(u64, EdgeId)>()) as u64)?;
        pairs.reserve_exact(2 * count);
        let pair = |target: u32, source: u32| (target as u64) << 32 | source as u64;
        let edges = || self.sources.iter().zip(&self.targets).zip(&self.edges);
        pairs.extend(edges().map(|((source, target), edge)| (pair(*target, *source), *edge)));
        pairs.extend(edges().map(|((source, target), edge)| (pair(*source, *target), *edge)));
        // It is stable.
        radsort::sort_by_key(&mut pairs, |(pair, _)| *pair);
        pairs.dedup_by_key(|(pair, _)| *pair);
        self.clear_edges();
        ledger.reserve(&mut self.sources, pairs.len())?;
        ledger.reserve(&mut self.targets, pairs.len())?;
        ledger.reserve(&mut self.edges, pairs.len())?;
        self.sources.extend(pairs.iter().map(|(pair, _)| *pair as u32));
        self.targets.extend(pairs.iter().map(|(pair, _)| (pair >> 32) as u32));
        self.edges.extend(pairs.iter().map(|(_, edge)| *edge));
        ledger.release(2 * (2 * count * size_of::<(u64, EdgeId)>()) as u64);
        Ok(())
    }

    /// Forgets all edges.
    pub(super) fn clear_edges(&mut self) {
        self.sources.clear();
        self.targets.clear();
        self.edges.clear();
        self.edges_by_hop.clear();
    }

    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.trees.clear();
        self.nodes_by_hop.clear();
        self.clear_edges();
    }
}
