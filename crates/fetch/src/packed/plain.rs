//! Small arrays of numbers, in the work directory and in a finished directory. They are read at any position through
//! the page cache. Threads share one. Its file stays open, even if it is renamed or removed.

use crate::Result;
use esker_store::{PAYLOAD_OFFSET, StoreError};
use std::fs::File;
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Elements of a file, from offset `start` on.
#[derive(Debug)]
pub(crate) struct Plain<T> {
    file: File,
    path: PathBuf,
    start: u64,
    elements: PhantomData<fn() -> T>,
}

impl<T: bytemuck::Pod> Plain<T> {
    /// The elements of an array.
    pub fn array(directory: &Path, name: &str) -> Result<Plain<T>> {
        Plain::open(&directory.join(format!("{name}.bin")), PAYLOAD_OFFSET)
    }

    /// Elements of any file, from offset `start` on.
    pub fn open(path: &Path, start: u64) -> Result<Plain<T>> {
        let file = File::open(path).map_err(StoreError::io(path))?;
        Ok(Plain { file, path: path.to_path_buf(), start, elements: PhantomData })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Starts to read `count` elements from `first` on into the page cache, and does not wait.
    pub fn read_ahead(&self, first: u64, count: u64) {
        let width = size_of::<T>() as u64;
        esker_io::read_ahead(&self.file, self.start + first * width, count * width);
    }

    /// Replaces `out` by `count` elements from `first` on.
    pub fn read(&self, first: u64, count: usize, out: &mut Vec<T>) -> Result<()> {
        out.resize(count, T::zeroed());
        self.fill(first, out)
    }

    /// Fills `out` with elements from `first` on.
    pub fn fill(&self, first: u64, out: &mut [T]) -> Result<()> {
        let at = self.start + first * size_of::<T>() as u64;
        self.file.read_exact_at(bytemuck::cast_slice_mut(out), at).map_err(StoreError::io(&self.path))?;
        Ok(())
    }
}
