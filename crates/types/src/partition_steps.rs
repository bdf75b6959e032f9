//! The steps of an epoch over partitions, of which some are resident at a time: who is resident, and what is trained.
//! `plan` decides them, `sample` makes batches of them, and `fetch` keeps the partitions in memory.

use crate::PartitionId;
use std::fmt::Debug;

/// The edges from the nodes of one partition to those of another, or of the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EdgeBucket {
    /// The partition of the sources.
    pub source: PartitionId,
    /// The partition of the targets.
    pub target: PartitionId,
}

impl EdgeBucket {
    /// Its number among the buckets of `partitions` partitions: source after source.
    pub fn index(self, partitions: u32) -> usize {
        self.source.0 as usize * partitions as usize + self.target.0 as usize
    }
}

/// A partition that replaces another at the start of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionSwap {
    /// The slot, by which both are resident.
    pub slot: u32,
    /// The partition that leaves.
    pub leaves: PartitionId,
    /// The partition that enters.
    pub enters: PartitionId,
}

/// What a step trains on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepWork {
    /// The edges of these buckets, by ascending source and target.
    Buckets(Vec<EdgeBucket>),
    /// The training nodes of these partitions, ascending.
    Partitions(Vec<PartitionId>),
}

/// A step of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionStep {
    /// The resident partition of every slot. A partition keeps its slot while it is resident.
    pub resident: Vec<PartitionId>,
    /// What changed since the step before; nothing in the first step of an epoch.
    pub swaps: Vec<PartitionSwap>,
    /// What is trained.
    pub work: StepWork,
}

/// An order over partitions: the steps of every epoch.
pub trait PartitionSteps: Debug + Send + Sync {
    /// Number of partitions.
    fn partitions(&self) -> u32;

    /// Whether steps train on edges, bucket by bucket; else on training nodes, partition by partition.
    fn trains_edges(&self) -> bool;

    /// Number of steps, the same in every epoch.
    fn step_count(&self) -> u64;

    /// The steps of an epoch, as a function of the epoch. Every bucket, or every partition with training nodes, is
    /// trained in exactly one of them.
    fn steps(&self, epoch: u64) -> Vec<PartitionStep>;

    /// A short text. Orders with equal texts have equal steps.
    fn identity(&self) -> String;
}
