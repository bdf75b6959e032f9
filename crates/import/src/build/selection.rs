/// A set of nodes, as bits.
#[derive(Debug, Clone)]
pub struct Bitmap {
    words: Vec<u64>,
    count: u64,
}

impl Bitmap {
    /// An empty set of nodes from `0..count`.
    pub fn new(count: u64) -> Bitmap {
        Bitmap { words: vec![0; count.div_ceil(64) as usize], count }
    }

    /// Memory of a bitmap of this many nodes.
    pub fn memory_bytes(count: u64) -> u64 {
        count.div_ceil(64) * 8
    }

    /// Adds a node. Returns whether it was new.
    pub fn insert(&mut self, node: u64) -> bool {
        let (word, bit) = ((node / 64) as usize, 1 << (node % 64));
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Whether the set contains the node.
    pub fn contains(&self, node: u64) -> bool {
        self.words[(node / 64) as usize] >> (node % 64) & 1 == 1
    }

    /// Number of nodes in the set.
    pub fn len(&self) -> u64 {
        self.words.iter().map(|word| word.count_ones() as u64).sum()
    }

    /// The nodes, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.count).filter(|node| self.contains(*node))
    }
}

/// The selected nodes and their new ids: their ranks among the selected nodes.
pub struct Selection {
    bits: Bitmap,
    /// Selected nodes before each group of 512.
    ranks: Vec<u64>,
    total: u64,
}

impl Selection {
    /// Selects the nodes of `bits`.
    pub fn new(bits: Bitmap) -> Selection {
        let (mut ranks, mut total) = (Vec::with_capacity(bits.words.len() / 8 + 1), 0);
        for group in bits.words.chunks(8) {
            ranks.push(total);
            total += group.iter().map(|word| word.count_ones() as u64).sum::<u64>();
        }
        Selection { bits, ranks, total }
    }

    /// Memory of a selection among this many nodes.
    pub fn memory_bytes(of: u64) -> u64 {
        Bitmap::memory_bytes(of) / 8 * 9
    }

    /// Whether a node is selected.
    pub fn contains(&self, node: u64) -> bool {
        self.bits.contains(node)
    }

    /// Number of selected nodes.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Number of nodes before the selection.
    pub fn of(&self) -> u64 {
        self.bits.count
    }

    /// The new id of a node, if it is selected.
    pub fn rank(&self, node: u64) -> Option<u64> {
        if !self.contains(node) {
            return None;
        }
        let word = (node / 64) as usize;
        let group = word / 8;
        let before: u64 = self.bits.words[group * 8..word].iter().map(|word| word.count_ones() as u64).sum();
        let below = self.bits.words[word] & ((1u64 << (node % 64)) - 1);
        Some(self.ranks[group] + before + below.count_ones() as u64)
    }
}

/// Keeps the `capacity` items with the smallest random priorities: a uniform sample of the offered items.
pub struct SmallestPriorities {
    capacity: usize,
    heap: std::collections::BinaryHeap<(u64, u64)>,
    /// Number of items offered.
    pub offered: u64,
}

impl SmallestPriorities {
    /// A sample of at most `capacity`.
    pub fn new(capacity: usize) -> SmallestPriorities {
        SmallestPriorities { capacity, heap: Default::default(), offered: 0 }
    }

    /// Offers an item with its priority.
    pub fn offer(&mut self, priority: u64, item: u64) {
        self.offered += 1;
        if self.heap.len() < self.capacity {
            self.heap.push((priority, item));
        } else if self.heap.peek().is_some_and(|worst| (priority, item) < *worst) {
            self.heap.pop();
            self.heap.push((priority, item));
        }
    }

    /// The sample, best priority first.
    pub fn into_items(self) -> Vec<u64> {
        self.heap.into_sorted_vec().into_iter().map(|(_, item)| item).collect()
    }
}

/// `share` of `count`, rounded to the nearest.
pub fn share_of(count: u64, share: f64) -> u64 {
    ((share * count as f64).round() as u64).min(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_count_the_members_before(nodes in prop::collection::btree_set(0u64..5000, 0..500)) {
            let mut bits = Bitmap::new(5000);
            nodes.iter().for_each(|node| assert!(bits.insert(*node)));
            prop_assert_eq!(bits.iter().collect::<Vec<_>>(), nodes.iter().copied().collect::<Vec<_>>());
            let selection = Selection::new(bits);
            prop_assert_eq!(selection.len(), nodes.len() as u64);
            for (rank, node) in nodes.iter().enumerate() {
                prop_assert_eq!(selection.rank(*node), Some(rank as u64));
            }
            prop_assert_eq!((0..5000).filter(|n| selection.rank(*n).is_some()).count(), nodes.len());
        }
    }

    #[test]
    fn shares_are_of_the_count() {
        assert_eq!(
            (share_of(10, 0.6), share_of(10, 1.0), share_of(10, 0.0), share_of(0, 0.5)),
            (6, 10, 0, 0)
        );
    }
}
