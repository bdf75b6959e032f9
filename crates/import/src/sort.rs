//! External sort of fixed-size records within a memory budget.
//!
//! Records fill a buffer. A full buffer is sorted in place and written as a run. A merge step first finds the last
//! loaded record of each run; their minimum is the limit. It takes all loaded records up to the limit: the records
//! still on disk are larger. These pieces are concatenated and sorted by the standard stable sort, which detects the
//! runs and merges them, so no merge tree is needed.

use crate::Result;
use bytemuck::Pod;
use esker_io::SequentialReader;
use esker_store::{StoreError, create_sequential};
use rayon::slice::ParallelSliceMut;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Smallest loaded part of a run, in bytes: smaller reads would make merging seek-bound.
const SMALLEST_PART_BYTES: usize = 256 << 10;

/// A sorted file of records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    file: String,
    records: u64,
}

impl Run {
    /// Whether the run's file exists with all its records. A merge that was killed may have removed it.
    pub fn is_whole<R>(&self, directory: &Path) -> bool {
        let bytes = std::fs::metadata(directory.join(&self.file)).map(|found| found.len());
        bytes.is_ok_and(|bytes| bytes == self.records * size_of::<R>() as u64)
    }
}

/// Accepts records in any order.
pub struct Sorter<R> {
    directory: PathBuf,
    name: String,
    buffer: Vec<R>,
    capacity: usize,
    memory_bytes: usize,
    runs: Vec<Run>,
    /// Runs that were merged into longer ones. They are kept until the end, because a resumed sort starts from them.
    spent: Vec<PathBuf>,
    /// Counts the files, so that a run made by a merge never has the name of another.
    files: u64,
}

impl<R: Pod + Ord + Send + Sync> Sorter<R> {
    /// A sorter that keeps its runs in `directory` under names that start with `name`.
    pub fn new(directory: PathBuf, name: &str, memory_bytes: u64) -> Result<Sorter<R>> {
        Sorter::resume(directory, name, memory_bytes, Vec::new())
    }

    /// A sorter with the `runs` of an earlier process.
    pub fn resume(directory: PathBuf, name: &str, memory_bytes: u64, runs: Vec<Run>) -> Result<Sorter<R>> {
        let memory_bytes = (memory_bytes as usize).max(SMALLEST_PART_BYTES);
        let capacity = memory_bytes / size_of::<R>();
        let files = runs.iter().filter_map(|run| run.file.rsplit('-').next()?.parse::<u64>().ok()).max();
        Ok(Sorter {
            directory,
            name: name.to_string(),
            buffer: Vec::new(),
            capacity,
            memory_bytes,
            files: files.map_or(0, |last| last + 1),
            runs,
            spent: Vec::new(),
        })
    }

    /// Whether `count` more records need a spill first.
    pub fn is_full_for(&self, count: usize) -> bool {
        !self.buffer.is_empty() && self.buffer.len() + count > self.capacity
    }

    /// Adds records. Spills first if the buffer has no space for them.
    pub fn push(&mut self, records: &[R]) -> Result<()> {
        let mut left = records;
        while !left.is_empty() {
            if self.buffer.capacity() == 0 {
                self.reserve();
            }
            let (piece, rest) = left.split_at(left.len().min(self.capacity));
            left = rest;
            if self.is_full_for(piece.len()) {
                self.spill()?;
            }
            self.buffer.extend_from_slice(piece);
        }
        Ok(())
    }

    /// Reserves the buffer once. Its pages are touched only as it fills, so a small sort stays small. If the machine
    /// cannot provide the budgeted memory, the buffer is smaller.
    fn reserve(&mut self) {
        while self.buffer.try_reserve_exact(self.capacity).is_err() && self.capacity > 1 {
            self.capacity /= 2;
        }
    }

