use serde::{Deserialize, Serialize};

/// How wide node ids are on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdWidth {
    /// Ids fit 32 bits: half the topology bytes.
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
