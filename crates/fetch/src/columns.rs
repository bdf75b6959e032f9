//! Reads values of nodes or edges from any array of a dataset, as stored. A loader returns them along with features.

use crate::{FetchError, Result};
use esker_io::{Files, Options, Piece, Queue};
use esker_store::{ArrayFile, Dataset, FileEntry, PAYLOAD_OFFSET, StoreError};
use std::sync::Arc;

/// Arrays of a dataset. Threads share it; each makes its own [`ColumnReader`].
pub struct ColumnFiles {
    files: Files,
    entries: Vec<FileEntry>,
}

impl ColumnFiles {
    /// Opens arrays of a dataset by name.
    pub fn open(dataset: &Dataset, names: &[String]) -> Result<Arc<ColumnFiles>> {
        let arrays: Vec<&ArrayFile> = names.iter().map(|name| array(dataset, name)).collect::<Result<_>>()?;
        let files = dataset.open_files(&arrays, &Options::default())?;
        let entries = arrays.iter().map(|array| array.entry().clone()).collect();
        Ok(Arc::new(ColumnFiles { files, entries }))
    }

    /// The manifest entries of the arrays, in the order of their names.
    pub fn entries(&self) -> &[FileEntry] {
        &self.entries
    }

    /// Bytes that a reader takes to read up to `rows` rows.
    pub fn reader_bytes(rows: u64) -> u64 {
        Options::default().memory_bytes(rows) + rows * size_of::<Piece>() as u64
    }

    /// A reader for the calling thread.
    pub fn reader(self: &Arc<ColumnFiles>) -> Result<ColumnReader> {
        let queue = self.files.queue().map_err(StoreError::from)?;
        Ok(ColumnReader { columns: self.clone(), queue, pieces: Vec::new() })
    }
}

/// Finds an array by name.
fn array<'a>(dataset: &'a Dataset, name: &str) -> Result<&'a ArrayFile> {
    dataset.array(name).ok_or_else(|| FetchError::Column {
        dataset: dataset.directory().to_path_buf(),
        name: name.to_string(),
        there: dataset.arrays().iter().map(|array| array.entry().name.clone()).collect(),
    })
}

/// Reads values. It stays on the thread that made it.
pub struct ColumnReader {
    columns: Arc<ColumnFiles>,
    queue: Queue,
    pieces: Vec<Piece>,
}

impl ColumnReader {
    /// The rows `ids` of array `number`, one after the other, as stored.
    pub fn read(&mut self, number: usize, ids: impl Iterator<Item = u64>) -> Result<Vec<u8>> {
        let entry = &self.columns.entries[number];
        let (bytes, last) = (entry.row_bytes(), entry.rows.saturating_sub(1));
        self.pieces.clear();
        for (id, at) in ids.zip(0u64..) {
            if id >= entry.rows {
                return Err(FetchError::Row { row: id, last });
            }
            self.pieces.push(Piece { offset: PAYLOAD_OFFSET + id * bytes, bytes, at: at * bytes });
        }
        let mut values = vec![0; self.pieces.len() * bytes as usize];
        self.queue.read(number, &self.pieces, &mut values).map_err(StoreError::from)?;
        Ok(values)
    }
}
