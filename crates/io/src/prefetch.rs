//! Hints about memory: which line is requested soon, which array deserves large pages. Hints change speed, never results.

/// Asks the processor for the cache line of `slice[index]`. An index outside the slice does no harm; a processor
/// without such an instruction does nothing.
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

/// Fills `to` with rows of `row_bytes`, each from where `row` says, past the processor's caches where it can: for more than they
/// hold, whose lines would only be fetched to be written over. Rows whose place or length is no multiple of 16 are copied as ever.
pub fn gather_past_caches<'a>(to: &mut [u8], row_bytes: usize, mut row: impl FnMut(usize) -> &'a [u8]) {
    // Nobody else sees `to` before what was written is there, even where `row` panics.
    let _end = Fence;
    for (at, to) in to.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        let from = row(at);
        assert_eq!(from.len(), to.len(), "a row");
        copy_past_caches(from, to);
    }
}

/// Orders stores past the caches before all that follow.
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

/// Copies bytes of the same number; a [`Fence`] must follow on this thread.
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

/// Asks the kernel to back a large array with large pages: random access then misses the address cache less often.
/// Useful before the array is first written. A kernel that refuses changes nothing.
pub fn prefer_large_pages<T>(slice: &mut [T]) {
    // SAFETY: the range is the slice's own.
    unsafe { prefer_large_pages_at(slice.as_mut_ptr().cast(), std::mem::size_of_val(slice)) }
}

/// Has the allocator give large blocks back to the kernel as soon as they are freed. By default glibc learns from freed
/// blocks to keep them, and what it keeps adds up to more than a budget promised. To be called once, at the start.
pub fn return_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets parameters of the allocator, here before other threads are started.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

pub(crate) const LARGE_PAGE_BYTES: usize = 2 << 20;

/// The same for memory that holds nothing yet.
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn prefer_large_pages_at(start: *mut u8, bytes: usize) {
    let start = start as usize;
    let first = start.next_multiple_of(LARGE_PAGE_BYTES);
    let whole = (start + bytes).saturating_sub(first) / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
    if whole > 0 {
        // SAFETY: the range lies inside the caller's, and MADV_HUGEPAGE leaves its content as it is.
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
