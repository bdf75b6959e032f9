//! Rows that a device caches for all batches.

use crate::{Device, HostBytes, Result};
use esker_plan::Placements;
use std::convert::Infallible;
use std::sync::Arc;

/// Cached rows in their stored form. The first slots are in the device's own memory, the others in pinned host memory
/// that the device reads directly.
pub trait RowCache: Send + Sync + 'static {
    /// Memory for the missed rows of one batch.
    type Missed: HostBytes;
    /// The rows of a batch, to be assembled by [`Device::assemble`].
    type Batch: Send + 'static;

    /// Number of slots in the device's own memory: the first ones.
    fn device_slots(&self) -> u64;
    /// Writes rows, in their stored form, into slots, starting at `first`. Asserts that these slots exist.
    fn fill(&self, first: u64, stored: &[u8]) -> Result<()>;
    /// Host memory for this many bytes of missed rows of a batch, with unspecified content.
    fn missed(&self, bytes: usize) -> Self::Missed;
    /// The rows of a batch: from cache slots and from missed rows. Asserts that placements refer to nothing else.
    fn batch(self: &Arc<Self>, placements: &Placements, missed: Self::Missed) -> Self::Batch;
}

/// A device's memory for the missed rows of a batch.
pub type MissedOf<D> = <<D as Device>::Cache as RowCache>::Missed;
/// The rows of a batch, to be assembled by a device.
pub type BatchOf<D> = <<D as Device>::Cache as RowCache>::Batch;

impl HostBytes for Infallible {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match *self {}
    }
}

/// For a device that caches no rows.
impl RowCache for Infallible {
    type Missed = Infallible;
    type Batch = Infallible;

    fn device_slots(&self) -> u64 {
        match *self {}
    }

    fn fill(&self, _: u64, _: &[u8]) -> Result<()> {
        match *self {}
    }

    fn missed(&self, _: usize) -> Infallible {
        match *self {}
    }

    fn batch(self: &Arc<Self>, _: &Placements, missed: Infallible) -> Infallible {
        missed
    }
}
