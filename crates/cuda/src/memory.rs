//! Device memory under a limit: buffers are returned to a pool when dropped and reused. Memory of the compute stream
//! is reused in the order of that stream, so nothing waits. Memory for uploaded rows is written by the copy stream and
//! has an event for its last use.

use crate::gpu::{Event, Gpu, Inner, done};
use crate::{CudaError, Result};
use cudarc::driver::sys;
use esker_types::ByteCount;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The stream that first writes a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// The compute stream.
    Compute,
    /// The copy stream.
    Upload,
}

struct DeviceBlock {
    address: u64,
    bytes: usize,
    /// When its last use ends, if the next may be on another stream.
    free_at: Option<Event>,
}

impl DeviceBlock {
    /// Whether no launched work still uses it.
    fn is_idle(&self) -> bool {
        self.free_at.as_ref().is_none_or(Event::is_reached)
    }
}

#[derive(Default)]
struct DeviceShelf {
    compute: Vec<DeviceBlock>,
    uploading: Vec<DeviceBlock>,
    held: usize,
    used: usize,
    peak_used: usize,
    peak_held: usize,
    limit: usize,
    allocations: u64,
    /// Exact sizes and no reuse: for tools that look for stray accesses.
    exact: bool,
}

/// The pool of device memory.
pub(crate) struct DevicePool {
    shelf: Mutex<DeviceShelf>,
}

/// Rounds up to a size that many requests share: eighths of a power of two.
pub fn pooled_bytes(bytes: usize) -> usize {
    let bytes = bytes.max(512);
    let step = (bytes.next_power_of_two() / 16).max(512);
    bytes.next_multiple_of(step)
}

/// The most that a pool keeps: little more than its peak use, or a part of its limit. Blocks of other sizes are released
/// beyond that. Releasing waits for the device, so where there is room batches that differ in size keep theirs.
fn kept_bytes(peak_used: usize, uploading: usize, limit: usize) -> usize {
    (peak_used + peak_used / 4 + uploading).max(limit / 4).min(limit)
}

