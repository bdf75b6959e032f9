use crate::Result;
use crate::gpu::{Event, Gpu, done, launch};
use crate::memory::{DeviceBuffer, Use};
use crate::pinned::Pinned;
use cudarc::driver::sys;

/// A matrix of f32 in device memory, row-major.
pub struct DeviceMatrix {
    buffer: DeviceBuffer,
    rows: usize,
    columns: usize,
}

impl DeviceMatrix {
    /// A matrix with unspecified content.
    pub fn new(gpu: &Gpu, rows: usize, columns: usize) -> DeviceMatrix {
        DeviceMatrix { buffer: DeviceBuffer::words(gpu, rows * columns), rows, columns }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Whether it is one row with this many columns.
    pub(crate) fn is_row(&self, columns: usize) -> bool {
        (self.rows, self.columns) == (1, columns)
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> usize {
        self.rows * self.columns
    }

    pub(crate) fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// A matrix in a buffer that was uploaded.
    pub(crate) fn uploaded(buffer: DeviceBuffer, rows: usize, columns: usize) -> DeviceMatrix {
        assert_eq!(buffer.bytes(), rows * columns * 4);
        DeviceMatrix { buffer, rows, columns }
    }

    /// Address of the last `rows` rows.
    pub(crate) fn last(&self, rows: usize) -> u64 {
        assert!(rows <= self.rows);
        self.address() + ((self.rows - rows) * self.columns * 4) as u64
    }
}

/// Describes a copy between device and host memory in errors.
const COPYING: &str = "copying to or from the GPU";

impl Gpu {
    /// Copies rows to the device on the copy stream. The compute stream waits for them, the caller does not.
    pub fn upload(&self, rows: Pinned, columns: usize) -> DeviceMatrix {
        let words = rows.words().len();
        assert!(columns > 0 && words.is_multiple_of(columns), "whole rows");
        DeviceMatrix::uploaded(self.upload_timed(rows, true), words / columns, columns)
    }

    /// Uploads words of host memory in the same way.
    pub(crate) fn upload_words(&self, from: Pinned) -> DeviceBuffer {
        self.upload_timed(from, false)
    }

    fn upload_timed(&self, from: Pinned, timed: bool) -> DeviceBuffer {
        let bytes = from.words().len() * 4;
        let buffer = self.copy_in(from, bytes, timed);
        self.attempt(|| self.inner().compute.wait(&self.inner().copy.mark()?));
        buffer
    }

    /// Copies the first bytes of host memory to the device on the copy stream. A reader on another stream must wait
    /// for them.
    pub(crate) fn copy_in(&self, from: Pinned, bytes: usize, timed: bool) -> DeviceBuffer {
        assert!(bytes <= from.words().len() * 4);
        let mut buffer = DeviceBuffer::new(self, bytes, Use::Upload);
        let (inner, to) = (self.inner(), buffer.address());
        self.attempt(|| {
            buffer.wait_until_free()?;
            let begun = timed.then(|| Event::recorded(&inner.copy)).transpose()?;
            if bytes > 0 {
                let host = from.words().as_ptr().cast();
                // SAFETY: both have the bytes. Host bytes stay unwritten until the event; device readers wait for it.
                done(COPYING, unsafe { sys::cuMemcpyHtoDAsync_v2(to, host, bytes, inner.copy.handle()) })?;
            }
            if let Some(begun) = begun {
                self.copied(begun, Event::recorded(&inner.copy)?);
            }
            from.free_at(inner.copy.mark()?)
        });
        buffer
    }

    /// Copies numbers from host memory into the matrix, starting at row `first`.
    pub fn write(&self, matrix: &mut DeviceMatrix, first: usize, values: &[f32]) {
        let start = first * matrix.columns;
        assert!(start + values.len() <= matrix.count());
        let to = matrix.address() + start as u64 * 4;
        // SAFETY: the matrix has this many numbers after this position.
        unsafe { self.write_bytes(to, bytemuck::cast_slice(values)) };
    }

    /// Copies bytes from host memory to a device address, in the order of the compute stream. Waits for them.
    ///
    /// # Safety
    /// The address must be memory of the pool with at least this many bytes.
    pub(crate) unsafe fn write_bytes(&self, to: u64, bytes: &[u8]) {
        self.attempt(|| {
            let (from, stream) = (bytes.as_ptr().cast(), self.inner().compute.handle());
            // SAFETY: both have these bytes. Ordinary memory is staged during the call, pinned memory is waited for.
            unsafe {
                done(COPYING, sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), stream))?;
                done(COPYING, sys::cuStreamSynchronize(stream))
            }
        });
    }

