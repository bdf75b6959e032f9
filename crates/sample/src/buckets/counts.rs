//! How many edges each bucket has. It takes one pass over the graph, so it is known before edges are sorted: memory is
//! asked for exactly what the steps of a run need.

use super::EdgeBuckets;
use crate::node_partitions::NodePartitions;
use crate::true_ends::for_each_edge_until;
use crate::{Result, SampleError};
use esker_store::Dataset;
use esker_types::{EdgeBucket, PartitionId, PartitionStep, PartitionSteps, Progress, StopSignal, Unit};
use std::sync::Arc;

/// Of epochs that take longer to look at, some are looked at.
const MOST_LOOKS: u64 = 1 << 28;
/// The others may have more edges in a step, by this part.
const MARGIN_PART: u64 = 8;
/// Edges between two reports of progress.
const PROGRESS_EDGES: u64 = 1 << 20;

/// Number of edges of every bucket.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BucketCounts {
    partitions: u32,
    counts: Vec<u64>,
}

/// The most edges that steps have in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResidentEdges {
    /// Between the residents of a step.
    pub resident: u64,
    /// The same, with those that are read for the next step meanwhile.
    pub with_next: u64,
    /// In a bucket.
    pub bucket: u64,
}

impl ResidentEdges {
    /// The same for steps that were not looked at, of a graph with so many edges.
    fn with_margin(self, all: u64) -> ResidentEdges {
        let more = |edges: u64, most: u64| (edges + edges / MARGIN_PART).min(most).max(edges);
        let (resident, with_next) = (more(self.resident, all), more(self.with_next, 2 * all));
        ResidentEdges { resident, with_next, ..self }
    }
}

impl BucketCounts {
    /// Bytes of the counts between so many partitions.
    pub fn bytes_for(partitions: u32) -> u64 {
        (partitions as u64).pow(2).saturating_mul(8)
    }

    /// The counts of a dataset. Where its edges are sorted already, no edge is read.
    pub fn of(
        dataset: &Arc<Dataset>,
        partitions: &NodePartitions,
        stop: &StopSignal,
        progress: &dyn Progress,
    ) -> Result<BucketCounts> {
        let count = partitions.count();
        // What is damaged is counted, and made again before training.
        if let Ok(Some(found)) = EdgeBuckets::find(dataset, partitions) {
            return Ok(BucketCounts { partitions: count, counts: found.counts() });
        }
        let edges = dataset.manifest().edges.count;
        progress.stage("count edges by partition", Some(edges), Unit::Count("edges"));
        let mut counts = vec![0u64; (count as usize).pow(2)];
        // The target of the edge before, and its partition.
        let (mut target, mut target_at, mut seen) = (None, PartitionId(0), 0u64);
        for_each_edge_until(dataset, &|| stop.is_asked(), &mut |edge| {
            if target != Some(edge.target) {
                (target, target_at) = (Some(edge.target), partitions.partition(edge.target));
            }
            let source = partitions.partition(edge.source);
            counts[EdgeBucket { source, target: target_at }.index(count)] += 1;
            seen += 1;
            if seen.is_multiple_of(PROGRESS_EDGES) {
                progress.advance(PROGRESS_EDGES);
            }
        })?;
        progress.finish();
        Ok(BucketCounts { partitions: count, counts })
    }

    /// By the index of buckets.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Fails if the sorted edges are not those that were counted.
    pub fn check(&self, found: &EdgeBuckets) -> Result<()> {
        let same = found.starts.windows(2).map(|pair| pair[1] - pair[0]).eq(self.counts.iter().copied());
        match same {
            true => Ok(()),
            false => Err(SampleError::Adjacency {
                path: found.array.path().to_path_buf(),
                expected: "as many edges in every bucket as were counted before".into(),
                found: "other numbers".into(),
            }),
        }
    }

    fn between(&self, one: PartitionId, other: PartitionId) -> u64 {
        let count = |source, target| self.counts[EdgeBucket { source, target }.index(self.partitions)];
        match one == other {
            true => count(one, one),
            false => count(one, other) + count(other, one),
        }
    }

    /// Edges between these partitions.
    pub fn among(&self, resident: &[PartitionId]) -> u64 {
        let pairs = (0..resident.len()).flat_map(|at| (0..=at).map(move |other| (at, other)));
        pairs.map(|(at, other)| self.between(resident[at], resident[other])).sum()
    }

    /// Edges between the partitions of either of two sets, whichever.
    pub fn among_either(&self, one: &[PartitionId], other: &[PartitionId]) -> u64 {
        let both: Vec<PartitionId> =
            one.iter().filter(|partition| other.contains(partition)).copied().collect();
        self.among(one) + self.among(other) - self.among(&both)
    }

