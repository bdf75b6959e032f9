//! Which seeds make up a batch. An order is a property of the job: any batch of any epoch can be computed on its own.
//! So a run can start anywhere, and every strategy can run every order.
//!
//! docs/sample.md specifies the shuffled order word by word.

mod groups;
mod steps;

pub use groups::{BatchGroup, Grouping, Groups};
pub use steps::{BatchStep, EpochSteps, StepBatching, StepItem, StepOrder, StepSettings};

use crate::draw::PURPOSE_ORDER;
use crate::held_out::EdgeRows;
use crate::topology::{Edge, EdgeLookup};
use crate::{Result, SampleError};
use esker_types::random::{Key, Permutation};
use esker_types::{EdgeId, NodeId};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// What is trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seeds {
    /// These nodes.
    Nodes(Vec<NodeId>),
    /// These nodes, shared with another owner.
    Shared(Arc<Vec<NodeId>>),
    /// Every node of the graph: the number of nodes, counted from 0.
    AllNodes(u64),
    /// These edges.
    Edges(Vec<Edge>),
    /// Every edge of the graph, by id.
    AllEdges(u64),
    /// Edges in a file, for instance held-out ones.
    Rows(Arc<EdgeRows>),
}

impl Seeds {
    /// The nodes, if they are given explicitly.
    fn listed(&self) -> Option<&[NodeId]> {
        match self {
            Seeds::Nodes(nodes) => Some(nodes),
            Seeds::Shared(nodes) => Some(nodes),
            Seeds::AllNodes(_) | Seeds::Edges(_) | Seeds::AllEdges(_) | Seeds::Rows(_) => None,
        }
    }

