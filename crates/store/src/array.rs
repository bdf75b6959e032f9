//! One array: a header page, the rows, and a table of block checksums, in one file or in stripes over several. See
//! `docs/format.md` for a drawing.
//!
//! The payload starts on a page and is padded to a page, so direct reads can always read whole pages. A page is not
//! assumed to be a multiple of the row length.

use crate::shared_disk::SharedDisk;
use crate::stripes::Stripes;
use crate::{Result, StoreError, files};
use esker_io::{
    Access, Disk, Files, IoBackendKind, IoError, Layout, Map, Options, Piece, SequentialReader,
    SequentialWriter, Stream, Touch,
};
use esker_types::Dtype;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub(crate) const PAGE_BYTES: u64 = 4096;
/// Offset of the first element in an array file, after the header.
pub const PAYLOAD_OFFSET: u64 = PAGE_BYTES;
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
    /// Elements per row.
    pub columns: u64,
    /// Length of the file, or of all its parts together.
    pub bytes: u64,
    /// xxh3-64 of the checksum table, in hex.
    pub sums: String,
    /// Its stripes over several directories; `None`: it is one file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripes: Option<Stripes>,
}

impl FileEntry {
    /// Bytes per row.
    pub fn row_bytes(&self) -> u64 {
        self.columns.saturating_mul(self.dtype.bytes())
    }

    /// Where its bytes are stored if it belongs to the dataset (or derived data) in `directory`.
    pub fn layout(&self, directory: &Path) -> Layout {
        self.layout_as(directory, &file_name(&self.name))
    }

    /// The same under another file name.
    pub(crate) fn layout_as(&self, directory: &Path, file_name: &str) -> Layout {
        match &self.stripes {
            Some(stripes) => stripes.layout(directory, file_name),
            None => Layout::file(&directory.join(file_name)),
        }
    }

    /// Offsets of its sections, from its rows and columns. The error is (expected, found) if its length does not
    /// match.
    pub(crate) fn sections(&self) -> Result<Sections, (String, String)> {
        let payload = self.rows.checked_mul(self.columns).and_then(|n| n.checked_mul(self.dtype.bytes()));
        let sections = payload.and_then(Sections::of).filter(|found| found.file_bytes == self.bytes);
        sections.ok_or_else(|| {
            let expected =
                format!("a length that fits {} rows of {} x {}", self.rows, self.columns, self.dtype);
            (expected, format!("{} bytes in the manifest", self.bytes))
        })
    }
}

/// The file of array `name`, or of one of its parts.
pub(crate) fn file_name(name: &str) -> String {
    format!("{name}.bin")
}

/// Offsets of the sections of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sections {
    pub payload_bytes: u64,
    pub padded_bytes: u64,
    pub blocks: u64,
    pub table_offset: u64,
    pub file_bytes: u64,
}

impl Sections {
    pub(crate) fn of(payload_bytes: u64) -> Option<Sections> {
        let padded_bytes = payload_bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let blocks = padded_bytes.div_ceil(BLOCK_BYTES);
        let table_offset = PAGE_BYTES.checked_add(padded_bytes)?;
        let file_bytes = table_offset.checked_add(blocks * 8)?;
        Some(Sections { payload_bytes, padded_bytes, blocks, table_offset, file_bytes })
    }
}

/// The header page.
pub(crate) fn header_page(entry: &FileEntry, sections: &Sections) -> [u8; PAGE_BYTES as usize] {
    let mut page = [0u8; PAGE_BYTES as usize];
    page[..8].copy_from_slice(MAGIC);
    page[8..12].copy_from_slice(&HEADER_VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&entry.dtype.code().to_le_bytes());
    let words = [entry.rows, entry.columns, sections.payload_bytes, BLOCK_BYTES, sections.table_offset];
    for (slot, word) in page[16..56].chunks_exact_mut(8).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    let sum = xxh3_64(&page[..4088]);
    page[4088..].copy_from_slice(&sum.to_le_bytes());
    page
}

/// Writes an array row by row. The header is written last, so a file without one is unfinished.
pub struct ArrayWriter {
    directory: PathBuf,
    name: String,
    path: PathBuf,
    dtype: Dtype,
    columns: u64,
    file: SequentialWriter,
    /// Block checksums, written to a temporary file and appended at the end, so that they take constant memory.
    sums: SequentialWriter,
    sums_path: PathBuf,
    block: Vec<u8>,
}

