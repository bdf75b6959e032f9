//! The order by groups of partitions (OUTRE, section 4.2): neighbouring seeds are in the same batch, so a batch reaches
//! fewer nodes.
//!
//! Each epoch permutes the partitions and cuts the result into groups. The seeds of a group are shuffled and cut into
//! batches; the last batch of a group may be smaller. No batch has seeds of two groups. docs/sample.md specifies it.

use super::Order;
use crate::draw::PURPOSE_GROUPS;
use crate::{Result, SampleError};
use esker_types::PartitionId;
use esker_types::random::{Key, Permutation};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Epochs whose groups are kept: the current one and some that are sampled ahead.
const KEPT_EPOCHS: usize = 4;
/// Epochs that are looked at one by one, where it is not certain that all have full batches.
const MOST_CHECKED_EPOCHS: u64 = 1000;

/// How seeds are grouped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grouping {
    /// Number of partitions.
    pub partitions: u32,
    /// A hash of the partitions of all nodes.
    pub digest: String,
    /// Partitions in a group; the last group of an epoch may have fewer.
    pub group: u32,
    /// Seeds in a batch.
    pub batch: u64,
    /// Whether the smaller batch of a group is left out.
    pub drop_last: bool,
    /// The random seed.
    pub seed: u64,
}

impl Grouping {
    /// Groups in an epoch.
    pub fn groups(&self) -> u64 {
        self.partitions.div_ceil(self.group.max(1)) as u64
    }

    /// The most batches that an epoch with this many seeds can have.
    pub fn most_batches(&self, seeds: u64) -> u64 {
        let full = seeds / self.batch.max(1);
        // Each group may end with a smaller batch, if it has a seed.
        if self.drop_last { full } else { full.saturating_add(self.groups()).min(seeds) }
    }

    /// Bytes of the order of this many seeds, while it is made and after.
    pub fn bytes_for(&self, seeds: u64) -> u64 {
        let by_partition = (self.partitions as u64 + 1) * 8;
        let by_epoch = self.partitions as u64 * 4 + (self.groups() + 1) * 8;
        seeds.saturating_mul(8 + 4).saturating_add(2 * by_partition + KEPT_EPOCHS as u64 * by_epoch)
    }
}

/// Seeds by groups of partitions, other groups in each epoch.
#[derive(Debug)]
pub struct Groups {
    grouping: Grouping,
    batch: NonZeroU64,
    /// Seeds by partition, and where each partition starts.
    items: Vec<u64>,
    starts: Vec<u64>,
    epochs: Mutex<Vec<Arc<EpochGroups>>>,
}

/// A group of partitions, from which some batches take their seeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchGroup {
    /// The epoch.
    pub epoch: u64,
    /// The group in its epoch, from 0.
    pub number: u64,
    /// The batches of the group.
    pub batches: Range<u64>,
    /// Its partitions.
    pub partitions: Vec<PartitionId>,
}

/// The groups of an epoch.
#[derive(Debug)]
struct EpochGroups {
    epoch: u64,
    /// Partitions in their order.
    partitions: Vec<u32>,
    /// The first batch of each group, and the number of all batches.
    first_batches: Vec<u64>,
}

impl Groups {
    /// Seeds with these partitions. Fails if batches or groups are empty.
    pub fn new(grouping: Grouping, of_seeds: &[PartitionId]) -> Result<Groups> {
        let Some(batch) = NonZeroU64::new(grouping.batch) else { return Err(SampleError::EmptyBatches) };
        if grouping.group == 0 {
            let most = u32::MAX as u64;
            return Err(SampleError::PartitionCount { what: "partitions in a group", found: 0, most });
        }
        let mut starts = vec![0u64; grouping.partitions as usize + 1];
        of_seeds.iter().for_each(|partition| starts[partition.0 as usize + 1] += 1);
        (1..starts.len()).for_each(|at| starts[at] += starts[at - 1]);
        let (mut next, mut items) = (starts.clone(), vec![0; of_seeds.len()]);
        for (item, partition) in (0..).zip(of_seeds) {
            let at = &mut next[partition.0 as usize];
            items[*at as usize] = item;
            *at += 1;
        }
        Ok(Groups { grouping, batch, items, starts, epochs: Mutex::default() })
    }

    /// Fails if smaller batches are dropped and one of the first `epochs` epochs has no other. Of very many epochs, it
    /// fails if one may have no other.
    pub fn check_full(&self, epochs: u64) -> Result<()> {
        let Grouping { batch, drop_last, .. } = self.grouping;
        let (groups, seeds) = (self.grouping.groups(), self.items.len() as u64);
        // With more seeds than that, some group has a full batch, however partitions are permuted.
        let few = groups.saturating_mul(batch - 1);
        let largest = self.starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        if !drop_last || seeds > few || largest >= batch {
            return Ok(());
        }
        let empty = (0..epochs.min(MOST_CHECKED_EPOCHS)).find(|epoch| self.make(*epoch).batches() == 0);
        match empty.or((epochs > MOST_CHECKED_EPOCHS).then_some(MOST_CHECKED_EPOCHS)) {
            Some(epoch) => Err(SampleError::NoFullGroup { batch, groups, seeds, epoch }),
            None => Ok(()),
        }
    }

