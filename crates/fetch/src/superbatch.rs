//! What a superbatch stores on disk in addition to its samples: the rows that its batches access, and their placements.
//! Both are unlinked temporary files, so a killed process leaves nothing. All data is verified when it is read.

use crate::{FetchError, Result};
use esker_io::ScratchFile;
use esker_plan::{AccessTrace, NextUses, Placements, RequestCount, Row};
use esker_store::StoreError;
use esker_types::NodeId;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// A row id as the file stores it: 32 bits if all ids fit.
pub trait StoredRow: Row + bytemuck::Pod + PartialEq + Sync {
    /// The id of a node that is known to fit.
    fn of(node: NodeId) -> Self;
}

impl StoredRow for u32 {
    fn of(node: NodeId) -> u32 {
        node.0 as u32
    }
}

impl StoredRow for u64 {
    fn of(node: NodeId) -> u64 {
        node.0
    }
}

/// The rows that batches access, batch after batch.
#[derive(Debug)]
pub struct AccessFile<R> {
    file: ScratchFile,
    /// Running sum of rows, up to and including each batch.
    ends: Vec<u64>,
    /// The checksum of each batch.
    sums: Vec<u64>,
    largest: u64,
    pending: Vec<R>,
}

impl<R: StoredRow> AccessFile<R> {
    /// An empty file on the disk of `folder`.
    pub fn create(folder: &Path) -> Result<AccessFile<R>> {
        let file = ScratchFile::create(folder).map_err(StoreError::io(folder))?;
        Ok(AccessFile { file, ends: Vec::new(), sums: Vec::new(), largest: 0, pending: Vec::new() })
    }

    /// Bytes per access.
    pub const BYTES: u64 = size_of::<R>() as u64;

    /// Adds a batch of these nodes, without skipped ones. `skipped` has one mark per node, or is empty.
    pub fn append(&mut self, nodes: &[NodeId], skipped: &[bool]) -> Result<()> {
        self.pending.clear();
        match skipped {
            [] => self.pending.extend(nodes.iter().map(|node| R::of(*node))),
            _ => {
                let needed = nodes.iter().zip(skipped).filter(|(_, skip)| !**skip);
                self.pending.extend(needed.map(|(node, _)| R::of(*node)));
            }
        }
        self.write(nodes.len() as u64)
    }

    /// Adds a batch of another file.
    pub fn append_from(&mut self, other: &AccessFile<R>, batch: u32) -> Result<()> {
        let mut rows = std::mem::take(&mut self.pending);
        let read = (&mut &*other).read(batch, &mut rows);
        self.pending = rows;
        read?;
        // Skipped rows are not in the file.
        self.write(other.largest)
    }

    /// Writes the pending rows as a batch of up to `rows` rows, including skipped ones.
    fn write(&mut self, rows: u64) -> Result<()> {
        let (start, bytes) = (self.accesses(), bytemuck::cast_slice(&self.pending));
        let written = self.file.write_at(bytes, start * Self::BYTES);
        written.map_err(StoreError::io(self.file.folder()))?;
        self.sums.push(xxh3_64(bytes));
        self.ends.push(start + self.pending.len() as u64);
        self.largest = self.largest.max(rows);
        Ok(())
    }

    /// Frees buffers. No more batches follow.
    pub fn close(&mut self) {
        self.pending = Vec::new();
    }

    /// Accesses of all batches.
    pub fn accesses(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Rows of the largest batch, including skipped ones.
    pub fn largest(&self) -> u64 {
        self.largest
    }
}

/// The first row of a batch, and its number of rows.
fn range(ends: &[u64], batch: u32) -> (u64, u64) {
    let start = (batch as usize).checked_sub(1).map_or(0, |before| ends[before]);
    (start, ends[batch as usize] - start)
}

/// The error for data that does not match its checksum.
fn damaged(file: &ScratchFile, what: &str, batch: u32) -> FetchError {
    FetchError::Scratch { folder: file.folder().to_path_buf(), what: format!("{what} of batch {batch}") }
}

impl<R: StoredRow> AccessTrace for &AccessFile<R> {
    type Row = R;
    type Error = FetchError;

    fn batches(&self) -> u32 {
        self.ends.len() as u32
    }

    fn read(&mut self, batch: u32, rows: &mut Vec<R>) -> Result<()> {
        let (start, count) = range(&self.ends, batch);
        rows.resize(count as usize, R::default());
        let bytes = bytemuck::cast_slice_mut(&mut rows[..]);
        let read = self.file.read_at(bytes, start * AccessFile::<R>::BYTES);
        read.map_err(StoreError::io(self.file.folder()))?;
        match xxh3_64(bytes) == self.sums[batch as usize] {
            true => Ok(()),
            false => Err(damaged(&self.file, "the accesses", batch)),
        }
    }
}

/// The placements of each batch. While they are computed, the same locations store next uses.
#[derive(Debug)]
pub struct PlanFile {
    file: ScratchFile,
    ends: Vec<u64>,
    /// Index of the batches that have placements.
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    batches: Vec<KnownBatch>,
    /// Slots of kept rows of all batches.
    kept: u64,
}

/// Start of the slots of a batch's kept rows (after all words), their number, and a checksum of words and slots.
#[derive(Debug, Clone, Copy, Default)]
struct KnownBatch {
    kept_at: u64,
    kept: usize,
    sum: u64,
}

impl PlanFile {
    /// Bytes per access, if every row is kept.
    pub const BYTES: u64 = 8;
    /// Bytes of a word.
    const WORD: u64 = 4;

