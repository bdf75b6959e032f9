//! Hidden rows that steps exchange, as f32 or f16: the first slots in device memory, the others in pinned host memory that
//! the GPU's threads read and write. Everything is on the compute stream, so rows are as of the step before.

use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::{DeviceBuffer, Use};
use crate::pinned::{Pending, Pinned, PinnedRegion};
use crate::{DeviceMatrix, Result};
use esker_types::Dtype;

/// Groups of lanes in a block, each with a row.
const ROWS_OF_A_BLOCK: usize = 8;

/// Slots for hidden rows.
pub struct DeviceHidden {
    gpu: Gpu,
    columns: usize,
    dtype: Dtype,
    device_slots: u64,
    host_slots: u64,
    device: Option<DeviceBuffer>,
    host: Option<PinnedRegion>,
    /// How far rows have moved, as one f64.
    drift: DeviceBuffer,
}

/// Name suffix of the kernels for this dtype.
fn suffix(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "single",
        Dtype::F16 => "half",
        other => panic!("hidden rows are not stored as {other}"),
    }
}

impl DeviceHidden {
    /// Rows of zeros on the device and in host memory. An error if either has too little.
    pub fn new(
        gpu: &Gpu,
        device_slots: u64,
        host_slots: u64,
        columns: usize,
        dtype: Dtype,
    ) -> Result<DeviceHidden> {
        suffix(dtype);
        assert!(device_slots + host_slots <= u32::MAX as u64, "slots are counted in 32 bits");
        let row_bytes = columns as u64 * dtype.bytes();
        // Whole words, which are filled.
        let bytes = |slots: u64| (slots * row_bytes).next_multiple_of(4) as usize;
        let device = (device_slots > 0 && columns > 0).then(|| DeviceBuffer::exact(gpu, bytes(device_slots)));
        let host = (host_slots > 0 && columns > 0).then(|| PinnedRegion::new(gpu, bytes(host_slots)));
        let (device, mut host) = (device.transpose()?, host.transpose()?);
        let drift = DeviceBuffer::new(gpu, 8, Use::Compute);
        gpu.fill_words(drift.address(), 2, 0);
        if let Some(device) = &device {
            gpu.fill_words(device.address(), device.bytes() / 4, 0);
        }
        if let Some(host) = &mut host {
            host.clear()?;
        }
        gpu.check()?;
        Ok(DeviceHidden { gpu: gpu.clone(), columns, dtype, device_slots, host_slots, device, host, drift })
    }

