//! One hop of a [`HopSampler`](super::HopSampler): draws in waves of nodes, each step some nodes after the previous one,
//! as `sampler/hop.rs` does. A hop sample lists what is found as it is found, so edges go straight to their place.

use super::draw::{Expanded, HopDraw, HopDrawer};
use super::{HopGraph, HopSample};
use crate::memory::{Ledger, held};
use crate::relabel::{NewNodes, Relabel};
use crate::sampler::{
    CLUSTER, LAG, MOST_NODES, SHARED_WAVE_NODES, WAVE_NODES, ask_for, ask_for_head, ranges, relabel,
};
use crate::topology::StoredId;
use crate::{Result, SampleError};
use esker_types::{EdgeId, NodeId};
use rayon::prelude::*;
use std::ops::Range;

/// How a batch tells its nodes apart: by their ids, or by their tree and id.
pub(super) trait Naming<W: StoredId>: Copy + Sync {
    /// What the table from nodes to local indices is asked for.
    type Word: StoredId;
    /// The word of a node that is found from a node of `tree`.
    fn word(self, id: W, tree: u32) -> Self::Word;
    /// The node and the tree of a word.
    fn node(self, word: NodeId) -> (NodeId, u32);
    /// The tree of a node in the sample.
    fn tree(self, out: &HopSample, local_index: usize) -> u32;
}

/// Every node is in the batch once.
#[derive(Clone, Copy)]
pub(super) struct ById;

impl<W: StoredId> Naming<W> for ById {
    type Word = W;
    #[inline(always)]
    fn word(self, id: W, _: u32) -> W {
        id
    }
    #[inline(always)]
    fn node(self, word: NodeId) -> (NodeId, u32) {
        (word, 0)
    }
    #[inline(always)]
    fn tree(self, _: &HopSample, _: usize) -> u32 {
        0
    }
}

/// Every node is in each tree once. The tree is above the bits of the node.
#[derive(Clone, Copy)]
pub(super) struct ByTree {
    node_bits: u32,
}

impl ByTree {
    /// For a graph of this many nodes and a batch of this many seeds.
    pub fn new(nodes: u64, seeds: usize) -> Result<ByTree> {
        let bits = |count: u64| u64::BITS - count.saturating_sub(1).leading_zeros();
        let node_bits = bits(nodes);
        match node_bits + bits(seeds as u64) <= u64::BITS && seeds as u64 <= MOST_NODES && node_bits < u64::BITS {
            true => Ok(ByTree { node_bits }),
            false => Err(SampleError::TooManyTrees { seeds, nodes }),
        }
    }
}

impl<W: StoredId> Naming<W> for ByTree {
    type Word = u64;
    #[inline(always)]
    fn word(self, id: W, tree: u32) -> u64 {
        (tree as u64) << self.node_bits | id.node().0
    }
    #[inline(always)]
    fn node(self, word: NodeId) -> (NodeId, u32) {
        let node = word.0 & ((1 << self.node_bits) - 1);
        (NodeId(node), (word.0 >> self.node_bits) as u32)
    }
    #[inline(always)]
    fn tree(self, out: &HopSample, local_index: usize) -> u32 {
        out.trees[local_index]
    }
}

/// The drawn neighbours of some nodes.
#[derive(Debug)]
pub(super) struct HopWave<W> {
    lengths: Vec<u32>,
    /// The first `count` of these are in use. The rest is room from earlier waves.
    positions: Vec<u32>,
    words: Vec<W>,
    count: usize,
    /// Filled if another thread lists the wave's edges.
    edges: Vec<EdgeId>,
    drawer: HopDrawer,
}

impl<W> Default for HopWave<W> {
    fn default() -> HopWave<W> {
        HopWave {
            lengths: Vec::new(),
            positions: Vec::new(),
            words: Vec::new(),
            count: 0,
            edges: Vec::new(),
            drawer: HopDrawer::default(),
        }
    }
}

impl<W> HopWave<W> {
    pub fn bytes(&self) -> u64 {
        let words = held(&self.lengths) + held(&self.positions) + held(&self.words);
        words + held(&self.edges) + self.drawer.bytes()
    }
}

