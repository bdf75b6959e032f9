//! Feature rows that are read before a device is open: opening one with its own memory takes as long as reading some GB.
//!
//! They are the first rows of the dataset, in ordinary memory. The first layer of inference over the whole graph copies
//! them on their way to the device, instead of reading them from disk.

use crate::memory::early_bytes;
use crate::{EvaluationMode, Result, RunConfig};
use esker_fetch::RowFormat;
use esker_io::{Options, Piece};
use esker_store::{Dataset, PAYLOAD_OFFSET, StoreError, file};
use esker_strategies::{InputTable, StrategyKind};
use esker_types::NodeId;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Threads that read: one alone does not keep a disk busy.
const READERS: u64 = 4;
/// Bytes of rows read at a time. The allocator gives blocks of this size back when they are freed. Unit tests have small
/// graphs.
const CHUNK_BYTES: u64 = if cfg!(test) { 4 << 10 } else { 48 << 20 };

/// Rows that are being read. Reading ends when the last clone is dropped.
#[derive(Clone)]
pub struct EarlyRows(Arc<Reading>);

struct Reading {
    threads: Mutex<Vec<JoinHandle<Vec<EarlyChunk>>>>,
    chunks: Arc<EarlyChunks>,
}

/// The number of a chunk, and its rows.
type EarlyChunk = (u64, Vec<f32>);

/// What is to be read.
struct EarlyChunks {
    dataset: Dataset,
    count: u64,
    /// Rows of each but the last.
    rows: u64,
    dim: usize,
    nodes: u64,
    /// The next one that nobody reads yet.
    next: AtomicU64,
    stop: AtomicBool,
}

impl EarlyChunks {
    /// Reads chunks until all are read, or reading ends. Those that fail are left out: whoever reads them again reports
    /// the error.
    fn read(&self) -> Vec<EarlyChunk> {
        let mut found = Vec::new();
        let _ = self.read_into(&mut found);
        found
    }

    fn read_into(&self, found: &mut Vec<EarlyChunk>) -> Result<()> {
        let Some(array) = self.dataset.array(file::NODE_FEATURES) else { return Ok(()) };
        let mut queue = array.open_files(&Options::default())?.queue().map_err(StoreError::from)?;
        let row_bytes = self.dim as u64 * 4;
        while !self.stop.load(Relaxed) {
            let number = self.next.fetch_add(1, Relaxed);
            if number >= self.count {
                break;
            }
            let first = number * self.rows;
            let rows = self.rows.min(self.nodes - first);
            let mut values = vec![0.0; rows as usize * self.dim];
            let piece = Piece { offset: PAYLOAD_OFFSET + first * row_bytes, bytes: rows * row_bytes, at: 0 };
            queue.read(0, &[piece], bytemuck::cast_slice_mut(&mut values)).map_err(StoreError::from)?;
            found.push((number, values));
        }
        Ok(())
    }
}

impl EarlyRows {
    /// Starts to read for inference over the whole graph, with a part of the memory of the run. `None` if its strategy
    /// has rows in memory anyway, if they are not stored as f32, or if there is little memory.
    pub fn start(config: &RunConfig) -> Option<EarlyRows> {
        let has_rows = matches!(config.strategy, StrategyKind::Memory | StrategyKind::Mmap);
        let of_features = config.embeddings.is_none() && config.link.is_none() && config.model.layers > 0;
        if has_rows || !of_features || config.final_eval != EvaluationMode::Full {
            return None;
        }
        // Whatever is wrong with the dataset is reported when the run is opened.
        let dataset = Dataset::open(&config.dataset).ok()?;
        let format = RowFormat::of(&dataset).ok().filter(|format| format.is_plain() && format.dim() > 0)?;
        let (row_bytes, nodes, dim) = (format.row_bytes() as u64, format.rows(), format.dim());
        let rows = (CHUNK_BYTES / row_bytes).max(1);
        let queues = READERS * Options::default().memory_bytes(1);
        let bytes = early_bytes(config, &dataset).saturating_sub(queues);
        let count = (bytes / (rows * row_bytes)).min(nodes.div_ceil(rows));
        let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let chunks = Arc::new(EarlyChunks { dataset, count, rows, dim, nodes, next, stop });
        let read = |_| {
            let chunks = chunks.clone();
            Builder::new().name("early".to_string()).spawn(move || chunks.read()).ok()
        };
        let threads: Vec<_> = (0..READERS.min(count)).filter_map(read).collect();
        (!threads.is_empty()).then(|| EarlyRows(Arc::new(Reading { threads: Mutex::new(threads), chunks })))
    }

    /// The most bytes that it has.
    pub(crate) fn most_bytes(&self) -> u64 {
        let chunks = &self.0.chunks;
        chunks.count * chunks.rows * chunks.dim as u64 * 4
    }

    /// Ends reading, and takes what was read.
    pub(crate) fn take(&self) -> ReadEarly {
        self.found(self.0.end())
    }

    /// Waits until everything is read.
    #[cfg(test)]
    pub(crate) fn complete(&self) -> ReadEarly {
        self.found(self.0.join())
    }

    fn found(&self, read: Vec<EarlyChunk>) -> ReadEarly {
        let chunks = &self.0.chunks;
        let mut found = vec![Vec::new(); chunks.count as usize];
        for (number, rows) in read {
            found[number as usize] = rows;
        }
        ReadEarly { chunks: found, rows: chunks.rows as usize, dim: chunks.dim }
    }
}

impl Reading {
    /// Ends reading.
    fn end(&self) -> Vec<EarlyChunk> {
        self.chunks.stop.store(true, Relaxed);
        self.join()
    }

    fn join(&self) -> Vec<EarlyChunk> {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.end();
    }
}

/// Rows that were read.
pub(crate) struct ReadEarly {
    /// Empty ones were not read.
    chunks: Vec<Vec<f32>>,
    /// Rows of a chunk.
    rows: usize,
    dim: usize,
}

impl ReadEarly {
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| size_of_val(&chunk[..]) as u64).sum()
    }

    /// Frees the last chunk.
    pub fn drop_last(&mut self) {
        self.chunks.pop();
    }

    fn row(&self, node: NodeId) -> Option<&[f32]> {
        let chunk = self.chunks.get(node.index() / self.rows)?;
        chunk.get(node.index() % self.rows * self.dim..)?.get(..self.dim)
    }

    /// A table whose readers take these rows from here, and others from `table`.
    pub fn before(self, table: InputTable) -> InputTable {
        assert_eq!(self.dim, table.dim(), "rows of features");
        let (nodes, dim, early, table) = (table.nodes(), self.dim, Arc::new(self), Arc::new(table));
        InputTable::new(nodes, dim, move || {
            let (early, table, mut read) = (early.clone(), table.clone(), None);
            Ok(Box::new(move |nodes, values| {
                // Nodes are usually consecutive, and the first rows were read first.
                let mut copied = 0;
                for (node, values) in nodes.iter().zip(values.chunks_exact_mut(dim)) {
                    let Some(row) = early.row(*node) else { break };
                    values.copy_from_slice(row);
                    copied += 1;
                }
                if copied == nodes.len() {
                    return Ok(());
                }
                let read = match &mut read {
                    Some(read) => read,
                    none => none.insert(table.reader()?),
                };
                read(&nodes[copied..], &mut values[copied * dim..])
            }))
        })
    }
}
