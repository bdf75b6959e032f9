//! A device, CPU or GPU, without its math: memory, copies, row caches and graphs.
//!
//! Code that brings batches to a device needs only [`Device`]: strategies and batches are generic over it. `nn` adds
//! the math as a trait on top, and implements both for the CPU and for NVIDIA GPUs.
#![forbid(unsafe_code)]

mod adjacency;
mod cache;
mod error;
mod hidden;

pub use adjacency::{Adjacency, AdjacencyShape};
pub use cache::{BatchOf, MissedOf, RowCache};
pub use error::{DeviceError, Result};
pub use hidden::{HiddenRows, HiddenShape};

use esker_types::StoredRows;
use std::sync::Arc;

/// Rows and columns of a matrix.
pub trait Shape {
    /// Rows.
    fn rows(&self) -> usize;
    /// Columns.
    fn columns(&self) -> usize;
}

/// A number that may not have arrived from the device yet.
pub trait Deferred: Send {
    /// Waits for the number. An infinite number or NaN is an error.
    fn wait(self) -> Result<f64>;
}

/// Numbers that are exchanged with a matrix at a time.
const EXCHANGED_NUMBERS: usize = 1 << 16;

/// Host memory for rows of f32, in a form that the device reads fastest.
pub trait HostRows: Send + 'static {
    /// The numbers, row-major.
    fn values_mut(&mut self) -> &mut [f32];
}

/// Host memory for rows in their stored form, one after the other.
pub trait HostBytes: Send + 'static {
    /// All bytes. If they start on a page boundary, direct reads go into them without a copy.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// A device that stores matrices. Calls with shapes that do not match are bugs and fail an assertion. An asynchronous