    /// The most edges that the steps of the first `epochs` epochs have in memory.
    pub fn most(&self, order: &dyn PartitionSteps, epochs: u64) -> ResidentEdges {
        let bucket = self.counts.iter().copied().max().unwrap_or(0);
        let mut most = ResidentEdges { bucket, ..ResidentEdges::default() };
        let mut looks = 0;
        for epoch in 0..epochs {
            if looks > MOST_LOOKS {
                return most.with_margin(self.counts.iter().sum());
            }
            let steps = order.steps(epoch);
            looks += self.counts.len() as u64 + self.most_of(&steps, &mut most);
        }
        most
    }

    /// Adds the steps of an epoch. Returns how many buckets it looked at.
    fn most_of(&self, steps: &[PartitionStep], most: &mut ResidentEdges) -> u64 {
        let Some(first) = steps.first() else { return 0 };
        let (mut resident, mut slots) = (self.among(&first.resident), first.resident.clone());
        let mut looks = slots.len().pow(2);
        (most.resident, most.with_next) = (most.resident.max(resident), most.with_next.max(resident));
        for step in &steps[1..] {
            let (before, mut entering) = (resident, 0);
            for swap in &step.swaps {
                let with_others = |partition: PartitionId, slots: &[PartitionId]| -> u64 {
                    let others = slots.iter().enumerate().filter(|(slot, _)| *slot != swap.slot as usize);
                    others.map(|(_, other)| self.between(partition, *other)).sum::<u64>()
                        + self.between(partition, partition)
                };
                resident -= with_others(swap.leaves, &slots);
                let enters = with_others(swap.enters, &slots);
                (resident, entering) = (resident + enters, entering + enters);
                slots[swap.slot as usize] = swap.enters;
                looks += 2 * slots.len();
            }
            most.resident = most.resident.max(resident);
            most.with_next = most.with_next.max(before + entering);
        }
        looks as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_types::{PartitionSwap, StepWork};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Steps that swap one partition at a time, as the numbers say.
    #[derive(Debug)]
    struct Swapping {
        partitions: u32,
        resident: u32,
        swaps: Vec<(u32, u32)>,
    }

    impl PartitionSteps for Swapping {
        fn partitions(&self) -> u32 {
            self.partitions
        }

        fn trains_edges(&self) -> bool {
            true
        }

        fn step_count(&self) -> u64 {
            self.swaps.len() as u64 + 1
        }

        fn steps(&self, epoch: u64) -> Vec<PartitionStep> {
            let rotated = |at: u32| PartitionId((at + epoch as u32) % self.partitions);
            let mut resident: Vec<PartitionId> = (0..self.resident).map(rotated).collect();
            let work = || StepWork::Buckets(Vec::new());
            let mut steps = vec![PartitionStep { resident: resident.clone(), swaps: vec![], work: work() }];
            for (slot, enters) in &self.swaps {
                let (slot, enters) = (slot % self.resident, rotated(*enters));
                let mut swaps = Vec::new();
                if !resident.contains(&enters) {
                    let leaves = std::mem::replace(&mut resident[slot as usize], enters);
                    swaps.push(PartitionSwap { slot, leaves, enters });
                }
                steps.push(PartitionStep { resident: resident.clone(), swaps, work: work() });
            }
            steps
        }

        fn identity(&self) -> String {
            format!("{self:?}")
        }
    }

    proptest! {
        #[test]
        fn the_most_edges_are_those_of_every_step_counted_one_by_one(
            (partitions, resident, counts, swaps) in (1u32..8).prop_flat_map(|partitions| {
                let counts = proptest::collection::vec(0u64..50, (partitions * partitions) as usize);
                let swaps = proptest::collection::vec((0u32..8, 0u32..8), 0..8);
                (Just(partitions), 1..=partitions, counts, swaps)
            }),
            epochs in 1u64..4,
        ) {
            let order = Swapping { partitions, resident, swaps };
            let counts = BucketCounts { partitions, counts };
            let buckets = |resident: &[PartitionId]| -> BTreeSet<usize> {
                let pairs = resident.iter().flat_map(|source| resident.iter().map(move |target| (source, target)));
                pairs.map(|(source, target)| EdgeBucket { source: *source, target: *target }.index(partitions)).collect()
            };
            let edges = |buckets: &BTreeSet<usize>| buckets.iter().map(|at| counts.counts[*at]).sum::<u64>();
            let mut expected = ResidentEdges { bucket: *counts.counts.iter().max().unwrap(), ..Default::default() };
            for epoch in 0..epochs {
                let steps: Vec<BTreeSet<usize>> =
                    order.steps(epoch).iter().map(|step| buckets(&step.resident)).collect();
                for (at, step) in steps.iter().enumerate() {
                    expected.resident = expected.resident.max(edges(step));
                    let both = step.union(steps.get(at + 1).unwrap_or(step)).copied().collect();
                    expected.with_next = expected.with_next.max(edges(&both));
                }
            }
            prop_assert_eq!(counts.most(&order, epochs), expected);
        }
    }
}
