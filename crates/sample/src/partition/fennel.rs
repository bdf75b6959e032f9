//! FENNEL (Tsourakakis et al., 2014): nodes stream by, and each goes to the partition with the highest gain. OUTRE
//! (section 5.2) adds a penalty for training nodes, so that partitions share these out, too.
//!
//! The gain of partition P for node v is
//!
//! ```text
//!  neighbours of v in P  -  c sqrt(nodes of P)  -  c' sqrt(training nodes of P), the last for training nodes only
//! ```
//!
//! with c = alpha gamma, alpha = k^(gamma - 1) M / N^gamma and gamma = 1.5 for k partitions, N nodes and M edges. c' is
//! c scaled so that both penalties are equal where nodes and training nodes are shared out evenly. A square root is
//! exact on every machine, so the same graph always gives the same partitions.
//!
//! OUTRE intersects sets of nodes, which takes Bloom filters and two levels of partitions. Here every node has the
//! number of its partition, and v's neighbours are counted by partition in O(degree). Of the partitions without a
//! neighbour only the least loaded can have the highest gain, and a tournament knows it. So the choice is exact, and
//! its cost does not depend on the number of partitions.
//!
//! Streamed again, a node is taken out of its partition first and then chooses among all.

use super::PartitionWord;
use super::clusters::NodeVisitor;
use super::least_loaded::{FULL, LeastLoaded};
use crate::topology::StoredId;
use esker_io::prefetch;
use esker_types::{NodeId, PartitionId};
use std::ops::Range;

/// How far ahead the partitions of neighbours are prefetched.
pub(super) const PREFETCH_DISTANCE: usize = 24;

/// The size of a partitioning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionShape {
    /// Nodes of the graph.
    pub nodes: u64,
    /// Its edges, each counted as often as a node meets it.
    pub edges: u64,
    /// Training nodes.
    pub training: u64,
    /// Partitions.
    pub partitions: u32,
}

impl PartitionShape {
    /// The most nodes of one class that a partition may have: 1.1 times the mean, in whole nodes.
    fn cap(&self, count: u64) -> u64 {
        let partitions = self.partitions.max(1) as u64;
        let tenth_more = count as u128 * 11 / (partitions as u128 * 10);
        (tenth_more as u64).max(count.div_ceil(partitions))
    }

    /// The most training nodes of a partition.
    pub fn training_cap(&self) -> u64 {
        self.cap(self.training)
    }

    /// The most other nodes of a partition. Both kinds have their own cap: room for one is never taken by the other,
    /// so every node finds a partition with room.
    pub fn others_cap(&self) -> u64 {
        self.cap(self.nodes - self.training)
    }

    /// The factors of both square roots.
    fn factors(&self) -> (f64, f64) {
        // Without edges there is still a penalty, which shares nodes out.
        let edges = self.edges.max(1) as f64;
        let nodes = self.nodes.max(1) as f64;
        let share = 1.5 * (self.partitions as f64).sqrt() * edges / nodes;
        (share / nodes.sqrt(), share / (self.training.max(1) as f64).sqrt())
    }
}

/// A partition's nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct PartitionLoad {
    nodes: u64,
    training: u64,
    penalty: f64,
    /// For training nodes, in addition.
    training_penalty: f64,
}

/// Partitions while nodes stream by. `W` holds the number of a partition.
pub struct Fennel<W> {
    shape: PartitionShape,
    factors: (f64, f64),
    caps: (u64, u64),
    /// The partition of each node; `partitions` for a node that has none.
    words: Vec<W>,
    /// A bit a node.
    training: Vec<u64>,
    loads: Vec<PartitionLoad>,
    for_others: LeastLoaded,
    for_training: LeastLoaded,
    /// Neighbours of the current node by partition, and those in none.
    counts: Vec<u32>,
    /// Partitions that have some: the first `met_count`.
    met: Vec<u32>,
    met_count: usize,
    /// The current node and its partition so far.
    node: usize,
    before: u32,
    /// Nodes that chose another partition than before.
    moved: u64,
}

