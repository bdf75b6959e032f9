//! Learned rows of the resident partitions, in slots of a table on the device. Partitions are swapped between two steps:
//! a partition that enters was read before, and one that leaves is written while training goes on.
//!
//! Updates have a fixed lag: a batch reads what batches up to itself less the lag have changed. At the end of a step all
//! updates are applied, so a slot is free when its partition leaves.

use super::steps::{StepSequence, StepVisit};
use crate::batch::LiveSource;
use crate::embeddings::on;
use crate::updates::{UPDATES, WaitingUpdates};
use crate::{
    CheckpointReader, CheckpointSink, Feedback, InputTable, Job, LiveTable, Result, RowTraining, SavedState,
    StrategyError,
};
use esker_device::{Device, Shape};
use esker_fetch::partitions::{
    InitialRows, PartitionFiles, PartitionReader, PartitionRowStream, PartitionVersion, RowFileShape,
    StreamCounters, mark_slots, split_nodes,
};
use esker_sample::{BufferRows, NodePartitions, Position};
use esker_types::{NodeId, PartitionId};
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::iter::Peekable;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names of the state in a checkpoint, and of files.
const PARTITIONS: &str = "embedding-partitions";
const FILES: &str = "embeddings";
/// Nodes whose rows are looked for at a time.
const READ_NODES: usize = 1 << 12;

/// Memory of reading rows of nodes, apart from the rows, where a partition has `largest` nodes of `node_bytes`, of which
/// `row_bytes` are the row.
pub(super) fn reading_bytes(largest: u64, node_bytes: u64, row_bytes: u64) -> u64 {
    // Lists of nodes and of their rows, which grow by doubling; rows that are copied from the buffer.
    let each = 2 * (4 + 8 + 16) + 2 * row_bytes;
    let reader = PartitionReader::memory_bytes(READ_NODES as u64, largest.saturating_mul(node_bytes));
    each * READ_NODES as u64 + reader
}

/// Rows by partition as a checkpoint names them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedTable {
    /// Which nodes are in which partition.
    partitions: String,
    /// Numbers per row.
    dim: usize,
    /// The states of the optimizer.
    states: Vec<String>,
    /// Updates so far.
    updates: u64,
    /// The file of each partition; none for those with their initial rows.
    versions: Vec<Option<PartitionVersion>>,
}

/// What a table is opened with.
pub(super) struct TableParts<'a, D: Device> {
    pub device: &'a D,
    pub training: &'a Arc<dyn RowTraining<D>>,
    pub partitions: &'a Arc<NodePartitions>,
}

/// Rows by partition, on disk, and updates so far.
struct OpenFiles {
    files: Arc<PartitionFiles>,
    updates: u64,
}

impl<D: Device> TableParts<'_, D> {
    /// The rows as they begin, or those of a checkpoint.
    fn files(&self, job: &Job, state: &mut Option<&mut dyn CheckpointReader>) -> Result<OpenFiles> {
        let (training, partitions) = (self.training, self.partitions);
        let states: Vec<String> = training.state_names().iter().map(|name| name.to_string()).collect();
        let saved = match state.as_deref_mut() {
            Some(state) => read_saved(state)?,
            None => None,
        };
        if let Some(saved) = &saved {
            let expected = (partitions.identity(), training.dim(), states.clone());
            let found = (saved.partitions.clone(), saved.dim, saved.states.clone());
            if expected != found || saved.versions.len() != partitions.count() as usize {
                return Err(StrategyError::OtherPartitions {
                    expected: format!("{} x {} ({})", expected.0, expected.1, expected.2.join(", ")),
                    found: format!("{} x {} ({})", found.0, found.1, found.2.join(", ")),
                });
            }
        }
        let shape = RowFileShape { dim: training.dim(), matrices: 1 + states.len() };
        let rows = training.clone();
        let initial: InitialRows = Arc::new(move |nodes: &[NodeId], values: &mut [f32]| {
            rows.initial_rows(nodes, values).map_err(|error| error.to_string())
        });
        let updates = saved.as_ref().map_or(0, |saved| saved.updates);
        let versions = saved.map(|saved| saved.versions);
        let folder = &job.out_of_core.tables;
        let files = PartitionFiles::open(folder, FILES, partitions, shape, versions, initial, &job.pool);
        Ok(OpenFiles { files: Arc::new(files), updates })
    }
}

