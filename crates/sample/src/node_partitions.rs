//! Equal partitions of nodes, without a table: which partition of a partition buffer a node is in, and where in it
//! (Marius++ section 5.1). A keyed pseudo-random permutation numbers the nodes; this number is a node's *position*.
//! Partitions are consecutive ranges of positions. So either way between node and position takes constant memory.
//!
//! These partitions are others than those of [`crate::partition`], which follow the edges of a graph.

use crate::draw::PURPOSE_PARTITIONS;
use crate::{NodeSet, Result, SampleError};
use esker_types::random::{Key, Permutation};
use esker_types::{NodeId, PartitionId};
use std::ops::Range;
use std::sync::Arc;

/// Partitions of all nodes whose sizes differ by one node at most: the first `nodes % count` have one more.
#[derive(Debug, Clone)]
pub struct NodePartitions {
    nodes: u64,
    count: u32,
    seed: u64,
    /// Nodes of a smaller partition, and the number of partitions that have one more.
    size: u64,
    larger: u64,
    placement: NodePositions,
}

/// How nodes are numbered.
#[derive(Debug, Clone)]
enum NodePositions {
    /// One permutation of all nodes.
    Random(Permutation),
    /// The training nodes, by their rank, then the others, by theirs.
    TrainingFirst { training: Arc<NodeSet>, first: Permutation, others: Permutation },
}

impl NodePartitions {
    /// `count` random partitions of the nodes of a graph. Fails if there is no partition, or more than nodes.
    pub fn random(nodes: u64, count: u32, seed: u64) -> Result<NodePartitions> {
        let placement = NodePositions::Random(Permutation::new(nodes, partitions_key(seed)));
        NodePartitions::placed(nodes, count, seed, placement)
    }

    /// `count` partitions whose first positions have the training nodes, in random order, and the others the rest. Fails
    /// if there is no partition, or more than nodes.
    pub fn training_first(count: u32, seed: u64, training: Arc<NodeSet>) -> Result<NodePartitions> {
        let (nodes, key) = (training.nodes(), partitions_key(seed));
        let first = Permutation::new(training.count(), key.with(0));
        let others = Permutation::new(nodes - training.count(), key.with(1));
        let placement = NodePositions::TrainingFirst { training, first, others };
        NodePartitions::placed(nodes, count, seed, placement)
    }

    fn placed(nodes: u64, count: u32, seed: u64, placement: NodePositions) -> Result<NodePartitions> {
        if count == 0 || count as u64 > nodes {
            let most = nodes.min(u32::MAX as u64);
            return Err(SampleError::PartitionCount { what: "node partitions", found: count as u64, most });
        }
        let (size, larger) = (nodes / count as u64, nodes % count as u64);
        Ok(NodePartitions { nodes, count, seed, size, larger, placement })
    }

    /// Number of partitions.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Number of nodes of all partitions.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Number of nodes of the largest partition.
    pub fn largest(&self) -> u64 {
        self.nodes.div_ceil(self.count as u64)
    }

    /// Number of nodes of a partition.
    pub fn size_of(&self, partition: PartitionId) -> u64 {
        self.size + ((partition.0 as u64) < self.larger) as u64
    }

    /// The positions of a partition's nodes.
    pub fn positions(&self, partition: PartitionId) -> Range<u64> {
        let before = partition.0 as u64;
        let start = before * self.size + before.min(self.larger);
        start..start + self.size_of(partition)
    }

    /// The partition of a node, and its position in that partition.
    #[inline]
    pub fn place(&self, node: NodeId) -> (PartitionId, u64) {
        self.place_of(self.position(node))
    }

    /// The partition of a position among all nodes, and where in that partition it is.
    #[inline]
    pub fn place_of(&self, position: u64) -> (PartitionId, u64) {
        let in_larger = self.larger * (self.size + 1);
        let (first, size, at) = if position < in_larger {
            (0, self.size + 1, position)
        } else {
            (self.larger, self.size, position - in_larger)
        };
        (PartitionId((first + at / size) as u32), at % size)
    }

    /// The partition of a node.
    #[inline]
    pub fn partition(&self, node: NodeId) -> PartitionId {
        self.place(node).0
    }

    /// The node at a position of a partition.
    #[inline]
    pub fn node(&self, partition: PartitionId, offset: u64) -> NodeId {
        self.node_at(self.positions(partition).start + offset)
    }

    /// The position of a node among all nodes.
    #[inline]
    pub fn position(&self, node: NodeId) -> u64 {
        match &self.placement {
            NodePositions::Random(order) => order.forward(node.0),
            NodePositions::TrainingFirst { training, first, others } => match training.slot(node) {
                Some(rank) => first.forward(rank as u64),
                None => training.count() + others.forward(node.0 - training.members_before(node)),
            },
        }
    }

