//! Rows that training changes, on disk by partition. A partition that was written is a new file: `NAME-PARTITION.VERSION`.
//! Its version is the number of updates that it has seen, so a run that is repeated from a checkpoint writes the same
//! files again. A partition without a file has its initial rows.
//!
//! A file has the rows of the partition in order of position: the rows themselves, then each state of their optimizer,
//! each as long as in the largest partition, so that a slot of a buffer holds any of them.
//! A file appears complete or not at all. One that was replaced is removed at once, unless a checkpoint may need it.

use crate::{FetchError, Result};
use esker_io::{
    Access, AlignedBuffer, DIRECT_ALIGN, Disk, Files, IoError, Layout, Options, Piece, Queue, ThisMachine,
};
use esker_sample::NodePartitions;
use esker_store::StoreError;
use esker_types::{NodeId, PartitionId};
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Rows are written in pieces of this size where they do not come from one buffer, and files are checked in such pieces.
const PIECE_BYTES: usize = 4 << 20;
/// Files that a reader has open at a time, at most.
const OPEN_FILES: u32 = 128;

/// Makes the initial rows of nodes.
pub type InitialRows = Arc<dyn Fn(&[NodeId], &mut [f32]) -> std::result::Result<(), String> + Send + Sync>;

/// The numbers of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowFileShape {
    /// Numbers per row.
    pub dim: usize,
    /// Matrices: the rows, and the states of their optimizer.
    pub matrices: usize,
}

/// A file of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PartitionVersion {
    /// Its version.
    pub version: u64,
    /// Its checksum.
    pub sum: u64,
}

/// The current file of every partition, and files that stay.
#[derive(Debug, Default)]
struct Versions {
    current: Vec<Option<PartitionVersion>>,
    /// Files of this process that no checkpoint has seen.
    unseen: HashSet<(u32, u64)>,
    /// The version of each partition that was written or compared with its checksum here.
    checked: Vec<Option<u64>>,
}

/// Rows by partition. Threads share it.
pub struct PartitionFiles {
    folder: PathBuf,
    name: String,
    partitions: Arc<NodePartitions>,
    shape: RowFileShape,
    versions: Mutex<Versions>,
    initial: InitialRows,
    pool: Arc<ThreadPool>,
}

