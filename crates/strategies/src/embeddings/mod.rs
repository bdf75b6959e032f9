//! Learned embeddings Z: a row per node that training changes, as a layer over the batches of any strategy. Batches name
//! slots, the step gathers them, and the gradient of the input flows back to the table (Marius++ section 3). A slot is a
//! node id. The table is on the training device as far as its memory allows (`table.rs`). What is fetched besides,
//! features or only neighbours, is the strategy's below.
//!
//! The math of an update is a backend's, so it is given: see [`RowTraining`]. A batch has each node once, so a slot occurs
//! once in a gradient. The table and the state of its optimizer are in checkpoints, under names of what they are.

mod table;

use crate::updates::{UPDATES, WaitingUpdates, ends_step};
use crate::{
    Batch, BatchSource, CheckpointReader, CheckpointSink, Feedback, Inference, InputTable, Job, JobOutline,
    LiveRows, MemoryTable, Needs, Phase, Prepared, Pushed, Result, RunPosition, SavedState, SourceCounters,
    Strategy, StrategyError,
};
use esker_device::Device;
use esker_fetch::pipeline::StageTimes;
use esker_sample::Batches;
use esker_types::{NodeId, grouped};
use rayon::ThreadPool;
use std::io::{self, Read, Write};
use std::sync::Arc;
use table::{EmbeddingSize, EmbeddingTable};

/// Names of the state in a checkpoint. Those of the optimizer are given by [`RowTraining::state_names`].
const TABLE: &str = "embeddings";
const STEPS: &str = "embeddings-steps";
/// Rows are written to checkpoints this many bytes at a time.
const SAVED_BYTES: usize = 1 << 20;

/// How rows begin, and how gradients change them.
pub trait RowTraining<D: Device>: Send + Sync {
    /// Numbers per row.
    fn dim(&self) -> usize;

    /// Names of the matrices that the optimizer keeps, each with a row for every row of the table.
    fn state_names(&self) -> &[&'static str];

    /// The rows of these nodes before training, in host memory.
    fn initial_rows(&self, nodes: &[NodeId], values: &mut [f32]) -> Result<()>;

    /// Passes on what rows are before training, some at a time: the first of them, and their numbers. They are a function
    /// of seed and node.
    fn initialise(&self, rows: usize, write: &mut (dyn FnMut(usize, &[f32]) + Send)) -> Result<()>;

    /// Changes the rows of `gradient.slots`, and nothing else. Slots do not repeat. `step` counts from 1, `rate` is the
    /// learning rate of the step.
    fn update(
        &self,
        device: &D,
        table: &mut D::Matrix,
        state: &mut [D::Matrix],
        gradient: &Pushed<D>,
        rate: f64,
        step: u64,
    ) -> Result<()>;
}

/// What a layer reads of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbeddingUse {
    /// Its embedding alone. The strategy below fetches no features.
    Alone,
    /// Its embedding and its features.
    WithFeatures,
}

/// A strategy with learned embeddings.
pub struct Embeddings<D: Device> {
    inner: Box<dyn Strategy<D>>,
    device: D,
    training: Arc<dyn RowTraining<D>>,
    usage: EmbeddingUse,
}

impl<D: Device> Embeddings<D> {
    /// Adds embeddings to the batches of a strategy.
    pub fn over(
        inner: Box<dyn Strategy<D>>,
        device: D,
        training: Arc<dyn RowTraining<D>>,
        usage: EmbeddingUse,
    ) -> Embeddings<D> {
        Embeddings { inner, device, training, usage }
    }

    /// The size of the table, with the state of its optimizer if it trains.
    fn shape(&self, job: &JobOutline, trains: bool) -> EmbeddingSize {
        let states = if trains { self.training.state_names().len() as u64 } else { 0 };
        let device_bytes = if self.device.in_host_memory() { u64::MAX } else { job.embedding_device_bytes };
        let (rows, columns) = (job.dataset.manifest().nodes.count, self.training.dim() as u64);
        EmbeddingSize { rows, columns, parts: 1 + states, device_bytes }
    }

