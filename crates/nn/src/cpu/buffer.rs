//! Memory of matrices: buffers that are returned to a pool when dropped and reused, so that a warm training step makes
//! no large allocation. Large buffers request large pages, because rows are read at random.

use crate::Shape;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const LARGE_PAGE_BYTES: usize = 2 << 20;
const LINE_WORDS: usize = 16;

/// Zeroed 32-bit words, aligned to cache lines.
struct Words {
    start: NonNull<f32>,
    layout: Layout,
}

// SAFETY: the words belong to the owner of the value; there is no other way to access them.
unsafe impl Send for Words {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Words {}

impl Words {
    fn new(count: usize) -> Words {
        let bytes = count * 4;
        let large = bytes >= LARGE_PAGE_BYTES;
        let alignment = if large { LARGE_PAGE_BYTES } else { 64 };
        let layout = Layout::from_size_align(bytes, alignment).expect("the alignment is a power of two");
        // SAFETY: callers request at least one line.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        if large {
            // SAFETY: the range is the one just allocated, and the advice does not change its content.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Words { start: start.cast(), layout }
    }

    fn count(&self) -> usize {
        self.layout.size() / 4
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr().cast(), self.layout) }
    }
}

/// Words of a buffer for this many words, rounded up to whole cache lines.
pub(crate) fn pooled_words(count: usize) -> usize {
    count.max(1).next_multiple_of(LINE_WORDS)
}

/// Free buffers for reuse, and the totals.
#[derive(Default)]
struct MatrixShelf {
    free: Vec<Words>,
    /// Words of all buffers, free or in use.
    held: usize,
    /// Words requested by buffers in use, now and at most.
    used: usize,
    peak_used: usize,
    peak_held: usize,
    /// Words of all buffers ever allocated.
    allocated: usize,
    /// Words of buffers in use beyond what was requested.
    unused: usize,
    /// Words that the pool may have beyond the largest use; a quarter of it unless set.
    slack: Option<usize>,
}

/// A pool of buffers.
#[derive(Clone, Default)]
pub(crate) struct MatrixPool {
    shelf: Arc<Mutex<MatrixShelf>>,
}

impl MatrixPool {
    fn lock(&self) -> MutexGuard<'_, MatrixShelf> {
        // Every change of the shelf leaves it consistent.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of this many words with unspecified content.
    pub fn take(&self, count: usize) -> Buffer {
        let asked = pooled_words(count);
        let mut shelf = self.lock();
        shelf.used += asked;
        shelf.peak_used = shelf.peak_used.max(shelf.used);
        let slack = shelf.slack.unwrap_or(shelf.peak_used / 4);
        // A quarter of slack: batches differ in size, but a buffer that is much too large would be missing elsewhere.
        let most = (asked + asked / 4).min(asked + slack.saturating_sub(shelf.unused));
        let fits = |words: &Words| words.count() >= asked && words.count() <= most;
        let best = (0..shelf.free.len())
            .filter(|index| fits(&shelf.free[*index]))
            .min_by_key(|index| shelf.free[*index].count());
        let words = match best {
            Some(index) => shelf.free.swap_remove(index),
            None => {
                // Free buffers are dropped so that the pool never exceeds the peak use by more than its slack. Small
                // ones go first, because they are allocated again quickly.
                while shelf.held + asked > shelf.peak_used + slack
                    && let Some(index) = (0..shelf.free.len()).min_by_key(|index| shelf.free[*index].count())
                {
                    let words = shelf.free.swap_remove(index);
                    shelf.held -= words.count();
                }
                shelf.held += asked;
                shelf.allocated += asked;
                shelf.peak_held = shelf.peak_held.max(shelf.held);
                Words::new(asked)
            }
        };
        shelf.unused += words.count() - asked;
        drop(shelf);
        Buffer { words: Some(words), count, asked, pool: self.clone() }
    }

    /// Sets the words that the pool may have beyond the largest use.
    pub fn set_slack(&self, words: usize) {
        self.lock().slack = Some(words);
    }

    /// Drops free buffers. From now on the pool follows what is used from now on.
    pub fn release_free(&self) {
        let mut shelf = self.lock();
        let free = std::mem::take(&mut shelf.free);
        shelf.held -= free.iter().map(Words::count).sum::<usize>();
        shelf.peak_used = shelf.used;
        drop((shelf, free));
        esker_io::trim_freed_memory();
    }

    /// Bytes of all buffers ever allocated: a warm step adds next to nothing.
    pub fn allocated_bytes(&self) -> u64 {
        self.lock().allocated as u64 * 4
    }

    /// Largest number of bytes in the pool at one time.
    pub fn peak_bytes(&self) -> u64 {
        self.lock().peak_held as u64 * 4
    }
}

/// Words from a pool; dropping returns them.
pub(crate) struct Buffer {
    /// Present until dropped.
    words: Option<Words>,
    count: usize,
    asked: usize,
    pool: MatrixPool,
}

impl Buffer {
    pub fn floats(&self) -> &[f32] {
        let words = self.words.as_ref().expect("present until dropped");
        // SAFETY: there are at least `count` words, all initialised since they were allocated zeroed.
        unsafe { std::slice::from_raw_parts(words.start.as_ptr(), self.count) }
    }

