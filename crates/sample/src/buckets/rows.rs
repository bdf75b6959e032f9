//! Which nodes are resident, and where: rows of a table that has a slot for every resident partition.

use crate::node_partitions::NodePartitions;
use crate::{Result, SampleError};
use esker_types::{NodeId, PartitionId};
use std::sync::Arc;

/// No slot.
const ABSENT: u32 = u32::MAX;

/// Which nodes are resident, and the row of each: rows of a slot follow those of the slot before.
#[derive(Debug, Clone)]
pub struct BufferRows {
    partitions: Arc<NodePartitions>,
    /// The partition of each slot.
    resident: Vec<PartitionId>,
    /// The slot of each partition, or [`ABSENT`].
    slot_of: Vec<u32>,
}

impl BufferRows {
    /// The rows of these partitions, by slot.
    pub fn new(partitions: &Arc<NodePartitions>, resident: &[PartitionId]) -> BufferRows {
        let mut slot_of = vec![ABSENT; partitions.count() as usize];
        for (slot, partition) in (0..).zip(resident) {
            slot_of[partition.index()] = slot;
        }
        BufferRows { partitions: partitions.clone(), resident: resident.to_vec(), slot_of }
    }

    /// The partitions of all nodes.
    pub fn partitions(&self) -> &Arc<NodePartitions> {
        &self.partitions
    }

    /// The partition of each slot.
    pub fn resident(&self) -> &[PartitionId] {
        &self.resident
    }

    /// Rows of a slot; the last may be unused.
    pub fn slot_rows(&self) -> u64 {
        self.partitions.largest()
    }

    /// All rows.
    pub fn rows(&self) -> u64 {
        self.slot_rows() * self.resident.len() as u64
    }

    /// The row of a node, if it is resident.
    #[inline]
    pub fn row(&self, node: NodeId) -> Option<u32> {
        let (partition, offset) = self.partitions.place(node);
        match self.slot_of[partition.index()] {
            ABSENT => None,
            slot => Some((slot as u64 * self.slot_rows() + offset) as u32),
        }
    }

    /// The rows of nodes that are all resident.
    pub fn rows_of(&self, nodes: &[NodeId]) -> Result<Vec<u32>> {
        nodes.iter().map(|node| self.row(*node).ok_or(SampleError::NotResident { node: node.0 })).collect()
    }

    /// The nodes of rows.
    pub fn nodes_of(&self, rows: &[u32]) -> Vec<u64> {
        let of = |row: &u32| {
            let (slot, offset) = (*row as u64 / self.slot_rows(), *row as u64 % self.slot_rows());
            self.partitions.node(self.resident[slot as usize], offset).0
        };
        rows.iter().map(of).collect()
    }
}