    /// Copies numbers into host memory, starting at row `first`. Waits for them.
    pub fn read(&self, matrix: &DeviceMatrix, first: usize, values: &mut [f32]) {
        let start = first * matrix.columns;
        assert!(start + values.len() <= matrix.count());
        let from = matrix.address() + start as u64 * 4;
        // SAFETY: the matrix has this many numbers after this position.
        unsafe { self.read_bytes(from, bytemuck::cast_slice_mut(values)) };
    }

    /// Copies bytes from a device address into host memory, in the order of the compute stream. Waits for them.
    ///
    /// # Safety
    /// The address must be memory of the pool with at least this many bytes.
    pub(crate) unsafe fn read_bytes(&self, from: u64, bytes: &mut [u8]) {
        self.attempt(|| {
            let (to, stream) = (bytes.as_mut_ptr().cast(), self.inner().compute.handle());
            // SAFETY: both have this many bytes, and the host's are borrowed until the copy is done.
            unsafe {
                done(COPYING, sys::cuMemcpyDtoHAsync_v2(to, from, bytes.len(), stream))?;
                done(COPYING, sys::cuStreamSynchronize(stream))
            }
        });
    }

    /// Sets every number.
    pub fn fill(&self, matrix: &mut DeviceMatrix, value: f32) {
        let rows = matrix.rows;
        self.fill_first(matrix, rows, value);
    }

    /// Sets every number of the first rows.
    pub fn fill_first(&self, matrix: &mut DeviceMatrix, rows: usize, value: f32) {
        assert!(rows <= matrix.rows);
        self.fill_words(matrix.address(), rows * matrix.columns, value.to_bits());
    }

    pub(crate) fn fill_words(&self, address: u64, count: usize, value: u32) {
        if count > 0 {
            self.attempt(|| {
                // SAFETY: callers pass memory of the pool with this many words.
                done("filling memory", unsafe {
                    sys::cuMemsetD32Async(address, value, count, self.inner().compute.handle())
                })
            });
        }
    }

    /// Copies a matrix's last rows to the last rows of another.
    pub fn copy_last(&self, from: &DeviceMatrix, rows: usize, to: &mut DeviceMatrix) {
        assert_eq!(from.columns, to.columns);
        let bytes = rows * from.columns * 4;
        if bytes > 0 {
            self.attempt(|| {
                // SAFETY: both have this many bytes after these positions.
                done(COPYING, unsafe {
                    sys::cuMemcpyDtoDAsync_v2(
                        to.last(rows),
                        from.last(rows),
                        bytes,
                        self.inner().compute.handle(),
                    )
                })
            });
        }
    }

    /// `to's last rows += from's`.
    pub fn add_last(&self, from: &DeviceMatrix, rows: usize, to: &mut DeviceMatrix) {
        assert_eq!(from.columns, to.columns);
        let count = rows * from.columns;
        // SAFETY: both have this many numbers after these positions.
        unsafe {
            launch!(self, "add_numbers", [blocks(count, 256), 1], [256, 1]; to.last(rows), from.last(rows), count as u64)
        }
    }

    /// Largest device memory in use at one time.
    pub fn peak_bytes(&self) -> u64 {
        self.inner().pool.peak_bytes()
    }

    /// Limit on the device memory in use.
    pub fn limit_bytes(&self) -> u64 {
        self.inner().pool.limit_bytes()
    }

    /// Number of allocations from the driver: a warm step adds none.
    pub fn allocations(&self) -> u64 {
        self.inner().pool.allocations()
    }

    /// Free memory of the device.
    pub fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        self.attempt(|| {
            // SAFETY: the call writes to the two numbers, which outlive it.
            done("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })
        });
        self.check()?;
        Ok(free as u64)
    }
}

/// Number of blocks for this many items.
pub(crate) fn blocks(count: usize, each: usize) -> u32 {
    count.div_ceil(each) as u32
}