impl PartitionFiles {
    /// The files of a folder that these versions name; all partitions have their initial rows if there are none.
    pub fn open(
        folder: &Path,
        name: &str,
        partitions: &Arc<NodePartitions>,
        shape: RowFileShape,
        versions: Option<Vec<Option<PartitionVersion>>>,
        initial: InitialRows,
        pool: &Arc<ThreadPool>,
    ) -> PartitionFiles {
        let current = versions.unwrap_or_else(|| vec![None; partitions.count() as usize]);
        let checked = vec![None; current.len()];
        let versions = Mutex::new(Versions { current, unseen: HashSet::new(), checked });
        PartitionFiles {
            folder: folder.to_path_buf(),
            name: name.to_string(),
            partitions: partitions.clone(),
            shape,
            versions,
            initial,
            pool: pool.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Versions> {
        // A panic while it was locked has ended the run.
        self.versions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The partitions.
    pub fn partitions(&self) -> &Arc<NodePartitions> {
        &self.partitions
    }

    /// The numbers of a node.
    pub fn shape(&self) -> RowFileShape {
        self.shape
    }

    /// Numbers of a partition.
    pub fn numbers(&self) -> usize {
        self.partitions.largest() as usize * self.shape.dim * self.shape.matrices
    }

    /// The current version of every partition.
    pub fn versions(&self) -> Vec<Option<PartitionVersion>> {
        self.lock().current.clone()
    }

    /// The current versions, which a checkpoint is about to name: their files stay.
    pub fn keep_versions(&self) -> Vec<Option<PartitionVersion>> {
        let mut versions = self.lock();
        versions.unseen.clear();
        versions.current.clone()
    }

    /// The file name of a version.
    pub fn file_name(&self, partition: PartitionId, version: u64) -> String {
        format!("{}-{:05}.{version}", self.name, partition.0)
    }

    fn path(&self, partition: PartitionId, version: u64) -> PathBuf {
        self.folder.join(self.file_name(partition, version))
    }

    /// Reads a partition: its rows, then the states.
    pub fn read(&self, partition: PartitionId, values: &mut [f32]) -> Result<()> {
        assert_eq!(values.len(), self.numbers(), "a partition's numbers");
        let Some(found) = self.lock().current[partition.index()] else {
            return self.initialise(partition, values);
        };
        let path = self.path(partition, found.version);
        let bytes = bytemuck::cast_slice_mut(values);
        let opened = self.open_files(std::slice::from_ref(&path))?;
        let mut queue = opened.queue().map_err(StoreError::from)?;
        let piece = Piece { offset: 0, bytes: bytes.len() as u64, at: 0 };
        queue.read(0, &[piece], bytes).map_err(StoreError::from)?;
        self.compare(partition, found, xxh3_64(bytes))
    }

    /// Compares the checksum of what was read with that of what was written.
    fn compare(&self, partition: PartitionId, version: PartitionVersion, found: u64) -> Result<()> {
        if found != version.sum {
            let path = self.path(partition, version.version);
            let (expected, found) = (format!("{:016x}", version.sum), format!("{found:016x}"));
            return Err(FetchError::TablePartition { path, partition: partition.0, expected, found });
        }
        self.lock().checked[partition.index()] = Some(version.version);
        Ok(())
    }

    /// Opens files of partitions. Their lengths are known.
    fn open_files(&self, paths: &[PathBuf]) -> Result<Files> {
        let layouts: Vec<Layout> = paths.iter().map(|path| Layout::file(path)).collect();
        let files = match ThisMachine.open(&layouts, Access::Read, &large()) {
            Err(IoError::File { source, path, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::Missing { path }.into());
            }
            found => found.map_err(StoreError::from)?,
        };
        let expected_bytes = self.numbers() as u64 * 4;
        for (at, path) in paths.iter().enumerate() {
            let found_bytes = files.bytes(at);
            if found_bytes != expected_bytes {
                let path = path.clone();
                return Err(StoreError::WrongLength { path, expected_bytes, found_bytes }.into());
            }
        }
        Ok(files)
    }

    /// The rows of a partition before training: states are zeros.
    fn initialise(&self, partition: PartitionId, values: &mut [f32]) -> Result<()> {
        let size = self.partitions.size_of(partition);
        let nodes: Vec<NodeId> = (0..size).map(|offset| self.partitions.node(partition, offset)).collect();
        let (rows, others) = values.split_at_mut(size as usize * self.shape.dim);
        others.fill(0.0);
        let made = self.pool.install(|| (self.initial)(&nodes, rows));
        made.map_err(|said| FetchError::InitialRows { said })
    }

    /// Writes a partition as a new version.
    pub fn write(&self, partition: PartitionId, version: u64, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), self.numbers(), "a partition's numbers");
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.replace(partition, version, |queue| {
            let piece = Piece { offset: 0, bytes: bytes.len() as u64, at: 0 };
            queue.write(0, &[piece], bytes)?;
            Ok(xxh3_64(bytes))
        })
    }

    /// The same for numbers that `read` delivers in pieces, each of whole rows of one matrix: it gets the index of the first
    /// number.
    pub fn write_pieces(
        &self,
        partition: PartitionId,
        version: u64,
        mut read: impl FnMut(usize, &mut [f32]),
    ) -> Result<()> {
        // Whole rows of one matrix at a time.
        let (all, matrix) = (self.numbers(), self.numbers() / self.shape.matrices.max(1));
        let piece = (PIECE_BYTES / 4 / self.shape.dim.max(1)).max(1) * self.shape.dim;
        let mut buffer = AlignedBuffer::new(piece.min(matrix) * 4, DIRECT_ALIGN);
        self.replace(partition, version, |queue| {
            let (mut hash, mut first) = (Xxh3::new(), 0);
            while first < all {
                let count = piece.min(matrix - first % matrix);
                let bytes = &mut buffer[..count * 4];
                read(first, bytemuck::cast_slice_mut(bytes));
                hash.update(bytes);
                let piece = Piece { offset: first as u64 * 4, bytes: bytes.len() as u64, at: 0 };
                queue.write(0, &[piece], bytes)?;
                first += count;
            }
            Ok(hash.digest())
        })
    }

    /// Writes a file under another name, syncs and renames it, and makes it the current one.
    fn replace(
        &self,
        partition: PartitionId,
        version: u64,
        write: impl FnOnce(&mut Queue) -> std::result::Result<u64, IoError>,
    ) -> Result<()> {
        let path = self.path(partition, version);
        let partial = self.folder.join(format!("{}.partial", self.file_name(partition, version)));
        let bytes = self.numbers() as u64 * 4;
        let layout = Layout::file(&partial);
        fs::create_dir_all(&self.folder).map_err(StoreError::io(&self.folder))?;
        let written = (|| {
            ThisMachine.create(&layout, bytes)?;
            let mut queue =
                ThisMachine.open(std::slice::from_ref(&layout), Access::Write, &large())?.queue()?;
            let sum = write(&mut queue)?;
            queue.sync()?;
            Ok::<u64, IoError>(sum)
        })();
        let sum = written.map_err(|error| {
            // What it takes is of no use to anybody.
            let _ = fs::remove_file(&partial);
            StoreError::from(error)
        })?;
        fs::rename(&partial, &path).map_err(StoreError::io(&path))?;
        let mut versions = self.lock();
        let before = versions.current[partition.index()].replace(PartitionVersion { version, sum });
        versions.checked[partition.index()] = Some(version);
        let superseded = before.filter(|before| before.version != version);
        let removed = superseded.filter(|before| versions.unseen.remove(&(partition.0, before.version)));
        versions.unseen.insert((partition.0, version));
        drop(versions);
        if let Some(before) = removed {
            let path = self.path(partition, before.version);
            fs::remove_file(&path).map_err(StoreError::io(&path))?;
        }
        Ok(())
    }

    /// Makes the names of all files durable.
    pub fn sync(&self) -> Result<()> {
        match fs::File::open(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            folder => {
                let synced = folder.and_then(|folder| folder.sync_all());
                Ok(synced.map_err(StoreError::io(&self.folder))?)
            }
        }
    }

    /// A reader of single rows for the calling thread.
    pub fn reader(self: &Arc<PartitionFiles>) -> PartitionReader {
        PartitionReader { files: self.clone(), open: None }
    }
}

/// Few large transfers.
fn large() -> Options {
    Options {
        depth: 32,
        max_bytes: 1 << 20,
        in_flight_bytes: 16 << 20,
        staging_bytes: 1 << 20,
        ..Options::default()
    }
}

/// Reads the rows of nodes, without states. It stays on its thread.
pub struct PartitionReader {
    files: Arc<PartitionFiles>,
    open: Option<OpenPartitions>,
}

/// The files of some partitions that follow one another.
struct OpenPartitions {
    /// The first partition.
    first: u32,
    /// What was opened of each.
    versions: Vec<Option<PartitionVersion>>,
    queue: Queue,
}

impl OpenPartitions {
    /// The number of a partition's file among those that are open.
    fn file_of(&self, partition: PartitionId) -> usize {
        self.versions[..(partition.0 - self.first) as usize].iter().flatten().count()
    }
}

impl PartitionReader {
    /// Its memory, for reads of so many rows of files of this length.
    pub fn memory_bytes(rows: u64, file_bytes: u64) -> u64 {
        let pieces = rows.saturating_mul(size_of::<Piece>() as u64);
        pieces.saturating_add(large().memory_bytes(rows)).saturating_add(file_bytes.min(PIECE_BYTES as u64))
    }

