//! One array in one file: a header page, the rows, and a table of block checksums. `docs/format.md` draws it.
//!
//! The payload starts on a page and is padded to a page, so a direct read may always take whole pages; nothing
//! assumes that a row divides one.

use crate::{Result, StoreError};
use esker_io::{SequentialReader, SequentialWriter};
use esker_types::Dtype;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub(crate) const PAGE_BYTES: u64 = 4096;
pub(crate) const BLOCK_BYTES: u64 = 64 << 10;
const MAGIC: &[u8; 8] = b"ESKARRAY";
const HEADER_VERSION: u32 = 1;

/// An array file, as the manifest lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// File name without `.bin`.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Rows.
    pub rows: u64,
    /// Elements in a row.
    pub columns: u64,
    /// Length of the file.
    pub bytes: u64,
    /// xxh3-64 of the checksum table, in hex.
    pub sums: String,
}

impl FileEntry {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.columns.saturating_mul(self.dtype.bytes())
    }

    /// The file in `directory`.
    pub fn path(&self, directory: &Path) -> PathBuf {
        array_path(directory, &self.name)
    }

    /// Sizes that follow from rows and columns; `None` when they do not fit 64 bits.
    pub(crate) fn layout(&self) -> Option<Layout> {
        Layout::of(self.rows.checked_mul(self.columns)?.checked_mul(self.dtype.bytes())?)
    }
}

fn array_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.bin"))
}

/// Where things are in an array file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub payload_bytes: u64,
    pub padded_bytes: u64,
    pub blocks: u64,
    pub table_offset: u64,
    pub file_bytes: u64,
}

impl Layout {
    fn of(payload_bytes: u64) -> Option<Layout> {
        let padded_bytes = payload_bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let blocks = padded_bytes.div_ceil(BLOCK_BYTES);
        let table_offset = PAGE_BYTES.checked_add(padded_bytes)?;
        let file_bytes = table_offset.checked_add(blocks * 8)?;
        Some(Layout { payload_bytes, padded_bytes, blocks, table_offset, file_bytes })
    }
}

/// The header page.
pub(crate) fn header_page(entry: &FileEntry, layout: &Layout) -> [u8; PAGE_BYTES as usize] {
    let mut page = [0u8; PAGE_BYTES as usize];
    page[..8].copy_from_slice(MAGIC);
    page[8..12].copy_from_slice(&HEADER_VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&entry.dtype.code().to_le_bytes());
    let words = [entry.rows, entry.columns, layout.payload_bytes, BLOCK_BYTES, layout.table_offset];
    for (slot, word) in page[16..56].chunks_exact_mut(8).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    let sum = xxh3_64(&page[..4088]);
    page[4088..].copy_from_slice(&sum.to_le_bytes());
    page
}

/// Writes an array row by row. The file gets its header last, so a file without one is unfinished.
pub struct ArrayWriter {
    directory: PathBuf,
    name: String,
    path: PathBuf,
    dtype: Dtype,
    columns: u64,
    file: SequentialWriter,
    /// Block checksums, spooled beside the array and appended at the end: their memory does not grow.
    sums: SequentialWriter,
    sums_path: PathBuf,
    block: Vec<u8>,
}

impl ArrayWriter {
    /// Starts `name` in `directory`, replacing an unfinished one.
    pub fn create(directory: &Path, name: &str, dtype: Dtype, columns: u64) -> Result<ArrayWriter> {
        ArrayWriter::resume(directory, name, dtype, columns, 0)
    }

