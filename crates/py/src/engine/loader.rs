//! Loaders over strategies.

use super::arrays::{NumpyArray, ids, integers};
use super::dataset::DiskDataset;
use super::{SIGNALS_EVERY, of_train, watched};
use esker_nn::CpuBackend;
use esker_sample::{Direction, Fanout, Position, Rank, SampleError, Seeds};
use esker_strategies::StrategyKind;
use esker_train::{
    GivenEpoch, LoadedBatch, Loader, LoaderConfig, LoaderOrder, LoaderRun, RunControl, SharedMemory,
    TrainError,
};
use esker_types::{ByteCount, ErrorKind, NodeId, StopSignal};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The memory that the loaders of a process share.
#[pyclass(frozen, module = "esker._esker")]
pub struct Promise {
    shared: SharedMemory,
}

#[pymethods]
impl Promise {
    /// So many bytes for all loaders together; by default four fifths of what the machine or the cgroup allows.
    #[new]
    #[pyo3(signature = (bytes = None))]
    fn new(bytes: Option<u64>) -> Promise {
        let bytes = esker_types::Budget::resolve(bytes.map(ByteCount)).host_bytes;
        Promise { shared: SharedMemory::new(bytes) }
    }

    /// Changes what is allowed.
    fn allow(&self, bytes: u64) {
        self.shared.allow(bytes);
    }

    /// What is allowed, and what loaders have taken of it.
    #[getter]
    fn bytes(&self) -> (u64, u64) {
        self.shared.bytes()
    }
}

/// (what, bytes) line by line, the smallest memory that works, and what was taken.
type MemoryUse = (Vec<(String, u64)>, u64, u64);

/// What a loader is asked for, as Python writes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoaderRequest {
    strategy: String,
    /// -1 for all neighbours.
    fanouts: Vec<i64>,
    batch: u64,
    planned: Option<AskedOrder>,
    /// Batches of an epoch whose order is given.
    epoch_batches: u64,
    features: bool,
    edge_ids: bool,
    columns: Vec<String>,
    direction: Direction,
    memory: Option<u64>,
    threads: Option<usize>,
    scratch: PathBuf,
    prepared: Option<PathBuf>,
    disk_budget: Option<u64>,
    epochs_sampled: Option<u64>,
}

/// An order that Esker plans.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedOrder {
    seed: u64,
    epochs: u64,
    shuffle: bool,
    drop_last: bool,
    rank: u64,
    world_size: u64,
}

impl LoaderRequest {
    fn resolve(self, seeds: Seeds) -> PyResult<LoaderConfig> {
        let strategy: StrategyKind = self.strategy.parse().map_err(PyValueError::new_err)?;
        let fanouts = self.fanouts.iter().map(|count| match u32::try_from(*count) {
            Ok(count) => Ok(Fanout::AtMost(count)),
            Err(_) if *count == -1 => Ok(Fanout::All),
            Err(_) => Err(PyValueError::new_err(format!(
                "{count} neighbours per node were asked for; give a number from 0, or -1 for all"
            ))),
        });
        let order = match self.planned {
            Some(planned) => LoaderOrder::Planned {
                seed: planned.seed,
                epochs: planned.epochs,
                shuffle: planned.shuffle,
                drop_last: planned.drop_last,
                rank: Rank::new(planned.rank, planned.world_size).map_err(of_sample)?,
            },
            None => LoaderOrder::Given { batches: self.epoch_batches },
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(LoaderConfig {
            strategy,
            seeds: Arc::new(seeds),
            fanouts: fanouts.collect::<PyResult<_>>()?,
            batch: self.batch,
            order,
            direction: self.direction,
            features: self.features,
            edge_ids: self.edge_ids,
            columns: self.columns,
            memory: self.memory.unwrap_or(u64::MAX),
            threads: self.threads.unwrap_or(threads),
            scratch: self.scratch,
            prepared: self.prepared,
            disk_budget: self.disk_budget,
            epochs_sampled: self.epochs_sampled,
        })
    }
}

fn of_sample(error: SampleError) -> PyErr {
    of_train(error.into())
}

/// An open loader. One iteration runs at a time.
#[pyclass(frozen, module = "esker._esker")]
pub struct EngineLoader {
    /// `None` once it is closed.
    loader: Mutex<Option<Loader<CpuBackend>>>,
    run: Mutex<Option<LoaderRun>>,
    /// The process that made it: a forked one has none of its threads.
    process: u32,
    /// Asks for the end of work before the first batch.
    stop: StopSignal,
}

#[pymethods]
impl EngineLoader {
    /// Samples some batches for their size, and takes memory from the promise. `seeds` are node ids; `None` is all nodes.
    #[new]
    #[pyo3(signature = (dataset, asked, seeds, promise))]
    fn new(
        py: Python<'_>,
        dataset: &DiskDataset,
        asked: &str,
        seeds: Option<&Bound<'_, PyAny>>,
        promise: &Promise,
    ) -> PyResult<EngineLoader> {
        let seeds = match seeds {
            Some(seeds) => Seeds::Shared(Arc::new(ids(seeds)?.into_iter().map(NodeId).collect())),
            None => Seeds::AllNodes(dataset.dataset.manifest().nodes.count),
        };
        let asked: LoaderRequest =
            serde_json::from_str(asked).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let (config, stop) = (asked.resolve(seeds)?, StopSignal::default());
        let control = RunControl { stop: stop.clone(), ..RunControl::default() };
        let (dataset, shared) = (dataset.dataset.clone(), promise.shared.clone());
        let open = move || Loader::open(CpuBackend::new(), dataset, config, &shared, control);
        let loader = watched(py, &stop, open)?.map_err(of_train)?;
        let process = std::process::id();
        Ok(EngineLoader { loader: Mutex::new(Some(loader)), run: Mutex::default(), process, stop })
    }

