//! Input rows of all nodes, in order.

use crate::Result;
use esker_types::NodeId;

/// Bytes of rows read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Reads the rows of nodes as f32.
type ReadRows = Box<dyn FnMut(&[NodeId], &mut [f32]) -> Result<()> + Send>;

/// Reads the rows of all nodes in node order, some at a time.
pub struct InputTable {
    dim: usize,
    nodes: u64,
    next: u64,
    read: ReadRows,
    ids: Vec<NodeId>,
    values: Vec<f32>,
}

impl InputTable {
    /// Rows of `dim` numbers for this many nodes.
    pub fn new(
        nodes: u64,
        dim: usize,
        read: impl FnMut(&[NodeId], &mut [f32]) -> Result<()> + Send + 'static,
    ) -> InputTable {
        InputTable { dim, nodes, next: 0, read: Box::new(read), ids: Vec::new(), values: Vec::new() }
    }

    /// Numbers per row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The next rows, and the node of the first of them; `None` after the last.
    pub fn next_rows(&mut self) -> Result<Option<(NodeId, &[f32])>> {
        let first = self.next;
        let count = ((CHUNK_BYTES / (self.dim * 4).max(1)).max(1) as u64).min(self.nodes - first);
        if count == 0 {
            return Ok(None);
        }
        self.ids.clear();
        self.ids.extend((first..first + count).map(NodeId));
        self.values.resize(count as usize * self.dim, 0.0);
        (self.read)(&self.ids, &mut self.values)?;
        self.next += count;
        Ok(Some((NodeId(first), &self.values)))
    }
}
