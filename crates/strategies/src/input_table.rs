//! Input rows of all nodes.

use crate::Result;
use esker_types::NodeId;

/// Reads the rows of nodes as f32, one after the other. It stays on the thread that opened it.
pub type ReadInputRows = Box<dyn FnMut(&[NodeId], &mut [f32]) -> Result<()>>;

/// The rows that the first layer gets, of any nodes.
pub struct InputTable {
    dim: usize,
    nodes: u64,
    open: Box<dyn Fn() -> Result<ReadInputRows> + Send + Sync>,
}

impl InputTable {
    /// Rows of `dim` numbers for this many nodes. `open` makes a reader, on the thread that reads.
    pub fn new(
        nodes: u64,
        dim: usize,
        open: impl Fn() -> Result<ReadInputRows> + Send + Sync + 'static,
    ) -> InputTable {
        InputTable { dim, nodes, open: Box::new(open) }
    }

    /// Numbers per row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// A reader for this thread. Opening one may be slow: use it again.
    pub fn reader(&self) -> Result<ReadInputRows> {
        (self.open)()
    }
}
