use crate::prefetch::{LARGE_PAGE_BYTES, prefer_large_pages_at};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Offsets, lengths and addresses that are multiples of this are accepted by direct I/O on every disk.
pub const DIRECT_ALIGN: usize = 4096;

/// Zeroed bytes at an address that direct I/O accepts.
pub struct AlignedBuffer {
    allocation: Arc<Allocation>,
}

/// Memory that lives until nobody needs its address: neither the buffer nor any queue it is registered with. Only the
/// buffer accesses the bytes.
pub(crate) struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an allocation hands out only its address. The bytes are accessed only through the `AlignedBuffer` that owns
// it.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl AlignedBuffer {
    /// `bytes` zeros, aligned to `alignment` (a power of two).
    pub fn new(bytes: usize, alignment: usize) -> AlignedBuffer {
        let large = bytes >= LARGE_PAGE_BYTES;
        let alignment = if large { alignment.max(LARGE_PAGE_BYTES) } else { alignment };
        let layout = Layout::from_size_align(bytes.max(1), alignment).expect("alignment is a power of two");
        // SAFETY: the layout has a size of at least one byte.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        if large {
            // Large pages make random access to a large buffer cheaper: fewer address-translation misses.
            // SAFETY: the range was just allocated.
            unsafe { prefer_large_pages_at(start.as_ptr(), bytes) };
        }
        // SAFETY: the allocation owns the whole range.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        AlignedBuffer { allocation: Arc::new(Allocation { start, layout }) }
    }

    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }
}

impl Allocation {
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points at `size` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.allocation.start(), self.allocation.bytes()) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.allocation.start(), self.allocation.bytes()) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_where_asked_and_are_zero() {
        for alignment in [1, 512, 4096, 65536] {
            let mut buffer = AlignedBuffer::new(10_000, alignment);
            assert_eq!(buffer.as_ptr() as usize % alignment, 0);
            assert!(buffer.len() == 10_000 && buffer.iter().all(|byte| *byte == 0));
            buffer[9_999] = 1;
        }
    }
}