    /// Does the work before the first batch, once. Returns how memory and disk are used, as readable lines.
    fn prepare(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.check_process()?;
        let work = || {
            let mut loader = lock(&self.loader);
            let loader = loader.as_mut().ok_or_else(closed)?;
            loader.prepare().map(|prepared| prepared.notes.clone()).map_err(of_train)
        };
        watched(py, &self.stop, work)?
    }

    /// Number of batches in an epoch of a planned order.
    fn batches_of(&self, py: Python<'_>, epoch: u64) -> PyResult<u64> {
        // Another thread may prepare, and keep the loader for long.
        py.detach(|| lock(&self.loader).as_ref().map(|loader| loader.batches_of(epoch)).ok_or_else(closed))
    }

    /// How memory is used: (what, bytes) line by line, the smallest that works, and what was taken.
    fn memory(&self, py: Python<'_>) -> PyResult<MemoryUse> {
        py.detach(|| {
            let loader = lock(&self.loader);
            let loader = loader.as_ref().ok_or_else(closed)?;
            let lines = loader.plan.table.lines.iter().map(|line| (line.what.clone(), line.bytes)).collect();
            Ok((lines, loader.plan.smallest_bytes, loader.share().bytes()))
        })
    }

    /// Begins with a batch of a planned order.
    fn start(&self, py: Python<'_>, epoch: u64, batch: u64) -> PyResult<()> {
        self.begin(py, move |loader| loader.run(Position { epoch, batch }))
    }

    /// Begins with a batch of an epoch whose order is given: `items` of all batches, one after the other, and how many each
    /// has.
    fn start_given(
        &self,
        py: Python<'_>,
        seed: u64,
        items: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        from: u64,
    ) -> PyResult<()> {
        let (items, counts) = (ids(items)?, integers(counts)?);
        let (mut batches, mut start) = (Vec::with_capacity(counts.len()), 0usize);
        for count in counts {
            let end = usize::try_from(count).ok().and_then(|count| start.checked_add(count));
            let Some(batch) = end.and_then(|end| items.get(start..end)) else {
                return Err(PyValueError::new_err("the batches have more items than were given"));
            };
            batches.push(batch.to_vec());
            start += batch.len();
        }
        self.begin(py, move |loader| loader.run_given(GivenEpoch { seed, batches }, from))
    }

    /// The next batch; `None` after the last.
    fn next(&self, py: Python<'_>) -> PyResult<Option<EngineBatch>> {
        self.check_process()?;
        loop {
            let found = py.detach(|| match lock(&self.run).as_mut() {
                Some(run) => run.next_within(SIGNALS_EVERY),
                None => Ok(Some(None)),
            });
            match found.map_err(of_train)? {
                Some(batch) => return Ok(batch.map(|batch| py.detach(|| EngineBatch::of(batch)))),
                None => py.check_signals()?,
            }
        }
    }