impl DevicePool {
    pub fn new(limit: u64, exact: bool) -> DevicePool {
        DevicePool {
            shelf: Mutex::new(DeviceShelf { limit: limit as usize, exact, ..DeviceShelf::default() }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DeviceShelf> {
        // Every change of the shelf leaves it consistent.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn peak_bytes(&self) -> u64 {
        self.lock().peak_held as u64
    }

    pub fn limit_bytes(&self) -> u64 {
        self.lock().limit as u64
    }

    pub fn allocations(&self) -> u64 {
        self.lock().allocations
    }

    /// Memory that is never reused; the caller frees it.
    pub fn reserve(&self, bytes: usize) -> Result<u64> {
        let mut shelf = self.lock();
        let block = shelf.allocate(bytes)?;
        shelf.used += bytes;
        Ok(block.address)
    }

    fn take(&self, asked: usize, purpose: Use) -> Result<DeviceBlock> {
        let mut shelf = self.lock();
        let asked = if shelf.exact { asked } else { pooled_bytes(asked) };
        // Rows uploaded to memory that a step still reads would wait for that step, so other memory is used first.
        let best = |free: &[DeviceBlock], idle: bool| {
            let fits = |block: &DeviceBlock| block.bytes >= asked && block.bytes <= asked + asked / 4;
            let usable = |block: &DeviceBlock| fits(block) && (!idle || block.is_idle());
            let found = (0..free.len()).filter(|index| usable(&free[*index]));
            found.min_by_key(|index| free[*index].bytes)
        };
        let idle = best(shelf.free(purpose), true);
        let block = match idle {
            Some(index) => shelf.free(purpose).swap_remove(index),
            None => match (shelf.allocate(asked), purpose) {
                (Err(refused), Use::Upload) => {
                    let busy = best(shelf.free(purpose), false).ok_or(refused)?;
                    shelf.free(purpose).swap_remove(busy)
                }
                (found, _) => found?,
            },
        };
        shelf.used += block.bytes;
        shelf.peak_used = shelf.peak_used.max(shelf.used);
        Ok(block)
    }

    /// Memory of exactly this size.
    fn take_exact(&self, bytes: usize) -> Result<DeviceBlock> {
        let mut shelf = self.lock();
        let block = shelf.allocate(bytes)?;
        shelf.used += bytes;
        shelf.peak_used = shelf.peak_used.max(shelf.used);
        Ok(block)
    }

    fn put(&self, block: DeviceBlock, purpose: Use) {
        let mut shelf = self.lock();
        shelf.used -= block.bytes;
        shelf.free(purpose).push(block);
        if shelf.exact {
            shelf.release(0);
        }
    }

    /// Returns everything to the driver.
    pub fn clear(&self) {
        self.lock().release(0);
    }
}

impl DeviceShelf {
    fn free(&mut self, purpose: Use) -> &mut Vec<DeviceBlock> {
        match purpose {
            Use::Compute => &mut self.compute,
            Use::Upload => &mut self.uploading,
        }
    }

    fn allocate(&mut self, asked: usize) -> Result<DeviceBlock> {
        let uploading: usize = self.uploading.iter().map(|block| block.bytes).sum();
        let most = kept_bytes(self.peak_used.max(self.used + asked), uploading, self.limit);
        if self.held + asked > most {
            self.release_computing(most.saturating_sub(asked));
        }
        if self.held + asked > self.limit {
            self.release(self.limit.saturating_sub(asked));
        }
        let mut found = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let mut address = 0;
        for keep in [usize::MAX, 0] {
            if self.held + asked > self.limit || found == sys::CUresult::CUDA_SUCCESS {
                break;
            }
            self.release(keep);
            // SAFETY: the call writes the address.
            found = unsafe { sys::cuMemAlloc_v2(&mut address, asked) };
        }
        if found == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the call writes to the two numbers.
            unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
            return Err(CudaError::Memory {
                asked: ByteCount(asked as u64),
                held: ByteCount(self.used as u64),
                limit: ByteCount(self.limit as u64),
                free: ByteCount(free as u64),
            });
        }
        done("taking memory of the GPU", found)?;
        self.held += asked;
        self.peak_held = self.peak_held.max(self.held);
        self.allocations += 1;
        Ok(DeviceBlock { address, bytes: asked, free_at: None })
    }

    /// Returns free blocks of the compute stream to the driver until the pool has at most `keep` bytes.
    fn release_computing(&mut self, keep: usize) {
        let uploading = std::mem::take(&mut self.uploading);
        self.release(keep);
        self.uploading = uploading;
    }

    /// Returns free blocks to the driver until the pool has at most `keep` bytes. The driver waits for work that uses
    /// them.
    fn release(&mut self, keep: usize) {
        while self.held > keep {
            let largest = |blocks: &[DeviceBlock]| (0..blocks.len()).max_by_key(|index| blocks[*index].bytes);
            let blocks = if self.compute.is_empty() { &mut self.uploading } else { &mut self.compute };
            let Some(index) = largest(blocks) else { return };
            let block = blocks.swap_remove(index);
            self.held -= block.bytes;
            // SAFETY: the block is free; cuMemFree waits until the device is done with it.
            unsafe { sys::cuMemFree_v2(block.address) };
        }
    }
}

/// Memory on the device; dropping returns it to the pool. On a GPU that has failed, the address is 0 and nothing is
/// launched.
pub struct DeviceBuffer {
    block: Option<DeviceBlock>,
    bytes: usize,
    purpose: Use,
    inner: Arc<Inner>,
}

impl DeviceBuffer {
    pub(crate) fn new(gpu: &Gpu, bytes: usize, purpose: Use) -> DeviceBuffer {
        let block = gpu.attempt(|| gpu.inner().pool.take(bytes.max(4), purpose));
        DeviceBuffer { block, bytes, purpose, inner: gpu.inner().clone() }
    }

    /// For 32-bit numbers.
    pub(crate) fn words(gpu: &Gpu, count: usize) -> DeviceBuffer {
        DeviceBuffer::new(gpu, count * 4, Use::Compute)
    }

    /// Exactly this many bytes, for buffers that fill the available memory. An error if there is not enough.
    pub(crate) fn exact(gpu: &Gpu, bytes: usize) -> Result<DeviceBuffer> {
        gpu.check()?;
        let inner = gpu.inner().clone();
        inner.bind()?;
        let block = Some(inner.pool.take_exact(bytes)?);
        Ok(DeviceBuffer { block, bytes, purpose: Use::Compute, inner })
    }

    pub(crate) fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.address)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes the copy stream wait until the memory's last use ends.
    pub(crate) fn wait_until_free(&mut self) -> Result<()> {
        match self.block.as_mut().and_then(|block| block.free_at.take()) {
            Some(event) => self.inner.copy.wait(&event),
            None => Ok(()),
        }
    }
}

impl DeviceBuffer {
    /// Returns memory that only the copy stream has used: the next upload to it is later in the same stream, so it
    /// needs no wait.
    pub(crate) fn used_in_upload(mut self) {
        assert_eq!(self.purpose, Use::Upload);
        if let Some(block) = self.block.take() {
            self.inner.pool.put(block, self.purpose);
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Some(mut block) = self.block.take() else { return };
        if self.purpose == Use::Upload && !self.inner.has_failed() {
            let marked = self.inner.bind().and_then(|()| self.inner.compute.mark());
            match marked {
                Ok(event) => block.free_at = Some(event),
                Err(error) => self.inner.fail(error),
            }
        }
        self.inner.pool.put(block, self.purpose);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_far_below_its_limit_keeps_what_it_has() {
        assert_eq!(kept_bytes(100, 7, 100_000), 25_000);
        assert_eq!(kept_bytes(40_000, 7, 100_000), 50_007);
        assert_eq!(kept_bytes(90_000, 7, 100_000), 100_000);
    }

    #[test]
    fn sizes_are_shared_and_waste_little() {
        for bytes in [1usize, 511, 512, 513, 10_000, 1 << 20, (1 << 20) + 1, 341_000_000] {
            let pooled = pooled_bytes(bytes);
            assert!(pooled >= bytes && pooled.is_multiple_of(512), "{bytes}: {pooled}");
            assert!(bytes < 8192 || pooled <= bytes + bytes / 8, "{bytes}: {pooled}");
        }
    }
}