    /// Number of seeds.
    pub fn len(&self) -> u64 {
        match self {
            Seeds::Nodes(nodes) => nodes.len() as u64,
            Seeds::Shared(nodes) => nodes.len() as u64,
            Seeds::Edges(edges) => edges.len() as u64,
            Seeds::Rows(rows) => rows.len(),
            Seeds::AllNodes(count) | Seeds::AllEdges(count) => *count,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether edges are trained on.
    pub fn are_edges(&self) -> bool {
        matches!(self, Seeds::Edges(_) | Seeds::AllEdges(_) | Seeds::Rows(_))
    }

    /// The nodes of a batch: the seeds themselves, or the source and target of each edge in turn. `items` are indices
    /// of seeds.
    pub fn nodes(
        &self,
        graph: &(impl EdgeLookup + ?Sized),
        items: &[u64],
        out: &mut Vec<NodeId>,
    ) -> Result<()> {
        out.clear();
        if self.are_edges() {
            let mut edges = Vec::new();
            self.edges(graph, items, &mut edges)?;
            out.extend(edges.iter().flat_map(|edge| [edge.source, edge.target]));
            return Ok(());
        }
        for item in items {
            out.push(self.node(*item)?);
        }
        Ok(())
    }

    /// The node of an item. Fails if the seeds are edges.
    pub fn node(&self, item: u64) -> Result<NodeId> {
        if let Some(nodes) = self.listed() {
            return nodes.get(item as usize).copied().ok_or_else(|| self.beyond(item));
        }
        match self {
            Seeds::AllNodes(count) if item < *count => Ok(NodeId(item)),
            Seeds::Nodes(_) | Seeds::Shared(_) | Seeds::AllNodes(_) => Err(self.beyond(item)),
            Seeds::Edges(_) | Seeds::AllEdges(_) | Seeds::Rows(_) => Err(SampleError::SeedsAreEdges),
        }
    }

    /// The edges of a batch, looked up together. Fails if the seeds are nodes. `items` are indices of seeds.
    pub fn edges(
        &self,
        graph: &(impl EdgeLookup + ?Sized),
        items: &[u64],
        out: &mut Vec<Edge>,
    ) -> Result<()> {
        out.clear();
        if let Some(item) = items.iter().find(|item| **item >= self.len()) {
            return Err(self.beyond(*item));
        }
        match self {
            Seeds::Nodes(_) | Seeds::Shared(_) | Seeds::AllNodes(_) => Err(SampleError::SeedsAreNodes),
            Seeds::Edges(edges) => {
                out.extend(items.iter().map(|item| edges[*item as usize]));
                Ok(())
            }
            Seeds::AllEdges(_) => {
                let ids: Vec<EdgeId> = items.iter().copied().map(EdgeId).collect();
                graph.edges_by_id(&ids, out)
            }
            Seeds::Rows(rows) => rows.edges(items, out),
        }
    }

    /// A short text that two `Seeds` share only if they have the same seeds in the same order. For all nodes or all
    /// edges the text does not name their graph. It reads every seed that is given explicitly.
    pub fn identity(&self) -> String {
        let nodes = self.listed().unwrap_or(&[]);
        match self {
            // Explicit nodes that are all nodes get the same text as `AllNodes`.
            Seeds::Nodes(_) | Seeds::Shared(_) if nodes.iter().zip(0..).all(|(node, at)| node.0 == at) => {
                Seeds::AllNodes(self.len()).identity()
            }
            Seeds::Nodes(_) | Seeds::Shared(_) => identity_of_nodes(nodes),
            Seeds::AllNodes(count) => format!("all-nodes(count={count})"),
            Seeds::Edges(edges) => {
                let mut hash = Xxh3::new();
                for edge in edges {
                    hash.update(&edge.source.0.to_le_bytes());
                    hash.update(&edge.target.0.to_le_bytes());
                    hash.update(&edge.relation.to_le_bytes());
                }
                format!("edges(count={},xxh3={:016x})", edges.len(), hash.digest())
            }
            Seeds::AllEdges(count) => format!("all-edges(count={count})"),
            Seeds::Rows(rows) => rows.identity(),
        }
    }

    fn beyond(&self, item: u64) -> SampleError {
        SampleError::NoSuchSeed { item, seeds: self.len() }
    }
}

/// The number of nodes and a hash of them.
pub(crate) fn identity_of_nodes(nodes: &[NodeId]) -> String {
    let mut hash = Xxh3::new();
    nodes.iter().for_each(|node| hash.update(&node.0.to_le_bytes()));
    format!("nodes(count={},xxh3={:016x})", nodes.len(), hash.digest())
}

/// An order of batches. Nothing else depends on how many items a batch has or where they come from.
pub trait Order: Send + Sync {
    /// Number of batches in an epoch. Epochs may differ.
    fn batches(&self, epoch: u64) -> u64;

    /// The items of a batch, as indices of seeds. Fails if the epoch has no such batch.
    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()>;

    /// The group of partitions that a batch takes its seeds from, if the order has groups.
    fn group(&self, _epoch: u64, _batch: u64) -> Option<BatchGroup> {
        None
    }

    /// The step that a batch belongs to, if the order has steps over partitions.
    fn step(&self, _epoch: u64, _batch: u64) -> Option<BatchStep> {
        None
    }

    /// A short text that identifies the order. Orders with equal texts have equal batches.
    fn identity(&self) -> String;
}

impl<O: Order + ?Sized> Order for &O {
    fn batches(&self, epoch: u64) -> u64 {
        (**self).batches(epoch)
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        (**self).items(epoch, batch, out)
    }

    fn group(&self, epoch: u64, batch: u64) -> Option<BatchGroup> {
        (**self).group(epoch, batch)
    }

    fn step(&self, epoch: u64, batch: u64) -> Option<BatchStep> {
        (**self).step(epoch, batch)
    }

    fn identity(&self) -> String {
        (**self).identity()
    }
}

impl<O: Order + ?Sized> Order for Arc<O> {
    fn batches(&self, epoch: u64) -> u64 {
        (**self).batches(epoch)
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        (**self).items(epoch, batch, out)
    }

    fn group(&self, epoch: u64, batch: u64) -> Option<BatchGroup> {
        (**self).group(epoch, batch)
    }

    fn step(&self, epoch: u64, batch: u64) -> Option<BatchStep> {
        (**self).step(epoch, batch)
    }

    fn identity(&self) -> String {
        (**self).identity()
    }
}

/// The batch sizes of a plain order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batching {
    count: u64,
    batch: NonZeroU64,
    drop_last: bool,
}

impl Batching {
    /// `count` items in batches of `batch`. `drop_last` leaves out a last, smaller batch. Fails if `batch` is 0.
    pub fn new(count: u64, batch: u64, drop_last: bool) -> Result<Batching> {
        match NonZeroU64::new(batch) {
            Some(batch) => Ok(Batching { count, batch, drop_last }),
            None => Err(SampleError::EmptyBatches),
        }
    }

    /// Number of items.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Items per batch.
    pub fn batch(&self) -> u64 {
        self.batch.get()
    }

    /// Number of batches in an epoch.
    pub fn batches(&self) -> u64 {
        if self.drop_last { self.count / self.batch } else { self.count.div_ceil(self.batch()) }
    }

    fn range(&self, epoch: u64, batch: u64) -> Result<Range<u64>> {
        if batch >= self.batches() {
            return Err(SampleError::NoSuchBatch { epoch, batch, batches: self.batches() });
        }
        let start = batch * self.batch();
        Ok(start..start.saturating_add(self.batch()).min(self.count))
    }

