//! Feature rows of a batch, gathered into memory that earlier batches left. New memory costs more than the copy does: the kernel
//! clears each page at its first touch.

use crate::dlpack::{Borrowed, Column};
use esker_io::{AlignedBuffer, gather_past_caches, prefetch};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, Weak};

/// Buffers that wait for a batch: one for the batch that is used, one for the next.
const MOST_IDLE: usize = 2;
/// Rows that are prefetched ahead of the one being copied.
const AHEAD: usize = 8;
/// A thread is worth its start for this many bytes.
const THREAD_BYTES: usize = 2 << 20;
const LINE_BYTES: usize = 64;

type IdleBuffers = Mutex<Vec<AlignedBuffer>>;

/// Memory of a tensor, which goes back where it came from when the tensor is dropped.
struct LentBuffer {
    buffer: Option<AlignedBuffer>,
    home: Weak<IdleBuffers>,
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        let (Some(buffer), Some(home)) = (self.buffer.take(), self.home.upgrade()) else { return };
        // Nobody waits here: in a forked process, who holds the lock may not exist.
        if let Ok(mut idle) = home.try_lock()
            && idle.len() < MOST_IDLE
        {
            idle.push(buffer);
        }
    }
}

/// Gathers rows of tensors. Their memory is used again when Python drops them, and freed with this.
#[pyclass(module = "esker._esker", name = "Rows", frozen)]
pub(crate) struct RowGatherer {
    idle: Arc<IdleBuffers>,
}

impl RowGatherer {
    /// A buffer of at least so many bytes, and not of many more.
    fn buffer(&self, bytes: usize) -> AlignedBuffer {
        let found = self.idle.try_lock().ok().and_then(|mut idle| {
            let fits = |buffer: &AlignedBuffer| buffer.len() >= bytes && buffer.len() / 2 <= bytes;
            let at = idle.iter().position(fits);
            if at.is_none() {
                idle.clear();
            }
            at.map(|at| idle.swap_remove(at))
        });
        // Batches are of about the same size: the next one may be a little larger.
        found.unwrap_or_else(|| AlignedBuffer::new(bytes + bytes / 8, LINE_BYTES))
    }
}

/// Copies rows in the order of `index`, which is checked.
fn gather(from: &[u8], row_bytes: usize, index: &[i64], to: &mut [u8]) {
    gather_past_caches(to, row_bytes, |at| {
        if let Some(ahead) = index.get(at + AHEAD) {
            let start = *ahead as usize * row_bytes;
            for line in (0..row_bytes).step_by(LINE_BYTES) {
                prefetch(from, start + line);
            }
        }
        let start = index[at] as usize * row_bytes;
        &from[start..start + row_bytes]
    });
}

#[pymethods]
impl RowGatherer {
    #[new]
    fn new() -> RowGatherer {
        RowGatherer { idle: Arc::default() }
    }

    /// The bytes of rows: those of `source`, which has rows of `row_bytes` without gaps, by `index`.
    fn gather(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        row_bytes: usize,
        index: &Bound<'_, PyAny>,
        threads: usize,
    ) -> PyResult<Column> {
        let (source, index) = (Borrowed::take(source, "features")?, Borrowed::take(index, "node ids")?);
        py.detach(|| {
            let (from, index) = (source.slice::<u8>()?, index.slice::<i64>()?);
            if row_bytes == 0 || !from.len().is_multiple_of(row_bytes) {
                let text = format!(
                    "features: expected rows of {row_bytes} bytes, found {} bytes in all",
                    from.len()
                );
                return Err(PyValueError::new_err(text));
            }
            let rows = from.len() / row_bytes;
            if let Some(wrong) = index.iter().find(|row| **row as u64 >= rows as u64) {
                let text =
                    format!("features: row {wrong} is asked for, there are {rows}; give every node a row");
                return Err(PyIndexError::new_err(text));
            }
            let bytes = index.len() * row_bytes;
            let mut buffer = self.buffer(bytes);
            let threads = threads.clamp(1, (bytes / THREAD_BYTES).max(1));
            let together = index.len().div_ceil(threads).max(1);
            std::thread::scope(|scope| {
                let mut pieces = index.chunks(together).zip(buffer[..bytes].chunks_mut(together * row_bytes));
                let own = pieces.next();
                for (index, to) in pieces {
                    scope.spawn(move || gather(from, row_bytes, index, to));
                }
                if let Some((index, to)) = own {
                    gather(from, row_bytes, index, to);
                }
            });
            let start = buffer.as_mut_ptr();
            let owner = LentBuffer { buffer: Some(buffer), home: Arc::downgrade(&self.idle) };
            // SAFETY: the buffer has at least so many bytes and moves into the owner, which does not move its memory.
            Ok(unsafe { Column::of_memory::<u8>(start, vec![bytes], Box::new(owner)) })
        })
    }
}

/// Adds what this file offers.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RowGatherer>()
}
