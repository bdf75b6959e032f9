//! Rows that a device caches for all batches.

use crate::{Device, HostBytes, Result};
use esker_plan::Placements;
use std::convert::Infallible;
use std::sync::Arc;

/// Rows cached as stored: the first slots in memory of the device's own, the others in pinned host memory that it reads by itself.
pub trait RowCache: Send + Sync + 'static {
    /// Memory for the rows that one batch reads.
    type Missed: HostBytes;
    /// The rows of a batch, to be assembled by [`Device::assemble`].
    type Batch: Send + 'static;

    /// Slots in memory of the device's own: the first ones.
    fn device_slots(&self) -> u64;
    /// Puts rows, as stored, into slots from `first` on. Asserts that there are such slots.
    fn fill(&self, first: u64, stored: &[u8]) -> Result<()>;
    /// Host memory for so many bytes of rows that a batch reads, of unspecified content.
    fn missed(&self, bytes: usize) -> Self::Missed;
    /// The rows of a batch: from slots, and from what it read. Asserts that placements name nothing else.
    fn batch(self: &Arc<Self>, placements: &Placements, missed: Self::Missed) -> Self::Batch;
}

/// Memory of a device for the rows that a batch reads.
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
