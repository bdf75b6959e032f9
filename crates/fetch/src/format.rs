//! How feature rows are stored, and their conversion to f32.

use crate::{FetchError, Result};
use esker_store::{ArrayFile, Dataset, StoreError, file};
use esker_types::{Dtype, NodeId, StoredRows};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// The stored type of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stored {
    F32,
    F16,
    Bf16,
    U8,
    I8,
}

impl Stored {
    fn of(array: &ArrayFile) -> Result<Stored> {
        match array.entry().dtype {
            Dtype::F32 => Ok(Stored::F32),
            Dtype::F16 => Ok(Stored::F16),
            Dtype::Bf16 => Ok(Stored::Bf16),
            Dtype::U8 => Ok(Stored::U8),
            Dtype::I8 => Ok(Stored::I8),
            found => Err(StoreError::inconsistent(array.path(), "f32, f16, bf16, u8 or i8", found).into()),
        }
    }
}

/// The format of feature rows. No stored row is wider than its f32 row.
#[derive(Debug, Clone)]
pub struct RowFormat {
    rows: u64,
    dim: usize,
    stored: Stored,
    row_bytes: usize,
    /// Scale of each column, for 8-bit numbers.
    scales: Option<Vec<f32>>,
}

impl RowFormat {
    /// The format of a dataset's rows.
    pub fn of(dataset: &Dataset) -> Result<RowFormat> {
        let array = features(dataset)?;
        let (stored, entry) = (Stored::of(array)?, array.entry());
        let scales = match dataset.array(file::NODE_FEATURE_SCALES) {
            Some(array) => {
                let mut scales = vec![0f32; entry.columns as usize];
                array.read_at(0, &mut scales)?;
                Some(scales)
            }
            None => None,
        };
        let (dim, row_bytes) = (entry.columns as usize, entry.row_bytes() as usize);
        Ok(RowFormat { rows: entry.rows, dim, stored, row_bytes, scales })
    }

    /// Numbers per row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of a row as stored.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The stored format, for code that converts rows to f32 elsewhere.
    pub fn stored_rows(&self) -> StoredRows {
        let dtype = match self.stored {
            Stored::F32 => Dtype::F32,
            Stored::F16 => Dtype::F16,
            Stored::Bf16 => Dtype::Bf16,
            Stored::U8 => Dtype::U8,
            Stored::I8 => Dtype::I8,
        };
        StoredRows { columns: self.dim, dtype, scales: self.scales.clone() }
    }

    /// Whether a stored row is a row of f32.
    pub fn is_plain(&self) -> bool {
        self.stored == Stored::F32
    }

    /// Fails if a node has no row.
    pub fn check(&self, nodes: &[NodeId]) -> Result<()> {
        match nodes.iter().find(|node| node.0 >= self.rows) {
            Some(node) => Err(FetchError::Row { row: node.0, last: self.rows.saturating_sub(1) }),
            None => Ok(()),
        }
    }

    /// Converts stored rows to f32, each from the bytes that `row` returns. If there are more rows than the CPU's
    /// caches hold and they are stored as f32, they bypass the caches.
    pub fn convert_rows<'a>(
        &self,
        past_caches: bool,
        values: &mut [f32],
        mut row: impl FnMut(usize) -> &'a [u8],
    ) {
        if past_caches && matches!(self.stored, Stored::F32) {
            return esker_io::gather_past_caches(bytemuck::cast_slice_mut(values), self.row_bytes(), row);
        }
        let rows = values.chunks_exact_mut(self.dim().max(1)).enumerate();
        rows.for_each(|(at, values)| self.convert(row(at), values));
    }

    /// A stored row as f32.
    pub fn convert(&self, stored: &[u8], row: &mut [f32]) {
        let scales = self.scales.as_deref();
        let scale = |column: usize| scales.map_or(1.0, |scales| scales[column]);
        match self.stored {
            Stored::F32 => bytemuck::cast_slice_mut::<f32, u8>(row).copy_from_slice(stored),
            Stored::F16 => bytemuck::cast_slice::<u8, f16>(stored).convert_to_f32_slice(row),
            Stored::Bf16 => bytemuck::cast_slice::<u8, bf16>(stored).convert_to_f32_slice(row),
            Stored::U8 => put(row, stored.iter().enumerate().map(|(at, byte)| *byte as f32 * scale(at))),
            Stored::I8 => {
                put(row, stored.iter().enumerate().map(|(at, byte)| *byte as i8 as f32 * scale(at)))
            }
        }
    }
}

fn put(row: &mut [f32], values: impl Iterator<Item = f32>) {
    row.iter_mut().zip(values).for_each(|(slot, value)| *slot = value);
}

pub(crate) fn features(dataset: &Dataset) -> Result<&ArrayFile> {
    dataset
        .array(file::NODE_FEATURES)
        .ok_or_else(|| FetchError::NoFeatures { dataset: dataset.directory().to_path_buf() })
}
