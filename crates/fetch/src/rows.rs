//! Feature rows of a dataset, held in memory or mapped from its file, gathered by node as f32.

use crate::{FetchError, Result};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Map, Touch, prefetch};
use esker_store::{ArrayFile, Dataset, StoreError, file};
use esker_types::{ByteCount, Dtype, NodeId};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

/// Rows gathered by one thread before it takes the next.
const CHUNK_ROWS: usize = 512;
/// Rows asked for ahead, and lines of each: the hardware follows a row once it is begun.
const ROWS_AHEAD: usize = 8;
const LINES_AHEAD: usize = 4;
const LINE_BYTES: usize = 64;
/// Elements read at a time while loading.
const LOAD_ELEMENTS: usize = 1 << 18;

/// How numbers are stored.
#[derive(Debug, Clone, Copy)]
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

enum Held {
    Memory(AlignedBuffer),
    Mapped(Map),
}

/// The feature rows of a dataset.
pub struct FeatureRows {
    held: Held,
    rows: u64,
    dim: usize,
    stored: Stored,
    row_bytes: usize,
    /// What 8-bit numbers of each column are multiplied by.
    scales: Option<Vec<f32>>,
}

impl FeatureRows {
    /// Bytes that [`FeatureRows::load`] takes.
    pub fn bytes_in_memory(dataset: &Dataset) -> Result<u64> {
        let array = features(dataset)?;
        Ok(array.entry().rows * array.entry().row_bytes() + DIRECT_ALIGN as u64)
    }

    /// Reads all rows into memory; refuses what takes more than `most_bytes`.
    pub fn load(dataset: &Dataset, most_bytes: u64) -> Result<FeatureRows> {
        let (array, needed) = (features(dataset)?, FeatureRows::bytes_in_memory(dataset)?);
        if needed > most_bytes {
            let what = format!("holding the features of {} in memory", dataset.directory().display());
            let (needed, allowed) = (ByteCount(needed), ByteCount(most_bytes));
            return Err(FetchError::Memory { what, needed, allowed });
        }
        let bytes = (array.entry().rows * array.entry().row_bytes()) as usize;
        let mut buffer = AlignedBuffer::new(bytes.max(1), DIRECT_ALIGN);
        let into = &mut buffer[..bytes];
        match Stored::of(array)? {
            Stored::F32 => fill::<f32>(array, into)?,
            Stored::F16 | Stored::Bf16 => fill::<u16>(array, into)?,
            Stored::U8 | Stored::I8 => fill::<u8>(array, into)?,
        }
        FeatureRows::new(dataset, Held::Memory(buffer))
    }

    /// Maps all rows: they are read through the page cache as they are touched.
    pub fn map(dataset: &Dataset) -> Result<FeatureRows> {
        FeatureRows::new(dataset, Held::Mapped(features(dataset)?.map(Touch::Random)?))
    }

    fn new(dataset: &Dataset, held: Held) -> Result<FeatureRows> {
        let stored = Stored::of(features(dataset)?)?;
        let entry = features(dataset)?.entry();
        let scales = match dataset.array(file::NODE_FEATURE_SCALES) {
            Some(array) => {
                let mut scales = vec![0f32; entry.columns as usize];
                array.read_at(0, &mut scales)?;
                Some(scales)
            }
            None => None,
        };
        let (dim, row_bytes) = (entry.columns as usize, entry.row_bytes() as usize);
        Ok(FeatureRows { held, rows: entry.rows, dim, stored, row_bytes, scales })
    }

    /// Whether rows are held in memory, not mapped.
    pub fn is_in_memory(&self) -> bool {
        matches!(self.held, Held::Memory(_))
    }

    /// Numbers in a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of a row as stored.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Writes the rows of `nodes` to `values`, one after the other, with the threads of the surrounding rayon pool.
    pub fn gather(&self, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        if let Some(node) = nodes.iter().find(|node| node.0 >= self.rows) {
            return Err(FetchError::Row { row: node.0, last: self.rows.saturating_sub(1) });
        }
        assert_eq!(values.len(), nodes.len() * self.dim, "a row a node");
        if self.dim > 0 {
            let pieces = values.par_chunks_mut(CHUNK_ROWS * self.dim).zip(nodes.par_chunks(CHUNK_ROWS));
            pieces.for_each(|(values, nodes)| self.gather_piece(nodes, values));
        }
        Ok(())
    }

    fn gather_piece(&self, nodes: &[NodeId], values: &mut [f32]) {
        let bytes: &[u8] = match &self.held {
            Held::Memory(buffer) => buffer,
            Held::Mapped(map) => map,
        };
        let lines = self.row_bytes.div_ceil(LINE_BYTES).min(LINES_AHEAD);
        for (at, (node, row)) in nodes.iter().zip(values.chunks_exact_mut(self.dim)).enumerate() {
            if let Some(soon) = nodes.get(at + ROWS_AHEAD) {
                let start = soon.index() * self.row_bytes;
                (0..lines).for_each(|line| prefetch(bytes, start + line * LINE_BYTES));
            }
            let start = node.index() * self.row_bytes;
            self.convert(&bytes[start..start + self.row_bytes], row);
        }
    }

    /// A stored row as f32.
    fn convert(&self, stored: &[u8], row: &mut [f32]) {
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

fn features(dataset: &Dataset) -> Result<&ArrayFile> {
    dataset
        .array(file::NODE_FEATURES)
        .ok_or_else(|| FetchError::NoFeatures { dataset: dataset.directory().display().to_string() })
}

/// Reads an array into bytes as elements of its width.
fn fill<T: bytemuck::Pod>(array: &ArrayFile, into: &mut [u8]) -> Result<()> {
    let mut elements = array.elements(0)?;
    for chunk in bytemuck::cast_slice_mut::<u8, T>(into).chunks_mut(LOAD_ELEMENTS) {
        elements.fill(chunk)?;
    }
    Ok(())
}
