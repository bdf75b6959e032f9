//! Checks that no id of a batch repeats, in a fraction of the time of sorting them.

use super::bits::width_below;
use esker_types::NodeId;

/// Ids of at most this many bits are marked as they are: their bitmap of 2 MiB stays in the L2 and L3 caches.
const DIRECT_BITS: u32 = 24;
/// Ids that differ only in this many lower bits are in one bucket: their bitmap of 32 KiB stays in the L1 cache.
const BUCKET_BITS: u32 = 18;
/// Largest number of buckets, as a power of two. Graphs too large for it have larger buckets.
const MOST_BUCKETS_BITS: u32 = 12;

/// Sorts ids to buckets by their upper bits, then marks the lower bits of a bucket in a bitmap. Buffers are reused.
#[derive(Debug, Default)]
pub(super) struct DistinctIds {
    /// The end of each bucket so far.
    ends: Vec<u32>,
    /// The lower bits of all ids, bucket after bucket.
    lower: Vec<u32>,
    /// All zeros between buckets.
    marks: Vec<u64>,
}

impl DistinctIds {
    /// Memory for checking `ids` ids of a graph of `nodes` nodes.
    pub fn bytes_for(nodes: u64, ids: u64) -> u64 {
        let width = width_below(nodes);
        if width <= DIRECT_BITS {
            return (1 << width.saturating_sub(6)) * 8;
        }
        let shift = BUCKET_BITS.max(width.saturating_sub(MOST_BUCKETS_BITS)).min(31);
        let buckets = (nodes.saturating_sub(1) >> shift) + 1;
        buckets * 4 + ids.saturating_mul(4) + (1 << (shift - 6)) * 8
    }

    /// Whether all ids differ. They are below `nodes`, and fewer than 2^31.
    pub fn check(&mut self, ids: &[NodeId], nodes: u64) -> bool {
        let width = width_below(nodes);
        if width <= DIRECT_BITS {
            self.marks.resize(1 << width.saturating_sub(6), 0);
            return mark_all(&mut self.marks, ids.iter().map(|id| id.0 as u32));
        }
        let shift = BUCKET_BITS.max(width.saturating_sub(MOST_BUCKETS_BITS)).min(31);
        self.sort_to_buckets(ids, shift, (nodes.saturating_sub(1) >> shift) as usize + 1);
        self.marks.resize(1 << (shift - 6), 0);
        let (mut first, mut all_differ) = (0, true);
        for end in &self.ends {
            let bucket = &self.lower[first..*end as usize];
            all_differ &= mark_all(&mut self.marks, bucket.iter().copied());
            first = *end as usize;
        }
        all_differ
    }

    fn sort_to_buckets(&mut self, ids: &[NodeId], shift: u32, buckets: usize) {
        self.ends.clear();
        self.ends.resize(buckets, 0);
        ids.iter().for_each(|id| self.ends[(id.0 >> shift) as usize] += 1);
        let mut start = 0;
        for end in &mut self.ends {
            // While ids are sorted to it, the end of a bucket runs from its start to its end.
            (*end, start) = (start, start + *end);
        }
        self.lower.resize(ids.len(), 0);
        for id in ids {
            let end = &mut self.ends[(id.0 >> shift) as usize];
            self.lower[*end as usize] = (id.0 & ((1 << shift) - 1)) as u32;
            *end += 1;
        }
    }
}

/// Marks numbers in a bitmap of zeros, and clears it again. Whether no number was marked before.
#[inline(always)]
fn mark_all(marks: &mut [u64], numbers: impl Iterator<Item = u32> + Clone) -> bool {
    let mut repeats = 0;
    for number in numbers.clone() {
        let (word, bit) = (&mut marks[number as usize / 64], 1u64 << (number % 64));
        repeats |= *word & bit;
        *word |= bit;
    }
    numbers.for_each(|number| marks[number as usize / 64] = 0);
    repeats == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn repeated_ids_are_found(ids in prop::collection::vec(0u64..300_000, 0..1500), width in 19u32..=40) {
            let nodes = 1 << width;
            let distinct = ids.iter().collect::<HashSet<_>>().len() == ids.len();
            let mut checked = DistinctIds::default();
            let ids: Vec<NodeId> = ids.into_iter().map(NodeId).collect();
            // Twice: the first check must leave no marks.
            for _ in 0..2 {
                prop_assert_eq!(checked.check(&ids, nodes), distinct);
            }
        }
    }

    #[test]
    fn a_repeat_far_away_is_found() {
        let ids: Vec<NodeId> = (0..50_000u64).map(|id| NodeId(id * 999_983 % (1 << 33))).collect();
        let mut checked = DistinctIds::default();
        assert!(checked.check(&ids, 1 << 33));
        let repeated: Vec<NodeId> = ids.iter().copied().chain([ids[7]]).collect();
        assert!(!checked.check(&repeated, 1 << 33));
        assert!(checked.check(&[], 0));
    }

    #[test]
    fn memory_is_at_most_what_was_counted() {
        for nodes in [1, 1000, 1 << 24, (1 << 24) + 1, 1 << 33, 1 << 40] {
            let ids: Vec<NodeId> =
                (0..1000.min(nodes)).map(|id| NodeId(id * (nodes / 1000).max(1))).collect();
            let mut checked = DistinctIds::default();
            assert!(checked.check(&ids, nodes));
            let DistinctIds { ends, lower, marks } = &checked;
            let bytes = size_of_val(&ends[..]) + size_of_val(&lower[..]) + size_of_val(&marks[..]);
            assert!(bytes as u64 <= DistinctIds::bytes_for(nodes, ids.len() as u64), "{nodes} nodes");
        }
    }
}
