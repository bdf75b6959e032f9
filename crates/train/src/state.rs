//! The state of a source in a checkpoint: separate files, each with a name that describes its content. They are written
//! and synced before the checkpoint that refers to them. Files that it does not refer to are removed after it. So a
//! kill leaves one complete set or the other.

use crate::{Result, TrainError};
use esker_strategies::{CheckpointReader, CheckpointSink, SavedState, StrategyError};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// A part of the state in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatePart {
    /// Its name.
    pub name: String,
    /// Its file: a name in the directory of states, or a path that the source manages.
    file: PathBuf,
    /// How it is stored.
    kept: StateKept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StateKept {
    Bytes { bytes: u64, sum: u64 },
    File { version: u64 },
}

/// For `map_err` on a file of state.
fn refused(name: &str, path: &Path) -> impl FnOnce(io::Error) -> StrategyError {
    let (name, path) = (name.to_string(), path.to_path_buf());
    move |source| StrategyError::State { name, path, source }
}

/// The state that a model was saved with.
pub(crate) struct SavedWith {
    pub folder: PathBuf,
    pub parts: Vec<StatePart>,
}

impl SavedWith {
    /// Opens something with the state. Fails if it does not take all of it.
    pub fn open<R>(
        &self,
        strategy: &str,
        open: impl FnOnce(Option<&mut dyn CheckpointReader>) -> Result<R, StrategyError>,
    ) -> Result<R> {
        let mut reader = StateReader::new(&self.folder, &self.parts);
        let opened = open(Some(&mut reader))?;
        reader.finish(strategy)?;
        Ok(opened)
    }
}

/// Writes the state of a source.
pub(crate) struct StateWriter<'a> {
    folder: &'a Path,
    /// Distinguishes its files from those of other checkpoints: the position in the run.
    tag: String,
    parts: Vec<StatePart>,
}

impl<'a> StateWriter<'a> {
    pub fn new(folder: &'a Path, tag: impl ToString) -> StateWriter<'a> {
        StateWriter { folder, tag: tag.to_string(), parts: Vec::new() }
    }

    /// What was written. It is synced when this returns.
    pub fn finish(self) -> Result<Vec<StatePart>> {
        if !self.parts.is_empty() {
            // The directory, and its entry in its parent.
            for folder in [Some(self.folder), self.folder.parent()].into_iter().flatten() {
                let synced = File::open(folder).and_then(|folder| folder.sync_all());
                synced.map_err(TrainError::io(folder))?;
            }
        }
        Ok(self.parts)
    }
}

/// Counts and hashes the bytes that pass.
struct Summed<W> {
    inner: W,
    hash: Xxh3,
    bytes: u64,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl CheckpointSink for StateWriter<'_> {
    fn bytes(
        &mut self,
        name: &str,
        write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), StrategyError> {
        let file = PathBuf::from(format!("{name}-{}.state", self.tag));
        let path = self.folder.join(&file);
        let partial = path.with_extension("partial");
        let written = fs::create_dir_all(self.folder).and_then(|()| {
            let inner = BufWriter::new(File::create(&partial)?);
            let mut to = Summed { inner, hash: Xxh3::new(), bytes: 0 };
            write(&mut to)?;
            to.flush()?;
            to.inner.get_ref().sync_all()?;
            // A checkpoint at the same position may refer to it already, with the same content.
            fs::rename(&partial, &path)?;
            Ok((to.bytes, to.hash.digest()))
        });
        let (bytes, sum) = written.map_err(refused(name, &path))?;
        self.parts.push(StatePart { name: name.to_string(), file, kept: StateKept::Bytes { bytes, sum } });
        Ok(())
    }

    fn file(&mut self, name: &str, path: &Path, version: u64) -> Result<(), StrategyError> {
        let (name, file) = (name.to_string(), path.to_path_buf());
        self.parts.push(StatePart { name, file, kept: StateKept::File { version } });
        Ok(())
    }
}

/// Removes files that no checkpoint refers to.
pub(crate) fn remove_others(folder: &Path, parts: &[&[StatePart]]) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(TrainError::io(folder))?,
    };
    for entry in entries {
        let entry = entry.map_err(TrainError::io(folder))?;
        if !parts.iter().copied().flatten().any(|part| part.file.as_os_str() == entry.file_name()) {
            fs::remove_file(entry.path()).map_err(TrainError::io(&entry.path()))?;
        }
    }
    Ok(())
}

