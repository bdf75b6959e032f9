//! Hidden rows that steps exchange, in host memory, as f32 or f16.

use super::affine::for_chunks;
use super::buffer::{MatrixPool, Parts};
use super::{COPIED_ROWS, CpuMatrix};
use crate::{DeviceError, HiddenRows, HiddenShape, Shape};
use esker_types::Dtype;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Hidden rows in host memory.
pub struct CpuHidden {
    shape: HiddenShape,
    /// One row per slot: f32, or the bits of two numbers per word.
    stored: CpuMatrix,
    drift: f64,
}

/// The number that is stored as f16: the nearest, at most the largest finite one.
fn rounded(value: f32) -> f16 {
    f16::from_f32(value.clamp(-f16::MAX.to_f32(), f16::MAX.to_f32()))
}

/// Partial sums of a row, so that they run in vector registers. They are added in a fixed order.
const SUMS: usize = 8;

/// How far a row moves: the norm of the difference over that of the row before.
fn moved(before: &[f32], after: &[f32]) -> f64 {
    let (mut moved, mut norm) = ([0.0f64; SUMS], [0.0f64; SUMS]);
    for (before, after) in before.chunks(SUMS).zip(after.chunks(SUMS)) {
        for (sum, (before, after)) in before.iter().zip(after).enumerate() {
            let (before, after) = (*before as f64, *after as f64);
            moved[sum] += (after - before) * (after - before);
            norm[sum] += before * before;
        }
    }
    let (moved, norm) = (moved.iter().sum::<f64>(), norm.iter().sum::<f64>());
    match (moved == 0.0, norm == 0.0) {
        (true, _) => 0.0,
        (false, true) => 1.0,
        (false, false) => (moved / norm).sqrt(),
    }
}

impl CpuHidden {
    pub(super) fn new(pool: &MatrixPool, shape: HiddenShape) -> CpuHidden {
        let words = match shape.dtype {
            Dtype::F32 => shape.columns,
            Dtype::F16 => shape.columns.div_ceil(2),
            other => panic!("hidden rows are not stored as {other}"),
        };
        let mut stored = CpuMatrix::new(pool, shape.slots as usize, words);
        stored.values_mut().fill(0.0);
        CpuHidden { shape, stored, drift: 0.0 }
    }

    /// Words per row.
    fn words(&self) -> usize {
        self.stored.columns()
    }

    fn write_row(&self, slot: usize, row: &mut [f32]) {
        let stored = self.stored.row(slot);
        match self.shape.dtype {
            Dtype::F16 => halves(stored, row.len()).convert_to_f32_slice(row),
            _ => row.copy_from_slice(stored),
        }
    }
}

/// The numbers of a row of f16.
fn halves(row: &[f32], columns: usize) -> &[f16] {
    &bytemuck::cast_slice(row)[..columns]
}

/// Two rows as f32.
#[derive(Default)]
struct RowScratch {
    before: Vec<f32>,
    after: Vec<f32>,
}

/// Replaces a row. Returns how far it moves, if it replaces one that counts.
fn replace(stored: &mut [f32], row: &[f32], dtype: Dtype, replaces: bool, scratch: &mut RowScratch) -> f64 {
    if dtype == Dtype::F32 {
        let moved = if replaces { moved(stored, row) } else { 0.0 };
        stored.copy_from_slice(row);
        return moved;
    }
    let stored: &mut [f16] = &mut bytemuck::cast_slice_mut(stored)[..row.len()];
    let RowScratch { before, after } = scratch;
    before.resize(row.len(), 0.0);
    after.resize(row.len(), 0.0);
    stored.convert_to_f32_slice(before);
    stored.iter_mut().zip(row).for_each(|(to, from)| *to = rounded(*from));
    stored.convert_to_f32_slice(after);
    if replaces { moved(before, after) } else { 0.0 }
}

impl HiddenRows for CpuHidden {
    type Matrix = CpuMatrix;

    fn shape(&self) -> HiddenShape {
        self.shape
    }

    fn pull(&self, slots: &[u32], to: &mut CpuMatrix) {
        let columns = self.shape.columns;
        assert_eq!((to.rows(), to.columns()), (slots.len(), columns));
        let parts = Parts::new(to.values_mut());
        for_chunks(slots.len(), COPIED_ROWS, |first, count| {
            // SAFETY: chunks do not overlap, and the matrix outlives the loop.
            let to = unsafe { parts.part(first * columns, count * columns) };
            for (to, slot) in to.chunks_exact_mut(columns.max(1)).zip(&slots[first..]) {
                self.write_row(*slot as usize, to);
            }
        });
    }

    fn push(&mut self, rows: &CpuMatrix, slots: &[u32], replaces: &[bool]) {
        assert_eq!((rows.rows(), rows.columns()), (slots.len(), self.shape.columns));
        assert_eq!(slots.len(), replaces.len(), "a mark a row");
        let (words, dtype) = (self.words(), self.shape.dtype);
        let (stored, mut scratch) = (self.stored.values_mut(), RowScratch::default());
        // Added up in the order of rows.
        for (index, (slot, replaces)) in slots.iter().zip(replaces).enumerate() {
            let stored = &mut stored[*slot as usize * words..][..words];
            self.drift += replace(stored, rows.row(index), dtype, *replaces, &mut scratch);
        }
    }

    fn drift(&self) -> Result<f64, DeviceError> {
        Ok(self.drift)
    }

    fn read(&self, first: u64, stored: &mut [u8]) {
        let row_bytes = self.shape.row_bytes();
        for (slot, to) in (first as usize..).zip(stored.chunks_exact_mut(row_bytes)) {
            to.copy_from_slice(&bytemuck::cast_slice(self.stored.row(slot))[..row_bytes]);
        }
    }

    fn write(&mut self, first: u64, stored: &[u8]) {
        let (row_bytes, words) = (self.shape.row_bytes(), self.words());
        let rows = self.stored.values_mut();
        for (slot, from) in (first as usize..).zip(stored.chunks_exact(row_bytes)) {
            let row: &mut [u8] = bytemuck::cast_slice_mut(&mut rows[slot * words..][..words]);
            row[..row_bytes].copy_from_slice(from);
        }
    }
}
