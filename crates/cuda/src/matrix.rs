use crate::Result;
use crate::gpu::{Event, Gpu, done, launch};
use crate::memory::{DeviceBuffer, Use};
use crate::pinned::Pinned;
use cudarc::driver::sys;

/// A matrix of f32 in device memory, row after row.
pub struct DeviceMatrix {
    buffer: DeviceBuffer,
    rows: usize,
    columns: usize,
}

impl DeviceMatrix {
    /// A matrix of unspecified content.
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

    /// Whether it is one row of so many columns.
    pub(crate) fn is_row(&self, columns: usize) -> bool {
        (self.rows, self.columns) == (1, columns)
    }

    /// Numbers.
    pub(crate) fn count(&self) -> usize {
        self.rows * self.columns
    }

    pub(crate) fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// What was uploaded to a buffer.
    pub(crate) fn uploaded(buffer: DeviceBuffer, rows: usize, columns: usize) -> DeviceMatrix {
        assert_eq!(buffer.bytes(), rows * columns * 4);
        DeviceMatrix { buffer, rows, columns }
    }

    /// Where the last `rows` rows start.
    pub(crate) fn last(&self, rows: usize) -> u64 {
        assert!(rows <= self.rows);
        self.address() + ((self.rows - rows) * self.columns * 4) as u64
    }
}

/// What a copy between the device and host memory is called in an error.
const COPYING: &str = "copying to or from the GPU";

impl Gpu {
    /// Brings rows to the device on the stream that copies; the stream that computes waits for them, the caller does not.
    pub fn upload(&self, rows: Pinned, columns: usize) -> DeviceMatrix {
        let words = rows.words().len();
        assert!(columns > 0 && words.is_multiple_of(columns), "whole rows");
        DeviceMatrix::uploaded(self.upload_timed(rows, true), words / columns, columns)
    }

    /// Words of host memory on the device, likewise.
    pub(crate) fn upload_words(&self, from: Pinned) -> DeviceBuffer {
        self.upload_timed(from, false)
    }

    fn upload_timed(&self, from: Pinned, timed: bool) -> DeviceBuffer {
        let bytes = from.words().len() * 4;
        let buffer = self.copy_in(from, bytes, timed);
        self.attempt(|| self.inner().compute.wait(&self.inner().copy.mark()?));
        buffer
    }

    /// Copies the first bytes of host memory to the device on the stream that copies. Who reads them on another stream waits.
    pub(crate) fn copy_in(&self, from: Pinned, bytes: usize, timed: bool) -> DeviceBuffer {
        assert!(bytes <= from.words().len() * 4);
        let mut buffer = DeviceBuffer::new(self, bytes, Use::Landing);
        let (inner, to) = (self.inner(), buffer.address());
        self.attempt(|| {
            buffer.wait_until_free()?;
            let begun = timed.then(|| Event::recorded(&inner.copy)).transpose()?;
            if bytes > 0 {
                let host = from.words().as_ptr().cast();
                // SAFETY: both hold so many bytes; the host's are not written before the event, the device's not read by who waits.
                done(COPYING, unsafe { sys::cuMemcpyHtoDAsync_v2(to, host, bytes, inner.copy.handle()) })?;
            }
            if let Some(begun) = begun {
                self.copied(begun, Event::recorded(&inner.copy)?);
            }
            from.free_at(inner.copy.mark()?)
        });
        buffer
    }

    /// Copies numbers from host memory into the matrix, from row `first` on.
    pub fn write(&self, matrix: &mut DeviceMatrix, first: usize, values: &[f32]) {
        let start = first * matrix.columns;
        assert!(start + values.len() <= matrix.count());
        let to = matrix.address() + start as u64 * 4;
        // SAFETY: the matrix holds so many numbers behind this place.
        unsafe { self.write_bytes(to, bytemuck::cast_slice(values)) };
    }

    /// Copies bytes from host memory to an address of the device, in the order of the stream that computes. Waits for them.
    ///
    /// # Safety
    /// Memory of the pool has so many bytes there.
    pub(crate) unsafe fn write_bytes(&self, to: u64, bytes: &[u8]) {
        self.attempt(|| {
            let (from, stream) = (bytes.as_ptr().cast(), self.inner().compute.handle());
            // SAFETY: both hold so many bytes; ordinary memory is staged before the call returns, pinned memory is waited for.
            unsafe {
                done(COPYING, sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), stream))?;
                done(COPYING, sys::cuStreamSynchronize(stream))
            }
        });
    }

    /// Copies numbers into host memory, from row `first` on. Waits for them.
    pub fn read(&self, matrix: &DeviceMatrix, first: usize, values: &mut [f32]) {
        let start = first * matrix.columns;
        assert!(start + values.len() <= matrix.count());
        self.attempt(|| {
            let from = matrix.address() + start as u64 * 4;
            let (to, stream) = (values.as_mut_ptr().cast(), self.inner().compute.handle());
            // SAFETY: both hold so many bytes, and the host's are borrowed until the copy is done.
            unsafe {
                done(COPYING, sys::cuMemcpyDtoHAsync_v2(to, from, size_of_val(values), stream))?;
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
                // SAFETY: callers pass memory of the pool that holds so many words.
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
                // SAFETY: both hold so many bytes behind these places.
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
        // SAFETY: both hold so many numbers behind these places.
        unsafe {
            launch!(self, "add_numbers", [blocks(count, 256), 1], [256, 1]; to.last(rows), from.last(rows), count as u64)
        }
    }

    /// The most device memory that was held at one time.
    pub fn peak_bytes(&self) -> u64 {
        self.inner().pool.peak_bytes()
    }

    /// What device memory may be held.
    pub fn limit_bytes(&self) -> u64 {
        self.inner().pool.limit_bytes()
    }

    /// How often memory was taken from the driver: a warm step adds nothing.
    pub fn allocations(&self) -> u64 {
        self.inner().pool.allocations()
    }

    /// What the device has free.
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

/// Blocks for so many items.
pub(crate) fn blocks(count: usize, each: usize) -> u32 {
    count.div_ceil(each) as u32
}