    pub fn floats_mut(&mut self) -> &mut [f32] {
        let words = self.words.as_mut().expect("present until dropped");
        // SAFETY: as in `floats`, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(words.start.as_ptr(), self.count) }
    }

    pub fn integers(&self) -> &[u32] {
        bytemuck::cast_slice(self.floats())
    }

    pub fn integers_mut(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(self.floats_mut())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(words) = self.words.take() else { return };
        let mut shelf = self.pool.lock();
        shelf.used -= self.asked;
        shelf.unused -= words.count() - self.asked;
        shelf.free.push(words);
    }
}

/// A matrix in host memory, row after row.
pub struct CpuMatrix {
    rows: usize,
    columns: usize,
    buffer: Buffer,
}

impl CpuMatrix {
    pub(crate) fn new(pool: &MatrixPool, rows: usize, columns: usize) -> CpuMatrix {
        CpuMatrix { rows, columns, buffer: pool.take(rows * columns) }
    }

    /// The numbers, row after row.
    pub fn values(&self) -> &[f32] {
        self.buffer.floats()
    }

    /// The numbers, mutable: row fetchers write here without a copy.
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.buffer.floats_mut()
    }

    /// Row `index`.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values()[index * self.columns..][..self.columns]
    }

    /// The last `count` rows.
    pub(crate) fn last(&self, count: usize) -> &[f32] {
        assert!(count <= self.rows, "{count} of {} rows", self.rows);
        &self.values()[(self.rows - count) * self.columns..]
    }
}

impl Shape for CpuMatrix {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }
}

/// A mutable slice whose parts are written by several threads at once.
pub(crate) struct Parts<T> {
    start: *mut T,
    count: usize,
}

// SAFETY: parts are handed out under the contract of `part`: they do not overlap.
unsafe impl<T: Send> Sync for Parts<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Parts<T> {}

impl<T> Parts<T> {
    pub fn new(slice: &mut [T]) -> Parts<T> {
        Parts { start: slice.as_mut_ptr(), count: slice.len() }
    }

    /// The part of `length` elements that starts at `first`.
    ///
    /// # Safety
    /// The slice given to `new` must still be borrowed, and no two parts alive at one time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, first: usize, length: usize) -> &mut [T] {
        assert!(first + length <= self.count, "a part inside the slice");
        // SAFETY: inside the slice by the assertion, and without overlap by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buffers_serve_again_and_little_more_is_held_than_was_in_use() {
        let pool = MatrixPool::default();
        let first = pool.take(1 << 20).floats().as_ptr();
        assert_eq!(pool.take((1 << 20) - 1000).floats().as_ptr(), first);
        drop(pool.take(3 << 20));
        let both = (pool.take(1 << 20), pool.take(2 << 20));
        drop(both);
        assert!(pool.peak_bytes() <= (3 << 22) + (3 << 20));
        let made = pool.allocated_bytes();
        let again = (pool.take(1 << 20), pool.take(2 << 20));
        drop(again);
        assert_eq!(pool.allocated_bytes(), made);
    }

    #[test]
    fn released_buffers_are_gone_and_the_pool_follows_what_is_used_next() {
        let pool = MatrixPool::default();
        let kept = pool.take(1 << 10);
        drop(pool.take(4 << 20));
        pool.release_free();
        let numbers = |shelf: MutexGuard<'_, MatrixShelf>| (shelf.held, shelf.peak_used);
        assert_eq!(numbers(pool.lock()), (1 << 10, 1 << 10));
        // Two sizes in turn: the first is dropped for the second, since nothing larger was used since.
        drop(pool.take(1 << 20));
        drop(pool.take(1 << 19));
        assert!(pool.lock().held <= (1 << 20) + (1 << 18) + (1 << 11));
        assert_eq!(kept.floats().len(), 1 << 10);
    }

    proptest! {
        #[test]
        fn the_pool_never_exceeds_the_largest_use_by_more_than_its_slack(
            slack in 0usize..20_000,
            calls in prop::collection::vec((1usize..20_000, any::<usize>(), any::<bool>()), 1..200),
        ) {
            let pool = MatrixPool::default();
            pool.set_slack(slack);
            let mut taken = Vec::new();
            for (count, which, gives_back) in calls {
                if gives_back && !taken.is_empty() {
                    taken.swap_remove(which % taken.len());
                } else {
                    taken.push(pool.take(count));
                }
                let shelf = pool.lock();
                prop_assert!(shelf.held <= shelf.peak_used + slack, "{} of {}", shelf.held, shelf.peak_used);
                prop_assert_eq!(shelf.used, taken.iter().map(|buffer| buffer.asked).sum::<usize>());
            }
        }
    }

    #[test]
    fn large_buffers_stand_on_large_pages() {
        let buffer = MatrixPool::default().take(LARGE_PAGE_BYTES);
        assert_eq!(buffer.floats().as_ptr() as usize % LARGE_PAGE_BYTES, 0);
        assert!(buffer.floats().iter().all(|value| *value == 0.0));
    }
}
