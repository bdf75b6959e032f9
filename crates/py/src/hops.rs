//! Samples for `esker.NeighborSampler`: of adjacency that torch owns, without the interpreter lock.

use crate::dlpack::{Borrowed, Column};
use crate::error::of_sampling;
use esker_sample::hops::{
    BorrowedCsc, BorrowedId, BorrowedNumbers, EdgeWeights, HopEdges, HopSample, HopSampler, HopSettings,
    NeighbourChoice, NeighbourTimes, TemporalStrategy, WeightColumn,
};
use esker_sample::{Fanout, Position, SampleError};
use esker_types::NodeId;
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// What a sampler may use: what the machine has. A loader over memory has no budget.
const MOST_BYTES: u64 = 1 << 60;

/// A sample: node ids, `edge_index`, edge ids, trees if disjoint, nodes and edges by hop if edges belong to hops.
type HopColumns = (Column, Column, Column, Option<Column>, Vec<usize>, Vec<usize>);

/// Samples neighbourhoods of a graph that Python holds as `colptr`, `row` and `perm`.
///
/// It keeps the tensors alive and reads them where they are. Any number of threads may sample at a time.
#[pyclass(module = "esker._esker", name = "Hops", frozen)]
pub(crate) struct PyHops {
    // Before the tensors that it reads: fields are dropped in this order.
    hops: WideOrNarrow,
    _tensors: Vec<Borrowed>,
}

enum WideOrNarrow {
    Narrow(HopWorkspaces<u32>),
    Wide(HopWorkspaces<u64>),
}

/// Samplers of one graph, as many as ever sampled at the same time.
struct HopWorkspaces<W: esker_sample::StoredId> {
    graph: BorrowedCsc<'static, W>,
    settings: HopSettings,
    choice: NeighbourChoice,
    idle: Mutex<Vec<HopWorkspace<W>>>,
}

struct HopWorkspace<W: esker_sample::StoredId> {
    sampler: HopSampler<BorrowedCsc<'static, W>>,
    sample: HopSample,
}

/// Runs what uses many threads in a pool that ends with it: threads do not survive a fork, and workers are forked.
fn with_threads<T: Send>(work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let pool = rayon::ThreadPoolBuilder::new().build();
    Ok(pool.map_err(|error| PyRuntimeError::new_err(format!("no threads: {error}")))?.install(work))
}

/// Makes a borrow as long as the program.
///
/// # Safety
/// The caller keeps `tensor` until everything made of the result is gone.
unsafe fn forever(tensor: &Borrowed) -> &'static Borrowed {
    // SAFETY: the caller's promise.
    unsafe { &*std::ptr::from_ref(tensor) }
}

