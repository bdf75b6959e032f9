//! Rows of every node: the input of a layer. They are on the device, or they are read when they are needed, from the
//! strategy or from a file, while other rows are computed with.

use crate::{Learner, Result, TrainError};
use esker_fetch::pipeline::caught;
use esker_io::{Options, Piece};
use esker_nn::{Device, HostRows, LinkMath, Shape};
use esker_store::{ArrayFile, ArrayWriter, FileEntry, Journal, PAYLOAD_OFFSET, StoreError};
use esker_strategies::{InputTable, ReadInputRows};
use esker_types::{Dtype, NodeId};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// Rows of a file are written through a buffer of this size.
pub(crate) const COPY_BYTES: u64 = 1 << 20;
/// Requests that may be open at a time: two are read while the rows of another are in use.
pub(super) const OPEN_REQUESTS: usize = 3;
/// Readers, if memory allows. While the last reads of one end, the other keeps the disk busy.
pub(super) const MOST_READERS: usize = 2;
/// Bytes between safe points of a file.
const SAFE_BYTES: u64 = 1 << 30;

/// Bytes that inference has read and written so far.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// Rows read, in bytes as f32.
    pub rows_read: AtomicU64,
    /// Rows written, in bytes.
    pub rows_written: AtomicU64,
}

/// Rows of every node.
pub(super) enum Table<B: Device> {
    /// On the device.
    Resident(B::Matrix),
    /// To be read.
    Stored(StoredTable),
}

/// Rows that are read when they are needed.
#[derive(Clone)]
pub(crate) struct StoredTable {
    pub columns: usize,
    from: StoredIn,
}

#[derive(Clone)]
enum StoredIn {
    Input(Arc<InputTable>),
    File(Arc<ArrayFile>),
}

impl StoredTable {
    /// The rows that the first layer reads.
    pub fn input(table: InputTable) -> StoredTable {
        StoredTable { columns: table.dim(), from: StoredIn::Input(Arc::new(table)) }
    }

    /// A finished file of rows.
    pub fn file(directory: &Path, entry: &FileEntry) -> Result<StoredTable> {
        let array = ArrayFile::open(directory, entry)?;
        Ok(StoredTable { columns: entry.columns as usize, from: StoredIn::File(Arc::new(array)) })
    }

    /// Whether rows are stored in the order of nodes.
    pub fn is_by_node(&self) -> bool {
        match &self.from {
            StoredIn::Input(table) => table.is_by_node(),
            StoredIn::File(_) => true,
        }
    }

    /// The nodes whose rows are at `count` positions from `first` on, in the order in which they are stored.
    pub fn nodes_at(&self, first: u64, count: u64, nodes: &mut Vec<NodeId>) {
        match &self.from {
            StoredIn::Input(table) => table.nodes_at(first, count, nodes),
            StoredIn::File(_) => {
                nodes.clear();
                nodes.extend((first..first + count).map(NodeId));
            }
        }
    }

    /// The position of a node's row in this order.
    pub fn position(&self, node: NodeId) -> u64 {
        match &self.from {
            StoredIn::Input(table) => table.position(node),
            StoredIn::File(_) => node.0,
        }
    }

    /// Memory of reading this many rows at a time, apart from the rows.
    pub fn reader_bytes(rows: u64) -> u64 {
        // Ids of the rows that are read and of those that are next, pieces here and in the queue.
        rows * (3 * 8 + 2 * size_of::<Piece>() as u64) + Options::default().memory_bytes(rows)
    }
}

/// The rows that are requested.
pub(crate) enum Wanted {
    /// `count` rows from `first` on.
    Range { first: u64, count: usize },
    /// The rows of these nodes.
    Nodes(Vec<NodeId>),
}

impl Wanted {
    fn count(&self) -> usize {
        match self {
            Wanted::Range { count, .. } => *count,
            Wanted::Nodes(nodes) => nodes.len(),
        }
    }
}

/// Reads rows on threads of its own. Readers take requests in turn, and rows come back in the order of requests.
pub(crate) struct RowService<B: Device> {
    readers: Vec<TableThread<B>>,
    columns: usize,
    /// Requests so far, and those whose rows were received.
    requested: usize,
    received: usize,
}

impl<B: LinkMath> RowService<B> {
    pub fn start(
        table: &StoredTable,
        backend: &B,
        traffic: &Arc<Traffic>,
        readers: usize,
    ) -> Result<RowService<B>> {
        let start = |_| TableThread::start(table, backend, traffic);
        let readers = (0..readers.max(1)).map(start).collect::<Result<Vec<_>>>()?;
        Ok(RowService { readers, columns: table.columns, requested: 0, received: 0 })
    }