    /// The node at a position among all nodes.
    #[inline]
    pub fn node_at(&self, position: u64) -> NodeId {
        match &self.placement {
            NodePositions::Random(order) => NodeId(order.backward(position)),
            NodePositions::TrainingFirst { training, first, others } => {
                match position.checked_sub(training.count()) {
                    None => training.member(first.backward(position)),
                    Some(rank) => training.other(others.backward(rank)),
                }
            }
        }
    }

    /// The number of partitions that training nodes fill, the last one perhaps in part: the paper's k. `None` if
    /// training nodes are in all partitions.
    pub fn training_partitions(&self) -> Option<u32> {
        match &self.placement {
            NodePositions::Random(_) => None,
            NodePositions::TrainingFirst { training, .. } => match training.count() {
                0 => Some(0),
                count => Some(self.place_of(count - 1).0.0 + 1),
            },
        }
    }

    /// A word for names of what is stored by these partitions. It tells layouts apart, not datasets.
    pub fn label(&self) -> String {
        match &self.placement {
            NodePositions::Random(_) => format!("{}", self.count),
            NodePositions::TrainingFirst { .. } => format!("{}-training-first", self.count),
        }
    }

    /// A short text. Partitions with equal texts are equal.
    pub fn identity(&self) -> String {
        let NodePartitions { nodes, count, seed, .. } = self;
        match &self.placement {
            NodePositions::Random(_) => format!("random(nodes={nodes},partitions={count},seed={seed})"),
            NodePositions::TrainingFirst { training, .. } => format!(
                "training-first(nodes={nodes},partitions={count},seed={seed},training={},xxh3={})",
                training.count(),
                training.digest()
            ),
        }
    }
}

fn partitions_key(seed: u64) -> Key {
    Key::new(seed).with(PURPOSE_PARTITIONS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every node has one place, partitions are as large as they say, and all ways between node and position agree.
    fn check(partitions: &NodePartitions) {
        let mut found = vec![vec![]; partitions.count() as usize];
        for node in (0..partitions.nodes()).map(NodeId) {
            let (partition, offset) = partitions.place(node);
            let position = partitions.position(node);
            assert_eq!(partitions.place_of(position), (partition, offset));
            assert_eq!(partitions.positions(partition).start + offset, position);
            assert_eq!((partitions.node(partition, offset), partitions.node_at(position)), (node, node));
            assert_eq!(partitions.partition(node), partition);
            found[partition.0 as usize].push(offset);
        }
        let mut before = 0;
        for (partition, mut offsets) in (0..).map(PartitionId).zip(found) {
            offsets.sort_unstable();
            assert!(offsets.into_iter().eq(0..partitions.size_of(partition)));
            assert_eq!(partitions.positions(partition).start, before);
            before = partitions.positions(partition).end;
            assert!(partitions.largest() - partitions.size_of(partition) <= 1);
        }
        assert_eq!(before, partitions.nodes());
    }

    proptest! {
        #[test]
        fn every_node_has_one_place(nodes in 1u64..2000, share in 0.0f64..1.0, seed: u64, step in 0u64..72) {
            let count = 1 + (share * (nodes - 1) as f64) as u32;
            check(&NodePartitions::random(nodes, count, seed).unwrap());
            let training = NodeSet::choose(nodes, |node| (node.0 * 7919) % 71 < step);
            let members: Vec<NodeId> = (0..nodes).map(NodeId).filter(|node| training.slot(*node).is_some()).collect();
            let first = NodePartitions::training_first(count, seed, Arc::new(training)).unwrap();
            check(&first);
            prop_assert!(members.iter().all(|node| first.position(*node) < members.len() as u64));
            let last = members.iter().map(|node| first.partition(*node).0 + 1).max().unwrap_or(0);
            prop_assert_eq!(first.training_partitions(), Some(last));
        }
    }

    #[test]
    fn partitions_differ_by_seed_and_hold_nodes_of_all_ids() {
        let [one, other] = [1, 2].map(|seed| NodePartitions::random(1000, 4, seed).unwrap());
        let moved = (0..1000).map(NodeId).filter(|node| one.partition(*node) != other.partition(*node));
        assert!(moved.count() > 600);
        let low = (0..250).map(|offset| one.node(PartitionId(0), offset)).filter(|node| node.0 < 500);
        assert!((80..170).contains(&low.count()));
        assert_ne!(one.identity(), other.identity());
    }

    #[test]
    fn impossible_counts_are_refused() {
        for count in [0, 11] {
            let said = NodePartitions::random(10, count, 1).unwrap_err().to_string();
            assert_eq!(said, format!("{count} node partitions are asked for; give from 1 to 10"));
            let training = Arc::new(NodeSet::choose(10, |_| true));
            assert!(NodePartitions::training_first(count, 1, training).is_err());
        }
    }
}
