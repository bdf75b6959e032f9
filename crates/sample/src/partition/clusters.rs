//! Clusters from which partitions start. A node that streams by knows only the partitions of its neighbours, so FENNEL
//! alone cuts communities whose first nodes went apart. Clusters grow from the graph itself, without partitions, in the
//! manner of multilevel partitioners, but streamed:
//!
//! 1. *Propagation*: every node is a cluster; nodes stream by, and each joins the cluster of most of its neighbours that has
//!    room (size-constrained label propagation, Meyerhenke, Sanders and Schulz, 2014).
//! 2. *Merging*: in each round the edges stream by, and each cluster remembers a few neighbouring clusters with which it
//!    shares many edges (the counters of Misra and Gries). Then it merges with that of most edges for its size, if both
//!    together have room. Room doubles from round to round, up to a partition.
//! 3. *Seeds*: the largest clusters are partitions. The nodes of all others have none yet, and FENNEL places them.
//!
//! Everything goes by node and cluster numbers in order, with integers, so the same graph always has the same clusters. In
//! memory are a label per node, and less than four bytes more per node for counters: fewer clusters have more of them.

use super::fennel::{PREFETCH_DISTANCE, PartitionShape};
use crate::NodeSet;
use crate::topology::StoredId;
use esker_io::prefetch;
use esker_types::NodeId;
use std::ops::Range;

/// Nodes of a cluster that grows node by node, at most.
const PROPAGATED: u8 = 32;
/// Passes in which clusters grow node by node.
pub(super) const PROPAGATIONS: u32 = 2;
/// Rounds with room for a whole partition, at most.
const LAST_ROUNDS: u32 = 4;
/// Rounds end when fewer than one in this many clusters merges.
const FEW_MERGES: u64 = 64;
/// Clusters that merge, at most: one in so many nodes. Smaller ones are left to FENNEL.
const NODES_PER_CLUSTER: u64 = 6;
/// Bytes of counters per node, in hundredths, and counters of a cluster at most.
const COUNTER_CENTIBYTES: u64 = 220;
const MOST_COUNTERS: u64 = 16;
/// Bytes of a counter.
const COUNTER_BYTES: u64 = 6;
/// Nodes of a cluster at most: its nodes are counted in 16 bits.
const MOST_NODES: u64 = 60_000;
/// Smaller partitions are not worth clusters.
const LEAST_NODES: u64 = 4;
/// The label of a node without a cluster.
const NONE: u32 = u32::MAX;

/// Nodes with their neighbours, in order.
pub(super) trait NodeVisitor {
    /// The next node.
    fn begin(&mut self, node: NodeId);
    /// Some of its neighbours: those of `words` in `range`. The words after them are met next.
    fn count<I: StoredId>(&mut self, words: &[I], range: Range<usize>);
    /// It has no more.
    fn end(&mut self);
}

/// Counts by label, for the neighbours of one node: as many slots as it needs, whatever the number of labels.
#[derive(Debug, Default)]
struct LabelCounts {
    /// Label and count; a count of 0 is a free slot.
    slots: Vec<(u32, u32)>,
    /// Slots in use, in order of first appearance.
    met: Vec<u32>,
}

impl LabelCounts {
    fn slot(&self, label: u32) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = (label.wrapping_mul(0x9E37_79B1) >> 7) as usize & mask;
        while self.slots[at].1 > 0 && self.slots[at].0 != label {
            at = (at + 1) & mask;
        }
        at
    }

    #[inline]
    fn add(&mut self, label: u32) {
        if self.met.len() * 2 >= self.slots.len() {
            self.grow();
        }
        let at = self.slot(label);
        if self.slots[at].1 == 0 {
            self.met.push(at as u32);
        }
        self.slots[at] = (label, self.slots[at].1 + 1);
    }

    fn grow(&mut self) {
        let found: Vec<(u32, u32)> = self.met.drain(..).map(|at| self.slots[at as usize]).collect();
        let slots = (self.slots.len() * 2).max(64);
        self.slots.clear();
        self.slots.resize(slots, (0, 0));
        for (label, count) in found {
            let at = self.slot(label);
            self.slots[at] = (label, count);
            self.met.push(at as u32);
        }
    }

    fn of(&self, label: u32) -> u32 {
        if self.slots.is_empty() { 0 } else { self.slots[self.slot(label)].1 }
    }

    fn clear(&mut self) {
        self.met.drain(..).for_each(|at| self.slots[at as usize].1 = 0);
    }
}

