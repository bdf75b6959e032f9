//! Divides fixed-size records among groups within a memory budget: an external sort by a key that has few values.
//!
//! Each group has a buffer. A full buffer becomes a chunk at the end of one file, so writing is sequential. The chunks of
//! a group are read in the order in which they were written, so records of a group keep their order.

use crate::shared_disk::SharedDisk;
use crate::{Result, StoreError, files};
use esker_io::{Access, Layout, Options, Piece, Queue, SequentialWriter};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bounds of a group's buffer.
const LEAST_CHUNK_BYTES: u64 = 4 << 10;
const MOST_CHUNK_BYTES: u64 = 1 << 20;
/// Chunks are read together up to this many bytes.
const READ_BYTES: u64 = 4 << 20;

/// Records of a group that are next to each other in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct GroupChunk {
    offset: u64,
    records: u64,
}

/// Records by group, on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupedRecords {
    record_bytes: u64,
    bytes: u64,
    /// The chunks of each group.
    groups: Vec<Vec<GroupChunk>>,
}

impl GroupedRecords {
    /// Memory of a reader.
    pub const READER_BYTES: u64 = READ_BYTES + MOST_CHUNK_BYTES + (8 << 20);

    /// Records of all groups.
    pub fn records(&self) -> u64 {
        (0..self.groups.len()).map(|group| self.records_of(group)).sum()
    }

    /// Records of a group.
    pub fn records_of(&self, group: usize) -> u64 {
        self.groups[group].iter().map(|chunk| chunk.records).sum()
    }

    /// Opens the file for reading.
    pub fn open(&self, path: &Path) -> Result<GroupReader<'_>> {
        files::refuse_links(path)?;
        let disk = SharedDisk::this_machine();
        let queue = disk.open(&[Layout::file(path)], Access::Read, &Options::default())?.queue()?;
        Ok(GroupReader { of: self, queue, bytes: Vec::new() })
    }
}

/// Reads records by group.
pub struct GroupReader<'a> {
    of: &'a GroupedRecords,
    queue: Queue,
    bytes: Vec<u8>,
}

impl GroupReader<'_> {
    /// Passes the records of a group in the order in which they were pushed, many at a time.
    pub fn for_each(&mut self, group: usize, mut take: impl FnMut(&[u8])) -> Result<()> {
        let mut left = &self.of.groups[group][..];
        while !left.is_empty() {
            let (mut pieces, mut at) = (Vec::new(), 0);
            while let Some((chunk, rest)) = left.split_first()
                && (at == 0 || at < READ_BYTES)
            {
                let bytes = chunk.records * self.of.record_bytes;
                pieces.push(Piece { offset: chunk.offset, bytes, at });
                (at, left) = (at + bytes, rest);
            }
            self.bytes.resize(at as usize, 0);
            self.queue.read(0, &pieces, &mut self.bytes)?;
            pieces.iter().for_each(|piece| self.queue.forget(0, piece.offset, piece.bytes));
            take(&self.bytes);
        }
        Ok(())
    }
}

/// Writes records by group.
pub struct GroupWriter {
    path: PathBuf,
    file: SequentialWriter,
    chunk_bytes: usize,
    buffers: Vec<Vec<u8>>,
    done: GroupedRecords,
}

impl GroupWriter {
    /// Starts a file, or continues one after the records of `done`, which a [`GroupWriter::checkpoint`] returned. Buffers
    /// take at most `memory_bytes`, if those are at least [`GroupWriter::least_bytes`].
    pub fn resume(
        path: &Path,
        record_bytes: u64,
        groups: usize,
        memory_bytes: u64,
        done: Option<GroupedRecords>,
    ) -> Result<GroupWriter> {
        let fits = |done: &GroupedRecords| done.record_bytes == record_bytes && done.groups.len() == groups;
        let new = || GroupedRecords { record_bytes, bytes: 0, groups: vec![Vec::new(); groups] };
        let done = done.filter(fits).unwrap_or_else(new);
        files::refuse_links(path)?;
        let file = SequentialWriter::resume(path, done.bytes).map_err(StoreError::io(path))?;
        let chunk = (memory_bytes / groups.max(1) as u64).clamp(LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES);
        let chunk_bytes = ((chunk / record_bytes).max(1) * record_bytes) as usize;
        let buffers = vec![Vec::new(); groups];
        Ok(GroupWriter { path: path.to_path_buf(), file, chunk_bytes, buffers, done })
    }

