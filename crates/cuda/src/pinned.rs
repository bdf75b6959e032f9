//! Host memory that the GPU reads and writes directly. Pinning is slow, so memory is returned to a pool when dropped,
//! and reused once the copy out of it is done.

use crate::gpu::{Event, Gpu, Inner, done};
use crate::memory::pooled_bytes;
use crate::{CudaError, Result};
use cudarc::driver::sys;
use esker_types::ByteCount;
use std::alloc::{Layout, alloc, dealloc};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

struct Page {
    start: NonNull<u8>,
    bytes: usize,
    /// When the copy out of it is done.
    free_at: Option<Event>,
}
// SAFETY: the memory belongs to the owner of the value.
unsafe impl Send for Page {}

impl Page {
    /// Whether nothing on the device still reads it.
    fn is_idle(&self) -> bool {
        self.free_at.as_ref().is_none_or(Event::is_reached)
    }

    fn as_free(&self) -> FreePage {
        FreePage { bytes: self.bytes, is_idle: self.is_idle() }
    }
}

/// A free page of the pool, as choices see it.
#[derive(Debug, Clone, Copy)]
struct FreePage {
    bytes: usize,
    is_idle: bool,
}

/// The page for a request: one that is little larger and whose copy is done; otherwise, if enough of these wait for their
/// copies, the one that has waited longest; otherwise the smallest of at most twice the size. Batches that pull hidden
/// rows differ in size by that much, and pinning takes longer than copying.
fn choose_page(free: &[FreePage], asked: usize) -> Option<usize> {
    let is_between = |least: usize, most: usize, page: &FreePage| page.bytes >= least && page.bytes <= most;
    let fitting = || (0..free.len()).filter(|index| is_between(asked, asked + asked / 4, &free[*index]));
    let done_first = fitting().find(|index| free[*index].is_idle);
    let oldest = || fitting().next().filter(|_| fitting().count() >= MOST_WAITING);
    let larger = || {
        let usable = |page: &FreePage| page.is_idle && is_between(asked, 2 * asked, page);
        (0..free.len()).filter(|index| usable(&free[*index])).min_by_key(|index| free[*index].bytes)
    };
    done_first.or_else(oldest).or_else(larger)
}

/// The page that is freed for a request which no page fits: the largest that is too small, or else the one that has been
/// free for longest.
fn choose_freed(free: &[FreePage], asked: usize) -> Option<usize> {
    let idle = || (0..free.len()).filter(|index| free[*index].is_idle);
    let too_small = idle().filter(|index| free[*index].bytes < asked).max_by_key(|index| free[*index].bytes);
    too_small.or_else(|| idle().next())
}

/// Alignment of memory, pinned or not: a page.
const PAGE_BYTES: usize = 4096;

/// Pages of a size that may wait for their copies before a caller waits for one: the number of steps in flight plus
/// one.
const MOST_WAITING: usize = 3;

/// A pool of pinned memory.
#[derive(Default)]
pub(crate) struct PinnedPool {
    shelf: Mutex<PinnedShelf>,
}

#[derive(Default)]
struct PinnedShelf {
    free: Vec<Page>,
    held: usize,
    used: usize,
    peak_used: usize,
}

impl PinnedPool {
    fn lock(&self) -> MutexGuard<'_, PinnedShelf> {
        // Every change of the shelf leaves it consistent.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn clear(&self) {
        self.lock().shrink(0, 0);
    }

    fn take(&self, asked: usize) -> Result<Page> {
        let mut shelf = self.lock();
        let free: Vec<FreePage> = shelf.free.iter().map(Page::as_free).collect();
        if let Some(index) = choose_page(&free, asked) {
            let mut page = shelf.free.remove(index);
            shelf.count(page.bytes);
            drop(shelf);
            if let Some(event) = page.free_at.take() {
                event.synchronize()?;
            }
            return Ok(page);
        }
        shelf.count(asked);
        // The pool is little larger than the memory in use or still being copied from.
        let waiting = shelf.free.iter().filter(|page| !page.is_idle());
        let waiting: usize = waiting.map(|page| page.bytes).sum();
        let most = shelf.peak_used + shelf.peak_used / 4 + waiting;
        shelf.shrink(most.saturating_sub(asked), asked);
        let start = match pin(asked) {
            Ok(start) => start,
            Err(error) => {
                shelf.used -= asked;
                return Err(error);
            }
        };
        shelf.held += asked;
        Ok(Page { start, bytes: asked, free_at: None })
    }

    fn put(&self, page: Page) {
        let mut shelf = self.lock();
        shelf.used -= page.bytes;
        shelf.free.push(page);
    }
}