/// Clusters that grow node by node.
pub(super) struct Propagation {
    /// The cluster of each node: a node that was in it.
    labels: Vec<u32>,
    sizes: Vec<u8>,
    room: u8,
    counts: LabelCounts,
    node: usize,
    pub moved: u64,
}

impl Propagation {
    /// Nodes of a partition on average; `None` if clusters are not worth it, or there are too many nodes for labels.
    fn mean(nodes: u64, partitions: u32) -> Option<u64> {
        let mean = nodes / partitions.max(1) as u64;
        (partitions > 1 && mean >= LEAST_NODES && nodes < NONE as u64).then_some(mean)
    }

    /// Bytes of clusters, from the first pass to their last round: a label per node; then nodes by kind, a parent and counters
    /// of every cluster.
    pub fn bytes_for(nodes: u64, partitions: u32) -> u64 {
        let by_cluster = nodes / NODES_PER_CLUSTER * (size_of::<ClusterSize>() as u64 + 4);
        let labels = Propagation::mean(nodes, partitions).map(|_| nodes * 4);
        labels.map_or(0, |labels| labels + by_cluster + nodes * COUNTER_CENTIBYTES / 100 + nodes / 4)
    }

    /// Every node is a cluster. `None` if clusters are not worth it.
    pub fn new(shape: &PartitionShape) -> Option<Propagation> {
        let mean = Propagation::mean(shape.nodes, shape.partitions)?;
        Some(Propagation {
            labels: (0..shape.nodes as u32).collect(),
            sizes: vec![1; shape.nodes as usize],
            room: mean.min(PROPAGATED as u64) as u8,
            counts: LabelCounts::default(),
            node: 0,
            moved: 0,
        })
    }
}

impl NodeVisitor for Propagation {
    #[inline]
    fn begin(&mut self, node: NodeId) {
        self.node = node.index();
        self.counts.clear();
    }

    #[inline]
    fn count<I: StoredId>(&mut self, words: &[I], range: Range<usize>) {
        for at in range {
            if let Some(soon) = words.get(at + PREFETCH_DISTANCE) {
                prefetch(&self.labels, soon.index());
            }
            self.counts.add(self.labels[words[at].index()]);
        }
    }

    #[inline]
    fn end(&mut self) {
        let own = self.labels[self.node];
        let mut best = (self.counts.of(own), own);
        for at in &self.counts.met {
            let (label, count) = self.counts.slots[*at as usize];
            if count > best.0 && label != own && self.sizes[label as usize] < self.room {
                best = (count, label);
            }
        }
        if best.1 != own {
            self.sizes[own as usize] -= 1;
            self.sizes[best.1 as usize] += 1;
            self.labels[self.node] = best.1;
            self.moved += 1;
        }
    }
}

/// The nodes of a cluster by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ClusterSize {
    others: u16,
    training: u16,
}

/// What a cluster may have.
#[derive(Debug, Clone, Copy)]
struct ClusterRoom {
    nodes: u64,
    others: u64,
    training: u64,
}

impl ClusterRoom {
    #[inline]
    fn has(&self, one: ClusterSize, other: ClusterSize) -> bool {
        let others = one.others as u64 + other.others as u64;
        let training = one.training as u64 + other.training as u64;
        others <= self.others && training <= self.training && others + training <= self.nodes
    }
}

/// Clusters that merge.
pub(super) struct Merging {
    /// The cluster of each node, from 0; `NONE` for a node without one.
    labels: Vec<u32>,
    sizes: Vec<ClusterSize>,
    room: ClusterRoom,
    /// The largest that rounds come to.
    most_nodes: u64,
    last_rounds: u32,
    /// Of each cluster, `counters` neighbouring clusters and counts.
    counters: usize,
    others: Vec<u32>,
    counts: Vec<u16>,
    own: u32,
}