    /// Reads the rows of a partition's nodes at these offsets, each to its row of `values`. Rows that follow each other
    /// are read together. A file that this process has neither written nor compared with its checksum is first read as a
    /// whole.
    pub fn read(&mut self, partition: PartitionId, rows: &[(u64, usize)], values: &mut [f32]) -> Result<()> {
        let (files, dim) = (self.files.clone(), self.files.shape.dim);
        let (found, is_checked) = {
            let versions = files.lock();
            let found = versions.current[partition.index()];
            (found, versions.checked[partition.index()] == found.map(|found| found.version))
        };
        let Some(found) = found else {
            let nodes: Vec<NodeId> =
                rows.iter().map(|(offset, _)| files.partitions.node(partition, *offset)).collect();
            let mut made = vec![0.0; rows.len() * dim];
            let initial = files.pool.install(|| (files.initial)(&nodes, &mut made));
            initial.map_err(|said| FetchError::InitialRows { said })?;
            for ((_, to), row) in rows.iter().zip(made.chunks_exact(dim.max(1))) {
                values[to * dim..(to + 1) * dim].copy_from_slice(row);
            }
            return Ok(());
        };
        let open = self.opened(partition)?;
        let file = open.file_of(partition);
        if !is_checked {
            files.check(partition, found, &mut open.queue, file)?;
        }
        let row_bytes = dim as u64 * 4;
        let piece = |(offset, to): &(u64, usize)| Piece {
            offset: offset * row_bytes,
            bytes: row_bytes,
            at: *to as u64 * row_bytes,
        };
        let pieces: Vec<Piece> = rows.iter().map(piece).collect();
        open.queue.read(file, &pieces, bytemuck::cast_slice_mut(values)).map_err(StoreError::from)?;
        Ok(())
    }