impl<W: PartitionWord> Fennel<W> {
    /// Nodes in no partition yet. `training` has a bit a node, set for training nodes.
    pub fn new(shape: PartitionShape, training: Vec<u64>) -> Fennel<W> {
        let words = vec![W::of(shape.partitions); shape.nodes as usize];
        Fennel::continued(shape, training, words)
    }

    /// Nodes in the partitions that an earlier pass chose.
    pub fn continued(shape: PartitionShape, training: Vec<u64>, words: Vec<W>) -> Fennel<W> {
        let mut loads = vec![PartitionLoad::default(); shape.partitions as usize];
        for (node, word) in words.iter().enumerate() {
            if let Some(load) = loads.get_mut(word.index()) {
                load.nodes += 1;
                load.training += training[node / 64] >> (node % 64) & 1;
            }
        }
        let slots = shape.partitions as usize + 1;
        let mut fennel = Fennel {
            shape,
            factors: shape.factors(),
            caps: (shape.others_cap(), shape.training_cap()),
            words,
            training,
            loads,
            for_others: LeastLoaded::new(std::iter::empty()),
            for_training: LeastLoaded::new(std::iter::empty()),
            counts: vec![0; slots],
            met: vec![0; slots + 1],
            met_count: 0,
            node: 0,
            before: shape.partitions,
            moved: 0,
        };
        (0..shape.partitions as usize).for_each(|partition| fennel.weigh(partition));
        fennel.for_others = LeastLoaded::new(fennel.loads.iter().map(|load| fennel.key(load, false)));
        fennel.for_training = LeastLoaded::new(fennel.loads.iter().map(|load| fennel.key(load, true)));
        fennel
    }

    /// Bytes of a partitioning of this shape.
    pub fn bytes_for(nodes: u64, partitions: u32) -> u64 {
        let slots = partitions as u64 + 2;
        let by_partition = slots * (size_of::<PartitionLoad>() as u64 + 4 + 4);
        let by_node = nodes.saturating_mul(size_of::<W>() as u64).saturating_add(nodes / 8 + 8);
        by_node + by_partition + 2 * LeastLoaded::bytes_for(slots)
    }

    /// Begins with the next node, which leaves its partition.
    #[inline(always)]
    pub fn begin(&mut self, node: NodeId) {
        self.node = node.index();
        self.before = self.words[self.node].index() as u32;
        // While it chooses it is in no partition: a self loop counts for none.
        self.words[self.node] = W::of(self.shape.partitions);
        self.met_count = 0;
    }

    /// Counts some of its neighbours: those of `words` in `range`. The words after them are met next.
    #[inline(always)]
    pub fn count<I: StoredId>(&mut self, words: &[I], range: Range<usize>) {
        for at in range {
            if let Some(soon) = words.get(at + PREFETCH_DISTANCE) {
                prefetch(&self.words, soon.index());
            }
            let partition = self.words[words[at].index()].index();
            // Without a branch: whether a partition is met first is hard to predict.
            self.met[self.met_count] = partition as u32;
            self.met_count += (self.counts[partition] == 0) as usize;
            self.counts[partition] += 1;
        }
    }

    /// Puts the node into the partition with the highest gain. Of equal gains the lowest partition has it.
    #[inline]
    pub fn choose(&mut self) -> PartitionId {
        let (node, before) = (self.node, self.before);
        let is_training = self.training[node / 64] >> (node % 64) & 1 == 1;
        self.add(before, is_training, -1);
        let least = if is_training { self.for_training.first() } else { self.for_others.first() };
        let mut best = (f64::NEG_INFINITY, u32::MAX);
        self.consider(least, is_training, &mut best);
        if before < self.shape.partitions {
            // The tournament knows it with the node that has just left.
            self.consider(before, is_training, &mut best);
        }
        for at in 0..self.met_count {
            let partition = self.met[at];
            self.consider(partition, is_training, &mut best);
        }
        for at in 0..self.met_count {
            self.counts[self.met[at] as usize] = 0;
        }
        let partition = best.1;
        assert!(best.0 > f64::NEG_INFINITY, "caps leave room for every node");
        self.add(partition, is_training, 1);
        self.words[node] = W::of(partition);
        if partition != before {
            self.moved += 1;
            self.play_again(before);
            self.play_again(partition);
        }
        PartitionId(partition)
    }