/// What a checkpoint has of rows by partition.
fn read_saved(state: &mut dyn CheckpointReader) -> Result<Option<SavedTable>> {
    let refused = |source| StrategyError::EmbeddingState { name: PARTITIONS, source };
    let Some(SavedState::Bytes(mut from)) = state.take(PARTITIONS)? else { return Ok(None) };
    let mut text = Vec::new();
    from.read_to_end(&mut text).map_err(refused)?;
    drop(from);
    let saved: SavedTable = serde_json::from_slice(&text).map_err(|error| refused(error.into()))?;
    for (partition, version) in saved.versions.iter().enumerate() {
        if version.is_some() {
            state.take(&part_name(partition))?;
        }
    }
    Ok(Some(saved))
}

fn part_name(partition: usize) -> String {
    format!("embedding-partition-{partition}")
}

/// The table of a run that trains.
struct PartitionBuffer<D: Device> {
    stream: PartitionRowStream,
    state: Vec<D::Matrix>,
    /// The partition of every slot, and whether it changed since it was read or written.
    held: Vec<Option<PartitionId>>,
    changed: Vec<bool>,
    rows: Option<BufferRows>,
    waiting: WaitingUpdates<D>,
    updates: u64,
    /// Bytes that checkpoints wrote.
    flushed_bytes: u64,
    sequence: Peekable<StepSequence>,
    current: Option<StepVisit>,
}

/// Rows of resident partitions, shared by training and evaluation.
pub(super) struct PartitionTable<D: Device> {
    device: D,
    training: Arc<dyn RowTraining<D>>,
    files: Arc<PartitionFiles>,
    table: Arc<LiveTable<D>>,
    /// The threads that compute, if the device has none of its own.
    threads: Option<Arc<ThreadPool>>,
    lag: usize,
    /// `None` if nothing trains: all rows are on disk.
    buffer: Mutex<Option<PartitionBuffer<D>>>,
}

impl<D: Device> PartitionTable<D> {
    /// The table of a run from a position on. `buffers` partitions may be on their way.
    pub fn open(
        parts: &TableParts<'_, D>,
        job: &Job,
        from: Position,
        (slots, buffers): (usize, usize),
        state: &mut Option<&mut dyn CheckpointReader>,
    ) -> Result<Arc<PartitionTable<D>>> {
        let OpenFiles { files, updates } = parts.files(job, state)?;
        let shape = files.shape();
        let rows = slots * parts.partitions.largest() as usize;
        if rows > u32::MAX as usize {
            return Err(StrategyError::EmbeddingRows { nodes: rows as u64 });
        }
        let made = || parts.device.matrix(rows, shape.dim);
        let table = made();
        let others: Vec<D::Matrix> = (1..shape.matrices).map(|_| made()).collect();
        parts.device.check()?;
        let sequence = StepSequence::new(job, from).peekable();
        let mut buffer = PartitionBuffer {
            stream: PartitionRowStream::start(&files, buffers),
            state: others,
            held: vec![None; slots],
            changed: vec![false; slots],
            rows: None,
            waiting: WaitingUpdates::new(job.out_of_core.update_lag()),
            updates,
            flushed_bytes: 0,
            sequence,
            current: None,
        };
        if let Some(rows) = buffer.rows_of_updates(parts.partitions) {
            let slots_of = |nodes: &[NodeId]| Ok(rows.rows_of(nodes)?);
            buffer.waiting.restore(parts.device, shape.dim, state, slots_of)?;
        }
        buffer.prefetch()?;
        Ok(PartitionTable::new(parts, job, files, table, Some(buffer)))
    }

    /// The table of a model that does not train any more.
    pub fn of_model(
        parts: &TableParts<'_, D>,
        job: &Job,
        state: &mut Option<&mut dyn CheckpointReader>,
    ) -> Result<Arc<PartitionTable<D>>> {
        let OpenFiles { files, .. } = parts.files(job, state)?;
        if let Some(state) = state.as_deref_mut() {
            state.take(UPDATES)?;
        }
        let table = parts.device.matrix(0, files.shape().dim);
        Ok(PartitionTable::new(parts, job, files, table, None))
    }

