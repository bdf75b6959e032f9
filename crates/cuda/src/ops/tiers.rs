//! Cached rows of a whole run, in their stored form: the first slots in device memory, the others in pinned host
//! memory that the GPU's threads read. A batch is assembled from both and from its missed rows (DiskGNN, section 4:
//! feature assembling), on the copy stream, while the previous step runs.

use super::RowShape;
use crate::gpu::{Event, Gpu, launch};
use crate::matrix::blocks;
use crate::memory::{DeviceBuffer, Use};
use crate::pinned::{Pinned, PinnedRegion};
use crate::{DeviceMatrix, Result};
use esker_plan::{Placement, Placements};
use esker_types::{Dtype, StoredRows};
use std::sync::{Arc, PoisonError, RwLock};

/// Blocks that assemble a batch, per multiprocessor: enough to keep the bus busy, and few enough that the previous
/// step can run at the same time.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Slots for rows: first those on the device, then those in host memory.
pub struct TieredRows {
    gpu: Gpu,
    rows: StoredRows,
    device_slots: u64,
    host_slots: u64,
    device: Option<DeviceBuffer>,
    host: Option<RwLock<PinnedRegion>>,
    scales: Option<DeviceBuffer>,
}

/// A batch that can be assembled: the position of each of its rows, and its missed rows.
pub struct TieredBatch {
    tiers: Arc<TieredRows>,
    words: Pinned,
    missed: Pinned,
    /// Bytes of the missed rows that are used.
    missed_bytes: usize,
    /// For each missed row to be cached: its index among the missed rows, and its slot.
    kept: Option<Pinned>,
}

/// Name prefix of the kernels for this dtype.
fn stem(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "tiers_single",
        Dtype::F16 => "tiers_half",
        Dtype::Bf16 => "tiers_brain",
        Dtype::U8 => "tiers_unsigned",
        Dtype::I8 => "tiers_signed",
        other => panic!("rows are not stored as {other}"),
    }
}

/// Number of the read rows that a batch uses: those up to the last used one. Asserts that every placement is a slot, a
/// read row, or skipped.
fn taken(placements: &Placements, slots: u64, read_rows: u64) -> u64 {
    assert!(placements.are_valid(slots, read_rows), "every placement is a slot or a row that was read");
    placements.counts().reads_end
}

impl TieredRows {
    /// Space for rows on the device and in host memory, with unspecified content. An error if either has too little.
    pub fn new(gpu: &Gpu, device_slots: u64, host_slots: u64, rows: &StoredRows) -> Result<TieredRows> {
        assert!(rows.columns > 0 && rows.dtype.holds_features(), "rows of numbers");
        assert!(device_slots + host_slots < u32::MAX as u64, "slots are counted in 32 bits");
        let bytes =
            |slots: u64| usize::try_from(TieredRows::bytes_for(slots, rows)).expect("bytes of an address");
        let device = (device_slots > 0).then(|| DeviceBuffer::exact(gpu, bytes(device_slots))).transpose()?;
        let host = (host_slots > 0).then(|| PinnedRegion::new(gpu, bytes(host_slots))).transpose()?;
        let scales = rows.scales.as_ref().filter(|_| rows.dtype.bytes() == 1).map(|scales| {
            assert_eq!(scales.len(), rows.columns, "a scale a column");
            let buffer = DeviceBuffer::words(gpu, rows.columns);
            // SAFETY: the buffer has one word per scale.
            unsafe { gpu.write_bytes(buffer.address(), bytemuck::cast_slice(scales)) };
            buffer
        });
        gpu.check()?;
        let (gpu, rows, host) = (gpu.clone(), rows.clone(), host.map(RwLock::new));
        Ok(TieredRows { gpu, rows, device_slots, host_slots, device, host, scales })
    }

    /// Bytes of this many slots, wherever they are.
    pub fn bytes_for(slots: u64, rows: &StoredRows) -> u64 {
        slots.saturating_mul(rows.row_bytes() as u64)
    }

    /// Number of slots on the device: the first ones.
    pub fn device_slots(&self) -> u64 {
        self.device_slots
    }