    /// Sorts the buffer and writes it as a run. Returns all runs so far, synced.
    pub fn spill(&mut self) -> Result<&[Run]> {
        if !self.buffer.is_empty() {
            self.buffer.par_sort_unstable();
            let run = self.new_run();
            let path = self.directory.join(&run.file);
            let mut writer = create_sequential(&path)?;
            writer.write_all(bytemuck::cast_slice(&self.buffer)).map_err(StoreError::io(&path))?;
            writer.finish().map_err(StoreError::io(&path))?;
            self.runs.push(Run { records: self.buffer.len() as u64, ..run });
            self.buffer.clear();
        }
        Ok(&self.runs)
    }

    fn new_run(&mut self) -> Run {
        self.files += 1;
        Run { file: format!("{}-{}", self.name, self.files - 1), records: 0 }
    }

    /// All records in order. The runs stay on disk until [`Sorted::remove_files`].
    pub fn finish(mut self) -> Result<Sorted<R>> {
        if self.runs.is_empty() {
            self.buffer.par_sort_unstable();
            return Ok(Sorted { parts: Vec::new(), whole: Some(self.buffer), spent: Vec::new() });
        }
        self.spill()?;
        self.buffer = Vec::new();
        let most_runs = (self.merge_bytes() / SMALLEST_PART_BYTES).max(2);
        while self.runs.len() > most_runs {
            let rest = self.runs.split_off(most_runs);
            let merged = self.new_run();
            let path = self.directory.join(&merged.file);
            let mut sorted = self.open_runs(&self.runs)?;
            let mut writer = create_sequential(&path)?;
            let (mut chunk, mut records) = (Vec::new(), 0);
            while sorted.next(&mut chunk)? {
                records += chunk.len() as u64;
                writer.write_all(bytemuck::cast_slice(&chunk)).map_err(StoreError::io(&path))?;
            }
            writer.finish().map_err(StoreError::io(&path))?;
            self.spent.extend(sorted.parts.iter().map(|part| part.path.clone()));
            // Appended after the others, so that the next round merges runs of about the same size.
            self.runs = rest;
            self.runs.push(Run { records, ..merged });
        }
        Ok(Sorted { spent: std::mem::take(&mut self.spent), ..self.open_runs(&self.runs)? })
    }

    /// Budget of the loaded parts. The merged piece takes the same amount, and the sort's scratch memory half of it.
    fn merge_bytes(&self) -> usize {
        self.memory_bytes * 2 / 5
    }

    fn open_runs(&self, runs: &[Run]) -> Result<Sorted<R>> {
        let part_bytes = (self.merge_bytes() / runs.len().max(1)).clamp(SMALLEST_PART_BYTES / 2, 4 << 20);
        let capacity = (part_bytes / size_of::<R>()).max(1);
        let parts =
            runs.iter().map(|run| LoadedRun::open(&self.directory, run, capacity)).collect::<Result<_>>()?;
        Ok(Sorted { parts, whole: None, spent: Vec::new() })
    }
}

/// The loaded part of a run.
struct LoadedRun<R> {
    path: PathBuf,
    reader: SequentialReader,
    loaded: Vec<R>,
    /// Records before this one are already merged.
    next: usize,
    left_on_disk: u64,
    capacity: usize,
}

impl<R: Pod + Ord> LoadedRun<R> {
    fn open(directory: &Path, run: &Run, capacity: usize) -> Result<LoadedRun<R>> {
        let path = directory.join(&run.file);
        let reader = SequentialReader::open(&path, 0).map_err(StoreError::io(&path))?;
        let loaded = Vec::with_capacity(capacity);
        Ok(LoadedRun { path, reader, loaded, next: 0, left_on_disk: run.records, capacity })
    }

    fn refill(&mut self) -> Result<()> {
        if self.next == self.loaded.len() && self.left_on_disk > 0 {
            let count = self.left_on_disk.min(self.capacity as u64) as usize;
            self.loaded.resize(count, R::zeroed());
            self.reader
                .read_exact(bytemuck::cast_slice_mut(&mut self.loaded))
                .map_err(StoreError::io(&self.path))?;
            self.left_on_disk -= count as u64;
            self.next = 0;
        }
        Ok(())
    }
}

