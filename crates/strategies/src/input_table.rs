//! Input rows of all nodes.

use crate::Result;
use esker_types::NodeId;

/// Reads the rows of nodes as f32. Rows with a mark are skipped; there may be no marks.
type ReadRows = Box<dyn FnMut(&[NodeId], &[bool], &mut [f32]) -> Result<()> + Send>;

/// Reads the rows that the first layer gets, of any nodes.
pub struct InputTable {
    dim: usize,
    nodes: u64,
    read: ReadRows,
}

impl InputTable {
    /// Rows of `dim` numbers for this many nodes.
    pub fn new(
        nodes: u64,
        dim: usize,
        read: impl FnMut(&[NodeId], &[bool], &mut [f32]) -> Result<()> + Send + 'static,
    ) -> InputTable {
        InputTable { dim, nodes, read: Box::new(read) }
    }

    /// Numbers per row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Reads the rows of nodes, one after the other. `skipped` has a mark per node, or is empty; rows with a mark have
    /// unspecified content.
    pub fn read(&mut self, nodes: &[NodeId], skipped: &[bool], values: &mut [f32]) -> Result<()> {
        (self.read)(nodes, skipped, values)
    }
}