    /// Goes on behind the first `rows` rows, which an earlier [`ArrayWriter::checkpoint`] made safe.
    pub fn resume(
        directory: &Path,
        name: &str,
        dtype: Dtype,
        columns: u64,
        rows: u64,
    ) -> Result<ArrayWriter> {
        let path = array_path(directory, name);
        let sums_path = directory.join(format!("{name}.sums"));
        let payload_bytes = rows * columns * dtype.bytes();
        let whole_blocks = payload_bytes / BLOCK_BYTES;
        let mut block = Vec::with_capacity(BLOCK_BYTES as usize);
        let open = |path: &Path, keep| SequentialWriter::resume(path, keep).map_err(StoreError::io(path));
        let mut file;
        if rows == 0 {
            file = open(&path, 0)?;
            file.write_all(&[0; PAGE_BYTES as usize]).map_err(StoreError::io(&path))?;
        } else {
            // The last, incomplete block is read again: its checksum is still open.
            let tail = payload_bytes % BLOCK_BYTES;
            let found = fs::metadata(&path).map_err(StoreError::io(&path))?.len();
            if found < PAGE_BYTES + payload_bytes {
                let expected_bytes = PAGE_BYTES + payload_bytes;
                return Err(StoreError::WrongLength { path, expected_bytes, found_bytes: found });
            }
            let reader = File::open(&path).map_err(StoreError::io(&path))?;
            block.resize(tail as usize, 0);
            reader
                .read_exact_at(&mut block, PAGE_BYTES + payload_bytes - tail)
                .map_err(StoreError::io(&path))?;
            file = open(&path, PAGE_BYTES + payload_bytes - tail)?;
        }
        let sums = open(&sums_path, whole_blocks * 8)?;
        let (directory, name) = (directory.to_path_buf(), name.to_string());
        Ok(ArrayWriter { directory, name, path, dtype, columns, file, sums, sums_path, block })
    }

    /// Appends bytes: whole elements in this machine's little-endian order.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        // Whole blocks go straight through; only what straddles a block's edge is copied.
        if self.block.is_empty() {
            let (whole, rest) = bytes.split_at(bytes.len() / BLOCK_BYTES as usize * BLOCK_BYTES as usize);
            for block in whole.chunks_exact(BLOCK_BYTES as usize) {
                let sum = xxh3_64(block).to_le_bytes();
                self.sums.write_all(&sum).map_err(StoreError::io(&self.sums_path))?;
            }
            self.file.write_all(whole).map_err(StoreError::io(&self.path))?;
            bytes = rest;
        }
        while !bytes.is_empty() {
            let room = BLOCK_BYTES as usize - self.block.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() == BLOCK_BYTES as usize {
                self.close_block()?;
            }
        }
        Ok(())
    }

    /// Appends elements.
    pub fn write_elements<T: bytemuck::NoUninit>(&mut self, elements: &[T]) -> Result<()> {
        assert_eq!(size_of::<T>() as u64, self.dtype.bytes(), "{}: element size", self.name);
        self.write(bytemuck::cast_slice(elements))
    }

    fn close_block(&mut self) -> Result<()> {
        let sum = xxh3_64(&self.block);
        self.file.write_all(&self.block).map_err(StoreError::io(&self.path))?;
        self.sums.write_all(&sum.to_le_bytes()).map_err(StoreError::io(&self.sums_path))?;
        self.block.clear();
        Ok(())
    }

    /// Bytes of rows written so far.
    pub fn payload_bytes(&self) -> u64 {
        self.file.position() - PAGE_BYTES + self.block.len() as u64
    }

    /// Makes everything written so far safe. The rows written may be given to [`ArrayWriter::resume`] later.
    pub fn checkpoint(&mut self) -> Result<()> {
        // The incomplete block goes out too; a resumed writer reads it back.
        let position = self.file.position();
        self.file.sync().map_err(StoreError::io(&self.path))?;
        self.sums.sync().map_err(StoreError::io(&self.sums_path))?;
        if !self.block.is_empty() {
            let file = File::options().write(true).open(&self.path).map_err(StoreError::io(&self.path))?;
            let written = file.write_all_at(&self.block, position).and_then(|()| file.sync_all());
            written.map_err(StoreError::io(&self.path))?;
        }
        Ok(())
    }

    /// Pads, appends the checksum table, writes the header, syncs. A payload that is not whole rows is a bug.
    pub fn finish(mut self) -> Result<FileEntry> {
        let payload_bytes = self.payload_bytes();
        let row_bytes = self.columns * self.dtype.bytes();
        assert!(row_bytes == 0 || payload_bytes.is_multiple_of(row_bytes), "{}: broken row", self.name);
        let rows = payload_bytes.checked_div(row_bytes).unwrap_or(0);
        let layout = Layout::of(payload_bytes).expect("what was written fits 64 bits");
        self.write(&[0; PAGE_BYTES as usize][..(layout.padded_bytes - payload_bytes) as usize])?;
        if !self.block.is_empty() {
            self.close_block()?;
        }
        self.sums.sync().map_err(StoreError::io(&self.sums_path))?;
        let mut table =
            SequentialReader::open(&self.sums_path, 0).map_err(StoreError::io(&self.sums_path))?;
        let mut hash = Xxh3::new();
        let mut piece = vec![0u8; BLOCK_BYTES as usize];
        loop {
            let count = table.read(&mut piece).map_err(StoreError::io(&self.sums_path))?;
            if count == 0 {
                break;
            }
            hash.update(&piece[..count]);
            self.file.write_all(&piece[..count]).map_err(StoreError::io(&self.path))?;
        }
        let bytes = self.file.finish().map_err(StoreError::io(&self.path))?;
        assert_eq!(bytes, layout.file_bytes, "{}: layout", self.name);
        let entry = FileEntry {
            name: self.name,
            dtype: self.dtype,
            rows,
            columns: self.columns,
            bytes,
            sums: format!("{:016x}", hash.digest()),
        };
        let file = File::options().write(true).open(&self.path).map_err(StoreError::io(&self.path))?;
        let written = file.write_all_at(&header_page(&entry, &layout), 0).and_then(|()| file.sync_all());
        written.map_err(StoreError::io(&self.path))?;
        fs::remove_file(&self.sums_path).map_err(StoreError::io(&self.sums_path))?;
        crate::journal::sync_directory(&self.directory)?;
        Ok(entry)
    }
}

