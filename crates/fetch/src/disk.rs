//! Reads feature rows from disk as a plan specifies, directly to their rows of a batch.
//!
//! A stored row is never wider than its f32 row. So it is read to the start of its f32 row and widened there, without a
//! second buffer, for every stored type.

use crate::Result;
use crate::format::{RowFormat, features};
use esker_io::{ChosenBackend, Files, IoCounters, Options, Piece, Queue, ReadChoice};
use esker_plan::{Placement, Placements};
use esker_store::{Dataset, PAYLOAD_OFFSET, StoreError};
use esker_types::NodeId;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::Arc;

/// Rows per parallel task.
const CHUNK_ROWS: usize = 512;

/// The feature rows of a dataset on disk. Threads share it; each makes its own [`RowReader`].
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

    /// The same, with reads of at least `block_bytes` bytes. `None`: the fastest way, which is measured.
    pub fn open_with(dataset: &Dataset, block_bytes: Option<u64>) -> Result<DiskRows> {
        let (array, format) = (features(dataset)?, RowFormat::of(dataset)?);
        let open = |options: &Options| dataset.open_files(&[array], options);
        let reads = match block_bytes {
            Some(block_bytes) => ReadChoice::explicit(block_bytes),
            None => ReadChoice::for_rows(open(&Options::default())?, format.row_bytes() as u64),
        };
        Ok(DiskRows { files: open(&reads.options)?, format, reads })
    }

    /// Bytes that a reader takes to read up to `rows` rows, with any I/O backend.
    pub fn reader_bytes(rows: u64) -> u64 {
        // Pieces, once here and once in the queue.
        Options::default().memory_bytes(rows) + rows * 2 * size_of::<Piece>() as u64
    }

    /// A readable text: which rows are read together, and why.
    pub fn reads_text(&self) -> String {
        self.reads.to_string()
    }

    /// The format of the rows.
    pub fn format(&self) -> &RowFormat {
        &self.format
    }

    /// The I/O backend in use.
    pub fn io_backend(&self) -> &ChosenBackend {
        self.files.io_backend()
    }

    /// A reader for the calling thread.
    pub fn reader(self: &Arc<DiskRows>) -> Result<RowReader> {
        let queue = self.files.queue().map_err(StoreError::from)?;
        Ok(RowReader { rows: self.clone(), queue, pieces: Vec::new() })
    }
}

/// Reads feature rows. It stays on the thread that made it.
pub struct RowReader {
    rows: Arc<DiskRows>,
    queue: Queue,
    pieces: Vec<Piece>,
}

impl RowReader {
    /// Reads every row whose placement is a read, as stored, to the start of its row in `values`. Other rows stay
    /// unchanged. Returns how many rows were read.
    pub fn read(&mut self, nodes: &[NodeId], placements: &Placements, values: &mut [f32]) -> Result<u64> {
        assert_eq!(nodes.len(), placements.words.len(), "a placement a node");
        self.read_selected(nodes, |at| Placement::is_read(placements.words[at]), values)
    }

    /// Reads every row that is not skipped and converts all to f32 with the threads of `pool`. `skipped` has one mark
    /// per node, or is empty.
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
        self.read_selected(nodes, |at| skipped.get(at).is_none_or(|skip| !skip), values)?;
        let format = &self.rows.format;
        if format.dim() > 0 && !format.is_plain() {
            let widen = |piece: &mut [f32]| Widener::new(format).all(piece.chunks_exact_mut(format.dim()));
            pool.install(|| values.par_chunks_mut(CHUNK_ROWS * format.dim()).for_each(widen));
        }
        Ok(())
    }

    fn read_selected(
        &mut self,
        nodes: &[NodeId],
        wants: impl Fn(usize) -> bool,
        values: &mut [f32],
    ) -> Result<u64> {
        let format = &self.rows.format;
        format.check(nodes)?;
        assert_eq!(values.len(), nodes.len() * format.dim(), "a row a node");
        let (bytes, f32_row_bytes) = (format.row_bytes() as u64, format.dim() as u64 * 4);
        self.pieces.clear();
        let accessed = nodes.iter().enumerate().filter(|(at, _)| wants(*at));
        self.pieces.extend(accessed.map(|(at, node)| Piece {
            offset: PAYLOAD_OFFSET + node.0 * bytes,
            bytes,
            at: at as u64 * f32_row_bytes,
        }));
        self.queue.read(0, &self.pieces, bytemuck::cast_slice_mut(values)).map_err(StoreError::from)?;
        Ok(self.pieces.len() as u64)
    }

    /// Counters so far.
    pub fn counters(&self) -> IoCounters {
        self.queue.counters()
    }
}

/// Converts stored rows at the start of their f32 rows to f32, in place.
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
