//! Parts of the file of rows. Each has an array of the rows that are stored there, which packing follows. Caches are
//! cut into parts that fit in memory, because their rows are reordered in the end.

use super::blocks_for;
use super::log::id_dtype;
use super::plain::Plain;
use crate::{Result, StoredRow};
use esker_plan::Hottest;
use esker_store::{ArrayWriter, BlockArray, StoreError};
use esker_types::{Dtype, NodeId};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of rows that are ordered in memory at a time.
const PART_BYTES: u64 = 32 << 20;
/// Memory for buffered entries, of all parts together, while rows for memory are distributed to parts.
const WAITING_BYTES: u64 = 4 << 20;
/// Entries read back at a time.
const ENTRIES_AT_A_TIME: u64 = 1 << 16;

/// A part of the file of rows: the rows stored there, ascending at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Output {
    /// Its first block.
    pub block: u64,
    pub rows: u64,
    /// Start of its rows in the array of rows.
    pub wants_at: u64,
    /// Start of the positions that they are moved to in the end. `u64::MAX` if they are not moved.
    pub targets_at: u64,
}

impl Output {
    pub const COLUMNS: u64 = size_of::<Output>() as u64 / 8;

    pub fn is_moved(&self) -> bool {
        self.targets_at != u64::MAX
    }

    /// All parts that were laid out.
    pub fn all(work: &Path, count: u64) -> Result<Vec<Output>> {
        let mut outputs = Vec::new();
        Plain::<Output>::array(work, OUTPUTS)?.read(0, count as usize, &mut outputs)?;
        Ok(outputs)
    }
}

/// What was laid out: how many parts, and the blocks of all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct OutputSizes {
    pub outputs: u64,
    pub blocks: u64,
}

pub(crate) const WANTS: &str = "wants";
pub(crate) const TARGETS: &str = "targets";
const OUTPUTS: &str = "outputs";

/// Rows per part: as many whole blocks as make about [`PART_BYTES`], so that parts follow each other without a gap.
pub(crate) fn part_rows(row_bytes: u64) -> u64 {
    whole_rows(row_bytes, PART_BYTES)
}

/// Rows that fill whole blocks: about `bytes` bytes, or as few as do.
pub(crate) fn whole_rows(row_bytes: u64, bytes: u64) -> u64 {
    let block = BlockArray::BLOCK_BYTES;
    let (mut a, mut b) = (row_bytes.max(1), block);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    let unit = block / a;
    unit * (bytes / (unit * row_bytes.max(1))).max(1)
}

/// Entries buffered in memory per part, for this many parts.
fn waiting(parts: u64) -> u64 {
    (WAITING_BYTES / 16 / parts.max(1)).clamp(16, 4096)
}

/// Largest memory of adding caches, for a graph of `nodes` nodes, in bytes.
pub(crate) fn memory_bytes(nodes: u64, row_bytes: u64) -> u64 {
    let part = part_rows(row_bytes);
    let parts = nodes.div_ceil(part);
    let hottest = parts * (waiting(parts) * 16 + 8 + size_of::<Vec<[u64; 2]>>() as u64);
    let reading = ENTRIES_AT_A_TIME * (16 + 8 + 4);
    // A part of a segment's cache while it is ordered: rows and positions, and both as they are written.
    let ordering = part.min(nodes) * (16 + 8 + 4);
    (hottest + reading).max(ordering)
}

/// Writes the arrays of parts.
pub(crate) struct OutputRows<W> {
    wants: ArrayWriter,
    targets: ArrayWriter,
    outputs: ArrayWriter,
    accessed: u64,
    targeted: u64,
    count: u64,
    /// The next free block.
    block: u64,
    row_bytes: u64,
    rows: std::marker::PhantomData<W>,
}

impl<W: StoredRow> OutputRows<W> {
    pub fn create(work: &Path, row_bytes: u64) -> Result<OutputRows<W>> {
        Ok(OutputRows {
            wants: ArrayWriter::create(work, WANTS, id_dtype::<W>(), 1)?,
            targets: ArrayWriter::create(work, TARGETS, Dtype::U32, 1)?,
            outputs: ArrayWriter::create(work, OUTPUTS, Dtype::U64, Output::COLUMNS)?,
            accessed: 0,
            targeted: 0,
            count: 0,
            block: 0,
            row_bytes,
            rows: std::marker::PhantomData,
        })
    }