    fn new(
        parts: &TableParts<'_, D>,
        job: &Job,
        files: Arc<PartitionFiles>,
        table: D::Matrix,
        buffer: Option<PartitionBuffer<D>>,
    ) -> Arc<PartitionTable<D>> {
        Arc::new(PartitionTable {
            device: parts.device.clone(),
            training: parts.training.clone(),
            files,
            table: LiveTable::new(table),
            threads: parts.device.in_host_memory().then(|| job.pool.clone()),
            lag: job.out_of_core.update_lag(),
            buffer: Mutex::new(buffer),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<PartitionBuffer<D>>> {
        // A panic while it was locked has ended the run.
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows that batches name.
    pub fn live(&self) -> &Arc<LiveTable<D>> {
        &self.table
    }

    /// See [`BatchSource::lag`](crate::BatchSource::lag).
    pub fn lag(&self) -> usize {
        self.lag
    }

    /// Numbers per row.
    pub fn dim(&self) -> usize {
        self.files.shape().dim
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u64 {
        self.files.partitions().nodes()
    }

    /// Its counters.
    pub fn counters(&self) -> StreamCounters {
        let locked = self.lock();
        let Some(buffer) = &*locked else { return StreamCounters::default() };
        let streamed = buffer.stream.counters();
        StreamCounters { bytes_written: streamed.bytes_written + buffer.flushed_bytes, ..streamed }
    }

    /// Makes the partitions of a batch resident, before it is trained on.
    pub fn begin(&self, at: Position) -> Result<()> {
        let mut locked = self.lock();
        let Some(buffer) = locked.as_mut() else { return Ok(()) };
        while buffer.current.as_ref().is_none_or(|current| !current.has(at)) {
            let Some(visit) = buffer.sequence.next() else {
                return Err(StrategyError::Ended { at: Box::new(at.into()) });
            };
            // What a checkpoint left waiting belongs to the step that begins now.
            if buffer.current.is_some() {
                self.apply_waiting(buffer, true)?;
            }
            self.swap(buffer, visit)?;
        }
        Ok(())
    }

    fn swap(&self, buffer: &mut PartitionBuffer<D>, visit: StepVisit) -> Result<()> {
        for swap in &visit.swaps {
            let slot = swap.slot as usize;
            let (enters, mut rows) = buffer.stream.take()?;
            assert_eq!(enters, swap.enters, "partitions are read in the order of swaps");
            self.exchange(buffer, slot, bytemuck::cast_slice_mut(&mut rows[..self.files.numbers() * 4]))?;
            let changed = std::mem::take(&mut buffer.changed[slot]);
            match buffer.held[slot].replace(enters).filter(|_| changed) {
                Some(left) => buffer.stream.write(left, buffer.updates, rows)?,
                None => buffer.stream.free(rows)?,
            }
        }
        buffer.rows = Some(BufferRows::new(self.files.partitions(), &visit.resident));
        buffer.current = Some(visit);
        buffer.prefetch()
    }

    /// Rows of a slot for those of a partition that was read, and the other way round.
    fn exchange(&self, buffer: &mut PartitionBuffer<D>, slot: usize, values: &mut [f32]) -> Result<()> {
        let rows = self.files.partitions().largest() as usize;
        let (device, table, state) = (&self.device, &self.table, &mut buffer.state);
        on(&self.threads, || {
            let mut parts = values.chunks_exact_mut(rows * self.files.shape().dim);
            if let Some(part) = parts.next() {
                device.exchange(&mut table.lock(), slot * rows, part);
            }
            parts.zip(state).for_each(|(part, state)| device.exchange(state, slot * rows, part));
        });
        Ok(self.device.check()?)
    }

    /// Takes the feedback of a batch. Its update is applied once as many batches as the lag have followed, or at the end
    /// of the step.
    pub fn apply(&self, feedback: &mut Feedback<D>) -> Result<()> {
        let mut locked = self.lock();
        let Some(buffer) = locked.as_mut() else { return Ok(()) };
        buffer.waiting.push(feedback.input_gradient.take().zip(feedback.rate));
        let at = feedback.at.position();
        let ends = buffer.current.as_ref().is_some_and(|current| current.is_last(at));
        self.apply_waiting(buffer, ends)
    }

    /// Applies the updates whose turn it is.
    fn apply_waiting(&self, buffer: &mut PartitionBuffer<D>, ends: bool) -> Result<()> {
        while let Some((gradient, rate)) = buffer.waiting.next(ends) {
            buffer.updates += 1;
            mark_slots(&gradient.slots, self.files.partitions().largest(), &mut buffer.changed);
            let (training, device, table, step) = (&self.training, &self.device, &self.table, buffer.updates);
            let state = &mut buffer.state;
            on(&self.threads, || training.update(device, &mut table.lock(), state, &gradient, rate, step))?;
        }
        Ok(())
    }

    /// Writes what changed, and names the current file of every partition.
    pub fn save(&self, to: &mut dyn CheckpointSink, trains_on: bool) -> Result<()> {
        let mut locked = self.lock();
        let Some(buffer) = locked.as_mut() else { return Ok(()) };
        buffer.stream.settle()?;
        self.flush(buffer)?;
        self.files.sync()?;
        let saved = SavedTable {
            partitions: self.files.partitions().identity(),
            dim: self.dim(),
            states: self.training.state_names().iter().map(|name| name.to_string()).collect(),
            updates: buffer.updates,
            versions: self.files.keep_versions(),
        };
        let text = serde_json::to_vec(&saved).expect("versions are plain data");
        to.bytes(PARTITIONS, &mut |to: &mut dyn Write| to.write_all(&text))?;
        for (partition, version) in (0..).zip(&saved.versions) {
            if let Some(PartitionVersion { version, .. }) = version {
                let name = self.files.file_name(PartitionId(partition), *version);
                to.file(&part_name(partition as usize), Path::new(&name), *version)?;
            }
        }
        match buffer.rows_of_updates(self.files.partitions()).filter(|_| trains_on) {
            Some(rows) => buffer.waiting.save(&self.device, self.dim(), to, |slots| rows.nodes_of(slots)),
            None => Ok(()),
        }
    }

    /// Writes the resident partitions that changed.
    fn flush(&self, buffer: &mut PartitionBuffer<D>) -> Result<()> {
        let rows = self.files.partitions().largest() as usize;
        let numbers = rows * self.dim();
        for slot in 0..buffer.held.len() {
            let Some(partition) = buffer.held[slot].filter(|_| buffer.changed[slot]) else { continue };
            let (device, table, state) = (&self.device, &self.table, &buffer.state);
            // Pieces are whole rows of one matrix.
            self.files.write_pieces(partition, buffer.updates, |first, to| {
                let row = slot * rows + first % numbers / self.dim();
                match (first / numbers).checked_sub(1) {
                    None => device.read(&table.lock(), row, to),
                    Some(other) => device.read(&state[other], row, to),
                }
            })?;
            self.device.check()?;
            buffer.changed[slot] = false;
            buffer.flushed_bytes += self.files.numbers() as u64 * 4;
        }
        Ok(())
    }

    /// Waits until what left the buffer is on disk: before rows of partitions that are not resident are read.
    pub fn settle(&self) -> Result<()> {
        match &*self.lock() {
            Some(buffer) => Ok(buffer.stream.settle()?),
            None => Ok(()),
        }
    }

    /// All rows, as of the last batch.
    pub fn input_table(self: &Arc<Self>) -> Result<InputTable> {
        self.settle()?;
        let shared = self.clone();
        let [order, places] = [(); 2].map(|()| self.files.partitions().clone());
        let table = InputTable::new(self.nodes(), self.dim(), move || {
            let (shared, mut reader) = (shared.clone(), shared.files.reader());
            Ok(Box::new(move |nodes: &[NodeId], values: &mut [f32]| shared.read(&mut reader, nodes, values)))
        });
        Ok(table.in_order(move |position| order.node_at(position), move |node| places.position(node)))
    }

    /// Reads rows of nodes: resident ones from the table, others from disk.
    pub fn read(&self, reader: &mut PartitionReader, nodes: &[NodeId], values: &mut [f32]) -> Result<()> {
        self.settle()?;
        let rows = self.lock().as_ref().and_then(|buffer| buffer.rows.clone());
        let values = values.chunks_mut(READ_NODES * self.dim().max(1));
        for (nodes, values) in nodes.chunks(READ_NODES).zip(values) {
            let split = split_nodes(self.files.partitions(), rows.as_ref(), nodes);
            for (partition, rows) in &split.on_disk {
                reader.read(*partition, rows, values)?;
            }
            if !split.slots.is_empty() {
                let gathered = on(&self.threads, || self.table.gather(&self.device, &split.slots));
                let mut numbers = vec![0.0; gathered.rows() * gathered.columns()];
                self.device.read(&gathered, 0, &mut numbers);
                self.device.check()?;
                split.place(&numbers, self.dim(), values);
            }
        }
        Ok(())
    }

    /// A reader of rows on disk for the calling thread.
    pub fn reader(&self) -> PartitionReader {
        self.files.reader()
    }
}

impl<D: Device> PartitionBuffer<D> {
    /// The rows that waiting updates name: of the residents, or, before the first batch, of those that it will have. A run may
    /// end there, and what waits is saved as it was restored.
    fn rows_of_updates(&mut self, partitions: &Arc<NodePartitions>) -> Option<BufferRows> {
        let coming = || Some(BufferRows::new(partitions, &self.sequence.peek()?.resident));
        self.rows.clone().or_else(coming)
    }

    /// Asks for what the next step needs.
    fn prefetch(&mut self) -> Result<()> {
        let enters: Vec<PartitionId> = match self.sequence.peek() {
            Some(next) => next.swaps.iter().map(|swap| swap.enters).collect(),
            None => Vec::new(),
        };
        Ok(self.stream.prefetch(enters)?)
    }
}
