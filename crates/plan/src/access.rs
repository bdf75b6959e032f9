//! The input of planners, access by access.

use esker_types::NodeId;
use std::convert::Infallible;

/// A row id as stored in traces.
pub trait Row: Copy + Default + Send + 'static {
    /// Its index in an array with one element per row.
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

/// The rows that batches access. A batch accesses a row at most once.
pub trait AccessTrace {
    /// The type of row ids.
    type Row: Row;
    /// The error of reading.
    type Error;

    /// Number of batches.
    fn batches(&self) -> u32;

    /// Replaces `rows` by those of a batch. Planners read batches in order, forwards or backwards.
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
