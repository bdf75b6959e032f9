//! From node ids to local indices. A direct table has one 32-bit word per node of the graph and needs neither hashing
//! nor clearing. If it does not fit the budget, an open-addressing table of the batch's own nodes is used.
//!
//! Both store stamps instead of local indices. A batch that starts at stamp `base` stores `base + local index`, and the
//! next batch starts after the largest stamp of this one. So every older stamp is recognised as stale. The table is
//! zeroed only when 32 bits run out, once in thousands of batches.

use crate::Result;
use crate::memory::{Ledger, held};
use crate::topology::StoredId;
use esker_io::{prefer_large_pages, prefetch};
use esker_types::NodeId;

/// Nodes found for the first time, in order. `slots` after `count` have no meaning.
#[derive(Debug, Default)]
pub(crate) struct NewNodes {
    slots: Vec<NodeId>,
    count: usize,
}

impl NewNodes {
    pub fn clear(&mut self) {
        self.count = 0;
    }

    pub fn nodes(&self) -> &[NodeId] {
        &self.slots[..self.count]
    }

    pub fn bytes(&self) -> u64 {
        held(&self.slots)
    }

    /// Makes room for `more` nodes, and one more slot that is written but not kept.
    pub fn reserve(&mut self, more: usize, ledger: &mut Ledger) -> Result<()> {
        ledger.extend_to(&mut self.slots, self.count + more + 1, NodeId(0))
    }
}

/// Looks up local indices and collects new nodes.
pub(crate) trait Relabel {
    /// Starts a batch of at most `most` nodes and forgets the previous one.
    fn begin(&mut self, most: usize);

    /// Makes room for this many nodes in total.
    fn reserve(&mut self, nodes: usize, ledger: &mut Ledger) -> Result<()>;

    /// Sets the local index of every word. New nodes get the next free local indices in order of first appearance and
    /// are appended to `new_nodes`, whose first node has local index `first`. The caller has made room, here and in
    /// `new_nodes`. It is fast if the words were prefetched.
    fn assign<W: StoredId>(
        &mut self,
        words: &[W],
        first: u32,
        new_nodes: &mut NewNodes,
        local_indices: &mut [u32],
    );

    /// The local index of a node, if it is in the batch.
    fn find(&self, node: NodeId) -> Option<u32>;

    /// Prefetches the entry of a node.
    fn prefetch(&self, node: NodeId);

    /// Allocated bytes.
    fn bytes(&self) -> u64;
}

/// A table with one word per node of the graph.
pub(crate) struct DirectTable {
    stamps: Vec<u32>,
    base: u32,
    count: u32,
}

impl DirectTable {
    pub fn new(nodes: u64) -> DirectTable {
        let mut stamps = vec![0u32; nodes as usize];
        prefer_large_pages(&mut stamps);
        DirectTable { stamps, base: 1, count: 0 }
    }

    pub fn bytes_for(nodes: u64) -> u64 {
        nodes.saturating_mul(4)
    }
}

impl Relabel for DirectTable {
    fn begin(&mut self, most: usize) {
        self.base = self.base.saturating_add(self.count);
        self.count = 0;
        if (u32::MAX - self.base) as usize <= most {
            self.stamps.fill(0);
            self.base = 1;
        }
    }

    fn reserve(&mut self, _: usize, _: &mut Ledger) -> Result<()> {
        Ok(())
    }

    #[inline(always)]
    fn assign<W: StoredId>(
        &mut self,
        words: &[W],
        first: u32,
        new_nodes: &mut NewNodes,
        local_indices: &mut [u32],
    ) {
        let (base, slots) = (self.base, &mut new_nodes.slots[..]);
        let mut count = new_nodes.count;
        for (word, assigned) in words.iter().zip(local_indices) {
            // About half the nodes are new, in an order that no branch predictor can guess. So there is no branch.
            let stamp = &mut self.stamps[word.index()];
            let known = stamp.wrapping_sub(base);
            let next = first + count as u32;
            let is_new = known >= next;
            let local_index = if is_new { next } else { known };
            *stamp = base + local_index;
            slots[count] = word.node();
            count += is_new as usize;
            *assigned = local_index;
        }
        new_nodes.count = count;
        self.count = first + count as u32;
    }

    #[inline(always)]
    fn find(&self, node: NodeId) -> Option<u32> {
        let local_index = self.stamps[node.index()].wrapping_sub(self.base);
        (local_index < self.count).then_some(local_index)
    }

    #[inline(always)]
    fn prefetch(&self, node: NodeId) {
        prefetch(&self.stamps, node.index());
    }

