//! Learned embeddings Z: a row per node that training changes, as a layer over the batches of any strategy. Batches name
//! slots, the step gathers them, and the gradient of the input flows back to the table (Marius++ section 3). A slot is a
//! node id: the whole table is on the training device. What is fetched besides, features or only neighbours, is the
//! strategy's below.
//!
//! The math of an update is a backend's, so it is given: see [`RowTraining`]. A batch has each node once, so a slot occurs
//! once in a gradient. The table and the state of its optimizer are in checkpoints, under names of what they are.

use crate::{
    Batch, BatchSource, CheckpointReader, CheckpointSink, Feedback, Inference, InputTable, Job, JobOutline,
    LiveRows, LiveTable, Needs, Phase, Prepared, Pushed, Result, RunPosition, SavedState, SourceCounters,
    Strategy, StrategyError,
};
use esker_device::{Device, Shape};
use esker_types::{NodeId, grouped};
use rayon::ThreadPool;
use std::io::{self, Read, Write};
use std::sync::Arc;

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

    /// Sets rows from `first` on to what they are before training: a function of seed and node.
    fn initialise(&self, device: &D, table: &mut D::Matrix) -> Result<()>;

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

    /// The table as it begins, or that of a checkpoint.
    fn open(&self, job: &Job, state: &mut Option<&mut dyn CheckpointReader>) -> Result<OpenTable<D>> {
        let threads = self.device.in_host_memory().then(|| job.pool.clone());
        let (rows, dim) = (job.dataset.manifest().nodes.count, self.training.dim());
        if rows > u32::MAX as u64 {
            return Err(StrategyError::EmbeddingRows { nodes: rows });
        }
        let mut table = self.device.matrix(rows as usize, dim);
        let mut opened = false;
        if let Some(state) = state.as_deref_mut() {
            opened = read_named(&self.device, state, TABLE, &mut table)?;
        }
        if !opened {
            let (training, device) = (&self.training, &self.device);
            on(&threads, || training.initialise(device, &mut table))?;
        }
        self.device.check()?;
        Ok(OpenTable { table: LiveTable::new(table), state: Vec::new(), steps: 0, threads })
    }

    /// Adds the state of the optimizer: empty, or that of a checkpoint.
    fn open_state(
        &self,
        opened: &mut OpenTable<D>,
        rows: usize,
        state: &mut Option<&mut dyn CheckpointReader>,
    ) -> Result<()> {
        for name in self.training.state_names() {
            let mut matrix = self.device.matrix(rows, self.training.dim());
            self.device.fill(&mut matrix, 0.0);
            if let Some(state) = state.as_deref_mut() {
                read_named(&self.device, state, name, &mut matrix)?;
            }
            opened.state.push(matrix);
        }
        if let Some(state) = state.as_deref_mut()
            && let Some(SavedState::Bytes(mut from)) = state.take(STEPS)?
        {
            let mut steps = [0; 8];
            from.read_exact(&mut steps).and_then(|()| read_end(from)).map_err(refused(STEPS))?;
            opened.steps = u64::from_le_bytes(steps);
        }
        Ok(self.device.check()?)
    }

    fn source(&self, opened: OpenTable<D>, inner: Box<dyn BatchSource<D>>) -> Box<dyn BatchSource<D>> {
        let (device, training) = (self.device.clone(), self.training.clone());
        Box::new(EmbeddingSource { inner, device, training, usage: self.usage, opened })
    }
}

/// A table and the state of its optimizer.
struct OpenTable<D: Device> {
    table: Arc<LiveTable<D>>,
    state: Vec<D::Matrix>,
    steps: u64,
    /// The threads that compute, if the device has none of its own.
    threads: Option<Arc<ThreadPool>>,
}

/// Runs something with the threads that compute.
fn on<R: Send>(threads: &Option<Arc<ThreadPool>>, work: impl FnOnce() -> R + Send) -> R {
    match threads {
        Some(threads) => threads.install(work),
        None => work(),
    }
}

impl<D: Device> Strategy<D> for Embeddings<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        let mut needs = self.inner.needs(job)?;
        let (rows, dim) = (job.dataset.manifest().nodes.count, self.training.dim() as u64);
        let bytes = rows.saturating_mul(dim * 4);
        let from = format!("{} nodes x {dim} x 4 bytes", grouped(rows));
        needs.device.add_from("embeddings", bytes, from);
        let states = self.training.state_names().len() as u64;
        if states > 0 && job.largest_batch > 0 {
            let from = format!("{states} x {} nodes x {dim} x 4 bytes", grouped(rows));
            needs.device.add_from("optimizer of embeddings", bytes.saturating_mul(states), from);
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
        let mut opened = self.open(job, &mut state)?;
        let rows = opened.table.lock().rows();
        self.open_state(&mut opened, rows, &mut state)?;
        let inner = self.inner.batches(job, from, state)?;
        Ok(self.source(opened, inner))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        mut state: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let opened = self.open(job, &mut state)?;
        // A model that was not chosen by validation comes with the whole state of its last checkpoint.
        if let Some(state) = state.as_deref_mut() {
            for name in self.training.state_names().iter().chain(&[STEPS]) {
                state.take(name)?;
            }
        }
        let inner = self.inner.inference(job, over, state)?;
        Ok(self.source(opened, inner))
    }
}