impl ArrayWriter {
    /// Starts `name` in `directory`, replacing an unfinished one.
    pub fn create(directory: &Path, name: &str, dtype: Dtype, columns: u64) -> Result<ArrayWriter> {
        ArrayWriter::resume(directory, name, dtype, columns, 0)
    }

    /// Resumes after the first `rows` rows, which an earlier [`ArrayWriter::checkpoint`] made durable.
    pub fn resume(
        directory: &Path,
        name: &str,
        dtype: Dtype,
        columns: u64,
        rows: u64,
    ) -> Result<ArrayWriter> {
        let path = directory.join(file_name(name));
        let sums_path = directory.join(format!("{name}.sums"));
        let payload_bytes = rows * columns * dtype.bytes();
        let whole_blocks = payload_bytes / BLOCK_BYTES;
        let mut block = Vec::with_capacity(BLOCK_BYTES as usize);
        let mut file;
        if rows == 0 {
            files::remove(&sums_path)?;
            file = files::create_sequential(&path)?;
            file.write_all(&[0; PAGE_BYTES as usize]).map_err(StoreError::io(&path))?;
        } else {
            // The last, incomplete block is read again, because its checksum is not complete yet.
            let tail = payload_bytes % BLOCK_BYTES;
            files::refuse_links(&path)?;
            files::refuse_links(&sums_path)?;
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
            // It also stays in the file: whoever is killed before it is written again can resume once more.
            let (kept, position) = (PAGE_BYTES + payload_bytes, PAGE_BYTES + payload_bytes - tail);
            file = SequentialWriter::resume_over(&path, kept, position).map_err(StoreError::io(&path))?;
            restore_sums(&path, &sums_path, whole_blocks)?;
        }
        let sums =
            SequentialWriter::resume(&sums_path, whole_blocks * 8).map_err(StoreError::io(&sums_path))?;
        let (directory, name) = (directory.to_path_buf(), name.to_string());
        Ok(ArrayWriter { directory, name, path, dtype, columns, file, sums, sums_path, block })
    }

    /// Appends bytes: whole elements in this machine's little-endian order.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        // Whole blocks are written directly; only bytes of incomplete blocks are copied.
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

    /// Makes everything written so far durable. [`ArrayWriter::resume`] may later be called with the rows written so
    /// far.
    pub fn checkpoint(&mut self) -> Result<()> {
        // The incomplete block is written too; a resumed writer reads it back.
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

    /// Pads, appends the checksum table, writes the header and syncs. Panics if the payload is not whole rows.
    pub fn finish(mut self) -> Result<FileEntry> {
        let payload_bytes = self.payload_bytes();
        let row_bytes = self.columns * self.dtype.bytes();
        assert!(row_bytes == 0 || payload_bytes.is_multiple_of(row_bytes), "{}: broken row", self.name);
        let rows = payload_bytes.checked_div(row_bytes).unwrap_or(0);
        let sections = Sections::of(payload_bytes).expect("what was written fits 64 bits");
        self.write(&[0; PAGE_BYTES as usize][..(sections.padded_bytes - payload_bytes) as usize])?;
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
        assert_eq!(bytes, sections.file_bytes, "{}: sections", self.name);
        let entry = FileEntry {
            name: self.name,
            dtype: self.dtype,
            rows,
            columns: self.columns,
            bytes,
            sums: format!("{:016x}", hash.digest()),
            stripes: None,
        };
        let file = File::options().write(true).open(&self.path).map_err(StoreError::io(&self.path))?;
        let written = file.write_all_at(&header_page(&entry, &sections), 0).and_then(|()| file.sync_all());
        written.map_err(StoreError::io(&self.path))?;
        files::remove(&self.sums_path)?;
        files::sync_directory(&self.directory)?;
        Ok(entry)
    }
}

/// Computes the checksums of the first blocks again where their file lacks them: [`ArrayWriter::finish`] removes it, and
/// whoever finished may have been killed before saying so.
fn restore_sums(path: &Path, sums_path: &Path, blocks: u64) -> Result<()> {
    if fs::metadata(sums_path).map_or(0, |found| found.len()) >= blocks * 8 {
        return Ok(());
    }
    let mut payload = SequentialReader::open(path, PAGE_BYTES).map_err(StoreError::io(path))?;
    let mut sums = SequentialWriter::create(sums_path).map_err(StoreError::io(sums_path))?;
    let mut block = vec![0u8; BLOCK_BYTES as usize];
    for _ in 0..blocks {
        payload.read_exact(&mut block).map_err(StoreError::io(path))?;
        sums.write_all(&xxh3_64(&block).to_le_bytes()).map_err(StoreError::io(sums_path))?;
    }
    sums.finish().map_err(StoreError::io(sums_path))?;
    Ok(())
}

/// An open array: its lengths and header match its entry.
#[derive(Debug, Clone)]
pub struct ArrayFile {
    layout: Layout,
    entry: FileEntry,
    disk: SharedDisk,
}

impl ArrayFile {
    /// Checks lengths and header.
    pub fn open(directory: &Path, entry: &FileEntry) -> Result<ArrayFile> {
        ArrayFile::open_on(&SharedDisk::this_machine(), directory, entry)
    }

