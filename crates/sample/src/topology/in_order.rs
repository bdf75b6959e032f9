//! The adjacency of a dataset from the first node to the last, as it is on disk. Offsets are not kept: memory is a few
//! MiB for any graph.

use super::disk::check_ids;
use super::{Direction, StoredId, lookup};
use crate::{Result, SampleError};
use esker_store::{ArrayFile, Dataset, Elements, StoreError, file};
use std::ops::Range;

/// Entries and offsets read at a time.
const CHUNK: usize = 1 << 16;
/// Memory of a stream of elements.
const STREAM_BYTES: u64 = 1 << 20;

/// Streams the neighbours of all nodes in order, of one direction.
pub(crate) struct AdjacencyInOrder<W> {
    offsets: Elements,
    offsets_array: ArrayFile,
    offset_chunk: Vec<u64>,
    offset_at: usize,
    /// The last offset that was read.
    before: u64,
    entries: Elements,
    entries_array: ArrayFile,
    words: Vec<W>,
    word_at: usize,
    nodes: u64,
    edges: u64,
}

impl<W: StoredId> AdjacencyInOrder<W> {
    /// Memory in bytes.
    pub const BYTES: u64 = 2 * STREAM_BYTES + CHUNK as u64 * (8 + 4 + size_of::<W>() as u64);

    /// Opens the adjacency of a direction, which is not both.
    pub fn open(dataset: &Dataset, direction: Direction) -> Result<AdjacencyInOrder<W>> {
        let (offsets, entries) = match direction {
            Direction::Outgoing => (file::OUT_OFFSETS, file::OUT_NEIGHBOURS),
            Direction::Incoming | Direction::Both => (file::IN_OFFSETS, file::IN_NEIGHBOURS),
        };
        let array =
            |name: &str| dataset.array(name).cloned().ok_or_else(|| lookup::no_adjacency(dataset, name));
        let (offsets_array, entries_array) = (array(offsets)?, array(entries)?);
        let mut stream = AdjacencyInOrder {
            offsets: offsets_array.elements(0)?,
            offsets_array,
            offset_chunk: Vec::new(),
            offset_at: 0,
            before: 0,
            entries: entries_array.elements(0)?,
            entries_array,
            words: Vec::new(),
            word_at: 0,
            nodes: dataset.manifest().nodes.count,
            edges: dataset.manifest().edges.count,
        };
        match stream.next_offset()? {
            0 => Ok(stream),
            other => Err(stream.wrong_offset(other)),
        }
    }

    /// The degree of the next node.
    #[inline]
    pub fn next_degree(&mut self) -> Result<u64> {
        let (start, end) = (self.before, self.next_offset()?);
        if end < start || end > self.edges {
            return Err(self.wrong_offset(end));
        }
        self.before = end;
        Ok(end - start)
    }

    /// At most `most` of the next entries: their range in the words. The words after the range are met next.
    #[inline]
    pub fn next_entries(&mut self, most: u64) -> Result<(&[W], Range<usize>)> {
        if self.word_at == self.words.len() {
            self.words.resize(CHUNK, W::default());
            let filled = self.entries.fill(&mut self.words)?;
            self.words.truncate(filled);
            check_ids(&self.words, self.nodes, &self.entries_array)?;
            self.word_at = 0;
            if filled == 0 && most > 0 {
                let expected = format!("{} neighbours", self.edges);
                return Err(StoreError::inconsistent(self.entries_array.path(), expected, "fewer").into());
            }
        }
        let start = self.word_at;
        self.word_at += most.min((self.words.len() - start) as u64) as usize;
        Ok((&self.words, start..self.word_at))
    }

    #[inline]
    fn next_offset(&mut self) -> Result<u64> {
        if self.offset_at == self.offset_chunk.len() {
            self.offset_chunk.resize(CHUNK, 0);
            let filled = self.offsets.fill_ids(&mut self.offset_chunk)?;
            self.offset_chunk.truncate(filled);
            self.offset_at = 0;
            if filled == 0 {
                let expected = format!("{} offsets", self.nodes + 1);
                return Err(StoreError::inconsistent(self.offsets_array.path(), expected, "fewer").into());
            }
        }
        self.offset_at += 1;
        Ok(self.offset_chunk[self.offset_at - 1])
    }

    fn wrong_offset(&self, found: u64) -> SampleError {
        let expected = format!("rising offsets from 0 to {}", self.edges);
        StoreError::inconsistent(self.offsets_array.path(), expected, found).into()
    }
}