    /// Makes a partition the best one if its gain is higher, or equal and its number lower.
    #[inline(always)]
    fn consider(&self, partition: u32, is_training: bool, best: &mut (f64, u32)) {
        let Some(load) = self.loads.get(partition as usize) else { return };
        let gain = self.counts[partition as usize] as f64 - self.key(load, is_training);
        if gain > best.0 || gain == best.0 && partition < best.1 {
            *best = (gain, partition);
        }
    }

    /// The penalty of a partition for a node; `FULL` if it has no room.
    #[inline(always)]
    fn key(&self, load: &PartitionLoad, is_training: bool) -> f64 {
        match is_training {
            true if load.training < self.caps.1 => load.penalty + load.training_penalty,
            false if load.nodes - load.training < self.caps.0 => load.penalty,
            _ => FULL,
        }
    }

    /// Adds a node to a partition, or takes it out.
    #[inline(always)]
    fn add(&mut self, partition: u32, is_training: bool, by: i64) {
        let Some(load) = self.loads.get_mut(partition as usize) else { return };
        load.nodes = load.nodes.wrapping_add_signed(by);
        load.training = load.training.wrapping_add_signed(by * is_training as i64);
        self.weigh(partition as usize);
    }

    #[inline(always)]
    fn weigh(&mut self, partition: usize) {
        let load = &mut self.loads[partition];
        load.penalty = self.factors.0 * (load.nodes as f64).sqrt();
        load.training_penalty = self.factors.1 * (load.training as f64).sqrt();
    }

    #[inline(always)]
    fn play_again(&mut self, partition: u32) {
        let Some(load) = self.loads.get(partition as usize) else { return };
        let (others, training) = (self.key(load, false), self.key(load, true));
        self.for_others.set(partition, others);
        self.for_training.set(partition, training);
    }

    /// Nodes that chose another partition than they had.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Starts to count moved nodes from 0.
    pub fn begin_pass(&mut self) {
        self.moved = 0;
    }

    /// The partition of each node.
    pub fn words(&self) -> &[W] {
        &self.words
    }

    /// The most nodes and the most training nodes of a partition.
    pub fn largest(&self) -> (u64, u64) {
        let most = |count: fn(&PartitionLoad) -> u64| self.loads.iter().map(count).max().unwrap_or(0);
        (most(|load| load.nodes), most(|load| load.training))
    }

    /// Partitions without a node.
    pub fn empty(&self) -> u64 {
        self.loads.iter().filter(|load| load.nodes == 0).count() as u64
    }
}

impl<W: PartitionWord> NodeVisitor for Fennel<W> {
    #[inline(always)]
    fn begin(&mut self, node: NodeId) {
        Fennel::begin(self, node);
    }

    #[inline(always)]
    fn count<I: StoredId>(&mut self, words: &[I], range: Range<usize>) {
        Fennel::count(self, words, range);
    }