fn numbers(tensor: &'static Borrowed) -> PyResult<BorrowedNumbers<'static>> {
    match tensor.is::<i32>() {
        true => Ok(BorrowedNumbers::Narrow(tensor.slice()?)),
        false => Ok(BorrowedNumbers::Wide(tensor.slice()?)),
    }
}

/// What neighbours are chosen by, while it is read.
enum ChoiceColumn {
    None,
    Weights(Borrowed),
    NodeTimes(Borrowed, TemporalStrategy),
    EdgeTimes(Borrowed, TemporalStrategy),
}

impl ChoiceColumn {
    fn choice<W: esker_sample::StoredId>(&self, graph: &BorrowedCsc<'_, W>) -> PyResult<NeighbourChoice> {
        match self {
            ChoiceColumn::None => Ok(NeighbourChoice::Uniform),
            ChoiceColumn::Weights(weights) => {
                let column = match weights.is::<f32>() {
                    true => WeightColumn::F32(weights.slice()?),
                    false => WeightColumn::F64(weights.slice()?),
                };
                let weights = with_threads(|| EdgeWeights::new(graph, column, MOST_BYTES))?;
                Ok(NeighbourChoice::Weighted(Arc::new(weights.map_err(of_sampling)?)))
            }
            ChoiceColumn::NodeTimes(times, strategy) => {
                let times = times.slice()?;
                let times = with_threads(|| NeighbourTimes::of_nodes(graph, times, MOST_BYTES))?;
                Ok(NeighbourChoice::Temporal(Arc::new(times.map_err(of_sampling)?), *strategy))
            }
            ChoiceColumn::EdgeTimes(times, strategy) => {
                let times = times.slice()?;
                let times = with_threads(|| NeighbourTimes::of_edges(graph, times, MOST_BYTES))?;
                Ok(NeighbourChoice::Temporal(Arc::new(times.map_err(of_sampling)?), *strategy))
            }
        }
    }
}

impl<W: esker_sample::StoredId> HopWorkspaces<W> {
    fn new<I: BorrowedId<Stored = W>>(
        offsets: BorrowedNumbers<'static>,
        sources: &'static [I],
        edges: Option<BorrowedNumbers<'static>>,
        settings: HopSettings,
        column: &ChoiceColumn,
    ) -> PyResult<HopWorkspaces<W>> {
        let graph = with_threads(|| BorrowedCsc::new(offsets, sources, edges))?.map_err(of_sampling)?;
        let choice = column.choice(&graph)?;
        // Made now, so that what cannot be is refused now.
        let first =
            HopSampler::new(graph, settings.clone(), choice.clone(), MOST_BYTES).map_err(of_sampling)?;
        let idle = Mutex::new(vec![HopWorkspace { sampler: first, sample: HopSample::default() }]);
        Ok(HopWorkspaces { graph, settings, choice, idle })
    }

    /// Samples a batch and hands its arrays to `take`.
    fn sample<T>(
        &self,
        seed: u64,
        at: Position,
        seeds: &[NodeId],
        times: Option<&[i64]>,
        take: impl FnOnce(&mut HopSample) -> T,
    ) -> Result<T, SampleError> {
        // Nobody waits here: in a forked process, who holds the lock may not exist.
        let found = self.idle.try_lock().ok().and_then(|mut idle| idle.pop());
        let mut workspace = match found {
            Some(workspace) => workspace,
            None => {
                let sampler =
                    HopSampler::new(self.graph, self.settings.clone(), self.choice.clone(), MOST_BYTES)?;
                HopWorkspace { sampler, sample: HopSample::default() }
            }
        };
        workspace.sampler.set_seed(seed);
        // A sampler that panics is not used again.
        let result = workspace.sampler.sample(at, seeds, times, &mut workspace.sample);
        let taken = result.map(|()| take(&mut workspace.sample));
        if let Ok(mut idle) = self.idle.try_lock() {
            idle.push(workspace);
        }
        taken
    }
}

/// Node ids out of a tensor of either width.
fn node_ids(tensor: &Borrowed) -> PyResult<Vec<NodeId>> {
    fn ids<T: Copy + Into<i64>>(numbers: &[T]) -> PyResult<Vec<NodeId>> {
        let negative = |id: i64| {
            PyIndexError::new_err(format!(
                "seed {id} is not a node: ids are not negative; check the list of seeds"
            ))
        };
        let id =
            |number: &T| u64::try_from((*number).into()).map(NodeId).map_err(|_| negative((*number).into()));
        numbers.iter().map(id).collect()
    }
    match tensor.is::<i32>() {
        true => ids(tensor.slice::<i32>()?),
        false => ids(tensor.slice::<i64>()?),
    }
}

/// The arrays of a sample, in the types that Python wants.
fn columns(sample: &mut HopSample, narrow: bool) -> HopColumns {
    let nodes = std::mem::take(&mut sample.nodes);
    let edges = std::mem::take(&mut sample.edges);
    let count = sample.sources.len();
    // Local indices and node ids are below 2^31 wherever they are narrow.
    let (nodes, edge_index) = match narrow {
        true => (
            Column::flat(nodes.into_iter().map(|node| node.0 as i32).collect()),
            Column::new(both(&sample.sources, &sample.targets, |index| index as i32), vec![2, count]),
        ),
        false => (
            Column::flat(nodes),
            Column::new(both(&sample.sources, &sample.targets, |index| index as i64), vec![2, count]),
        ),
    };
    let trees = &sample.trees;
    let trees = (!trees.is_empty()).then(|| Column::flat(trees.iter().map(|tree| *tree as i64).collect()));
    let edges = Column::flat(edges);
    (nodes, edge_index, edges, trees, sample.nodes_by_hop.clone(), sample.edges_by_hop.clone())
}

fn both<T>(sources: &[u32], targets: &[u32], convert: impl Fn(u32) -> T) -> Vec<T> {
    sources.iter().chain(targets).map(|index| convert(*index)).collect()
}

fn fanout(number: i64) -> PyResult<Fanout> {
    match number {
        -1 => Ok(Fanout::All),
        0.. => Ok(Fanout::AtMost(u32::try_from(number).unwrap_or(u32::MAX))),
        _ => Err(PyValueError::new_err(format!(
            "num_neighbors: expected -1 for all neighbours, or a number of them, found {number}"
        ))),
    }
}

fn subgraph_edges(name: &str) -> PyResult<HopEdges> {
    match name {
        "directional" => Ok(HopEdges::Directional),
        "bidirectional" => Ok(HopEdges::Bidirectional),
        "induced" => Ok(HopEdges::Induced),
        other => Err(PyValueError::new_err(format!(
            "subgraph_type: expected directional, bidirectional or induced, found {other}"
        ))),
    }
}

fn strategy(name: &str) -> PyResult<TemporalStrategy> {
    match name {
        "uniform" => Ok(TemporalStrategy::Uniform),
        "last" => Ok(TemporalStrategy::Last),
        other => {
            Err(PyValueError::new_err(format!("temporal_strategy: expected uniform or last, found {other}")))
        }
    }
}

/// Options of a sampler besides its graph.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct HopOptions {
    num_neighbors: Vec<i64>,
    replace: bool,
    disjoint: bool,
    subgraph_type: String,
    temporal_strategy: String,
}