impl Merging {
    /// Numbers the clusters, the small ones left out. `training` has a bit a node.
    pub fn new(grown: Propagation, shape: &PartitionShape, training: &[u64]) -> Merging {
        let Propagation { mut labels, sizes, room, .. } = grown;
        let mut of_size = [0u64; 256];
        sizes.iter().for_each(|size| of_size[*size as usize] += 1);
        // The smallest size of which there are few enough.
        let (mut least, mut count) = (room as usize + 1, 0);
        while least > 2 && count + of_size[least - 1] <= shape.nodes / NODES_PER_CLUSTER {
            least -= 1;
            count += of_size[least];
        }
        let kept = NodeSet::choose(shape.nodes, |node| sizes[node.index()] as usize >= least);
        drop(sizes);
        let mut sizes = vec![ClusterSize::default(); kept.count() as usize];
        for (node, label) in labels.iter_mut().enumerate() {
            *label = kept.slot(NodeId(*label as u64)).unwrap_or(NONE);
            if let Some(size) = sizes.get_mut(*label as usize) {
                match training[node / 64] >> (node % 64) & 1 == 1 {
                    true => size.training += 1,
                    false => size.others += 1,
                }
            }
        }
        let most_nodes = (shape.nodes as u128 * 21 / (shape.partitions as u128 * 20)).max(1) as u64;
        let most_nodes = most_nodes.min(MOST_NODES);
        let (others, training) = (shape.others_cap(), shape.training_cap());
        let nodes = (2 * room as u64).min(most_nodes);
        Merging {
            labels,
            sizes,
            room: ClusterRoom { nodes, others, training },
            most_nodes,
            last_rounds: 0,
            counters: 0,
            others: Vec::new(),
            counts: Vec::new(),
            own: NONE,
        }
    }

    /// Begins a round.
    pub fn begin_round(&mut self) {
        let clusters = self.sizes.len() as u64;
        let bytes = self.labels.len() as u64 * COUNTER_CENTIBYTES / 100;
        self.counters = (bytes / (COUNTER_BYTES * clusters.max(1))).clamp(1, MOST_COUNTERS) as usize;
        self.others.resize(self.sizes.len() * self.counters, NONE);
        self.counts.resize(self.sizes.len() * self.counters, 0);
    }

    /// One edge between two clusters (Misra and Gries).
    #[inline]
    fn add(&mut self, other: u32) {
        let first = self.own as usize * self.counters;
        let range = first..first + self.counters;
        let (others, counts) = (&mut self.others[range.clone()], &mut self.counts[range]);
        let mut free = None;
        for at in 0..counts.len() {
            if counts[at] == 0 {
                free = free.or(Some(at));
            } else if others[at] == other {
                counts[at] = counts[at].saturating_add(1);
                return;
            }
        }
        match free {
            Some(at) => (others[at], counts[at]) = (other, 1),
            None => counts.iter_mut().for_each(|count| *count -= 1),
        }
    }

    /// Merges each cluster with that of most edges for the square root of its size. Returns how many merged, and whether
    /// another round is due.
    pub fn end_round(&mut self) -> (u64, bool) {
        let clusters = self.sizes.len();
        for cluster in 0..clusters {
            // Counters of earlier clusters are not needed any more, and there is one at least.
            self.others[cluster] = self.nearest(cluster).unwrap_or(NONE);
        }
        self.counts = Vec::new();
        let mut parents: Vec<u32> = (0..clusters as u32).collect();
        let mut merged = 0;
        for cluster in 0..clusters {
            let other = self.others[cluster];
            if other == NONE {
                continue;
            }
            let (own, other) = (root(&mut parents, cluster as u32), root(&mut parents, other));
            let (one, two) = (self.sizes[own as usize], self.sizes[other as usize]);
            if own != other && self.room.has(one, two) {
                parents[own as usize] = other;
                self.sizes[other as usize] =
                    ClusterSize { others: one.others + two.others, training: one.training + two.training };
                merged += 1;
            }
        }
        self.others = Vec::new();
        // Roots keep their order.
        let (mut numbers, mut count) = (vec![0u32; clusters], 0);
        for cluster in 0..clusters {
            if parents[cluster] == cluster as u32 {
                numbers[cluster] = count;
                self.sizes[count as usize] = self.sizes[cluster];
                count += 1;
            }
        }
        self.sizes.truncate(count as usize);
        for label in self.labels.iter_mut().filter(|label| **label != NONE) {
            *label = numbers[root(&mut parents, *label) as usize];
        }
        let is_last = self.room.nodes == self.most_nodes;
        self.last_rounds += is_last as u32;
        self.room.nodes = (self.room.nodes * 2).min(self.most_nodes);
        let is_due = match is_last {
            true => merged * FEW_MERGES >= clusters as u64 && self.last_rounds < LAST_ROUNDS,
            false => clusters > 1,
        };
        (merged, is_due)
    }