impl PinnedShelf {
    fn count(&mut self, bytes: usize) {
        self.used += bytes;
        self.peak_used = self.peak_used.max(self.used);
    }

    /// Frees pages that no copy reads, until the pool has at most `keep` bytes: first those that were just too small for
    /// what was asked.
    fn shrink(&mut self, keep: usize, asked: usize) {
        while self.held > keep {
            let free: Vec<FreePage> = self.free.iter().map(Page::as_free).collect();
            let Some(index) = choose_freed(&free, asked) else { return };
            let page = self.free.remove(index);
            self.held -= page.bytes;
            // SAFETY: pinned by `pin` with this size, unpinned once, and no copy reads it any more.
            unsafe { unpin(page.start, page.bytes) };
        }
    }
}

/// Large allocations start on a large page: a disk then writes them, and the GPU reads them, in long pieces.
const LARGE_PAGE_BYTES: usize = 2 << 20;

fn layout(bytes: usize) -> Layout {
    let align = if bytes >= LARGE_PAGE_BYTES { LARGE_PAGE_BYTES } else { esker_io::DIRECT_ALIGN };
    Layout::from_size_align(bytes.max(1), align).expect("pages are powers of two")
}

/// Allocates memory, on large pages if possible, zeroes and pins it.
fn pin(bytes: usize) -> Result<NonNull<u8>> {
    let what = "pinning host memory";
    // SAFETY: the layout has a size of at least one byte.
    let start = NonNull::new(unsafe { alloc(layout(bytes)) });
    let start = start.ok_or(CudaError::Call { what, found: "no memory".to_string() })?;
    // SAFETY: the memory was just allocated with this many bytes, and is uninitialised.
    let content = unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast::<MaybeUninit<u8>>(), bytes) };
    esker_io::prefer_large_pages(content);
    content.fill(MaybeUninit::new(0));
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the memory is ours until it is unpinned.
    let pinned = done(what, unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes.max(1), flags) });
    if let Err(error) = pinned {
        // SAFETY: allocated above with this layout, and not pinned.
        unsafe { dealloc(start.as_ptr(), layout(bytes)) };
        return Err(error);
    }
    Ok(start)
}

/// Unpins and frees memory.
///
/// # Safety
/// It must have been pinned by [`pin`] with this size, and nothing may use it any more.
unsafe fn unpin(start: NonNull<u8>, bytes: usize) {
    // SAFETY: by the caller's contract.
    unsafe {
        sys::cuMemHostUnregister(start.as_ptr().cast());
        dealloc(start.as_ptr(), layout(bytes));
    }
}

/// Numbers in host memory that the GPU can copy from directly, or ordinary memory if none can be pinned.
pub struct Pinned {
    page: Option<Page>,
    ordinary: Vec<u32>,
    /// Offset of the first page boundary in ordinary memory.
    start: usize,
    words: usize,
    /// When kernels that read it directly are done.
    read_until: Mutex<Option<Event>>,
    inner: Arc<Inner>,
}

impl Pinned {
    /// This many 32-bit words, with unspecified content.
    pub fn new(gpu: &Gpu, words: usize) -> Pinned {
        let page = gpu.inner().bind().and_then(|()| gpu.inner().pinned.take(pooled_bytes(words * 4))).ok();
        let ordinary = if page.is_none() { vec![0u32; words + PAGE_BYTES / 4] } else { Vec::new() };
        let start = if page.is_none() { ordinary.as_ptr().align_offset(PAGE_BYTES) } else { 0 };
        Pinned { page, ordinary, start, words, read_until: Mutex::new(None), inner: gpu.inner().clone() }
    }