/// Records in order.
pub struct Sorted<R> {
    parts: Vec<LoadedRun<R>>,
    whole: Option<Vec<R>>,
    spent: Vec<PathBuf>,
}

impl<R: Pod + Ord + Send + Sync> Sorted<R> {
    /// Replaces the content of `out` with the next records; `false` if there are no more.
    pub fn next(&mut self, out: &mut Vec<R>) -> Result<bool> {
        out.clear();
        if let Some(whole) = self.whole.take() {
            *out = whole;
            return Ok(!out.is_empty());
        }
        for part in &mut self.parts {
            part.refill()?;
        }
        // Records still on disk are not smaller than the last loaded one of their run.
        let limit =
            self.parts.iter().filter(|p| p.left_on_disk > 0).filter_map(|p| p.loaded.last()).min().copied();
        for part in &mut self.parts {
            let waiting = &part.loaded[part.next..];
            let count =
                limit.map_or(waiting.len(), |limit| waiting.partition_point(|record| *record <= limit));
            out.extend_from_slice(&waiting[..count]);
            part.next += count;
        }
        out.sort();
        Ok(!out.is_empty())
    }

    /// Removes the run files. Call it when everything made from them is durable.
    pub fn remove_files(self) -> Result<()> {
        for path in self.parts.iter().map(|part| &part.path).chain(&self.spent) {
            std::fs::remove_file(path).map_err(StoreError::io(path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_types::random::Key;
    use proptest::prelude::*;

    fn sort_all(records: &[u64], memory_bytes: u64, piece: usize) -> Vec<u64> {
        let directory = tempfile::tempdir().unwrap();
        let mut sorter = Sorter::new(directory.path().into(), "r", memory_bytes).unwrap();
        records.chunks(piece).for_each(|piece| sorter.push(piece).unwrap());
        let (mut sorted, mut chunk, mut all) = (sorter.finish().unwrap(), Vec::new(), Vec::new());
        while sorted.next(&mut chunk).unwrap() {
            all.extend_from_slice(&chunk);
        }
        sorted.remove_files().unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        all
    }

    #[test]
    fn many_small_runs_merge_in_several_rounds() {
        let key = Key::new(1);
        let mut records: Vec<u64> = (0..3_000_000).map(|i| key.at(i) % 1_000_000).collect();
        let sorted = sort_all(&records, 1 << 20, 1000);
        records.sort_unstable();
        assert!(sorted == records);
    }

    #[test]
    fn one_value_many_times_is_no_trouble() {
        assert!(sort_all(&vec![7; 500_000], 1 << 18, 777) == vec![7; 500_000]);
    }

    #[test]
    fn runs_of_an_earlier_life_are_merged_too() {
        let directory = tempfile::tempdir().unwrap();
        let mut sorter = Sorter::<u64>::new(directory.path().into(), "r", 1 << 20).unwrap();
        sorter.push(&[5, 1]).unwrap();
        let runs = sorter.spill().unwrap().to_vec();
        drop(sorter);
        let mut sorter = Sorter::<u64>::resume(directory.path().into(), "r", 1 << 20, runs).unwrap();
        sorter.push(&[3]).unwrap();
        let (mut sorted, mut out) = (sorter.finish().unwrap(), Vec::new());
        assert!(sorted.next(&mut out).unwrap());
        assert_eq!(out, [1, 3, 5]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn equals_the_standard_sort(mut records in prop::collection::vec(0u64..5000, 0..200_000), piece in 1usize..5000) {
            let sorted = sort_all(&records, 1 << 18, piece);
            records.sort_unstable();
            prop_assert!(sorted == records);
        }
    }
}