    fn bytes(&self) -> u64 {
        self.stamps.len() as u64 * 4
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct TableSlot {
    node: NodeId,
    stamp: u32,
}

/// A table of the batch's own nodes: linear probing, at most half full, grown before nodes are added.
pub(crate) struct HashedTable {
    slots: Vec<TableSlot>,
    base: u32,
    count: u32,
}

/// Bytes of a slot.
const SLOT_BYTES: u64 = size_of::<TableSlot>() as u64;
const LEAST_SLOTS: usize = 1 << 10;

impl HashedTable {
    pub fn new() -> HashedTable {
        HashedTable { slots: vec![TableSlot::default(); LEAST_SLOTS], base: 1, count: 0 }
    }

    /// Bytes for `most` nodes.
    pub fn bytes_for(most: u64) -> u64 {
        slots_for(most).saturating_mul(SLOT_BYTES)
    }

    #[inline(always)]
    fn home(&self, node: NodeId) -> usize {
        let hash = node.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> (64 - self.slots.len().trailing_zeros())) as usize
    }

    /// The slot of a node, or the empty slot for it.
    #[inline(always)]
    fn slot_of(&self, node: NodeId) -> usize {
        let mut at = self.home(node);
        loop {
            let slot = &self.slots[at];
            if slot.stamp < self.base || slot.node == node {
                return at;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    fn grow(&mut self, slots: usize) {
        let wider = vec![TableSlot::default(); slots];
        let old = std::mem::replace(&mut self.slots, wider);
        for slot in old.into_iter().filter(|slot| slot.stamp >= self.base) {
            let at = self.slot_of(slot.node);
            self.slots[at] = slot;
        }
    }
}

fn slots_for(most: u64) -> u64 {
    most.saturating_mul(2).clamp(LEAST_SLOTS as u64, 1 << 62).next_power_of_two()
}

impl Relabel for HashedTable {
    fn begin(&mut self, most: usize) {
        self.base = self.base.saturating_add(self.count);
        self.count = 0;
        if (u32::MAX - self.base) as usize <= most {
            self.slots.fill(TableSlot::default());
            self.base = 1;
        }
    }

    fn reserve(&mut self, nodes: usize, ledger: &mut Ledger) -> Result<()> {
        let slots = slots_for(nodes as u64) as usize;
        if slots > self.slots.len() {
            // Both tables are allocated while the nodes move.
            ledger.charge(slots as u64 * SLOT_BYTES)?;
            let before = self.bytes();
            self.grow(slots);
            ledger.release(before);
        }
        Ok(())
    }

    fn assign<W: StoredId>(
        &mut self,
        words: &[W],
        first: u32,
        new_nodes: &mut NewNodes,
        local_indices: &mut [u32],
    ) {
        for (word, assigned) in words.iter().zip(local_indices) {
            let slot = self.slot_of(word.node());
            if self.slots[slot].stamp >= self.base {
                *assigned = self.slots[slot].stamp - self.base;
                continue;
            }
            let local_index = first + new_nodes.count as u32;
            self.slots[slot] = TableSlot { node: word.node(), stamp: self.base + local_index };
            self.count = local_index + 1;
            new_nodes.slots[new_nodes.count] = word.node();
            new_nodes.count += 1;
            *assigned = local_index;
        }
    }

    #[inline(always)]
    fn find(&self, node: NodeId) -> Option<u32> {
        let slot = &self.slots[self.slot_of(node)];
        (slot.stamp >= self.base).then(|| slot.stamp - self.base)
    }

    #[inline(always)]
    fn prefetch(&self, node: NodeId) {
        prefetch(&self.slots, self.home(node));
    }

    fn bytes(&self) -> u64 {
        self.slots.len() as u64 * SLOT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Runs several batches of several hops through one table and compares with a new map per batch.
    fn check<R: Relabel>(table: &mut R, batches: &[Vec<Vec<u32>>]) {
        for hops in batches {
            table.begin(hops.iter().map(Vec::len).sum());
            let mut map: HashMap<u32, u32> = HashMap::new();
            let mut first = 0;
            for words in hops {
                let (mut new_nodes, mut local_indices) = (NewNodes::default(), vec![0; words.len()]);
                let ledger = &mut Ledger::unlimited();
                new_nodes.reserve(words.len(), ledger).unwrap();
                table.reserve(first as usize + words.len(), ledger).unwrap();
                // In two pieces, like waves.
                let (left, right) = words.split_at(words.len() / 2);
                table.assign(left, first, &mut new_nodes, &mut local_indices);
                table.assign(right, first, &mut new_nodes, &mut local_indices[left.len()..]);
                let mut expected = Vec::new();
                for (word, local_index) in words.iter().zip(&local_indices) {
                    let next = map.len() as u32;
                    let known = *map.entry(*word).or_insert_with(|| {
                        expected.push(NodeId(*word as u64));
                        next
                    });
                    assert_eq!(known, *local_index);
                }
                assert_eq!(new_nodes.nodes(), expected);
                first += new_nodes.nodes().len() as u32;
            }
            for node in 0..200 {
                assert_eq!(table.find(NodeId(node as u64)), map.get(&node).copied());
            }
        }
    }

    proptest! {
        #[test]
        fn tables_equal_a_map(batches in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(0u32..200, 0..300), 1..4), 1..5)) {
            check(&mut DirectTable::new(200), &batches);
            check(&mut HashedTable::new(), &batches);
        }
    }

    #[test]
    fn stamps_that_run_out_start_again() {
        let batches =
            vec![vec![(0..200).collect()], vec![(100..200).collect()], vec![(0..200).rev().collect()]];
        for base in [u32::MAX - 450, u32::MAX - 250, u32::MAX - 200, u32::MAX - 1] {
            check(&mut DirectTable { base, ..DirectTable::new(200) }, &batches);
            check(&mut HashedTable { base, ..HashedTable::new() }, &batches);
        }
    }

    #[test]
    fn a_hash_table_grows_with_its_batch() {
        let words: Vec<u32> = (0..5000).collect();
        let (mut table, mut new_nodes, mut local_indices) =
            (HashedTable::new(), NewNodes::default(), vec![0; 5000]);
        let before = table.bytes();
        let mut ledger = Ledger::new(before, 1 << 20);
        table.begin(5000);
        table.reserve(5000, &mut ledger).unwrap();
        new_nodes.reserve(5000, &mut Ledger::unlimited()).unwrap();
        table.assign(&words, 0, &mut new_nodes, &mut local_indices);
        // The ledger matches the table's bytes.
        assert_eq!(ledger.free(), (1 << 20) - table.bytes());
        assert!(table.reserve(40_000, &mut ledger).is_err());
        assert!(local_indices.iter().zip(0..).all(|(local_index, expected)| *local_index == expected));
        assert_eq!(table.bytes(), HashedTable::bytes_for(5000));
    }
}