/// Waves being drawn (`ahead`) and waves being relabelled (`behind`).
#[derive(Debug)]
pub(super) struct HopWaves<W> {
    ahead: Vec<HopWave<W>>,
    behind: Vec<HopWave<W>>,
}

impl<W> Default for HopWaves<W> {
    fn default() -> HopWaves<W> {
        HopWaves { ahead: Vec::new(), behind: Vec::new() }
    }
}

impl<W> HopWaves<W> {
    pub fn bytes(&self) -> u64 {
        self.ahead.iter().chain(&self.behind).map(HopWave::bytes).sum()
    }
}

/// What to expand.
pub(super) struct HopToExpand<'a, G, N> {
    pub graph: &'a G,
    pub naming: N,
    pub draw: HopDraw<'a>,
    /// The nodes of the hop, as indices into those of the sample.
    pub nodes: Range<usize>,
    /// The most nodes that the sample may have.
    pub most_nodes: u64,
    pub threads: usize,
}

/// Where a hop goes.
pub(super) struct HopInto<'a, R> {
    pub table: &'a mut R,
    pub new_nodes: &'a mut NewNodes,
    pub out: &'a mut HopSample,
    pub ledger: &'a mut Ledger,
}

impl<G: HopGraph, N: Naming<G::StoredId>> HopToExpand<'_, G, N> {
    /// Draws neighbours for all nodes of the hop. Edges are appended to the sample; nodes that are found for the first
    /// time are in `new_nodes`.
    pub fn expand<R: Relabel + Send>(
        &self,
        waves: &mut HopWaves<N::Word>,
        into: &mut HopInto<R>,
    ) -> Result<()> {
        into.new_nodes.clear();
        if self.threads == 1 || self.nodes.len() <= SHARED_WAVE_NODES {
            waves.behind.resize_with(waves.behind.len().max(1), HopWave::default);
            let wave = &mut waves.behind[0];
            for range in self.ranges(WAVE_NODES) {
                let entries = self.make_room(wave, range.clone(), &into.out.nodes, false, into.ledger)?;
                self.reserve(entries, into.out.nodes.len(), into)?;
                self.draw_and_relabel(wave, range, into);
            }
            return Ok(());
        }
        // Draws the next waves while the previous ones are relabelled.
        let all: Vec<Range<usize>> = self.ranges(SHARED_WAVE_NODES).collect();
        let mut drawn: &[Range<usize>] = &[];
        for group in all.chunks(self.threads) {
            waves.ahead.resize_with(waves.ahead.len().max(group.len()), HopWave::default);
            let ahead = &mut waves.ahead[..group.len()];
            for (wave, range) in ahead.iter_mut().zip(group) {
                self.make_room(wave, range.clone(), &into.out.nodes, true, into.ledger)?;
            }
            let behind = &mut waves.behind[..drawn.len()];
            // Drawing reads the nodes of the sample, and relabelling appends to its edges.
            let nodes = std::mem::take(&mut into.out.nodes);
            let trees = std::mem::take(&mut into.out.trees);
            let frontier = HopSample { nodes, trees, ..HopSample::default() };
            let draw = || {
                let each = ahead.par_iter_mut().zip(group);
                each.for_each(|(wave, range)| self.draw_all(wave, range.clone(), &frontier));
            };
            let relabel = || self.relabel_all(behind, drawn, frontier.nodes.len(), into);
            let (result, ()) = rayon::join(relabel, draw);
            (into.out.nodes, into.out.trees) = (frontier.nodes, frontier.trees);
            result?;
            std::mem::swap(&mut waves.ahead, &mut waves.behind);
            drawn = group;
        }
        let known = into.out.nodes.len();
        self.relabel_all(&mut waves.behind[..drawn.len()], drawn, known, into)
    }

    fn ranges(&self, step: usize) -> impl Iterator<Item = Range<usize>> {
        let first = self.nodes.start;
        ranges(self.nodes.len(), step).map(move |range| first + range.start..first + range.end)
    }

    /// Makes room in a wave for what the nodes of `range` can draw. Returns that number of entries.
    fn make_room(
        &self,
        wave: &mut HopWave<N::Word>,
        range: Range<usize>,
        nodes: &[NodeId],
        with_edges: bool,
        ledger: &mut Ledger,
    ) -> Result<usize> {
        let (entries, longest) = self.draw.room(self.graph, &nodes[range.clone()]);
        wave.drawer.reserve(&self.draw, longest, ledger)?;
        ledger.extend_to(&mut wave.positions, entries, 0)?;
        ledger.extend_to(&mut wave.words, entries, N::Word::default())?;
        wave.lengths.clear();
        wave.edges.clear();
        wave.count = 0;
        ledger.reserve(&mut wave.lengths, range.len())?;
        if with_edges {
            ledger.reserve(&mut wave.edges, entries)?;
        }
        Ok(entries)
    }

    /// Makes room for this many more edges of a sample that has `known` nodes.
    fn reserve<R: Relabel>(&self, entries: usize, known: usize, into: &mut HopInto<R>) -> Result<()> {
        let HopInto { table, new_nodes, out, ledger } = into;
        let local_indices = known as u64 + new_nodes.nodes().len() as u64;
        let new = (entries as u64).min(self.most_nodes.saturating_sub(local_indices)) as usize;
        if local_indices + new as u64 > MOST_NODES {
            return Err(SampleError::TooManyNodes { nodes: local_indices });
        }
        table.reserve(local_indices as usize + new, ledger)?;
        new_nodes.reserve(new, ledger)?;
        ledger.reserve(&mut out.sources, entries)?;
        ledger.reserve(&mut out.targets, entries)?;
        ledger.reserve(&mut out.edges, entries)
    }

    /// Draws, reads and relabels node by node, each step some nodes after the previous one. The CPU computes draws while
    /// the cache lines that other nodes need, of adjacency and table, are loaded.
    fn draw_and_relabel<R: Relabel>(
        &self,
        wave: &mut HopWave<N::Word>,
        range: Range<usize>,
        into: &mut HopInto<R>,
    ) {
        let HopInto { table, new_nodes, out, .. } = into;
        let (count, first_new) = (range.len(), out.nodes.len() as u32);
        let (mut gathered, mut relabelled) = (0, 0);
        for step in 0..count + 2 * LAG {
            self.prefetch_next(&out.nodes, &range, step);
            if step < count {
                self.draw_node(wave, out, range.start + step);
            }
            if let Some(index) = step.checked_sub(LAG).filter(|index| *index < count) {
                let words = self.gather_node(wave, out, range.start + index, index, gathered);
                words.iter().for_each(|word| table.prefetch(word.node()));
                let node = out.nodes[range.start + index];
                let end = gathered + wave.lengths[index] as usize;
                let positions = &wave.positions[gathered..end];
                out.edges.extend(positions.iter().map(|position| self.graph.edge(node, *position)));
                gathered = end;
            }
            if let Some(index) = step.checked_sub(2 * LAG) {
                let length = wave.lengths[index] as usize;
                let words = &wave.words[relabelled..relabelled + length];
                let start = out.sources.len();
                // There is room.
                out.sources.resize(start + length, 0);
                table.assign(words, first_new, new_nodes, &mut out.sources[start..]);
                out.targets.extend(std::iter::repeat_n((range.start + index) as u32, length));
                relabelled += length;
            }
        }
    }

    /// Draws and reads. Another thread relabels.
    fn draw_all(&self, wave: &mut HopWave<N::Word>, range: Range<usize>, frontier: &HopSample) {
        let (count, mut gathered) = (range.len(), 0);
        for step in 0..count + LAG {
            self.prefetch_next(&frontier.nodes, &range, step);
            if step < count {
                self.draw_node(wave, frontier, range.start + step);
            }
            if let Some(index) = step.checked_sub(LAG) {
                self.gather_node(wave, frontier, range.start + index, index, gathered);
                let end = gathered + wave.lengths[index] as usize;
                let (node, positions) = (frontier.nodes[range.start + index], &wave.positions[gathered..end]);
                wave.edges.extend(positions.iter().map(|position| self.graph.edge(node, *position)));
                gathered = end;
            }
        }
    }

    /// Relabels drawn waves and lists their edges. The sample has `known` nodes.
    fn relabel_all<R: Relabel>(
        &self,
        waves: &mut [HopWave<N::Word>],
        all: &[Range<usize>],
        known: usize,
        into: &mut HopInto<R>,
    ) -> Result<()> {
        for (wave, range) in waves.iter_mut().zip(all) {
            self.reserve(wave.count, known, into)?;
            let HopInto { table, new_nodes, out, .. } = &mut *into;
            let start = out.sources.len();
            out.sources.resize(start + wave.count, 0);
            let words = &wave.words[..wave.count];
            relabel(words, known as u32, *table, new_nodes, &mut out.sources[start..]);
            out.edges.extend_from_slice(&wave.edges);
            for (target, length) in range.clone().zip(&wave.lengths) {
                out.targets.extend(std::iter::repeat_n(target as u32, *length as usize));
            }
        }
        Ok(())
    }

    /// Draws the positions of one node and prefetches what they lead to.
    #[inline(always)]
    fn draw_node(&self, wave: &mut HopWave<N::Word>, sample: &HopSample, at: usize) {
        let node = sample.nodes[at];
        let list = self.graph.list(node);
        let expanded = Expanded {
            node,
            tree: self.naming.tree(sample, at),
            degree: list.len() as u32,
            start: || self.graph.start(node),
        };
        let slots = &mut wave.positions[wave.count..];
        let taken = wave.drawer.draw(&self.draw, expanded, slots);
        let slots = &wave.positions[wave.count..wave.count + taken];
        ask_for(&list, slots);
        slots.iter().for_each(|position| self.graph.prefetch_edge(node, *position));
        wave.lengths.push(taken as u32);
        wave.count += taken;
    }

    /// Reads the neighbours of node `index` of the wave. Its entries start at `start`.
    #[inline(always)]
    fn gather_node<'w>(
        &self,
        wave: &'w mut HopWave<N::Word>,
        sample: &HopSample,
        at: usize,
        index: usize,
        start: usize,
    ) -> &'w [N::Word] {
        let end = start + wave.lengths[index] as usize;
        let (words, positions) = (&mut wave.words[start..end], &wave.positions[start..end]);
        if !words.is_empty() {
            let (list, tree) = (self.graph.list(sample.nodes[at]), self.naming.tree(sample, at));
            if list.second.is_empty() {
                let first = list.first;
                let ids = positions.iter().map(|at| first[*at as usize]);
                words.iter_mut().zip(ids).for_each(|(word, id)| *word = self.naming.word(id, tree));
            } else {
                let ids = positions.iter().map(|at| list.at(*at as usize));
                words.iter_mut().zip(ids).for_each(|(word, id)| *word = self.naming.word(id, tree));
            }
        }
        words
    }

    /// Every few steps, prefetches the offsets of nodes to come, and the first neighbours of the nodes before those.
    #[inline(always)]
    fn prefetch_next(&self, nodes: &[NodeId], range: &Range<usize>, step: usize) {
        let offsets = |some: Range<usize>| {
            nodes.get(some.start..some.end.min(range.end)).into_iter().flatten().for_each(|node| self.graph.prefetch(*node));
        };
        let heads = |some: Range<usize>| {
            let nodes = nodes.get(some.start..some.end.min(range.end)).into_iter().flatten();
            nodes.for_each(|node| {
                let list = self.graph.list(*node);
                ask_for_head(&list);
                self.draw.choice.prefetch(self.graph, *node, list.len() as u32);
            });
        };
        if step == 0 {
            offsets(range.start..range.start + 2 * CLUSTER);
            heads(range.start..range.start + CLUSTER);
        }
        if step.is_multiple_of(CLUSTER) {
            let next = range.start + step + CLUSTER;
            offsets(next + CLUSTER..next + 2 * CLUSTER);
            heads(next..next + CLUSTER);
        }
    }
}