/// device may fail in work that was submitted earlier: from then on it does nothing, and [`Device::check`] returns the
/// error.
///
/// Calls are executed in the order in which they are made: a read of a matrix sees all earlier writes to it.
pub trait Device: Clone + Send + Sync + 'static {
    /// A matrix of f32 on this device. After a drop, its memory is reused for the next one.
    type Matrix: Shape + Send + Sync + 'static;
    /// The adjacency of a layer on this device.
    type Graph: AdjacencyShape + Send + Sync + 'static;
    /// The adjacency of a layer in host memory, in a form that the device reads fastest.
    type StagedGraph: Send + 'static;
    /// Host memory that [`Device::upload`] takes rows from.
    type HostRows: HostRows;
    /// A row cache for all batches; [`std::convert::Infallible`] if host memory is as good.
    type Cache: RowCache;
    /// Hidden rows that steps exchange.
    type Hidden: HiddenRows<Matrix = Self::Matrix>;
    /// A loss or a norm.
    type Number: Deferred + 'static;
    /// Training steps that may be submitted to the device before the loss of the first is waited for; 0 for a
    /// synchronous device.
    const STEPS_IN_FLIGHT: usize;

    /// Whether matrices are in host memory and count there; otherwise they are in the device's own memory.
    fn in_host_memory(&self) -> bool;
    /// Limit on its own memory, if there is one.
    fn memory_limit(&self) -> Option<u64> {
        None
    }
    /// Largest number of bytes that matrices and graphs have taken at one time.
    fn peak_bytes(&self) -> u64;
    /// Frees host memory that is kept for later matrices, before work that needs matrices of other sizes.
    fn release_free(&self) {}
    /// Sets the host memory that may be kept for later matrices, beyond the most that was in use at one time. Without it,
    /// more matrices are allocated anew.
    fn set_reuse_bytes(&self, _bytes: u64) {}
    /// Seconds that parts of an asynchronous device have been busy so far.
    fn busy_seconds(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
    /// The first failure since the device was opened, if any.
    fn check(&self) -> Result<()>;

    /// Host memory for this many rows, with unspecified content.
    fn host_rows(&self, rows: usize, columns: usize) -> Self::HostRows;
    /// Copies rows to the device. Work on other batches may continue meanwhile.
    fn upload(&self, rows: Self::HostRows, columns: usize) -> Self::Matrix;
    /// Allocates a cache for rows that all batches share. As many slots as fit into `device_bytes` are in the device's
    /// own memory, the others in pinned host memory that it reads. `None` if the device computes in host memory and
    /// gains nothing.
    fn cache(&self, _rows: &StoredRows, _slots: u64, _device_bytes: u64) -> Result<Option<Arc<Self::Cache>>> {
        Ok(None)
    }
    /// Assembles the rows of a batch from a cache and from missed rows. Work on other batches may continue meanwhile.
    fn assemble(&self, batch: BatchOf<Self>, columns: usize) -> Self::Matrix;

    /// A store of hidden rows. An error if there is too little memory.
    fn hidden_rows(&self, shape: HiddenShape) -> Result<Self::Hidden>;

    /// A matrix with unspecified content.
    fn matrix(&self, rows: usize, columns: usize) -> Self::Matrix;
    /// Copies rows from host memory into the matrix, starting at row `first`.
    fn write(&self, matrix: &mut Self::Matrix, first: usize, values: &[f32]);
    /// Copies rows into host memory, starting at row `first`. Waits for the device.
    fn read(&self, matrix: &Self::Matrix, first: usize, values: &mut [f32]);
    /// Swaps rows of the matrix, starting at row `first`, with rows in host memory. Waits for the device.
    fn exchange(&self, matrix: &mut Self::Matrix, first: usize, values: &mut [f32]) {
        let columns = matrix.columns().max(1);
        let rows = (EXCHANGED_NUMBERS / columns).max(1);
        let (mut held, mut row) = (vec![0.0; rows * columns], first);
        for part in values.chunks_mut(rows * columns) {
            let held = &mut held[..part.len()];
            self.read(matrix, row, held);
            self.write(matrix, row, part);
            part.copy_from_slice(held);
            row += part.len() / columns;
        }
    }
    /// Sets every number.
    fn fill(&self, matrix: &mut Self::Matrix, value: f32);
    /// `to[i] = from[rows[i]]`.
    fn gather_rows(&self, from: &Self::Matrix, rows: &[u32], to: &mut Self::Matrix);
    /// `to[rows[i]] = from[i]`, or zeros without `from`. Rows do not repeat.
    fn scatter_rows(&self, from: Option<&Self::Matrix>, rows: &[u32], to: &mut Self::Matrix);
    /// `to[rows[i]] += scale * from[i]`. Rows do not repeat.
    fn add_rows(&self, from: &Self::Matrix, rows: &[u32], scale: f32, to: &mut Self::Matrix);
    /// `to[i][to_first + j] = from[i][from_first + j]` for `count` columns. Both matrices have as many rows. Does not wait
    /// for the device.
    fn copy_columns(
        &self,
        from: &Self::Matrix,
        from_first: usize,
        to: &mut Self::Matrix,
        to_first: usize,
        count: usize,
    );
    /// The adjacency of a layer. Asserts that every neighbour is an input.
    fn graph(&self, adjacency: &Adjacency<'_>) -> Self::Graph {
        self.upload_graph(self.stage_graph(adjacency))
    }
    /// Checks and copies the adjacency of a layer for [`Device::upload_graph`]. Threads other than that of the steps do
    /// it ahead of them. Asserts that every neighbour is an input.
    fn stage_graph(&self, adjacency: &Adjacency<'_>) -> Self::StagedGraph;
    /// The adjacency of a layer that was staged.
    fn upload_graph(&self, staged: Self::StagedGraph) -> Self::Graph;
    /// Neighbours among some rows, of targets that are not among them: target `i` has the neighbours
    /// `nbrs[nbr_offsets[i]..nbr_offsets[i + 1]]`. Asserts that every neighbour is below `inputs`.
    fn part_graph(&self, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> Self::Graph;
}