    /// Starts a part of this many rows, which are written next. Returns its first block.
    fn begin(&mut self, rows: u64, is_moved: bool) -> Result<u64> {
        let block = self.block;
        let targets_at = if is_moved { self.targeted } else { u64::MAX };
        let output = Output { block, rows, wants_at: self.accessed, targets_at };
        self.outputs.write(bytemuck::bytes_of(&output))?;
        self.accessed += rows;
        self.targeted += if is_moved { rows } else { 0 };
        self.count += 1;
        self.block += blocks_for(rows, self.row_bytes);
        Ok(block)
    }

    /// Adds a batch's own rows, ascending. Returns their first block.
    pub fn add(&mut self, rows: &[W]) -> Result<u64> {
        let block = self.begin(rows.len() as u64, false)?;
        self.wants.write_elements(rows)?;
        Ok(block)
    }

    /// Adds a segment's cache part by part. `rows` are in their final order. Returns its first block.
    pub fn add_cache(&mut self, rows: &[u32]) -> Result<u64> {
        let block = self.block;
        for part in rows.chunks(part_rows(self.row_bytes) as usize) {
            let mut order: Vec<(u32, u32)> = part.iter().copied().zip(0..).collect();
            order.sort_unstable();
            self.begin(part.len() as u64, true)?;
            let rows: Vec<W> = order.iter().map(|(row, _)| W::of(NodeId(*row as u64))).collect();
            let targets: Vec<u32> = order.iter().map(|(_, position)| *position).collect();
            self.wants.write_elements(&rows)?;
            self.targets.write_elements(&targets)?;
        }
        Ok(block)
    }

    /// Adds the cache for memory. Rows come in ascending order and go to the part of their slot. The size of every part
    /// is known, so each has its own range of a file from the start.
    pub fn add_hottest(&mut self, hottest: &Hottest, work: &Path) -> Result<()> {
        let path = work.join("ranked");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(StoreError::io(&path))?;
        let (slots, rows_of_part) = (hottest.cached(), part_rows(self.row_bytes));
        deal_out(hottest, rows_of_part, &file).map_err(StoreError::io(&path))?;
        let (mut entries, mut rows, mut targets) = (Vec::new(), Vec::<W>::new(), Vec::<u32>::new());
        for first in (0..slots).step_by(rows_of_part as usize) {
            let end = (first + rows_of_part).min(slots);
            self.begin(end - first, true)?;
            for start in (first..end).step_by(ENTRIES_AT_A_TIME as usize) {
                entries.resize(ENTRIES_AT_A_TIME.min(end - start) as usize, [0u64; 2]);
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut entries);
                file.read_exact_at(bytes, start * 16).map_err(StoreError::io(&path))?;
                rows.clear();
                rows.extend(entries.iter().map(|[row, _]| W::of(NodeId(*row))));
                targets.clear();
                targets.extend(entries.iter().map(|[_, position]| *position as u32));
                self.wants.write_elements(&rows)?;
                self.targets.write_elements(&targets)?;
            }
        }
        std::fs::remove_file(&path).map_err(StoreError::io(&path))?;
        Ok(())
    }

    /// Closes the arrays. Returns the number of parts and the blocks of all of them.
    pub fn finish(self) -> Result<(u64, u64)> {
        self.wants.finish()?;
        self.targets.finish()?;
        self.outputs.finish()?;
        Ok((self.count, self.block))
    }
}

/// Writes, for every row with a slot, the row and its position in its part, part by part.
fn deal_out(hottest: &Hottest, rows_of_part: u64, file: &File) -> std::io::Result<()> {
    let parts = hottest.cached().div_ceil(rows_of_part);
    let most = waiting(parts) as usize;
    let mut waiting: Vec<Vec<[u64; 2]>> = (0..parts).map(|_| Vec::with_capacity(most)).collect();
    let mut written = vec![0u64; parts as usize];
    let mut flush = |part: usize, entries: &mut Vec<[u64; 2]>| {
        let at = (part as u64 * rows_of_part + written[part]) * 16;
        file.write_all_at(bytemuck::cast_slice(entries), at)?;
        written[part] += entries.len() as u64;
        entries.clear();
        Ok(())
    };
    for (row, slot) in hottest.slots().iter().enumerate().filter(|(_, slot)| **slot != u32::MAX) {
        let part = (*slot as u64 / rows_of_part) as usize;
        waiting[part].push([row as u64, *slot as u64 % rows_of_part]);
        if waiting[part].len() == most {
            flush(part, &mut waiting[part])?;
        }
    }
    waiting.iter_mut().enumerate().try_for_each(|(part, entries)| flush(part, entries))
}
