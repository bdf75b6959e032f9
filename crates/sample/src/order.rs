//! Which seeds make up a batch. An order is a property of the job: any batch of any epoch can be computed alone, so a
//! run can start anywhere, and every strategy can run every order.

use crate::draw::PURPOSE_ORDER;
use crate::topology::{Edge, InMemory, Word};
use crate::{Result, SampleError};
use esker_types::random::{Key, Permutation};
use esker_types::{EdgeId, NodeId};

/// What is trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seeds {
    /// These nodes.
    Nodes(Vec<NodeId>),
    /// These edges.
    Edges(Vec<Edge>),
    /// Every edge of the graph, by id.
    AllEdges(u64),
}

impl Seeds {
    /// How many.
    pub fn len(&self) -> u64 {
        match self {
            Seeds::Nodes(nodes) => nodes.len() as u64,
            Seeds::Edges(edges) => edges.len() as u64,
            Seeds::AllEdges(count) => *count,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The nodes of a batch: the seeds themselves, or source and target of each edge in turn. `items` are indices of
    /// seeds.
    pub fn nodes<W: Word>(&self, graph: &InMemory<W>, items: &[u64], out: &mut Vec<NodeId>) -> Result<()> {
        out.clear();
        if let Seeds::Nodes(nodes) = self {
            out.extend(items.iter().map(|item| nodes[*item as usize]));
            return Ok(());
        }
        for item in items {
            let edge = self.edge(graph, *item)?;
            out.extend([edge.source, edge.target]);
        }
        Ok(())
    }

    /// The edge of an item. Nodes are no edges.
    pub fn edge<W: Word>(&self, graph: &InMemory<W>, item: u64) -> Result<Edge> {
        match self {
            Seeds::Nodes(_) => {
                Err(SampleError::request("the seeds are nodes, not edges", "give edges as seeds"))
            }
            Seeds::Edges(edges) => Ok(edges[item as usize]),
            Seeds::AllEdges(_) => graph.edge(EdgeId(item)),
        }
    }
}

/// An order of batches. Orders by groups of partitions, or over resident edge buckets, are further implementations:
/// nothing else asks how many items a batch has or where they come from.
pub trait Order: Send + Sync {
    /// Batches of an epoch.
    fn batches(&self, epoch: u64) -> u64;

    /// The items of a batch, as indices of seeds.
    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>);
}

/// How many items a batch of a plain order has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batching {
    /// All items.
    pub count: u64,
    /// Items of a batch.
    pub batch: u64,
    /// Whether a last, smaller batch is left out.
    pub drop_last: bool,
}

impl Batching {
    fn batches(&self) -> u64 {
        if self.drop_last { self.count / self.batch } else { self.count.div_ceil(self.batch) }
    }

    fn range(&self, batch: u64) -> std::ops::Range<u64> {
        assert!(batch < self.batches(), "batch {batch} of {}", self.batches());
        batch * self.batch..((batch + 1) * self.batch).min(self.count)
    }
}

/// Each epoch another pseudo-random order of all items, by (seed, epoch). A Feistel network: no table.
#[derive(Debug, Clone, Copy)]
pub struct Shuffled {
    /// Items and batches.
    pub batching: Batching,
    /// The seed.
    pub seed: u64,
}

impl Order for Shuffled {
    fn batches(&self, _: u64) -> u64 {
        self.batching.batches()
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) {
        let key = Key::new(self.seed).with(PURPOSE_ORDER).with(epoch);
        let order = Permutation::new(self.batching.count, key);
        out.clear();
        out.extend(self.batching.range(batch).map(|index| order.forward(index)));
    }
}

/// Items as they come, every epoch.
#[derive(Debug, Clone, Copy)]
pub struct Sequential(pub Batching);

impl Order for Sequential {
    fn batches(&self, _: u64) -> u64 {
        self.0.batches()
    }

    fn items(&self, _: u64, batch: u64, out: &mut Vec<u64>) {
        out.clear();
        out.extend(self.0.range(batch));
    }
}

/// Batches that somebody listed, every epoch the same.
#[derive(Debug, Clone)]
pub struct Given(pub Vec<Vec<u64>>);

impl Order for Given {
    fn batches(&self, _: u64) -> u64 {
        self.0.len() as u64
    }

    fn items(&self, _: u64, batch: u64, out: &mut Vec<u64>) {
        out.clear();
        out.extend_from_slice(&self.0[batch as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch_of(order: &dyn Order, epoch: u64) -> Vec<Vec<u64>> {
        let mut items = Vec::new();
        (0..order.batches(epoch))
            .map(|batch| {
                order.items(epoch, batch, &mut items);
                items.clone()
            })
            .collect()
    }

    fn shuffled(count: u64, drop_last: bool, seed: u64) -> Shuffled {
        Shuffled { batching: Batching { count, batch: 10, drop_last }, seed }
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
    fn sequential_and_given_orders_come_as_they_are() {
        let order = Sequential(Batching { count: 5, batch: 2, drop_last: false });
        assert_eq!(epoch_of(&order, 7), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(epoch_of(&Given(vec![vec![4, 4], vec![0]]), 1), [vec![4, 4], vec![0]]);
    }

    #[test]
    fn edges_give_both_their_ends() {
        let graph: InMemory<u32> = InMemory::from_lists(&[vec![1, 2], vec![], vec![0]], None);
        let mut nodes = Vec::new();
        Seeds::AllEdges(3).nodes(&graph, &[2, 0], &mut nodes).unwrap();
        assert_eq!(nodes, [0, 2, 1, 0].map(NodeId));
        let edges = vec![Edge { source: NodeId(2), target: NodeId(1), relation: 0 }];
        Seeds::Edges(edges).nodes(&graph, &[0], &mut nodes).unwrap();
        assert_eq!(nodes, [2, 1].map(NodeId));
        assert!(Seeds::Nodes(vec![NodeId(0)]).edge(&graph, 0).is_err());
    }
}
