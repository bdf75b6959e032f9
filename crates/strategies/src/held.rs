//! Rows that a run holds for all its batches, where the processor that trains reads them best: the first of them in its own
//! memory, the others in host memory that its threads reach. A processor that computes from host memory holds none this way.

use crate::Result;
use esker_fetch::RowFormat;
use esker_plan::Placements;
use std::sync::Arc;

/// What is to be held.
pub struct Hold<'a> {
    /// Rows, in slots 0, 1, 2... in order of falling use.
    pub slots: u64,
    /// How rows are stored.
    pub format: &'a RowFormat,
}

/// Holds rows for a processor.
pub trait RowHolder<R>: Send + Sync {
    /// Rows of this format that fit the processor's own memory: slots that take none of the host's. 0 where it has none.
    fn device_slots(&self, _format: &RowFormat) -> u64 {
        0
    }

    /// Makes room: as many slots as fit in the processor's own memory, the others in exactly their bytes of host memory. `None`
    /// where the processor gains nothing by it, and rows are to be assembled in host memory.
    fn hold(&self, asked: &Hold<'_>) -> Result<Option<Arc<dyn HeldRows<R>>>>;
}

/// Rows held, and batches made from them.
pub trait HeldRows<R>: Send + Sync {
    /// Slots in the processor's own memory: the first ones.
    fn device_slots(&self) -> u64;

    /// Puts rows, as stored, into slots from `first` on. Comes before the first batch.
    fn fill(&self, first: u64, stored: &[u8]) -> Result<()>;

    /// Host memory for rows that only one batch brings, where the processor reads it; of unspecified content. Its bytes may exceed
    /// those of whole rows.
    fn missed(&self, bytes: usize) -> Box<dyn FreshRows>;

    /// The rows of a batch, from slots and from what it read. Asserts that placements name nothing else, and that `missed` was
    /// made here.
    fn batch(&self, placements: &Placements, missed: Box<dyn FreshRows>) -> R;
}

/// Memory for rows as stored, one after the other.
pub trait FreshRows: Send {
    /// All of it. Where it starts on a page, reads past the page cache land in it without a copy.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Back to what it was made as.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}
