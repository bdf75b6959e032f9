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
    order: Option<NodeOrder>,
}

/// The order in which rows are stored.
struct NodeOrder {
    /// The node at a position.
    node_at: Box<dyn Fn(u64) -> NodeId + Send + Sync>,
    /// The position of a node.
    position: Box<dyn Fn(NodeId) -> u64 + Send + Sync>,
}

impl InputTable {
    /// Rows of `dim` numbers for this many nodes. `open` makes a reader, on the thread that reads.
    pub fn new(
        nodes: u64,
        dim: usize,
        open: impl Fn() -> Result<ReadInputRows> + Send + Sync + 'static,
    ) -> InputTable {
        InputTable { dim, nodes, open: Box::new(open), order: None }
    }

    /// The same table, whose rows are stored in another order than that of nodes: the node at a position, and the
    /// position of a node.
    pub fn in_order(
        mut self,
        node_at: impl Fn(u64) -> NodeId + Send + Sync + 'static,
        position: impl Fn(NodeId) -> u64 + Send + Sync + 'static,
    ) -> InputTable {
        self.order = Some(NodeOrder { node_at: Box::new(node_at), position: Box::new(position) });
        self
    }

    /// Whether rows are stored in the order of nodes.
    pub fn is_by_node(&self) -> bool {
        self.order.is_none()
    }

    /// The nodes at `count` positions from `first` on, in the order in which reading all rows is fastest.
    pub fn nodes_at(&self, first: u64, count: u64, nodes: &mut Vec<NodeId>) {
        nodes.clear();
        let positions = first..first + count;
        match &self.order {
            Some(order) => nodes.extend(positions.map(&order.node_at)),
            None => nodes.extend(positions.map(NodeId)),
        }
    }

    /// The position of a node in this order.
    pub fn position(&self, node: NodeId) -> u64 {
        self.order.as_ref().map_or(node.0, |order| (order.position)(node))
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
