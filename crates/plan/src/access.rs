//! What planners read, an access at a time.

use esker_types::NodeId;
use std::convert::Infallible;

/// A row as traces name it.
pub trait Row: Copy + Default + Send + 'static {
    /// Its place in an array by row.
    fn index(self) -> usize;
}

impl Row for u32 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl Row for u64 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl Row for NodeId {
    #[inline(always)]
    fn index(self) -> usize {
        NodeId::index(self)
    }
}

/// The rows that batches access. A batch names a row once.
pub trait AccessTrace {
    /// How rows are named.
    type Row: Row;
    /// What reading can end with.
    type Error;

    /// Batches.
    fn batches(&self) -> u32;

    /// Replaces `rows` by those of a batch. Planners go through batches in order, from either end.
    fn read(&mut self, batch: u32, rows: &mut Vec<Self::Row>) -> Result<(), Self::Error>;
}

impl<R: Row> AccessTrace for &[Vec<R>] {
    type Row = R;
    type Error = Infallible;

    fn batches(&self) -> u32 {
        self.len() as u32
    }

    fn read(&mut self, batch: u32, rows: &mut Vec<R>) -> Result<(), Infallible> {
        rows.clear();
        rows.extend_from_slice(&self[batch as usize]);
        Ok(())
    }
}
