//! A device, CPU or GPU, without its math: memory, copies, caches of rows and graphs.
//!
//! Whoever brings batches to a device needs no more than [`Device`]: strategies and batches are generic over it. `nn` adds the
//! math as a trait on top, and implements both for the CPU and for NVIDIA GPUs.
#![forbid(unsafe_code)]

mod adjacency;
mod cache;
mod error;

pub use adjacency::{Adjacency, AdjacencyShape};
pub use cache::{BatchOf, MissedOf, RowCache};
pub use error::{DeviceError, Result};

use esker_types::StoredRows;
use std::sync::Arc;

/// Rows and columns of a matrix.
pub trait Shape {
    /// Rows.
    fn rows(&self) -> usize;
    /// Columns.
    fn columns(&self) -> usize;
}

/// A number that may still be on its way from the device that computes it.
pub trait Deferred: Send {
    /// The number, as soon as it is there. What is infinite or not a number is an error.
    fn wait(self) -> Result<f64>;
}

/// Host memory for rows of f32, where the device can best read them.
pub trait HostRows: Send + 'static {
    /// The numbers, row after row.
    fn values_mut(&mut self) -> &mut [f32];
}

/// Host memory for rows as stored, one after the other.
pub trait HostBytes: Send + 'static {
    /// All of it. Where it starts on a page, reads past the page cache go to it without a copy.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// A device that holds matrices. Shapes that do not fit are bugs of the caller and assert. A device that works on its own may
/// fail in work that was handed to it earlier: from then on it does nothing, and [`Device::check`] says why.
///
/// Calls are carried out in the order in which they are made: what reads a matrix sees what was written to it before.
pub trait Device: Clone + Send + Sync + 'static {
    /// A matrix of f32 on this device. Dropped, its memory serves the next one.
    type Matrix: Shape + Send + Sync + 'static;
    /// The adjacency of a layer on this device.
    type Graph: AdjacencyShape + Send + Sync + 'static;
    /// Host memory that [`Device::upload`] takes rows from.
    type HostRows: HostRows;
    /// A cache of rows for all batches; [`std::convert::Infallible`] where host memory serves as well.
    type Cache: RowCache;
    /// A loss or a norm.
    type Number: Deferred + 'static;
    /// Training steps that may be handed to the device before the loss of the first is waited for; 0 for one that is done when it
    /// returns.
    const STEPS_IN_FLIGHT: usize;

    /// Whether matrices lie in host memory, and count there; else they lie in memory of the device's own.
    fn in_host_memory(&self) -> bool;
    /// What may be held in memory of its own, where that has a limit.
    fn memory_limit(&self) -> Option<u64> {
        None
    }
    /// The most bytes that matrices and graphs have taken at one time.
    fn peak_bytes(&self) -> u64;
    /// Seconds that parts of the device have been busy so far, where it works on its own.
    fn busy_seconds(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
    /// What failed since the device was opened, if anything did.
    fn check(&self) -> Result<()>;

    /// Host memory for so many rows, of unspecified content.
    fn host_rows(&self, rows: usize, columns: usize) -> Self::HostRows;
    /// Brings rows to the device; work on other batches may go on meanwhile.
    fn upload(&self, rows: Self::HostRows, columns: usize) -> Self::Matrix;
    /// Makes room for rows that all batches share: as many of the slots as fit so many bytes in memory of its own, the others in
    /// pinned host memory that it reads. `None` where it gains nothing by that, since it computes in host memory.
    fn cache(&self, _rows: &StoredRows, _slots: u64, _device_bytes: u64) -> Result<Option<Arc<Self::Cache>>> {
        Ok(None)
    }
    /// Assembles the rows of a batch from a cache and from what the batch read; work on other batches may go on meanwhile.
    fn assemble(&self, batch: BatchOf<Self>, columns: usize) -> Self::Matrix;

    /// A matrix of unspecified content.
    fn matrix(&self, rows: usize, columns: usize) -> Self::Matrix;
    /// Copies rows from host memory into the matrix, from row `first` on.
    fn write(&self, matrix: &mut Self::Matrix, first: usize, values: &[f32]);
    /// Copies rows into host memory, from row `first` on. Waits for the device.
    fn read(&self, matrix: &Self::Matrix, first: usize, values: &mut [f32]);
    /// Sets every number.
    fn fill(&self, matrix: &mut Self::Matrix, value: f32);
    /// `to[i] = from[rows[i]]`.
    fn gather_rows(&self, from: &Self::Matrix, rows: &[u32], to: &mut Self::Matrix);
    /// `to[rows[i]] = from[i]`, or zeros without `from`. Rows do not repeat.
    fn scatter_rows(&self, from: Option<&Self::Matrix>, rows: &[u32], to: &mut Self::Matrix);
    /// `to[rows[i]] += scale * from[i]`. Rows do not repeat.
    fn add_rows(&self, from: &Self::Matrix, rows: &[u32], scale: f32, to: &mut Self::Matrix);
    /// The adjacency of a layer. Asserts that every neighbour is an input.
    fn graph(&self, adjacency: &Adjacency<'_>) -> Self::Graph;
}
