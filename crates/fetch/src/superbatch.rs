//! What a superbatch keeps on disk beside its samples: the rows that its batches access, and a word a row of what is
//! planned for them. Both are files without a name: a killed process leaves nothing of them behind.

use crate::Result;
use esker_io::ScratchFile;
use esker_plan::{AccessTrace, NextUses, Row, Wanted};
use esker_store::StoreError;
use esker_types::NodeId;
use std::ops::Range;
use std::path::Path;

/// A row as the file names it: in 32 bits where all fit.
pub trait StoredRow: Row + bytemuck::Pod + PartialEq + Sync {
    /// Of a node that is known to fit.
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
    /// Rows of all batches up to each.
    ends: Vec<u64>,
    largest: u64,
    pending: Vec<R>,
}

impl<R: StoredRow> AccessFile<R> {
    /// An empty file on the disk of `folder`.
    pub fn create(folder: &Path) -> Result<AccessFile<R>> {
        let file = ScratchFile::create(folder).map_err(StoreError::io(folder))?;
        Ok(AccessFile { file, ends: Vec::new(), largest: 0, pending: Vec::new() })
    }

    /// Bytes for each access.
    pub const BYTES: u64 = size_of::<R>() as u64;

    /// Adds a batch.
    pub fn append(&mut self, nodes: &[NodeId]) -> Result<()> {
        self.pending.clear();
        self.pending.extend(nodes.iter().map(|node| R::of(*node)));
        let start = self.accesses();
        let written = self.file.write_at(bytemuck::cast_slice(&self.pending), start * Self::BYTES);
        written.map_err(StoreError::io(self.file.folder()))?;
        self.ends.push(start + nodes.len() as u64);
        self.largest = self.largest.max(nodes.len() as u64);
        Ok(())
    }

    /// No batch comes any more: room for the next one is given back.
    pub fn close(&mut self) {
        self.pending = Vec::new();
    }

    /// Accesses of all batches.
    pub fn accesses(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Rows of the largest batch.
    pub fn largest(&self) -> u64 {
        self.largest
    }

    /// Where a batch starts, and how many rows it has.
    fn range(&self, batch: u32) -> (u64, u64) {
        let start = (batch as usize).checked_sub(1).map_or(0, |before| self.ends[before]);
        (start, self.ends[batch as usize] - start)
    }
}

impl<R: StoredRow> AccessTrace for &AccessFile<R> {
    type Row = R;
    type Error = StoreError;

    fn batches(&self) -> u32 {
        self.ends.len() as u32
    }

    fn read(&mut self, batch: u32, rows: &mut Vec<R>) -> Result<(), StoreError> {
        let (start, count) = self.range(batch);
        rows.resize(count as usize, R::default());
        let bytes = bytemuck::cast_slice_mut(&mut rows[..]);
        self.file.read_at(bytes, start * AccessFile::<R>::BYTES).map_err(StoreError::io(self.file.folder()))
    }
}

/// A word for each access: while it is planned the next use, then what is planned.
#[derive(Debug)]
pub struct PlanFile {
    file: ScratchFile,
    ends: Vec<u64>,
}

impl PlanFile {
    /// Bytes for each access.
    pub const BYTES: u64 = 4;

    /// Words for the accesses of a file.
    pub fn create<R: StoredRow>(accesses: &AccessFile<R>) -> Result<PlanFile> {
        let folder = accesses.file.folder();
        let file = ScratchFile::create(folder).map_err(StoreError::io(folder))?;
        Ok(PlanFile { file, ends: accesses.ends.clone() })
    }

    /// Room for what a planner finds about some batches, until their words are written over it.
    pub fn next_uses(&self, batches: Range<u32>) -> Result<PlanUses<'_>> {
        let folder = self.file.folder();
        let counts = ScratchFile::create(folder).map_err(StoreError::io(folder))?;
        let of_batch = vec![(0, 0); batches.len()];
        Ok(PlanUses { plan: self, first: batches.start, narrow: Vec::new(), counts, of_batch, counted: 0 })
    }

    /// Writes the words of a batch.
    pub fn put(&self, batch: u32, words: &[u32]) -> Result<(), StoreError> {
        let (start, count) = self.range(batch);
        assert_eq!(count, words.len() as u64, "a word an access");
        let written = self.file.write_at(bytemuck::cast_slice(words), start * PlanFile::BYTES);
        written.map_err(StoreError::io(self.file.folder()))
    }

    /// Reads the words of a batch.
    pub fn get(&self, batch: u32, words: &mut Vec<u32>) -> Result<(), StoreError> {
        let (start, count) = self.range(batch);
        words.resize(count as usize, 0);
        let read = self.file.read_at(bytemuck::cast_slice_mut(words), start * PlanFile::BYTES);
        read.map_err(StoreError::io(self.file.folder()))
    }

    fn range(&self, batch: u32) -> (u64, u64) {
        let start = (batch as usize).checked_sub(1).map_or(0, |before| self.ends[before]);
        (start, self.ends[batch as usize] - start)
    }
}

/// Next uses where the words of their batch will be, in half the bytes where there are few batches; and in a file of their
/// own how many rows each batch wants.
#[derive(Debug)]
pub struct PlanUses<'a> {
    plan: &'a PlanFile,
    first: u32,
    /// Next uses on their way to or from the file: kept, because memory that comes and goes costs more than they do.
    narrow: Vec<u16>,
    counts: ScratchFile,
    /// Where the counts of each batch start, and how many there are; and how many there are of all.
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

const WANTED_BYTES: u64 = size_of::<Wanted>() as u64;

impl NextUses for PlanUses<'_> {
    type Error = StoreError;

    fn put(&mut self, batch: u32, next: &[u32], wanted: &[Wanted]) -> Result<(), StoreError> {
        self.of_batch[batch as usize] = (self.counted * WANTED_BYTES, wanted.len());
        let counts = self.counts.write_at(bytemuck::cast_slice(wanted), self.counted * WANTED_BYTES);
        counts.map_err(self.failed())?;
        self.counted += wanted.len() as u64;
        if !self.is_narrow() {
            return self.plan.put(self.first + batch, next);
        }
        let (start, count) = self.plan.range(self.first + batch);
        assert_eq!(count, next.len() as u64, "a next use an access");
        // The number that means never stays the largest.
        self.narrow.clear();
        self.narrow.extend(next.iter().map(|next| *next as u16));
        let written = self.plan.file.write_at(bytemuck::cast_slice(&self.narrow), start * PlanFile::BYTES);
        written.map_err(self.failed())
    }

    fn next(&mut self, batch: u32, next: &mut Vec<u32>) -> Result<(), StoreError> {
        if !self.is_narrow() {
            return self.plan.get(self.first + batch, next);
        }
        let (start, count) = self.plan.range(self.first + batch);
        self.narrow.resize(count as usize, 0);
        let bytes = bytemuck::cast_slice_mut(&mut self.narrow);
        self.plan.file.read_at(bytes, start * PlanFile::BYTES).map_err(self.failed())?;
        let widened = |next: &u16| if *next == u16::MAX { u32::MAX } else { *next as u32 };
        next.clear();
        next.extend(self.narrow.iter().map(widened));
        Ok(())
    }

    fn wanted(&mut self, batch: u32, wanted: &mut Vec<Wanted>) -> Result<(), StoreError> {
        let (start, count) = self.of_batch[batch as usize];
        wanted.resize(count, Wanted::default());
        self.counts.read_at(bytemuck::cast_slice_mut(wanted), start).map_err(self.failed())
    }
}