    /// The same for an array on a given disk.
    pub(crate) fn open_on(disk: &SharedDisk, directory: &Path, entry: &FileEntry) -> Result<ArrayFile> {
        let layout = entry.layout(directory);
        let path = &layout.parts()[0];
        let sections =
            entry.sections().map_err(|(expected, found)| StoreError::inconsistent(path, expected, found))?;
        if let Some(stripes) = &entry.stripes {
            stripes.check_directories(directory)?;
        }
        (0..layout.parts().len()).try_for_each(|number| check_part(&**disk, &layout, number, entry.bytes))?;
        let array = ArrayFile { layout, entry: entry.clone(), disk: disk.clone() };
        let mut page = [0u8; PAGE_BYTES as usize];
        array.read_bytes(0, &mut page)?;
        if page != header_page(entry, &sections) {
            return Err(StoreError::inconsistent(
                array.path(),
                "the header that the manifest describes",
                "another one",
            ));
        }
        Ok(array)
    }

    /// Where its bytes are stored.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The file, or the first of its parts, for messages about the whole array.
    pub fn path(&self) -> &Path {
        &self.layout.parts()[0]
    }

    /// Its entry in the manifest.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// A stream of elements, starting at element `first`. Takes about a MiB of memory.
    pub fn elements(&self, first: u64) -> Result<Elements> {
        let width = self.entry.dtype.bytes();
        let left = (self.entry.rows * self.entry.columns).saturating_sub(first);
        let start = PAGE_BYTES + first * width;
        let end = start + left * width;
        let pages = end.next_multiple_of(PAGE_BYTES) - start / PAGE_BYTES * PAGE_BYTES;
        let all_bytes = pages.max(PAGE_BYTES);
        let options = match all_bytes <= STREAM_CHUNK_BYTES {
            true => few_bytes(),
            false => Options {
                depth: STREAM_CHUNKS,
                max_bytes: STREAM_CHUNK_BYTES,
                staging_bytes: STREAM_CHUNK_BYTES,
                ..Options::default()
            },
        };
        let files = self.open_files(&options)?;
        let chunk_bytes = all_bytes.min(STREAM_CHUNK_BYTES);
        let stream = Stream::open(&files, 0, start..end, chunk_bytes, STREAM_CHUNKS)?;
        Ok(Elements { stream, path: self.path().to_path_buf(), dtype: self.entry.dtype, left })
    }

    /// Memory-maps its elements: they are read through the page cache on first access. Works for a single file only.
    pub fn map(&self, touch: Touch) -> Result<Map> {
        if self.layout.parts().len() > 1 {
            return Err(StoreError::InParts {
                path: self.path().to_path_buf(),
                parts: self.layout.parts().len(),
            });
        }
        let bytes = self.entry.rows * self.entry.row_bytes();
        Map::open(self.path(), PAGE_BYTES..PAGE_BYTES + bytes, touch).map_err(StoreError::io(self.path()))
    }

    /// Reads a few elements at a position. Use the I/O engine for many.
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
        self.read_bytes(PAGE_BYTES + first * self.entry.dtype.bytes(), bytemuck::cast_slice_mut(out))
    }

    fn read_bytes(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut queue = self.open_files(&few_bytes())?.queue()?;
        queue.read(0, &[Piece { offset, bytes: out.len() as u64, at: 0 }], out)?;
        Ok(())
    }

    /// The checksums of its blocks of 64 KiB, for callers that read whole blocks and verify them. The table itself is
    /// verified against the manifest.
    pub fn block_sums(&self) -> Result<Vec<u64>> {
        let sections = self
            .entry
            .sections()
            .map_err(|(expected, found)| StoreError::inconsistent(self.path(), expected, found))?;
        let mut sums = vec![0u64; sections.blocks as usize];
        self.read_bytes(sections.table_offset, bytemuck::cast_slice_mut(&mut sums))?;
        let found = format!("{:016x}", xxh3_64(bytemuck::cast_slice(&sums)));
        if found != self.entry.sums {
            let expected = format!("a table of checksums that gives {}", self.entry.sums);
            return Err(StoreError::inconsistent(self.path(), expected, found));
        }
        Ok(sums)
    }