    /// The smallest memory for this many groups.
    pub fn least_bytes(groups: u64) -> u64 {
        groups * LEAST_CHUNK_BYTES
    }

    /// Appends a record to a group.
    #[inline]
    pub fn push(&mut self, group: usize, record: &[u8]) -> Result<()> {
        let buffer = &mut self.buffers[group];
        if buffer.capacity() == 0 {
            buffer.reserve_exact(self.chunk_bytes);
        }
        buffer.extend_from_slice(record);
        if buffer.len() >= self.chunk_bytes { self.flush(group) } else { Ok(()) }
    }

    fn flush(&mut self, group: usize) -> Result<()> {
        let buffer = &mut self.buffers[group];
        if !buffer.is_empty() {
            self.file.write_all(buffer).map_err(StoreError::io(&self.path))?;
            let records = buffer.len() as u64 / self.done.record_bytes;
            self.done.groups[group].push(GroupChunk { offset: self.done.bytes, records });
            self.done.bytes += buffer.len() as u64;
            buffer.clear();
        }
        Ok(())
    }

    /// Bytes written so far, without what is in buffers.
    pub fn written_bytes(&self) -> u64 {
        self.done.bytes
    }

    /// Makes all records durable. A writer may be resumed from what this returns.
    pub fn checkpoint(&mut self) -> Result<&GroupedRecords> {
        (0..self.buffers.len()).try_for_each(|group| self.flush(group))?;
        self.file.sync().map_err(StoreError::io(&self.path))?;
        Ok(&self.done)
    }

    /// All records.
    pub fn finish(mut self) -> Result<GroupedRecords> {
        self.checkpoint()?;
        self.file.finish().map_err(StoreError::io(&self.path))?;
        Ok(self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_types::random::Key;

    fn read(done: &GroupedRecords, path: &Path) -> Vec<Vec<u64>> {
        let mut reader = done.open(path).unwrap();
        let mut of = |group: usize| {
            let mut all = Vec::new();
            let take =
                |bytes: &[u8]| all.extend(bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<u64>));
            reader.for_each(group, take).unwrap();
            all
        };
        (0..done.groups.len()).map(&mut of).collect()
    }

    #[test]
    fn groups_keep_the_order_of_their_records_after_any_kill() {
        let (key, count) = (Key::new(7), 20_000u64);
        let group_of = |record: u64| (key.at(record) % 13) as usize;
        let mut expected = vec![Vec::new(); 13];
        (0..count).for_each(|record| expected[group_of(record)].push(record));
        for killed_at in [None, Some(1), Some(9_000), Some(19_999)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("groups");
            let mut saved = None;
            if let Some(killed_at) = killed_at {
                let mut writer = GroupWriter::resume(&path, 8, 13, 1 << 16, None).unwrap();
                for record in 0..count {
                    writer.push(group_of(record), &record.to_le_bytes()).unwrap();
                    if record + 1 == killed_at {
                        saved = Some(writer.checkpoint().unwrap().clone());
                    }
                }
            }
            let mut writer = GroupWriter::resume(&path, 8, 13, 1 << 16, saved).unwrap();
            for record in killed_at.unwrap_or(0)..count {
                writer.push(group_of(record), &record.to_le_bytes()).unwrap();
            }
            let done = writer.finish().unwrap();
            assert_eq!((read(&done, &path), done.records()), (expected.clone(), count));
            assert_eq!(done.records_of(3), expected[3].len() as u64);
        }
    }
}
