use crate::{ArrayFile, ArrayWriter, Dataset, FileEntry, Result, StoreError};
use esker_types::Dtype;
use std::path::Path;

/// Writes a dictionary: names in id order, as one array of bytes and one of offsets.
pub struct NamesWriter {
    offsets: ArrayWriter,
    bytes: ArrayWriter,
    end: u64,
}

impl NamesWriter {
    /// Starts `NAME-offsets` and `NAME-bytes`.
    pub fn create(directory: &Path, name: &str) -> Result<NamesWriter> {
        let mut offsets = ArrayWriter::create(directory, &format!("{name}-offsets"), Dtype::U64, 1)?;
        offsets.write_elements(&[0u64])?;
        Ok(NamesWriter {
            offsets,
            bytes: ArrayWriter::create(directory, &format!("{name}-bytes"), Dtype::U8, 1)?,
            end: 0,
        })
    }

    /// Appends the name of the next id.
    pub fn push(&mut self, name: &[u8]) -> Result<()> {
        self.bytes.write(name)?;
        self.end += name.len() as u64;
        self.offsets.write_elements(&[self.end])
    }

    /// The two finished files.
    pub fn finish(self) -> Result<Vec<FileEntry>> {
        Ok(vec![self.offsets.finish()?, self.bytes.finish()?])
    }
}

/// An open dictionary.
pub struct Names {
    offsets: ArrayFile,
    bytes: ArrayFile,
}

impl Names {
    /// The dictionary `name` of a dataset, if it has one.
    pub fn open(dataset: &Dataset, name: &str) -> Option<Names> {
        let offsets = dataset.array(&format!("{name}-offsets"))?.clone();
        Some(Names { offsets, bytes: dataset.array(&format!("{name}-bytes"))?.clone() })
    }

    /// Number of names.
    pub fn count(&self) -> u64 {
        self.offsets.entry().rows.saturating_sub(1)
    }

    /// The name of an id.
    pub fn name(&self, id: u64) -> Result<String> {
        let mut ends = [0u64; 2];
        self.offsets.read_at(id, &mut ends)?;
        if ends[0] > ends[1] || ends[1] > self.bytes.entry().rows {
            let found = format!("{} to {} for name {id}", ends[0], ends[1]);
            return Err(StoreError::inconsistent(
                self.offsets.path(),
                "rising offsets inside the names",
                found,
            ));
        }
        let mut bytes = vec![0u8; (ends[1] - ends[0]) as usize];
        self.bytes.read_at(ends[0], &mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