/// An array that opened: length and header agree with its entry.
#[derive(Debug, Clone)]
pub struct ArrayFile {
    path: PathBuf,
    entry: FileEntry,
}

impl ArrayFile {
    /// Checks length and header.
    pub fn open(directory: &Path, entry: &FileEntry) -> Result<ArrayFile> {
        let path = entry.path(directory);
        let Some(layout) = entry.layout().filter(|layout| layout.file_bytes == entry.bytes) else {
            let expected =
                format!("a length that fits {} rows of {} x {}", entry.rows, entry.columns, entry.dtype);
            return Err(StoreError::inconsistent(
                &path,
                expected,
                format!("{} bytes in the manifest", entry.bytes),
            ));
        };
        let mut file = File::open(&path).map_err(StoreError::io(&path))?;
        let found_bytes = file.metadata().map_err(StoreError::io(&path))?.len();
        if found_bytes != entry.bytes {
            return Err(StoreError::WrongLength { path, expected_bytes: entry.bytes, found_bytes });
        }
        let mut page = [0u8; PAGE_BYTES as usize];
        file.read_exact(&mut page).map_err(StoreError::io(&path))?;
        if page != header_page(entry, &layout) {
            return Err(StoreError::inconsistent(
                &path,
                "the header that the manifest describes",
                "another one",
            ));
        }
        Ok(ArrayFile { path, entry: entry.clone() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its entry in the manifest.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// A stream of elements from element `first` on.
    pub fn elements(&self, first: u64) -> Result<Elements> {
        let offset = PAGE_BYTES + first * self.entry.dtype.bytes();
        let reader = SequentialReader::open(&self.path, offset).map_err(StoreError::io(&self.path))?;
        let left = (self.entry.rows * self.entry.columns).saturating_sub(first);
        Ok(Elements { reader, path: self.path.clone(), dtype: self.entry.dtype, left })
    }

    /// Reads elements at a position: for a few; the reading engine is for many.
    pub fn read_at<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &self,
        first: u64,
        out: &mut [T],
    ) -> Result<()> {
        assert_eq!(size_of::<T>() as u64, self.entry.dtype.bytes(), "{}: element size", self.entry.name);
        assert!(
            first + out.len() as u64 <= self.entry.rows * self.entry.columns,
            "{}: range",
            self.entry.name
        );
        let mut file = File::open(&self.path).map_err(StoreError::io(&self.path))?;
        let offset = PAGE_BYTES + first * self.entry.dtype.bytes();
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.read_exact(bytemuck::cast_slice_mut(out)))
            .map_err(StoreError::io(&self.path))
    }
}

/// A stream of an array's elements.
pub struct Elements {
    reader: SequentialReader,
    path: PathBuf,
    dtype: Dtype,
    left: u64,
}

impl Elements {
    /// Elements not read yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Fills `out` as far as there are elements; returns how many.
    pub fn fill<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&mut self, out: &mut [T]) -> Result<usize> {
        assert_eq!(size_of::<T>() as u64, self.dtype.bytes(), "element size");
        let count = self.left.min(out.len() as u64) as usize;
        self.reader
            .read_exact(bytemuck::cast_slice_mut(&mut out[..count]))
            .map_err(StoreError::io(&self.path))?;
        self.left -= count as u64;
        Ok(count)
    }