    /// Reads a whole small array and verifies every block: for arrays that are used to find other data.
    pub fn read_whole<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self) -> Result<Vec<T>> {
        let bytes = self.entry.rows * self.entry.row_bytes();
        let mut content = vec![0u8; bytes.next_multiple_of(PAGE_BYTES) as usize];
        self.read_bytes(PAGE_BYTES, &mut content)?;
        let sums = self.block_sums()?;
        for (number, (block, sum)) in content.chunks(BLOCK_BYTES as usize).zip(sums).enumerate() {
            if xxh3_64(block) != sum {
                let expected = format!("block {number} as it was written");
                return Err(StoreError::inconsistent(self.path(), expected, "other bytes, by its checksum"));
            }
        }
        Ok(content[..bytes as usize].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }

    /// Opens it for queues: elements start at [`PAYLOAD_OFFSET`].
    pub fn open_files(&self, options: &Options) -> Result<Files> {
        Ok(self.disk.open(std::slice::from_ref(&self.layout), Access::Read, options)?)
    }
}

/// Checks that a part of an array of `bytes` bytes exists and has the right length.
pub(crate) fn check_part(disk: &dyn Disk, layout: &Layout, number: usize, bytes: u64) -> Result<()> {
    let path = &layout.parts()[number];
    // A pipe has the length of an empty part, and opening a pipe waits for its writer.
    if let Some(kind) = fs::metadata(path).ok().and_then(|found| files::not_a_file(&found)) {
        return Err(StoreError::inconsistent(path, "a file", kind));
    }
    let found_bytes = match disk.open(&[Layout::file(path)], Access::Read, &few_bytes()) {
        Err(IoError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(StoreError::Missing { path: path.clone() });
        }
        found => found?.bytes(0),
    };
    let expected_bytes = layout.part_bytes(number, bytes);
    if found_bytes != expected_bytes {
        return Err(StoreError::WrongLength { path: path.clone(), expected_bytes, found_bytes });
    }
    Ok(())
}

/// For a few bytes: one thread and the page cache, because a ring would cost more than it gains. Staging memory is
/// small because this backend does not need it, but it is zeroed anyway.
fn few_bytes() -> Options {
    Options {
        io_backend: Some(IoBackendKind::PoolBuffered),
        depth: 1,
        max_bytes: BLOCK_BYTES,
        staging_bytes: BLOCK_BYTES,
        ..Options::default()
    }
}

/// Several streams are open at once within an import's budget: a MiB each, including the staging memory.
const STREAM_CHUNK_BYTES: u64 = 256 << 10;
const STREAM_CHUNKS: usize = 3;

/// A stream of an array's elements.
pub struct Elements {
    stream: Stream,
    path: PathBuf,
    dtype: Dtype,
    left: u64,
}

impl Elements {
    /// Elements not read yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Fills `out` as far as there are elements; returns how many were read.
    pub fn fill<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&mut self, out: &mut [T]) -> Result<usize> {
        assert_eq!(size_of::<T>() as u64, self.dtype.bytes(), "element size");
        let count = self.left.min(out.len() as u64) as usize;
        self.stream
            .read_exact(bytemuck::cast_slice_mut(&mut out[..count]))
            .map_err(StoreError::engine(&self.path))?;
        self.left -= count as u64;
        Ok(count)
    }

    /// Fills `out` with ids of either width, widened; returns how many were read.
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
            // Rows written after the checkpoint are lost with the process.
            writer.write(&bytes[rows * 100..][..100.min(bytes.len() - rows * 100)]).unwrap();
            drop(writer);
            let resume = || ArrayWriter::resume(directory.path(), "a", Dtype::U8, 100, rows as u64).unwrap();
            // Killed again: before anything more is written, with some of it, and when all is finished but nobody knows.
            drop(resume());
            let mut again = resume();
            again.write(&bytes[rows * 100..][..30.min(bytes.len() - rows * 100)]).unwrap();
            drop(again);
            for _ in 0..2 {
                let mut writer = resume();
                writer.write(&bytes[rows * 100..]).unwrap();
                assert_eq!(writer.finish().unwrap(), expected);
                assert!(rows_of(directory.path(), &expected) == bytes);
            }
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
            stripes: None,
        };
        assert!(ArrayFile::open(directory.path(), &entry).is_err());
    }
}
