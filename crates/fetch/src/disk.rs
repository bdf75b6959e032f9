//! Feature rows read from the disk as a plan says, straight to their places in a batch.
//!
//! A stored row is never wider than its row of f32, so it lands in the front of its own place and is widened there: no
//! second buffer, whatever the numbers are stored as.

use crate::Result;
use crate::format::{RowFormat, features};
use esker_io::{ChosenBackend, Files, IoCounters, Options, Piece, Queue, ReadChoice};
use esker_plan::{Placement, Placements};
use esker_store::{Dataset, PAYLOAD_OFFSET, StoreError};
use esker_types::NodeId;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::Arc;

/// Rows widened by one thread before it takes the next.
const CHUNK_ROWS: usize = 512;

/// The rows of a dataset on disk. Threads share it; each makes a [`RowReader`] of its own.
pub struct DiskRows {
    files: Files,
    format: RowFormat,
    reads: ReadChoice,
}

impl DiskRows {
    /// Opens the rows of a dataset.
    pub fn open(dataset: &Dataset) -> Result<DiskRows> {
        DiskRows::open_with(dataset, None)
    }

    /// The same, read in blocks of so many bytes at least; `None`: as is fastest here, which is measured.
    pub fn open_with(dataset: &Dataset, block_bytes: Option<u64>) -> Result<DiskRows> {
        let (array, format) = (features(dataset)?, RowFormat::of(dataset)?);
        let open = |options: &Options| dataset.open_files(&[array], options);
        let reads = match block_bytes {
            Some(block_bytes) => ReadChoice::explicit(block_bytes),
            None => ReadChoice::for_rows(open(&Options::default())?, format.row_bytes() as u64),
        };
        Ok(DiskRows { files: open(&reads.options)?, format, reads })
    }

    /// Bytes that a reader takes while it reads up to `rows` rows, however they are read.
    pub fn reader_bytes(rows: u64) -> u64 {
        // Pieces, once here and once in the queue.
        Options::default().memory_bytes(rows) + rows * 2 * size_of::<Piece>() as u64
    }

    /// Which rows are read in one go, and why, for a person.
    pub fn reads_text(&self) -> String {
        self.reads.to_string()
    }

    /// What rows look like.
    pub fn format(&self) -> &RowFormat {
        &self.format
    }

    /// The way the file is read.
    pub fn io_backend(&self) -> &ChosenBackend {
        self.files.io_backend()
    }

    /// A reader for the calling thread.
    pub fn reader(self: &Arc<DiskRows>) -> Result<RowReader> {
        let queue = self.files.queue().map_err(StoreError::from)?;
        Ok(RowReader { rows: self.clone(), queue, pieces: Vec::new() })
    }
}

/// Reads rows. Stays with the thread that made it.
pub struct RowReader {
    rows: Arc<DiskRows>,
    queue: Queue,
    pieces: Vec<Piece>,
}

impl RowReader {
    /// Reads, as stored, every row that placements read, to the front of its place in `values`; the other places stay as
    /// they are. Returns how many were read.
    pub fn read(&mut self, nodes: &[NodeId], placements: &Placements, values: &mut [f32]) -> Result<u64> {
        assert_eq!(nodes.len(), placements.words.len(), "a placement a node");
        self.read_where(nodes, |at| Placement::is_read(placements.words[at]), values)
    }

    /// Reads every row that is not skipped (one mark a node, or none at all), and makes f32 of all with the threads of `pool`.
    pub fn read_all(
        &mut self,
        nodes: &[NodeId],
        skipped: &[bool],
        values: &mut [f32],
        pool: &ThreadPool,
    ) -> Result<()> {
        if !skipped.is_empty() {
            values.fill(0.0);
        }
        self.read_where(nodes, |at| skipped.get(at).is_none_or(|skip| !skip), values)?;
        let format = &self.rows.format;
        if format.dim() > 0 && !format.is_plain() {
            let widen = |piece: &mut [f32]| Widener::new(format).all(piece.chunks_exact_mut(format.dim()));
            pool.install(|| values.par_chunks_mut(CHUNK_ROWS * format.dim()).for_each(widen));
        }
        Ok(())
    }

    fn read_where(
        &mut self,
        nodes: &[NodeId],
        wants: impl Fn(usize) -> bool,
        values: &mut [f32],
    ) -> Result<u64> {
        let format = &self.rows.format;
        format.check(nodes)?;
        assert_eq!(values.len(), nodes.len() * format.dim(), "a row a node");
        let (bytes, place_bytes) = (format.row_bytes() as u64, format.dim() as u64 * 4);
        self.pieces.clear();
        let accessed = nodes.iter().enumerate().filter(|(at, _)| wants(*at));
        self.pieces.extend(accessed.map(|(at, node)| Piece {
            offset: PAYLOAD_OFFSET + node.0 * bytes,
            bytes,
            at: at as u64 * place_bytes,
        }));
        self.queue.read(0, &self.pieces, bytemuck::cast_slice_mut(values)).map_err(StoreError::from)?;
        Ok(self.pieces.len() as u64)
    }

    /// What was read so far.
    pub fn counters(&self) -> IoCounters {
        self.queue.counters()
    }
}

/// Makes f32 of rows that lie, as stored, in the front of their places.
pub(crate) struct Widener<'a> {
    format: &'a RowFormat,
    stored: Vec<u8>,
}

impl<'a> Widener<'a> {
    pub fn new(format: &'a RowFormat) -> Widener<'a> {
        Widener { format, stored: vec![0; format.row_bytes()] }
    }

    pub fn one(&mut self, row: &mut [f32]) {
        let bytes = self.stored.len();
        self.stored.copy_from_slice(&bytemuck::cast_slice::<f32, u8>(row)[..bytes]);
        self.format.convert(&self.stored, row);
    }

    fn all<'r>(mut self, rows: impl Iterator<Item = &'r mut [f32]>) {
        rows.for_each(|row| self.one(row));
    }
}