    /// Whether the memory is actually pinned.
    pub fn is_pinned(&self) -> bool {
        self.page.is_some()
    }

    /// As integers.
    pub fn words(&self) -> &[u32] {
        match &self.page {
            // SAFETY: the page has at least this many bytes, aligned to pages, all initialised when it was made.
            Some(page) => unsafe { std::slice::from_raw_parts(page.start.as_ptr().cast(), self.words) },
            None => &self.ordinary[self.start..][..self.words],
        }
    }

    /// As integers, mutable. Waits for kernels that read them.
    pub fn words_mut(&mut self) -> &mut [u32] {
        if let Some(event) = self.read_until.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = self.inner.bind().and_then(|()| event.synchronize());
        }
        match &mut self.page {
            // SAFETY: as above, and the borrow is unique.
            Some(page) => unsafe { std::slice::from_raw_parts_mut(page.start.as_ptr().cast(), self.words) },
            None => &mut self.ordinary[self.start..][..self.words],
        }
    }

    /// As mutable bytes, aligned to pages.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.words_mut())
    }

    /// As mutable floats.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.words_mut())
    }

    /// As floats.
    pub fn floats(&self) -> &[f32] {
        bytemuck::cast_slice(self.words())
    }

    /// The memory may be written again once the event is reached.
    pub(crate) fn free_at(mut self, event: Event) -> Result<()> {
        match &mut self.page {
            Some(page) => page.free_at = Some(event),
            // Copies out of ordinary memory are done when the call returns, except for bytes that the driver staged.
            None => event.synchronize()?,
        }
        Ok(())
    }

    /// Records that the kernels launched so far read it.
    pub(crate) fn read_by_kernels(&self) -> Result<()> {
        let event = self.inner.compute.mark()?;
        *self.read_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(event);
        Ok(())
    }

    /// Its address for the GPU's threads.
    pub(crate) fn device_address(&self) -> Result<u64> {
        let Some(page) = &self.page else {
            return Err(CudaError::Call {
                what: "reading host memory from the GPU",
                found: "the memory could not be pinned".to_string(),
            });
        };
        let mut address = 0;
        // SAFETY: the page is pinned; the call writes the address.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, page.start.as_ptr().cast(), 0) };
        done("finding host memory from the GPU", found)?;
        Ok(address)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(mut page) = self.page.take() {
            let read = self.read_until.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            page.free_at = page.free_at.take().or(read);
            self.inner.pinned.put(page);
        }
    }
}

/// Host memory of exactly the requested size that the GPU's threads read and write. It is not pooled: dropping returns it to the
/// system.
pub(crate) struct PinnedRegion {
    start: NonNull<u8>,
    bytes: usize,
    /// Its address for the GPU's threads.
    address: u64,
    /// When kernels that use it are done.
    read_until: Mutex<Option<Event>>,
    inner: Arc<Inner>,
}
// SAFETY: the memory belongs to the value; it is written only through a unique borrow.
unsafe impl Send for PinnedRegion {}
// SAFETY: as above.
unsafe impl Sync for PinnedRegion {}

