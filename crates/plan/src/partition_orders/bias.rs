//! The edge permutation bias (Marius++ section 6): how uneven an epoch is at its worst. Each node has a tally, the share
//! of its edges that were trained so far. The bias is the largest difference between the tallies of two nodes after any
//! step: 0 if all nodes advance alike, 1 if a node was done before another began. Degrees are taken as equal, so all
//! nodes of a partition have one tally.

use esker_types::{PartitionStep, StepWork};

/// The edge permutation bias of an epoch's steps; 0 where nodes are trained, not edges.
pub fn edge_permutation_bias(partitions: u32, steps: &[PartitionStep]) -> f64 {
    // In buckets: a partition is the source of all its buckets, and the target of as many.
    let all = 2 * partitions as u64;
    let mut tallies = vec![0u64; partitions as usize];
    let mut widest = 0;
    for step in steps {
        let StepWork::Buckets(buckets) = &step.work else { return 0.0 };
        for bucket in buckets {
            tallies[bucket.source.0 as usize] += 1;
            tallies[bucket.target.0 as usize] += 1;
        }
        let most = tallies.iter().max().copied().unwrap_or(0);
        let least = tallies.iter().min().copied().unwrap_or(0);
        widest = widest.max(most - least);
    }
    widest as f64 / all as f64
}