    fn key(&self, epoch: u64) -> Key {
        Key::new(self.grouping.seed).with(PURPOSE_GROUPS).with(epoch)
    }

    /// The number of seeds in a partition.
    fn count(&self, partition: u32) -> u64 {
        self.starts[partition as usize + 1] - self.starts[partition as usize]
    }

    /// The groups of an epoch: those that are kept, or made now.
    fn groups_of(&self, epoch: u64) -> Arc<EpochGroups> {
        let mut kept = self.epochs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(found) = kept.iter().find(|groups| groups.epoch == epoch) {
            return found.clone();
        }
        let made = Arc::new(self.make(epoch));
        if kept.len() == KEPT_EPOCHS {
            kept.remove(0);
        }
        kept.push(made.clone());
        made
    }

    fn make(&self, epoch: u64) -> EpochGroups {
        let count = self.grouping.partitions as u64;
        let order = Permutation::new(count, self.key(epoch));
        let partitions: Vec<u32> = (0..count).map(|at| order.forward(at) as u32).collect();
        let mut first_batches = Vec::with_capacity(self.grouping.groups() as usize + 1);
        let mut batches = 0;
        for group in partitions.chunks(self.grouping.group as usize) {
            first_batches.push(batches);
            let seeds: u64 = group.iter().map(|partition| self.count(*partition)).sum();
            batches +=
                if self.grouping.drop_last { seeds / self.batch } else { seeds.div_ceil(self.batch.get()) };
        }
        first_batches.push(batches);
        EpochGroups { epoch, partitions, first_batches }
    }
}

impl EpochGroups {
    fn batches(&self) -> u64 {
        self.first_batches.last().copied().unwrap_or(0)
    }

    /// The group of a batch that exists.
    fn group_of(&self, batch: u64) -> usize {
        self.first_batches.partition_point(|first| *first <= batch) - 1
    }

    /// The partitions of a group of `size` partitions.
    fn partitions_of(&self, group: usize, size: usize) -> &[u32] {
        self.partitions.chunks(size).nth(group).unwrap_or(&[])
    }
}

impl Order for Groups {
    fn batches(&self, epoch: u64) -> u64 {
        self.groups_of(epoch).batches()
    }

    fn items(&self, epoch: u64, batch: u64, out: &mut Vec<u64>) -> Result<()> {
        let groups = self.groups_of(epoch);
        if batch >= groups.batches() {
            return Err(SampleError::NoSuchBatch { epoch, batch, batches: groups.batches() });
        }
        let group = groups.group_of(batch);
        let partitions = groups.partitions_of(group, self.grouping.group as usize);
        // Where the seeds of each partition end among those of the group.
        let ends: Vec<u64> = partitions
            .iter()
            .scan(0, |end, partition| {
                *end += self.count(*partition);
                Some(*end)
            })
            .collect();
        let seeds = ends.last().copied().unwrap_or(0);
        let shuffled = Permutation::new(seeds, self.key(epoch).with(group as u64));
        let start = (batch - groups.first_batches[group]) * self.batch.get();
        out.clear();
        out.extend((start..start.saturating_add(self.batch.get()).min(seeds)).map(|at| {
            let index = shuffled.forward(at);
            let number = ends.partition_point(|end| *end <= index);
            let before = if number == 0 { 0 } else { ends[number - 1] };
            self.items[(self.starts[partitions[number] as usize] + index - before) as usize]
        }));
        Ok(())
    }

    fn group(&self, epoch: u64, batch: u64) -> Option<BatchGroup> {
        let groups = self.groups_of(epoch);
        let number = (batch < groups.batches()).then(|| groups.group_of(batch))?;
        let partitions = groups.partitions_of(number, self.grouping.group as usize);
        Some(BatchGroup {
            epoch,
            number: number as u64,
            batches: groups.first_batches[number]..groups.first_batches[number + 1],
            partitions: partitions.iter().copied().map(PartitionId).collect(),
        })
    }

