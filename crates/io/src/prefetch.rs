//! Hints about memory: which line is wanted soon, which array deserves large pages. Hints change speed, never results.

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
    fn hints_leave_content_alone() {
        let mut numbers: Vec<u64> = (0..1 << 20).collect();
        prefer_large_pages(&mut numbers);
        [0, 1 << 19, numbers.len(), usize::MAX].iter().for_each(|index| prefetch(&numbers, *index));
        assert!(numbers.iter().enumerate().all(|(index, number)| *number == index as u64));
        prefer_large_pages::<u32>(&mut []);
    }
}
