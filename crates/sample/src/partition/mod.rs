//! Divides the nodes of a graph into partitions of equal size with few edges between them (OUTRE, section 4.2). The
//! graph streams by from disk, several times. In memory are the partition of each node and little else.
//!
//! Clusters grow first (`clusters.rs`), and the largest are the first nodes of partitions; [`Fennel`] chooses for all others, and
//! again for all; [`make`] streams, keeps every finished pass and publishes the result as derived data of the
//! dataset; [`StoredPartitioning`] is that data. The result depends on the graph, its training nodes, the number of
//! partitions and the number of passes, not on memory or interruptions. What it leaves out: the paper's Bloom filters
//! and two levels, which are not needed here.

mod clusters;
mod fennel;
mod given;
mod least_loaded;
mod make;
mod stored;

pub use fennel::{Fennel, PartitionShape};
pub use make::{PartitionMade, PartitionPass, PartitionSource, PartitionWork, make};
pub(crate) use stored::PartitionStream;
pub use stored::{PartitionMethod, PartitionRequest, PartitionSummary, StoredPartitioning};

use crate::{Result, SampleError};
use esker_store::{Dataset, SplitOver};

/// Partitions in a group of the order by groups, unless requested otherwise. OUTRE has 20; twice as many, of half the
/// size, train like shuffled batches.
pub const USUAL_GROUP: u32 = 40;
/// Passes over the graph, unless requested otherwise.
pub const USUAL_PASSES: u32 = 3;
/// The name of a partitioning, unless requested otherwise.
pub const USUAL_NAME: &str = "default";
/// The largest number of partitions: one more must fit 32 bits.
pub const MOST_PARTITIONS: u32 = 1 << 31;
/// The largest number of partitions with numbers of 16 bits: one more must fit.
const MOST_NARROW: u32 = u16::MAX as u32;

/// The number of a partition in memory and on disk: `u16` or `u32`.
pub trait PartitionWord: bytemuck::Pod + Send + Sync + PartialEq {
    /// The number of a partition that is known to fit.
    fn of(partition: u32) -> Self;
    /// As an index into an array by partition.
    fn index(self) -> usize;
}

impl PartitionWord for u16 {
    #[inline(always)]
    fn of(partition: u32) -> u16 {
        partition as u16
    }
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl PartitionWord for u32 {
    #[inline(always)]
    fn of(partition: u32) -> u32 {
        partition
    }
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

/// The number of partitions of which `group` together have two to three batches of training nodes.
pub fn automatic_partitions(dataset: &Dataset, batch: u64, group: u32) -> Result<u32> {
    let training = training_count(dataset);
    if training == 0 {
        return Err(SampleError::NoTrainingNodes { dataset: dataset.directory().to_path_buf() });
    }
    if batch == 0 {
        return Err(SampleError::EmptyBatches);
    }
    // Two and a half batches.
    let partitions = training as u128 * group.max(1) as u128 * 2 / (batch as u128 * 5);
    let most = dataset.manifest().nodes.count.min(MOST_PARTITIONS as u64);
    Ok(partitions.clamp(1, most.max(1) as u128) as u32)
}

/// Training nodes of a dataset; 0 if it trains on edges.
fn training_count(dataset: &Dataset) -> u64 {
    let splits = dataset.manifest().splits.as_ref();
    splits.filter(|splits| splits.over == SplitOver::Nodes).map_or(0, |splits| splits.train)
}