    fn identity(&self) -> String {
        let Grouping { partitions, digest, group, batch, drop_last, seed } = &self.grouping;
        format!(
            "groups(count={},batch={batch},drop_last={drop_last},seed={seed},group={group},partitions={partitions},xxh3={digest})",
            self.items.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::tests::epoch_of;
    use proptest::prelude::*;

    fn grouping(partitions: u32, group: u32, batch: u64) -> Grouping {
        Grouping { partitions, digest: "d".into(), group, batch, drop_last: false, seed: 3 }
    }

    fn partitions(numbers: &[u32]) -> Vec<PartitionId> {
        numbers.iter().copied().map(PartitionId).collect()
    }

    proptest! {
        #[test]
        fn an_epoch_has_every_seed_once_and_no_batch_has_seeds_of_two_groups(
            of_seeds in prop::collection::vec(0u32..30, 1..300),
            group in 1u32..40,
            batch in 1u64..40,
            seed in any::<u64>(),
        ) {
            let grouping = Grouping { seed, ..grouping(30, group, batch) };
            let order = Groups::new(grouping.clone(), &partitions(&of_seeds)).unwrap();
            for epoch in [0, 1, 7, u64::MAX] {
                let batches = epoch_of(&order, epoch);
                prop_assert!(batches.len() as u64 <= grouping.most_batches(of_seeds.len() as u64));
                let mut items = batches.concat();
                items.sort_unstable();
                prop_assert!(items.into_iter().eq(0..of_seeds.len() as u64));
                // The group of each partition, from the permutation itself.
                let permuted = Permutation::new(30, Key::new(seed).with(PURPOSE_GROUPS).with(epoch));
                let group_of = |item: u64| permuted.backward(of_seeds[item as usize] as u64) / group as u64;
                let mut before = 0;
                for (at, items) in batches.iter().enumerate() {
                    let own = group_of(items[0]);
                    prop_assert!(own >= before && items.iter().all(|item| group_of(*item) == own));
                    let ends_group = batches.get(at + 1).is_none_or(|next| group_of(next[0]) != own);
                    prop_assert!(items.len() as u64 == batch || ends_group && (items.len() as u64) < batch);
                    before = own;
                }
                // Without smaller batches: the same, less those.
                let dropping = Grouping { drop_last: true, ..grouping.clone() };
                let order = Groups::new(dropping, &partitions(&of_seeds)).unwrap();
                let full: Vec<_> = batches.into_iter().filter(|items| items.len() as u64 == batch).collect();
                prop_assert_eq!(epoch_of(&order, epoch), full);
            }
            // An order is refused if an epoch has no full batch, and only then.
            let order = Groups::new(Grouping { drop_last: true, ..grouping }, &partitions(&of_seeds)).unwrap();
            for epochs in [1, 3, 30] {
                let is_full = (0..epochs).all(|epoch| order.batches(epoch) > 0);
                prop_assert_eq!(order.check_full(epochs).is_ok(), is_full);
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_repeat() {
        let of_seeds = partitions(&(0..500).map(|item| item % 25).collect::<Vec<_>>());
        let order = |seed| Groups::new(Grouping { seed, ..grouping(25, 4, 16) }, &of_seeds).unwrap();
        assert_eq!(epoch_of(&order(1), 3), epoch_of(&order(1), 3));
        assert_ne!(epoch_of(&order(1), 3), epoch_of(&order(1), 4));
        assert_ne!(epoch_of(&order(1), 3), epoch_of(&order(2), 3));
        // The number of batches may differ from epoch to epoch.
        let uneven: Vec<u32> =
            (0..25).flat_map(|partition| vec![partition; (partition * partition) as usize]).collect();
        let order = Groups::new(grouping(25, 4, 100), &partitions(&uneven)).unwrap();
        let counts: std::collections::BTreeSet<u64> = (0..20).map(|epoch| order.batches(epoch)).collect();
        assert!(counts.len() > 1, "{counts:?}");
    }

    #[test]
    fn identities_tell_every_setting_apart() {
        let of_seeds = partitions(&[0, 1, 2, 2]);
        let plain = grouping(3, 2, 2);
        let others = [
            Grouping { digest: "e".into(), ..plain.clone() },
            Grouping { group: 3, ..plain.clone() },
            Grouping { batch: 1, ..plain.clone() },
            Grouping { seed: 4, ..plain.clone() },
            Grouping { partitions: 4, ..plain.clone() },
        ];
        let identity = |grouping: &Grouping| Groups::new(grouping.clone(), &of_seeds).unwrap().identity();
        assert_eq!(identity(&plain), identity(&plain));
        others.iter().for_each(|other| assert_ne!(identity(other), identity(&plain)));
    }

    #[test]
    fn what_has_no_batches_is_refused() {
        let of_seeds = partitions(&[0, 1, 2, 2]);
        let refused = |grouping: Grouping| Groups::new(grouping, &of_seeds).err().unwrap().to_string();
        assert!(refused(grouping(3, 2, 0)).contains("batches of 0"));
        assert!(refused(grouping(3, 0, 2)).contains("partitions in a group"));
        let dropping = Groups::new(Grouping { drop_last: true, ..grouping(3, 1, 3) }, &of_seeds).unwrap();
        let said = dropping.check_full(1).unwrap_err().to_string();
        assert!(said.contains("3 groups") && said.contains("batches of 3"), "{said}");
        let order = Groups::new(grouping(3, 2, 2), &of_seeds).unwrap();
        let said = order.items(1, 9, &mut Vec::new()).unwrap_err().to_string();
        assert!(said.contains("batch 9 of epoch 1"), "{said}");
        let none = Groups::new(grouping(3, 2, 2), &[]).unwrap();
        assert_eq!(none.batches(0), 0);
    }
}