/// Provides the state of a checkpoint.
pub(crate) struct StateReader<'a> {
    folder: &'a Path,
    parts: Vec<StatePart>,
}

impl<'a> StateReader<'a> {
    pub fn new(folder: &'a Path, parts: &[StatePart]) -> StateReader<'a> {
        StateReader { folder, parts: parts.to_vec() }
    }

    /// Fails if a part was not taken: a strategy that continues without it would train something else.
    pub fn finish(self, strategy: &str) -> Result<()> {
        match self.parts.first() {
            None => Ok(()),
            Some(part) => {
                let (name, strategy) = (part.name.clone(), strategy.to_string());
                Err(TrainError::UnknownState { name, strategy })
            }
        }
    }
}

impl CheckpointReader for StateReader<'_> {
    fn take(&mut self, name: &str) -> Result<Option<SavedState<'_>>, StrategyError> {
        let Some(at) = self.parts.iter().position(|part| part.name == name) else { return Ok(None) };
        let part = self.parts.remove(at);
        let StateKept::Bytes { bytes, sum } = part.kept else {
            let StateKept::File { version } = part.kept else { return Ok(None) };
            return Ok(Some(SavedState::File(part.file, version)));
        };
        let path = self.folder.join(&part.file);
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (found, file) = opened.map_err(refused(name, &path))?;
        if found != bytes {
            let (name, expected_bytes, found_bytes) = (name.to_string(), bytes, found);
            return Err(StrategyError::StateCut { name, path, expected_bytes, found_bytes });
        }
        let inner = io::BufReader::new(file);
        Ok(Some(SavedState::Bytes(Box::new(CheckedReader {
            inner,
            hash: Xxh3::new(),
            left: bytes,
            sum,
            path,
        }))))
    }
}

/// Reads to the end and fails there if the bytes do not match what was written.
struct CheckedReader<R> {
    inner: R,
    hash: Xxh3,
    left: u64,
    sum: u64,
    path: PathBuf,
}

impl<R: Read> Read for CheckedReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(to)?;
        self.hash.update(&to[..count]);
        self.left = self.left.saturating_sub(count as u64);
        if self.left == 0 && self.hash.digest() != self.sum {
            let problem = format!("{}: not what was written, by its checksum", self.path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(folder: &Path, turn: u64, content: &[u8]) -> Vec<StatePart> {
        let mut writer = StateWriter::new(folder, turn);
        writer.bytes("history", &mut |to| to.write_all(content)).unwrap();
        writer.file("table", Path::new("/elsewhere/table"), 7).unwrap();
        writer.finish().unwrap()
    }

    fn read(folder: &Path, parts: &[StatePart]) -> io::Result<Vec<u8>> {
        let mut reader = StateReader::new(folder, parts);
        let mut found = Vec::new();
        match reader.take("history").unwrap() {
            Some(SavedState::Bytes(mut from)) => from.read_to_end(&mut found)?,
            _ => panic!("bytes were written"),
        };
        match reader.take("table").unwrap() {
            Some(SavedState::File(path, version)) => {
                assert_eq!((path, version), ("/elsewhere/table".into(), 7))
            }
            _ => panic!("a file was named"),
        }
        assert!(reader.take("other").unwrap().is_none());
        reader.finish("memory").unwrap();
        Ok(found)
    }

    #[test]
    fn state_is_read_as_written_and_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let folder = &folder.path().join("state");
        let content: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        let parts = written(folder, 1, &content);
        assert_eq!(read(folder, &parts).unwrap(), content);
        let next = written(folder, 2, b"");
        remove_others(folder, &[&next]).unwrap();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
        assert_eq!(read(folder, &next).unwrap(), b"");
        let parts = written(folder, 3, &content);
        let path = folder.join("history-3.state");
        let mut bytes = fs::read(&path).unwrap();
        bytes[70_000] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(read(folder, &parts).unwrap_err().to_string().contains("history-3.state"));
        fs::write(&path, &bytes[1..]).unwrap();
        let mut reader = StateReader::new(folder, &parts);
        assert!(reader.take("history").err().unwrap().to_string().contains("399999 are there"));
    }

    #[test]
    fn state_that_nobody_takes_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let parts = written(folder.path(), 1, b"rows");
        let said = StateReader::new(folder.path(), &parts).finish("memory").unwrap_err().to_string();
        assert!(said.contains("history") && said.contains("memory"), "{said}");
    }
}
