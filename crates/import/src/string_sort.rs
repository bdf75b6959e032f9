//! External sort of strings within a memory budget. Each string has its position in the input; the output is sorted by
//! (string, position). Runs are merged by a heap, at most [`FAN_IN`] at a time.

use crate::{Result, delimited::quoted};
use esker_io::SequentialReader;
use esker_store::{StoreError, create_sequential};
use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    io::{BufReader, ErrorKind, Read, Write},
    path::{Path, PathBuf},
};

const FAN_IN: usize = 64;

/// Memory of an entry besides its bytes.
const ENTRY_BYTES: usize = size_of::<StringEntry>();

struct StringEntry {
    start: usize,
    length: usize,
    position: u64,
}

/// Accepts strings in any order.
pub struct StringSorter {
    directory: PathBuf,
    name: &'static str,
    memory_bytes: usize,
    text: Vec<u8>,
    entries: Vec<StringEntry>,
    runs: Vec<PathBuf>,
    runs_made: usize,
}

impl StringSorter {
    /// A sorter with its runs in `directory`, under names that start with `name`.
    pub fn new(directory: &Path, name: &'static str, memory_bytes: u64) -> StringSorter {
        StringSorter {
            directory: directory.to_path_buf(),
            name,
            memory_bytes: (memory_bytes as usize).max(4096),
            text: Vec::new(),
            entries: Vec::new(),
            runs: Vec::new(),
            runs_made: 0,
        }
    }

    /// Adds a string.
    pub fn push(&mut self, text: &[u8], position: u64) -> Result<()> {
        let half = self.memory_bytes / 2;
        if self.text.capacity() == 0 {
            // Reserved once: a growing vector has its old and new storage at the same time.
            self.text.reserve_exact(half);
            self.entries.reserve_exact(half / ENTRY_BYTES);
        }
        if self.text.len() + text.len() > half || (self.entries.len() + 1) * ENTRY_BYTES > half {
            self.spill()?;
        }
        self.entries.push(StringEntry { start: self.text.len(), length: text.len(), position });
        self.text.extend_from_slice(text);
        Ok(())
    }

    fn new_run(&mut self) -> PathBuf {
        self.runs_made += 1;
        self.directory.join(format!("{}-{}", self.name, self.runs_made))
    }

    fn spill(&mut self) -> Result<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        let text = &self.text;
        let key = |entry: &StringEntry| (&text[entry.start..entry.start + entry.length], entry.position);
        self.entries.sort_unstable_by(|a, b| key(a).cmp(&key(b)));
        let path = self.new_run();
        let mut writer = create_sequential(&path)?;
        for entry in &self.entries {
            let text = &self.text[entry.start..entry.start + entry.length];
            write_entry(&mut writer, text, entry.position).map_err(StoreError::io(&path))?;
        }
        writer.finish().map_err(StoreError::io(&path))?;
        self.runs.push(path);
        self.text.clear();
        self.entries.clear();
        Ok(())
    }

    /// All strings in order.
    pub fn finish(mut self) -> Result<SortedStrings> {
        self.spill()?;
        (self.text, self.entries) = (Vec::new(), Vec::new());
        while self.runs.len() > FAN_IN {
            let rest = self.runs.split_off(FAN_IN);
            let path = self.new_run();
            let mut writer = create_sequential(&path)?;
            let mut merged = SortedStrings::open(std::mem::replace(&mut self.runs, rest), self.memory_bytes)?;
            while let Some((text, position)) = merged.next()? {
                write_entry(&mut writer, &text, position).map_err(StoreError::io(&path))?;
            }
            writer.finish().map_err(StoreError::io(&path))?;
            merged.remove_files()?;
            self.runs.push(path);
        }
        SortedStrings::open(self.runs, self.memory_bytes)
    }
}

fn write_entry(writer: &mut impl Write, text: &[u8], position: u64) -> std::io::Result<()> {
    writer.write_all(&position.to_le_bytes())?;
    writer.write_all(&(text.len() as u64).to_le_bytes())?;
    writer.write_all(text)
}

struct Run {
    path: PathBuf,
    reader: BufReader<SequentialReader>,
}

impl Run {
    fn next(&mut self) -> Result<Option<(Vec<u8>, u64)>> {
        let mut head = [0u8; 16];
        match self.reader.read_exact(&mut head) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            other => other.map_err(StoreError::io(&self.path))?,
        }
        let head: [u64; 2] = bytemuck::cast(head);
        let mut text = vec![0; head[1] as usize];
        self.reader.read_exact(&mut text).map_err(StoreError::io(&self.path))?;
        Ok(Some((text, head[0])))
    }
}

/// Strings in order, each with its position.
pub struct SortedStrings {
    runs: Vec<Run>,
    heads: BinaryHeap<Reverse<(Vec<u8>, u64, usize)>>,
}

impl SortedStrings {
    fn open(paths: Vec<PathBuf>, memory_bytes: usize) -> Result<SortedStrings> {
        let buffer_bytes = (memory_bytes / 2 / paths.len().max(1)).clamp(4 << 10, 1 << 20);
        let mut sorted = SortedStrings { runs: Vec::new(), heads: BinaryHeap::new() };
        for (index, path) in paths.into_iter().enumerate() {
            let file = SequentialReader::open(&path, 0).map_err(StoreError::io(&path))?;
            let mut run = Run { path, reader: BufReader::with_capacity(buffer_bytes, file) };
            if let Some((text, position)) = run.next()? {
                sorted.heads.push(Reverse((text, position, index)));
            }
            sorted.runs.push(run);
        }
        Ok(sorted)
    }

    /// The next string.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<(Vec<u8>, u64)>> {
        let Some(Reverse((text, position, index))) = self.heads.pop() else { return Ok(None) };
        if let Some((next, next_position)) = self.runs[index].next()? {
            debug_assert!((&next, next_position) > (&text, position), "{} out of order", quoted(&next));
            self.heads.push(Reverse((next, next_position, index)));
        }
        Ok(Some((text, position)))
    }

    /// Removes the run files.
    pub fn remove_files(self) -> Result<()> {
        for run in &self.runs {
            std::fs::remove_file(&run.path).map_err(StoreError::io(&run.path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_types::random::Key;

    fn check(words: Vec<Vec<u8>>) {
        let directory = tempfile::tempdir().unwrap();
        let mut sorter = StringSorter::new(directory.path(), "s", 4096);
        let mut expected: Vec<(Vec<u8>, u64)> = words.into_iter().zip(0..).collect();
        expected.iter().for_each(|(word, position)| sorter.push(word, *position).unwrap());
        expected.sort();
        let (mut sorted, mut all) = (sorter.finish().unwrap(), Vec::new());
        while let Some(next) = sorted.next().unwrap() {
            all.push(next);
        }
        assert!(all == expected);
        sorted.remove_files().unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn hundreds_of_runs_merge_in_rounds() {
        let key = Key::new(5);
        check((0..20_000).map(|i| format!("{}", key.at(i) % 3000).into_bytes()).collect());
    }

    #[test]
    fn strings_longer_than_the_budget_and_empty_ones_pass() {
        check(vec![vec![b'x'; 10_000], vec![], b"\0".to_vec(), vec![b'x'; 9_999], vec![]]);
        check(vec![]);
    }
}
