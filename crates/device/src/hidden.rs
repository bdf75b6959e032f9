//! Hidden rows that a device keeps between steps: a step pushes rows, later ones pull them.

use crate::Result;
use esker_types::{Dtype, StoredRows};

/// The size of a store of hidden rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenShape {
    /// Number of rows.
    pub slots: u64,
    /// Numbers per row.
    pub columns: usize,
    /// How numbers are stored: f32 or f16.
    pub dtype: Dtype,
    /// A device with its own memory has as many rows there as fit into this. The others are in pinned host memory.
    pub device_bytes: u64,
}

impl HiddenShape {
    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        StoredRows { columns: self.columns, dtype: self.dtype, scales: None }.row_bytes()
    }

    /// Rows in the memory of a device that has its own: the first ones.
    pub fn device_slots(&self) -> u64 {
        // Rows begin at whole words where the device is the host.
        (self.device_bytes / self.row_bytes().next_multiple_of(4).max(4) as u64).min(self.slots)
    }
}

/// Hidden rows, all zero at first. Calls are executed in the order in which they are made, among those of the device.
/// None waits for the device but [`HiddenRows::drift`], [`HiddenRows::read`] and [`HiddenRows::write`].
pub trait HiddenRows: Send + Sync + 'static {
    /// The device's matrices.
    type Matrix;

    /// Its size.
    fn shape(&self) -> HiddenShape;
    /// `to[i]` becomes the row of `slots[i]`, as f32.
    fn pull(&self, slots: &[u32], to: &mut Self::Matrix);
    /// The row of `slots[i]` becomes `rows[i]`, rounded to the stored dtype: to the nearest number, of two equally near
    /// ones to the even one, and at most to the largest finite one. Slots do not repeat. Where `replaces[i]`, it adds to
    /// the drift how far the row moves: the norm of the difference over that of the row before, both as stored; 1 if only
    /// the row before is zero. Asserts that slots exist.
    fn push(&mut self, rows: &Self::Matrix, slots: &[u32], replaces: &[bool]);
    /// The sum of all that so far.
    fn drift(&self) -> Result<f64>;
    /// Copies rows in their stored form, starting at slot `first`.
    fn read(&self, first: u64, stored: &mut [u8]);
    /// Replaces rows by others in their stored form, starting at slot `first`.
    fn write(&mut self, first: u64, stored: &[u8]);
}