impl PinnedRegion {
    /// This many bytes, at least one, with unspecified content. An error if they cannot be pinned.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<PinnedRegion> {
        let inner = gpu.inner();
        inner.bind()?;
        let refused = |error: CudaError| {
            let found = match error {
                CudaError::Full { found, .. } | CudaError::Call { found, .. } => found,
                other => other.to_string(),
            };
            CudaError::Pinned { asked: ByteCount(bytes as u64), found }
        };
        let (mut start, mut address) = (ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the call writes the address.
        done("pinning host memory", unsafe { sys::cuMemHostAlloc(&mut start, bytes, flags) })
            .map_err(refused)?;
        let start = NonNull::new(start.cast()).expect("the driver said that there is memory");
        let mut region =
            PinnedRegion { start, bytes, address, read_until: Mutex::new(None), inner: inner.clone() };
        // SAFETY: the memory is pinned; the call writes the address.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start.as_ptr().cast(), 0) };
        done("finding host memory from the GPU", found)?;
        region.address = address;
        Ok(region)
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// Writes bytes, starting at offset `at`. Waits for kernels that read the memory.
    pub fn write(&mut self, at: usize, from: &[u8]) -> Result<()> {
        assert!(at <= self.bytes && from.len() <= self.bytes - at, "bytes inside the memory");
        self.wait()?;
        // SAFETY: the memory is ours and large enough after `at`, the device does not read it, the borrow is unique.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start.as_ptr().add(at), from.len()) };
        Ok(())
    }

    /// Sets every byte to 0.
    pub fn clear(&mut self) -> Result<()> {
        self.wait()?;
        // SAFETY: the memory is ours, the device does not use it, the borrow is unique.
        unsafe { ptr::write_bytes(self.start.as_ptr(), 0, self.bytes) };
        Ok(())
    }

    /// Copies bytes, starting at offset `at`. Waits for kernels that use the memory, and they must not write it meanwhile.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        assert!(at <= self.bytes && to.len() <= self.bytes - at, "bytes inside the memory");
        let event = self.read_until.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(event) = event {
            self.inner.bind().and_then(|()| event.synchronize())?;
        }
        // SAFETY: the memory is ours and large enough after `at`, and nobody writes it: kernels are done.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr().add(at), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Records that kernels before the event use it.
    pub fn read_until(&self, event: Event) {
        *self.read_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }

    fn wait(&mut self) -> Result<()> {
        match self.read_until.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            Some(event) => self.inner.bind().and_then(|()| event.synchronize()),
            None => Ok(()),
        }
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        let _ = self.wait();
        if self.inner.bind().is_ok() {
            // SAFETY: allocated by cuMemHostAlloc, freed once, and no kernel reads it any more.
            unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}

/// Slots in pinned memory for single numbers being copied from the device.
pub(crate) struct Slots {
    start: NonNull<f64>,
    free: Mutex<Vec<usize>>,
}
// SAFETY: only the owner of a slot reads it, after the copy into it.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

const SLOTS: usize = 1024;

impl Slots {
    fn new() -> Result<Slots> {
        let mut start = ptr::null_mut();
        // SAFETY: the call writes the address.
        let found = unsafe { sys::cuMemHostAlloc(&mut start, SLOTS * 8, sys::CU_MEMHOSTALLOC_PORTABLE) };
        done("pinning host memory", found)?;
        let start = NonNull::new(start.cast()).expect("the driver said that there is memory");
        Ok(Slots { start, free: Mutex::new((0..SLOTS).collect()) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc, freed once, and the device is idle.
        unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}

/// A number that the GPU is computing.
pub struct Pending {
    gpu: Gpu,
    slot: Option<usize>,
    event: Option<Event>,
}

impl Pending {
    /// Copies the number at a device address to the host once it is computed.
    ///
    /// # Safety
    /// The address must be an f64 in memory of the pool.
    pub(crate) unsafe fn copy(gpu: &Gpu, address: u64) -> Pending {
        let made = gpu.attempt(|| {
            let inner = gpu.inner();
            let slots = match inner.slots.get() {
                Some(slots) => slots,
                None => {
                    let made = Slots::new()?;
                    inner.slots.get_or_init(|| made)
                }
            };
            let Some(slot) = slots.lock().pop() else {
                let found = format!("more than {SLOTS} numbers on their way");
                return Err(CudaError::Call { what: "copying a number back", found });
            };
            // SAFETY: the slot is ours until the number is read; the caller guarantees the address.
            let copied = unsafe {
                let to = slots.start.as_ptr().add(slot);
                sys::cuMemcpyDtoHAsync_v2(to.cast(), address, 8, inner.compute.handle())
            };
            done("copying a number back", copied)?;
            Ok((slot, inner.compute.mark()?))
        });
        let (slot, event) = made.unzip();
        Pending { gpu: gpu.clone(), slot, event }
    }

    /// Waits for the number.
    pub fn wait(mut self) -> Result<f64> {
        let event = self.event.take();
        self.gpu.attempt(|| event.map_or(Ok(()), |event| event.synchronize()));
        self.gpu.check()?;
        let (slots, slot) = (self.gpu.inner().slots.get(), self.slot);
        let (Some(slots), Some(slot)) = (slots, slot) else { return Ok(f64::NAN) };
        // SAFETY: the copy into the slot is done, and the slot is ours until dropped.
        Ok(unsafe { ptr::read_volatile(slots.start.as_ptr().add(slot)) })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        // The device may still write a number that nobody waited for.
        if let Some(event) = self.event.take() {
            self.gpu.attempt(|| event.synchronize());
        }
        if let Some(slots) = self.gpu.inner().slots.get() {
            slots.lock().push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(pages: &[(usize, bool)]) -> Vec<FreePage> {
        pages.iter().map(|(bytes, is_idle)| FreePage { bytes: *bytes, is_idle: *is_idle }).collect()
    }

    #[test]
    fn a_request_takes_what_fits_best_and_pins_only_if_nothing_of_twice_its_size_is_free() {
        let check = |pages: &[(usize, bool)], expected: Option<usize>| {
            assert_eq!(choose_page(&free(pages), 100), expected, "{pages:?}");
        };
        check(&[(200, true), (120, true), (100, true)], Some(1));
        check(&[(99, true), (201, true)], None);
        check(&[(190, true), (150, true), (180, true)], Some(1));
        // Those whose copies are under way are waited for only if there are enough of them.
        check(&[(110, false), (150, true)], Some(1));
        check(&[(110, false), (150, false)], None);
        check(&[(110, false), (120, false), (100, false), (150, true)], Some(0));
    }

    #[test]
    fn what_was_just_too_small_is_freed_first() {
        let check = |pages: &[(usize, bool)], expected: Option<usize>| {
            assert_eq!(choose_freed(&free(pages), 100), expected, "{pages:?}");
        };
        check(&[(8, true), (90, true), (70, true), (300, true)], Some(1));
        check(&[(90, false), (300, true), (70, true)], Some(2));
        check(&[(300, true), (250, true)], Some(0));
        check(&[(300, false), (90, false)], None);
    }

    /// Batches of a size between half of the largest and the largest: once there are pages for the largest ones, little is
    /// pinned any more.
    #[test]
    fn batches_that_differ_by_half_soon_pin_little() {
        let (mut pages, mut pinned_late) = (Vec::<usize>::new(), 0);
        let mut in_use = std::collections::VecDeque::new();
        for batch in 0..400usize {
            let asked = 1000 + batch * 7919 % 1000;
            if in_use.len() == 4 {
                pages.extend(in_use.pop_front());
            }
            let idle: Vec<FreePage> =
                pages.iter().map(|bytes| FreePage { bytes: *bytes, is_idle: true }).collect();
            match choose_page(&idle, asked) {
                Some(index) => in_use.push_back(pages.remove(index)),
                None => {
                    pinned_late += usize::from(batch >= 200);
                    // The pool has room for five of the largest.
                    let held: usize = pages.iter().chain(&in_use).sum();
                    let mut held = held + asked;
                    while held > 10_000 {
                        let idle: Vec<FreePage> =
                            pages.iter().map(|bytes| FreePage { bytes: *bytes, is_idle: true }).collect();
                        let Some(freed) = choose_freed(&idle, asked) else { break };
                        held -= pages.remove(freed);
                    }
                    in_use.push_back(asked);
                }
            }
        }
        // With pages of at most a quarter more than was asked, 136 of them would.
        assert!(pinned_late <= 10, "{pinned_late} of 200 batches pinned memory");
    }
}
