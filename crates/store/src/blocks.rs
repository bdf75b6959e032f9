//! An array whose blocks are written in any order, each once, through the I/O engine. It has the same checksums as any
//! array. Its space is reserved at the start, so a full disk shows before the work.

use crate::array::{BLOCK_BYTES, PAGE_BYTES, Sections, file_name, header_page};
use crate::shared_disk::SharedDisk;
use crate::{FileEntry, Result, StoreError, files};
use esker_io::{Access, Files, Layout, Options};
use esker_types::Dtype;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// An array of bytes that is being written block by block.
pub struct BlockArray {
    directory: PathBuf,
    name: String,
    path: PathBuf,
    blocks: u64,
}

impl BlockArray {
    /// Bytes of a block.
    pub const BLOCK_BYTES: u64 = BLOCK_BYTES;

    /// Starts `name` in `directory` with space for this many blocks, replacing an unfinished one.
    pub fn create(directory: &Path, name: &str, blocks: u64) -> Result<BlockArray> {
        let array = BlockArray::reopen(directory, name, blocks);
        files::remove(&array.path)?;
        let bytes = PAGE_BYTES + blocks * BLOCK_BYTES;
        SharedDisk::this_machine().create(&Layout::file(&array.path), bytes)?;
        Ok(array)
    }

    /// Reopens an array that an earlier process started.
    pub fn reopen(directory: &Path, name: &str, blocks: u64) -> BlockArray {
        let path = directory.join(file_name(name));
        BlockArray { directory: directory.to_path_buf(), name: name.to_string(), path, blocks }
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file for writing: block `b` starts at [`BlockArray::offset`].
    pub fn files(&self, options: &Options) -> Result<Files> {
        files::refuse_links(&self.path)?;
        Ok(SharedDisk::this_machine().open(&[Layout::file(&self.path)], Access::Write, options)?)
    }

    /// Offset of a block in the file.
    pub fn offset(block: u64) -> u64 {
        PAGE_BYTES + block * BLOCK_BYTES
    }

    /// The checksum of a block.
    pub fn sum(block: &[u8]) -> u64 {
        xxh3_64(block)
    }

    /// Appends the checksums of all blocks, writes the header, syncs.
    pub fn finish(self, sums: &[u64]) -> Result<FileEntry> {
        assert_eq!(sums.len() as u64, self.blocks, "{}: a checksum a block", self.name);
        let rows = self.blocks * BLOCK_BYTES;
        let sections = Sections::of(rows).expect("what was written fits 64 bits");
        let table: &[u8] = bytemuck::cast_slice(sums);
        let entry = FileEntry {
            name: self.name,
            dtype: Dtype::U8,
            rows,
            columns: 1,
            bytes: sections.file_bytes,
            sums: format!("{:016x}", xxh3_64(table)),
            stripes: None,
        };
        let file = File::options().write(true).open(&self.path).map_err(StoreError::io(&self.path))?;
        let written = file
            .set_len(sections.table_offset)
            .and_then(|()| file.write_all_at(table, sections.table_offset))
            .and_then(|()| file.write_all_at(&header_page(&entry, &sections), 0))
            .and_then(|()| (&file).flush())
            .and_then(|()| file.sync_all());
        written.map_err(StoreError::io(&self.path))?;
        files::sync_directory(&self.directory)?;
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArrayFile, ArrayWriter};
    use esker_io::Piece;

    #[test]
    fn blocks_in_any_order_make_the_array_that_bytes_in_order_make() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let block = BlockArray::BLOCK_BYTES as usize;
        let bytes: Vec<u8> = (0..5 * block).map(|at| (at / 7 % 251) as u8).collect();
        let mut writer = ArrayWriter::create(one.path(), "a", Dtype::U8, 1).unwrap();
        writer.write(&bytes).unwrap();
        let expected = writer.finish().unwrap();
        let array = BlockArray::create(other.path(), "a", 5).unwrap();
        let mut queue = array.files(&Options::default()).unwrap().queue().unwrap();
        let mut sums = [0; 5];
        for number in [3, 0, 4, 2, 1] {
            let piece = Piece { offset: BlockArray::offset(number as u64), bytes: block as u64, at: 0 };
            let content = &bytes[number * block..][..block];
            queue.write(0, &[piece], content).unwrap();
            sums[number] = BlockArray::sum(content);
        }
        queue.sync().unwrap();
        let found = array.finish(&sums).unwrap();
        assert_eq!(found, expected);
        let files = [one.path(), other.path()].map(|folder| std::fs::read(folder.join("a.bin")).unwrap());
        assert!(files[0] == files[1]);
        let opened = ArrayFile::open(other.path(), &found).unwrap();
        assert_eq!(opened.block_sums().unwrap(), sums);
    }
}