    /// The table as it begins, or that of a checkpoint.
    fn open(
        &self,
        job: &Job,
        trains: bool,
        state: &mut Option<&mut dyn CheckpointReader>,
    ) -> Result<OpenTable<D>> {
        let threads = self.device.in_host_memory().then(|| job.pool.clone());
        let (device, training, shape) = (&self.device, &self.training, self.shape(job, trains));
        let table = on(&threads, || EmbeddingTable::new(device, shape))?;
        let mut opened = OpenTable { table, steps: 0, threads };
        let table = &opened.table;
        let mut is_stored = false;
        if let Some(state) = state.as_deref_mut() {
            is_stored = self.read_named(table, state, TABLE, 0)?;
        }
        if !is_stored {
            let mut write = |first: usize, values: &[f32]| table.write(device, 0, first, values);
            on(&opened.threads, || training.initialise(table.rows(), &mut write))?;
        }
        if trains {
            for (part, name) in (1..).zip(training.state_names()) {
                if let Some(state) = state.as_deref_mut() {
                    self.read_named(table, state, name, part)?;
                }
            }
            if let Some(state) = state.as_deref_mut()
                && let Some(SavedState::Bytes(mut from)) = state.take(STEPS)?
            {
                let mut steps = [0; 8];
                from.read_exact(&mut steps).and_then(|()| read_end(from)).map_err(refused(STEPS))?;
                opened.steps = u64::from_le_bytes(steps);
            }
        }
        self.device.check()?;
        Ok(opened)
    }

    /// Reads a part of all rows by name. Returns whether there was one. One of another size is refused.
    fn read_named(
        &self,
        table: &EmbeddingTable<D>,
        state: &mut dyn CheckpointReader,
        name: &'static str,
        part: usize,
    ) -> Result<bool> {
        let Some(SavedState::Bytes(mut from)) = state.take(name)? else { return Ok(false) };
        let mut sizes = [0u64; 2];
        from.read_exact(bytemuck::cast_slice_mut(&mut sizes)).map_err(refused(name))?;
        let (rows, columns) = (table.rows(), self.training.dim());
        let expected = [rows as u64, columns as u64];
        if sizes != expected {
            return Err(StrategyError::EmbeddingShape { name, expected, found: sizes });
        }
        let mut values = Vec::new();
        for first in (0..rows).step_by(piece_rows(columns)) {
            values.resize(piece_rows(columns).min(rows - first) * columns, 0f32);
            from.read_exact(bytemuck::cast_slice_mut(&mut values)).map_err(refused(name))?;
            table.write(&self.device, part, first, &values);
        }
        read_end(from).map_err(refused(name))?;
        Ok(true)
    }

    fn source(
        &self,
        job: &Job,
        opened: OpenTable<D>,
        waiting: WaitingUpdates<D>,
        inner: Box<dyn BatchSource<D>>,
    ) -> Box<dyn BatchSource<D>> {
        let (device, training, batches) = (self.device.clone(), self.training.clone(), job.batches.clone());
        Box::new(EmbeddingSource { inner, device, training, usage: self.usage, opened, waiting, batches })
    }
}

/// A table in use.
struct OpenTable<D: Device> {
    table: Arc<EmbeddingTable<D>>,
    steps: u64,
    /// The threads that compute, if the device has none of its own.
    threads: Option<Arc<ThreadPool>>,
}

/// Runs something with the threads that compute.
pub(crate) fn on<R: Send>(threads: &Option<Arc<ThreadPool>>, work: impl FnOnce() -> R + Send) -> R {
    match threads {
        Some(threads) => threads.install(work),
        None => work(),
    }
}