    /// The cluster that shares most edges with another, for the square root of its size; of equal ones the first counted.
    fn nearest(&self, cluster: usize) -> Option<u32> {
        let first = cluster * self.counters;
        let mut best: Option<(u128, u128, u32)> = None;
        for at in first..first + self.counters {
            let (count, other) = (self.counts[at] as u128, self.others[at]);
            if count == 0 {
                continue;
            }
            let size = self.sizes[other as usize];
            let size = size.others as u128 + size.training as u128;
            // Squares of both: a / sqrt(b) is greater where a a d > c c b.
            if best.is_none_or(|(of_best, best_size, _)| count * count * best_size > of_best * of_best * size)
            {
                best = Some((count, size, other));
            }
        }
        best.map(|(.., other)| other)
    }

    /// The partition of each cluster: the largest are partitions, of equal ones those of lower numbers. All others have
    /// none: `partitions`.
    pub fn seeds(self, partitions: u32) -> (Vec<u32>, Vec<u32>) {
        let nodes = |cluster: &u32| {
            let size = self.sizes[*cluster as usize];
            std::cmp::Reverse(size.others as u64 + size.training as u64)
        };
        let mut order: Vec<u32> = (0..self.sizes.len() as u32).collect();
        order.sort_by_key(nodes);
        let mut of_cluster = vec![partitions; self.sizes.len()];
        for (partition, cluster) in (0..partitions).zip(order) {
            of_cluster[cluster as usize] = partition;
        }
        (self.labels, of_cluster)
    }
}

/// The root of a cluster. Paths are halved on the way.
fn root(parents: &mut [u32], mut cluster: u32) -> u32 {
    while parents[cluster as usize] != cluster {
        parents[cluster as usize] = parents[parents[cluster as usize] as usize];
        cluster = parents[cluster as usize];
    }
    cluster
}

impl NodeVisitor for Merging {
    #[inline]
    fn begin(&mut self, node: NodeId) {
        self.own = self.labels[node.index()];
    }

    #[inline]
    fn count<I: StoredId>(&mut self, words: &[I], range: Range<usize>) {
        for at in range {
            if let Some(soon) = words.get(at + PREFETCH_DISTANCE) {
                prefetch(&self.labels, soon.index());
            }
            let other = self.labels[words[at].index()];
            if self.own == NONE || other == NONE || other == self.own {
                continue;
            }
            if self.room.has(self.sizes[self.own as usize], self.sizes[other as usize]) {
                self.add(other);
            }
        }
    }