    #[inline(always)]
    fn end(&mut self) {
        self.choose();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A graph by the neighbours of its nodes, and its training nodes.
    #[derive(Debug, Clone)]
    struct SmallGraph {
        lists: Vec<Vec<u32>>,
        training: Vec<bool>,
    }

    impl SmallGraph {
        fn shape(&self, partitions: u32) -> PartitionShape {
            PartitionShape {
                nodes: self.lists.len() as u64,
                edges: self.lists.iter().map(|list| list.len() as u64).sum(),
                training: self.training.iter().filter(|is| **is).count() as u64,
                partitions,
            }
        }

        fn training_bits(&self) -> Vec<u64> {
            let bits = |some: &[bool]| some.iter().rev().fold(0, |bits, is| bits << 1 | *is as u64);
            self.training.chunks(64).map(bits).collect()
        }

        /// The partitions after each pass, as the fast path chooses them.
        fn partitioned<W: PartitionWord>(&self, partitions: u32, passes: usize) -> Vec<Vec<u32>> {
            let mut fennel = Fennel::<W>::new(self.shape(partitions), self.training_bits());
            let one_pass = |_| {
                for (node, list) in (0..).zip(&self.lists) {
                    fennel.begin(NodeId(node));
                    fennel.count(list, 0..list.len());
                    fennel.choose();
                }
                fennel.words().iter().map(|word| word.index() as u32).collect()
            };
            (0..passes).map(one_pass).collect()
        }

        /// The same from the definition: every node looks at every partition, and everything is counted anew.
        fn naive(&self, partitions: u32, passes: usize) -> Vec<Vec<u32>> {
            let shape = self.shape(partitions);
            let (c, c_training) = shape.factors();
            let mut of: Vec<Option<u32>> = vec![None; self.lists.len()];
            let mut after = Vec::new();
            for _ in 0..passes {
                for node in 0..self.lists.len() {
                    of[node] = None;
                    let is_training = self.training[node];
                    let gain = |partition: u32| {
                        let inside = || (0..of.len()).filter(|other| of[*other] == Some(partition));
                        let training = inside().filter(|other| self.training[*other]).count();
                        let (nodes, others) = (inside().count(), inside().count() - training);
                        let full = match is_training {
                            true => training as u64 >= shape.training_cap(),
                            false => others as u64 >= shape.others_cap(),
                        };
                        let near = |other: &&u32| of[**other as usize] == Some(partition);
                        let count = self.lists[node].iter().filter(near).count() as f64;
                        let training = if is_training { c_training * (training as f64).sqrt() } else { 0.0 };
                        (!full).then(|| count - (c * (nodes as f64).sqrt() + training))
                    };
                    let mut best: Option<(f64, u32)> = None;
                    for partition in 0..partitions {
                        if let Some(gain) = gain(partition)
                            && best.is_none_or(|best| gain > best.0)
                        {
                            best = Some((gain, partition));
                        }
                    }
                    of[node] = Some(best.unwrap().1);
                }
                after.push(of.iter().map(|partition| partition.unwrap()).collect());
            }
            after
        }

        fn check(&self, partitions: u32, passes: usize) {
            let found = self.partitioned::<u16>(partitions, passes);
            assert_eq!(found, self.naive(partitions, passes));
            assert_eq!(found, self.partitioned::<u32>(partitions, passes));
            let shape = self.shape(partitions);
            for (partition, words) in (0..partitions).flat_map(|p| found.iter().map(move |words| (p, words)))
            {
                let inside = || words.iter().zip(&self.training).filter(|(word, _)| **word == partition);
                let training = inside().filter(|(_, is)| **is).count() as u64;
                assert!(training <= shape.training_cap());
                assert!(inside().count() as u64 - training <= shape.others_cap());
            }
        }
    }

    fn graph(edges: &[(u32, u32)], training: &[bool]) -> SmallGraph {
        let mut lists = vec![Vec::new(); training.len()];
        edges.iter().for_each(|(source, target)| lists[*target as usize].push(*source));
        SmallGraph { lists, training: training.to_vec() }
    }

    proptest! {
        #[test]
        fn every_node_chooses_as_if_it_had_looked_at_all_partitions(
            training in prop::collection::vec(any::<bool>(), 1..60),
            ends in prop::collection::vec((any::<u32>(), any::<u32>()), 0..300),
            partitions in 1u32..70,
            passes in 1usize..4,
        ) {
            let count = training.len() as u32;
            let edges: Vec<_> = ends.iter().map(|(a, b)| (a % count, b % count)).collect();
            graph(&edges, &training).check(partitions, passes);
        }

        #[test]
        fn hubs_with_more_neighbours_than_a_partition_holds_choose_as_others_do(
            others in prop::collection::vec(1u32..80, 0..120),
            partitions in 2u32..12,
        ) {
            let to_hub = (1..80).map(|node| (node, 0));
            let from_hub = (1..80).map(|node| (0, node));
            let edges: Vec<_> = to_hub.chain(from_hub).chain(others.iter().map(|node| (*node, 80 - *node))).collect();
            let training: Vec<bool> = (0..80).map(|node| node % 3 == 0).collect();
            graph(&edges, &training).check(partitions, 3);
        }
    }

    #[test]
    fn one_partition_takes_everything() {
        let all = graph(&[(0, 1), (1, 2), (2, 2)], &[true, false, true]);
        assert_eq!(all.partitioned::<u16>(1, 2), [vec![0; 3], vec![0; 3]]);
    }

    #[test]
    fn with_more_partitions_than_nodes_every_partition_has_one_node_at_most() {
        let all = graph(&[(0, 1), (1, 0), (2, 1)], &[false; 3]);
        let words = all.partitioned::<u16>(9, 3).pop().unwrap();
        let mut sorted = words.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 3, "{words:?}");
    }