    fn identity(&self) -> String {
        format!("count={},batch={},drop_last={}", self.count, self.batch, self.drop_last)
    }
}

/// A new pseudo-random order of all items in each epoch, from (seed, epoch). It is a Feistel network, without a table.
#[derive(Debug, Clone, Copy)]
pub struct Shuffled {
    /// Items and batches.
    pub batching: Batching,
    /// The random seed.
    pub seed: u64,
}

impl Order for Shuffled {
    fn batches(&self, _: u64) -> u64 {
        self.batching.batches()
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        let key = Key::new(self.seed).with(PURPOSE_ORDER).with(epoch);
        let order = Permutation::new(self.batching.count, key);
        out.clear();
        out.extend(self.batching.range(epoch, batch)?.map(|index| order.forward(index)));
        Ok(())
    }

    fn identity(&self) -> String {
        format!("shuffled({},seed={})", self.batching.identity(), self.seed)
    }
}

/// Items in their given order, the same in every epoch.
#[derive(Debug, Clone, Copy)]
pub struct Sequential(pub Batching);

impl Order for Sequential {
    fn batches(&self, _: u64) -> u64 {
        self.0.batches()
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        out.clear();
        out.extend(self.0.range(epoch, batch)?);
        Ok(())
    }

    fn identity(&self) -> String {
        format!("sequential({})", self.0.identity())
    }
}

/// Explicit batches, the same in every epoch.
#[derive(Debug, Clone)]
pub struct GivenOrder(pub Vec<Vec<u64>>);

impl Order for GivenOrder {
    fn batches(&self, _: u64) -> u64 {
        self.0.len() as u64
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        out.clear();
        let items = self.0.get(batch as usize);
        let none = || SampleError::NoSuchBatch { epoch, batch, batches: self.batches(epoch) };
        out.extend_from_slice(items.ok_or_else(none)?);
        Ok(())
    }