/// Batches with embeddings.
struct EmbeddingSource<D: Device> {
    inner: Box<dyn BatchSource<D>>,
    device: D,
    training: Arc<dyn RowTraining<D>>,
    usage: EmbeddingUse,
    opened: OpenTable<D>,
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
        if let (Some(gradient), Some(rate)) = (feedback.input_gradient.take(), feedback.rate) {
            let OpenTable { table, state, steps, threads } = &mut self.opened;
            *steps += 1;
            let (training, device, step) = (&self.training, &self.device, *steps);
            on(threads, || training.update(device, &mut table.lock(), state, &gradient, rate, step))?;
        }
        self.inner.apply(feedback)
    }

    /// A batch reads the rows that the batch before it changed.
    fn lag(&self) -> usize {
        1
    }

    fn skip_to(&mut self, at: RunPosition) -> Result<()> {
        self.inner.skip_to(at)
    }

    fn save(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.save_table(to)?;
        for (name, matrix) in self.training.state_names().iter().zip(&self.opened.state) {
            write_named(&self.device, to, name, matrix)?;
        }
        let steps = self.opened.steps;
        to.bytes(STEPS, &mut |to: &mut dyn Write| to.write_all(&steps.to_le_bytes()))?;
        self.inner.save(to)
    }

    fn save_for_inference(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        self.save_table(to)?;
        self.inner.save_for_inference(to)
    }

    fn table(&mut self) -> Result<InputTable> {
        let (table, device, dim) = (self.opened.table.clone(), self.device.clone(), self.training.dim());
        let rows = table.lock().rows() as u64;
        if self.usage == EmbeddingUse::Alone {
            return Ok(InputTable::new(rows, dim, move || {
                let (table, device) = (table.clone(), device.clone());
                Ok(Box::new(move |nodes, values| read_slots(&table, &device, nodes, values)))
            }));
        }
        let features = self.inner.table()?;
        let own = features.dim();
        Ok(InputTable::new(rows, own + dim, move || {
            let (table, device, mut read) = (table.clone(), device.clone(), features.reader()?);
            Ok(Box::new(move |nodes, values| {
                let (mut left, mut right) = (vec![0.0; nodes.len() * own], vec![0.0; nodes.len() * dim]);
                read(nodes, &mut left)?;
                read_slots(&table, &device, nodes, &mut right)?;
                let parts = left.chunks_exact(own.max(1)).zip(right.chunks_exact(dim));
                for (row, (features, embedding)) in values.chunks_exact_mut(own + dim).zip(parts) {
                    row[..own].copy_from_slice(features);
                    row[own..].copy_from_slice(embedding);
                }
                Ok(())
            }))
        }))
    }

    fn counters(&self) -> SourceCounters {
        self.inner.counters()
    }
}

impl<D: Device> EmbeddingSource<D> {
    fn save_table(&self, to: &mut dyn CheckpointSink) -> Result<()> {
        write_named(&self.device, to, TABLE, &self.opened.table.lock())
    }
}

/// Reads rows of a table by node.
fn read_slots<D: Device>(
    table: &LiveTable<D>,
    device: &D,
    nodes: &[NodeId],
    values: &mut [f32],
) -> Result<()> {
    if nodes.is_empty() {
        return Ok(());
    }
    let slots: Vec<u32> = nodes.iter().map(|node| node.0 as u32).collect();
    device.read(&table.gather(device, &slots), 0, values);
    Ok(device.check()?)
}

/// Rows per piece of a stream.
fn piece_rows(columns: usize) -> usize {
    (SAVED_BYTES / (4 * columns.max(1))).max(1)
}

/// Writes a matrix under a name: its rows and columns as u64, and its numbers.
fn write_named<D: Device>(
    device: &D,
    to: &mut dyn CheckpointSink,
    name: &str,
    matrix: &D::Matrix,
) -> Result<()> {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let mut values = Vec::new();
    to.bytes(name, &mut |to: &mut dyn Write| {
        [rows, columns].iter().try_for_each(|size| to.write_all(&(*size as u64).to_le_bytes()))?;
        for first in (0..rows).step_by(piece_rows(columns)) {
            values.resize(piece_rows(columns).min(rows - first) * columns, 0f32);
            device.read(matrix, first, &mut values);
            to.write_all(bytemuck::cast_slice(&values))?;
        }
        Ok(())
    })?;
    Ok(device.check()?)
}

/// Reads a matrix by name. Returns whether there was one. One of another size is refused.
fn read_named<D: Device>(
    device: &D,
    state: &mut dyn CheckpointReader,
    name: &'static str,
    matrix: &mut D::Matrix,
) -> Result<bool> {
    let Some(SavedState::Bytes(mut from)) = state.take(name)? else { return Ok(false) };
    let mut sizes = [0u64; 2];
    from.read_exact(bytemuck::cast_slice_mut(&mut sizes)).map_err(refused(name))?;
    let expected = [matrix.rows() as u64, matrix.columns() as u64];
    if sizes != expected {
        return Err(StrategyError::EmbeddingShape { name, expected, found: sizes });
    }
    read_rows(device, from, matrix).map_err(refused(name))?;
    Ok(true)
}

fn read_rows<D: Device>(device: &D, mut from: Box<dyn Read + '_>, matrix: &mut D::Matrix) -> io::Result<()> {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let mut values = Vec::new();
    for first in (0..rows).step_by(piece_rows(columns)) {
        values.resize(piece_rows(columns).min(rows - first) * columns, 0f32);
        from.read_exact(bytemuck::cast_slice_mut(&mut values))?;
        device.write(matrix, first, &values);
    }
    read_end(from)
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
