//! Feature rows of a dataset, in memory or memory-mapped from its file, gathered by node as f32.

use crate::format::{RowFormat, features};
use crate::{FetchError, Result};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Map, Touch, prefetch};
use esker_store::{ArrayFile, Dataset};
use esker_types::{ByteCount, NodeId};
use rayon::prelude::*;

/// Rows per parallel task.
const CHUNK_ROWS: usize = 512;
/// Rows prefetched ahead, and cache lines per row. The hardware prefetches the rest of a row once it is read.
const PREFETCH_ROWS: usize = 8;
const PREFETCH_LINES: usize = 4;
const LINE_BYTES: usize = 64;
/// Elements read at a time while loading.
const LOAD_ELEMENTS: usize = 1 << 18;

enum RowMemory {
    Memory(AlignedBuffer),
    Mapped(Map),
}

/// The feature rows of a dataset.
pub struct FeatureRows {
    held: RowMemory,
    format: RowFormat,
}

impl FeatureRows {
    /// Bytes that [`FeatureRows::load`] takes.
    pub fn bytes_in_memory(dataset: &Dataset) -> Result<u64> {
        let array = features(dataset)?;
        Ok(array.entry().rows * array.entry().row_bytes() + DIRECT_ALIGN as u64)
    }

    /// Reads all rows into memory. Fails if they take more than `most_bytes`.
    pub fn load(dataset: &Dataset, most_bytes: u64) -> Result<FeatureRows> {
        let (array, needed) = (features(dataset)?, FeatureRows::bytes_in_memory(dataset)?);
        if needed > most_bytes {
            let dataset = dataset.directory().to_path_buf();
            let (needed, allowed) = (ByteCount(needed), ByteCount(most_bytes));
            return Err(FetchError::Memory { dataset, needed, allowed });
        }
        let bytes = (array.entry().rows * array.entry().row_bytes()) as usize;
        let mut buffer = AlignedBuffer::new(bytes.max(1), DIRECT_ALIGN);
        let into = &mut buffer[..bytes];
        let format = RowFormat::of(dataset)?;
        match array.entry().dtype.bytes() {
            4 => fill::<f32>(array, into)?,
            2 => fill::<u16>(array, into)?,
            _ => fill::<u8>(array, into)?,
        }
        Ok(FeatureRows { held: RowMemory::Memory(buffer), format })
    }

    /// Memory-maps all rows: they are read through the page cache when accessed.
    pub fn map(dataset: &Dataset) -> Result<FeatureRows> {
        let held = RowMemory::Mapped(features(dataset)?.map(Touch::Random)?);
        Ok(FeatureRows { held, format: RowFormat::of(dataset)? })
    }

    /// Whether rows are in memory, not memory-mapped.
    pub fn is_in_memory(&self) -> bool {
        matches!(self.held, RowMemory::Memory(_))
    }

    /// Numbers per row.
    pub fn dim(&self) -> usize {
        self.format.dim()
    }

    /// Bytes of a row as stored.
    pub fn row_bytes(&self) -> usize {
        self.format.row_bytes()
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.format.rows()
    }

    /// Writes the rows of `nodes` to `values`, one after the other, with the threads of the current rayon pool. Skipped
    /// rows are zeros. `skipped` has one mark per node, or is empty.
    pub fn gather(&self, nodes: &[NodeId], skipped: &[bool], values: &mut [f32]) -> Result<()> {
        let dim = self.format.dim();
        self.format.check(nodes)?;
        assert_eq!(values.len(), nodes.len() * dim, "a row a node");
        if dim > 0 {
            let pieces = values.par_chunks_mut(CHUNK_ROWS * dim).zip(nodes.par_chunks(CHUNK_ROWS));
            match skipped {
                [] => pieces.for_each(|(values, nodes)| self.gather_piece(nodes, values)),
                _ => pieces.zip(skipped.par_chunks(CHUNK_ROWS)).for_each(|((values, nodes), skipped)| {
                    self.gather_needed(nodes, skipped, values);
                }),
            }
        }
        Ok(())
    }

    fn gather_needed(&self, nodes: &[NodeId], skipped: &[bool], values: &mut [f32]) {
        let rows = values.chunks_exact_mut(self.format.dim());
        for ((node, skip), row) in nodes.iter().zip(skipped).zip(rows) {
            match skip {
                true => row.fill(0.0),
                false => self.gather_piece(std::slice::from_ref(node), row),
            }
        }
    }

    fn gather_piece(&self, nodes: &[NodeId], values: &mut [f32]) {
        let bytes: &[u8] = match &self.held {
            RowMemory::Memory(buffer) => buffer,
            RowMemory::Mapped(map) => map,
        };
        let row_bytes = self.format.row_bytes();
        let lines = row_bytes.div_ceil(LINE_BYTES).min(PREFETCH_LINES);
        for (at, (node, row)) in nodes.iter().zip(values.chunks_exact_mut(self.format.dim())).enumerate() {
            if let Some(soon) = nodes.get(at + PREFETCH_ROWS) {
                let start = soon.index() * row_bytes;
                (0..lines).for_each(|line| prefetch(bytes, start + line * LINE_BYTES));
            }
            let start = node.index() * row_bytes;
            self.format.convert(&bytes[start..start + row_bytes], row);
        }
    }
}

/// Reads an array into bytes, with elements of type `T`.
fn fill<T: bytemuck::Pod>(array: &ArrayFile, into: &mut [u8]) -> Result<()> {
    let mut elements = array.elements(0)?;
    for chunk in bytemuck::cast_slice_mut::<u8, T>(into).chunks_mut(LOAD_ELEMENTS) {
        elements.fill(chunk)?;
    }
    Ok(())
}
