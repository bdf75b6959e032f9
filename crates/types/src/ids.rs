use serde::{Deserialize, Serialize};

/// The width of node ids on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdWidth {
    /// Ids fit 32 bits: half the bytes of the topology.
    U32,
    /// More than 2^32 nodes.
    U64,
}

impl IdWidth {
    /// The narrowest width whose ids reach `nodes - 1`.
    pub fn for_nodes(nodes: u64) -> IdWidth {
        if nodes <= 1 << 32 { IdWidth::U32 } else { IdWidth::U64 }
    }

    /// The dtype of an id array of this width.
    pub fn dtype(self) -> crate::Dtype {
        match self {
            IdWidth::U32 => crate::Dtype::U32,
            IdWidth::U64 => crate::Dtype::U64,
        }
    }
}

/// A node of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct NodeId(pub u64);

/// An edge of the graph: its position in the in-neighbours (CSC).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct EdgeId(pub u64);

/// A node of one batch: its position in the batch's `node_ids`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, bytemuck::Pod, bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct LocalIndex(pub u32);

/// A slot of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct SlotIndex(pub u32);

/// A partition of a graph's nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct PartitionId(pub u32);

impl PartitionId {
    /// This partition as an index into an array by partition.
    #[inline(always)]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl SlotIndex {
    /// This slot as an index into an array by slot.
    #[inline(always)]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// This node as an index into an array by node.
    #[inline(always)]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl LocalIndex {
    /// This node as an index into an array by local node of the batch.
    #[inline(always)]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