    /// Number of all slots.
    pub fn slots(&self) -> u64 {
        self.device_slots + self.host_slots
    }

    /// Numbers per row.
    pub fn columns(&self) -> usize {
        self.rows.columns
    }

    /// Writes rows, in their stored form, into slots, starting at `first`, after earlier uploads. Asserts that these
    /// slots exist.
    pub fn fill(&self, first: u64, stored: &[u8]) -> Result<()> {
        let row_bytes = self.rows.row_bytes();
        assert!(stored.len().is_multiple_of(row_bytes), "whole rows");
        let rows = (stored.len() / row_bytes) as u64;
        assert!(first.saturating_add(rows) <= self.slots(), "rows of the slots there are");
        let on_device = self.device_slots.saturating_sub(first).min(rows);
        let (to_device, to_host) = stored.split_at(on_device as usize * row_bytes);
        if let Some(device) = self.device.as_ref().filter(|_| !to_device.is_empty()) {
            // SAFETY: the buffer has one row per slot, and these slots are in it.
            unsafe { self.gpu.write_bytes(device.address() + first * row_bytes as u64, to_device) };
        }
        if let Some(host) = self.host.as_ref().filter(|_| !to_host.is_empty()) {
            let at = (first + on_device - self.device_slots) as usize * row_bytes;
            host.write().unwrap_or_else(PoisonError::into_inner).write(at, to_host)?;
        }
        self.gpu.check()
    }

    /// Host memory for this many bytes of missed rows of one batch.
    pub fn missed(&self, bytes: usize) -> Pinned {
        Pinned::new(&self.gpu, bytes.div_ceil(4))
    }

    /// The rows of a batch, from slots and from missed rows. Asserts that placements refer to nothing else.
    pub fn batch(self: &Arc<TieredRows>, placements: &Placements, missed: Pinned) -> TieredBatch {
        let words = &placements.words;
        assert!(words.len() < u32::MAX as usize, "rows are counted in 32 bits");
        let row_bytes = self.rows.row_bytes();
        let taken = taken(placements, self.slots(), (missed.words().len() * 4 / row_bytes) as u64);
        let mut host = Pinned::new(&self.gpu, words.len());
        host.words_mut().copy_from_slice(words);
        let kept = (!placements.kept.is_empty()).then(|| {
            let mut pairs = Pinned::new(&self.gpu, placements.kept.len() * 2);
            let stays = words.iter().filter_map(|word| match Placement::decode(*word) {
                Placement::Keep(index) => Some(index),
                _ => None,
            });
            for (pair, (index, slot)) in
                pairs.words_mut().chunks_exact_mut(2).zip(stays.zip(&placements.kept))
            {
                pair.copy_from_slice(&[index, *slot]);
            }
            pairs
        });
        TieredBatch {
            tiers: self.clone(),
            words: host,
            missed,
            missed_bytes: taken as usize * row_bytes,
            kept,
        }
    }
}