    /// Fills `out` with ids of either width, widened; returns how many.
    pub fn fill_ids(&mut self, out: &mut [u64]) -> Result<usize> {
        if self.dtype == Dtype::U64 {
            return self.fill(out);
        }
        let mut narrow = vec![0u32; out.len()];
        let count = self.fill(&mut narrow)?;
        out.iter_mut().zip(&narrow).for_each(|(wide, narrow)| *wide = *narrow as u64);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows_of(directory: &Path, entry: &FileEntry) -> Vec<u8> {
        let array = ArrayFile::open(directory, entry).unwrap();
        let mut out = vec![0u8; (entry.rows * entry.columns) as usize];
        assert_eq!(array.elements(0).unwrap().fill(&mut out).unwrap(), out.len());
        out
    }

    #[test]
    fn rows_of_any_width_come_back() {
        for columns in [1, 3, 100, 512, 1433, 4096, 70_000] {
            let directory = tempfile::tempdir().unwrap();
            let bytes: Vec<u8> = (0..columns * 7).map(|i| (i % 251) as u8).collect();
            let mut writer = ArrayWriter::create(directory.path(), "a", Dtype::U8, columns).unwrap();
            bytes.chunks(1000).for_each(|piece| writer.write(piece).unwrap());
            let entry = writer.finish().unwrap();
            assert_eq!(entry.rows, 7);
            assert!(rows_of(directory.path(), &entry) == bytes);
        }
    }

    #[test]
    fn a_resumed_array_equals_one_written_at_once() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i / 7 % 251) as u8).collect();
        let whole = tempfile::tempdir().unwrap();
        let mut writer = ArrayWriter::create(whole.path(), "a", Dtype::U8, 100).unwrap();
        writer.write(&bytes).unwrap();
        let expected = writer.finish().unwrap();
        for rows in [1, 655, 656, 1310, 2999] {
            let directory = tempfile::tempdir().unwrap();
            let mut writer = ArrayWriter::create(directory.path(), "a", Dtype::U8, 100).unwrap();
            writer.write(&bytes[..rows * 100]).unwrap();
            writer.checkpoint().unwrap();
            // What comes after the checkpoint is lost with the process.
            writer.write(&bytes[rows * 100..][..100.min(bytes.len() - rows * 100)]).unwrap();
            drop(writer);
            let mut writer = ArrayWriter::resume(directory.path(), "a", Dtype::U8, 100, rows as u64).unwrap();
            writer.write(&bytes[rows * 100..]).unwrap();
            assert_eq!(writer.finish().unwrap(), expected);
            assert!(rows_of(directory.path(), &expected) == bytes);
        }
    }

    #[test]
    fn an_empty_array_is_an_array() {
        let directory = tempfile::tempdir().unwrap();
        let entry = ArrayWriter::create(directory.path(), "a", Dtype::U32, 1).unwrap().finish().unwrap();
        assert_eq!((entry.rows, entry.bytes), (0, PAGE_BYTES));
        assert!(ArrayFile::open(directory.path(), &entry).is_ok());
    }

    #[test]
    fn an_unfinished_array_does_not_open() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = ArrayWriter::create(directory.path(), "a", Dtype::U8, 1).unwrap();
        writer.write(b"abc").unwrap();
        writer.checkpoint().unwrap();
        let entry = FileEntry {
            name: "a".into(),
            dtype: Dtype::U8,
            rows: 3,
            columns: 1,
            bytes: 4099,
            sums: "".into(),
        };
        assert!(ArrayFile::open(directory.path(), &entry).is_err());
    }
}
