//! Hints about memory: which cache line is needed soon, which array should use large pages. Hints change speed, never
//! results.

/// Asks the CPU for the cache line of `slice[index]`. An index outside the slice is harmless. A CPU without such an
/// instruction does nothing.
#[inline(always)]
pub fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = slice.as_ptr().wrapping_add(index);
        // SAFETY: a prefetch reads nothing the program can see and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

/// Fills `to` with rows of `row_bytes`; row `i` is copied from `row(i)`. Bypasses the CPU caches if possible. This
/// pays off for more bytes than the caches have room for: their lines would be fetched only to be overwritten. A row
/// is copied normally if its address or length is not a multiple of 16.
pub fn gather_past_caches<'a>(to: &mut [u8], row_bytes: usize, mut row: impl FnMut(usize) -> &'a [u8]) {
    // Nobody else sees `to` before its bytes are visible, even if `row` panics.
    let _end = Fence;
    for (at, to) in to.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        let from = row(at);
        assert_eq!(from.len(), to.len(), "a row");
        copy_past_caches(from, to);
    }
}

/// Orders the stores that bypass the caches before all later ones.
struct Fence;

impl Drop for Fence {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a fence only orders stores.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Copies a slice to one of the same length; a [`Fence`] must follow on this thread.
#[inline(always)]
fn copy_past_caches(from: &[u8], to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if (to.as_ptr() as usize).is_multiple_of(16) && to.len().is_multiple_of(16) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        for (from, to) in from.chunks_exact(16).zip(to.chunks_exact_mut(16)) {
            // SAFETY: both are 16 bytes long; every piece of `to` starts on a multiple of 16, as its first does.
            unsafe {
                let piece = _mm_loadu_si128(from.as_ptr().cast::<__m128i>());
                _mm_stream_si128(to.as_mut_ptr().cast::<__m128i>(), piece);
            }
        }
        return;
    }
    to.copy_from_slice(from);
}

/// Asks the kernel to back a large array with large pages, so that random access misses the TLB less often. Call it
/// before the array is first written. If the kernel refuses, nothing changes.
pub fn prefer_large_pages<T>(slice: &mut [T]) {
    // SAFETY: the range is the slice's own.
    unsafe { prefer_large_pages_at(slice.as_mut_ptr().cast(), std::mem::size_of_val(slice)) }
}

/// Makes the allocator return large blocks to the kernel as soon as they are freed. By default glibc adapts and keeps
/// freed blocks, and the kept memory can exceed the budget. Call it once, at startup.
pub fn return_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets parameters of the allocator, here before other threads are started.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10);
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Makes the allocator use few heaps: each thread's would keep blocks that others could have. For a library in somebody
/// else's process, whose large blocks it leaves alone. Call it once, when the library is loaded.
pub fn use_few_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes the allocator's lock and sets a number that later threads read when they choose a heap.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

/// Returns freed memory to the kernel that the allocator has kept: blocks below its threshold stay in its heap. Call it
/// where one phase ends and another takes its memory.
pub fn trim_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it only returns pages that nothing uses to the kernel.
    unsafe {
        libc::malloc_trim(0);
    }
}

pub(crate) const LARGE_PAGE_BYTES: usize = 2 << 20;

/// The same for uninitialised memory.
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn prefer_large_pages_at(start: *mut u8, bytes: usize) {
    let start = start as usize;
    let first = start.next_multiple_of(LARGE_PAGE_BYTES);
    let whole = (start + bytes).saturating_sub(first) / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
    if whole > 0 {
        // SAFETY: the range is inside the caller's, and MADV_HUGEPAGE does not change its content.
        unsafe { libc::madvise(first as *mut libc::c_void, whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_gathered_past_the_caches_are_the_same() {
        let from: Vec<u8> = (0..4000u32).map(|number| (number * 7 + number / 256) as u8).collect();
        for (start, row_bytes, rows) in
            [(0, 512, 5), (16, 64, 9), (5, 16, 3), (0, 1, 7), (32, 33, 4), (3, 0, 0), (0, 48, 0)]
        {
            let mut to = vec![9u8; 4096];
            let bytes = row_bytes * rows;
            let row = |at: usize| &from[at * 111..at * 111 + row_bytes];
            gather_past_caches(&mut to[start..start + bytes], row_bytes, row);
            assert!((0..rows).all(|at| to[start + at * row_bytes..][..row_bytes] == *row(at)));
            assert!(to[..start].iter().chain(&to[start + bytes..]).all(|byte| *byte == 9));
        }
    }

    #[test]
    fn hints_leave_content_alone() {
        let mut numbers: Vec<u64> = (0..1 << 20).collect();
        prefer_large_pages(&mut numbers);
        [0, 1 << 19, numbers.len(), usize::MAX].iter().for_each(|index| prefetch(&numbers, *index));
        assert!(numbers.iter().enumerate().all(|(index, number)| *number == index as u64));
        prefer_large_pages::<u32>(&mut []);
    }
}