    fn identity(&self) -> String {
        let mut hash = Xxh3::new();
        for items in &self.0 {
            // Hashes the length, so that the same items cut into other batches are another order.
            hash.update(&(items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| hash.update(&item.to_le_bytes()));
        }
        format!("given(batches={},xxh3={:016x})", self.0.len(), hash.digest())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::InMemory;
    use crate::reference;

    fn items_of(order: &dyn Order, epoch: u64, batch: u64) -> Vec<u64> {
        let mut items = Vec::new();
        order.items(epoch, batch, &mut items).unwrap();
        items
    }

    pub(crate) fn epoch_of(order: &dyn Order, epoch: u64) -> Vec<Vec<u64>> {
        (0..order.batches(epoch)).map(|batch| items_of(order, epoch, batch)).collect()
    }

    fn batching(count: u64, batch: u64, drop_last: bool) -> Batching {
        Batching::new(count, batch, drop_last).unwrap()
    }

    fn shuffled(count: u64, drop_last: bool, seed: u64) -> Shuffled {
        Shuffled { batching: batching(count, 10, drop_last), seed }
    }

    #[test]
    fn an_epoch_has_every_item_once_and_epochs_differ() {
        let order = shuffled(1005, false, 3);
        let (first, second) = (epoch_of(&order, 0), epoch_of(&order, 1));
        assert_eq!((first.len(), first[100].len()), (101, 5));
        for epoch in [&first, &second] {
            let mut items: Vec<u64> = epoch.concat();
            items.sort_unstable();
            assert!(items.into_iter().eq(0..1005));
        }
        assert_ne!(first, second);
        assert_eq!(first, epoch_of(&order, 0));
        assert_ne!(first, epoch_of(&shuffled(1005, false, 4), 0));
        assert_eq!(epoch_of(&shuffled(1005, true, 3), 0), first[..100]);
    }

    #[test]
    fn the_shuffled_order_is_what_the_text_says() {
        let counts = (1..70).chain([255, 256, 257, 1023, 1024, 1025, 4096, 4097, 65_536, 65_537, 1_000_003]);
        let wide = [1 << 32, (1 << 32) + 1, (1 << 62) - 1, 1 << 62, (1 << 62) + 1, u64::MAX - 1, u64::MAX];
        for count in counts.chain(wide) {
            for (seed, epoch) in [(0, 0), (1, 0), (1, 1), (42, 7), (u64::MAX, u64::MAX)] {
                let order = Shuffled { batching: batching(count, 10, false), seed };
                for batch in [0, 1, order.batches(epoch) / 2, order.batches(epoch) - 1] {
                    if batch < order.batches(epoch) {
                        let last = (batch * 10).saturating_add(10).min(count);
                        let key = reference::key(seed, &[0x006f_7264_6572, epoch]);
                        let expected = (batch * 10..last).map(|x| reference::item(key, count, x));
                        assert!(
                            items_of(&order, epoch, batch).into_iter().eq(expected),
                            "{count} {seed} {epoch}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn the_example_of_the_text_holds() {
        let order = Shuffled { batching: batching(10, 5, false), seed: 1 };
        assert_eq!(epoch_of(&order, 0), [[5, 1, 7, 9, 3], [6, 0, 8, 2, 4]]);
    }

    #[test]
    fn sequential_and_given_orders_come_as_they_are() {
        let order = Sequential(batching(5, 2, false));
        assert_eq!(epoch_of(&order, 7), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(epoch_of(&GivenOrder(vec![vec![4, 4], vec![0]]), 1), [vec![4, 4], vec![0]]);
    }

    #[test]
    fn batches_that_an_epoch_does_not_have_are_refused() {
        let given = GivenOrder(vec![vec![0]; 3]);
        let (shuffled, sequential) = (shuffled(25, false, 1), Sequential(batching(25, 10, false)));
        for order in [&given as &dyn Order, &shuffled, &sequential] {
            for batch in [3, u64::MAX] {
                let said = order.items(4, batch, &mut Vec::new()).unwrap_err().to_string();
                assert!(
                    said.contains(&format!("batch {batch} of epoch 4")) && said.contains("3 batches"),
                    "{said}"
                );
            }
        }
        assert!(Sequential(batching(25, 10, true)).items(0, 2, &mut Vec::new()).is_err());
        assert!(Sequential(batching(0, 10, false)).items(0, 0, &mut Vec::new()).is_err());
        assert_eq!(items_of(&Sequential(batching(u64::MAX, u64::MAX - 1, false)), 0, 1), [u64::MAX - 1]);
        assert!(Batching::new(25, 0, false).unwrap_err().to_string().contains("batches of 0"));
    }

    #[test]
    fn seeds_that_are_not_there_are_refused() {
        let graph: InMemory<u32> = InMemory::from_adjacency(&[vec![1], vec![0]], None);
        let edge = Edge { source: NodeId(0), target: NodeId(1), relation: 0 };
        let mut nodes = Vec::new();
        for seeds in [
            Seeds::Nodes(vec![NodeId(0); 2]),
            Seeds::Shared(Arc::new(vec![NodeId(0); 2])),
            Seeds::AllNodes(2),
            Seeds::Edges(vec![edge; 2]),
            Seeds::AllEdges(2),
        ] {
            seeds.nodes(&graph, &[0, 1, 1], &mut nodes).unwrap();
            for item in [2, u64::MAX] {
                let said = seeds.nodes(&graph, &[0, item], &mut nodes).unwrap_err().to_string();
                assert!(said.contains(&format!("seed {item}")) && said.contains("2 seeds"), "{said}");
            }
        }
        // More edges than the graph has.
        let said = Seeds::AllEdges(3).edges(&graph, &[2], &mut Vec::new()).unwrap_err().to_string();
        assert!(said.contains("2 edges"), "{said}");
    }

    #[test]
    fn edges_give_both_their_ends() {
        let graph: InMemory<u32> = InMemory::from_adjacency(&[vec![1, 2], vec![], vec![0]], None);
        let mut nodes = Vec::new();
        Seeds::AllEdges(3).nodes(&graph, &[2, 0], &mut nodes).unwrap();
        assert_eq!(nodes, [0, 2, 1, 0].map(NodeId));
        let edges = vec![Edge { source: NodeId(2), target: NodeId(1), relation: 0 }];
        Seeds::Edges(edges.clone()).nodes(&graph, &[0], &mut nodes).unwrap();
        assert_eq!(nodes, [2, 1].map(NodeId));
        Seeds::AllNodes(3).nodes(&graph, &[2, 0], &mut nodes).unwrap();
        assert_eq!(nodes, [2, 0].map(NodeId));
        assert!(Seeds::Nodes(vec![NodeId(0)]).edges(&graph, &[0], &mut Vec::new()).is_err());
        assert!(Seeds::Edges(edges).node(0).is_err());
    }

    #[test]
    fn identities_tell_seeds_apart() {
        let edge =
            |source, target, relation| Edge { source: NodeId(source), target: NodeId(target), relation };
        let nodes = |nodes: &[u64]| Seeds::Nodes(nodes.iter().copied().map(NodeId).collect());
        let all = [
            nodes(&[0, 2]),
            nodes(&[2, 0]),
            nodes(&[0, 2, 2]),
            Seeds::AllNodes(2),
            Seeds::AllEdges(2),
            Seeds::Edges(vec![edge(0, 1, 0)]),
            Seeds::Edges(vec![edge(1, 0, 0)]),
            Seeds::Edges(vec![edge(0, 1, 1)]),
        ];
        for (at, seeds) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| other.identity() != seeds.identity()), "{seeds:?}");
        }
        let shared = |nodes: &[u64]| Seeds::Shared(Arc::new(nodes.iter().copied().map(NodeId).collect()));
        for same in [&[0, 2][..], &[2, 0], &[0, 1], &[]] {
            assert_eq!(nodes(same).identity(), shared(same).identity());
        }
        assert_eq!(nodes(&[0, 1]).identity(), Seeds::AllNodes(2).identity());
    }
}