    /// Requests rows. At most [`OPEN_REQUESTS`] may be open for each reader.
    pub fn request(&mut self, wanted: Wanted) {
        let reader = &self.readers[self.requested % self.readers.len()];
        // The thread ends only after this sender is dropped.
        let _ = reader.requests.as_ref().map(|requests| requests.send(wanted));
        self.requested += 1;
    }

    /// Receives the rows of the oldest open request.
    pub fn receive(&mut self) -> Result<B::HostRows> {
        let reader = &self.readers[self.received % self.readers.len()];
        self.received += 1;
        let received = reader.rows.as_ref().and_then(|rows| rows.recv().ok());
        received.expect("the thread answers every request")
    }

    /// Requests rows, waits for them and uploads them.
    pub fn fetch(&mut self, backend: &B, wanted: Wanted) -> Result<B::Matrix> {
        self.request(wanted);
        self.take(backend)
    }

    /// Receives rows and uploads them.
    pub fn take(&mut self, backend: &B) -> Result<B::Matrix> {
        Ok(backend.upload(self.receive()?, self.columns))
    }
}

/// Reads rows on a thread, in the order of requests.
struct TableThread<B: Device> {
    requests: Option<SyncSender<Wanted>>,
    rows: Option<Receiver<Result<B::HostRows>>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: LinkMath> TableThread<B> {
    fn start(table: &StoredTable, backend: &B, traffic: &Arc<Traffic>) -> Result<TableThread<B>> {
        let (requests, wanted) = sync_channel::<Wanted>(OPEN_REQUESTS);
        let (send, rows) = sync_channel(OPEN_REQUESTS);
        let (columns, from) = (table.columns, table.from.clone());
        let (backend, traffic) = (backend.clone(), traffic.clone());
        let work = move || {
            let mut reader = None;
            while let Ok(wanted) = wanted.recv() {
                let read = caught("rows", || {
                    // A queue stays on its thread, so it is made here.
                    let reader = match &mut reader {
                        Some(reader) => reader,
                        none => none.insert(TableReader::open(&from)?),
                    };
                    let mut rows = backend.host_rows(wanted.count(), columns);
                    reader.read(&wanted, columns, rows.values_mut())?;
                    traffic.rows_read.fetch_add((wanted.count() * columns * 4) as u64, Relaxed);
                    Ok(rows)
                });
                if send.send(read).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name("rows".to_string()).spawn(work);
        let thread = thread.map_err(|source| TrainError::Thread { source })?;
        Ok(TableThread { requests: Some(requests), rows: Some(rows), thread: Some(thread) })
    }
}

impl<B: Device> Drop for TableThread<B> {
    fn drop(&mut self) {
        // Without these two, the thread ends.
        (self.requests, self.rows) = (None, None);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

enum TableReader {
    Input { read: ReadInputRows, nodes: Vec<NodeId> },
    File { queue: Box<esker_io::Queue>, pieces: Vec<Piece> },
}

impl TableReader {
    fn open(from: &StoredIn) -> Result<TableReader> {
        Ok(match from {
            StoredIn::Input(table) => TableReader::Input { read: table.reader()?, nodes: Vec::new() },
            StoredIn::File(array) => {
                let queue = array.open_files(&Options::default())?.queue().map_err(StoreError::from)?;
                TableReader::File { queue: Box::new(queue), pieces: Vec::new() }
            }
        })
    }

    fn read(&mut self, wanted: &Wanted, columns: usize, values: &mut [f32]) -> Result<()> {
        match self {
            TableReader::Input { read, nodes } => match wanted {
                Wanted::Nodes(nodes) => read(nodes, values)?,
                Wanted::Range { first, count } => {
                    nodes.clear();
                    nodes.extend((*first..first + *count as u64).map(NodeId));
                    read(nodes, values)?;
                }
            },
            TableReader::File { queue, pieces } => {
                pieces.clear();
                let bytes = columns as u64 * 4;
                let mut add = |node: u64, at: u64, rows: u64| {
                    let offset = PAYLOAD_OFFSET + node * bytes;
                    pieces.push(Piece { offset, bytes: rows * bytes, at: at * bytes });
                };
                match wanted {
                    Wanted::Nodes(nodes) => nodes.iter().zip(0..).for_each(|(node, at)| add(node.0, at, 1)),
                    Wanted::Range { first, count } => add(*first, 0, *count as u64),
                }
                queue.read(0, pieces, bytemuck::cast_slice_mut(values)).map_err(StoreError::from)?;
            }
        }
        Ok(())
    }
}

/// The destination of rows, node after node.
pub(super) enum TableWriter<B: Device> {
    /// A matrix on the device, and the rows in it so far.
    Resident(B::Matrix, usize),
    /// A file.
    File(Box<FileWriter>),
}

/// A file of rows in the making. It can be resumed after a kill.
pub(super) struct FileWriter {
    directory: PathBuf,
    writer: ArrayWriter,
    journal: Arc<Journal>,
    step: String,
    columns: usize,
    /// Bytes of whole tiles, and those that are safe.
    tile_bytes: u64,
    safe_bytes: u64,
    traffic: Arc<Traffic>,
}

/// A file as the journal has it.
#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct FileState {
    /// Rows that are safe.
    pub rows: u64,
    /// What it is, once it is finished.
    pub entry: Option<FileEntry>,
}

impl FileWriter {
    /// Starts a file, or resumes it after the rows that are safe. Returns how many those are.
    pub fn open(
        directory: &Path,
        journal: &Arc<Journal>,
        step: &str,
        columns: usize,
        traffic: &Arc<Traffic>,
    ) -> Result<(FileWriter, u64)> {
        let rows = journal.done::<FileState>(step).map_or(0, |state| state.rows);
        let writer = ArrayWriter::resume(directory, step, Dtype::F32, columns as u64, rows)?;
        let (directory, step) = (directory.to_path_buf(), step.to_string());
        let (journal, traffic, safe_bytes) = (journal.clone(), traffic.clone(), writer.payload_bytes());
        let tile_bytes = safe_bytes;
        Ok((FileWriter { directory, writer, journal, step, columns, tile_bytes, safe_bytes, traffic }, rows))
    }

    fn append(&mut self, values: &[f32]) -> Result<()> {
        self.writer.write_elements(values)?;
        self.traffic.rows_written.fetch_add(size_of_val(values) as u64, Relaxed);
        Ok(())
    }

    /// After a whole tile: makes it safe, if enough was written since.
    fn end_tile(&mut self) -> Result<()> {
        self.tile_bytes = self.writer.payload_bytes();
        if self.tile_bytes - self.safe_bytes >= SAFE_BYTES {
            self.make_safe()?;
        }
        Ok(())
    }

    /// Makes the whole tiles so far safe. A write that failed may have left a part of one.
    fn make_safe(&mut self) -> Result<()> {
        self.writer.checkpoint()?;
        self.safe_bytes = self.tile_bytes;
        let rows = self.safe_bytes / (self.columns as u64 * 4).max(1);
        Ok(self.journal.record(&self.step, &FileState { rows, entry: None })?)
    }

    fn finish(self) -> Result<StoredTable> {
        let entry = self.writer.finish()?;
        let state = FileState { rows: entry.rows, entry: Some(entry) };
        self.journal.record(&self.step, &state)?;
        let entry = state.entry.as_ref().expect("set above");
        StoredTable::file(&self.directory, entry)
    }
}

impl<B: LinkMath> TableWriter<B> {
    /// Appends the rows of a tile.
    pub fn append(&mut self, learner: &Learner<B>, rows: &B::Matrix) -> Result<()> {
        let (count, columns) = (rows.rows(), rows.columns());
        match self {
            TableWriter::Resident(table, filled) => {
                let places: Vec<u32> = (*filled as u32..(*filled + count) as u32).collect();
                learner.compute(|| learner.backend().scatter_rows(Some(rows), &places, table));
                *filled += count;
                Ok(())
            }
            TableWriter::File(file) => {
                let most = (COPY_BYTES as usize / (4 * columns).max(1)).max(1);
                let mut copy = vec![0.0; most.min(count) * columns];
                for first in (0..count).step_by(most) {
                    let copy = &mut copy[..most.min(count - first) * columns];
                    learner.read(rows, first, copy)?;
                    file.append(copy)?;
                }
                file.end_tile()
            }
        }
    }

    /// Makes what was written safe, for a run that stops.
    pub fn keep(&mut self) -> Result<()> {
        match self {
            TableWriter::Resident(..) => Ok(()),
            TableWriter::File(file) => file.make_safe(),
        }
    }

    pub fn finish(self) -> Result<Table<B>> {
        Ok(match self {
            TableWriter::Resident(table, _) => Table::Resident(table),
            TableWriter::File(file) => Table::Stored(file.finish()?),
        })
    }
}