    /// The files around a partition, as they are now.
    fn opened(&mut self, partition: PartitionId) -> Result<&mut OpenPartitions> {
        let first = partition.0 / OPEN_FILES * OPEN_FILES;
        let last = (first + OPEN_FILES).min(self.files.partitions.count());
        let versions = self.files.lock().current[first as usize..last as usize].to_vec();
        let is_open = |open: &OpenPartitions| open.first == first && open.versions == versions;
        match self.open.take().filter(is_open) {
            Some(open) => Ok(self.open.insert(open)),
            None => {
                let named = (first..).zip(&versions);
                let path = |(partition, version): (u32, &Option<PartitionVersion>)| {
                    version.map(|version| self.files.path(PartitionId(partition), version.version))
                };
                let paths: Vec<PathBuf> = named.filter_map(path).collect();
                let queue = self.files.open_files(&paths)?.queue().map_err(StoreError::from)?;
                Ok(self.open.insert(OpenPartitions { first, versions, queue }))
            }
        }
    }
}

impl PartitionFiles {
    /// Reads a file, states and all, and compares it with its checksum.
    fn check(
        &self,
        partition: PartitionId,
        version: PartitionVersion,
        queue: &mut Queue,
        file: usize,
    ) -> Result<()> {
        let (mut hash, all) = (Xxh3::new(), self.numbers() as u64 * 4);
        let mut buffer = AlignedBuffer::new(PIECE_BYTES.min(all as usize), DIRECT_ALIGN);
        for offset in (0..all).step_by(PIECE_BYTES) {
            let bytes = &mut buffer[..(all - offset).min(PIECE_BYTES as u64) as usize];
            let piece = Piece { offset, bytes: bytes.len() as u64, at: 0 };
            queue.read(file, &[piece], bytes).map_err(StoreError::from)?;
            hash.update(bytes);
        }
        self.compare(partition, version, hash.digest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &Path, versions: Option<Vec<Option<PartitionVersion>>>) -> PartitionFiles {
        let partitions = Arc::new(NodePartitions::random(1000, 3, 1).unwrap());
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let initial: InitialRows = Arc::new(|nodes, rows| {
            rows.chunks_exact_mut(5).zip(nodes).for_each(|(row, node)| row.fill(node.0 as f32));
            Ok(())
        });
        let shape = RowFileShape { dim: 5, matrices: 2 };
        PartitionFiles::open(folder, "rows", &partitions, shape, versions, initial, &pool)
    }

    fn numbers(files: &PartitionFiles, add: f32) -> Vec<f32> {
        (0..files.numbers()).map(|at| at as f32 + add).collect()
    }

    fn names(folder: &Path) -> Vec<String> {
        let all = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn versions_replace_each_other_and_those_that_a_checkpoint_names_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (files, one) = (files(folder.path(), None), PartitionId(1));
        let mut found = vec![0.0; files.numbers()];
        files.read(one, &mut found).unwrap();
        let nodes = files.partitions().size_of(one) as usize;
        assert_eq!(found[5], files.partitions().node(one, 1).0 as f32);
        assert!(found[nodes * 5..].iter().all(|number| *number == 0.0));
        for version in [3, 8] {
            let numbers = numbers(&files, version as f32);
            files.write(one, version, &numbers).unwrap();
            files.read(one, &mut found).unwrap();
            assert_eq!(found, numbers);
        }
        assert_eq!(names(folder.path()), ["rows-00001.8"]);
        let kept = files.keep_versions();
        let all = numbers(&files, 0.5);
        files.write_pieces(one, 9, |first, to| to.copy_from_slice(&all[first..first + to.len()])).unwrap();
        files.write(one, 10, &all).unwrap();
        assert_eq!(names(folder.path()), ["rows-00001.10", "rows-00001.8"]);
        let before = self::files(folder.path(), Some(kept));
        before.read(one, &mut found).unwrap();
        assert_eq!(found, numbers(&files, 8.0));
        // Written in pieces or at once, a file has one checksum.
        files.read(one, &mut found).unwrap();
        assert_eq!(found, all);
        let mut reader = Arc::new(files).reader();
        let mut rows = vec![0.0; 3 * 5];
        reader.read(one, &[(7, 2), (2, 0)], &mut rows).unwrap();
        assert_eq!((&rows[..5], &rows[10..]), (&all[10..15], &all[35..40]));
        reader.read(PartitionId(0), &[(4, 1)], &mut rows).unwrap();
        assert_eq!(rows[5], reader.files.partitions().node(PartitionId(0), 4).0 as f32);
    }

    #[test]
    fn damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (files, two) = (files(folder.path(), None), PartitionId(2));
        files.write(two, 4, &numbers(&files, 0.0)).unwrap();
        let path = folder.path().join("rows-00002.4");
        let mut bytes = fs::read(&path).unwrap();
        bytes[77] ^= 4;
        fs::write(&path, &bytes).unwrap();
        let mut found = vec![0.0; files.numbers()];
        let said = files.read(two, &mut found).unwrap_err().to_string();
        assert!(said.contains("rows-00002.4") && said.contains("partition 2"), "{said}");
        // Another process reads single rows, and this one is not damaged. It has the sum of the whole file.
        let other = Arc::new(self::files(folder.path(), Some(files.versions())));
        let said = other.reader().read(two, &[(0, 0)], &mut found).unwrap_err().to_string();
        let sums = [xxh3_64(&bytes), files.versions()[2].unwrap().sum].map(|sum| format!("{sum:016x}"));
        assert!(said.contains("rows-00002.4") && sums.iter().all(|sum| said.contains(sum)), "{said}");
        bytes[77] ^= 4;
        fs::write(&path, &bytes).unwrap();
        let mut reader = other.reader();
        reader.read(two, &[(0, 0)], &mut found).unwrap();
        reader.read(two, &[(1, 1)], &mut found).unwrap();
        assert_eq!(found[..10], numbers(&files, 0.0)[..10]);
        fs::write(&path, &bytes[1..]).unwrap();
        assert!(files.read(two, &mut found).unwrap_err().to_string().contains("rows-00002.4"));
        fs::remove_file(&path).unwrap();
        assert!(files.read(two, &mut found).unwrap_err().to_string().contains("rows-00002.4"));
    }
}