impl TieredBatch {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.words.words().len()
    }

    /// Numbers per row.
    pub fn columns(&self) -> usize {
        self.tiers.columns()
    }

    /// Assembles the rows on the device as f32, on the copy stream. The compute stream waits for them, the caller does
    /// not.
    pub fn upload(self) -> DeviceMatrix {
        let (count, columns) = (self.rows(), self.columns());
        let TieredBatch { tiers, words, missed, missed_bytes, kept } = self;
        let (gpu, inner) = (&tiers.gpu, tiers.gpu.inner());
        let words = gpu.copy_in(words, count * 4, false);
        let missed = gpu.copy_in(missed, missed_bytes, true);
        let mut to = DeviceBuffer::new(gpu, count * columns * 4, Use::Upload);
        let begun = gpu.attempt(|| {
            to.wait_until_free()?;
            Event::recorded(&inner.copy)
        });
        // Nobody writes to the slots before the event after the kernel is recorded.
        let host = tiers.host.as_ref().map(|host| host.read().unwrap_or_else(PoisonError::into_inner));
        let shape = RowShape::of(columns);
        let [rows, parts] = shape.grid(count, columns);
        let most =
            (gpu.info().processors as usize * BLOCKS_PER_MULTIPROCESSOR).div_ceil(parts.max(1) as usize);
        let address = |buffer: Option<&DeviceBuffer>| buffer.map_or(0, DeviceBuffer::address);
        // SAFETY: every placement is a slot, a copied missed row, or nothing. Slots have their rows on the device or
        // in host memory, there is a scale per column, and the result has a row per word. All of it is written on this
        // stream or before, and outlives the kernel: buffers are reused later, host memory waits for the event.
        unsafe {
            launch!(
                on copy, gpu, &shape.kernel(stem(tiers.rows.dtype)), [rows.min(most.max(1) as u32), parts], [256, 1];
                words.address(), address(tiers.device.as_ref()), host.as_ref().map_or(0, |host| host.address()),
                missed.address(), address(tiers.scales.as_ref()), to.address(), count as u32, columns as u32,
                tiers.device_slots as u32
            )
        }
        let kept = kept.map(|pairs| {
            let count = pairs.words().len() / 2;
            let pairs = gpu.copy_in(pairs, count * 8, false);
            let row_bytes = tiers.rows.row_bytes();
            let (kernel, width) = match row_bytes.is_multiple_of(4) {
                true => ("keep_words", row_bytes / 4),
                false => ("keep_bytes", row_bytes),
            };
            // SAFETY: every pair is a copied missed row and a slot that no other row of the batch has. Earlier batches
            // read their hits on this stream; later ones come after this kernel.
            unsafe {
                launch!(
                    on copy, gpu, kernel, [blocks(count * width, 256).min(most.max(1) as u32), 1], [256, 1];
                    missed.address(), pairs.address(), address(tiers.device.as_ref()),
                    host.as_ref().map_or(0, |host| host.address()), (count * width) as u64, width as u32,
                    tiers.device_slots as u32
                )
            }
            pairs
        });
        gpu.attempt(|| {
            let (ended, uploaded) = (Event::recorded(&inner.copy)?, inner.copy.mark()?);
            if let Some(begun) = begun {
                gpu.copied(begun, ended);
            }
            inner.compute.wait(&uploaded)?;
            if let Some(host) = &host {
                host.read_until(uploaded);
            }
            Ok(())
        });
        words.used_in_upload();
        kept.into_iter().for_each(DeviceBuffer::used_in_upload);
        missed.used_in_upload();
        DeviceMatrix::uploaded(to, count, columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SOURCES;
    use esker_plan::MOST_SLOTS;
    use esker_types::SlotIndex;

    #[test]
    fn every_kind_of_rows_has_its_kernels() {
        for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.holds_features()) {
            for columns in 1..2000 {
                let kernel = RowShape::of(columns).kernel(stem(dtype));
                let files = SOURCES.iter().filter(|source| source.has(&kernel)).map(|source| source.file);
                assert_eq!(files.collect::<Vec<_>>(), ["tiers.cu"], "{kernel}");
            }
        }
    }

    fn placed(all: &[Placement]) -> Placements {
        Placements { words: all.iter().map(|one| one.encode()).collect(), kept: Vec::new() }
    }

    #[test]
    fn no_more_of_the_missed_rows_is_taken_than_placements_say() {
        let hit = |slot| Placement::Hit(SlotIndex(slot));
        assert_eq!(taken(&placed(&[]), 3, 0), 0);
        assert_eq!(taken(&placed(&[hit(0), hit(2), hit(1)]), 3, 5), 0);
        assert_eq!(taken(&placed(&[hit(0), Placement::Read(0), hit(1), Placement::Skip]), 3, 5), 1);
        assert_eq!(taken(&placed(&[Placement::Read(4), hit(0)]), 3, 5), 5);
        assert_eq!(taken(&placed(&[Placement::Read(0)]), MOST_SLOTS as u64, 1), 1);
    }

    #[test]
    #[should_panic(expected = "a slot or a row that was read")]
    fn a_placement_that_names_no_row_is_found_before_anything_is_launched() {
        taken(&placed(&[Placement::Hit(SlotIndex(0)), Placement::Read(5)]), 3, 5);
    }
}