    /// Room for the placements of a file's accesses.
    pub fn create<R: StoredRow>(accesses: &AccessFile<R>) -> Result<PlanFile> {
        PlanFile::with_ends(accesses.file.folder(), accesses.ends.clone())
    }

    /// Room for the placements of batches with these numbers of rows, on the disk of `folder`.
    pub fn for_batches(folder: &Path, rows: impl Iterator<Item = u64>) -> Result<PlanFile> {
        let ends = rows.scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        });
        PlanFile::with_ends(folder, ends.collect())
    }

    fn with_ends(folder: &Path, ends: Vec<u64>) -> Result<PlanFile> {
        let file = ScratchFile::create(folder).map_err(StoreError::io(folder))?;
        let batches = vec![KnownBatch::default(); ends.len()];
        Ok(PlanFile { file, ends, known: Mutex::new(Known { batches, kept: 0 }) })
    }

    /// Bytes of memory per batch.
    pub const fn bytes_per_batch() -> u64 {
        (size_of::<KnownBatch>() + size_of::<u64>()) as u64
    }

    /// Storage for a planner's next uses of some batches, until their placements overwrite it.
    pub fn next_uses(&self, batches: Range<u32>) -> Result<PlanUses<'_>> {
        let folder = self.file.folder();
        let counts = ScratchFile::create(folder).map_err(StoreError::io(folder))?;
        let of_batch = vec![(0, 0); batches.len()];
        Ok(PlanUses { plan: self, first: batches.start, narrow: Vec::new(), counts, of_batch, counted: 0 })
    }

    /// Writes the placements of a batch, at most once.
    pub fn put(&self, batch: u32, placements: &Placements) -> Result<()> {
        let sum = sum(placements);
        let kept_at = {
            let mut known = self.known();
            let (kept_at, kept) = (known.kept, placements.kept.len());
            known.batches[batch as usize] = KnownBatch { kept_at, kept, sum };
            known.kept += kept as u64;
            kept_at
        };
        self.write_words(batch, &placements.words)?;
        let slots = bytemuck::cast_slice(&placements.kept);
        self.file.write_at(slots, self.kept_start(kept_at)).map_err(StoreError::io(self.file.folder()))?;
        Ok(())
    }

    /// Reads the placements of a batch.
    pub fn get(&self, batch: u32, placements: &mut Placements) -> Result<()> {
        let known = self.known().batches[batch as usize];
        self.read_words(batch, &mut placements.words)?;
        placements.kept.resize(known.kept, 0);
        let slots = bytemuck::cast_slice_mut(&mut placements.kept);
        let read = self.file.read_at(slots, self.kept_start(known.kept_at));
        read.map_err(StoreError::io(self.file.folder()))?;
        match sum(placements) == known.sum {
            true => Ok(()),
            false => Err(damaged(&self.file, "the placements", batch)),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Every change leaves it consistent.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Start of the slots of kept rows: after the words of all batches.
    fn kept_start(&self, kept_at: u64) -> u64 {
        (self.ends.last().copied().unwrap_or(0) + kept_at) * PlanFile::WORD
    }

    fn write_words(&self, batch: u32, words: &[u32]) -> Result<()> {
        let (start, count) = range(&self.ends, batch);
        assert_eq!(count, words.len() as u64, "a word an access");
        let written = self.file.write_at(bytemuck::cast_slice(words), start * PlanFile::WORD);
        Ok(written.map_err(StoreError::io(self.file.folder()))?)
    }

    fn read_words(&self, batch: u32, words: &mut Vec<u32>) -> Result<()> {
        let (start, count) = range(&self.ends, batch);
        words.resize(count as usize, 0);
        let read = self.file.read_at(bytemuck::cast_slice_mut(words), start * PlanFile::WORD);
        Ok(read.map_err(StoreError::io(self.file.folder()))?)
    }
}

fn sum(placements: &Placements) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(bytemuck::cast_slice(&placements.words));
    hash.update(bytemuck::cast_slice(&placements.kept));
    hash.digest()
}

/// Next uses, stored where the placements of their batch will be, with half the bytes if there are few batches. A
/// separate file stores how many rows each batch accesses.
#[derive(Debug)]
pub struct PlanUses<'a> {
    plan: &'a PlanFile,
    first: u32,
    /// Buffer for next uses. It is kept, because allocating it each time costs more than the conversion.
    narrow: Vec<u16>,
    counts: ScratchFile,
    /// Start and length of the counts of each batch, and the total number of counts.
    of_batch: Vec<(u64, usize)>,
    counted: u64,
}