    #[inline]
    fn end(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn stream(visitor: &mut impl NodeVisitor, lists: &[Vec<u32>]) {
        for (node, list) in (0..).zip(lists) {
            visitor.begin(NodeId(node));
            visitor.count(list, 0..list.len());
            visitor.end();
        }
    }

    fn shape(lists: &[Vec<u32>], training: &[bool], partitions: u32) -> PartitionShape {
        PartitionShape {
            nodes: lists.len() as u64,
            edges: lists.iter().map(|list| list.len() as u64).sum(),
            training: training.iter().filter(|is| **is).count() as u64,
            partitions,
        }
    }

    fn bits(training: &[bool]) -> Vec<u64> {
        let word = |some: &[bool]| some.iter().rev().fold(0, |bits, is| bits << 1 | *is as u64);
        training.chunks(64).map(word).collect()
    }

    /// Propagation from its definition: all labels are counted anew for every node.
    fn naive_labels(lists: &[Vec<u32>], room: usize, passes: u32) -> Vec<u32> {
        let mut labels: Vec<u32> = (0..lists.len() as u32).collect();
        for _ in 0..passes {
            for node in 0..lists.len() {
                let size = |label: u32| labels.iter().filter(|other| **other == label).count();
                let count =
                    |label: u32| lists[node].iter().filter(|nbr| labels[**nbr as usize] == label).count();
                let mut best = (count(labels[node]), labels[node]);
                for label in lists[node].iter().map(|nbr| labels[*nbr as usize]) {
                    if count(label) > best.0 && label != labels[node] && size(label) < room {
                        best = (count(label), label);
                    }
                }
                labels[node] = best.1;
            }
        }
        labels
    }

    /// A round of merging from its definition, with as many counters as there are clusters: then counts are exact.
    fn naive_round(lists: &[Vec<u32>], merging: &Merging) -> Vec<u32> {
        let labels = &merging.labels;
        let mut of: Vec<Vec<u32>> = vec![Vec::new(); merging.sizes.len()];
        let mut shared: Vec<BTreeMap<u32, u64>> = vec![BTreeMap::new(); of.len()];
        for (node, list) in lists.iter().enumerate().filter(|(node, _)| labels[*node] != NONE) {
            of[labels[node] as usize].push(node as u32);
            for other in list.iter().map(|nbr| labels[*nbr as usize]) {
                let own = labels[node];
                if other != NONE
                    && other != own
                    && merging.room.has(merging.sizes[own as usize], merging.sizes[other as usize])
                {
                    *shared[own as usize].entry(other).or_default() += 1;
                }
            }
        }
        let mut sizes = merging.sizes.clone();
        let mut home: Vec<u32> = (0..of.len() as u32).collect();
        for own in 0..of.len() {
            let gain = |other: &u32| {
                let size = merging.sizes[*other as usize];
                // Squared: exact where both are whole numbers.
                (shared[own][other].pow(2), (size.others + size.training) as u64)
            };
            let best = shared[own].keys().fold(None, |best: Option<u32>, other| match best {
                Some(best) if gain(&best).0 * gain(other).1 >= gain(other).0 * gain(&best).1 => Some(best),
                _ => Some(*other),
            });
            let Some(other) = best else { continue };
            let (from, to) = (home[own], home[other as usize]);
            let (one, two) = (sizes[from as usize], sizes[to as usize]);
            if from != to && merging.room.has(one, two) {
                home.iter_mut().filter(|home| **home == from).for_each(|home| *home = to);
                sizes[to as usize] =
                    ClusterSize { others: one.others + two.others, training: one.training + two.training };
            }
        }
        labels.iter().map(|label| if *label == NONE { NONE } else { home[*label as usize] }).collect()
    }

    /// Whether two labellings divide nodes alike.
    fn is_same(one: &[u32], other: &[u32]) -> bool {
        let mut map = BTreeMap::new();
        let mut back = BTreeMap::new();
        one.iter().zip(other).all(|(one, other)| {
            (*one == NONE) == (*other == NONE)
                && *map.entry(*one).or_insert(*other) == *other
                && *back.entry(*other).or_insert(*one) == *one
        })
    }

    proptest! {
        #[test]
        fn clusters_are_those_of_the_definition(
            lists in prop::collection::vec(prop::collection::vec(0u32..60, 0..7), 60),
            training in prop::collection::vec(any::<bool>(), 60), partitions in 2u32..9,
        ) {
            let shape = shape(&lists, &training, partitions);
            let mut growing = Propagation::new(&shape).unwrap();
            for _ in 0..2 {
                stream(&mut growing, &lists);
            }
            prop_assert_eq!(&growing.labels, &naive_labels(&lists, growing.room as usize, 2));
            let grown = growing.room as u16;
            let mut merging = Merging::new(growing, &shape, &bits(&training));
            for _ in 0..4 {
                merging.begin_round();
                // Enough counters for exact counts: neighbours of a cluster, in the order of their numbers.
                merging.counters = merging.sizes.len().max(1);
                merging.others = vec![NONE; merging.sizes.len() * merging.counters];
                merging.counts = vec![0; merging.others.len()];
                for own in 0..merging.sizes.len() {
                    for other in 0..merging.counters {
                        merging.others[own * merging.counters + other] = other as u32;
                    }
                }
                let expected = naive_round(&lists, &merging);
                for (node, list) in (0..).zip(&lists) {
                    merging.begin(NodeId(node));
                    let own = merging.own;
                    for other in list.iter().map(|nbr| merging.labels[*nbr as usize]) {
                        if own == NONE || other == NONE || own == other {
                            continue;
                        }
                        if merging.room.has(merging.sizes[own as usize], merging.sizes[other as usize]) {
                            merging.counts[own as usize * merging.counters + other as usize] += 1;
                        }
                    }
                }
                merging.end_round();
                prop_assert!(is_same(&merging.labels, &expected), "{:?} {expected:?}", merging.labels);
                for size in &merging.sizes {
                    // While clusters grow, kinds of nodes do not count: FENNEL moves what is too many of one.
                    let is_grown = size.others + size.training <= grown;
                    prop_assert!(is_grown || merging.room.has(*size, ClusterSize::default()));
                }
            }
            let (labels, of_cluster) = merging.seeds(partitions);
            let seeded = of_cluster.iter().filter(|partition| **partition < partitions).count();
            prop_assert_eq!(seeded, of_cluster.len().min(partitions as usize));
            prop_assert!(labels.iter().all(|label| *label == NONE || (*label as usize) < of_cluster.len()));
        }

        /// Misra and Gries: a neighbour with more than its share of the edges is always counted.
        #[test]
        fn a_neighbour_with_many_edges_is_remembered(
            edges in prop::collection::vec(0u32..12, 1..200), counters in 1usize..6,
        ) {
            let mut merging = Merging {
                labels: vec![0], sizes: vec![ClusterSize::default()], room: ClusterRoom { nodes: 0, others: 0, training: 0 },
                most_nodes: 0, last_rounds: 0, counters, others: vec![NONE; counters], counts: vec![0; counters], own: 0,
            };
            edges.iter().for_each(|other| merging.add(*other));
            for other in 0..12u32 {
                let exact = edges.iter().filter(|edge| **edge == other).count();
                let at = (0..counters).find(|at| merging.counts[*at] > 0 && merging.others[*at] == other);
                let found = at.map_or(0, |at| merging.counts[at] as usize);
                prop_assert!(found <= exact && exact - found <= edges.len() / (counters + 1));
            }
        }

        #[test]
        fn labels_are_counted_as_in_a_map(labels in prop::collection::vec(0u32..300, 0..400)) {
            let mut counts = LabelCounts::default();
            for round in 0..2 {
                counts.clear();
                let mut expected: BTreeMap<u32, u32> = BTreeMap::new();
                for label in labels.iter().map(|label| label * (1 + round)) {
                    counts.add(label);
                    *expected.entry(label).or_default() += 1;
                }
                prop_assert_eq!(counts.met.len(), expected.len());
                expected.iter().for_each(|(label, count)| assert_eq!(counts.of(*label), *count));
                assert_eq!(counts.of(100_000), 0);
            }
        }
    }

    #[test]
    fn two_communities_become_two_seeds() {
        let clique = |first: u32| {
            (first..first + 20).map(move |node| (first..first + 20).filter(|other| *other != node).collect())
        };
        let mut lists: Vec<Vec<u32>> = clique(0).chain(clique(20)).collect();
        lists[19].push(20);
        lists[20].push(19);
        let training = vec![false; 40];
        let shape = shape(&lists, &training, 2);
        let mut growing = Propagation::new(&shape).unwrap();
        (0..PROPAGATIONS).for_each(|_| stream(&mut growing, &lists));
        let mut merging = Merging::new(growing, &shape, &bits(&training));
        loop {
            merging.begin_round();
            stream(&mut merging, &lists);
            if !merging.end_round().1 {
                break;
            }
        }
        let (labels, of_cluster) = merging.seeds(2);
        let of = |node: usize| of_cluster.get(labels[node] as usize).copied();
        assert!(
            (0..16).all(|node| of(node) == of(0)) && (24..40).all(|node| of(node) == of(39)),
            "{labels:?}"
        );
        assert_ne!(of(0), of(39));
    }
}