    /// Numbers per row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes() as usize
    }

    fn addresses(&self) -> (u64, u64) {
        let device = self.device.as_ref().map_or(0, DeviceBuffer::address);
        (device, self.host.as_ref().map_or(0, PinnedRegion::address))
    }

    fn assert_slots(&self, slots: &[u32]) {
        let all = self.device_slots + self.host_slots;
        assert!(slots.iter().all(|slot| (*slot as u64) < all), "slots of the hidden rows");
    }

    /// Records that kernels launched so far use host memory.
    fn used(&self) {
        if let Some(host) = &self.host {
            self.gpu.attempt(|| {
                host.read_until(self.gpu.inner().compute.mark()?);
                Ok(())
            });
        }
    }

    /// `to[i]` becomes the row of `slots[i]`.
    pub fn pull(&self, slots: &[u32], to: &mut DeviceMatrix) {
        assert_eq!((to.rows(), to.columns()), (slots.len(), self.columns));
        self.assert_slots(slots);
        let mut words = Pinned::new(&self.gpu, slots.len());
        words.words_mut().copy_from_slice(slots);
        let (words, (device, host)) = (self.gpu.upload_words(words), self.addresses());
        let kernel = format!("pull_{}", suffix(self.dtype));
        // SAFETY: every slot has its row on the device or in host memory, and `to` has a row per slot. Host memory waits
        // for the event.
        unsafe {
            launch!(
                self.gpu, &kernel, [blocks(slots.len(), ROWS_OF_A_BLOCK), 1], [256, 1];
                device, host, words.address(), to.address(), slots.len() as u32, self.columns as u32,
                self.device_slots as u32
            )
        }
        self.used();
    }

    /// The row of `slots[i]` becomes `rows[i]`. Where `replaces[i]`, how far it moves is added up.
    pub fn push(&mut self, rows: &DeviceMatrix, slots: &[u32], replaces: &[bool]) {
        assert_eq!((rows.rows(), rows.columns()), (slots.len(), self.columns));
        assert_eq!(slots.len(), replaces.len(), "a mark a row");
        self.assert_slots(slots);
        if slots.is_empty() {
            return;
        }
        let count = slots.len();
        let mut words = Pinned::new(&self.gpu, 2 * count);
        words.words_mut()[..count].copy_from_slice(slots);
        words.words_mut()[count..].iter_mut().zip(replaces).for_each(|(to, mark)| *to = *mark as u32);
        let (words, (device, host)) = (self.gpu.upload_words(words), self.addresses());
        let drifts = DeviceBuffer::new(&self.gpu, (count + 1) * 8, Use::Compute);
        let kernel = format!("push_{}", suffix(self.dtype));
        // SAFETY: every slot has its row, no two groups of lanes the same one, and there is a number for each of them.
        // Host memory waits for the event.
        unsafe {
            launch!(
                self.gpu, &kernel, [blocks(count, ROWS_OF_A_BLOCK), 1], [256, 1];
                rows.address(), words.address(), words.address() + count as u64 * 4, device, host,
                self.drift.address(), drifts.address(), count as u32, self.columns as u32, self.device_slots as u32
            );
            if replaces.contains(&true) {
                launch!(
                    self.gpu, "add_numbers_f64", [1, 1], [256, 1];
                    drifts.address(), self.drift.address(), (count + 1) as u32, 1.0f64, 0u32
                );
            }
        }
        self.used();
    }

    /// How far rows have moved so far, in all. Waits for it.
    pub fn drift(&self) -> Result<f64> {
        // SAFETY: the address is an f64.
        unsafe { Pending::copy(&self.gpu, self.drift.address()) }.wait()
    }

    /// The part of some rows that is on the device, in bytes, and where the rest starts in host memory.
    fn parts(&self, first: u64, bytes: usize) -> (usize, usize) {
        let row_bytes = self.row_bytes();
        assert!(row_bytes > 0 && bytes.is_multiple_of(row_bytes), "whole rows");
        let rows = (bytes / row_bytes) as u64;
        assert!(first + rows <= self.device_slots + self.host_slots, "rows of the slots there are");
        let on_device = self.device_slots.saturating_sub(first).min(rows);
        let in_host = (first + on_device).saturating_sub(self.device_slots) as usize * row_bytes;
        (on_device as usize * row_bytes, in_host)
    }

    /// Copies rows as they are stored, starting at slot `first`. Waits for them.
    pub fn read(&self, first: u64, stored: &mut [u8]) {
        let (on_device, at) = self.parts(first, stored.len());
        let (from_device, from_host) = stored.split_at_mut(on_device);
        if let Some(device) = self.device.as_ref().filter(|_| !from_device.is_empty()) {
            let address = device.address() + first * self.row_bytes() as u64;
            // SAFETY: the buffer has one row per slot, and these slots are in it.
            unsafe { self.gpu.read_bytes(address, from_device) };
        }
        if let Some(host) = self.host.as_ref().filter(|_| !from_host.is_empty()) {
            self.gpu.attempt(|| host.read(at, from_host));
        }
    }

    /// Replaces rows by others as they are stored, starting at slot `first`. Waits for them.
    pub fn write(&mut self, first: u64, stored: &[u8]) {
        let (on_device, at) = self.parts(first, stored.len());
        let (to_device, to_host) = stored.split_at(on_device);
        if let Some(device) = self.device.as_ref().filter(|_| !to_device.is_empty()) {
            // SAFETY: the buffer has one row per slot, and these slots are in it.
            unsafe { self.gpu.write_bytes(device.address() + first * self.row_bytes() as u64, to_device) };
        }
        if let Some(host) = self.host.as_mut().filter(|_| !to_host.is_empty()) {
            self.gpu.attempt(|| host.write(at, to_host));
        }
    }
}