impl PlanUses<'_> {
    fn is_narrow(&self) -> bool {
        self.of_batch.len() < u16::MAX as usize
    }

    fn failed(&self) -> impl FnOnce(std::io::Error) -> StoreError {
        StoreError::io(self.plan.file.folder())
    }
}

const ACCESS_BYTES: u64 = size_of::<RequestCount>() as u64;

impl NextUses for PlanUses<'_> {
    type Error = FetchError;

    fn put(&mut self, batch: u32, next: &[u32], accessed: &[RequestCount]) -> Result<(), FetchError> {
        self.of_batch[batch as usize] = (self.counted * ACCESS_BYTES, accessed.len());
        let counts = self.counts.write_at(bytemuck::cast_slice(accessed), self.counted * ACCESS_BYTES);
        counts.map_err(self.failed())?;
        self.counted += accessed.len() as u64;
        if !self.is_narrow() {
            return self.plan.write_words(self.first + batch, next);
        }
        let (start, count) = range(&self.plan.ends, self.first + batch);
        assert_eq!(count, next.len() as u64, "a next use an access");
        // The two numbers that are not batches stay the largest.
        self.narrow.clear();
        self.narrow.extend(next.iter().map(|next| *next as u16));
        let written = self.plan.file.write_at(bytemuck::cast_slice(&self.narrow), start * PlanFile::WORD);
        Ok(written.map_err(self.failed())?)
    }

    fn next(&mut self, batch: u32, next: &mut Vec<u32>) -> Result<(), FetchError> {
        if !self.is_narrow() {
            return self.plan.read_words(self.first + batch, next);
        }
        let (start, count) = range(&self.plan.ends, self.first + batch);
        self.narrow.resize(count as usize, 0);
        let bytes = bytemuck::cast_slice_mut(&mut self.narrow);
        self.plan.file.read_at(bytes, start * PlanFile::WORD).map_err(self.failed())?;
        let none = u16::MAX - 1;
        let widened =
            |next: &u16| if *next >= none { u32::MAX - (u16::MAX - *next) as u32 } else { *next as u32 };
        next.clear();
        next.extend(self.narrow.iter().map(widened));
        Ok(())
    }

    fn accessed(&mut self, batch: u32, accessed: &mut Vec<RequestCount>) -> Result<(), FetchError> {
        let (start, count) = self.of_batch[batch as usize];
        accessed.resize(count, RequestCount::default());
        Ok(self.counts.read_at(bytemuck::cast_slice_mut(accessed), start).map_err(self.failed())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_plan::Placement;

    #[test]
    fn damage_to_accesses_or_placements_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let mut accesses = AccessFile::<u32>::create(folder.path()).unwrap();
        accesses.append(&[1, 2, 3].map(NodeId), &[]).unwrap();
        accesses.append(&[4, 5, 6].map(NodeId), &[false, true, false]).unwrap();
        let (plan, mut rows) = (PlanFile::create(&accesses).unwrap(), Vec::new());
        (&accesses).read(1, &mut rows).unwrap();
        assert_eq!((rows, accesses.largest()), (vec![4, 6], 3));
        let words = |all: &[Placement]| all.iter().map(|one| one.encode()).collect::<Vec<u32>>();
        let first = words(&[Placement::Keep(0), Placement::Read(1), Placement::Keep(2)]);
        let second = words(&[Placement::Read(0), Placement::Keep(1)]);
        let placed = [(first, vec![7, 8]), (second, vec![9])].map(|(words, kept)| Placements { words, kept });
        placed.iter().zip(0..).for_each(|(one, batch)| plan.put(batch, one).unwrap());
        let mut found = Placements::default();
        for (batch, expected) in placed.iter().enumerate().rev() {
            plan.get(batch as u32, &mut found).unwrap();
            assert_eq!(found, *expected);
        }
        // A slot of the first batch, then a row of the second.
        plan.file.write_at(&[1], 5 * 4).unwrap();
        let said = plan.get(0, &mut found).unwrap_err().to_string();
        assert!(said.contains("placements of batch 0"), "{said}");
        plan.get(1, &mut found).unwrap();
        accesses.file.write_at(&[1], 3 * 4).unwrap();
        let said = (&accesses).read(1, &mut Vec::new()).unwrap_err().to_string();
        assert!(said.contains("accesses of batch 1"), "{said}");
        (&accesses).read(0, &mut Vec::new()).unwrap();
        // A copy of a damaged batch is refused, others are copied with all that is known of their size.
        let mut copy = AccessFile::<u32>::create(folder.path()).unwrap();
        assert!(copy.append_from(&accesses, 1).is_err());
        copy.append_from(&accesses, 0).unwrap();
        let mut rows = Vec::new();
        (&copy).read(0, &mut rows).unwrap();
        assert_eq!((rows, copy.accesses(), copy.largest()), (vec![1, 2, 3], 3, 3));
    }
}