impl HopOptions {
    fn settings(&self) -> PyResult<HopSettings> {
        let fanouts = self.num_neighbors.iter().map(|number| fanout(*number)).collect::<PyResult<_>>()?;
        let edges = subgraph_edges(&self.subgraph_type)?;
        Ok(HopSettings { seed: 0, fanouts, replace: self.replace, disjoint: self.disjoint, edges })
    }
}

#[pymethods]
impl PyHops {
    /// Checks the adjacency, once. `perm` has the number of the edge of each entry; without it, entries are numbered. At most
    /// one of the last three is given: weights and times by edge, in the order of `edge_index`, or times by node.
    #[new]
    #[pyo3(signature = (colptr, row, perm, options, *, edge_weight = None, node_time = None, edge_time = None))]
    fn new(
        py: Python<'_>,
        colptr: &Bound<'_, PyAny>,
        row: &Bound<'_, PyAny>,
        perm: Option<&Bound<'_, PyAny>>,
        options: HopOptions,
        edge_weight: Option<&Bound<'_, PyAny>>,
        node_time: Option<&Bound<'_, PyAny>>,
        edge_time: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyHops> {
        let mut tensors = vec![Borrowed::take(colptr, "colptr")?, Borrowed::take(row, "row")?];
        if let Some(perm) = perm {
            tensors.push(Borrowed::take(perm, "perm")?);
        }
        let settings = options.settings()?;
        let strategy = strategy(&options.temporal_strategy)?;
        let column = match (edge_weight, node_time, edge_time) {
            (None, None, None) => ChoiceColumn::None,
            (Some(weight), None, None) => ChoiceColumn::Weights(Borrowed::take(weight, "edge weights")?),
            (None, Some(times), None) => {
                ChoiceColumn::NodeTimes(Borrowed::take(times, "node times")?, strategy)
            }
            (None, None, Some(times)) => {
                ChoiceColumn::EdgeTimes(Borrowed::take(times, "edge times")?, strategy)
            }
            _ => {
                return Err(PyValueError::new_err(
                    "neighbours are drawn by weight or by time, not by both; leave out 'weight_attr' or 'time_attr'",
                ));
            }
        };
        py.detach(|| PyHops::over(tensors, settings, &column))
    }

    /// Samples a batch: a function of the graph, the options, `seed`, `epoch`, `batch` and the seeds.
    #[pyo3(signature = (seeds, seed_time, seed, epoch, batch))]
    fn sample(
        &self,
        py: Python<'_>,
        seeds: &Bound<'_, PyAny>,
        seed_time: Option<&Bound<'_, PyAny>>,
        seed: u64,
        epoch: u64,
        batch: u64,
    ) -> PyResult<HopColumns> {
        let seeds = Borrowed::take(seeds, "seeds")?;
        let times = seed_time.map(|times| Borrowed::take(times, "seed_time")).transpose()?;
        let at = Position { epoch, batch };
        py.detach(|| {
            let seeds = node_ids(&seeds)?;
            let times = times.as_ref().map(|times| times.slice::<i64>()).transpose()?;
            let sampled = match &self.hops {
                WideOrNarrow::Narrow(hops) => {
                    hops.sample(seed, at, &seeds, times, |sample| columns(sample, true))
                }
                WideOrNarrow::Wide(hops) => {
                    hops.sample(seed, at, &seeds, times, |sample| columns(sample, false))
                }
            };
            sampled.map_err(of_sampling)
        })
    }
}

impl PyHops {
    fn over(tensors: Vec<Borrowed>, settings: HopSettings, column: &ChoiceColumn) -> PyResult<PyHops> {
        // SAFETY: the tensors move into the object that is returned, behind a `Vec` that never changes, and are dropped
        // after what reads them. If this fails, nothing that reads them is left.
        let lasting: Vec<&'static Borrowed> =
            tensors.iter().map(|tensor| unsafe { forever(tensor) }).collect();
        let offsets = numbers(lasting[0])?;
        let edges = lasting.get(2).map(|perm| numbers(perm)).transpose()?;
        let row = lasting[1];
        let hops = match row.is::<i32>() {
            true => WideOrNarrow::Narrow(HopWorkspaces::new(
                offsets,
                row.slice::<i32>()?,
                edges,
                settings,
                column,
            )?),
            false => {
                WideOrNarrow::Wide(HopWorkspaces::new(offsets, row.slice::<i64>()?, edges, settings, column)?)
            }
        };
        Ok(PyHops { hops, _tensors: tensors })
    }
}

/// Adds what this file offers.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyHops>()?;
    module.add_class::<Column>()?;
    Ok(())
}
