//! The orders for training nodes (Marius++ section 5.3): dispersed, where every partition is resident at some time and
//! enters once (Algorithm 5); and training nodes first (the paper's Sequential), where they are all resident.

use super::{LogicalSwap, PartitionCounts, Shuffler, Walk, shuffled};
use esker_types::random::Key;
use esker_types::{PartitionId, PartitionStep, StepWork};

/// A walk over `count` partitions, of which `resident` fit: those on disk enter in random order, each at a random slot.
pub(super) fn walk(count: u32, resident: u32, random: &mut Shuffler) -> Walk {
    let mut first = random.permutation(count);
    let on_disk = first.split_off(resident as usize);
    let swaps = on_disk
        .into_iter()
        .map(|enters| LogicalSwap { slot: random.below(resident as u64) as u32, enters })
        .collect();
    Walk { first, swaps }
}

/// The only step of an epoch: the first `training` partitions, and random others.
pub(super) fn training_first(counts: &PartitionCounts, training: u32, key: Key) -> PartitionStep {
    let others = shuffled(counts.partitions - training, key).into_iter().map(|other| training + other);
    let resident = (0..training).chain(others).take(counts.resident as usize).map(PartitionId);
    let trained = (0..training).map(PartitionId).collect();
    PartitionStep { resident: resident.collect(), swaps: Vec::new(), work: StepWork::Partitions(trained) }
}