impl<D: Device> Strategy<D> for Embeddings<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        let mut needs = self.inner.needs(job)?;
        let shape = self.shape(job, job.largest_batch > 0);
        match shape.is_tiered() {
            false => add_table(&shape, &mut needs.device),
            true => add_tiers(&shape, job.most_nodes(), &mut needs),
        }
        let waiting = job.out_of_core.update_lag() as u64 - 1;
        if waiting > 0 && job.largest_batch > 0 {
            needs
                .device
                .add("updates that wait", waiting.saturating_mul(job.most_nodes() * shape.columns * 4));
        }
        let slots = job.most_nodes().saturating_mul(4 * (job.prefetch_depth as u64 + 1));
        needs.host.add("slots of batches, saving embeddings", slots.saturating_add(2 * SAVED_BYTES as u64));
        (needs.trains_rows, needs.exchange.input_gradient) = (true, true);
        Ok(needs)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        self.inner.prepare(job)
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let opened = self.open(job, true, &mut state)?;
        let mut waiting = WaitingUpdates::new(job.out_of_core.update_lag());
        let slots_of = |nodes: &[NodeId]| Ok(nodes.iter().map(|node| node.0 as u32).collect());
        waiting.restore(&self.device, self.training.dim(), &mut state, slots_of)?;
        let inner = self.inner.batches(job, from, state)?;
        Ok(self.source(job, opened, waiting, inner))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let opened = self.open(job, false, &mut state)?;
        // A model that was not chosen by validation comes with the whole state of its last checkpoint.
        if let Some(state) = state.as_deref_mut() {
            for name in self.training.state_names().iter().chain(&[STEPS, UPDATES]) {
                state.take(name)?;
            }
        }
        let inner = self.inner.inference(job, over, state)?;
        Ok(self.source(job, opened, WaitingUpdates::new(1), inner))
    }
}

/// Batches with embeddings.
struct EmbeddingSource<D: Device> {
    inner: Box<dyn BatchSource<D>>,
    device: D,
    training: Arc<dyn RowTraining<D>>,
    usage: EmbeddingUse,
    opened: OpenTable<D>,
    waiting: WaitingUpdates<D>,
    batches: Arc<dyn Batches>,
}

impl<D: Device> BatchSource<D> for EmbeddingSource<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        let Some(mut batch) = self.inner.next()? else { return Ok(None) };
        let sample = batch.blocks.sample().expect("embeddings are named by the nodes of a host sample");
        let slots = sample.node_ids.iter().map(|node| node.0 as u32).collect();
        if self.usage == EmbeddingUse::Alone {
            batch.input.fixed = None;
        }
        batch.input.live = Some(LiveRows { table: self.opened.table.clone(), slots });
        batch.exchange.input_gradient = matches!(batch.at.phase, Phase::Train { .. });
        Ok(Some(batch))
    }

    fn apply(&mut self, mut feedback: Feedback<D>) -> Result<()> {
        self.waiting.push(feedback.input_gradient.take().zip(feedback.rate));
        let ends = ends_step(&*self.batches, feedback.at.position());
        while let Some((gradient, rate)) = self.waiting.next(ends) {
            let OpenTable { table, steps, threads } = &mut self.opened;
            *steps += 1;
            let (training, device, step) = (&*self.training, &self.device, *steps);
            on(threads, || table.update(device, training, gradient, rate, step))?;
        }
        self.inner.apply(feedback)
    }

    fn lag(&self) -> usize {
        self.waiting.lag()
    }

    fn skip_to(&mut self, at: RunPosition) -> Result<()> {
        self.inner.skip_to(at)
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.save_part(to, TABLE, 0)?;
        for (part, name) in (1..).zip(self.training.state_names()) {
            self.save_part(to, name, part)?;
        }
        let steps = self.opened.steps;
        to.bytes(STEPS, &mut |to: &mut dyn Write| to.write_all(&steps.to_le_bytes()))?;
        let nodes_of = |slots: &[u32]| slots.iter().map(|slot| *slot as u64).collect();
        self.waiting.save(&self.device, self.training.dim(), to, nodes_of)?;
        self.inner.save(to)
    }

    fn save_for_inference(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.save_part(to, TABLE, 0)?;
        self.inner.save_for_inference(to)
    }

    fn table(&mut self) -> Result<InputTable> {
        let (table, device, dim) = (self.opened.table.clone(), self.device.clone(), self.training.dim());
        let rows = table.rows() as u64;
        if self.usage == EmbeddingUse::Alone {
            return Ok(InputTable::new(rows, dim, move || {
                let (table, device) = (table.clone(), device.clone());
                Ok(Box::new(move |nodes, values| read_rows(&table, &device, nodes, values)))
            }));
        }
        let own = InputTable::new(rows, dim, move || {
            let (table, device) = (table.clone(), device.clone());
            Ok(Box::new(move |nodes, values| read_rows(&table, &device, nodes, values)))
        });
        Ok(joined(self.inner.table()?, own))
    }

    fn counters(&self) -> SourceCounters {
        self.inner.counters()
    }

    fn stages(&self) -> Vec<StageTimes> {
        self.inner.stages()
    }
}

