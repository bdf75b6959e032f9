use crate::{ArrayFile, ArrayWriter, Dataset, FileEntry, Result, StoreError};
use esker_types::Dtype;
use std::collections::HashMap;
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

    /// The ids of some names, in one pass over all of them; `None` for a name that there is not. The first of equal names
    /// counts.
    pub fn find(&self, wanted: &[&str]) -> Result<Vec<Option<u64>>> {
        let mut found: HashMap<&[u8], Option<u64>> =
            wanted.iter().map(|name| (name.as_bytes(), None)).collect();
        let (mut offsets, mut bytes) = (self.offsets.elements(0)?, self.bytes.elements(0)?);
        let (mut ends, mut name, mut start) = (vec![0u64; 4096], Vec::new(), 0);
        let (mut id, mut is_first) = (0, true);
        loop {
            let count = offsets.fill(&mut ends)?;
            for end in &ends[..count] {
                // The first offset is the start of the first name.
                if std::mem::take(&mut is_first) {
                    continue;
                }
                if *end < start || *end > self.bytes.entry().rows {
                    let found = format!("{start} to {end} for name {id}");
                    let expected = "rising offsets inside the names";
                    return Err(StoreError::inconsistent(self.offsets.path(), expected, found));
                }
                name.resize((end - start) as usize, 0u8);
                bytes.fill(&mut name)?;
                if let Some(of_name) = found.get_mut(&name[..]) {
                    of_name.get_or_insert(id);
                }
                (start, id) = (*end, id + 1);
            }
            if count == 0 {
                return Ok(wanted.iter().map(|name| found[name.as_bytes()]).collect());
            }
        }
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