    /// Counters of the iteration, as JSON; `None` before the first.
    fn stats(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let found = py.detach(|| {
            lock(&self.run).as_ref().map(|run| {
                let mut counters = run.counters();
                counters.stages.push(run.times());
                serde_json::to_string(&counters)
            })
        });
        found.transpose().map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Ends the iteration: its threads, its memory, its files.
    fn end(&self, py: Python<'_>) {
        if self.check_process().is_ok() {
            py.detach(|| drop(lock(&self.run).take()));
        }
    }

    /// Ends the iteration and returns all memory.
    fn close(&self, py: Python<'_>) {
        self.end(py);
        if self.check_process().is_ok() {
            py.detach(|| drop(lock(&self.loader).take()));
        }
    }
}

impl EngineLoader {
    fn begin(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Loader<CpuBackend>) -> Result<LoaderRun, TrainError> + Send,
    ) -> PyResult<()> {
        self.check_process()?;
        let begin = || {
            // What is left of the iteration before has its memory.
            drop(lock(&self.run).take());
            let mut loader = lock(&self.loader);
            let run = work(loader.as_mut().ok_or_else(closed)?).map_err(of_train)?;
            *lock(&self.run) = Some(run);
            Ok(())
        };
        watched(py, &self.stop, begin)?
    }

    /// Fails in a forked process.
    fn check_process(&self) -> PyResult<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(PyRuntimeError::new_err(
                "this loader was opened before the process was forked, and its threads stayed behind; open it in this process, or start processes with `spawn`",
            )),
        }
    }
}

impl Drop for EngineLoader {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The threads that dropping it would wait for are another process's.
            std::mem::forget(lock(&self.run).take());
            std::mem::forget(lock(&self.loader).take());
            return;
        }
        // Threads end meanwhile that may want the interpreter for nothing, but take a while.
        let (run, loader) = (lock(&self.run).take(), lock(&self.loader).take());
        Python::attach(|py| py.detach(|| drop((run, loader))));
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed() -> PyErr {
    super::exception(Closed, ErrorKind::Asked)
}

/// The loader was closed.
#[derive(Debug, thiserror::Error)]
#[error("the loader is closed; make another")]
struct Closed;

/// A batch: arrays that Rust owns until Python no longer needs them.
#[pyclass(frozen, get_all, module = "esker._esker")]
pub struct EngineBatch {
    /// Its epoch and its number there.
    at: (u64, u64),
    /// Its seeds, as indices of those that the loader was given.
    items: Py<NumpyArray>,
    /// Node ids, seeds first.
    n_id: Py<NumpyArray>,
    /// Neighbour and node of each edge, as indices of `n_id`.
    edge_index: Py<NumpyArray>,
    /// Edge ids, if they were asked for.
    e_id: Option<Py<NumpyArray>>,
    /// Feature rows, if they were asked for.
    x: Option<Py<NumpyArray>>,
    /// (name, whether by node, values) of the columns.
    columns: Vec<(String, bool, Py<NumpyArray>)>,
    /// Nodes and edges by hop.
    nodes_by_hop: Vec<usize>,
    edges_by_hop: Vec<usize>,
}

impl EngineBatch {
    fn of(batch: LoadedBatch) -> EngineBatch {
        let LoadedBatch { at, items, mut graph, rows, columns } = batch;
        let edges = graph.sources.len();
        let mut edge_index = std::mem::take(&mut graph.sources);
        edge_index.append(&mut graph.targets);
        let items: Vec<i64> = items.into_iter().map(|item| item as i64).collect();
        let (item_count, nodes) = (items.len(), graph.nodes.len());
        let has_ids = graph.edges.len() == edges;
        Python::attach(|py| {
            let array =
                |array: NumpyArray| Py::new(py, array).expect("the interpreter has memory for an object");
            EngineBatch {
                at: (at.epoch, at.batch),
                items: array(NumpyArray::integers(items, vec![item_count])),
                n_id: array(NumpyArray::integers(graph.nodes, vec![nodes])),
                edge_index: array(NumpyArray::integers(edge_index, vec![2, edges])),
                e_id: has_ids.then(|| array(NumpyArray::integers(graph.edges, vec![edges]))),
                x: rows.map(|rows| array(NumpyArray::rows(rows))),
                columns: columns
                    .into_iter()
                    .map(|column| {
                        let values = NumpyArray::stored(column.bytes, column.dtype, column.width);
                        (column.name, column.by_node, array(values))
                    })
                    .collect(),
                nodes_by_hop: graph.nodes_by_hop,
                edges_by_hop: graph.edges_by_hop,
            }
        })
    }
}