impl<D: Device> EmbeddingSource<D> {
    /// Writes a part of all rows under a name: its rows and columns as u64, and its numbers.
    fn save_part(&self, to: &mut dyn CheckpointSink, name: &str, part: usize) -> Result<()> {
        let (device, table, columns) = (&self.device, &self.opened.table, self.training.dim());
        let (rows, mut values) = (table.rows(), Vec::new());
        to.bytes(name, &mut |to: &mut dyn Write| {
            [rows, columns].iter().try_for_each(|size| to.write_all(&(*size as u64).to_le_bytes()))?;
            for first in (0..rows).step_by(piece_rows(columns)) {
                values.resize(piece_rows(columns).min(rows - first) * columns, 0f32);
                table.read(device, part, first, &mut values);
                to.write_all(bytemuck::cast_slice(&values))?;
            }
            Ok(())
        })?;
        Ok(device.check()?)
    }
}

/// Adds the lines of a table in one memory.
fn add_table(shape: &EmbeddingSize, to: &mut MemoryTable) {
    let (rows, columns, states) = (grouped(shape.rows), shape.columns, shape.parts - 1);
    let bytes = shape.bytes() / shape.parts;
    to.add_from("embeddings", bytes, format!("{rows} nodes x {columns} x 4 bytes"));
    if states > 0 {
        let from = format!("{states} x {rows} nodes x {columns} x 4 bytes");
        to.add_from("optimizer of embeddings", bytes.saturating_mul(states), from);
    }
}

/// Adds the lines of a table that a device has no room for beside all else.
fn add_tiers(shape: &EmbeddingSize, batch_nodes: u64, needs: &mut Needs) {
    let (row_bytes, on_device) = (shape.columns * 4, shape.on_device());
    let parts = if shape.parts > 1 { ", with their optimizer" } else { "" };
    let of = |bytes: u64| {
        let (some, all) = (grouped(bytes / row_bytes / shape.parts), grouped(shape.rows));
        format!("{some} of {all} nodes x {} x {} x 4 bytes", shape.parts, shape.columns)
    };
    needs.device.add_from(format!("embeddings{parts}"), on_device, of(on_device));
    // All parts of a batch as they are stored, and each of them.
    let batch = batch_nodes.saturating_mul(2 * shape.parts * row_bytes);
    needs.device.add_from("embeddings of a batch", batch, "gathered from host memory, updated");
    let pinned = shape.bytes() - on_device;
    needs.host.add_from(format!("embeddings{parts}, pinned"), pinned, of(pinned));
}

/// Features and embeddings of nodes, side by side.
pub(crate) fn joined(features: InputTable, embeddings: InputTable) -> InputTable {
    let (own, dim, rows) = (features.dim(), embeddings.dim(), embeddings.nodes());
    InputTable::new(rows, own + dim, move || {
        let (mut read_left, mut read_right) = (features.reader()?, embeddings.reader()?);
        Ok(Box::new(move |nodes, values| {
            let (mut left, mut right) = (vec![0.0; nodes.len() * own], vec![0.0; nodes.len() * dim]);
            read_left(nodes, &mut left)?;
            read_right(nodes, &mut right)?;
            let parts = left.chunks_exact(own.max(1)).zip(right.chunks_exact(dim));
            for (row, (features, embedding)) in values.chunks_exact_mut(own + dim).zip(parts) {
                row[..own].copy_from_slice(features);
                row[own..].copy_from_slice(embedding);
            }
            Ok(())
        }))
    })
}

/// Reads embeddings by node.
fn read_rows<D: Device>(
    table: &EmbeddingTable<D>,
    device: &D,
    nodes: &[NodeId],
    values: &mut [f32],
) -> Result<()> {
    let nodes: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
    table.read_nodes(device, &nodes, values);
    Ok(device.check()?)
}

/// Rows per piece of a stream.
fn piece_rows(columns: usize) -> usize {
    (SAVED_BYTES / (4 * columns.max(1))).max(1)
}

/// The end: the checksum is checked there.
fn read_end(mut from: Box<dyn Read + '_>) -> io::Result<()> {
    match from.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "more numbers than expected")),
    }
}

fn refused(name: &'static str) -> impl FnOnce(io::Error) -> StrategyError {
    move |source| StrategyError::EmbeddingState { name, source }
}