    #[test]
    fn without_edges_nodes_are_shared_out_evenly() {
        let words = graph(&[], &[false; 100]).partitioned::<u32>(10, 1).pop().unwrap();
        let sizes: Vec<usize> = (0..10).map(|p| words.iter().filter(|word| **word == p).count()).collect();
        assert_eq!(sizes, [10; 10]);
    }

    #[test]
    fn self_loops_keep_no_node_where_it_is() {
        // Node 0 loops often, and its neighbours are in the other partition.
        let mut edges = vec![(0, 0); 20];
        edges.extend([(1, 0), (2, 0), (1, 2), (2, 1), (3, 1), (3, 2), (1, 3), (2, 3)]);
        let looped = graph(&edges, &[false; 8]);
        let bare = SmallGraph { lists: looped.lists.clone(), ..looped.clone() };
        let without: Vec<Vec<u32>> = (0..)
            .zip(&bare.lists)
            .map(|(node, list)| list.iter().copied().filter(|other| *other != node).collect())
            .collect();
        let shape = looped.shape(2);
        let run = |lists: &[Vec<u32>]| {
            let mut fennel = Fennel::<u16>::new(shape, vec![0]);
            for _ in 0..3 {
                for (node, list) in (0..).zip(lists) {
                    fennel.begin(NodeId(node));
                    fennel.count(list, 0..list.len());
                    fennel.choose();
                }
            }
            fennel.words().to_vec()
        };
        assert_eq!(run(&looped.lists), run(&without));
    }

    #[test]
    fn passes_find_two_cliques() {
        let clique = |from: u32| (from..from + 8).flat_map(move |a| (from..from + 8).map(move |b| (a, b)));
        let pairs = clique(0).chain(clique(8)).filter(|(a, b)| a != b);
        // Nodes of both alternate in the stream.
        let name = |node: u32| node % 8 * 2 + node / 8;
        let edges: Vec<_> = pairs.map(|(a, b)| (name(a), name(b))).collect();
        let words = graph(&edges, &[true; 16]).partitioned::<u16>(2, 3).pop().unwrap();
        assert!((0..16).all(|node| words[node] == words[node % 2]), "{words:?}");
        assert_ne!(words[0], words[1]);
    }

    #[test]
    fn a_pass_that_is_continued_is_the_pass_that_was_not_interrupted() {
        let edges: Vec<_> = (0..200u32).map(|at| (at * 7 % 50, at * 13 % 50)).collect();
        let all = graph(&edges, &(0..50).map(|node| node % 4 == 0).collect::<Vec<_>>());
        let expected = all.partitioned::<u16>(6, 3);
        for done in 1..3 {
            let words = expected[done - 1].iter().map(|word| *word as u16).collect();
            let mut fennel = Fennel::<u16>::continued(all.shape(6), all.training_bits(), words);
            for _ in done..3 {
                for (node, list) in (0..).zip(&all.lists) {
                    fennel.begin(NodeId(node));
                    fennel.count(list, 0..list.len());
                    fennel.choose();
                }
            }
            assert!(fennel.words().iter().map(|word| *word as u32).eq(expected[2].iter().copied()));
        }
    }

    #[test]
    fn penalties_are_equal_where_all_is_shared_out_evenly() {
        let shape = PartitionShape { nodes: 10_000, edges: 150_000, training: 900, partitions: 16 };
        let (c, c_training) = shape.factors();
        let (nodes, training) = (10_000.0 / 16.0, 900.0 / 16.0);
        let (one, other) = (c * f64::sqrt(nodes), c_training * f64::sqrt(training));
        assert!((one / other - 1.0).abs() < 1e-12, "{one} {other}");
        // alpha gamma |P|^(gamma - 1) with the formula of the paper.
        let alpha = 16f64.powf(0.5) * 150_000.0 / 10_000f64.powf(1.5);
        assert!((one / (alpha * 1.5 * nodes.powf(0.5)) - 1.0).abs() < 1e-12);
    }
}
